"""What is searched: for every recipe the values that its keys may take. No torch.

A recipe's `tune` section says what may change. `draft.k` and `length.policy` may change in every recipe that drafts,
and `verify.rule` where it samples, whether it says so or not; where it does, its own values stand. A combination that
gives no valid recipe is not part of the space, so what is searched is asked of the recipes and never listed here by
method. Other options of the draft make another drafter, with its own price and its own drafts: recipes that may change
them are taken apart into one recipe a setting. So are cascades into one recipe an order, since a source is priced with
those it is asked after: `tune: {draft.first_of: {choices: ["suffix, ngram", "ngram, suffix"]}}`. Without that, the
sources that may have nothing to say are tried in every order, ahead of the first that always drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, permutations, product
from typing import Any

from specflow.errors import GraphError, RecipeError
from specflow.graph import DecodeGraph
from specflow.length import POLICIES
from specflow.recipe import Recipe, parse_recipe, recipe_data
from specflow.recipe_draft import CombinedSection, FirstOfSection, SourceSection, in_order, part_names
from specflow.recipe_sections import TuneRange
from specflow.recipe_yaml import Document
from specflow.rules import RULE_INFOS

__all__ = [
    "POLICY",
    "RULE",
    "UNTIL",
    "Candidate",
    "K",
    "Knob",
    "Space",
    "Value",
    "applied",
    "knobs_of",
    "own_settings",
    "variants",
]

Value = bool | int | float | str | None
K, POLICY, RULE, UNTIL = "draft.k", "length.policy", "verify.rule", "length.until"
MIN_MATCH = "draft.min_match"
SWITCHES = {POLICY: "length", RULE: "verify"}
"""Keys that choose a section: another value comes with its own options at their defaults."""
MOST_VARIANTS = 12
MOST_ORDERS = 6
"""Of a cascade that names none: each is profiled and traced."""
DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
LEAST_DEPTH = 8
"""A drafter that goes token by token may be tried this deep, whatever k its recipe has."""
SEARCHED = ("length.", "verify.")
"""Keys that may change within a drafter, beside its k."""
TRIED: Mapping[str, tuple[float, ...]] = {"length.threshold": (0.3, 0.5, 0.7)}
"""Values of options of length policies that are tried where a recipe names none."""
LONG_MATCH = 3
"""A recipe that copies after longer matches only is tried with matches of SHORT_MATCH too: it may never fire."""
SHORT_MATCH = 2
STEPS = 8
"""Values of a range of numbers that names no step, where it is listed."""


@dataclass(frozen=True, slots=True)
class Knob:
    """One key and the values it may take."""

    key: str
    choices: tuple[Value, ...]
    only_with: str | None = None  # the length policy that has this key; None: every recipe


@dataclass(frozen=True, slots=True)
class Candidate:
    """A recipe with some keys set."""

    recipe: str  # name; vanilla is the candidate without settings of a recipe without a draft
    settings: tuple[tuple[str, Value], ...] = ()

    @classmethod
    def of(cls, recipe: str, settings: Mapping[str, Value]) -> Candidate:
        return cls(recipe, tuple(sorted(settings.items())))

    @property
    def values(self) -> dict[str, Value]:
        return dict(self.settings)

    @property
    def k(self) -> int:
        """Draft tokens of a round at most; 0 is plain decoding."""
        k = self.values.get(K, 0)
        assert isinstance(k, int)
        return k

    @property
    def policy(self) -> str:
        return str(self.values.get(POLICY, "fixed"))

    @property
    def label(self) -> str:
        """As tables and plots name it."""
        if not self.settings:
            return self.recipe
        rest = [f"{key.rpartition('.')[2]} {value}" for key, value in self.settings if key not in (K, POLICY)]
        return " ".join([self.recipe, f"K={self.k}", *([] if self.policy == "fixed" else [self.policy]), *rest])


def applied(recipe: Recipe, settings: Mapping[str, Value]) -> Recipe:
    """The recipe with these keys set; another policy or rule comes with its own options at their defaults.

    The key of a combination (`draft.first_of`) puts its parts in the order of their names, after all other keys.

    Raises:
        RecipeError: That is no valid recipe.
        GraphError: Its parts do not fit together.
    """
    if not settings:
        return recipe
    document = Document(recipe.name or "recipe", recipe_data(recipe.model_copy(update={"tune": {}})))
    for key, section in SWITCHES.items():
        option = key.rpartition(".")[2]
        if settings.get(key, now := getattr(getattr(recipe, section), option)) != now:
            document.set(section, {option: settings[key]}, "tune")
    order = _order_key(recipe)
    for key, value in settings.items():
        if key not in SWITCHES and key != order:
            document.set(key, value, "tune")
    made = parse_recipe(document.data, recipe.name or "recipe")
    if order in settings and isinstance(made.draft, CombinedSection):
        made = made.model_copy(update={"draft": in_order(made.draft, str(settings[order]))})
    DecodeGraph.from_recipe(made).check()
    return made


def knobs_of(recipe: Recipe) -> tuple[Knob, ...]:
    """What may change in a recipe: its `tune` section, and depth, length policy and rule where that is silent."""
    if recipe.draft is None or recipe.draft.k == 0:
        return ()
    said = {key: _listed(values) for key, values in recipe.tune.items() if key == K or key.startswith(SEARCHED)}
    rules = _rules(recipe)
    found = {K: _depths(recipe), POLICY: _policies(recipe)} | ({RULE: rules} if len(rules) > 1 else {}) | said
    found = {**{key: _tried(recipe, key) for key in TRIED if _owner(key, found) is not None}, **found}
    return tuple(Knob(key, values, _owner(key, found)) for key, values in found.items())


def variants(recipe: Recipe) -> dict[str, Recipe]:
    """A recipe taken apart: one recipe for every setting of the draft's options, k left out.

    Raises:
        RecipeError: There are too many, each of which would have to be priced and traced; or its `tune` section has
            keys that no search changes.
    """
    if stray := [key for key in recipe.tune if not key.startswith(("draft.", *SEARCHED))]:
        raise RecipeError(f"{recipe.name}: tune.{stray[0]}", "a key that is not searched", "draft, length or verify")
    of_draft = {key: _listed(values) for key, values in recipe.tune.items() if key.startswith("draft.") and key != K}
    if isinstance(recipe.draft, FirstOfSection) and len(orders := _orders(recipe.draft)) > 1:
        of_draft.setdefault(_order_key(recipe), orders)
    if (shortest := _long_match(recipe)) is not None:
        of_draft.setdefault(MIN_MATCH, (shortest, SHORT_MATCH))
    if recipe.draft is None or not of_draft:
        return {recipe.name: recipe}
    rest = {key: values for key, values in recipe.tune.items() if key not in of_draft}
    found: dict[str, Recipe] = {}
    for values in product(*of_draft.values()):
        settings = dict(zip(of_draft, values, strict=True))
        if _valid(recipe, settings):
            label = " ".join([recipe.name, *(f"{key.rpartition('.')[2]}={value}" for key, value in settings.items())])
            found[label] = applied(recipe, settings).model_copy(update={"name": label, "tune": rest})
    if len(found) > MOST_VARIANTS:
        hint = "narrow the tune section of the recipe"
        raise RecipeError(f"{recipe.name}: tune", f"{len(found)} drafters to try", f"at most {MOST_VARIANTS}", hint)
    return found


def _tried(recipe: Recipe, key: str) -> tuple[Value, ...]:
    """The recipe's own value of an option of its length policy, and those that are tried anyway, in order."""
    own = getattr(recipe.length, key.rpartition(".")[2], None)
    return tuple(sorted({*TRIED[key]} | ({own} if own is not None else set())))


def _long_match(recipe: Recipe) -> int | None:
    """The shortest match of a recipe that copies, where it is so long that drafts may never come."""
    part = recipe.draft if isinstance(recipe.draft, SourceSection) else None
    shortest = getattr(part, "min_match", 0) if part is not None and "match_lengths" in part.info.offers else 0
    return shortest if shortest > LONG_MATCH else None


def _order_key(recipe: Recipe) -> str:
    """The key under which a combination's order is set; "" where there is none."""
    return f"draft.{recipe.draft.policy}" if isinstance(recipe.draft, CombinedSection) else ""


def _orders(draft: FirstOfSection) -> tuple[str, ...]:
    """Orders of a cascade that may differ: of the parts before the first that always drafts; its own comes first.

    A source that copies text has nothing to say where nothing matches; a network always drafts, and whoever comes after
    it is never asked.
    """
    names = part_names(draft)
    silent = ["match_lengths" in part.info.offers for part in draft.parts]
    count = silent.index(False) if False in silent else len(names)
    found = [", ".join((*order, *names[count:])) for order in permutations(names[:count])]
    return tuple(found) if len(found) <= MOST_ORDERS else (", ".join(names),)


def own_settings(recipe: Recipe) -> dict[str, Value]:
    """The values that a recipe itself gives its knobs."""
    data = recipe_data(recipe, full=True)
    found: dict[str, Value] = {}
    for knob in knobs_of(recipe):
        if knob.only_with in (None, recipe.length.policy):
            value = _looked_up(data, knob.key)
            found[knob.key] = value if value is None or isinstance(value, bool | int | float | str) else str(value)
    return found


def _looked_up(data: Any, key: str) -> Any:
    for part in key.split("."):
        data = data.get(part) if isinstance(data, Mapping) else data[int(part)] if isinstance(data, tuple) else None
    return data


def _owner(key: str, found: Mapping[str, tuple[Value, ...]]) -> str | None:
    """The one policy of those searched that has this option of the length section."""
    section, _, option = key.partition(".")
    if section != "length" or key == POLICY:
        return None
    owners = [str(name) for name in found[POLICY] if option in POLICIES[str(name)].config.model_fields]
    return owners[0] if len(owners) == 1 else None


def _depths(recipe: Recipe) -> tuple[Value, ...]:
    """Where all positions are filled at once, a drafter goes no deeper than it was made for."""
    assert recipe.draft is not None
    at_once = any(part.dependency.startswith("parallel") for part in recipe.draft.parts)
    most = recipe.draft.k if at_once else max(recipe.draft.k, LEAST_DEPTH)
    return tuple(depth for depth in sorted({*DEPTHS, recipe.draft.k}) if depth <= most)


def _policies(recipe: Recipe) -> tuple[Value, ...]:
    """The recipe's own policy, a fixed length, and each other one that its drafts offer something to."""
    found = [recipe.length.policy]
    for name in POLICIES:
        if name not in found and _valid(recipe, {POLICY: name}):
            found.append(name)
    return tuple(found)


def _rules(recipe: Recipe) -> tuple[Value, ...]:
    """Rules that keep the law of the text; without chance they all accept the same, and nothing is to choose."""
    if recipe.sampling.temperature == 0.0:
        return ()
    others = [name for name, info in RULE_INFOS.items() if not info.lossy and name != recipe.verify.rule]
    return (recipe.verify.rule, *(name for name in others if _valid(recipe, {RULE: name})))


def _valid(recipe: Recipe, settings: Mapping[str, Value]) -> bool:
    try:
        applied(recipe, settings)
    except (RecipeError, GraphError):
        return False
    return True


def _listed(values: TuneRange) -> tuple[Value, ...]:
    """The values of a range, its ends among them."""
    if values.choices is not None:
        return values.choices
    assert values.low is not None
    assert values.high is not None
    low, high = values.low, values.high
    whole = isinstance(low, int) and isinstance(high, int)
    step = values.step or (max(1, round((high - low) / STEPS)) if whole else (high - low) / STEPS)
    if not step:
        return (low,)
    steps = [low + step * number for number in range(int((high - low) / step + 1e-9) + 1)]
    listed = [round(each, 10) for each in steps] if not whole else [int(each) for each in steps]
    return tuple(dict.fromkeys((*listed, high)))


class Space:
    """All candidates of some recipes.

    Args:
        recipes: By name. Those without a draft are plain decoding and have no knobs.
    """

    def __init__(self, recipes: Mapping[str, Recipe]) -> None:
        self.recipes = dict(recipes)
        self.knobs = {name: knobs_of(recipe) for name, recipe in recipes.items()}
        self._made: dict[Candidate, Recipe | None] = {}

    def candidate(self, recipe: str, values: Mapping[str, Value]) -> Candidate:
        """A candidate from more values than it may use: options of other length policies are left out."""
        policy = values.get(POLICY, self.recipes[recipe].length.policy)
        used = {
            knob.key: values[knob.key]
            for knob in self.knobs[recipe]
            if knob.key in values and knob.only_with in (None, policy)
        }
        return Candidate.of(recipe, used)

    def recipe(self, candidate: Candidate) -> Recipe | None:
        """The candidate as a recipe that runs; None where its values do not go together."""
        if candidate not in self._made:
            try:
                self._made[candidate] = applied(self.recipes[candidate.recipe], candidate.values)
            except (RecipeError, GraphError):
                self._made[candidate] = None
        return self._made[candidate]

    @property
    def size(self) -> int:
        """Combinations of values, those that do not go together included."""
        total = 0
        for knobs in self.knobs.values():
            count = 1
            for knob in knobs:
                count *= len(knob.choices)
            total += count if knobs else 0
        return total

    def listed(self, most: int) -> list[Candidate]:
        """Every valid candidate that drafts, each once, by recipe; at most so many combinations are looked at."""
        found: dict[Candidate, None] = {}
        for candidate in islice(self._all(), most):
            if candidate not in found and self.recipe(candidate) is not None:
                found[candidate] = None
        return list(found)

    def _all(self) -> Iterator[Candidate]:
        for name, knobs in self.knobs.items():
            if knobs:
                keys: Sequence[str] = [knob.key for knob in knobs]
                for values in product(*(knob.choices for knob in knobs)):
                    yield self.candidate(name, dict(zip(keys, values, strict=True)))

"""What is searched: for every recipe the values that its keys may take. No torch.

A recipe's `tune` section says what may change. `draft.k` and `length.policy` may change in every recipe that drafts,
and `verify.rule` where it samples, whether it says so or not; where it does, its own values stand. A combination that
gives no valid recipe is not part of the space, so what is searched is asked of the recipes and never listed here by
method. Other options of the draft make another drafter, with its own price and its own drafts: recipes that may change
them are taken apart into one recipe a setting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

from specflow.errors import GraphError, RecipeError
from specflow.graph import DecodeGraph
from specflow.length import POLICIES
from specflow.recipe import Recipe, parse_recipe, recipe_data
from specflow.recipe_sections import TuneRange
from specflow.recipe_yaml import Document
from specflow.rules import RULE_INFOS

__all__ = [
    "POLICY",
    "RULE",
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
K, POLICY, RULE = "draft.k", "length.policy", "verify.rule"
SWITCHES = {POLICY: "length", RULE: "verify"}
"""Keys that choose a section: another value comes with its own options at their defaults."""
MOST_VARIANTS = 12
DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
LEAST_DEPTH = 8
"""A drafter that goes token by token may be tried this deep, whatever k its recipe has."""
SEARCHED = ("length.", "verify.")
"""Keys that may change within a drafter, beside its k."""
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
    for key, value in settings.items():
        if key not in SWITCHES:
            document.set(key, value, "tune")
    made = parse_recipe(document.data, recipe.name or "recipe")
    DecodeGraph.from_recipe(made).check()
    return made


def knobs_of(recipe: Recipe) -> tuple[Knob, ...]:
    """What may change in a recipe: its `tune` section, and depth, length policy and rule where that is silent."""
    if recipe.draft is None or recipe.draft.k == 0:
        return ()
    said = {key: _listed(values) for key, values in recipe.tune.items() if key == K or key.startswith(SEARCHED)}
    rules = _rules(recipe)
    found = {K: _depths(recipe), POLICY: _policies(recipe)} | ({RULE: rules} if len(rules) > 1 else {}) | said
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

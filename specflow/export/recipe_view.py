"""A recipe in words that any engine has: what drafts, how many tokens, from which weights, by which rule. No torch.

`view_of(recipe)` makes the view, a `Ledger` keeps account of what an engine could take over, so that what it could not
is complete: every key of the recipe that nobody ticked off becomes a `Gap`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specflow.draft.shipped import drafter_path
from specflow.export.drafter_facts import DrafterFacts, facts_of
from specflow.export.engines.base import NO_DRAFTER, Gap
from specflow.recipe import recipe_data
from specflow.target.store import HUB_IDS

if TYPE_CHECKING:
    from specflow.cost import CostModel
    from specflow.recipe import Recipe
    from specflow.recipe_draft import SourceSection
    from specflow.types import Sampling

__all__ = ["DraftView", "Ledger", "RecipeView", "Step", "view_of"]

CONTEXT = 1024
"""Committed tokens of each row for which costs are read, where nobody says otherwise."""

CARRIED = "runtime.costs"

SILENT = ("name", "description", "tune")
"""Keys that say nothing about decoding."""

OF_NETWORKS = frozenset(
    {
        "num_heads", "num_kv_heads", "head_width", "mlp_size", "eps", "rope_theta", "max_positions", "num_layers",
        "taps", "mask_token", "layer_types", "window", "window_from", "causal", "draft_vocab_size", "own_head",
        "own_heads", "logit_scale", "logit_cap", "block_size", "layout", "corrector", "corrector_rank", "variant",
        "bias", "norm_before_fc", "fc_norm", "norm_before_residual", "norm_output", "num_modules", "unrolled",
        "order", "hidden", "recycle", "zero_first", "offset_norms", "confidence_head", "dependency", "rope_scaling",
    }
)  # fmt: skip
"""Draft options that a checkpoint's own config.json says to other engines."""

INSTEAD = {
    "target.implementation": "the engine has its own",
    "target.runtime": "the engine is the runtime",
    "target.device": "the engine takes the accelerators it sees",
    "target.threads": "the engine chooses its threads",
    "target.row_invariant": "speculation and plain decoding may differ where two tokens are nearly tied",
    CARRIED: "a profile: written where the engine has a place for schedules and tables",
    "runtime.prefill_chunk": "the engine cuts prompts as its scheduler likes",
    "length": "every round drafts k tokens",
    "sampling.speculate": "every request speculates; launch without speculation for plain decoding",
    "draft.seed": "random weights are for plumbing; the engine needs a trained drafter",
    "draft.runtime": "the engine computes the drafter",
}
"""What engines do about keys that none of them has; an engine's own words go first."""


@dataclass(frozen=True, slots=True)
class Step:
    """Draft tokens for a range of batch sizes, both ends included. The bonus token is not one of them."""

    low: int
    high: int
    k: int  # 0: plain decoding


@dataclass(frozen=True, slots=True)
class DraftView:
    """One source of drafts.

    Attributes:
        at: Where it stands in the recipe: "draft", or "draft.first_of.0".
        family: Its method where it has one (ngram, suffix, small_model, medusa, mtp, eagle, eagle2, eagle3, dflash,
            dspark, layer_skip, early_exit), else its source.
        k: Most draft tokens of a round; the bonus token is not one of them.
        path: Local folder or file, absolute, or hub id of its weights or its model; None where it has none.
        options: The source's options, defaults too.
        facts: What the weights' own config.json says, where they are a local folder; else what their name says.
    """

    at: str
    family: str
    k: int
    path: str | None
    options: Mapping[str, Any]
    facts: DrafterFacts

    @property
    def shape(self) -> str:
        """chain, static, beam, best_first or sampled."""
        return str(self.options.get("shape", "chain"))

    @property
    def is_chain(self) -> bool:
        return self.shape == "chain"

    @property
    def nodes(self) -> int:
        """Most draft tokens a round submits: k of a chain, or the nodes of the tree."""
        return self.k if self.is_chain else int(self.options["nodes"])

    @property
    def match(self) -> tuple[int, int]:
        """Shortest and longest match of a draft from history."""
        shortest = int(self.options["min_match"])
        usual = 4 if self.options["index"] == "ngram" else 64
        return shortest, int(self.options["max_match"] or max(usual, shortest))

    @property
    def place(self) -> str:
        """What stands for its weights in a command."""
        return self.path or NO_DRAFTER

    def key(self, name: str) -> str:
        """Dotted key of one of its options."""
        return f"{self.at}.{name}"


@dataclass(frozen=True, slots=True)
class RecipeView:
    """A recipe without this project's words.

    Attributes:
        recipe: The recipe itself, for what is asked rarely.
        target: Hub id, or local folder or file, absolute, of the target, as other engines take it.
        drafts: Sources of drafts in order of priority; () decodes plainly.
        combined: "first_of" or "merge" where there are several sources.
        said: Dotted key -> value of all that the recipe says about decoding.
        costs: Measured seconds, where a profile was given.
        schedule: Draft tokens by batch size, as measured; () where nothing was measured. Ranges follow each other from
            batch 1 on; beyond the last nothing was measured.
        context: Committed tokens of each row for which costs are read.
    """

    recipe: Recipe
    target: str
    drafts: tuple[DraftView, ...]
    combined: str | None
    said: Mapping[str, Any]
    costs: CostModel | None = None
    schedule: tuple[Step, ...] = ()
    context: int = CONTEXT

    @property
    def name(self) -> str:
        return self.recipe.name or "recipe"

    @property
    def k(self) -> int:
        """Most draft tokens of a round, whoever drafts; 0 decodes plainly."""
        return self.recipe.draft.k if self.drafts and self.recipe.draft is not None else 0

    @property
    def rule(self) -> str:
        """match, rejection, block or typical."""
        return self.recipe.verify.rule

    @property
    def policy(self) -> str:
        """fixed, additive, match, threshold, confidence or expected_gain."""
        return self.recipe.length.policy

    @property
    def sampling(self) -> Sampling:
        return self.recipe.sampling

    @property
    def greedy(self) -> bool:
        return self.recipe.sampling.temperature == 0.0


def view_of(
    recipe: Recipe, costs: CostModel | None = None, schedule: Sequence[Step] = (), context: int = CONTEXT
) -> RecipeView:
    """The view of a recipe.

    Args:
        recipe: The recipe.
        costs: What `specflow profile` measured.
        schedule: Draft tokens by batch size (see `batch_schedule`).
        context: Committed tokens of each row for which costs are read.
    """
    section = recipe.draft
    policy = getattr(section, "policy", None)
    parts = () if section is None or section.k == 0 else section.parts
    places = [f"draft.{policy}.{number}" if policy else "draft" for number in range(len(parts))]
    usual = [item for part, at in zip(parts, places, strict=True) for item in _usual(part, at)]
    return RecipeView(
        recipe=recipe,
        target=_place_of(recipe.target.model),
        drafts=tuple(_draft_view(part, at) for part, at in zip(parts, places, strict=True)),
        combined=policy if parts else None,
        said={key: value for key, value in _said(recipe) if (key, value) not in usual},
        costs=costs,
        schedule=tuple(schedule),
        context=context,
    )


def _draft_view(part: SourceSection, at: str) -> DraftView:
    options = {name: getattr(part, name) for name in part.info.config.model_fields}
    is_model = part.info.axis == "small_model"
    name = options.get("model") if is_model else options.get(part.info.checkpoint)
    path = None if name is None else _place_of(name, drafter_path) if is_model else _place(name, drafter_path)
    family = part.method or part.source
    return DraftView(at, family, part.k, path, options, facts_of(path, family))


def _place_of(model: str, find: Callable[[str], Path] = Path) -> str:
    """What other engines call a language model."""
    return HUB_IDS.get(model) or _place(model, find)


def _place(name: str, find: Callable[[str], Path]) -> str:
    """An absolute path, wherever the engine is started from; a hub id, or what is not there, as it is."""
    try:
        path = find(name).expanduser()
        return str(path.absolute()) if path.exists() else name
    except (OSError, RuntimeError, ValueError):  # too long, the home of nobody, or no name of a file at all
        return name


def _usual(part: SourceSection, at: str) -> Iterator[tuple[str, Any]]:
    """Options of a source that say what they say by default: where there are weights, recipes write them out."""
    for name, info in part.info.config.model_fields.items():
        yield f"{at}.{name}", info.get_default(call_default_factory=True)


def _said(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """What the recipe says that is not a default, and what every recipe says."""
    data = recipe_data(recipe)
    yield "target.model", recipe.target.model
    if recipe.draft is not None:
        yield "draft.k", recipe.draft.k
        yield "verify.rule", recipe.verify.rule
        yield "length.policy", recipe.length.policy
    yield "sampling.temperature", recipe.sampling.temperature
    yield "sampling.max_new_tokens", recipe.sampling.max_new_tokens
    for name, value in data.items():
        if name not in SILENT:
            yield from _leaves(name, value)


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if key == CARRIED:
        yield key, "measured seconds"
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _leaves(f"{key}.{name}", each)
    elif isinstance(value, list | tuple) and value and all(isinstance(each, Mapping) for each in value):
        for number, each in enumerate(value):
            yield from _leaves(f"{key}.{number}", each)
    else:
        yield key, value


@dataclass
class Ledger:
    """Account of what an engine takes over of a recipe. What is neither ticked off nor explained is a gap by itself."""

    view: RecipeView
    _settled: set[str] = field(default_factory=set)
    _gaps: list[Gap] = field(default_factory=list)

    def says(self, *keys: str) -> None:
        """The engine's configuration says what these keys, or all keys below them, say."""
        self._settled.update(keys)

    def lacks(self, key: str, instead: str, value: Any = None) -> None:
        """The engine cannot do what this key, and all keys below it, say.

        Args:
            key: Dotted key.
            instead: What happens in its place.
            value: What the recipe means by it, where it does not say it itself.
        """
        self._settled.add(key)
        known = self.view.said.get(key, value)
        self._gaps.append(Gap(key if known is None else f"{key}: {_word(known)}", instead))

    def gaps(self) -> tuple[Gap, ...]:
        """All that is not expressible: what was said to be, and all that nobody settled."""
        rest = [key for key in self.view.said if not self._is_settled(key)]
        return (*self._gaps, *(Gap(f"{key}: {_word(self.view.said[key])}", self._instead(key)) for key in rest))

    def _is_settled(self, key: str) -> bool:
        parts = key.split(".")
        return any(".".join(parts[:length]) in self._settled for length in range(1, len(parts) + 1))

    def _instead(self, key: str) -> str:
        option = key.rpartition(".")[2]
        if key.startswith("draft.") and option in OF_NETWORKS:
            return "not in the command: the engine reads the drafter's own config.json, which must say the same"
        section = key.partition(".")[0]
        known = INSTEAD.get(key) or INSTEAD.get(f"{section}.{option}") or INSTEAD.get(section)
        return known or "left out: the engine has no such option"


def _word(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)

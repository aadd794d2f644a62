"""The drafters of recipes as a trace records them: one by one, as deep as asked, with all the confidence they have."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from specflow.build import build_drafter
from specflow.draft.checkpoint import read_options
from specflow.draft.shapes import ShapeOptions
from specflow.errors import GraphError
from specflow.graph import DecodeGraph
from specflow.recipe_draft import CombinedSection, FirstOfSection, SourceSection, draft_data
from specflow.recipe_sections import length_sections, verify_sections
from specflow.sampling import is_greedy
from tuner.forcing import Watchable
from tuner.replay_types import DrafterInfo

if TYPE_CHECKING:
    from specflow.build import LoadedTarget
    from specflow.draft.base import Drafter
    from specflow.recipe import Recipe
    from specflow.recipe_draft import DraftSection

__all__ = ["TracedDrafter", "deepest", "law_drafter", "no_deeper", "open_drafter", "parts_of"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TracedDrafter:
    """A drafter that is about to be recorded."""

    info: DrafterInfo
    drafter: Drafter
    recipe: Recipe  # its section alone, at full depth, for another one that draws from its own law


@runtime_checkable
class _Blocks(Protocol):
    """Options of a network whose passes fill blocks of a width."""

    def slots(self, k: int) -> int: ...


def parts_of(name: str, recipe: Recipe) -> dict[str, DraftSection]:
    """Names and sections of what is recorded of a recipe: the parts of a cascade apart, anything else whole."""
    draft = recipe.draft
    if draft is None or draft.k == 0:
        return {}
    if not isinstance(draft, FirstOfSection):
        return {name: draft}
    return {f"{name}.{number}": part for number, part in enumerate(draft.parts)}


def deepest(recipe: Recipe, k: int | None) -> int:
    """How deep a recipe's drafters are recorded: as asked, else as deep as it drafts or may be tuned to draft."""
    if k is not None or recipe.draft is None:
        return k or 0
    ends = recipe.tune["draft.k"].ends if "draft.k" in recipe.tune else ()
    return max([recipe.draft.k, *(int(end) for end in ends if isinstance(end, int | float))])


def no_deeper(recipe: Recipe, k: int) -> Recipe:
    """A recipe that drafts no deeper than it was recorded."""
    if recipe.draft is None or recipe.draft.k <= k:
        return recipe
    return recipe.model_copy(update={"draft": _at(recipe.draft, k)})


def open_drafter(name: str, section: DraftSection, recipe: Recipe, loaded: LoadedTarget, k: int) -> TracedDrafter:
    """Build a drafter for recording, `k` deep or, where it cannot go so deep, as deep as its recipe says.

    Raises:
        GraphError: Its drafts depend on earlier requests, or it does not fit the target.
        CheckpointError: Its weights do not fit.
    """
    _check_memory(name, section)
    rule = verify_sections()["match"].model_validate({})
    policy = length_sections()["expected_gain"].model_validate({})  # makes use of any confidence there is
    alone = recipe.model_copy(update={"draft": _at(section, k), "verify": rule, "length": policy})
    DecodeGraph.from_recipe(recipe).check(loaded.facts)
    try:
        drafter = build_drafter(alone, loaded)
    except GraphError as error:
        if k <= section.k or error.where != "draft.k":
            raise
        log.warning("%s is recorded up to k = %d: %s", name, section.k, error)
        return open_drafter(name, section, recipe, loaded, section.k)
    assert drafter is not None
    info = _info(name, alone, drafter, loaded)
    return TracedDrafter(info, drafter, alone)


def law_drafter(traced: TracedDrafter, loaded: LoadedTarget) -> Drafter:
    """The same drafter once more, drawing from its own law: for rules that weigh it."""
    rule = verify_sections()["rejection"].model_validate({})
    drafter = build_drafter(traced.recipe.model_copy(update={"verify": rule}), loaded)
    assert drafter is not None
    return drafter


def _at(section: DraftSection, k: int) -> DraftSection:
    """A section of another depth; parts of a combination follow where they followed before."""
    changes: dict[str, Any] = {"k": k}
    if isinstance(section, CombinedSection):
        changes[section.policy] = tuple(
            part.model_copy(update={"k": k if part.k == section.k else min(part.k, k)}) for part in section.parts
        )
    return section.model_copy(update=changes)


def _check_memory(name: str, section: DraftSection) -> None:
    for part in section.parts:
        remembers = part.info.remembers
        if remembers is not None and getattr(part, remembers):
            found = f"{remembers}: true, with which drafts depend on the requests that came before"
            hint = "what a position's draft is would depend on the order of the workload; trace it without"
            raise GraphError(f"{name}: draft.{remembers}", found, f"{remembers}: false", hint)


def _info(name: str, alone: Recipe, drafter: Drafter, loaded: LoadedTarget) -> DrafterInfo:
    section = alone.draft
    assert section is not None
    source = section.parts[0].info
    k = section.k if drafter.branches else min(section.k, drafter.num_nodes)
    sampled = not is_greedy(alone.sampling) and isinstance(drafter, Watchable) and source.law == "sampled"
    return DrafterInfo(
        name=name,
        section=draft_data(section, full=False),
        k=k,
        tree=drafter.branches,
        sampled=sampled and (not drafter.branches or _draws(section)),
        confidence_from=None,
        matches="match_lengths" in source.offers and not drafter.branches,
        exact_k=tuple(
            depth for depth in range(1, section.k + 1) if _same_at(section, depth, loaded.target.info.vocab_size)
        ),
    )


def _draws(section: DraftSection) -> bool:
    """Whether the nodes of its trees are drawn at random where requests sample."""
    return any(getattr(part, "shape", "chain") == "sampled" for part in section.parts)


def _same_at(section: DraftSection, k: int, vocab_size: int) -> bool:
    """Whether a drafter built for k drafts what this one does when it is asked for k."""
    return all(_part_same_at(part, k, vocab_size) for part in section.parts)


def _part_same_at(part: SourceSection, k: int, vocab_size: int) -> bool:
    options = part.options
    options = read_options(options, getattr(options, "weights", None))
    if isinstance(options, _Blocks) and options.slots(min(k, part.k)) != options.slots(part.k):
        return False  # a block of another width is another pass
    if not isinstance(options, ShapeOptions) or options.shape != "static":
        return True
    whole = options.static_paths(part.k, vocab_size)
    return options.static_paths(min(k, part.k), vocab_size) == tuple(path for path in whole if len(path) <= k)

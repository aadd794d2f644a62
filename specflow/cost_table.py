"""Measured costs inside a recipe: `runtime.costs`, as `specflow tune` writes it. No torch.

A tuned recipe carries what its length policy weighs, so that it decides wherever it runs as it did where it was tuned,
on the same kind of machine; on another one the table is refused like any profile.
"""

from __future__ import annotations

import hashlib
import json
import logging
from typing import TYPE_CHECKING

from specflow.cost import CostModel, ProfileKey, Timing
from specflow.errors import RecipeError
from specflow.measure import Spread
from specflow.recipe_sections import CostsSection

if TYPE_CHECKING:
    from collections.abc import Iterable

    from specflow.build import LoadedTarget
    from specflow.recipe import Recipe

__all__ = ["carried_costs", "costs_section", "model_of"]

log = logging.getLogger(__name__)


def costs_section(key: ProfileKey, model: CostModel) -> CostsSection:
    """A cost model as a recipe carries it; seconds are rounded to four digits."""
    return CostsSection(
        target=dict(key.target),
        draft=_digest(key),
        machine=dict(key.machine),
        passes=_lines(model.target),
        drafts=_lines(model.draft),
        own_blocks=_lines(model.own_blocks),
        overhead=_lines(model.overhead),
        nodes={str(depth): count for depth, count in model.nodes.items()},
    )


def model_of(section: CostsSection) -> CostModel:
    """The cost model that a recipe carries.

    Raises:
        RecipeError: A line cannot be read.
    """
    if not section.passes:
        raise RecipeError("runtime.costs.passes", "no line", "at least one timing of the target")
    return CostModel(
        target=_timings("passes", section.passes),
        draft=_timings("drafts", section.drafts),
        own_blocks=_timings("own_blocks", section.own_blocks),
        overhead=_timings("overhead", section.overhead),
        nodes={int(depth): count for depth, count in section.nodes.items()},
    )


def carried_costs(recipe: Recipe, loaded: LoadedTarget) -> CostModel | None:
    """The costs in a recipe, where they belong to what is loaded on this machine; None where it carries none.

    A table of another target, draft or machine is not used, and the log says why.

    Raises:
        RecipeError: The table cannot be read.
    """
    section = recipe.runtime.costs
    if section is None:
        return None
    here = ProfileKey.of(recipe, loaded.target.info)
    facts = here.differences(ProfileKey(section.target, here.draft, section.machine))
    if section.draft != _digest(here):
        facts.append("they belong to another draft section")
    if facts:
        log.warning("runtime.costs of %s are not used: %s", recipe.name or "the recipe", "; ".join(facts))
        return None
    return model_of(section)


def _digest(key: ProfileKey) -> str | None:
    if key.draft is None:
        return None
    return hashlib.sha256(json.dumps(key.draft, sort_keys=True).encode()).hexdigest()[:10]


def _lines(timings: Iterable[Timing]) -> tuple[str, ...]:
    found = []
    for each in timings:
        spread = each.seconds
        seconds = " ".join(f"{value:.4g}" for value in (spread.median, spread.p25, spread.p75))
        found.append(f"{each.size} {each.batch} {each.context} {seconds} {spread.count}")
    return tuple(found)


def _timings(table: str, lines: tuple[str, ...]) -> tuple[Timing, ...]:
    return tuple(_timing(table, number, line) for number, line in enumerate(lines))


def _timing(table: str, number: int, line: str) -> Timing:
    try:
        size, batch, context, median, p25, p75, count = line.split()
        timing = Timing(int(size), int(batch), int(context), Spread(float(median), float(p25), float(p75), int(count)))
        sound = timing.size >= 0 and timing.batch >= 1 and timing.context >= 0
        if not sound or not 0 <= timing.seconds.median < float("inf"):
            raise ValueError("a figure is out of range")
        if table == "passes" and not timing.seconds.median > 0:
            raise ValueError("a pass takes time")
    except ValueError as error:
        expected = "size, batch, context, median, p25, p75 seconds and repeats, between spaces"
        raise RecipeError(f"runtime.costs.{table}.{number}", f"{line!r}: {error}", expected) from error
    return timing

"""What all readers of engine configurations share: a recipe put together, and findings about schedules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from specflow.export.engines.base import NO_DRAFTER, Finding
from specflow.export.recipe_view import Step

__all__ = ["check_left", "check_schedule", "drafter", "recipe_of"]

NOBODYS = ("m", "config", "extra-llm-api-options", "extra_llm_api_options", "host", "port")
"""Settings that say nothing of decoding."""


def recipe_of(
    target: Mapping[str, Any], draft: Mapping[str, Any] | None, **sections: Mapping[str, Any]
) -> dict[str, Any]:
    """Plain data of a recipe; sections that say nothing stay away.

    Args:
        target: Target section.
        draft: Draft section; None decodes plainly.
        sections: verify, length, sampling, runtime.
    """
    name = (
        str(draft["method"]) if draft is not None and "method" in draft else "vanilla" if draft is None else "combined"
    )
    found: dict[str, Any] = {"name": name, "target": dict(target), **({} if draft is None else {"draft": dict(draft)})}
    drafting = {"verify", "length"} if draft is None else set()
    found |= {key: dict(value) for key, value in sections.items() if value and key not in drafting}
    return {key: value for key, value in found.items() if value}


def drafter(path: str | None) -> str | None:
    """The path of a drafter; None for the word that stands for one."""
    return None if path == NO_DRAFTER else path


def check_left(names: Iterable[str], where: str) -> Iterator[Finding]:
    """Settings that were read by nobody: they are no part of a recipe, and that is said.

    Args:
        names: Their names.
        where: What they are settings of.
    """
    left = [name for name in names if name.strip("-") not in NOBODYS]
    if left:
        yield Finding("note", where, ", ".join(sorted(left)), "no part of a recipe: not taken over")


def check_schedule(steps: Sequence[Step], k: int, where: str) -> Iterator[Finding]:
    """A batch schedule as it was read: longer drafts for larger batches are mostly keys read upside down.

    Args:
        steps: Ranges in order.
        k: Draft tokens without the schedule.
        where: Flag or key.
    """
    said = ", ".join(f"{step.k} at {step.low} to {step.high}" for step in steps)
    if any(later.k > earlier.k for earlier, later in pairwise(steps)):
        meaning = "larger batches get longer drafts, the opposite of what pays: the keys were probably meant otherwise"
        yield Finding("warning", where, said, meaning, "see what a key means in this version: a lower or an upper end")
    if over := [step.k for step in steps if step.k > k]:
        yield Finding("warning", where, f"{max(over)} draft tokens", f"above the {k} of every round: it gets {k}")
    meaning = "a recipe has no such table: length.policy expected_gain chooses by what `specflow profile` measures"
    yield Finding("note", where, said, meaning)

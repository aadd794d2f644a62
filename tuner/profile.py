"""The cost models of a run: measured once, kept with the machine's fingerprint, reused only where it matches.

The target's passes are the same for every recipe, so they are timed once; each drafter adds its drafts, the passes over
its own blocks and its overhead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from specflow.cost import CostModel
from specflow.errors import DataError

__all__ = ["MOST_DOUBTS", "Profiled", "measured_twice", "with_target"]

MOST_DOUBTS = 0.25
"""A profile of which more than this share of the timings cannot be trusted is refused."""


@dataclass(frozen=True, slots=True)
class Profiled:
    """A cost model, and what is not to be trusted of it."""

    model: CostModel
    doubts: tuple[str, ...] = ()


def measured_twice(name: str, measure: Callable[[int], CostModel], trust_noise: bool = False) -> Profiled:
    """A cost model that can be trusted: where timings spread too wide, they are measured again with more repeats.

    Args:
        name: What is measured, for errors.
        measure: Measures with 1 or 2 times the usual repeats.
        trust_noise: Take what was measured, whatever its spread.

    Raises:
        DataError: The machine is too noisy: too many timings spread too wide both times.
    """
    model = measure(1)
    if not model.trusted:
        again = measure(2)
        model = min((model, again), key=lambda each: len(list(each.doubts())))
    doubts = tuple(model.doubts())
    if len(doubts) > MOST_DOUBTS * _num_timings(model) and not trust_noise:
        raise DataError(
            f"profile of {name}",
            f"{len(doubts)} of {_num_timings(model)} timings spread too wide to be trusted, such as {doubts[0]}",
            "a quiet machine",
            "stop what else runs here; --trust-noise takes them as they are",
        )
    return Profiled(model, doubts)


def with_target(drafts: CostModel, target: CostModel) -> CostModel:
    """The model of a drafter with the target's passes from another profile of the same machine.

    Plain steps keep the target's overhead, so that every recipe is compared with the same plain decoding.
    """
    plain = tuple(timing for timing in target.overhead if timing.size == 0)
    drafting = tuple(timing for timing in drafts.overhead if timing.size > 0)
    return replace(drafts, target=target.target, overhead=(*plain, *drafting))


def _num_timings(model: CostModel) -> int:
    return sum(len(table) for table in (model.target, model.draft, model.own_blocks, model.overhead))

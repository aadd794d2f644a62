"""Clocks, acceptance figures and spreads.

Every figure that the toolkit prints comes from here, with its formula beside it, so that two verbs cannot disagree.
K excludes the bonus token throughout; position 1 is the first draft token of a block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

from specflow.types import Counts, Timings

__all__ = [
    "Clock",
    "ContextRate",
    "PositionRate",
    "Spread",
    "acceptance_by_context",
    "acceptance_by_position",
    "acceptance_length",
    "check_counts",
    "cliff",
    "context_bucket",
    "draft_acceptance_rate",
    "merge_counts",
    "metrics",
    "pooled",
    "quantile",
    "spread",
]


FIRST_CONTEXT = 512  # tokens of the first range of contexts
CLIFF_REACHED, CLIFF_HELD, CLIFF_SHARE = 20, 0.3, 0.15
"""A position counts when it was reached this often; it falls off a cliff when acceptance at the one before was at least
CLIFF_HELD and its own is at most this share of that."""


class Clock:
    """Splits a request's time into the fields of `Timings`, one reading of the counter a lap.

    A lap charges all time since the previous reading to one field, so spans never overlap and nothing between them is
    lost. It reads the host's counter and waits for no device: on an accelerator, work is charged to the lap in which
    the host waits for its result.
    """

    __slots__ = ("_last", "_timings")

    def __init__(self, timings: Timings) -> None:
        self._timings = timings
        self._last = perf_counter()

    def mark(self) -> float:
        """Begin a lap here; the time since the last reading is charged to nobody. Returns the reading."""
        self._last = now = perf_counter()
        return now

    def lap(self, span: str) -> float:
        """Add the seconds since the last reading to `span`, a field of `Timings`. Returns the reading."""
        now = perf_counter()
        timings = self._timings
        setattr(timings, span, getattr(timings, span) + now - self._last)
        self._last = now
        return now


@dataclass(frozen=True, slots=True)
class PositionRate:
    """Acceptance at one draft position, with the counts it stands on.

    conditional = accepted / reached: how often the token held, given that all tokens before it held.
    unconditional = accepted / spec_steps: how often a round that drafted anything got this far; it also falls where the
    position was not drafted. Both are None ("unobserved", never "rejected") where their denominator is empty.
    """

    position: int  # from 1
    drafted: int
    reached: int
    accepted: int
    conditional: float | None
    unconditional: float | None


@dataclass(frozen=True, slots=True)
class ContextRate:
    """Acceptance of rounds that began within a range of context lengths: drafters lose touch as texts grow."""

    context_from: int
    context_to: int  # exclusive
    rounds: int  # that drafted
    acceptance_length: float  # 1 + accepted / rounds


def context_bucket(context: int) -> int:
    """Number of the range a context length falls into: 0-511, 512-1023, 1024-2047, 2048-4095, ..."""
    return (context // FIRST_CONTEXT).bit_length()


def acceptance_by_context(counts: Counts) -> list[ContextRate]:
    """Acceptance length of every range of contexts in which something was drafted."""
    rates = []
    for bucket, (rounds, accepted) in enumerate(zip(counts.rounds_by_context, counts.accepted_by_context, strict=True)):
        if rounds:
            begin = FIRST_CONTEXT << bucket - 1 if bucket else 0
            rates.append(ContextRate(begin, FIRST_CONTEXT << bucket, rounds, 1.0 + accepted / rounds))
    return rates


def cliff(counts: Counts) -> int | None:
    """The position after which acceptance all but ends, where the one before it still held; None where none does.

    Such a cliff is no property of text: windows ignored by the drafter, a block drafted wider than it was trained for,
    or positions off by some (published reports: 0.8, 0.7, 0.6, 0.6, 0.0).
    """
    rates = [rate for rate in acceptance_by_position(counts) if rate.reached >= CLIFF_REACHED]
    for before, after in pairwise(rates):
        held, holds = before.conditional, after.conditional
        if held is not None and holds is not None and held >= CLIFF_HELD and holds <= held * CLIFF_SHARE:
            return before.position
    return None


def check_counts(counts: Counts) -> None:
    """Assert what every count must satisfy, so that no rate leaves [0, 1].

    accepted_at <= reached_at <= drafted_at <= num_spec_steps <= num_rounds, and a position is reached at most as often
    as the one before it was accepted.
    """
    assert 0 <= counts.num_accepted_draft_tokens <= counts.num_draft_tokens, counts
    assert 0 <= counts.num_spec_steps <= counts.num_rounds, counts
    assert len(counts.drafted_at) == len(counts.reached_at) == len(counts.accepted_at), counts
    assert sum(counts.accepted_at) == counts.num_accepted_draft_tokens, counts
    assert sum(counts.rounds_by_context) in (0, counts.num_spec_steps), counts
    before = counts.num_spec_steps
    for drafted, reached, accepted in zip(counts.drafted_at, counts.reached_at, counts.accepted_at, strict=True):
        assert 0 <= accepted <= reached <= drafted <= counts.num_spec_steps, counts
        assert reached <= before, counts
        before = accepted


def acceptance_by_position(counts: Counts) -> list[PositionRate]:
    """Conditional and unconditional acceptance of every position that was ever drafted."""
    check_counts(counts)
    rates = []
    rows = zip(counts.drafted_at, counts.reached_at, counts.accepted_at, strict=True)
    for index, (drafted, reached, accepted) in enumerate(rows):
        conditional = accepted / reached if reached else None
        unconditional = accepted / counts.num_spec_steps if drafted else None
        rates.append(PositionRate(index + 1, drafted, reached, accepted, conditional, unconditional))
    return rates


def acceptance_length(counts: Counts) -> float | None:
    """tau = 1 + accepted / rounds, the bonus token included; 1.0 is plain decoding, None without a decode round."""
    return 1.0 + counts.num_accepted_draft_tokens / counts.num_rounds if counts.num_rounds else None


def draft_acceptance_rate(counts: Counts) -> float | None:
    """accepted / drafted; None where nothing was drafted."""
    return counts.num_accepted_draft_tokens / counts.num_draft_tokens if counts.num_draft_tokens else None


def metrics(counts: Counts) -> dict[str, Any]:
    """Per-request figures under vLLM's names, and the counts behind them.

    mean_acceptance_length             1 + accepted / rounds, over all decode rounds (a round without a draft gives 1)
    mean_acceptance_length_when_drafted  1 + accepted / spec_steps: vLLM's denominator, rounds that verified a draft
    draft_acceptance_rate              accepted / drafted
    acceptance_histogram               {j: rounds with a draft that accepted exactly j tokens}
    num_spec_tokens                    deepest position drafted
    acceptance_by_position             see PositionRate
    acceptance_by_context              see ContextRate
    cliff_after                        see `cliff`

    Rates are None where nothing was drafted: unobserved, not zero.
    """
    check_counts(counts)
    reached = [counts.num_spec_steps, *counts.accepted_at, 0]
    steps = counts.num_spec_steps
    accepted = counts.num_accepted_draft_tokens
    return {
        "mean_acceptance_length": acceptance_length(counts),
        "mean_acceptance_length_when_drafted": 1.0 + accepted / steps if steps else None,
        "draft_acceptance_rate": draft_acceptance_rate(counts),
        "acceptance_histogram": {
            str(j): reached[j] - reached[j + 1] for j in range(len(reached) - 1) if reached[j] > reached[j + 1]
        },
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": counts.num_draft_tokens,
        "num_spec_tokens": len(counts.drafted_at),
        "num_rounds": counts.num_rounds,
        "num_draft_calls": counts.num_draft_calls,
        "num_generated_tokens": counts.num_generated_tokens,
        "acceptance_by_position": [dataclasses.asdict(rate) for rate in acceptance_by_position(counts)],
        "acceptance_by_context": [dataclasses.asdict(rate) for rate in acceptance_by_context(counts)],
        "cliff_after": cliff(counts),
    }


def merge_counts(many: Iterable[Counts]) -> Counts:
    """Counts of several requests as one; positions are added where both have them."""
    total = Counts()
    for counts in many:
        for item in dataclasses.fields(Counts):
            mine, theirs = getattr(total, item.name), getattr(counts, item.name)
            if isinstance(mine, list):
                width = max(len(mine), len(theirs))
                padded = (values + [0] * (width - len(values)) for values in (mine, list(theirs)))
                setattr(total, item.name, [a + b for a, b in zip(*padded, strict=True)])
            else:
                setattr(total, item.name, mine + theirs)
    return total


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of a sample."""

    median: float
    p25: float
    p75: float
    count: int


def quantile(values: Sequence[float], share: float) -> float | None:
    """The value below which this share of a sample lies, linear between order statistics; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Sequence[float]) -> Spread | None:
    """Median with p25 and p75; None of nothing."""
    low, high = quantile(values, 0.25), quantile(values, 0.75)
    return None if low is None or high is None else Spread(float(median(values)), low, high, len(values))


def pooled(parts: Iterable[tuple[float, float]]) -> float | None:
    """Sum of the firsts over sum of the seconds, so that long texts weigh more; None where the seconds sum to nothing.

    All tokens over all seconds is the rate of a run; all tokens over all passes is its acceptance length.
    """
    known = list(parts)
    below = sum(second for _, second in known)
    return sum(first for first, _ in known) / below if below else None

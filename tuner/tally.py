"""Counts and seconds of walks over a trace, by the engine's own rules: what comes after a stop is not counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from specflow.measure import context_bucket, merge_counts
from specflow.types import Counts
from tuner.replay_types import ReplayConfig, ReplayedRequest, ReplayResult

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tuner.recorded import Trace
    from tuner.walk import Walk

    Numbers = NDArray[Any]

__all__ = ["Spent", "result_of"]


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of rounds, which all rows of a round share.  # [R] each"""

    draft_s: Numbers
    target_s: Numbers
    other_s: Numbers

    @property
    def total_s(self) -> Numbers:
        return self.draft_s + self.target_s + self.other_s


@dataclass(frozen=True, slots=True)
class _Booked:
    """What requests' rounds count for.  # [Q] each"""

    seen: Numbers  # draft positions up to the end of the text
    nodes: Numbers  # draft tokens, likewise
    accepted: Numbers
    kept: Numbers  # tokens committed
    context: Numbers  # committed tokens when the round began, the anchor counted


def result_of(
    config: ReplayConfig, trace: Trace, walks: Sequence[tuple[Walk, Spent]], numbers: Sequence[int]
) -> ReplayResult:
    """All draws of a configuration, added up.

    Args:
        config: The configuration.
        trace: The trace.
        walks: Rounds of each draw, and what they cost.
        numbers: Requests that take part.
    """
    counts, requests = [], []
    draft_s = target_s = other_s = 0.0
    for walk, spent in walks:
        mine = _counted(config, trace, walk, numbers)
        booked = _book(trace, walk, mine)
        counts.append(_counts(booked, walk.decided["asked"][mine], len(numbers)))
        rounds = np.unique(walk.round[mine])
        draft_s += float(spent.draft_s[rounds].sum())
        target_s += float(spent.target_s[rounds].sum())
        other_s += float(spent.other_s[rounds].sum())
        requests.extend(_requests(trace, booked, (walk.at[mine], spent.total_s[walk.round[mine]]), numbers))
    whole = counts[0] if len(counts) == 1 else merge_counts(counts)
    seconds = draft_s + target_s + other_s
    return ReplayResult(config, whole, seconds, draft_s, target_s, other_s, tuple(requests))


def _counted(config: ReplayConfig, trace: Trace, walk: Walk, numbers: Sequence[int]) -> Numbers:
    """Which rounds of requests count.  # [Q] bool"""
    counted = np.ones(len(walk.at), dtype=bool)
    if len(numbers) < len(trace.requests):
        counted &= np.isin(trace.request[walk.at], np.array(numbers))
    if config.contexts is not None:
        context = trace.context[walk.at]
        counted &= (config.contexts[0] <= context) & (context < config.contexts[1])
    return counted


def _book(trace: Trace, walk: Walk, mine: Numbers) -> _Booked:
    at, decided = walk.at[mine], {name: values[mine] for name, values in walk.decided.items()}
    left, depth = trace.left[at], decided["verified"]
    kept = np.minimum(decided["accepted"] + 1, left)
    finished = decided["accepted"] + 1 >= left
    seen = np.where(finished, np.minimum(depth, kept), depth)
    accepted = np.minimum(decided["accepted"], kept)
    return _Booked(seen, decided["nodes"] - (depth - seen), accepted, kept, trace.context[at] + 1)


def _counts(booked: _Booked, asked: Numbers, num_requests: int) -> Counts:
    drafting = booked.seen > 0
    seen, accepted = booked.seen[drafting], booked.accepted[drafting]
    deepest = int(seen.max(initial=0))
    buckets = _buckets(booked.context[drafting])
    return Counts(
        num_rounds=len(booked.seen),
        num_spec_steps=len(seen),
        num_draft_calls=int(asked.sum()),
        num_draft_tokens=int(booked.nodes[drafting].sum()),
        num_accepted_draft_tokens=int(accepted.sum()),
        num_generated_tokens=int(booked.kept.sum()) + num_requests,
        drafted_at=_more_than(seen, deepest),
        reached_at=_more_than(np.minimum(seen, accepted + 1), deepest),
        accepted_at=_more_than(accepted, deepest),
        rounds_by_context=np.bincount(buckets).tolist(),
        accepted_by_context=np.bincount(buckets, accepted).astype(np.int64).tolist(),
    )


def _more_than(values: Numbers, deepest: int) -> list[int]:
    """How many values are above 0, 1, ... deepest - 1."""
    found: list[int] = np.bincount(values, minlength=deepest + 1)[::-1].cumsum()[::-1][1 : deepest + 1].tolist()
    return found


def _buckets(contexts: Numbers) -> Numbers:
    """`context_bucket` of each."""
    return _bucket_table(int(contexts.max(initial=0)).bit_length())[contexts]


@lru_cache
def _bucket_table(bits: int) -> Numbers:
    """Of every context of so many bits."""
    return np.array([context_bucket(context) for context in range(1 << bits)], dtype=np.int64)


def _requests(
    trace: Trace, booked: _Booked, rounds: tuple[Numbers, Numbers], numbers: Sequence[int]
) -> list[ReplayedRequest]:
    """Each request's share, in the order of the trace.

    Args:
        trace: The trace.
        booked: Rounds of requests.
        rounds: Their positions and seconds.  # [Q] twice
        numbers: Requests that take part.
    """
    at, seconds = rounds
    owner = trace.request[at]
    order = np.argsort(owner, kind="stable")
    begins = np.searchsorted(owner[order], np.array(numbers)).tolist()
    ends = np.searchsorted(owner[order], np.array(numbers), side="right").tolist()
    pairs = list(zip(booked.nodes[order].tolist(), booked.accepted[order].tolist(), strict=True))
    total = np.bincount(owner, seconds, len(trace.requests)).tolist()
    kept = np.bincount(owner, booked.kept, len(trace.requests)).astype(np.int64).tolist()
    return [
        ReplayedRequest(
            request=number,
            category=trace.requests[number].category,
            context=trace.requests[number].prompt_tokens,
            tokens=kept[number] + 1,
            rounds=tuple(pairs[begin:end]),
            seconds=total[number],
        )
        for number, begin, end in zip(numbers, begins, ends, strict=True)
    ]

"""Rounds over a trace: from an anchor to the next, as far as what was drafted there agrees with the text."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tuner.recorded import Trace

    Numbers = NDArray[Any]

__all__ = ["Decided", "Decider", "Walk", "packed", "step_by_step", "straight"]


class Decided(NamedTuple):
    """What one row does in one round."""

    drafted: int = 0  # deepest position drafted
    verified: int = 0  # deepest position of what the target scores
    nodes: int = 0  # tokens it scores
    accepted: int = 0
    served: int = 0  # number of the drafter among those of the configuration
    asked: bool = False  # there was a budget


class Decider(Protocol):
    """Decides what the rows of a batch draft. The rest is as in `length.LengthPolicy`."""

    def reset(self, batch: int) -> None: ...

    def start(self, row: int) -> None: ...

    def select(self, rows: Sequence[int]) -> None: ...

    def decide(self, positions: Sequence[int]) -> list[Decided]:
        """One round of a batch whose rows are at these positions."""


@dataclass(frozen=True, slots=True)
class Walk:
    """Rounds of all requests.

    Rows share rounds where requests are decoded together: `round` leads from what a request did to the round it did
    it in.
    """

    at: Numbers  # [Q] position of each request's round
    decided: dict[str, Numbers]  # field of `Decided` -> [Q]
    round: Numbers  # [Q]
    batch: Numbers  # [R] rows of each round


@dataclass(slots=True)
class _Notes:
    at: list[int] = field(default_factory=list)
    decided: list[Decided] = field(default_factory=list)
    round: list[int] = field(default_factory=list)
    batch: list[int] = field(default_factory=list)


def straight(trace: Trace, decided: dict[str, Numbers], numbers: Sequence[int], concurrency: int) -> Walk:
    """Where what is done at a position follows from the position alone: from one to the next.

    Args:
        trace: The trace.
        decided: By position.  # [P] each
        numbers: Requests, in the order of the trace.
        concurrency: Most rows of a round.
    """
    count = trace.num_positions
    following = np.minimum(np.arange(count) + decided["accepted"] + 1, trace.ends).tolist()
    path, at = [], 0
    while at < count:
        path.append(at)
        at = following[at]
    where = np.array(path, dtype=np.int64)
    if len(numbers) < len(trace.requests):
        where = where[np.isin(trace.request[where], np.array(numbers))]
    return packed(trace, where, {name: values[where] for name, values in decided.items()}, numbers, concurrency)


def packed(trace: Trace, at: Numbers, decided: dict[str, Numbers], numbers: Sequence[int], concurrency: int) -> Walk:
    """Requests share rounds: one that waits takes the first row that is free.

    Args:
        trace: The trace.
        at: Positions, request by request.  # [Q]
        decided: # [Q] each
        numbers: Requests, in the order in which they come.
        concurrency: Most rows of a round.
    """
    if concurrency == 1:
        return Walk(at, decided, np.arange(len(at)), np.ones(len(at), dtype=np.int64))
    owners = trace.request[at]
    lengths = np.bincount(owners, minlength=len(trace.requests))
    free = [0] * min(concurrency, len(numbers))
    heapify(free)
    begins = np.zeros(len(trace.requests), dtype=np.int64)
    for number in numbers:
        begins[number] = free[0]
        heapreplace(free, free[0] + int(lengths[number]))
    firsts = np.cumsum(lengths) - lengths
    rounds = begins[owners] + np.arange(len(at)) - firsts[owners]
    return Walk(at, decided, rounds, np.bincount(rounds))


def step_by_step(trace: Trace, decider: Decider, numbers: Sequence[int], concurrency: int) -> Walk:
    """Requests decoded together, as the engine does it: finished ones leave, waiting ones take their rows.

    Args:
        trace: The trace.
        decider: Told of rows as the engine tells a length policy.
        numbers: Requests, in the order in which they come.
        concurrency: Most rows.
    """
    notes, waiting = _Notes(), deque(numbers)
    batch = min(concurrency, len(numbers))
    rows: list[list[int]] = []  # position and end of each row
    decider.reset(batch)
    while waiting or rows:
        row = next((row for row in range(batch) if row >= len(rows) or rows[row][0] >= rows[row][1]), batch)
        if waiting and row < batch:
            request = trace.requests[waiting.popleft()]
            rows[row : row + 1] = [[request.first, request.end]]
            decider.start(row)
            continue
        live = [row for row, (at, end) in enumerate(rows) if at < end]
        if live and len(live) < batch:
            decider.select(live)
        batch, rows = len(live), [rows[row] for row in live]
        if rows:
            _round(notes, rows, decider)
    table = np.array(notes.decided, dtype=np.int64).reshape(-1, len(Decided._fields))
    decided = dict(zip(Decided._fields, table.T, strict=True))
    where = (np.array(each, dtype=np.int64) for each in (notes.at, notes.round, notes.batch))
    at, rounds, batches = where
    return Walk(at, decided, rounds, batches)


def _round(notes: _Notes, rows: Sequence[list[int]], decider: Decider) -> None:
    found = decider.decide([at for at, _ in rows])
    for row, each in zip(rows, found, strict=True):
        notes.at.append(row[0])
        notes.decided.append(each)
        notes.round.append(len(notes.batch))
        row[0] += each.accepted + 1
    notes.batch.append(len(rows))

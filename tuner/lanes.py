"""Many requests of many configurations, each in a lane of its own, one round of all of them after another.

Lanes know nothing of each other: that is so where the rows of a batch share no decision. A step of the walk is a few
operations over all lanes: look up what was drafted where each of them is, let the length policy say how much of it is
drafted and verified, go on. Policies have a second form for it, over lanes in place of rows, which decides what the
engine's own decides, number by number (tests/tuner/test_lanes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from tuner.walk import Decided, Walk, packed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from specflow.length import LengthPolicy
    from tuner.deciders import Setting

    Numbers = NDArray[Any]

__all__ = ["Drafted", "Ground", "LanePolicy", "MakePolicy", "Part", "Slot", "walk_lanes"]

SHRINK = 0.75
"""Lanes that have ended are taken out when fewer than this share of all goes on."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One configuration, or one draw of it: it has a lane for each of its requests."""

    setting: Setting
    policy: LengthPolicy  # the engine's own, for its k and its options
    numbers: Sequence[int]  # requests, in the order in which they come
    concurrency: int


class Drafted(NamedTuple):
    """What lanes draft in a round and what the target is to verify of it.  # [L] each"""

    depth: Numbers  # deepest position drafted
    verified: Numbers  # deepest position of what the target scores
    nodes: Numbers  # tokens it scores
    accepted: Numbers
    served: Numbers  # number of the drafter among those of the configuration

    def where(self, here: Numbers, other: Drafted) -> Drafted:
        """This here, another elsewhere.  # [L] bool"""
        return Drafted(*(np.where(here, one, two) for one, two in zip(self, other, strict=True)))


class LanePolicy(Protocol):
    """A length policy whose rows are lanes. Limits only fall along a request: a lane without one never drafts again."""

    def budget(self, at: Numbers, reach: Numbers) -> Numbers:
        """Most draft tokens of each lane.

        Args:
            at: Position of each lane.  # [L]
            reach: Most that it can use, k at most; 0 for a lane that has ended.  # [L]
        """

    def most(self, number: int, at: Numbers, tokens: Numbers) -> Numbers:
        """Of that budget, what one drafter may use.  # [L]"""

    def cut(self, at: Numbers, drafted: Drafted) -> Drafted:
        """What is left of the draft."""

    def observe(self, drafted: Drafted) -> None:
        """What became of the round."""

    def select(self, live: Numbers) -> None:
        """Keep only these lanes, in this order."""


class Part:
    """One drafter, as the slots of a walk use it: tables by slot and position, one after another.

    Args:
        number: Among those of a configuration.
        slots: They differ in how deep they ask it, and in how chance fell.
        reach: Most draft tokens of each slot at each position.  # [S, P]
    """

    def __init__(self, number: int, slots: Sequence[Slot], reach: Numbers) -> None:
        each = [slot.setting.served[number] for slot in slots]
        self.number, self.served = number, each[0]
        deep = np.minimum(reach, np.array([[served.k] for served in each]))
        drafts = self.served.drafts
        self._most = (deep if self.served.tree else np.minimum(deep, drafts.length)).ravel()
        self._apart = self.served.weighed  # chance fell otherwise for every slot
        self._agree = np.concatenate([served.agree for served in each]) if self._apart else self.served.agree

    def draft(self, at: Numbers, flat: Numbers, most: Numbers) -> Drafted:
        """The draft within a budget.

        Args:
            at: Position of each lane.  # [L]
            flat: That, in tables by slot and position.  # [L]
            most: Draft tokens.  # [L]
        """
        depth, drafts = np.minimum(self._most.take(flat), most), self.served.drafts
        served = np.zeros(len(at), dtype=np.int64) + self.number if self.number else np.zeros(len(at), dtype=np.int64)
        if not self.served.tree:
            accepted = np.minimum(self._agree.take(flat if self._apart else at), depth)
            return Drafted(depth, depth, depth, accepted, served)
        assert drafts.nodes is not None
        column, some = np.maximum(depth - 1, 0), depth > 0
        depth, nodes, agree = (table[at, column] * some for table in (drafts.length, drafts.nodes, self._agree))
        return Drafted(depth, depth, nodes, np.minimum(agree, depth), served)


class Ground:
    """What lanes of some slots look up.

    Args:
        slots: Of one trace and the same drafters, under rules that weigh the law of the same ones.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots, self.trace = slots, slots[0].setting.trace
        self.policies: list[Any] = [slot.policy for slot in slots]  # with the options of their own kind
        self.deepest = max(policy.k for policy in self.policies)
        reach = np.array([np.minimum(slot.setting.limit, slot.policy.k) for slot in slots])
        self.reach = reach.ravel()
        self.parts = tuple(Part(number, slots, reach) for number in range(len(slots[0].setting.served)))

    def draft(self, at: Numbers, flat: Numbers, policy: LanePolicy, tokens: Numbers) -> Drafted:
        """The draft of the first drafter that has one."""
        first, *rest = (part.draft(at, flat, policy.most(part.number, at, tokens)) for part in self.parts)
        if not rest:
            return first
        for found in rest:
            first = first.where(first.nodes > 0, found)
        return first._replace(served=first.served * (first.nodes > 0))


class _Step(NamedTuple):
    """One round of all lanes.  # [L] each"""

    lane: Numbers
    at: Numbers
    live: Numbers
    tokens: Numbers
    drafted: Drafted


MakePolicy = Callable[[Ground, "Numbers"], LanePolicy]
"""A policy for lanes: what they look up, and the slot of each.  # [L]"""


def walk_lanes(slots: Sequence[Slot], make: MakePolicy) -> list[Walk]:
    """Rounds of each slot.

    Args:
        slots: See `Ground`.
        make: Their policy.
    """
    ground = Ground(slots)
    slot = np.repeat(np.arange(len(slots)), [len(each.numbers) for each in slots])
    requests = [ground.trace.requests[number] for each in slots for number in each.numbers]
    found = [request for request in zip(slot.tolist(), requests, strict=True) if request[1].first < request[1].end]
    slot = np.array([number for number, _ in found], dtype=np.int64)
    first = np.array([request.first for _, request in found], dtype=np.int64)
    last = np.array([request.end - 1 for _, request in found], dtype=np.int64)
    steps = _steps(ground, make(ground, slot), slot, first, last) if found else []
    return _walks(slots, slot, steps)


def _steps(ground: Ground, policy: LanePolicy, slot: Numbers, at: Numbers, last: Numbers) -> list[_Step]:
    """Every lane from its first position to its last."""
    steps, lane, base = [], np.arange(len(at)), slot * ground.trace.num_positions
    live, alive = np.ones(len(at), dtype=bool), len(at)
    while alive:
        if alive < SHRINK * len(at):
            kept = np.flatnonzero(live)
            policy.select(kept)
            lane, base, at, last, live = (each[kept] for each in (lane, base, at, last, live))
        flat = base + at
        tokens = policy.budget(at, ground.reach.take(flat) * live)
        drafted = policy.cut(at, ground.draft(at, flat, policy, tokens))
        policy.observe(drafted)
        steps.append(_Step(lane, at, live, tokens, drafted))
        following = at + drafted.accepted + 1
        live = following <= last
        at = np.minimum(following, last)
        alive = int(np.count_nonzero(live))
    return steps


def _walks(slots: Sequence[Slot], slot: Numbers, steps: Sequence[_Step]) -> list[Walk]:
    """The steps of all lanes, taken apart by slot.

    Args:
        slots: # S of them
        slot: Of each lane.  # [L]
        steps: Where lanes were in the end still go through their motions: what is not live is no round.
    """
    trace = slots[0].setting.trace
    if not steps:
        nothing = {name: np.zeros(0, dtype=np.int64) for name in Decided._fields}
        return [packed(trace, np.zeros(0, dtype=np.int64), nothing, each.numbers, each.concurrency) for each in slots]
    live = np.flatnonzero(np.concatenate([step.live for step in steps]))
    at = np.concatenate([step.at for step in steps])[live]
    key = slot[np.concatenate([step.lane for step in steps])[live]] * trace.num_positions + at
    order = np.argsort(key)
    bounds = np.searchsorted(key[order], np.arange(len(slots) + 1) * trace.num_positions).tolist()
    places, at = live[order], at[order]
    columns = [np.concatenate(each)[places] for each in zip(*(step.drafted for step in steps), strict=True)]
    asked = np.concatenate([step.tokens for step in steps])[places] > 0
    decided = dict(zip(Decided._fields, (*columns, asked), strict=True))
    walks = []
    for each, begin, end in zip(slots, bounds, bounds[1:], strict=False):
        mine = {name: values[begin:end] for name, values in decided.items()}
        walks.append(packed(trace, at[begin:end], mine, each.numbers, each.concurrency))
    return walks

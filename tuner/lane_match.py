"""The length policy of history sources over lanes: what each lane learnt of each class of match, and its caps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from specflow.length_match import (
    CLASS_OF,
    FIRM,
    GOES_ON,
    KEEP,
    LONGEST,
    MOST_WAITS,
    NUM_CLASSES,
    SHORTEST,
    best_length,
)
from tuner.lane_counts import StatefulLanes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tuner.lane_prices import LanePrices
    from tuner.lanes import Drafted, Ground, Part

    Numbers = NDArray[Any]

__all__ = ["MatchLanes"]

CLASSES = np.array(CLASS_OF)
TIE = 1.0 - 1e-14
"""Rates closer than this are left to the policy's own sums, whose rounding decides."""


class MatchLanes(StatefulLanes):
    """See `specflow.length.ByMatch`.

    Args:
        ground: What the lanes look up.
        slot: Of each lane.  # [L]
        prices: Of rounds of one row; None for those that the options name.
    """

    state = ("_lane_slot", "_probe", "_seen", "_waits", "_resume", "_judged", "_place")

    def __init__(self, ground: Ground, slot: Numbers, prices: LanePrices | None) -> None:
        super().__init__(ground, slot)
        policies, deepest = ground.policies, ground.deepest
        self._lane_slot, self._probe = slot, self.option(lambda policy: policy.config.probe)
        self._places = None if prices is None else prices.place  # of positions; prices go by slot where there are none
        self._prices = _plain(prices.round_s(deepest)) if prices else _padded(policies, deepest)  # [U, K + 1]
        self._place, self._at = slot, np.zeros_like(slot)
        self._reaches = np.array([policy.reaches for policy in policies]).ravel()  # [S * 8]
        depths = np.arange(deepest + 1)
        self._beyond = np.where(depths > depths[:, None], -np.inf, 0.0)  # by reach
        self._path = CLASSES[np.minimum(np.array(SHORTEST)[:, None] + depths[:-1], LONGEST[-1])]  # [8, K]
        self._copies = {part.number: _Copies(part, policies) for part in ground.parts if part.served.copies}
        self._seen = np.tile(np.array([[FIRM, FIRM * chance] for chance in GOES_ON]), (len(slot), 1, 1))  # tries, wins
        self._waits = np.repeat(self._probe[:, None], NUM_CLASSES, axis=1)
        self._resume, self._round = self._waits.copy(), 0
        self._judged = np.full_like(slot, -1)  # class of the last draft, until the next round
        self._chances = np.tile(GOES_ON, (len(slot), 1))  # of a match of each class to go on

    def budget(self, at: Numbers, reach: Numbers) -> Numbers:
        """With no other drafters, all that a lane can use, where any match may be followed at all: `most` says more."""
        self._at = at
        if self._places is not None:
            self._place = self._places.take(at)
        self._chances = self._seen[:, :, 1] / self._seen[:, :, 0]  # [L, 8]
        self._park((self._judged >= 0).nonzero()[0])
        self._round += 1
        if len(self._copies) < len(self.ground.parts):
            widest: Numbers = np.minimum(self._offered(np.arange(len(at))).max(axis=1), reach)
            return widest
        first = self._prices[:, 1].take(self._place)
        some: Numbers = np.logical_or.reduce(1.0 + self._chances > first[:, None], axis=1)
        if len(others := np.flatnonzero(~some)):
            some[others] = self._offered(others).any(axis=1)
        return np.multiply(reach, some)

    def most(self, number: int, at: Numbers, tokens: Numbers) -> Numbers:
        if number not in self._copies:
            return tokens
        copies, found = self._copies[number], np.zeros_like(tokens)
        lanes = ((tokens > 0) & (copies.match.take(at) > 0)).nonzero()[0]
        at = at[lanes]
        classes = copies.classes.take(at)
        offered = np.maximum(self._caps(lanes, classes), self._resume[lanes, classes] <= self._round)
        found[lanes] = np.minimum(np.minimum(tokens[lanes], offered), copies.most(self._lane_slot[lanes], at))
        return found

    def observe(self, drafted: Drafted) -> None:
        """Learn from drafts. Tokens after the first rejection were never judged, so they do not count."""
        for number, copies in self._copies.items():
            lanes = ((drafted.verified > 0) & (drafted.served == number)).nonzero()[0]
            lanes = lanes[copies.match.take(self._at[lanes]) > 0]
            if len(lanes):
                at, accepted = self._at[lanes], drafted.accepted[lanes]
                self._learn(lanes, copies.match.take(at), np.minimum(drafted.verified[lanes], accepted + 1), accepted)
                self._judged[lanes] = copies.classes.take(at)

    def _learn(self, lanes: Numbers, matched: Numbers, judged: Numbers, accepted: Numbers) -> None:
        """One token of every lane after another, the lanes with most of them first."""
        order = np.argsort(-judged)
        lanes, matched, accepted = lanes[order] * NUM_CLASSES, matched[order], accepted[order]
        seen = self._seen.reshape(-1, 2)
        counts = np.bincount(judged)[::-1].cumsum()[::-1][1:].tolist()  # lanes that have 1, 2, ... of them
        for token, count in enumerate(counts):
            where = lanes[:count] + CLASSES.take(np.minimum(matched[:count] + token, LONGEST[-1]))
            known = seen.take(where, axis=0)
            known *= KEEP
            known[:, 0] += 1.0
            known[:, 1] += accepted[:count] > token
            seen[where] = known

    def _offered(self, lanes: Numbers) -> Numbers:
        """Most draft tokens after a match of each class.  # [M] -> [M, 8]"""
        classes = np.tile(np.arange(NUM_CLASSES), len(lanes))
        caps = self._caps(np.repeat(lanes, NUM_CLASSES), classes).reshape(-1, NUM_CLASSES)
        return np.maximum(caps, self._resume[lanes] <= self._round)

    def _caps(self, lanes: Numbers, classes: Numbers) -> Numbers:
        """`best_length` of each pair, all lengths at once.  # [M], [M] -> [M]"""
        tokens = np.ones((len(lanes), self._prices.shape[1]))
        path = self._path.take(classes, axis=0) + (lanes * NUM_CLASSES)[:, None]
        np.multiply.accumulate(self._chances.ravel().take(path), axis=1, out=tokens[:, 1:])
        reaches = self._reaches.take(self._lane_slot[lanes] * NUM_CLASSES + classes)
        rates = np.add.accumulate(tokens, axis=1)
        rates /= self._prices.take(self._place[lanes], axis=0)
        rates += self._beyond.take(reaches, axis=0)
        caps: Numbers = rates.argmax(axis=1)
        near = rates >= rates.max(axis=1, initial=0.0)[:, None] * TIE
        if np.count_nonzero(near) > len(lanes):
            for each in (near.sum(axis=1) > 1).nonzero()[0].tolist():
                chances, prices = self._chances[lanes[each]].tolist(), self._prices[self._place[lanes[each]]].tolist()
                caps[each] = best_length(SHORTEST[classes[each]], int(reaches[each]), chances, prices)
        return caps

    def _park(self, lanes: Numbers) -> None:
        """Put off the next probe of a class just judged if it does not pay; forget the wait if it does."""
        classes, probe = self._judged[lanes], self._probe[lanes]
        pays, waits = self._caps(lanes, classes) > 0, self._waits[lanes, classes]
        self._resume[lanes, classes] = np.where(pays, self._resume[lanes, classes], self._round + waits)
        self._waits[lanes, classes] = np.where(pays, probe, np.minimum(2 * waits, MOST_WAITS * probe))
        self._judged[lanes] = -1


class _Copies:
    """Matches of one drafter, and how far each slot's policy follows them."""

    def __init__(self, part: Part, policies: list[Any]) -> None:
        match = part.served.drafts.match
        assert match is not None
        self.match, self.classes = match, CLASSES.take(np.minimum(match, LONGEST[-1]))  # [P] twice
        lengths = np.arange(int(match.max(initial=0)) + 1)
        per_match = np.array([[policy.config.per_match] for policy in policies])
        self._most = np.ceil(per_match * lengths - 1e-9).astype(np.int64).ravel()  # as `DraftBudget.most`
        self._width = len(lengths)

    def most(self, slot: Numbers, at: Numbers) -> Numbers:
        found: Numbers = self._most.take(slot * self._width + self.match.take(at))
        return found


def _plain(round_s: Numbers) -> Numbers:
    """In plain steps.  # [U, K + 1]"""
    return round_s / round_s[:, :1]


def _padded(policies: list[Any], deepest: int) -> Numbers:
    """The prices that options name; beyond a policy's k there is nothing to price.  # [S, deepest + 1]"""
    return np.array([policy.prices + [1.0] * (deepest - policy.k) for policy in policies])

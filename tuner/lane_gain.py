"""Expected gain over lanes: the engine's own sums, of all lanes at once and in the same order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from specflow.length_gain import KEEP, LEAN, MOST_WAITS, PRIOR, PRIOR_TRIES
from tuner.lane_counts import StatefulLanes
from tuner.lane_prices import rising
from tuner.lanes import Drafted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tuner.lane_prices import LanePrices
    from tuner.lanes import Ground, Part

    Numbers = NDArray[Any]

__all__ = ["GainLanes"]


class GainLanes(StatefulLanes):
    """See `specflow.length.ExpectedGain`.

    Args:
        ground: What the lanes look up.
        slot: Of each lane.  # [L]
        prices: Of rounds of one row.
    """

    state = ("_hysteresis", "_probe", "_whole", "_depth", "_parked", "_wait", "_probing", "_seconds")

    def __init__(self, ground: Ground, slot: Numbers, prices: LanePrices) -> None:
        super().__init__(ground, slot)
        self._hysteresis = self.option(lambda policy: policy.config.hysteresis)
        self._probe = self.option(lambda policy: policy.config.probe)
        self._whole = self.option(lambda policy: not policy.config.trim)  # nothing is cut
        self._depth = np.full_like(slot, -1)  # in use; 0 is parked, -1 before the first round
        self._parked, self._wait = np.zeros_like(slot), self._probe
        self._probing = np.zeros(len(slot), dtype=bool)
        self._prices, self._table = prices, prices.round_s(ground.deepest)
        self._seconds = self._table[prices.place[:1]].repeat(len(slot), axis=0)  # [L, K + 1] of this round, by depth
        self._first = np.arange(len(slot)) * (ground.deepest + 1)  # of each lane in that
        depths = np.arange(ground.deepest + 1)
        self._beyond = np.where(depths > depths[:, None], -np.inf, 0.0)  # by reach: keeps depths beyond it from winning
        self._yields, self._stands = (_Rates(len(slot), ground.deepest) for _ in range(2))
        unsure = [part for part in ground.parts if not part.served.tree and part.served.drafts.confidence is not None]
        self._cuts = [] if self._whole.all() else [_Cut(part, prices, ground.deepest) for part in unsure]
        self._told = any(cut.told for cut in self._cuts)

    def budget(self, at: Numbers, reach: Numbers) -> Numbers:
        self._seconds = self._table.take(self._prices.place.take(at), axis=0)
        gains = self._yields.tokens() / self._seconds
        gains += self._beyond.take(reach, axis=0)
        return np.minimum(self._choose(gains, reach), reach)

    def cut(self, at: Numbers, drafted: Drafted) -> Drafted:
        if not self._cuts:
            return drafted
        whole, rates = self._whole | self._probing, self._stands.rates() if self._told else None
        for each in self._cuts:
            depth, _, _, accepted, served = drafted
            kept, reach = each.stands(at, depth, rates)
            accepted = np.minimum(accepted, np.where(whole, depth, reach))
            verified = np.maximum(np.where(whole, depth, kept), accepted)
            shorter = Drafted(depth, verified, verified, accepted, served)
            drafted = shorter if len(self.ground.parts) == 1 else shorter.where(drafted.served == each.number, drafted)
        return drafted

    def observe(self, drafted: Drafted) -> None:
        judged = drafted.accepted + 1
        self._yields.observe(np.minimum(drafted.depth, judged), drafted.accepted)
        if self._told:
            self._stands.observe(np.minimum(drafted.verified, judged), drafted.accepted)
        if np.count_nonzero(self._probing):
            spent = self._seconds.ravel().take(self._first + drafted.verified)
            paid = self._probing & (judged * self._seconds[:, 0] > spent)
            self._wait = np.where(paid, self._probe, self._wait)
            self._parked = np.where(paid, self._probe, self._parked)

    def select(self, live: Numbers) -> None:
        super().select(live)
        self._first = self._first[: len(live)]
        self._yields.select(live)
        self._stands.select(live)

    def _choose(self, gains: Numbers, reach: Numbers) -> Numbers:
        """The depth of each lane with the most gain, the one in use if that is nearly as good, or a probe.  # [L]"""
        best: Numbers = gains.argmax(axis=1)
        if self._depth[0] >= 0:
            held, of_depth, first = np.minimum(self._depth, reach), gains.ravel(), self._first
            better = of_depth.take(first + best) > self._hysteresis * of_depth.take(first + held)
            best = np.where(better, best, held)
        self._depth, idle = best, best == 0
        self._parked = (self._parked + 1) * idle
        self._wait = np.where(idle, self._wait, self._probe)
        self._probing = self._parked > self._wait
        if np.count_nonzero(self._probing):
            self._parked = self._parked * ~self._probing
            longer = np.minimum(2 * self._wait, MOST_WAITS * self._probe)
            self._wait = np.where(self._probing, longer, self._wait)
            best = np.where(self._probing, gains[:, 1:].argmax(axis=1) + 1, best)
        return best


class _Rates:
    """How often the token of a position comes through, given that those before it did, by lane."""

    def __init__(self, lanes: int, deepest: int) -> None:
        self._tries, self._wins = np.zeros((lanes, deepest)), np.zeros((lanes, deepest))
        below = np.arange(deepest) < np.arange(deepest + 1)[:, None]
        self._counts, self._fades = below.astype(np.float64), np.where(below, KEEP, 1.0)  # by number of positions

    def observe(self, tried: Numbers, won: Numbers) -> None:
        fades = self._fades.take(tried, axis=0)
        self._tries *= fades
        self._tries += self._counts.take(tried, axis=0)
        self._wins *= fades
        self._wins += self._counts.take(won, axis=0)

    def rates(self) -> Numbers:
        """Chance of each position.  # [L, K]"""
        tries, wins = (np.add.accumulate(counts, axis=1)[:, -1] for counts in (self._tries, self._wins))
        overall = (wins + PRIOR * PRIOR_TRIES) / (tries + PRIOR_TRIES)
        found: Numbers = (self._wins + (LEAN * overall)[:, None]) / (self._tries + LEAN)
        return found

    def tokens(self) -> Numbers:
        """Expected tokens of a round of every depth.  # [L, K + 1]"""
        chances = np.multiply.accumulate(self.rates(), axis=1)
        found = np.ones((len(chances), chances.shape[1] + 1))
        found[:, 1:] += np.add.accumulate(chances, axis=1)
        return found

    def select(self, live: Numbers) -> None:
        self._tries, self._wins = self._tries[live], self._wins[live]


class _Cut:
    """Where drafts of one drafter are cut, which says how sure it is."""

    def __init__(self, part: Part, prices: LanePrices, deepest: int) -> None:
        served, self.number = part.served, part.number
        self.told = served.weighed and served.kind == "self"  # by the sample itself: each lane's own rates stand in
        if self.told:
            self._place, self._seconds = prices.place, prices.cut_s(deepest)
            self._before = [_before(served.sure(along), deepest) for along in (False, True)]
        else:
            tables = [prices.kept(served, along, deepest) for along in (False, served.weighed)]
            self._width, (self._kept, self._along) = deepest + 1, (table.ravel() for table in tables)

    def stands(self, at: Numbers, depth: Numbers, rates: Numbers | None) -> tuple[Numbers, Numbers]:
        """Tokens that stand of each lane's draft, and of it along the text.  # [L] twice"""
        if self.told:
            assert rates is not None
            one, other = (self._by_rates(table, at, depth, rates) for table in self._before)
            return one, other
        index = at * self._width + depth
        return self._kept.take(index), self._along.take(index)

    def _by_rates(self, before: Numbers | None, at: Numbers, depth: Numbers, rates: Numbers) -> Numbers:
        if before is None:
            return depth
        tokens = np.ones((len(at), rates.shape[1] + 1))
        tokens[:, 1:] += np.add.accumulate(rates * before.take(at, axis=0), axis=1)
        return np.minimum(rising(tokens / self._seconds[self._place.take(at), depth]), depth)


def _before(confidence: Numbers | None, deepest: int) -> Numbers | None:
    """Chance that all tokens before each one stand.  # [P, K]"""
    if confidence is None:
        return None
    found = np.ones((len(confidence), deepest))
    found[:, 1:] = np.multiply.accumulate(confidence[:, : deepest - 1].astype(np.float64), axis=1)
    return found

"""The length policy of history sources: more after longer matches, as far as it pays."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from specflow.length_base import priced_context, within
from specflow.types import DraftBlock, DraftBudget

if TYPE_CHECKING:
    from specflow.length_gain import Costs

__all__ = [
    "CLASS_OF",
    "FIRM",
    "GOES_ON",
    "KEEP",
    "LONGEST",
    "MOST_WAITS",
    "NUM_CLASSES",
    "SHORTEST",
    "ByMatch",
    "ByMatchConfig",
    "best_length",
]


class ByMatchConfig(BaseModel):
    """Draft more after longer matches, and stop where drafting does not pay."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    per_match: float = Field(2.0, gt=0.0, description="most draft tokens per matched token")
    row_price: float = Field(
        0.08, ge=0.0, description="cost of one more row of a target pass, in plain steps; a measured profile goes first"
    )
    fixed_price: float = Field(
        0.05, ge=0.0, description="cost of drafting at all, in plain steps; a measured profile goes first"
    )
    probe: int = Field(16, ge=1, description="rounds until match lengths that did not pay are tried again")


class ByMatch:
    """Draft length grows with the match, as far as acceptance pays for the rows.

    A match of m tokens goes on for one more with a chance c(m) that grows with m, and is then a match of m + 1. So a
    draft of n tokens after a match of m yields `1 + c(m) + c(m) c(m+1) + ...`, n products, and costs the seconds of a
    pass of n + 1 rows: those of the profile that `specflow profile` measured, else `1 + fixed_price + n * row_price`
    plain steps. The cap is the n that yields most for its cost, 0 where plain steps do.

    c is learnt for each row and each class of match length from every token that was judged, starting from what
    matches do in recorded answers: a long copy is drafted at full length from its first rounds on, and what a long
    draft teaches serves the short ones too. A class whose cap is 0 is parked, and probed with one token from time to
    time, ever more rarely while the probes fail. The numbers won on recorded answers at a CPU's costs (docs/log.md).
    """

    def __init__(
        self, k: int, per_match: float = 2.0, row_price: float = 0.08, fixed_price: float = 0.05, probe: int = 16
    ) -> None:
        assert k >= 1, f"k is {k}"
        self.k = k
        self.config = ByMatchConfig(per_match=per_match, row_price=row_price, fixed_price=fixed_price, probe=probe)
        self._costs: Costs | None = None
        self._place: tuple[int, int] | None = None  # batch and context that the prices were read for
        self.prices = [1.0, *(1.0 + fixed_price + n * row_price for n in range(1, k + 1))]  # [k + 1] plain steps
        # The longest draft that a match of each class may have.  # [NUM_CLASSES]
        self.reaches = [min(k, ceil(per_match * longest)) for longest in LONGEST[:-1]] + [k]
        self._rows: list[_Row] = []
        self._matched: tuple[int, ...] | None = None  # [B] of the block under verification

    def use(self, costs: Costs) -> None:
        """Decide by these costs from now on."""
        self._costs, self._place = costs, None

    def reset(self, batch: int) -> None:
        self._rows = [_Row(self.config.probe) for _ in range(batch)]
        self._matched = None

    def start(self, row: int) -> None:
        self._rows[row] = _Row(self.config.probe)

    def select(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[row] for row in rows]

    def budget(self, limits: Sequence[int], contexts: Sequence[int] = ()) -> DraftBudget:
        if self._costs is not None:
            self._read_prices(self._costs, len(limits), sum(contexts) // max(len(contexts), 1))
        tables = tuple(row.next_table(self.prices, self.reaches) for row in self._rows)
        tokens = tuple(within(max(table), limit) for table, limit in zip(tables, limits, strict=True))
        return DraftBudget(tokens, self.config.per_match, tables)

    def trim(self, block: DraftBlock) -> DraftBlock:
        """The block as it is: the budget has said all. Remembers what the drafts were based on."""
        self._matched = block.match_lengths
        return block

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        if self._matched is None:
            return
        for row, matched, num_drafted, num_accepted in zip(self._rows, self._matched, drafted, accepted, strict=True):
            if matched and num_drafted:
                row.observe(matched, num_drafted, num_accepted)
        self._matched = None

    def _read_prices(self, costs: Costs, batch: int, context: int) -> None:
        """Rounds in plain steps, as if every row of the batch drafted alike: they share the pass."""
        place = batch, priced_context(context)
        if place == self._place:
            return
        self._place = place
        plain = costs.round_s(0, *place)
        self.prices = [costs.round_s(n, *place) / plain for n in range(self.k + 1)]
        for row in self._rows:
            row.judge_afresh()


# Match lengths 1, 2, 3, 4-7, 8-15, 16-31, 32-63 and 64 or more are told apart.
SHORTEST = (1, 2, 3, 4, 8, 16, 32, 64)
LONGEST = (1, 2, 3, 7, 15, 31, 63, 64)  # of the last class there is no longest; a table ends with its shortest
NUM_CLASSES = len(SHORTEST)
CLASS_OF = tuple(sum(length >= first for first in SHORTEST) - 1 for length in range(LONGEST[-1] + 1))
GOES_ON = (0.22, 0.56, 0.66, 0.78, 0.9, 0.955, 0.975, 0.985)
"""How often the most recent match goes on, by class: greedy answers of the embedded model, code, copies and chat."""
FIRM = 8.0  # tokens that this is worth when a request begins
KEEP = 0.97  # weight of all earlier tokens of a class when a new one is seen: about the last thirty count
MOST_WAITS = 16  # a parked class is probed at least once in this many times `probe` rounds


class _Row:
    """What one request has shown of its matches, and the caps that follow from it."""

    def __init__(self, probe: int) -> None:
        self._probe = probe
        self._tries = [FIRM] * NUM_CLASSES
        self._wins = [FIRM * chance for chance in GOES_ON]
        self._round = 0
        self._waits = [probe] * NUM_CLASSES
        self._resume = [probe] * NUM_CLASSES  # round from which a parked class is probed
        self._judged: int | None = None  # class that the last draft was for, until the caps are known again
        self._caps: list[int] | None = None  # [NUM_CLASSES]; None: to be computed
        self._offered: list[int] = []
        self._table: tuple[int, ...] = ()

    def judge_afresh(self) -> None:
        """Compute the caps again: prices have changed."""
        self._caps = None

    def next_table(self, prices: Sequence[float], reaches: Sequence[int]) -> tuple[int, ...]:
        """Most draft tokens by match length, for the coming round.  # [64]"""
        if self._caps is None:
            chances = [wins / tries for wins, tries in zip(self._wins, self._tries, strict=True)]
            self._caps = [best_length(*place, chances, prices) for place in zip(SHORTEST, reaches, strict=True)]
            self._park(self._caps)
        self._round += 1
        offered = [cap or int(self._round >= resume) for cap, resume in zip(self._caps, self._resume, strict=True)]
        if offered != self._offered:
            self._offered = offered
            self._table = tuple(offered[index] for index in CLASS_OF[1:])
        return self._table

    def observe(self, matched: int, drafted: int, accepted: int) -> None:
        """Learn from a draft. Tokens after the first rejection were never judged, so they do not count."""
        for length in range(matched, matched + min(drafted, accepted + 1)):
            index = CLASS_OF[min(length, LONGEST[-1])]
            self._tries[index] = KEEP * self._tries[index] + 1.0
            self._wins[index] = KEEP * self._wins[index] + (length < matched + accepted)
        self._judged = CLASS_OF[min(matched, LONGEST[-1])]
        self._caps = None

    def _park(self, caps: Sequence[int]) -> None:
        """Put off the next probe of the class just judged if it does not pay; forget the wait if it does."""
        index, self._judged = self._judged, None
        if index is None:
            return
        if caps[index]:
            self._waits[index] = self._probe
        else:
            self._resume[index] = self._round + self._waits[index]
            self._waits[index] = min(2 * self._waits[index], MOST_WAITS * self._probe)


def best_length(length: int, reach: int, chances: Sequence[float], prices: Sequence[float]) -> int:
    """The number of draft tokens, up to `reach`, that yields most for its price; 0 where plain steps do.

    Args:
        length: Tokens matched before the draft.
        reach: Most draft tokens.
        chances: That a match goes on, by class.  # [NUM_CLASSES]
        prices: Of a round, by draft tokens, in plain steps.  # [K + 1]
    """
    best, best_rate, tokens, stands = 0, 1.0, 1.0, 1.0
    for n in range(1, reach + 1):
        stands *= chances[CLASS_OF[length]] if length < LONGEST[-1] else chances[-1]
        tokens += stands
        length += 1
        if tokens > best_rate * prices[n]:
            best, best_rate = n, tokens / prices[n]
    return best

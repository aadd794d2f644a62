"""The length policy of history sources: more after longer matches, as far as it pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict, Field

from specflow.length_base import within
from specflow.types import DraftBlock, DraftBudget

__all__ = ["ByMatch", "ByMatchConfig"]


class ByMatchConfig(BaseModel):
    """Draft more after longer matches, and stop where drafting does not pay."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    per_match: float = Field(2.0, gt=0.0, description="most draft tokens per matched token")
    row_price: float = Field(0.05, ge=0.0, description="cost of one more row of a target pass, in plain steps")
    fixed_price: float = Field(0.05, ge=0.0, description="cost of drafting at all, in plain steps")
    probe: int = Field(16, ge=1, description="rounds until match lengths that did not pay are tried again")


class ByMatch:
    """Draft length grows with the match, as far as acceptance pays for the rows.

    A round with n draft tokens costs `1 + fixed_price + n * row_price` plain steps and yields one token more than it
    accepts. Where a text continues a match, its first token is right with probability p (the text repeats itself here,
    or it does not) and each later one with probability r (it goes on doing so), so n tokens yield
    `1 + p (1 + r + ... + r^(n-1))`. The cap is the n that yields most for its cost, 0 where plain steps do.

    p and r are learnt for each row and each class of match length from recent drafts, starting from a hopeful guess:
    a few failures park a class. A parked class is probed with one token from time to time, ever more rarely while the
    probes fail. The default prices won on recorded answers at a CPU's costs, one request (docs/log.md).
    """

    def __init__(
        self, k: int, per_match: float = 2.0, row_price: float = 0.05, fixed_price: float = 0.05, probe: int = 16
    ) -> None:
        assert k >= 1, f"k is {k}"
        self.k = k
        self.config = ByMatchConfig(per_match=per_match, row_price=row_price, fixed_price=fixed_price, probe=probe)
        self._rows: list[_Row] = []
        self._matched: tuple[int, ...] | None = None  # [B] of the block under verification

    def reset(self, batch: int) -> None:
        self._rows = [_Row(self.k, self.config) for _ in range(batch)]
        self._matched = None

    def start(self, row: int) -> None:
        self._rows[row] = _Row(self.k, self.config)

    def select(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[row] for row in rows]

    def budget(self, limits: Sequence[int], contexts: Sequence[int] = ()) -> DraftBudget:
        tables = tuple(row.next_table() for row in self._rows)
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


# Match lengths 1, 2-3, 4-7, 8-15 and 16 or more are told apart: each doubling is one class.
NUM_CLASSES = 5
CLASS_OF = tuple(length.bit_length() - 1 for length in range(1, 2 ** (NUM_CLASSES - 1) + 1))
KEEP = 0.9  # weight of all earlier drafts when a new one is seen: about the last ten count
MOST_WAITS = 16  # a parked class is probed at least once in this many times `probe` rounds


@dataclass(slots=True)
class _MatchClass:
    """What one row knows about drafts that continue matches of similar length. Counts fade by KEEP a draft."""

    k: int
    config: ByMatchConfig
    cap: int = field(init=False)
    wait: int = field(init=False)
    resume: int = 0  # round from which a parked class is probed
    first_tries: float = 2.0
    first_wins: float = 1.0
    later_tries: float = 5.0
    later_wins: float = 4.0

    def __post_init__(self) -> None:
        self.wait = self.config.probe
        self.cap = self._best()

    def observe(self, drafted: int, accepted: int, round_: int) -> None:
        """Learn from a draft. Tokens after the first rejection were never judged, so they do not count."""
        self.first_tries = KEEP * self.first_tries + 1
        self.first_wins = KEEP * self.first_wins + (accepted > 0)
        self.later_tries = KEEP * self.later_tries + max(0, min(drafted, accepted + 1) - 1)
        self.later_wins = KEEP * self.later_wins + max(0, accepted - 1)
        self.cap = self._best()
        if self.cap:
            self.wait = self.config.probe
        else:
            self.resume = round_ + self.wait
            self.wait = min(2 * self.wait, MOST_WAITS * self.config.probe)

    def _best(self) -> int:
        """The number of draft tokens that yields most tokens for its cost; 0 where plain steps do."""
        reach, keeps = self.first_wins / self.first_tries, self.later_wins / self.later_tries
        best, best_rate, tokens, cost = 0, 1.0, 1.0, 1.0 + self.config.fixed_price
        for n in range(1, self.k + 1):
            tokens += reach
            cost += self.config.row_price
            reach *= keeps
            if tokens > best_rate * cost:
                best, best_rate = n, tokens / cost
        return best


class _Row:
    """One request's classes and the table of caps they add up to."""

    def __init__(self, k: int, config: ByMatchConfig) -> None:
        self._classes = [_MatchClass(k, config) for _ in range(NUM_CLASSES)]
        self._round = 0
        self._caps: list[int] = []
        self._table: tuple[int, ...] = ()

    def next_table(self) -> tuple[int, ...]:
        """Most draft tokens by match length, for the coming round.  # [2 ** (NUM_CLASSES - 1)]"""
        self._round += 1
        caps = [known.cap or int(self._round >= known.resume) for known in self._classes]
        if caps != self._caps:
            self._caps = caps
            self._table = tuple(caps[index] for index in CLASS_OF)
        return self._table

    def observe(self, matched: int, drafted: int, accepted: int) -> None:
        index = min(matched.bit_length(), NUM_CLASSES) - 1
        self._classes[index].observe(drafted, accepted, self._round)

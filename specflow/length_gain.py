"""Expected gain: as many draft tokens as measured costs and measured acceptance pay for.

Before drafting the depth with the most expected tokens a second is chosen from what earlier rounds accepted. After
drafting, where the drafter says how sure it is, the block is cut where one more column stops paying (DSpark 2607.05147,
Algorithm 1). The rows of a batch share the pass, so they share the depth and the cut: the law of every text is the
target's, but under rules that weigh p against q which tokens are drawn depends on the neighbours (never under match).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from operator import add, mul
from typing import TYPE_CHECKING, Protocol

from pydantic import BaseModel, ConfigDict, Field

from specflow.device import asking_is_free
from specflow.length_base import priced_context, within
from specflow.length_confidence import cut, told_by_the_sample
from specflow.types import DraftBlock, DraftBudget

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "KEEP",
    "LEAN",
    "MOST_WAITS",
    "PRIOR",
    "PRIOR_TRIES",
    "Costs",
    "ExpectedGain",
    "ExpectedGainConfig",
]

MOST_WAITS = 4  # a parked batch is probed at least once in this many times `probe` rounds


class Costs(Protocol):
    """Measured seconds. `cost` has the model that reads them from a profile."""

    def round_s(self, depth: int, batch: int, context: int) -> float:
        """A whole round: draft, target pass, everything else.

        Args:
            depth: Deepest draft position; 0 is a plain step.
            batch: Rows decoded together.
            context: Their mean number of committed tokens.
        """

    def verify_s(self, depth: int, batch: int, context: int) -> float:
        """Of that round, the target pass over the anchor and what was drafted."""


class ExpectedGainConfig(BaseModel):
    """Draft and verify what pays, by the measured costs of this device; nothing where plain decoding is faster."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hysteresis: float = Field(1.03, ge=1.0, description="how much better another depth must look to be taken")
    probe: int = Field(16, ge=1, description="rounds until drafting is tried again after it did not pay")
    trim: bool = Field(True, description="cut blocks by the drafter's confidence, where it has one")


class ExpectedGain:
    """Chooses the depth by expected tokens a second, and cuts what was drafted where going on stops paying.

    Depth d yields 1 + sum over i <= d of p_1 ... p_i tokens a row and costs `round_s(d)`; 0 is always a candidate.
    Where 0 wins the policy parks there, and tries the best other depth after `probe` rounds: again at once where that
    paid, ever more rarely while it does not. A new request is judged afresh.

    The cut weighs the same sum, of the drafter's own confidences, against the seconds of a pass of that width; what
    drafting took is spent either way. Columns are added while the quotient rises and the first fall ends it, so that
    no token is dropped for what it or a later one says. Confidences that depend on no sampled token are known all at
    once, and the best width of all is taken. Confidences that come with the sampled token count for the next one.
    A token that was cut is a token that drafting did not yield, so a drafter that doubts itself is not asked for long.
    Probes are not cut, or nothing could be learnt from them. Nor is anything on an accelerator: shapes stay as they are
    there, so a column that is cut is paid for all the same.

    Until `use` gave it costs there is nothing to weigh, and a budget is all of k. No recipe runs so: `build` refuses
    it, and replays without costs count with a fixed length in its place.
    """

    def __init__(self, k: int, hysteresis: float = 1.03, probe: int = 16, trim: bool = True) -> None:
        assert k >= 1, f"k is {k}"
        self.k = k
        self.config = ExpectedGainConfig(hysteresis=hysteresis, probe=probe, trim=trim)
        self._costs: Costs | None = None
        self._rows: list[_Row] = []
        self._offered: Sequence[int] | None = None  # [B] nodes of the block that was cut this round
        self._prices: _Prices | None = None
        self._judge_afresh()

    def use(self, costs: Costs) -> None:
        """Decide by these costs from now on."""
        self._costs, self._prices = costs, None

    def reset(self, batch: int) -> None:
        self._rows = [_Row(self.k) for _ in range(batch)]
        self._judge_afresh()

    def start(self, row: int) -> None:
        self._rows[row] = _Row(self.k)
        self._judge_afresh()

    def select(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[row] for row in rows]

    def budget(self, limits: Sequence[int], contexts: Sequence[int] = ()) -> DraftBudget:
        self._offered, self._probing = None, False
        reach = [within(self.k, limit) for limit in limits]
        if self._costs is None or not any(reach):
            return DraftBudget(tuple(reach))
        context = sum(contexts) // max(len(contexts), 1)
        if self._prices is None or not self._prices.hold_for(len(reach), context):
            self._prices = _Prices(self._costs, self.k, len(reach), context)
        depth = self._choose(self._gains(reach, self._prices.round_s))
        return DraftBudget(tuple(min(most, depth) for most in reach))

    def trim(self, block: DraftBlock) -> DraftBlock:
        confidence = block.confidence
        if confidence is None or not self.config.trim or not block.topology.is_chain or not block.num_nodes:
            return block
        if self._prices is None or self._probing or not asking_is_free(block.tokens.device):
            return block
        import torch

        self._offered = block.lengths
        chances = self._chances(block, confidence)
        batch, width = chances.shape
        tokens = torch.cat((chances.new_zeros(1), chances.sum(0).cumsum(0))) + batch  # [N + 1] by number of columns
        rate = tokens / self._prices.cut_s(width, chances.device)
        if block.confidence_from == "context" or block.law.is_point:
            keep = torch.arange(width, device=rate.device) < rate.argmax()
            return cut(block, keep.expand(batch, -1), "context" if block.confidence_from == "context" else "self")
        keep = rate[1:] > rate[:-1]  # `cut` ends a row at the first column that does not stay
        return cut(block, keep.expand(batch, -1), "prefix")

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        offered = drafted if self._offered is None else self._offered
        for row, *counts in zip(self._rows, drafted, accepted, offered, strict=True):
            row.observe(*counts)
        if self._probing and self._paid(max(drafted), sum(accepted)):
            self._parked = self._wait = self.config.probe

    def _paid(self, depth: int, accepted: int) -> bool:
        """Whether this round was faster than plain steps for its tokens."""
        assert self._prices is not None
        seconds, batch = self._prices.round_s, len(self._rows)
        return (batch + accepted) * seconds[0] > batch * seconds[depth]

    def _judge_afresh(self) -> None:
        self._depth: int | None = None  # depth in use; 0 is parked
        self._parked = 0  # rounds since drafting was last tried
        self._wait = self.config.probe
        self._probing = False

    def _gains(self, reach: Sequence[int], seconds: Sequence[float]) -> list[float]:
        """Expected tokens a second of the batch, for every depth from 0 to the deepest a row can use."""
        tokens = [float(len(reach))] * (max(reach) + 1)
        for row, most in zip(self._rows, reach, strict=True):
            more = 0.0
            for depth, chance in enumerate(accumulate(row.yields.rates(max(reach)), mul), start=1):
                more += chance if depth <= most else 0.0
                tokens[depth] += more
        return [each / seconds[depth] for depth, each in enumerate(tokens)]

    def _choose(self, gains: Sequence[float]) -> int:
        """The depth with the most gain, the one in use if that is nearly as good; from time to time a probe."""
        widest = len(gains) - 1
        best = gains.index(max(gains))
        if self._depth is not None:
            held = min(self._depth, widest)
            best = best if gains[best] > self.config.hysteresis * gains[held] else held
        self._depth = best
        if best > 0:
            self._parked, self._wait = 0, self.config.probe
            return best
        self._parked += 1
        if self._parked <= self._wait:
            return 0
        self._probing = True
        self._parked, self._wait = 0, min(2 * self._wait, MOST_WAITS * self.config.probe)
        return max(range(1, widest + 1), key=gains.__getitem__)

    def _chances(self, block: DraftBlock, confidence: Tensor) -> Tensor:
        """Chance that each node and all before it stand, as far as it may be known.  # [B, N] float64

        Where a confidence comes with the sampled token it is not known in time, so the row's own rate at that position
        stands in for it.
        """
        import torch

        sure = confidence.double()
        if told_by_the_sample(block):
            rates = [row.stands.rates(block.num_nodes) for row in self._rows]
            sure = torch.tensor(rates, dtype=torch.float64, device=sure.device) * _before(sure)
        else:
            sure = sure.cumprod(1)
        return sure.masked_fill(block.tokens < 0, 0.0)


def _before(confidence: Tensor) -> Tensor:
    """Chance that all earlier nodes stand.  # [B, N] -> [B, N]"""
    import torch.nn.functional as F

    return F.pad(confidence.cumprod(1)[:, :-1], (1, 0), value=1.0)


class _Prices:
    """Seconds of rounds of one batch size at one length of context."""

    def __init__(self, costs: Costs, k: int, batch: int, context: int) -> None:
        self._place = batch, priced_context(context)
        self.round_s = [costs.round_s(depth, *self._place) for depth in range(k + 1)]
        self._verify_s = [costs.verify_s(depth, *self._place) for depth in range(k + 1)]
        self._on_device: dict[int, Tensor] = {}

    def hold_for(self, batch: int, context: int) -> bool:
        return self._place == (batch, priced_context(context))

    def cut_s(self, drafted: int, device: torch.device) -> Tensor:
        """A round in which `drafted` columns were drafted, by how many of them are verified.  # [N + 1] float64"""
        import torch

        if drafted not in self._on_device:
            spent = self.round_s[drafted] - self._verify_s[drafted]
            seconds = [spent + verify for verify in self._verify_s[: drafted + 1]]
            self._on_device[drafted] = torch.tensor(seconds, dtype=torch.float64, device=device)
        return self._on_device[drafted]


KEEP = 0.97  # weight of all earlier rounds when a new one is seen: about the last thirty count
PRIOR, PRIOR_TRIES = 0.7, 3.0  # what is believed of a drafter before anything is seen, and how firmly
LEAN = 4.0  # tries that a position needs before its own rate counts as much as that of all positions


class _Row:
    """What one row knows of its drafter."""

    def __init__(self, k: int) -> None:
        self.stands = _Rates(k)  # of the tokens that were verified
        self.yields = _Rates(k)  # of the tokens that were drafted: those that were cut yielded nothing

    def observe(self, drafted: int, accepted: int, offered: int) -> None:
        """Learn from a round. Positions after the first refusal were not judged, and say nothing."""
        self.stands.observe(min(drafted, accepted + 1), accepted)
        self.yields.observe(min(max(drafted, offered), accepted + 1), accepted)


class _Rates:
    """How often the token of a position comes through, given that those before it did. Counts fade by KEEP."""

    def __init__(self, k: int) -> None:
        self._tries, self._wins = [0.0] * k, [0.0] * k

    def observe(self, tried: int, won: int) -> None:
        for position in range(min(tried, len(self._tries))):
            self._tries[position] = KEEP * self._tries[position] + 1.0
            self._wins[position] = KEEP * self._wins[position] + (position < won)

    def rates(self, depth: int) -> list[float]:
        """Chance of each position; a position seldom reached leans on the rate of all.  # [depth]

        Added up from left to right: from Python 3.12 on `sum` rounds floats otherwise, and decisions would differ.
        """
        tries, wins = (reduce(add, counts, 0.0) for counts in (self._tries, self._wins))
        overall = (wins + PRIOR * PRIOR_TRIES) / (tries + PRIOR_TRIES)
        seen = zip(self._wins[:depth], self._tries[:depth], strict=True)
        return [(wins + LEAN * overall) / (tries + LEAN) for wins, tries in seen]

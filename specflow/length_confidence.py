"""Length policies that follow the drafter's confidence, and the cut that shortens a block.

What a confidence depends on decides where a cut is safe (reference: methods 0.2). One that is known before its token
may drop that token. One that the sampled token itself brings may only drop the tokens after it: dropping the token
because of what it is would bias the text. Tokens that follow from the context are not sampled, so they may go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from specflow.device import asking_is_free
from specflow.length_base import Fixed, within
from specflow.types import PAD, DraftBlock, DraftBudget

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Confidence", "ConfidenceConfig", "Threshold", "ThresholdConfig", "cut", "told_by_the_sample"]

_DEPENDENCE = ("context", "prefix", "self")  # each includes the ones before it


def told_by_the_sample(block: DraftBlock) -> bool:
    """Whether a node's confidence depends on how that very node was sampled."""
    return block.confidence_from == "self" and not block.law.is_point


def cut(block: DraftBlock, keep: Tensor, because: Literal["context", "prefix", "self"]) -> DraftBlock:
    """A chain up to each row's first node that is not kept. Trees stay as they are: they have no end to cut off.

    Args:
        block: What was drafted.
        keep: Which nodes may stay; what comes after a node that may not goes too.  # [B, N] bool
        because: What `keep` depends on at a node, in the words of `DraftBlock.lengths_from`.
    """
    if not block.topology.is_chain or not block.num_nodes:
        return block
    tokens = block.tokens.masked_fill(keep.long().cumprod(1) == 0, PAD)
    because = max(because, block.lengths_from, key=_DEPENDENCE.index)
    block = replace(block, tokens=tokens, lengths_from=because)
    if not asking_is_free(tokens.device):
        return block
    lengths = tuple((tokens >= 0).sum(1).tolist())
    return _narrowed(replace(block, lengths=lengths), max(lengths))


def _narrowed(block: DraftBlock, width: int) -> DraftBlock:
    """The first `width` nodes of a chain: empty columns cost rows of the target pass."""
    from specflow.tree import chain

    if width == block.num_nodes:
        return block
    confidence, entry = block.confidence, block.entry
    return replace(
        block,
        tokens=block.tokens[:, :width],
        topology=chain(width, block.tokens.device),
        law=block.law.narrow(width),
        confidence=None if confidence is None else confidence[:, :width],
        entry=None if entry is None else replace(entry, hidden=entry.hidden[:, : width + 1]),
    )


class ThresholdConfig(BaseModel):
    """Stop after a token of low draft probability; the bar moves until enough is accepted (Draft & Verify)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: float = Field(0.9, gt=0.0, le=1.0, description="share of draft tokens that should be accepted")
    start: float = Field(0.6, ge=0.0, le=1.0, description="a request's first bar: draft probability to go on")
    step: float = Field(0.01, ge=0.0, le=1.0, description="how far the bar would move at once; it goes a tenth of that")


class Threshold:
    """Drafting ends after the first token whose draft probability is below the bar (2309.08168, section 3.3).

    The unsure token stays in the block, so the text's law is the target's. After a round in which a share s of the
    draft was accepted: m <- m/2 + s/2; the bar goes up where m is below the target, down where it is not and the block
    ended before k, each time by a tenth of `step`: bar <- 0.9 bar + 0.1 (bar +- step).
    """

    def __init__(self, k: int, target: float = 0.9, start: float = 0.6, step: float = 0.01) -> None:
        assert k >= 1, f"k is {k}"
        self.k = k
        self.config = ThresholdConfig(target=target, start=start, step=step)
        self._rows: list[_Bar] = []

    def reset(self, batch: int) -> None:
        self._rows = [_Bar(self.config) for _ in range(batch)]

    def start(self, row: int) -> None:
        self._rows[row] = _Bar(self.config)

    def select(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[row] for row in rows]

    def budget(self, limits: Sequence[int], contexts: Sequence[int] = ()) -> DraftBudget:
        for row, limit in zip(self._rows, limits, strict=True):
            row.most = within(self.k, limit)
        return DraftBudget(tuple(row.most for row in self._rows), stop_below=tuple(row.bar for row in self._rows))

    def trim(self, block: DraftBlock) -> DraftBlock:
        return block

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """A round that drafted nothing says nothing, and changes nothing."""
        for row, num_drafted, num_accepted in zip(self._rows, drafted, accepted, strict=True):
            if num_drafted:
                row.observe(num_drafted, num_accepted)


class _Bar:
    """One request's bar. The share starts at the target, so that the first round alone decides which way it goes."""

    def __init__(self, config: ThresholdConfig) -> None:
        self._config = config
        self._share = config.target
        self.bar = config.start
        self.most = 0  # tokens the latest budget allowed

    def observe(self, drafted: int, accepted: int) -> None:
        self._share = 0.5 * self._share + 0.5 * accepted / drafted
        if self._share < self._config.target:
            self._move(self._config.step)
        elif drafted < self.most:
            self._move(-self._config.step)

    def _move(self, by: float) -> None:
        self.bar = min(max(0.9 * self.bar + 0.1 * (self.bar + by), 0.0), 1.0)


class ConfidenceConfig(BaseModel):
    """Draft k tokens, verify them up to the first the drafter doubts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    threshold: float = Field(0.5, ge=0.0, le=1.0, description="a token less likely than this to stand is not verified")
    cumulative: bool = Field(False, description="compare the chance that all tokens up to this one stand, not its own")


class Confidence(Fixed):
    """Drafts k tokens, cuts where confidence falls below a threshold: before that token where that is safe, else after.

    A rule at a fixed threshold knows no costs; it shows how good a confidence is (DSpark, static threshold).
    """

    def __init__(self, k: int, threshold: float = 0.5, cumulative: bool = False) -> None:
        assert k >= 1, f"k is {k}"
        super().__init__(k)
        self.config = ConfidenceConfig(threshold=threshold, cumulative=cumulative)

    def trim(self, block: DraftBlock) -> DraftBlock:
        import torch.nn.functional as F

        if block.confidence is None or not block.topology.is_chain:
            return block
        sure = block.confidence.cumprod(1) if self.config.cumulative else block.confidence
        keep = sure >= self.config.threshold
        if told_by_the_sample(block):  # the unsure token stays, what comes after it goes
            keep = F.pad(keep[:, :-1], (1, 0), value=True)
            return cut(block, keep, "prefix")
        return cut(block, keep, block.confidence_from)

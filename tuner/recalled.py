"""Expected gain with a memory: replays bring the engine's policy the same chains at the same prices over and over."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from specflow.length import ExpectedGain
from specflow.length_confidence import told_by_the_sample

if TYPE_CHECKING:
    from specflow.types import DraftBlock

__all__ = ["Chain", "Recalled"]


class Chain(NamedTuple):
    """What a cut follows from while one request is decoded alone: its position says how long the context is."""

    drafter: str
    weighed: bool  # the rule weighs its law, which is not one-hot
    along: bool  # as sure as the drafter is along the text, not of its own tokens
    at: int
    depth: int


class Recalled(ExpectedGain):
    """Cuts a chain as it did before, where nothing that was learnt meanwhile has a say in it."""

    def __init__(self, k: int, hysteresis: float = 1.03, probe: int = 16, trim: bool = True) -> None:
        super().__init__(k, hysteresis, probe, trim)
        self._cuts: dict[Chain, int] = {}

    def remember(self, cuts: dict[Chain, int]) -> None:
        """Share what is remembered with other policies that weigh the same costs, whatever their options."""
        self._cuts = cuts

    def kept(self, chain: Chain, block: Callable[[], DraftBlock]) -> int:
        """Tokens that stand of the chain of the only row; the block is made where the cut is not known."""
        if self._probing or not self.config.trim:
            return chain.depth
        if (known := self._cuts.get(chain)) is not None:
            self._offered = (chain.depth,)
            return known
        made = block()
        length = self.trim(made).lengths[0]
        if self._offered is not None and not told_by_the_sample(made):
            self._cuts[chain] = length
        return length

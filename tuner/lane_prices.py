"""What rounds of one row cost at the positions of a trace, and where drafts are cut for it: looked up, never asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from specflow.length_base import priced_context
from tuner.prices import priced_width

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from specflow.length import Costs
    from tuner.deciders import Served
    from tuner.recorded import Trace

    Numbers = NDArray[Any]

__all__ = ["LanePrices"]

BLOCK = 8192
"""Positions whose cuts are weighed at once."""


class LanePrices:
    """Seconds of rounds of a request that is decoded alone, as length policies read them.

    Args:
        trace: Whose positions.
        costs: As the policy is given them.
        deepest: Deepest draft position that will be asked for.
    """

    def __init__(self, trace: Trace, costs: Costs, deepest: int) -> None:
        width = priced_width()
        buckets, self.place = np.unique(trace.context // width, return_inverse=True)
        """Which of the lengths of context that are told apart each position has.  # [P]"""
        places, depths = [priced_context(bucket * width) for bucket in buckets.tolist()], range(deepest + 1)
        self._round_s = np.array([[costs.round_s(depth, 1, context) for depth in depths] for context in places])
        verify_s = np.array([[costs.verify_s(depth, 1, context) for depth in depths] for context in places])
        self._cut_s = (self._round_s - verify_s)[:, :, None] + verify_s[:, None, :]  # [U, drafted, verified]
        self._kept: dict[tuple[str, bool, bool], Numbers] = {}

    def round_s(self, deepest: int) -> Numbers:
        """Whole rounds by place and depth.  # [U, deepest + 1]"""
        return np.ascontiguousarray(self._round_s[:, : deepest + 1])

    def cut_s(self, deepest: int) -> Numbers:
        """Whole rounds by place, depth drafted and depth verified.  # [U, deepest + 1, deepest + 1]"""
        return np.ascontiguousarray(self._cut_s[:, : deepest + 1, : deepest + 1])

    def kept(self, served: Served, along: bool, deepest: int) -> Numbers:
        """Tokens that expected gain lets stand of a draft of every depth, by the drafter's confidence alone.

        Args:
            served: A drafter of chains.
            along: As sure as it is along the text, not of its own tokens.
            deepest: Most draft tokens.

        Returns:
            Tokens that stand, by position and depth; all of them where no confidence is known.  # [P, deepest + 1]
        """
        key = served.drafts.info.name, served.weighed, along
        if key not in self._kept or self._kept[key].shape[1] <= deepest:
            self._kept[key] = self._weighed(served, served.sure(along), deepest)
        return self._kept[key][:, : deepest + 1]

    def _weighed(self, served: Served, confidence: Numbers | None, deepest: int) -> Numbers:
        table = np.tile(np.arange(deepest + 1), (len(self.place), 1))
        if confidence is None:
            return table
        whole = served.kind == "context" or not served.weighed
        for begin in range(0, len(table), BLOCK):
            part = slice(begin, begin + BLOCK)
            sure = np.multiply.accumulate(confidence[part, :deepest].astype(np.float64), axis=1)
            tokens = np.ones((len(sure), sure.shape[1] + 1))
            tokens[:, 1:] += np.add.accumulate(sure, axis=1)
            for depth in range(1, tokens.shape[1]):
                rate = tokens[:, : depth + 1] / self._cut_s[self.place[part], depth, : depth + 1]
                table[part, depth] = rate.argmax(axis=1) if whole else rising(rate)
        return table


def rising(rate: Numbers) -> Numbers:
    """Steps up from the first number of each line to where it first does not rise.  # [L, N + 1] -> [L]"""
    found: Numbers = np.logical_and.accumulate(rate[:, 1:] > rate[:, :-1], axis=1).sum(axis=1)
    return found

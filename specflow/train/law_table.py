"""The target's law at the positions that a batch's chains ask for, each made once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from specflow.train.batch import TargetLaw

__all__ = ["LAW_ROWS", "LawTable", "positions_of"]

LAW_ROWS = 256
"""Positions whose law is made at a time."""


@dataclass(frozen=True, slots=True)
class LawTable:
    """Laws of m positions. Chains stand at the same position in several slots, and several chains at one."""

    probs: Tensor  # [m, Vd]
    row_of: Tensor  # [n, K] row of the position of a slot; any where it was not asked for

    @staticmethod
    def over_drafted(law: TargetLaw, at: Tensor, asked: Tensor) -> LawTable:
        """Laws that sum to 1 over the draft's vocabulary.

        Args:
            law: Of the batch.
            at: Flat positions.  # [n, K]
            asked: Where they are needed.  # [n, K] bool
        """
        return _table(law.over_drafted, at, asked)

    @staticmethod
    def of_whole(law: TargetLaw, at: Tensor, asked: Tensor) -> LawTable:
        """What laws over the target's vocabulary give to the draft's tokens; arguments as in `over_drafted`."""
        return _table(lambda positions: law.drafted(law.whole(positions)), at, asked)

    def entropy(self) -> Tensor:
        """-sum_v p log p of a slot's position.  # [n, K]"""
        least = torch.finfo(self.probs.dtype).tiny
        rows = [-torch.linalg.vecdot(each, each.clamp_min(least).log_()) for each in torch.split(self.probs, LAW_ROWS)]
        return torch.cat(rows)[self.row_of]


def positions_of(at: Tensor, asked: Tensor) -> tuple[Tensor, Tensor]:
    """The different positions among those asked for, and where each is in their list.

    Args:
        at: Flat positions, 0 or more.  # [n, K]
        asked: # [n, K] bool

    Returns:
        Positions in ascending order, at least one, and rows of that list; any row where not asked.  # [m], [n, K]
    """
    size = int(at.max()) + 1 if at.numel() else 1
    used = torch.zeros(size, dtype=torch.bool, device=at.device)
    used[at[asked]] = True
    used[0] |= ~used.any()
    return used.nonzero().squeeze(1), (used.cumsum(0) - 1).clamp_min_(0)[at]


def _table(make: Callable[[Tensor], Tensor], at: Tensor, asked: Tensor) -> LawTable:
    positions, row_of = positions_of(at, asked)
    first, *others = torch.split(positions, LAW_ROWS)
    laws = make(first)
    probs = laws.new_empty(len(positions), laws.shape[1])
    probs[: len(first)] = laws
    for number, each in enumerate(others, start=1):
        probs[number * LAW_ROWS : number * LAW_ROWS + len(each)] = make(each)
    return LawTable(probs, row_of)

"""What passes from the target back to the parts of a round, and the block of a round without a draft."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specflow.law import PointMass
from specflow.tree import chain
from specflow.types import DraftBlock, Features, TargetOutput

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.draft.base import Needs

__all__ = ["empty_block", "features_of"]


def empty_block(batch: int, vocab_size: int, device: torch.device) -> DraftBlock:
    """A block with no nodes: the round is a plain step."""
    tokens = torch.empty(batch, 0, dtype=torch.int64, device=device)
    return DraftBlock(tokens, (0,) * batch, chain(0, device), PointMass(tokens, vocab_size))


def features_of(output: TargetOutput, needs: Needs, path: Tensor | None = None) -> Features | None:
    """The features a drafter asked for, in the order of the accepted path.

    Args:
        output: A target pass.
        needs: What the drafter wants.
        path: Rows of the accepted path, PAD padded; None where they are rows 0, 1, ...  # [B, D + 1]
    """
    if not needs.any:
        return None

    def along(rows: Tensor) -> Tensor:
        if path is None:
            return rows
        return rows.gather(1, path.clamp_min(0).unsqueeze(-1).expand(-1, -1, rows.shape[-1]))

    return Features(
        taps={layer: along(output.taps[layer]) for layer in needs.taps},
        hidden_pre=along(output.hidden_pre) if needs.hidden_pre and output.hidden_pre is not None else None,
        hidden_post=along(output.hidden_post) if needs.hidden_post and output.hidden_post is not None else None,
    )

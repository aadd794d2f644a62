"""Chains of draft positions for networks that say the same of a position, whatever place in a block it has.

Then every judged position need be scored once, and chains that do not overlap are enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specflow.train.drafting.corrected import Chains

if TYPE_CHECKING:
    from specflow.train.batch import Batch

__all__ = ["chains_apart"]


def chains_apart(batch: Batch, depth: int, most: int) -> Chains:
    """Chains one behind the other, from a random place of each answer on; of them some, chosen at random.

    A chain begins where a round of decoding can begin: the anchor is of the answer, and so is the token after it.

    Args:
        batch: The texts.
        depth: K.
        most: Chains of a text.
    """
    begins = batch.begins  # [B, T - 1]
    numbers = torch.Generator().manual_seed(batch.key)
    first = torch.randint(depth, (len(begins), 1), generator=numbers).to(begins.device)
    order = begins.cumsum(1) - 1
    # An answer that is shorter than a chain has but one place where every one of its tokens is judged.
    first = first.minimum((order[:, -1:] + 1 - depth).clamp_min(0))
    starts = begins & (order >= first) & ((order - first) % depth == 0)
    chance = torch.rand(starts.shape, generator=numbers).to(begins.device).masked_fill(~starts, -1.0)
    picked = chance.topk(min(most, starts.shape[1]), dim=1).indices
    chosen = torch.zeros_like(starts).scatter_(1, picked, True) & starts
    text, anchor = chosen.nonzero(as_tuple=True)
    return Chains.of(batch, text, anchor, depth)

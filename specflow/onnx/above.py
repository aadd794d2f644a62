"""Inputs of a pass whose rows go above the committed rows of a cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from specflow.draft.nn.attention import Sight, attention_biases

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.target.cache import KVCache

__all__ = ["feeds_above"]


def feeds_above(cache: KVCache, rows: int, sights: Mapping[str, Sight]) -> dict[str, Tensor]:
    """Make room for the rows, and say where they go and what they see: what `PassGraph` declares but `positions`.

    Args:
        cache: Of the layers that the pass runs.
        rows: Of the pass, for each batch row.
        sights: Who sees what, by the name of the bias.

    Returns:
        `starts` [B], and a bias [B, R, S] of every name.
    """
    cache.make_room(max(cache.lengths) + rows)
    slots = cache.data
    starts = torch.tensor(cache.lengths, device=slots.device)
    feeds = {"starts": starts}
    for name, sight in sights.items():
        if sight.mask is None and sight.window is None:
            feeds[name] = _causal(starts, rows, slots)
        else:
            feeds[name] = torch.stack(attention_biases(sight, [slots.shape[4]] * slots.shape[2], slots.dtype))
    return feeds


def _causal(starts: Tensor, rows: int, slots: Tensor) -> Tensor:
    """A row sees every slot up to its own.  # [B] -> [B, R, S]"""
    own = starts.view(-1, 1, 1) + torch.arange(rows, device=slots.device).unsqueeze(1)
    unseen = torch.arange(slots.shape[4], device=slots.device) > own
    return slots.new_zeros(unseen.shape).masked_fill_(unseen, float("-inf"))

"""Whether a target's rows have the same bits however many of them share a pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specflow.draft.nn.attention import KEY_STEP
from specflow.target.cache import KVCache

if TYPE_CHECKING:
    from specflow.target.base import Target
    from specflow.types import TargetOutput

__all__ = ["passes_agree"]

_CONTEXTS = (KEY_STEP - 1, 5)
"""Committed rows of the probe's two requests: the first one's next rows lie on both sides of a multiple of 64."""
_WIDTHS = (2, 5)
"""Rows of its passes, as compared with one row at a time."""


@torch.no_grad()
def passes_agree(target: Target, layers: tuple[int, int] | None = None) -> bool:
    """Whether attention, norms and all else give the rows of a block the bits they have one at a time.

    Args:
        target: Its caches are `KVCache`s.
        layers: As in `Target.forward`; None probes all.
    """
    info, widest = target.info, max(_WIDTHS)
    tokens = torch.arange(2 * widest, device=info.device).remainder(info.vocab_size).view(2, widest)
    starts = torch.tensor(_CONTEXTS, device=info.device).unsqueeze(1)
    positions = starts + torch.arange(widest, device=info.device)
    cache = target.new_cache(2, KEY_STEP + widest)
    assert isinstance(cache, KVCache)
    values = torch.sin(torch.arange(cache.data[0].numel(), device=info.device) * 0.7)
    cache.data[:] = values.view_as(cache.data[0])
    cache.keep(_CONTEXTS)
    first, alone = cache.row(0), []
    for row in range(min(_WIDTHS)):
        alone.append(target.forward(tokens[:1, row : row + 1], positions[:1, row : row + 1], first, layers=layers))
        first.keep([1])
    first.clear(0)
    first.keep(_CONTEXTS[:1])
    blocks = [target.forward(tokens[:, :m], positions[:, :m], cache, layers=layers) for m in _WIDTHS]
    return all(_same_row(one, block, row) for block in blocks for row, one in enumerate(alone))


def _same_row(alone: TargetOutput, block: TargetOutput, row: int) -> bool:
    """Whether a pass of one row equals that row of a block's first request, bit for bit."""
    pairs = ((alone.logits, block.logits), (alone.hidden_pre, block.hidden_pre))
    return all(one is not None and many is not None and torch.equal(one[0, 0], many[0, row]) for one, many in pairs)

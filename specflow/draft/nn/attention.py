"""Attention over committed rows and the rows of the present pass, in two layouts.

`attend_together` is the ordinary one. `attend_rowwise` makes every query row its own batch entry with a key length
rounded up to a multiple of 64, so that the bits of a row do not depend on how many rows the pass has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["KEY_STEP", "AttentionPlan", "KeyRooms", "Sight", "attention_biases", "plan_attention"]

KEY_STEP = 64
"""Key lengths are rounded up to a multiple of this in the row-invariant layout."""


class KeyRooms:
    """Views of every layer's key and value slots that one pass writes and reads.

    Cut once a pass for all layers: after a linear has streamed its weights through the CPU's caches, every operator
    costs several times what it costs alone, so a layer should run few of them.

    Args:
        data: Slots of all layers, keys and values.  # [L, 2, B, Hk, capacity, Dh]
        plan: Any plan of the pass; all see the same slots.
    """

    def __init__(self, data: Tensor, plan: AttentionPlan) -> None:
        rows = plan.rows
        spans = [slice(b * rows, (b + 1) * rows) for b in range(len(plan.lengths))]
        fresh = [data[:, :, b, :, length : length + rows].unbind(0) for b, length in enumerate(plan.lengths)]
        self._fresh = list(zip(spans, fresh, strict=True))
        if plan.rowwise:
            seen = [data[:, :, b, :, : bias.shape[-1]].unsqueeze(2) for b, bias in enumerate(plan.biases)]
            seen = [part.expand(-1, -1, rows, -1, -1, -1) for part in seen]
        else:
            seen = [data[..., : plan.biases[0].shape[-1], :]]
        self._seen = [part.flatten(0, 1).unbind(0) for part in seen]

    def write(self, layer: int, fresh: Tensor) -> None:
        """Put the pass's rows above the committed ones.  # [B * M, 2, Hk, Dh]"""
        for span, rooms in self._fresh:
            rooms[layer].copy_(fresh[span].permute(1, 2, 0, 3))

    def read(self, layer: int, part: int) -> tuple[Tensor, Tensor]:
        """Keys and values to attend over, of batch row `part` in the rowwise layout, of all rows (part 0) otherwise."""
        return self._seen[part][2 * layer], self._seen[part][2 * layer + 1]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Which keys each row sees, as additive biases, made once a pass and used by every layer."""

    lengths: Sequence[int]  # [B] committed rows
    rows: int  # M
    rowwise: bool
    biases: Sequence[Tensor]  # rowwise: B tensors [M, 1, 1, S_b]; together: one tensor [B, 1, M, S]

    def attend(self, queries: Tensor, rooms: KeyRooms, layer: int, scale: float) -> Tensor:
        """Attention of all rows.

        Args:
            queries: Rotated queries.  # [B * M, Hq, Dh]
            rooms: The pass's rows are already written.
            layer: Which layer's slots.
            scale: Factor of the scores.

        Returns:
            Mixed values.  # [B * M, Hq * Dh]
        """
        if self.rowwise:
            return self._attend_rowwise(queries, rooms, layer, scale)
        batch, width = len(self.lengths), queries.shape[-1]
        heads = queries.view(batch, self.rows, -1, width).transpose(1, 2)
        keys, values = rooms.read(layer, 0)
        bias = self.biases[0]
        mixed = F.scaled_dot_product_attention(heads, keys, values, attn_mask=bias, scale=scale, enable_gqa=True)
        return mixed.transpose(1, 2).reshape(batch * self.rows, -1)

    def _attend_rowwise(self, queries: Tensor, rooms: KeyRooms, layer: int, scale: float) -> Tensor:
        mixed = []
        for b, bias in enumerate(self.biases):
            keys, values = rooms.read(layer, b)
            heads = queries if len(self.biases) == 1 else queries[b * self.rows : (b + 1) * self.rows]
            heads = heads.view(self.rows, keys.shape[1], -1, keys.shape[3])
            bias = bias.expand(-1, -1, heads.shape[2], -1)
            out = F.scaled_dot_product_attention(heads, keys, values, attn_mask=bias, scale=scale)
            mixed.append(out.view(self.rows, -1))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)


def plan_attention(
    lengths: Sequence[int],
    positions: Tensor,
    mask: Tensor | None,
    window: int | None,
    rowwise: bool,
    dtype: torch.dtype,
) -> AttentionPlan:
    """Lay out who sees what.

    Args:
        lengths: Committed rows of each batch row; slot s of them holds position s.  # [B]
        positions: Positions of the new rows.  # [B, M]
        mask: Rows seen by new rows, None is causal: the last M columns are the new rows, columns before them the
            latest committed slots.  # [B or 1, M, P + M] bool
        window: Sliding window: a row at position p sees positions above p - window; None sees all.
        rowwise: Row-invariant layout.
        dtype: Of the bias; the model's.
    """
    batch, rows = positions.shape
    widths = [length + rows for length in lengths]
    widths = [-(-w // KEY_STEP) * KEY_STEP for w in widths] if rowwise else [max(widths)] * batch
    biases = attention_biases(Sight(lengths, positions, mask, window), widths, dtype)
    if rowwise:
        return AttentionPlan(lengths, rows, True, [bias.view(rows, 1, 1, -1) for bias in biases])
    return AttentionPlan(lengths, rows, False, [torch.stack(biases).unsqueeze(1)])


@dataclass(frozen=True, slots=True)
class Sight:
    """Which keys the new rows of a pass see. Slot s of a batch row holds position s below its length."""

    lengths: Sequence[int]  # [B] committed rows
    positions: Tensor  # [B, M] of the new rows
    mask: Tensor | None = None  # [B or 1, M, P + M] bool; None: causal
    window: int | None = None  # a row at position p sees positions above p - window


def attention_biases(sight: Sight, widths: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """What is added to the scores of every slot: 0 where a row sees it, -inf where not.

    Args:
        sight: Who sees what.
        widths: Slots to lay out for each batch row, new rows included.  # [B]
        dtype: Of the biases; the model's.

    Returns:
        One for each batch row.  # B tensors [M, width]
    """
    positions, mask, window = sight.positions, sight.mask, sight.window
    rows = positions.shape[1]
    if mask is None:
        mask = torch.ones(rows, rows, dtype=torch.bool, device=positions.device).tril().unsqueeze(0)
    block = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    biases = []
    for b, (length, width) in enumerate(zip(sight.lengths, widths, strict=True)):
        bias = torch.full((rows, width), float("-inf"), dtype=dtype, device=positions.device)
        bias[:, :length] = 0.0
        bias[:, length + rows - block.shape[2] : length + rows] = block[b if block.shape[0] > 1 else 0]
        if window is not None:
            held = torch.arange(width, device=positions.device)
            held[length : length + rows] = positions[b]
            bias.masked_fill_(held <= positions[b].unsqueeze(1) - window, float("-inf"))
        biases.append(bias)
    return biases

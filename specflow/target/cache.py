"""The preallocated key/value cache of torch targets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specflow.draft.nn.attention import KEY_STEP

__all__ = ["KVCache"]


class KVCache:
    """Key and value rows of all layers in one tensor; see `target.base.Cache` for the contract.

    Slot s of a batch row holds position s of its request below `lengths[b]`, and scratch rows above.
    """

    def __init__(self, layers: int, batch: int, heads: int, capacity: int, width: int, like: Tensor) -> None:
        slots = -(-capacity // KEY_STEP) * KEY_STEP
        self.data = torch.zeros(layers, 2, batch, heads, slots, width, dtype=like.dtype, device=like.device)
        self._lengths = [0] * batch
        self._first = 0

    @property
    def lengths(self) -> Sequence[int]:
        batch = self.data.shape[2]
        return self._lengths[self._first : self._first + batch]

    @property
    def capacity(self) -> int:
        return int(self.data.shape[4])

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Key and value slots of one layer.  # [B, Hk, capacity, Dh] each"""
        keys, values = self.data[index].unbind(0)
        return keys, values

    def keep(self, counts: Sequence[int], path: Tensor | None = None) -> None:
        for b, count in enumerate(counts):
            length = self._lengths[self._first + b]
            if path is not None and count > 0:
                rows = path[b, :count] + length
                self.data[:, :, b, :, length : length + count] = self.data[:, :, b].index_select(3, rows)
            self._lengths[self._first + b] = length + count

    def select(self, rows: Sequence[int]) -> None:
        self.data = self.data[:, :, list(rows)].contiguous()
        self._lengths = [self._lengths[b] for b in rows]

    def clear(self, row: int) -> None:
        self._lengths[self._first + row] = 0

    def row(self, row: int) -> KVCache:
        return self._view(self.data[:, :, row : row + 1], self._lengths, self._first + row)

    def fork(self) -> KVCache:
        return self._view(self.data, list(self.lengths), 0)

    @staticmethod
    def _view(data: Tensor, lengths: list[int], first: int) -> KVCache:
        view = object.__new__(KVCache)
        view.data, view._lengths, view._first = data, lengths, first
        return view

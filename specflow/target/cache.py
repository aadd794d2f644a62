"""The preallocated key/value cache of targets and drafters, whatever computes their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specflow.draft.nn.attention import KEY_STEP

__all__ = ["KVCache"]

_FIRST_SLOTS = 64
"""What a trimmed cache begins with."""


@dataclass(slots=True)
class _Memory:
    """Slots that a cache and its views share."""

    data: Tensor  # [L, 2, B, Hk, slots, Dh]


class KVCache:
    """Key and value rows of all layers in one tensor; see `target.base.Cache` for the contract.

    Slot s of a batch row holds position s of its request below `lengths[b]`, and scratch rows above.
    """

    def __init__(self, layers: int, batch: int, heads: int, capacity: int, width: int, like: Tensor) -> None:
        self._capacity = _rounded(capacity)
        self._memory = _Memory(like.new_zeros(layers, 2, batch, heads, self._capacity, width))
        self._lengths = [0] * batch
        self._first, self._batch = 0, batch

    @property
    def data(self) -> Tensor:
        """Its slots as they are now.  # [L, 2, B, Hk, slots, Dh]"""
        return self._memory.data[:, :, self._first : self._first + self._batch]

    @property
    def lengths(self) -> Sequence[int]:
        return self._lengths[self._first : self._first + self._batch]

    @property
    def capacity(self) -> int:
        return self._capacity

    def trim(self, slots: int = _FIRST_SLOTS) -> None:
        """Give back what is above so many slots, for passes that cost by the slot; `make_room` takes it again."""
        assert max(self._lengths) <= slots, f"{max(self._lengths)} committed rows in {slots} slots"
        if _rounded(slots) < self._memory.data.shape[4]:
            self._memory.data = self._memory.data[..., : _rounded(slots), :].clone()

    def make_room(self, positions: int) -> None:
        """See that there are slots for so many positions, in this cache and all its views."""
        old = self._memory.data
        if positions > old.shape[4]:
            slots = min(_rounded(max(positions, old.shape[4] * 9 // 8)), self._capacity)
            assert positions <= slots, f"{positions} positions in a cache for {self._capacity}"
            with torch.inference_mode(False):  # targets grow it in their passes, and `keep` writes into it outside them
                self._memory.data = data = old.new_empty(*old.shape[:4], slots, old.shape[5])
                data[..., : old.shape[4], :] = old
                data[..., old.shape[4] :, :] = 0.0  # attention gives rows that are not there the weight 0

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Key and value slots of one layer.  # [B, Hk, capacity, Dh] each"""
        keys, values = self.data[index].unbind(0)
        return keys, values

    def keep(self, counts: Sequence[int], path: Tensor | None = None) -> None:
        for b, count in enumerate(counts):
            length = self._lengths[self._first + b]
            if path is not None and count > 0:
                rows, slots = path[b, :count] + length, self.data[:, :, b]
                slots[:, :, :, length : length + count] = slots.index_select(3, rows)
            self._lengths[self._first + b] = length + count

    def select(self, rows: Sequence[int]) -> None:
        self._memory.data = self._memory.data[:, :, list(rows)].contiguous()
        self._lengths = [self._lengths[b] for b in rows]
        self._batch = len(rows)

    def clear(self, row: int) -> None:
        self._lengths[self._first + row] = 0

    def row(self, row: int) -> KVCache:
        return self._view(self._lengths, self._first + row, 1)

    def fork(self) -> KVCache:
        lengths = [0] * self._first + list(self.lengths)
        return self._view(lengths, self._first, self._batch)

    def _view(self, lengths: list[int], first: int, batch: int) -> KVCache:
        view = object.__new__(KVCache)
        view._memory, view._capacity = self._memory, self._capacity
        view._lengths, view._first, view._batch = lengths, first, batch
        return view


def _rounded(slots: int) -> int:
    return -(-slots // KEY_STEP) * KEY_STEP

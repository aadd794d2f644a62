"""Random numbers of a round, keyed by request and position: the same key gives the same number, on every machine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.types import Topology

__all__ = ["RoundNoise"]

MASK64 = (1 << 64) - 1


class RoundNoise:
    """Random numbers of one round, each a pure function of its key; nothing is stored or shared.

    Streams and their keys:
        "target"  (seed, position): draws from the target's law, so every way of decoding draws the same tokens
        others    (seed, start of the round, position): "accept" decides about nodes, "residual" draws the recovered
                  token, "draft" belongs to drafters. Positions are drafted again in later rounds, and block
                  verification lets later nodes decide about earlier ones: a number used twice would bias the text.

    A number depends neither on neighbours in the batch nor on the length of the block, and lies strictly between 0
    and 1.

    Args:
        seeds: One a row.  # [B]
        starts: Absolute position of each row's anchor.  # [B]
        device: Where tensors are wanted.
    """

    def __init__(self, seeds: Sequence[int], starts: Sequence[int], device: torch.device) -> None:
        self._seeds, self._starts, self._device = seeds, starts, device

    def uniform(self, stream: str, row: int, position: int) -> float:
        return _number(self._key(stream, row), position)

    def once(self, stream: str) -> Tensor:
        """The one number of this round, for what happens once in it.  # [B] float64"""
        numbers = [self.uniform(stream, row, start) for row, start in enumerate(self._starts)]
        return torch.tensor(numbers, dtype=torch.float64, device=self._device)

    def rows(self, stream: str, topology: Topology) -> Tensor:
        """A number for each row of the pass, keyed by the position of the token it scores.  # [B, M] float64"""
        by_depth = self._table(stream, topology.max_depth + 1)
        return by_depth.gather(1, topology.depth.expand(len(by_depth), -1))

    def nodes(self, stream: str, num_nodes: int) -> Tensor:
        """A number for each node, siblings told apart; in a chain keyed by the node's position.  # [B, N] float64"""
        return self._table(stream, num_nodes)

    def _table(self, stream: str, width: int) -> Tensor:
        """Numbers of the positions after each row's anchor.  # [B, width] float64"""
        table = []
        for row, start in enumerate(self._starts):
            key = self._key(stream, row)
            table.append([_number(key, position) for position in range(start + 1, start + 1 + width)])
        return torch.tensor(table, dtype=torch.float64, device=self._device)

    def _key(self, stream: str, row: int) -> int:
        key = _mixed(self._seeds[row] ^ _stream_key(stream))
        return key if stream == "target" else _mixed(key ^ self._starts[row])


@lru_cache(maxsize=64)
def _stream_key(stream: str) -> int:
    return int.from_bytes(blake2b(stream.encode(), digest_size=8).digest(), "little")


def _mixed(z: int) -> int:
    """The output function of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64 bits that avalanches."""
    z = (z + 0x9E3779B97F4A7C15) & MASK64
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK64
    return z ^ z >> 31


def _number(key: int, position: int) -> float:
    """The middle of one of 2^52 equal cells of the unit interval."""
    return ((_mixed(key ^ _mixed(position)) >> 12) + 0.5) * 2.0**-52

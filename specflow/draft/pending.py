"""Observed positions that a drafting network has not run over yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.draft.base import Needs
    from specflow.types import Features, Observation

__all__ = ["TOGETHER", "Pending", "PendingRows", "pick_features"]

TOGETHER = 32
"""Rows with more positions than this (prompts) run on their own; fewer are padded to each other."""


@dataclass(frozen=True, slots=True)
class PendingRows:
    """Positions of some rows, padded to the longest."""

    row: int | None  # the one row they belong to; None: the batch, rows without news included
    tokens: Tensor  # [B or 1, R] the token after each position; any id where there is none
    positions: Tensor  # [B or 1, R] absolute
    features: Tensor  # [B or 1, R, F]
    counts: tuple[int, ...]  # [B or 1] positions of each row

    def last(self, rows: Tensor) -> Tensor:
        """The last real row of each batch row; row 0 where it has none.  # [B, R, X] -> [B, X]"""
        index = torch.tensor([max(0, count - 1) for count in self.counts], device=rows.device)
        return rows[torch.arange(len(self.counts), device=rows.device), index]


@dataclass(frozen=True, slots=True)
class _Piece:
    tokens: tuple[int, ...]
    start: int
    features: Tensor  # [count, F]


class Pending:
    """Keeps what was observed until a network asks for it: rounds that draft nothing cost it nothing.

    Args:
        pick: What of the features the network reads.  # -> [B, R, F]
    """

    def __init__(self, pick: Callable[[Features], Tensor]) -> None:
        self._pick = pick
        self._rows: list[list[_Piece]] = []

    def reset(self, batch: int) -> None:
        self._rows = [[] for _ in range(batch)]

    def start(self, row: int) -> None:
        self._rows[row] = []

    def select(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[row] for row in rows]

    def add(self, observation: Observation, rows: Sequence[int]) -> None:
        assert observation.features is not None, "a network that reads features got none"
        picked = self._pick(observation.features)
        for index, row in enumerate(rows):
            count = observation.counts[index]
            piece = _Piece(observation.tokens[index][:count], observation.starts[index], picked[index, :count].clone())
            self._rows[row].append(piece)

    def take(self) -> Iterator[PendingRows]:
        """Everything kept so far, long rows first; it is forgotten with that."""
        rows, self._rows = self._rows, [[] for _ in self._rows]
        sizes = [sum(len(piece.tokens) for piece in pieces) for pieces in rows]
        for row, pieces in enumerate(rows):
            if sizes[row] > TOGETHER:
                yield _padded([pieces], row)
        short = [pieces if size <= TOGETHER else [] for pieces, size in zip(rows, sizes, strict=True)]
        if any(short):
            yield _padded(short, None)


def pick_features(needs: Needs, features: Features) -> Tensor:
    """The features that a network asked for: its taps side by side, or one hidden state.  # [B, R, F]"""
    if needs.taps:
        return torch.cat([features.taps[layer] for layer in needs.taps], dim=-1)
    hidden = features.hidden_pre if needs.hidden_pre else features.hidden_post
    assert hidden is not None, "the target gave no hidden states"
    return hidden


def _padded(rows: Sequence[Sequence[_Piece]], row: int | None) -> PendingRows:
    counts = [sum(len(piece.tokens) for piece in pieces) for pieces in rows]
    width = max(counts)
    like = next(piece.features for pieces in rows for piece in pieces)
    features = like.new_zeros(len(rows), width, like.shape[-1])
    tokens, positions = [[0] * width for _ in rows], [[0] * width for _ in rows]
    for index, pieces in enumerate(rows):
        at = 0
        for piece in pieces:
            end = at + len(piece.tokens)
            tokens[index][at:end] = piece.tokens
            positions[index][at:end] = range(piece.start, piece.start + len(piece.tokens))
            features[index, at:end] = piece.features
            at = end
    both = torch.tensor([tokens, positions], device=like.device)
    return PendingRows(row, both[0], both[1], features, tuple(counts))

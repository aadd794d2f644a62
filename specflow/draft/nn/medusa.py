"""Medusa heads (2401.10774): residual blocks on the target's last hidden row, one head a draft position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specflow.draft.nn.linear import Linear, over_rows

if TYPE_CHECKING:
    from specflow.draft.nn.weights import WeightReader

__all__ = ["MedusaHeads", "MedusaShape", "Projection", "ResidualBlock", "read_medusa"]


@dataclass(frozen=True, slots=True)
class MedusaShape:
    """What the heads consist of."""

    num_heads: int  # in the checkpoint
    num_used: int  # K: the first ones, as many as will be drafted from
    num_layers: int  # residual blocks of a head
    hidden_size: int  # H
    draft_vocab_size: int  # Vd
    own_outputs: bool  # every head has an output layer of its own
    projected: bool = False  # every head ends with a linear layer of its own, before the output layer


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b).  # [..., H] -> [..., H]"""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, rows: Tensor) -> Tensor:
        return rows + F.silu(over_rows(self.linear, rows))


class Projection(nn.Module):
    """W x: what a head needs to take things back.

    A residual block adds SiLU's values, which hardly go below 0; an output layer that many heads share, or the target
    itself, cannot subtract for one of them.  # [..., H] -> [..., H]
    """

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, rows: Tensor) -> Tensor:
        return over_rows(self.linear, rows)


class MedusaHeads(nn.Module):
    """All heads over any number of rows: of one position each request when drafting, of whole texts when training.

    Head k, from 1, at position t foretells token t + 1 + k; the target's own head foretells t + 1.

    Args:
        blocks: Residual blocks of each head, and its projection where it has one.
        outputs: Output layer of each head; None: `score` serves all of them.
        score: The target's head, over the ids the heads draft from.  # [..., H] -> [..., Vd]
    """

    def __init__(
        self,
        blocks: Sequence[Sequence[ResidualBlock | Projection]],
        outputs: Sequence[Linear] | None,
        score: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(*each) for each in blocks)
        self.outputs = None if outputs is None else nn.ModuleList(outputs)
        self._score = score

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and hidden rows of every head.

        Args:
            features: Last hidden rows of the target, after its final norm.  # [..., H]

        Returns:
            # [..., K, Vd], [..., K, H]
        """
        hidden = torch.stack([head(features) for head in self.blocks], dim=-2)
        if self.outputs is None:
            return self._score(hidden), hidden
        logits = [self._score_of(k, rows) for k, rows in enumerate(hidden.unbind(-2))]
        return torch.stack(logits, dim=-2), hidden

    def head(self, k: int, features: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and hidden rows of one head, counted from 0.  # [..., H] -> [..., Vd], [..., H]"""
        hidden = self.blocks[k](features)
        return self._score_of(k, hidden), hidden

    def _score_of(self, k: int, hidden: Tensor) -> Tensor:
        if self.outputs is None:
            return self._score(hidden)
        return over_rows(self.outputs[k], hidden)  # type: ignore[arg-type]


def read_medusa(reader: WeightReader, shape: MedusaShape, score: Callable[[Tensor], Tensor]) -> MedusaHeads:
    """Heads under their published names: `{k}.{j}.linear.*` of block j of head k, `{k}.{num_layers}.weight` its output.

    A projection, which is ours, is `{k}.projection.weight`.

    Args:
        reader: The drafter's tensors. Those of heads that are not used stay where they are.
        shape: Sizes.
        score: See `MedusaHeads`.

    Raises:
        CheckpointError: A tensor is missing or has another shape.
    """
    width = shape.hidden_size
    blocks: list[list[ResidualBlock | Projection]] = [
        [ResidualBlock(reader.linear(f"{k}.{j}.linear", width, width, bias=True)) for j in range(shape.num_layers)]
        for k in range(shape.num_used)
    ]
    if shape.projected:
        for k, each in enumerate(blocks):
            each.append(Projection(reader.linear(f"{k}.projection", width, width, bias=False)))
    outputs = None
    if shape.own_outputs:
        names = [f"{k}.{shape.num_layers}" for k in range(shape.num_used)]
        outputs = [reader.linear(name, shape.draft_vocab_size, width, bias=False) for name in names]
    for k in range(shape.num_used, shape.num_heads):
        reader.skip(f"{k}.projection.weight")
        for part in ("linear.weight", "linear.bias", "weight"):
            for j in range(shape.num_layers + 1):
                reader.skip(f"{k}.{j}.{part}")
    return MedusaHeads(blocks, outputs, score)

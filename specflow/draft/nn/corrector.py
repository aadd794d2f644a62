"""Correctors: a cheap bias that makes each position of a parallel block follow the token before it.

All three look the previous token up in a table W1 of rank r and map the result to draft logits with W2, so a step costs
a product of r by Vd instead of a pass (DSpark, 2607.05147). W1 is indexed by target ids, also where W2 emits a reduced
draft vocabulary.

    markov  B_k = W2 W1[x_{k-1}]
    gated   B_k = W2 (g * W1[x_{k-1}]),  g = sigmoid(W_g [h_k; W1[x_{k-1}]] + b)
    rnn     (g, c, o) = W_j [s_{k-1}; W1[x_{k-1}]; h_k] + b,  B_k = W2 tanh(o)
            s_k = sigmoid(g) * s_{k-1} + (1 - sigmoid(g)) * tanh(c),  s_0 = 0
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specflow.draft.nn.linear import Linear, over_rows

if TYPE_CHECKING:
    from specflow.draft.nn.weights import WeightReader

__all__ = [
    "CorrectorShape",
    "GatedCorrector",
    "MarkovCorrector",
    "RNNCorrector",
    "TableCorrector",
    "look_up",
    "read_corrector",
]


@dataclass(frozen=True, slots=True)
class CorrectorShape:
    """Sizes of a corrector."""

    rank: int  # r
    hidden_size: int  # H of the network whose logits are corrected
    vocab_size: int  # V
    draft_vocab_size: int  # Vd


class TableCorrector(nn.Module, ABC):
    """What the correctors share: table, output, and no state.

    Args:
        table: W1.  # [V, r]
        out: W2.  # r -> Vd
    """

    def __init__(self, table: Tensor, out: Linear) -> None:
        super().__init__()
        self.table = nn.Parameter(table, requires_grad=False)
        self.out = out

    def embed(self, tokens: Tensor) -> Tensor:
        """W1 of target ids; PAD gives any row.  # [...] -> [..., r]"""
        return look_up(self.table, tokens)

    def begin(self, batch: int) -> Tensor:
        """See `Corrector.begin`.  # [B, 0]"""
        return self.table.new_zeros(batch, 0)

    def correct(self, previous: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """See `Corrector.correct`."""
        return self.follow(self.embed(previous), hidden, state)

    @abstractmethod
    def follow(self, rows: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The same from the table's rows of the tokens before, where they are at hand.

        Args:
            rows: W1[x_{k-1}].  # [..., r]
            hidden: h_k.  # [..., H]
            state: s_{k-1}.  # [..., X]

        Returns:
            B_k [..., Vd] and s_k [..., X].
        """


class MarkovCorrector(TableCorrector):
    """The bias depends on the previous token alone."""

    def follow(self, rows: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """See `TableCorrector.follow`."""
        return over_rows(self.out, rows), state


class GatedCorrector(TableCorrector):
    """The position's hidden row says how much of the previous token's row counts.

    Args:
        table: W1.  # [V, r]
        out: W2.  # r -> Vd
        gate: W_g and its bias.  # H + r -> r
    """

    def __init__(self, table: Tensor, out: Linear, gate: Linear) -> None:
        super().__init__(table, out)
        self.gate = gate

    def follow(self, rows: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """See `TableCorrector.follow`."""
        gate = over_rows(self.gate, torch.cat((hidden, rows), dim=-1)).sigmoid()
        return over_rows(self.out, gate * rows), state


class RNNCorrector(TableCorrector):
    """A small recurrent state carries all earlier tokens of the block.

    Args:
        table: W1.  # [V, r]
        out: W2.  # r -> Vd
        joint: W_j and its bias; gate, candidate and output below each other.  # 2 r + H -> 3 r
    """

    def __init__(self, table: Tensor, out: Linear, joint: Linear) -> None:
        super().__init__(table, out)
        self.joint = joint

    def begin(self, batch: int) -> Tensor:
        """# [B, r]"""
        return self.table.new_zeros(batch, self.table.shape[1])

    def follow(self, rows: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """See `TableCorrector.follow`. The bias is made from the state before the token, not from the one after it."""
        seen = torch.cat((state, rows, hidden), dim=-1)
        gate, candidate, output = over_rows(self.joint, seen).chunk(3, dim=-1)
        kept = gate.sigmoid()
        return over_rows(self.out, output.tanh()), kept * state + (1.0 - kept) * candidate.tanh()


def look_up(table: Tensor, tokens: Tensor) -> Tensor:
    """Rows of a table; PAD gives any row.  # [V, r], [...] -> [..., r]"""
    return F.embedding(tokens.clamp_min(0), table)


def read_corrector(kind: str, reader: WeightReader, shape: CorrectorShape) -> TableCorrector:
    """A corrector under its published tensor names.

    Args:
        kind: markov, gated or rnn.
        reader: The drafter's tensors. Biases are there where the checkpoint has them.
        shape: Sizes.

    Raises:
        CheckpointError: A tensor is missing or has another shape.
    """
    table = reader.take("markov_head.markov_w1.weight", (shape.vocab_size, shape.rank))
    out = reader.linear("markov_head.markov_w2", shape.draft_vocab_size, shape.rank, bias=False)
    return _READERS[kind](reader, shape, table, out)


def _read_gated(reader: WeightReader, shape: CorrectorShape, table: Tensor, out: Linear) -> TableCorrector:
    gate = reader.linear("markov_head.gate_proj", shape.rank, shape.hidden_size + shape.rank)
    return GatedCorrector(table, out, gate)


def _read_rnn(reader: WeightReader, shape: CorrectorShape, table: Tensor, out: Linear) -> TableCorrector:
    joint = reader.linear("markov_head.joint_proj", 3 * shape.rank, 2 * shape.rank + shape.hidden_size)
    return RNNCorrector(table, out, joint)


_READERS: Mapping[str, Callable[[WeightReader, CorrectorShape, Tensor, Linear], TableCorrector]] = {
    "markov": lambda reader, shape, table, out: MarkovCorrector(table, out),
    "gated": _read_gated,
    "rnn": _read_rnn,
}

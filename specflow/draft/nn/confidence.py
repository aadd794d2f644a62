"""The confidence head: how likely a draft token is to stand, said before the token is known.

DSpark (2607.05147): c_k = sigmoid((w [h_k; W1[x_{k-1}]] + b) / T_k), the probability that x_k is accepted given that
x_<k are. It sees tokens before its own alone, so a block may be shortened by it without bias (methods 0.2). The
temperatures T_k come from `specflow.calibration`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from specflow.draft.nn.linear import Linear, over_rows

if TYPE_CHECKING:
    from specflow.draft.nn.weights import WeightReader

__all__ = ["LinearConfidence", "TokenRows", "read_confidence"]

TokenRows = Callable[[Tensor], Tensor]
"""Rows that stand for tokens: target ids [...] -> [..., r]."""


class LinearConfidence(nn.Module):
    """A `ConfidenceHead` (see `draft.chain`) of any network: one linear output, in float32 or wider.

    Args:
        weight: w.  # [1, H + r], or [1, H] without token rows
        bias: b.  # [1]
        token_rows: W1 of a corrector; None reads the hidden row alone.
        temperatures: T_1, T_2, ...; those that are not given are 1.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        token_rows: TokenRows | None = None,
        temperatures: Sequence[float] = (),
    ) -> None:
        super().__init__()
        wide = torch.promote_types(weight.dtype, torch.float32)
        self.proj = Linear(weight.to(wide), None if bias is None else bias.to(wide))
        self.temperatures = tuple(temperatures)
        self._token_rows = token_rows

    def logits(self, hidden: Tensor, before: Tensor, rows: Tensor | None = None) -> Tensor:
        """Without temperature, for training and calibration.

        Args:
            hidden: h_k.  # [..., H]
            before: Target id of x_{k-1}.  # [...]
            rows: W1[x_{k-1}], where they are at hand; read by a head with token rows.  # [..., r]

        Returns:
            Log-odds that x_k stands.  # [...] float32 or wider
        """
        seen = hidden
        if self._token_rows is not None:
            seen = torch.cat((hidden, self._token_rows(before) if rows is None else rows), dim=-1)
        return over_rows(self.proj, seen.to(self.proj.weight.dtype)).squeeze(-1)

    def forward(self, hidden: Tensor, before: Tensor, step: int) -> Tensor:
        """Probability that the token of a step stands.

        Args:
            hidden: What its logits are made from.  # [..., H]
            before: Target id of the token before it.  # [...]
            step: k - 1.

        Returns:
            c_k.  # [...]
        """
        logits = self.logits(hidden, before)
        heated = step < len(self.temperatures)
        return (logits / self.temperatures[step] if heated else logits).sigmoid()


def read_confidence(
    reader: WeightReader,
    hidden_size: int,
    bias: bool = True,
    token_rows: tuple[TokenRows, int] | None = None,
    temperatures: Sequence[float] = (),
) -> LinearConfidence:
    """A confidence head under its published tensor names.

    Args:
        reader: The drafter's tensors.
        hidden_size: H of the network.
        bias: Whether it has b.
        token_rows: W1 and its rank r; None reads the hidden row alone.
        temperatures: T_1, T_2, ...

    Raises:
        CheckpointError: A tensor is missing or has another shape.
    """
    rows, rank = token_rows or (None, 0)
    weight = reader.take("confidence_head.proj.weight", (1, hidden_size + rank))
    return LinearConfidence(
        weight, reader.take("confidence_head.proj.bias", (1,)) if bias else None, rows, temperatures
    )

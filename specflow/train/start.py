"""Tensors that training begins with."""

from __future__ import annotations

import torch
from torch import Tensor

from specflow.draft.nn.weights import SeededTensors

__all__ = ["StartTensors", "vocabulary_offsets"]

_ZERO = (
    "linear.weight",  # Medusa's residual blocks: every head begins as the target's own
    "markov_head.markov_w2.weight",  # a corrector that does not correct yet
    "confidence_head.proj.weight",
    "adapter.up.weight",
    ".bias",
)
"""Endings of the names of tensors that begin as zero."""


class StartTensors(SeededTensors):
    """Gains of 1, biases of 0, matrices that keep the size of what passes through, and what is given.

    Args:
        seed: Of the random ones.
        given: Tensors that are known, such as layers of the target or the map of a reduced vocabulary.
    """

    def draw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """See `SeededTensors.draw`."""
        if name.endswith(_ZERO):
            return torch.zeros(shape)
        return torch.ones(shape) if len(shape) == 1 else super().draw(name, shape)


def vocabulary_offsets(counts: Tensor, size: int, keep: tuple[int, ...] = ()) -> Tensor:
    """`d2t` of the tokens that a text uses most: target id less draft id, ids in ascending order (EAGLE-3).

    Args:
        counts: How often each token occurs.  # [V]
        size: Of the reduced vocabulary.  # Vd
        keep: Tokens that must be in it, such as the stop ids.

    Returns:
        # [Vd] int64
    """
    wanted = counts.double().clone()
    wanted[list(keep)] = float("inf")
    # Of tokens that occur equally often the first: a run that goes on must find the same ones.
    ids = wanted.sort(descending=True, stable=True).indices[:size].sort().values
    offsets: Tensor = ids - torch.arange(size)
    return offsets

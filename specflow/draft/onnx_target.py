"""What a drafter's graphs take from the target: embedding and head, read through its protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specflow.draft.nn.linear import Linear
from specflow.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.target.base import Target

__all__ = ["borrowed_embedding", "borrowed_head"]

_BENT = 0.05
"""Share of the largest logit by which a head may miss a linear layer: 8-bit weights do by less."""


def borrowed_embedding(target: Target) -> Tensor:
    """Rows of all tokens.  # [V, H]"""
    info = target.info
    return target.embed(torch.arange(info.vocab_size, device=info.device).unsqueeze(0))[0]


@torch.inference_mode()
def borrowed_head(target: Target) -> Linear:
    """The head as a linear layer: what it makes of unit rows is its weight, of a zero row its bias.

    Raises:
        ModelError: It is no linear layer.
    """
    info = target.info
    like = torch.empty(0, dtype=info.dtype, device=info.device)
    units = torch.eye(info.hidden_size).to(like)
    probe = torch.linspace(-64.0, 64.0, info.hidden_size).to(like)
    zero = like.new_zeros(1, info.hidden_size)
    scores = target.score(torch.cat((units, zero, probe.unsqueeze(0))).unsqueeze(0))[0]
    bias, told = scores[-2], scores[-1]
    biased = bool(bias.any())
    weight = (scores[:-2] - bias if biased else scores[:-2]).t()
    missed = (weight.float() @ probe.float() + bias.float() - told.float()).abs().max()
    if not missed <= _BENT * told.float().abs().max():
        found = f"the head of {info.name} is more than a linear layer"
        raise ModelError("target.model", found, "logits that follow linearly from the last state", "set runtime: torch")
    return Linear(weight, bias if biased else None)

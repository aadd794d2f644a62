"""What drafters take from the target through its protocol: embedding and head, as tensors of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from specflow.draft.nn.linear import Linear
from specflow.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.draft.nn.weights import WeightReader
    from specflow.law import DraftVocabulary
    from specflow.target.base import Cache, Target, TargetInfo
    from specflow.types import TargetOutput

__all__ = ["BorrowedHead", "TargetTables", "borrowed_embedding", "borrowed_head", "borrowed_rows", "draft_head"]

_BENT = 0.05
"""Share of the largest logit by which a head may miss a linear layer: 8-bit weights do by less."""


class BorrowedHead(Linear):
    """Rows of the target's head. A drafter neither trains nor stores them."""


def borrowed_embedding(target: Target) -> Tensor:
    """Rows of all tokens.  # [V, H]"""
    info = target.info
    return target.embed(torch.arange(info.vocab_size, device=info.device).unsqueeze(0))[0]


@torch.inference_mode()
def borrowed_head(target: Target) -> BorrowedHead:
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
    return BorrowedHead(weight, bias if biased else None)


def borrowed_rows(target: Target, tokens: Tensor) -> BorrowedHead:
    """The rows of the target's head for some tokens.  # [Vd] target ids

    Raises:
        ModelError: As in `borrowed_head`.
    """
    head = borrowed_head(target)
    bias = None if head.bias is None else head.bias.detach()[tokens].clone()
    return BorrowedHead(head.weight.detach()[tokens].clone(), bias)


def draft_head(
    reader: WeightReader, own: bool | None, vocabulary: DraftVocabulary | None, target: Target, width: int
) -> Linear | None:
    """The head of a drafter; None where the target's whole head serves.

    Args:
        reader: The drafter's tensors; an own head is `lm_head`.
        own: Whether it has a head of its own; None: where the checkpoint has one, or the vocabulary is reduced.
        vocabulary: Of the draft; None: the target's.
        target: Whose rows serve a reduced vocabulary without a head of its own.
        width: H of the drafter.

    Raises:
        CheckpointError: The head is missing, or has another shape.
        ModelError: The target's head cannot be borrowed.
    """
    if own is None:
        own = vocabulary is not None or reader.has("lm_head.weight")
    if own:
        rows = target.info.vocab_size if vocabulary is None else len(vocabulary.to_target)
        return reader.linear("lm_head", rows, width, bias=False)
    return None if vocabulary is None else reader.pack(borrowed_rows(target, vocabulary.to_target))


class TargetTables:
    """A target whose embedding and head are plain tensors, so that gradients pass through them; for training.

    They are in float32 or wider, as all that is trained.

    Args:
        target: The model; its passes stay as they are.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        wide = torch.promote_types(target.info.dtype, torch.float32)
        self.embedding = borrowed_embedding(target).to(wide, copy=True)  # [V, H]
        head = borrowed_head(target)
        # Tensors made in inference mode cannot be saved for a backward pass.
        self.head = head.weight.detach().to(wide, copy=True)  # [V, H]
        self.head_bias = None if head.bias is None else head.bias.detach().to(wide, copy=True)  # [V]

    @property
    def info(self) -> TargetInfo:
        return self._target.info

    def new_cache(self, batch: int, capacity: int) -> Cache:
        return self._target.new_cache(batch, capacity)

    def forward(self, *args: Any, **kwargs: Any) -> TargetOutput:
        """See `Target.forward`."""
        return self._target.forward(*args, **kwargs)

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens.clamp_min(0), self.embedding)

    def norm(self, hidden: Tensor) -> Tensor:
        return self._target.norm(hidden)

    def score(self, normed: Tensor) -> Tensor:
        return F.linear(normed.to(self.head.dtype), self.head, self.head_bias)

"""What a drafter's graphs take from the target: embedding and head, read through its protocol, and their precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specflow.draft.nn.linear import Linear
from specflow.errors import ModelError
from specflow.onnx.graphs import Precision

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

    from specflow.draft.base import SourceContext
    from specflow.onnx.graphs import GraphSet
    from specflow.target.base import Target, TargetInfo

__all__ = ["borrowed_embedding", "borrowed_head", "engine_graphs"]

_BENT = 0.05
"""Share of the largest logit by which a head may miss a linear layer: 8-bit weights do by less."""


def engine_graphs(context: SourceContext, identity: Mapping[str, object], write: Callable[[GraphSet], None]) -> Path:
    """The folder of a drafter's graphs as they are kept for the engine; written where they are not there yet.

    Args:
        context: Says where graphs are kept, and for which target they are.
        identity: What they depend on beside the target and the precision.
        write: Writes them.

    Raises:
        ModelError: Graphs are not written in this dtype, or there is no place for them.
    """
    if context.graphs is None:
        where, found = "draft.runtime", "onnx, and no place to keep graphs"
        raise ModelError(where, found, "a cache directory", "set draft.runtime: torch")
    info = context.target.info
    if info.dtype == torch.float64 or (info.dtype == torch.bfloat16 and info.device.type == "cpu"):
        found = f"onnx, with a target in {str(info.dtype).removeprefix('torch.')} on {info.device}"
        raise ModelError("draft.runtime", found, "float32 or float16 in ONNX Runtime", "set draft.runtime: torch")
    whole = {**identity, "target": (context.identify(), info.weights)}
    return context.graphs(whole, _precision_beside(info), write)


def _precision_beside(info: TargetInfo) -> Precision:
    """The target's dtype, with weights of 8 bits where the target's are quantised.

    What they lose may change what is drafted, never what is said; a corrected step at a full vocabulary is reading
    weights and little else.
    """
    dtype = str(info.dtype).removeprefix("torch.")
    return Precision.named(dtype if info.weights == dtype else "int8")


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

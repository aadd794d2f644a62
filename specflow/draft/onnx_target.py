"""Where a drafter's graphs are kept for the engine, and in which precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specflow.errors import ModelError
from specflow.onnx.graphs import Precision

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from specflow.draft.base import SourceContext
    from specflow.onnx.graphs import GraphSet
    from specflow.target.base import TargetInfo

__all__ = ["engine_graphs"]


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

"""Linear layers that pack their weights for oneDNN on CPUs, and the probe for row invariance.

Packing uses two private operators of torch. They are checked against `F.linear` once per dtype; where the check fails,
layers keep their plain weights and one line in the log says why.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["MAX_INVARIANT_ROWS", "Linear", "is_row_invariant", "over_rows", "pack_refusal", "packed_status"]

log = logging.getLogger(__name__)

MAX_INVARIANT_ROWS = 32
"""Most rows of one packed call that are probed for row invariance; wider passes are split."""

_CHECKED_SHAPES = ((64, 48), (96, 160))


class Linear(nn.Linear):
    """`nn.Linear` that can pack its weight for inference on a CPU. Rows are the first dimension of a 2-D input."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
        self._packed: Tensor | None = None

    def forward(self, rows: Tensor) -> Tensor:
        """rows [R, in] -> [R, out]"""
        if self._packed is None:
            return F.linear(rows, self.weight, self.bias)
        return _run_packed(rows, self._packed, self.bias)

    def tail(self, rows: Tensor, first: int) -> Tensor:
        """The outputs from one on; packed weights make the others too.  # [R, in] -> [R, out - first]"""
        if self._packed is not None:
            return self(rows)[:, first:]  # type: ignore[no-any-return]
        return F.linear(rows, self.weight[first:], None if self.bias is None else self.bias[first:])

    def pack(self) -> None:
        """Repack the weight for oneDNN where that works, and free the plain copy. Inference only."""
        if self._packed is None and self.weight.device.type == "cpu" and not pack_refusal(self.weight.dtype):
            self._packed = _reorder(self.weight.data)
            self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)


def over_rows(linear: Linear, rows: Tensor) -> Tensor:
    """A linear layer over any leading dimensions: packed weights take flat rows.  # [..., in] -> [..., out]"""
    flat: Tensor = linear(rows.reshape(-1, linear.in_features))
    return flat.view(*rows.shape[:-1], linear.out_features)


def is_row_invariant(linears: Iterable[Linear]) -> bool:
    """Whether a row has the same bits for every number of rows from 2 to 33, tried on these very weights.

    One layer per distinct shape is tried. A pass with one row must be padded to two: a single row may take another
    kernel.
    """
    distinct = {(linear.in_features, linear.out_features): linear for linear in linears}
    return all(_same_bits(linear) for linear in distinct.values())


@cache
def pack_refusal(dtype: torch.dtype) -> str:
    """Why weights of this dtype cannot be packed here; empty where they can. Checked once against `F.linear`."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"oneDNN has no {dtype} linear"
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "this torch build has no oneDNN"
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    try:
        for out_features, in_features in _CHECKED_SHAPES:
            generator = torch.Generator().manual_seed(0)
            weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
            rows = torch.randn(3, in_features, generator=generator).to(dtype)
            with torch.no_grad():
                error = (_run_packed(rows, _reorder(weight), None) - F.linear(rows, weight)).abs().max()
            if not error <= tolerance * in_features**0.5:
                return f"packed linear differs from F.linear by {float(error):.2e}"
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        return str(error).splitlines()[0]
    return ""


def packed_status() -> dict[str, object]:
    """What `doctor` shows: whether packed linears work, why not, and row invariance by dtype."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    refusals = {name: pack_refusal(dtype) for name, dtype in dtypes.items()}
    invariant = {name: not refusals[name] and _probe(dtype) for name, dtype in dtypes.items()}
    return {
        "available": not refusals["float32"],
        "reason": "; ".join(f"{name}: {reason}" for name, reason in refusals.items() if reason),
        "row_invariant": invariant,
    }


def _probe(dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    shapes = ((3072, 576), (576, 1536), (8192, 576))
    linears = [Linear((torch.randn(shape, generator=generator) * 0.03).to(dtype)) for shape in shapes]
    for linear in linears:
        linear.pack()
    return is_row_invariant(linears)


@torch.no_grad()
def _same_bits(linear: Linear) -> bool:
    generator = torch.Generator().manual_seed(0)
    weight = linear.weight if linear._packed is None else linear._packed
    rows = torch.randn(MAX_INVARIANT_ROWS + 1, linear.in_features, generator=generator)
    rows = rows.to(weight.dtype if weight.dtype.is_floating_point else torch.float32).to(linear.weight.device)
    pairs = torch.cat([linear(rows[i : i + 2])[:1] for i in range(MAX_INVARIANT_ROWS)])
    return all(
        torch.equal(linear(rows[:count])[:MAX_INVARIANT_ROWS], pairs[:count])
        for count in range(2, MAX_INVARIANT_ROWS + 2)
    )


def _reorder(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


def _run_packed(rows: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(rows, packed, bias, "none", [], "")
    return out

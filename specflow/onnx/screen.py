"""Which tokens can be the likeliest, from a head in 8 bits: a quarter of the bytes of the float32 head.

Input: `rows` [R, H], already normed. Outputs: the `tokens` [R, C] int64 whose logits have the highest upper bounds;
those `bounds` [R, C] in descending order, in units of each row's `unit` [R, 1]. No token that is missing has a logit
above the last bound. `onnx.screened` makes an arg-max of them.

The bound. Let x be a row, w_j the weights of token j, K their number, u = 2^-24, and f_j the logit that a float32 head
gives: whatever the order of its sums, fused or not, |f_j - x w_j| <= gamma |x||w_j| with gamma = K u / (1 - K u). Norms
are Euclidean. The weights are taken to w'_j = s_j n_j, n_j whole numbers from -127 to 127; the row to x' = t q, q whole
numbers up to 32513, with t >= max|x_i| / 32512 (to a rounding). As max|x_i| <= |x|,

    |x - x'| <= delta |x|,                      delta = 0.52 sqrt(K) / 32512
    f_j <= x' w'_j + |x - x'||w'_j| + |x||w_j - w'_j| + gamma |x||w_j| <= x' w'_j + |x| E_j
    E_j = |w_j - w'_j| + delta |w'_j| + gamma |w_j| + rounding_j + tiny

One more weight e_j >= F E_j / s_j and one more entry >= |x| / (F t) of the row make the product itself at least
x' w'_j + |x| E_j; F is as large as e_j <= 127 allows. q is cut into q = 256 high + low, both within 8 bits, so the
product is one of whole numbers, which is exact, over two rows for each one. What is rounded is its way to float32: each
half once as a number and once by s_j, then their sum; 2^-21 (256 |high n_j| + |low n_j|) s_j t in all. As
|256 high| <= |q| + 128 sqrt(K + 1) and t <= |x| / 32512, to a rounding, that is at most |x| rounding_j with

    rounding_j = 2^-21 (2 + 0.008 sqrt(K + 1)) (|w'_j| + 128 s_j).

`tiny` covers products too small for float32; rows so small or large that it would not do are known by their unit.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

import numpy as np
import torch

from specflow.onnx.writer import CONTRIB, onnx_type

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from specflow.onnx.writer import GraphWriter

__all__ = ["MOST_CANDIDATES", "rounding_share", "screen_refusal", "write_screen"]

MOST_CANDIDATES = 32
"""Tokens that are looked at one by one; more than a dozen are rare."""
_LEAST_WEIGHTS = 2**22
"""Smaller heads are faster than what goes on around a screen."""
_MOST_INPUTS = 2**14
"""Of more, F could fall below 1. Sums of so many products of 8 bits stay within 32."""
_LEVELS = 32512  # 127 * 256: whole numbers of a row
_TOP = 127  # of a weight
_ZERO = 128  # the byte that stands for 0 in a row
_TINY = 1e-20
_LEAST_STEP = 1e-18  # of weights; well above what is added for tiny products
_LEAST_UNIT = 1e-30  # of rows
_SLAB = 4096
"""Tokens whose weights are taken to whole numbers at a time."""


def screen_refusal(weight: Tensor) -> str:
    """Why a head cannot have a screen, or does not gain by it; empty where it does.  # [V, H]"""
    if weight.numel() < _LEAST_WEIGHTS or weight.shape[0] <= MOST_CANDIDATES:
        return f"a head of {weight.shape[0]} x {weight.shape[1]} is read faster than a screen"
    if weight.shape[1] > _MOST_INPUTS:
        return f"a head of {weight.shape[1]} inputs, more than {_MOST_INPUTS}"
    return "" if bool(weight.isfinite().all()) else "weights of the head that are not finite"


def rounding_share(inputs: int) -> float:
    """gamma of the module's text: what float32 may add to a dot product, as a share of its summands' absolute sum."""
    return inputs * 2.0**-24 / (1.0 - inputs * 2.0**-24)


def write_screen(writer: GraphWriter, weight: Tensor) -> None:
    """Write the graph of a head's weight.

    Args:
        writer: An empty graph, in float32.
        weight: Finite.  # [V, H]
    """
    outputs, inputs = weight.shape
    levels, steps, errors = _whole_numbers(weight)
    factor, bound = _bounds(errors / steps)
    table = np.concatenate([levels, bound[:, None]], axis=1)  # [V, H + 1]
    rows = writer.input("rows", ("rows", inputs))
    halves, unit = _halves(writer, rows, inputs, factor)
    product = writer.op(
        "MatMulIntegerToFloat",
        halves,
        writer.weight(np.ascontiguousarray(table.T), "levels"),
        _number(writer, 1.0),
        writer.weight(steps.astype(np.float32), "steps"),
        writer.constant(np.array(_ZERO, dtype=np.uint8)),
        domain=CONTRIB,
    )
    high, low = writer.ops("Split", 2, product, axis=0, num_outputs=2)
    whole = writer.op("Add", writer.op("Mul", high, _number(writer, 256.0)), low)
    count = min(MOST_CANDIDATES, outputs)
    bounds, tokens = writer.ops("TopK", 2, whole, writer.constant([count]), axis=-1)
    writer.output(bounds, "bounds", ("rows", count))
    writer.output(tokens, "tokens", ("rows", count), "INT64")
    writer.output(unit, "unit", ("rows", 1))


def _bounds(errors: NDArray[np.float64]) -> tuple[float, NDArray[np.int8]]:
    """F, and the weight e of every token from its error in steps.  # [V] -> [V]"""
    factor = np.floor(_TOP / (errors.max() * (1.0 + 1e-9)))
    assert factor >= 1, "errors of whole weights are larger than the weights"
    bound = np.ceil(factor * errors * (1.0 + 1e-9))
    # Rounding can take the largest just above 127, by less than the 1e-9 in it.
    return float(factor), np.minimum(bound, _TOP).astype(np.int8)


def _halves(writer: GraphWriter, rows: str, inputs: int, factor: float) -> tuple[str, str]:
    """Rows and a bound of their norm in bytes, the high halves first.  # [R, H] -> [2 R, H + 1], [R, 1]"""
    last = writer.constant([-1])
    above = 1.0 + 1e-5 + inputs * 2.0**-23  # more than the norm's own rounding takes away
    norm = writer.op("Mul", writer.op("ReduceL2", rows, last, keepdims=1), _number(writer, above / factor))
    largest = writer.op("Max", writer.op("ReduceMax", writer.op("Abs", rows), last, keepdims=1), norm)
    unit = writer.op("Mul", largest, _number(writer, 1.0 / _LEVELS))
    divisor = writer.op("Max", unit, _number(writer, _LEAST_UNIT))
    entries = writer.op("Round", writer.op("Div", rows, divisor)), writer.op("Ceil", writer.op("Div", norm, divisor))
    whole = writer.op("Concat", *entries, axis=-1)
    zero = _number(writer, float(_ZERO))
    high = writer.op("Floor", writer.op("Mul", writer.op("Add", whole, zero), _number(writer, 1.0 / 256.0)))
    low = writer.op("Sub", whole, writer.op("Mul", high, _number(writer, 256.0)))
    both = writer.op("Add", writer.op("Concat", high, low, axis=0), zero)
    return writer.op("Cast", both, to=onnx_type(torch.uint8)), unit


def _whole_numbers(weight: Tensor) -> tuple[NDArray[np.int8], NDArray[np.float64], NDArray[np.float64]]:
    """Levels [V, H], steps [V] that float32 holds exactly, and E of every token [V]."""
    parts = []
    for begin in range(0, len(weight), _SLAB):
        values = weight[begin : begin + _SLAB].detach().to("cpu", torch.float32).numpy()
        assert np.isfinite(values).all(), "a weight is not finite"
        steps = np.maximum(np.abs(values).max(axis=1) / np.float32(_TOP), np.float32(_LEAST_STEP)).astype(np.float64)
        exact = values.astype(np.float64)
        levels = np.clip(np.rint(exact / steps[:, None]), -_TOP, _TOP)
        parts.append((levels.astype(np.int8), steps, _errors(exact, levels * steps[:, None], steps)))
    levels, steps, errors = (np.concatenate(each) for each in zip(*parts, strict=True))
    return levels, steps, errors


def _errors(exact: NDArray[np.float64], taken: NDArray[np.float64], steps: NDArray[np.float64]) -> NDArray[np.float64]:
    """E of the module's text.  # [n, H], [n, H], [n] -> [n]"""
    inputs = exact.shape[1]
    lost, size, true = (np.linalg.norm(each, axis=1) for each in (exact - taken, taken, exact))
    rounding = 2.0**-21 * (2.0 + 0.008 * sqrt(inputs + 1)) * (size + 128.0 * steps)
    taking = 0.52 * sqrt(inputs) / _LEVELS * size
    found: NDArray[np.float64] = lost + taking + rounding_share(inputs) * true + rounding + _TINY
    return found


def _number(writer: GraphWriter, value: float) -> str:
    return writer.constant(np.array(value, dtype=np.float32))

"""Weights in blocks of 8 or 4 bits, as ONNX Runtime's operator `com.microsoft.MatMulNBits` takes them.

A block is a run of weights of one output that share a step (the scale). Three forms, by what else a block keeps:

    symmetric   nothing: the middle of the range stands for 0. Exact for weights from GGUF's Q8_0.
    zero_point  the level that stands for 0. The finest for weights in general at 8 bits.
    minimum     a float that is added to all its weights. Exact for weights from GGUF's Q4_1, where a zero point of
                4 bits is not:

        y = MatMulNBits(x, quants, scales) + block_sums(x) @ offset,    block_sums(x) = x @ membership

`FORMS` says which form each kind of linear layer gets; how they were chosen stands in docs/log.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["FORMS", "BlockWeights", "QuantForm", "dequantize", "quantize"]

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_SLAB_WEIGHTS = 2**21
"""Weights quantised at a time: what is computed on the way is several times as large as they are."""
_PROBE = 1024
"""Blocks that tell whether a slab of weights comes from a grid."""
_EXACT = 1e-4
"""Of a step: blocks this close to a grid are taken to lie on it (stored steps and minima have 11 bits)."""


@dataclass(frozen=True, slots=True)
class QuantForm:
    """How a weight is cut into blocks and what each of them keeps."""

    bits: Literal[4, 8]
    block_size: int  # weights of a block; 16, 32, 64, 128 or 256
    form: Literal["symmetric", "zero_point", "minimum"]

    def __post_init__(self) -> None:
        assert self.block_size in (16, 32, 64, 128, 256), f"blocks of {self.block_size}"

    @property
    def middle(self) -> int:
        """The level of a weight of 0 where no zero points are given."""
        return 1 << (self.bits - 1)

    @property
    def top(self) -> int:
        """The highest level."""
        return (1 << self.bits) - 1


FORMS: Mapping[str, Mapping[str, QuantForm]] = MappingProxyType(
    {
        "int8": MappingProxyType({"head": QuantForm(8, 32, "symmetric"), "body": QuantForm(8, 64, "zero_point")}),
        "int4": MappingProxyType({"head": QuantForm(8, 32, "symmetric"), "body": QuantForm(4, 32, "minimum")}),
    }
)
"""dtype -> kind of linear layer -> form. Heads keep 8 bits: their errors reach the logits undamped."""


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """A quantised weight, and the operator's attributes. The last block of an output may be partly filled."""

    quants: Bytes  # [out, blocks, block_size bits / 8]; with 4 bits the even weight in the low half of a byte
    scales: Floats  # [out blocks]
    zero_points: Bytes | None  # [out bytes]; with 4 bits two blocks to a byte, each output in whole bytes
    offset: Floats | None  # [blocks, out] what the operator's result lacks for every unit of a block's sum
    bits: int
    block_size: int
    out_width: int
    in_width: int

    @property
    def blocks(self) -> int:
        """Blocks of an output."""
        return _blocks(self.in_width, self.block_size)

    @property
    def membership(self) -> Floats:
        """Matrix whose product with rows is the sum of every block.  # [in, blocks]

        One product of zeros and ones instead of a reshape and a sum: it takes a partly filled block as well.
        """
        return np.repeat(np.eye(self.blocks, dtype=np.float32), self.block_size, axis=0)[: self.in_width]


def quantize(weight: Floats, form: QuantForm) -> BlockWeights:
    """The nearest weights that a form can say.  # [out, in]"""
    assert 0 not in weight.shape, f"a weight of shape {weight.shape}"
    assert np.isfinite(weight).all(), "a weight is not finite"
    # With every weight below 1 neither differences overflow nor steps vanish; powers of two change no bit.
    exponent = int(np.frexp(np.abs(weight).max())[1])
    slabs = [_quantize_slab(np.ldexp(slab, -exponent), form) for slab in _slabs(weight)]
    quants, steps, zeros = (np.concatenate(parts) for parts in zip(*slabs, strict=True))
    zero_points = offset = None
    if form.form == "zero_point":
        zero_points = zeros.astype(np.uint8)
        zero_points = (_pack(zero_points) if form.bits == 4 else zero_points).reshape(-1)
    elif form.form == "minimum":
        offset = np.ascontiguousarray(np.ldexp(zeros, exponent).T)
    return BlockWeights(
        quants=_pack(quants) if form.bits == 4 else quants,
        scales=np.ldexp(steps, exponent).reshape(-1),
        zero_points=zero_points,
        offset=offset,
        bits=form.bits,
        block_size=form.block_size,
        out_width=weight.shape[0],
        in_width=weight.shape[1],
    )


def dequantize(weights: BlockWeights) -> Floats:
    """The weights that a graph computes with.  # -> [out, in]"""
    shape = (weights.out_width, weights.blocks)
    levels = weights.quants.reshape(*shape, -1)
    if weights.bits == 4:
        levels = _unpack(levels)
    zeros: NDArray[np.generic] = np.full(shape, 1 << (weights.bits - 1), dtype=np.uint8)
    if weights.zero_points is not None:
        zeros = weights.zero_points.reshape(weights.out_width, -1)
        zeros = _unpack(zeros.astype(np.uint8))[:, : weights.blocks] if weights.bits == 4 else zeros
    values = (levels.astype(np.float32) - zeros.astype(np.float32)[..., None]) * weights.scales.reshape(*shape, 1)
    if weights.offset is not None:
        values = values + weights.offset.T[..., None]
    return np.ascontiguousarray(values.reshape(weights.out_width, -1)[:, : weights.in_width])


def _quantize_slab(weight: Floats, form: QuantForm) -> tuple[Bytes, Floats, Floats]:
    """Levels [out, blocks, block_size], steps and zeros [out, blocks] of weights below 1.

    A zero is a block's zero point; in the form "minimum", what the level in the middle stands for.
    """
    blocks = _blocks(weight.shape[1], form.block_size)
    spare = blocks * form.block_size - weight.shape[1]
    # Padded with the last weight, so that the padding widens no block's range.
    block = np.pad(weight, ((0, 0), (0, spare)), mode="edge").reshape(weight.shape[0], blocks, form.block_size)
    if form.form == "symmetric":
        step = np.abs(block).max(axis=-1) / np.float32(form.middle - 1)
        zero = np.full_like(step, form.middle)
        levels = _steps(block, step) + form.middle
    elif form.form == "zero_point":
        low, high = np.minimum(block.min(axis=-1), 0), np.maximum(block.max(axis=-1), 0)
        step = (high - low) / np.float32(form.top)
        zero = _steps(-low[..., None], step)[..., 0]
        levels = _steps(block, step) + zero[..., None]
    else:
        step, low = _grid(block, form.top)
        above = _steps(block - low[..., None], step)
        # Few levels lie around the middle one, so that the offset is no larger than the weights.
        half = np.ceil(above.max(axis=-1) / 2)
        zero = low + half * step
        levels = above + (form.middle - half)[..., None]
    return np.clip(levels, 0, form.top).astype(np.uint8), step, zero


def _grid(block: Floats, top: int) -> tuple[Floats, Floats]:
    """Step and smallest weight of every block.  # [out, blocks, block_size] -> two [out, blocks]

    Weights that lie on a grid need not use its lowest and highest level, so that their range is any number of steps;
    the fewest levels that meet all of them are theirs. Other blocks get as many as there are.
    """
    low = block.min(axis=-1)
    span = block.max(axis=-1) - low
    step = span / np.float32(top)
    above = (block - low[..., None]).reshape(-1, block.shape[-1])
    unequal = np.flatnonzero(span)
    # Weights that come from no grid are told by a few of their blocks.
    for part in (unequal[:_PROBE], unequal[_PROBE:]):
        finer = _grid_steps(above[part], span.reshape(-1)[part], top)
        if not finer.any():
            break
        step.reshape(-1)[part] = np.where(finer > 0, finer, step.reshape(-1)[part])
    return step, low


def _grid_steps(above: Floats, span: Floats, top: int) -> Floats:
    """The step of blocks that lie on a grid, 0 elsewhere.  # [n, block_size], [n] -> [n]"""
    step = np.zeros_like(span)
    pending = np.arange(len(span))
    for levels in range(1, top + 1):
        finer = span[pending] / np.float32(levels)
        # Most blocks leave a grid within their first weights; only the rest is looked at in full.
        likely = np.flatnonzero(_on_grid(above[pending, :4], finer))
        fits = likely[_on_grid(above[pending[likely]], finer[likely])]
        step[pending[fits]] = finer[fits]
        pending = np.delete(pending, fits)
    return step


def _on_grid(above: Floats, step: Floats) -> NDArray[np.bool_]:
    """Whether all weights of a block are whole steps above its smallest.  # [n, k], [n] -> [n]"""
    place = above / step[:, None]
    fits: NDArray[np.bool_] = (np.abs(place - np.rint(place)) < _EXACT).all(axis=-1)
    return fits


def _slabs(weight: Floats) -> Iterator[Floats]:
    height = max(1, _SLAB_WEIGHTS // weight.shape[1])
    for start in range(0, weight.shape[0], height):
        yield weight[start : start + height]


def _blocks(width: int, block_size: int) -> int:
    return -(-width // block_size)


def _steps(distance: Floats, step: Floats) -> Floats:
    """Whole steps in a distance; none in a block of equal weights, whose step is 0.  # [..., k], [...] -> [..., k]"""
    divisor = np.where(step > 0, step, np.float32(1))[..., None]
    whole: Floats = np.where(step[..., None] > 0, np.rint(distance / divisor), np.float32(0))
    return whole


def _pack(levels: Bytes) -> Bytes:
    """Two levels to a byte along the last dimension, the first in the low half."""
    if levels.shape[-1] % 2:
        levels = np.concatenate([levels, np.zeros_like(levels[..., :1])], axis=-1)
    packed: Bytes = np.bitwise_or(levels[..., 0::2], np.left_shift(levels[..., 1::2], 4))
    return packed


def _unpack(packed: Bytes) -> Bytes:
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)

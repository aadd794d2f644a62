"""The parts of `draft.nn` as ONNX operators: linear, norm, attention over a cache updated in place, MLP.

Rows are [B, R, width] throughout. Every layer's key and value slots are graph inputs [B, Hk, S, Dh]; ScatterND puts
the pass's rows above the committed ones and yields the updated slots. A runtime that binds input and output to one
buffer copies nothing, and a key stands in the same slot whether it came with this pass or an earlier one, so a row's
bits do not depend on how the rows before it were divided into passes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from specflow.onnx.quantize import quantize
from specflow.onnx.writer import CONTRIB, GraphWriter

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.draft.nn.block import DecoderBlock, RMSNorm
    from specflow.draft.nn.linear import Linear
    from specflow.draft.nn.rope import RotaryTable
    from specflow.onnx.quantize import QuantForm

__all__ = ["LinearKind", "PassGraph", "Stream", "add_norm", "feed", "linear", "linear_of", "norm"]

LinearKind = Literal["body", "head"]

_INT8_ACTIVATIONS = 4
"""Accuracy level of the product: rows are taken to 8 bits block by block, for whole-number arithmetic."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A residual stream: what it was, and a branch that is still to be added."""

    base: str  # [B, R, H]
    branch: str | None = None  # [B, R, H]


def linear(writer: GraphWriter, rows: str, layer: Linear, name: str, kind: LinearKind = "body") -> str:
    """rows W^T + b, the weight quantised as the writer says for its kind.  # [..., in] -> [..., out]"""
    return linear_of(writer, rows, (layer.weight, layer.bias), name, kind)


def linear_of(
    writer: GraphWriter, rows: str, weights: tuple[Tensor, Tensor | None], name: str, kind: LinearKind = "body"
) -> str:
    """As `linear`, from a weight [out, in] and a bias [out] or none."""
    weight, bias = weights
    assert weight.numel(), f"{name} is packed: load the layers unpacked to export them"
    with writer.scope(name):
        form = writer.forms.get(kind)
        if form is None:
            product = writer.op("MatMul", rows, writer.weight(weight.detach().t(), "weight"))
        else:
            product = _quantized(writer, rows, weight, form)
        return product if bias is None else writer.op("Add", product, writer.weight(bias, "bias"))


def norm(writer: GraphWriter, rows: str, layer: RMSNorm, name: str) -> str:
    """Root-mean-square norm.  # [..., H] -> [..., H]"""
    gain = writer.weight(layer.weight, f"{name}.weight")
    return writer.op("RMSNormalization", rows, gain, axis=-1, epsilon=layer.eps)


def add_norm(writer: GraphWriter, stream: Stream, layer: RMSNorm, name: str) -> tuple[str, Stream]:
    """Add what is left to be added and norm the sum, in one operator."""
    if stream.branch is None:
        return norm(writer, stream.base, layer, name), stream
    gain = writer.weight(layer.weight, f"{name}.weight")
    with writer.scope(name):
        normed, _, _, total = writer.add(
            "SkipSimplifiedLayerNormalization",
            [stream.branch, stream.base, gain],
            [writer.name_of("normed"), "", "", writer.name_of("sum")],
            CONTRIB,
            epsilon=layer.eps,
        )
    return normed, Stream(total)


def feed(writer: GraphWriter, stream: Stream, block: DecoderBlock) -> Stream:
    """The MLP branch on a residual stream."""
    normed, stream = add_norm(writer, stream, block.mlp_norm, "mlp_norm")
    both = linear(writer, normed, block.gate_up, "gate_up")
    gate, up = writer.ops("Split", 2, both, axis=-1, num_outputs=2)
    inner = writer.op("Mul", writer.op("Mul", gate, writer.op("Sigmoid", gate)), up)
    return Stream(stream.base, linear(writer, inner, block.down, "down"))


class PassGraph:
    """What the layers of one pass share, and the layers themselves.

    Declares the inputs `positions` [B, R], `starts` [B] (committed rows of each batch row) and `bias` [B, R, S], added
    to the scores of every slot: 0 where a row sees it, -inf where not; `bias_windowed` likewise for layers with a
    sliding window.

    Args:
        writer: The graph.
        rotary: Angles of positions.
        num_positions: Positions from this one on are taken for the last one.
        windowed: Of each layer of the pass, whether it has a sliding window.
    """

    def __init__(
        self, writer: GraphWriter, rotary: RotaryTable, num_positions: int, windowed: Iterable[bool] = (False,)
    ) -> None:
        self._writer = writer
        kinds = set(windowed)
        positions = writer.input("positions", ("batch", "rows"), "INT64")
        self._starts = writer.input("starts", ("batch",), "INT64")
        bounds = writer.constant(np.array(0)), writer.constant(np.array(num_positions - 1))
        self._positions = writer.op("Clip", positions, *bounds)
        cos, sin = rotary.halves(num_positions)
        self._cos, self._sin = writer.weight(cos, "rotary.cos"), writer.weight(sin, "rotary.sin")
        names = {False: "bias", True: "bias_windowed"}
        self._biases = {flag: writer.input(names[flag], ("batch", "rows", "slots")) for flag in sorted(kinds)}
        self._tiled: dict[tuple[bool, int], str] = {}
        self._slot_of: dict[int, str] = {}
        self._half, self._angles = cos.shape[-1], list[str]()

    def settle(self, stream: Stream) -> Stream:
        """The stream with nothing left to add."""
        return stream if stream.branch is None else Stream(self._writer.op("Add", stream.base, stream.branch))

    def attend(self, stream: Stream, block: DecoderBlock, layer: int) -> Stream:
        """The attention branch on a residual stream."""
        if block.attention_norm is None:
            stream = self.settle(stream)
            normed = stream.base
        else:
            normed, stream = add_norm(self._writer, stream, block.attention_norm, "attention_norm")
        return Stream(stream.base, self.attend_to(normed, block, layer))

    def attend_to(self, normed: str, block: DecoderBlock, layer: int) -> str:
        """The attention branch from what queries, keys and values are made from.  # [B, R, in] -> [B, R, H]"""
        w, kv_heads, width = self._writer, block.num_kv_heads, block.head_width
        queries, keys, values = self._slots(normed, block, layer)
        merged = w.op("Reshape", queries, w.constant([0, kv_heads, -1, width]))  # [B, Hk, G R, Dh]
        scores = self._score(merged, keys, block.scale)
        weights = w.op("Softmax", w.op("Add", scores, self._bias(block)), axis=-1)  # [B, Hk, G R, S]
        mixed = w.op("MatMul", weights, values)
        heads = w.op("Reshape", mixed, w.constant([0, block.num_heads, -1, width]))
        rows = w.op("Transpose", heads, perm=[0, 2, 1, 3])
        return linear(w, w.op("Reshape", rows, w.constant([0, 0, block.num_heads * width])), block.out, "out")

    def write_context(self, context: str, block: DecoderBlock, layer: int) -> None:
        """Write key and value rows made from injected context, which passes neither norm nor query.  # [B, R, H]"""
        w, kv_heads, first = self._writer, block.num_kv_heads, block.num_heads * block.head_width
        bias = None if block.qkv.bias is None else block.qkv.bias[first:]
        fused = linear_of(w, context, (block.qkv.weight[first:], bias), "kv")
        split = w.op("Reshape", fused, w.constant([0, 0, 2 * kv_heads, block.head_width]))
        keys, values = w.ops("Split", 2, w.op("Transpose", split, perm=[0, 2, 1, 3]), axis=1, num_outputs=2)
        if block.key_norm is not None:
            keys = norm(w, keys, block.key_norm, "key_norm")
        self._write(self._rotate(keys) if block.rotary else keys, values, block, layer)

    def feed(self, stream: Stream, block: DecoderBlock) -> Stream:
        """The MLP branch."""
        return feed(self._writer, stream, block)

    def _slots(self, normed: str, block: DecoderBlock, layer: int) -> tuple[str, str, str]:
        """Rotated queries [B, Hq, R, Dh], and the layer's slots with the pass's rows in them [B, Hk, S, Dh]."""
        w, heads, kv_heads, width = self._writer, block.num_heads, block.num_kv_heads, block.head_width
        fused = linear(w, normed, block.qkv, "qkv")
        split = w.op("Reshape", fused, w.constant([0, 0, heads + 2 * kv_heads, width]))
        by_head = w.op("Transpose", split, perm=[0, 2, 1, 3])
        queries, keys, values = w.ops("Split", 3, by_head, w.constant([heads, kv_heads, kv_heads]), axis=1)
        if block.query_norm is not None and block.key_norm is not None:
            queries, keys = norm(w, queries, block.query_norm, "query_norm"), norm(w, keys, block.key_norm, "key_norm")
        if block.rotary:
            queries, keys = self._rotate(queries), self._rotate(keys)
        return queries, *self._write(keys, values, block, layer)

    def _write(self, keys: str, values: str, block: DecoderBlock, layer: int) -> tuple[str, str]:
        """A layer's slots with new rows in them.  # [B, Hk, R, Dh] -> [B, Hk, S, Dh] each"""
        w, shape = self._writer, ("batch", block.num_kv_heads, "slots", block.head_width)
        slots = []
        for kind, fresh in (("key", keys), ("value", values)):
            past = w.input(f"past_{kind}.{layer}", shape)
            present = w.op("ScatterND", past, self._places(block.num_kv_heads), fresh)
            slots.append(w.output(present, f"present_{kind}.{layer}", shape))
        return slots[0], slots[1]

    def _places(self, heads: int) -> str:
        """Batch row, head and slot of every new key and value row.  # [B, Hk, R, 3]"""
        if heads not in self._slot_of:
            w = self._writer
            batch, rows = w.ops("Split", 2, w.op("Shape", self._positions), num_outputs=2)
            shape = w.op("Concat", batch, w.constant([heads]), rows, w.constant([1]), axis=0)
            slots = w.op("Add", w.op("Unsqueeze", self._starts, w.constant([1])), self._count(rows))  # [B, R]
            parts = (
                w.op("Unsqueeze", self._count(batch), w.constant([1, 2, 3])),
                w.constant(np.arange(heads).reshape(1, heads, 1, 1)),
                w.op("Unsqueeze", slots, w.constant([1, 3])),
            )
            self._slot_of[heads] = w.op("Concat", *[w.op("Expand", part, shape) for part in parts], axis=-1)
        return self._slot_of[heads]

    def _count(self, length: str) -> str:
        """0, 1, ... up to a length.  # [1] -> [length]"""
        w = self._writer
        return w.op("Range", w.constant(np.array(0)), w.op("Squeeze", length), w.constant(np.array(1)))

    def _score(self, queries: str, keys: str, scale: float) -> str:
        """scale Q K^T.  # [B, Hk, G R, Dh], [B, Hk, S, Dh] -> [B, Hk, G R, S]"""
        w = self._writer
        if not w.plain:
            return w.op("FusedMatMul", queries, keys, domain=CONTRIB, transB=1, alpha=scale)
        return w.op("MatMul", w.op("Mul", queries, w.scalar(scale)), w.op("Transpose", keys, perm=[0, 1, 3, 2]))

    def _rotate(self, heads: str) -> str:
        w = self._writer
        if not w.plain:
            return w.op("RotaryEmbedding", heads, self._positions, self._cos, self._sin, domain=CONTRIB)
        if not self._angles:
            for table in (self._cos, self._sin):
                half = w.op("Unsqueeze", w.op("Gather", table, self._positions), w.constant([1]))
                self._angles.append(w.op("Concat", half, half, axis=-1))  # [B, 1, R, Dh]
        # OpenVINO makes one operator of these where the halves are slices, not where they are split.
        first = w.op("Slice", heads, w.constant([0]), w.constant([self._half]), w.constant([3]))
        second = w.op("Slice", heads, w.constant([self._half]), w.constant([2 * self._half]), w.constant([3]))
        turned = w.op("Concat", w.op("Neg", second), first, axis=-1)
        return w.op("Add", w.op("Mul", heads, self._angles[0]), w.op("Mul", turned, self._angles[1]))

    def _bias(self, block: DecoderBlock) -> str:
        """A bias for the rows of all query heads that share a key head.  # [B, 1, G R, S]"""
        groups = block.num_heads // block.num_kv_heads
        key = (block.windowed, groups)
        if key not in self._tiled:
            w = self._writer
            tiled = w.op("Concat", *[self._biases[block.windowed]] * groups, axis=1)
            self._tiled[key] = w.op("Unsqueeze", tiled, w.constant([1]))
        return self._tiled[key]


def _quantized(writer: GraphWriter, rows: str, weight: Tensor, form: QuantForm) -> str:
    """rows W^T with W in blocks of a few bits; see `onnx.quantize`."""
    blocks = quantize(weight.detach().float().cpu().numpy(), form)
    inputs = [rows, writer.weight(blocks.quants, "quants"), writer.weight(blocks.scales, "scales")]
    if blocks.zero_points is not None:
        inputs.append(writer.weight(blocks.zero_points, "zero_points"))
    product = writer.op(
        "MatMulNBits",
        *inputs,
        domain=CONTRIB,
        K=blocks.in_width,
        N=blocks.out_width,
        bits=blocks.bits,
        block_size=blocks.block_size,
        accuracy_level=_INT8_ACTIVATIONS,
    )
    if blocks.offset is None:
        return product
    name = f"membership.{blocks.in_width}.{blocks.block_size}"
    sums = writer.op("MatMul", rows, writer.weight(blocks.membership, name, scoped=False))
    return writer.op("Add", product, writer.op("MatMul", sums, writer.weight(blocks.offset, "offset")))

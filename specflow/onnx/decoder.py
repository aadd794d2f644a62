"""A decoder of the Llama family, or a part of one, as an ONNX graph.

Inputs: `tokens` [B, R] int64 (or `hidden_in` [B, R, H]), what `PassGraph` declares, past key and value slots of every
layer, and `scored` [X] int64, the rows whose logits are wanted. Outputs: `logits` [B, X, V], `hidden_pre` and
`hidden_post` [B, R, H], the residual stream before and after the final norm; `tap.{l}` [B, R, H], the output of layer l
(`tap.-1`: the embedding); present slots. A runtime computes those that are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from specflow.draft.nn.linear import Linear
from specflow.draft.nn.rope import RotaryTable
from specflow.draft.nn.weights import BlockForm, SeededTensors, WeightReader
from specflow.onnx.layers import PassGraph, Stream, add_norm, linear, norm
from specflow.target.architecture import Architecture
from specflow.types import Skip

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

    from specflow.draft.nn.block import DecoderBlock
    from specflow.onnx.writer import GraphWriter

__all__ = ["DecoderPart", "head_weight", "write_decoder", "write_head"]


@dataclass(frozen=True, slots=True)
class DecoderPart:
    """Which layers of a model a graph computes. The default is all of them."""

    first: int = 0
    end: int | None = None  # half-open; None: the last layer
    skip: Skip = field(default_factory=Skip)
    enters: bool = False  # with hidden states, in place of tokens
    headless: bool = False  # it ends with the final norm

    @property
    def label(self) -> str:
        """The same part, the same words."""
        words = [f"layers {self.first} to {'the last' if self.end is None else self.end - 1}"]
        for name, left_out in (("attention", self.skip.attention), ("mlp", self.skip.mlp)):
            words += [f"without {name} of {', '.join(map(str, sorted(left_out)))}"] if left_out else []
        words += ["entered with hidden states"] if self.enters else []
        return ", ".join([*words, *(["without the head"] if self.headless else [])])


def write_decoder(
    writer: GraphWriter,
    config: PretrainedConfig,
    tensors: Mapping[str, Tensor] | SeededTensors,
    part: DecoderPart = DecoderPart(),
    adapt: Callable[[GraphWriter, str], str] | None = None,
) -> None:
    """Write a model's layers, final norm and head, where the part has one; one layer in memory at a time.

    Args:
        writer: An empty graph.
        config: Of a family that the native target computes.
        tensors: Its weights, by their published names.
        part: Which layers.
        adapt: Changes the stream before the final norm; `hidden_pre` stays as it was.  # [B, R, H] -> [B, R, H]

    Raises:
        CheckpointError: A tensor is missing or has the wrong shape.
        ModelError: The native target does not compute this model.
    """
    arch = Architecture.of(config)
    reader = WeightReader(tensors, config.model_type, torch.empty(0, dtype=torch.float32), packed=False)
    layers = range(part.first, arch.num_layers if part.end is None else part.end)
    size = (arch.vocab_size, arch.shape.hidden_size)
    width = ("batch", "rows", arch.shape.hidden_size)
    embedding = reader.take("model.embed_tokens.weight", size)
    if part.enters:
        entered = writer.input("hidden_in", width)
    else:
        tokens = writer.input("tokens", ("batch", "rows"), "INT64")
        entered = writer.op("Gather", writer.weight(embedding, "embedding"), tokens)
    rotary = RotaryTable.of(config, torch.float32, torch.device("cpu"))
    rows = PassGraph(writer, rotary, arch.context_length, [arch.windowed[layer] for layer in layers])
    stream, taps = _entry(writer, entered, part), {}
    for index in layers:
        form = BlockForm(arch.rotary[index], arch.windowed[index])
        block = reader.block(f"model.layers.{index}", arch.shape, form)
        with writer.scope(f"layers.{index}"):
            taps[index - 1], stream = _run_layer(rows, stream, block, index, part.skip)
    final = reader.norm("model.norm.weight", width[-1], arch.shape.eps)
    if adapt is None:
        normed, stream = add_norm(writer, stream, final, "norm")
    else:
        stream = rows.settle(stream)
        normed = norm(writer, adapt(writer, stream.base), final, "norm")
    taps[layers.stop - 1] = stream.base
    for layer, value in taps.items():
        writer.output(value, f"tap.{layer}", width)
    writer.output(stream.base, "hidden_pre", width)
    writer.output(normed, "hidden_post", width)
    if not part.headless:
        _write_logits(writer, normed, embedding if arch.tied else reader.take("lm_head.weight", size))


def write_head(writer: GraphWriter, weight: Tensor, bias: Tensor | None = None) -> None:
    """A head alone: `scored` [B, R, H], already normed, to `logits` [B, R, V].

    Args:
        writer: An empty graph.
        weight: # [V, H]
        bias: # [V]
    """
    outputs, width = weight.shape
    rows = writer.input("scored", ("batch", "rows", width))
    logits = linear(writer, rows, Linear(weight, bias), "head", "head")
    writer.output(logits, "logits", ("batch", "rows", outputs))


def head_weight(config: PretrainedConfig, tensors: Mapping[str, Tensor]) -> Tensor:
    """The weight of a model's head.  # [V, H]"""
    return tensors["model.embed_tokens.weight" if Architecture.of(config).tied else "lm_head.weight"]


def _write_logits(writer: GraphWriter, normed: str, weight: Tensor) -> None:
    """The head's logits of the rows that are asked for."""
    scored = writer.op("Gather", normed, writer.input("scored", ("scored",), "INT64"), axis=1)
    logits = linear(writer, scored, Linear(weight), "head", "head")
    writer.output(logits, "logits", ("batch", "scored", len(weight)))


def _entry(writer: GraphWriter, entered: str, part: DecoderPart) -> Stream:
    """The stream as the first layer meets it.

    Behind layers that another pass ran a branch of zeros makes the first norm the operator that it is in the whole
    model: the operator for rows without a branch rounds differently.
    """
    return Stream(entered, writer.op("Sub", entered, entered) if part.enters and part.first else None)


def _run_layer(rows: PassGraph, stream: Stream, block: DecoderBlock, index: int, skip: Skip) -> tuple[str, Stream]:
    """What entered a layer, and the stream behind it."""
    entered = None
    if index not in skip.attention:
        stream = rows.attend(stream, block, index)
        entered = stream.base
    if index not in skip.mlp:
        stream = rows.feed(stream, block)
        entered = entered or stream.base
    if entered is None:
        stream = rows.settle(stream)
        entered = stream.base
    return entered, stream

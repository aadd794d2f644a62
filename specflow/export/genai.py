"""A directory that onnxruntime-genai loads: a model, and a small model that drafts for it.

Its runtime owns the caches and the round, and names what graphs read and write: `input_ids` [B, R], `attention_mask`
[B, T] over past and new tokens, `past_key_values.{l}.key` and `.value` [B, Hk, S, Dh]; `logits` [B, R, V],
`present.{l}.key` and `.value`. Attention is ONNX Runtime's GroupQueryAttention, which rotates queries and keys and
writes into a cache that past and present share.

Read by version 0.16 and newer; 0.15 knows no draft model and reads directories without one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specflow.draft.nn.linear import Linear
from specflow.draft.nn.rope import RotaryTable
from specflow.draft.nn.weights import BlockForm, SeededTensors, WeightReader
from specflow.errors import ModelError
from specflow.onnx.graphs import GraphSet
from specflow.onnx.layers import Stream, add_norm, feed, linear, norm
from specflow.onnx.writer import CONTRIB, onnx_type
from specflow.target.architecture import Architecture

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

    from specflow.draft.nn.block import DecoderBlock
    from specflow.onnx.graphs import Precision
    from specflow.onnx.writer import GraphWriter

__all__ = ["MOST_DRAFT_TOKENS", "GenaiDraft", "GenaiModel", "GenaiText", "write_genai"]

MOST_DRAFT_TOKENS = 16
"""That onnxruntime-genai verifies at once."""
CONFIG = "genai_config.json"
_HEAD_STEP = 16
"""GroupQueryAttention rotates heads whose width is a multiple of it."""
_TEXT_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
_PAST, _PRESENT = "past_key_values", "present"


@dataclass(frozen=True, slots=True)
class GenaiModel:
    """A model of a family that the native target computes.

    Args:
        name: For errors.
        config: Its sizes.
        tensors: Its weights, by their published names.
    """

    name: str
    config: PretrainedConfig
    tensors: Mapping[str, Tensor] | SeededTensors


@dataclass(frozen=True, slots=True)
class GenaiDraft:
    """A small model over the target's tokens, and how many of them it drafts a round."""

    model: GenaiModel
    max_draft_tokens: int = 4


@dataclass(frozen=True, slots=True)
class GenaiText:
    """Where the tokenizer's files are, and what ends a text."""

    directory: Path
    stop_ids: tuple[int, ...]


def write_genai(
    folder: Path, target: GenaiModel, text: GenaiText, precision: Precision, draft: GenaiDraft | None = None
) -> None:
    """Write graphs, tokenizer and `genai_config.json`; greedy search is the default they state.

    A draft model whose vocabulary is shorter or longer than the target's gets logits of the target's length, as the
    runtime requires: missing tokens are never drafted.

    Args:
        folder: Made where it is missing.
        target: What decides the tokens.
        text: Its tokenizer.
        precision: Of both models. The runtime has no bfloat16 on CPUs.
        draft: What drafts for it.

    Raises:
        CheckpointError: A tensor is missing or has the wrong shape.
        ModelError: onnxruntime-genai would not run this.
    """
    _check(target, precision, draft)
    files = [text.directory / name for name in _TEXT_FILES if (text.directory / name).is_file()]
    if not any(path.name in _TEXT_FILES[:2] for path in files):
        raise ModelError(str(text.directory), "no tokenizer to copy", f"one of {', '.join(_TEXT_FILES[:2])}")
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = Architecture.of(target.config).vocab_size
    with GraphSet(folder, precision) as graphs:
        with graphs.graph("model") as writer:
            _write_model(writer, target, vocab_size)
        if draft is not None:
            with graphs.graph("draft") as writer:
                _write_model(writer, draft.model, vocab_size)
    for path in files:
        shutil.copyfile(path, folder / path.name)
    config = _config(target, text, draft)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _check(target: GenaiModel, precision: Precision, draft: GenaiDraft | None) -> None:
    if precision.floats == "bfloat16":
        raise ModelError("dtype", "bfloat16 for onnxruntime-genai", "float32, float16, int8 or int4")
    if draft is not None and not 1 <= draft.max_draft_tokens <= MOST_DRAFT_TOKENS:
        found = f"{draft.max_draft_tokens} draft tokens a round for onnxruntime-genai"
        raise ModelError(draft.model.name, found, f"1 to {MOST_DRAFT_TOKENS}", "set draft.k of the recipe")
    for model in (target, *([] if draft is None else [draft.model])):
        arch = Architecture.of(model.config)
        if any(arch.rotary) and arch.shape.head_width % _HEAD_STEP:
            found = f"heads of width {arch.shape.head_width} for onnxruntime-genai"
            raise ModelError(model.name, found, f"a multiple of {_HEAD_STEP}")


def _write_model(writer: GraphWriter, model: GenaiModel, num_logits: int) -> None:
    """All layers, and logits of the target's vocabulary."""
    arch = Architecture.of(model.config)
    reader = WeightReader(model.tensors, model.name, torch.empty(0, dtype=torch.float32), packed=False)
    size, width = (arch.vocab_size, arch.shape.hidden_size), arch.shape.hidden_size
    embedding = reader.take("model.embed_tokens.weight", size)
    tokens = writer.input("input_ids", ("batch", "rows"), "INT64")
    if arch.vocab_size < num_logits:
        known = writer.op("Less", tokens, writer.constant(arch.vocab_size))
        tokens = writer.op("Where", known, tokens, writer.constant(0))
    stream = Stream(writer.op("Gather", writer.weight(embedding, "embedding"), tokens))
    attention = _Attention(writer, model.config, arch)
    for index in range(arch.num_layers):
        form = BlockForm(arch.rotary[index], arch.windowed[index])
        block = reader.block(f"model.layers.{index}", arch.shape, form)
        assert block.attention_norm is not None
        with writer.scope(f"layers.{index}"):
            normed, stream = add_norm(writer, stream, block.attention_norm, "attention_norm")
            stream = feed(writer, Stream(stream.base, attention.attend(normed, block, index)), block)
    normed, _ = add_norm(writer, stream, reader.norm("model.norm.weight", width, arch.shape.eps), "norm")
    weight = embedding if arch.tied else reader.take("lm_head.weight", size)
    logits = linear(writer, normed, Linear(weight[:num_logits]), "head", "head")
    if arch.vocab_size < num_logits:
        absent = writer.constant([0, 0, 0, 0, 0, num_logits - arch.vocab_size])
        lowest = torch.finfo(getattr(torch, writer.floats)).min
        logits = writer.op("Pad", logits, absent, writer.scalar(lowest))
    writer.output(logits, "logits", ("batch", "rows", num_logits))


class _Attention:
    """What attention of all layers shares."""

    def __init__(self, writer: GraphWriter, config: PretrainedConfig, arch: Architecture) -> None:
        self._writer, self._window = writer, arch.window
        mask = writer.input("attention_mask", ("batch", "total"), "INT64")
        lengths = writer.op("ReduceSum", mask, writer.constant([1]), keepdims=0)
        last = writer.op("Sub", lengths, writer.constant(1))
        int32 = onnx_type(torch.int32)
        self._last = writer.op("Cast", last, to=int32)  # [B] position of each batch row's newest token
        self._total = writer.op("Cast", writer.op("Shape", mask, start=1, end=2), to=int32)  # [1]
        table = RotaryTable.of(config, torch.float32, torch.device("cpu"))
        cos, sin = table.halves(arch.context_length)
        self._angles = writer.weight(cos, "rotary.cos"), writer.weight(sin, "rotary.sin")

    def attend(self, normed: str, block: DecoderBlock, layer: int) -> str:
        """The attention branch.  # [B, R, H] -> [B, R, H]"""
        w = self._writer
        fused = linear(w, normed, block.qkv, "qkv")
        past = [self._past(kind, block, layer) for kind in ("key", "value")]
        mixed, *present = w.ops(
            "GroupQueryAttention",
            3,
            *self._heads(fused, block),
            *past,
            self._last,
            self._total,
            *(self._angles if block.rotary else ()),
            domain=CONTRIB,
            num_heads=block.num_heads,
            kv_num_heads=block.num_kv_heads,
            scale=block.scale,
            do_rotary=int(block.rotary),
            local_window_size=self._window if block.windowed else -1,
        )
        for kind, value in zip(("key", "value"), present, strict=True):
            shape = ("batch", block.num_kv_heads, "total", block.head_width)
            w.output(value, f"{_PRESENT}.{layer}.{kind}", shape)
        return linear(w, mixed, block.out, "out")

    def _past(self, kind: str, block: DecoderBlock, layer: int) -> str:
        shape = ("batch", block.num_kv_heads, "past", block.head_width)
        return self._writer.input(f"{_PAST}.{layer}.{kind}", shape)

    def _heads(self, fused: str, block: DecoderBlock) -> tuple[str, str, str]:
        """Queries, keys and values as the operator takes them: in one, or apart where they are normed."""
        if block.query_norm is None or block.key_norm is None:
            return fused, "", ""
        w, kv_heads, width = self._writer, block.num_kv_heads, block.head_width
        sizes = w.constant([block.num_heads * width, kv_heads * width, kv_heads * width])
        queries, keys, values = w.ops("Split", 3, fused, sizes, axis=-1)
        apart, merged = w.constant([0, 0, -1, width]), w.constant([0, 0, -1])
        queries = norm(w, w.op("Reshape", queries, apart), block.query_norm, "query_norm")
        keys = norm(w, w.op("Reshape", keys, apart), block.key_norm, "key_norm")
        return w.op("Reshape", queries, merged), w.op("Reshape", keys, merged), values


def _config(target: GenaiModel, text: GenaiText, draft: GenaiDraft | None) -> dict[str, Any]:
    """What `genai_config.json` says."""
    arch = Architecture.of(target.config)
    stops = list(text.stop_ids)
    pad = target.config.pad_token_id
    model: dict[str, Any] = {
        "type": target.config.model_type,
        "vocab_size": arch.vocab_size,
        "context_length": arch.context_length,
        "eos_token_id": stops[0] if len(stops) == 1 else stops,
        "pad_token_id": pad if isinstance(pad, int) and pad >= 0 else [*stops, 0][0],
        "decoder": _decoder(arch, "model.onnx"),
    }
    if isinstance(target.config.bos_token_id, int):
        model["bos_token_id"] = target.config.bos_token_id
    config = {"model": model}
    if draft is not None:
        drafts = Architecture.of(draft.model.config)
        model["type"], model["draft"] = "speculative", _decoder(drafts, "draft.onnx")
        model["context_length"] = min(arch.context_length, drafts.context_length)
        config["speculative"] = {"max_draft_tokens": draft.max_draft_tokens}
    config["search"] = {
        "do_sample": False,
        "max_length": model["context_length"],
        "min_length": 0,
        "num_beams": 1,
        "num_return_sequences": 1,
        "past_present_share_buffer": True,
        "repetition_penalty": 1.0,
    }
    return config


def _decoder(arch: Architecture, filename: str) -> dict[str, Any]:
    return {
        "filename": filename,
        "session_options": {"provider_options": []},
        "head_size": arch.shape.head_width,
        "hidden_size": arch.shape.hidden_size,
        "num_attention_heads": arch.shape.num_heads,
        "num_key_value_heads": arch.shape.num_kv_heads,
        "num_hidden_layers": arch.num_layers,
        "inputs": {
            "input_ids": "input_ids",
            "attention_mask": "attention_mask",
            "past_key_names": f"{_PAST}.%d.key",
            "past_value_names": f"{_PAST}.%d.value",
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": f"{_PRESENT}.%d.key",
            "present_value_names": f"{_PRESENT}.%d.value",
        },
    }

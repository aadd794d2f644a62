"""What the native decoder needs to know of a model, read from its Hugging Face configuration."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING

from specflow.draft.nn.rope import ROPE_KINDS, rope_kind
from specflow.errors import ModelError
from specflow.target.base import TargetInfo
from specflow.types import BlockShape

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from specflow.target.base import TargetOptions

__all__ = [
    "NATIVE_FAMILIES",
    "SLIDING",
    "Architecture",
    "attention_kinds",
    "info_of",
    "native_refusal",
    "recurrent_reason",
]

NATIVE_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
"""`model_type` values whose decoder the native target reproduces."""

_FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers, as configurations name them."""

_RECURRENT_MARKS = ("mamba", "rwkv", "recurrent", "linear_attention", "gated_delta", "conv", "hybrid")


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes and per-layer flags of a Llama-like decoder."""

    shape: BlockShape
    num_layers: int  # L
    vocab_size: int  # V
    context_length: int
    window: int | None
    windowed: tuple[bool, ...]  # [L] layers with the sliding window
    rotary: tuple[bool, ...]  # [L] layers with rotary positions
    tied: bool

    @classmethod
    def of(cls, config: PretrainedConfig) -> Architecture:
        """Read a configuration.

        Raises:
            ModelError: The native decoder does not compute this model.
        """
        if reason := native_refusal(config):
            raise ModelError(
                "target.implementation",
                f"native does not compute {reason}",
                f"one of {', '.join(NATIVE_FAMILIES)} with silu and rope_type {', '.join(ROPE_KINDS)}",
                "use implementation: transformers (auto chooses it)",
            )
        layers = config.num_hidden_layers
        kinds, window = attention_kinds(config)
        windowed = tuple(kind == SLIDING for kind in kinds)
        rotary = getattr(config, "no_rope_layers", None) or (1,) * layers
        shape = BlockShape(
            hidden_size=config.hidden_size,
            mlp_size=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
            head_width=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            eps=config.rms_norm_eps,
            rope_theta=float(config.rope_parameters.get("rope_theta", 10000.0)),
        )
        return cls(
            shape=shape,
            num_layers=layers,
            vocab_size=config.vocab_size,
            context_length=config.max_position_embeddings,
            window=window if any(windowed) else None,
            windowed=windowed,
            rotary=tuple(bool(flag) for flag in rotary),
            tied=bool(config.tie_word_embeddings),
        )


def native_refusal(config: PretrainedConfig) -> str:
    """What of a model the native decoder does not compute; empty where it computes all."""
    if config.model_type not in NATIVE_FAMILIES:
        return f"model_type {config.model_type!r}"
    activation = getattr(config, "hidden_act", "silu")
    if activation != "silu":
        return f"activation {activation!r}"
    kind = rope_kind(config)
    return "" if kind in ROPE_KINDS else f"rope_type {kind!r}"


def attention_kinds(config: PretrainedConfig) -> tuple[tuple[str, ...], int | None]:
    """What each layer may see, and the sliding window.

    Raises:
        ModelError: A kind of layer whose mask is not known here.
    """
    window = getattr(config, "sliding_window", None) if _declares(config, "sliding_window") else None
    if not getattr(config, "use_sliding_window", True):
        window = None
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    if kinds is None:
        kinds = [_FULL if window is None else SLIDING] * config.num_hidden_layers
    unknown = sorted({str(kind) for kind in kinds} - {_FULL, SLIDING})
    if unknown or (SLIDING in kinds and window is None):
        found = f"layers of kind {', '.join(unknown)}" if unknown else f"{SLIDING} layers without a sliding_window"
        raise ModelError("target.model", found, f"{_FULL} or {SLIDING} with its window")
    return tuple(kinds), window


def _declares(config: PretrainedConfig, name: str) -> bool:
    """Whether the family has this setting; a stray key in a config file is kept by transformers but means nothing."""
    family = type(config)
    return hasattr(family, name) or name in signature(family.__init__).parameters


def recurrent_reason(config: PretrainedConfig) -> str:
    """Why a model's state cannot be rolled back; empty where it can be."""
    kinds = [str(kind) for kind in (getattr(config, "layer_types", None) or ())]
    kinds += [config.model_type]
    marked = sorted({kind for kind in kinds if any(mark in kind for mark in _RECURRENT_MARKS)})
    if not marked:
        return ""
    return f"recurrent or hybrid state ({', '.join(marked)}) cannot be rolled back after a rejected draft"


def info_of(architecture: Architecture, options: TargetOptions, runtime: str) -> TargetInfo:
    """What a decoder of this architecture says of itself before its rows were compared."""
    return TargetInfo(
        name=options.name,
        vocab_size=architecture.vocab_size,
        hidden_size=architecture.shape.hidden_size,
        num_layers=architecture.num_layers,
        context_length=architecture.context_length,
        stop_ids=options.stop_ids,
        dtype=options.dtype,
        weights=options.weights,
        device=options.device,
        runtime=runtime,
        exactness="tie-exact",
        shape=architecture.shape,
    )

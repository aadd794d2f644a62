"""Decoder blocks of the Llama family in a published checkpoint: their options, their tensors, and what we cannot do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from specflow.checkpoint.layout import Wanted
from specflow.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.checkpoint.files import Stored
    from specflow.checkpoint.keys import Keys

__all__ = ["READINGS", "BlockSizes", "block_sizes", "block_tensors", "refused", "scaling"]

READINGS = frozenset({"max_positions", "rope_theta", "rope_scaling"})
"""Options of blocks that say how weights are read: a recipe may say otherwise."""

_HEAD_WIDTH = {"qwen3": 128}
"""Width of a head where a configuration leaves it out, as `transformers` has it; elsewhere H over the heads."""
_THETA = 10000.0
_EPS = 1e-6
_PLAIN_ROPE = ("default", "", None)
_SCALED = {
    "linear": (),
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
}
"""Scalings of rotary positions and the numbers they take."""
_NOT_OURS = {
    ".experts.": "its MLP is a mixture of experts",
    "mlp.gate.weight": "its MLP is a mixture of experts",
    "kv_a_proj_with_mqa": "its attention keeps latent keys (MLA)",
    "q_a_proj": "its attention keeps latent queries (MLA)",
    ".g_proj": "its attention has a gate",
    ".sinks": "its attention has sinks",
    "sink_bias": "its attention has sinks",
    "aux_hidden_norms": "it norms every tap before they are fused",
    "attention_conv": "it is a DFlash-2 drafter: convolutions around its layers",
    "mlp_conv": "it is a DFlash-2 drafter: convolutions around its layers",
    "candidate_selector": "it is a DFlash-2 drafter: a selector of candidates",
    "layer_scalar": "its layers are scaled (Gemma 4)",
    "pre_feedforward_layernorm": "its layers have norms on both sides (Gemma)",
    "weight_scale": "its weights are quantised",
    "qweight": "its weights are quantised",
    "linear_attn": "its layers are recurrent",
}
"""Pieces of tensor names and what they mean."""


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Sizes of a published drafter's decoder blocks."""

    hidden_size: int  # H
    mlp_size: int
    num_heads: int  # Hq
    num_kv_heads: int  # Hk
    head_width: int  # Dh

    @property
    def options(self) -> dict[str, Any]:
        """Options of a source that say so."""
        return {
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_width": self.head_width,
            "mlp_size": self.mlp_size,
        }


def refused(where: object, reason: str, hint: str = "") -> CheckpointError:
    """The error of a drafter that is known and that no source of ours computes."""
    return CheckpointError(str(where), reason, "a drafter that a source of ours computes", hint)


def block_sizes(config: Keys, stored: Stored, prefix: str) -> tuple[BlockSizes, dict[str, Any]]:
    """Sizes of the blocks under a prefix, and all options that follow from the configuration.

    Sizes that it leaves out are read off the tensors: writers of configurations drop what is the default of their own
    version.

    Args:
        config: Of the blocks.
        stored: Of the checkpoint.
        prefix: Of the names of one block's tensors.

    Raises:
        CheckpointError: A key has a wrong value, or the blocks are not of the Llama family.
    """
    _check_parts(stored, prefix)
    _check_activation(config)
    rows, wide = (*stored.shape(f"{prefix}.mlp.down_proj.weight"), 0, 0)[:2]
    hidden = config.whole("hidden_size", rows or None)
    heads = config.whole("num_attention_heads")
    usual = _HEAD_WIDTH.get(config.text("model_type") or "", max(1, hidden // heads))
    head = config.whole("head_dim", _head_of_norm(stored, prefix) or usual)
    keys = (*stored.shape(f"{prefix}.self_attn.k_proj.weight"), 0)[0]
    sizes = BlockSizes(
        hidden_size=hidden,
        mlp_size=config.whole("intermediate_size", wide or None),
        num_heads=heads,
        num_kv_heads=config.whole("num_key_value_heads", (keys // head if keys else 0) or heads),
        head_width=head,
    )
    if head % 2 or heads % sizes.num_kv_heads:
        found = f"{heads} heads of width {head}, {sizes.num_kv_heads} of keys"
        raise CheckpointError(config.where, found, "an even width, and queries that share keys evenly")
    if stored.shape(f"{prefix}.self_attn.q_proj.weight")[:1] == (2 * heads * head,):
        raise refused(config.where, "its attention has a gate (q_proj has twice the rows)")
    options = sizes.options | {"eps": config.real("rms_norm_eps", _EPS), "rope_theta": _rope_theta(config)}
    if "max_position_embeddings" in config:
        options["max_positions"] = config.whole("max_position_embeddings")
    return sizes, options


def scaling(config: Keys) -> dict[str, Any]:
    """The option that says how rotary positions are scaled; empty where they are not.

    Raises:
        CheckpointError: They are scaled in a way, or turn values, that our drafters do not.
    """
    found: dict[str, Any] = {}
    for part in (config.part("rope_scaling"), config.part("rope_parameters")):
        kind = part.text("rope_type") or part.text("type")
        if kind in _SCALED:
            found = {"rope_scaling": _scaled(config, part, kind)}
        elif kind not in _PLAIN_ROPE:
            raise refused(config.where, f"its rotary positions are scaled ({kind})", f"{', '.join(_SCALED)} are known")
        if part.real("partial_rotary_factor", 1.0) != 1.0:
            raise refused(config.where, "its rotary positions turn a part of each head only")
    if config.real("partial_rotary_factor", 1.0) != 1.0:
        raise refused(config.where, "its rotary positions turn a part of each head only")
    if config.maybe_flag("rope_is_neox_style") is False or config.flag("rope_interleave", False):
        raise refused(config.where, "its rotary positions turn neighbouring values, not halves of a head")
    return found


def _scaled(config: Keys, part: Keys, kind: str) -> dict[str, Any]:
    """Parameters of a scaling; those of training or of other readers are not among them."""
    if (factor := part.real("factor")) is None:
        raise part.lacking("factor", "a number above 0")
    found: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind != "linear":
        named = part.maybe_whole("original_max_position_embeddings")
        found["original_max_position_embeddings"] = named or config.whole("max_position_embeddings")
    for name in _SCALED[kind]:
        if (value := part.real(name)) is not None:
            found[name] = value
    if kind == "yarn" and (rounded := part.maybe_flag("truncate")) is not None:
        found["truncate"] = rounded
    return found


def block_tensors(
    names: tuple[str, str], sizes: BlockSizes, stored: Stored, input_width: int | None = None, normed: bool = True
) -> list[Wanted]:
    """Our tensors of one block.

    Args:
        names: Our prefix and theirs.
        sizes: Of the block.
        stored: The checkpoint; biases and norms of heads are wanted where it has them.
        input_width: Of what queries, keys and values are made from; None: H.
        normed: The block norms its input.
    """
    ours, theirs = names
    width, wide = sizes.hidden_size, input_width or sizes.hidden_size
    inner, outer = sizes.num_heads * sizes.head_width, sizes.num_kv_heads * sizes.head_width
    attention = {"q_proj": inner, "k_proj": outer, "v_proj": outer}
    wanted = [
        *_fused((ours, theirs), ("self_attn", "qkv_proj"), attention, wide, stored),
        *_linear((ours, theirs), "self_attn.o_proj", (width, inner), stored),
        *_fused((ours, theirs), ("mlp", "gate_up_proj"), dict.fromkeys(_GATED, sizes.mlp_size), width, stored),
        *_linear((ours, theirs), "mlp.down_proj", (width, sizes.mlp_size), stored),
    ]
    norms = {"post_attention_layernorm": width, **({"input_layernorm": width} if normed else {})}
    if any(f"{theirs}.self_attn.{name}.weight" in stored.names for name in ("q_norm", "k_norm")):
        norms |= {"self_attn.q_norm": sizes.head_width, "self_attn.k_norm": sizes.head_width}
    wanted += [Wanted(f"{ours}.{n}.weight", (f"{theirs}.{n}.weight",), (size,)) for n, size in norms.items()]
    return wanted


_GATED = ("gate_proj", "up_proj")


def _linear(names: tuple[str, str], part: str, shape: tuple[int, int], stored: Stored) -> list[Wanted]:
    """A linear layer, with a bias where there is one.  # [outputs, inputs]"""
    ours, theirs = names
    wanted = [Wanted(f"{ours}.{part}.weight", (f"{theirs}.{part}.weight",), shape)]
    if f"{theirs}.{part}.bias" in stored.names:
        wanted.append(Wanted(f"{ours}.{part}.bias", (f"{theirs}.{part}.bias",), shape[:1]))
    return wanted


def _fused(
    names: tuple[str, str], place: tuple[str, str], parts: Mapping[str, int], width: int, stored: Stored
) -> list[Wanted]:
    """Linear layers that stand one by one, or one below the other in a single tensor."""
    (ours, theirs), (section, together) = names, place
    if f"{theirs}.{section}.{together}.weight" not in stored.names:
        return [w for part, rows in parts.items() for w in _linear(names, f"{section}.{part}", (rows, width), stored)]
    total, begin, wanted = sum(parts.values()), 0, []
    kinds = [kind for kind in ("weight", "bias") if f"{theirs}.{section}.{together}.{kind}" in stored.names]
    for part, rows in parts.items():
        cut, begin = partial(_rows, begin=begin, end=begin + rows), begin + rows
        for kind in kinds:
            shape = (total, width) if kind == "weight" else (total,)
            source = f"{theirs}.{section}.{together}.{kind}"
            wanted.append(Wanted(f"{ours}.{section}.{part}.{kind}", (source,), shape, cut))
    return wanted


def _rows(tensors: Sequence[Tensor], begin: int, end: int) -> Tensor:
    return tensors[0][begin:end]


def _head_of_norm(stored: Stored, prefix: str) -> int | None:
    shape = stored.shape(f"{prefix}.self_attn.q_norm.weight")
    return shape[0] if len(shape) == 1 and shape[0] else None


def _check_parts(stored: Stored, prefix: str) -> None:
    begin = prefix.partition("layers.")[0] if prefix.startswith("layers.") else prefix
    for name in stored.under(begin):
        reason = next((reason for piece, reason in _NOT_OURS.items() if piece in name), None)
        if reason is not None:
            raise refused(f"{stored.path}: tensor {name}", reason)


def _check_activation(config: Keys) -> None:
    if (config.text("hidden_act") or "silu") not in ("silu", "swish"):
        raise refused(config.where, f"its MLP is activated by {config.text('hidden_act')}", "silu is what ours have")


def _rope_theta(config: Keys) -> float:
    for part in (config, config.part("rope_parameters"), config.part("rope_scaling")):
        if (theta := part.real("rope_theta")) is not None:
            return theta
    return _THETA

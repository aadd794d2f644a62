"""MTP's layouts (2412.19437): modules inside a target's checkpoint under the names of DeepSeek-V3, Qwen3-Next or MiMo,
and the module alone as speculators writes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specflow.checkpoint.block import READINGS, block_sizes, block_tensors, scaling
from specflow.checkpoint.layout import Layout, LayoutName, TargetFacts, Wanted
from specflow.checkpoint.speculators import SHARED_KEYS, proposed_tokens, verifier_of
from specflow.errors import CheckpointError

if TYPE_CHECKING:
    from specflow.checkpoint.files import Stored
    from specflow.checkpoint.keys import Keys

__all__ = ["is_mtp", "mtp_layout", "mtp_speculators"]

_READINGS = READINGS | {"order", "hidden", "recycle", "zero_first", "unrolled", "offset_norms"}
_PLAIN_NORMS = ("llama", "mistral", "qwen2", "qwen3", "mimo", "deepseek_v3", "deepseek_v32", "glm4_moe")
"""Families that store the gains of norms as they are; Qwen3-Next and what came after it store them less 1."""
_MAYBE_OFFSET = ("mtp-qwen", "mtp-speculators")
"""Layouts in which such families are published; DeepSeek's names and MiMo's go with plain gains."""
_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


@dataclass(frozen=True, slots=True)
class _Module:
    """Where the tensors of one module stand."""

    block: str  # prefix of its decoder block
    fc: str
    embedding_norm: str
    hidden_norm: str
    norm: str


@dataclass(frozen=True, slots=True)
class _Said:
    """What the layouts say, in one form."""

    name: LayoutName
    modules: Sequence[_Module]
    options: Mapping[str, Any]
    target: str | None
    unneeded: Sequence[str] = ()
    notes: Sequence[str] = field(default_factory=tuple)


def is_mtp(stored: Stored, config: Keys) -> bool:
    """Whether a target's checkpoint holds modules: its configuration says so, and there are tensors to show for it."""
    text = _text_config(config)
    counted = any(name in keys for name in _COUNTS for keys in (config, text))
    return counted and any(
        name.startswith(("mtp.fc.", "model.mtp_layers.")) or name.endswith(".eh_proj.weight") for name in stored.names
    )


def mtp_layout(stored: Stored, config: Keys) -> Layout:
    """The modules of a target's checkpoint.

    Raises:
        CheckpointError: A key has a wrong value, or its blocks are not of the Llama family.
    """
    text = _text_config(config)
    if "mtp.fc.weight" in stored.names:
        return _layout(stored, text, _qwen(stored, text))
    if stored.under("model.mtp_layers."):
        return _layout(stored, text, _mimo(stored))
    return _layout(stored, text, _deepseek(stored, text))


def mtp_speculators(stored: Stored, config: Keys) -> Layout:
    """The layout of speculators: one module, unrolled over the tokens it proposes.

    Raises:
        CheckpointError: As in `mtp_layout`.
    """
    config.allow((*SHARED_KEYS, "num_nextn_predict_layers"))
    if config.whole("num_nextn_predict_layers", 1) != 1:
        raise config.wrong("num_nextn_predict_layers", "1")
    block = config.part("transformer_layer_config")
    tokens = proposed_tokens(config)
    options: dict[str, Any] = {"hidden": "pre_norm", "recycle": "post_norm"}
    if tokens is not None and tokens > 1:
        options["unrolled"] = min(tokens, 64)
    prefix = "mtp_layers.0"
    names = ("input_proj.weight", "token_layernorm.weight", "hidden_layernorm.weight", "final_layernorm.weight")
    module = _Module(prefix, *(f"{prefix}.{name}" for name in names))
    others = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "t2d", "d2t")
    said = _Said("mtp-speculators", [module], options, verifier_of(config), [n for n in others if n in stored.names])
    return _layout(stored, block, said)


def _text_config(config: Keys) -> Keys:
    return config.part("text_config") if "text_config" in config else config


def _qwen(stored: Stored, config: Keys) -> _Said:
    """`mtp.*`: several blocks share what stands around them."""
    count = max(1, stored.count(r"mtp\.layers\.(\d+)\."))
    around = ("mtp.fc.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight")
    modules = [_Module(f"mtp.layers.{index}", *around) for index in range(count)]
    return _Said("mtp-qwen", modules, {}, str(stored.path), _of_target(stored, ("mtp.",)))


def _mimo(stored: Stored) -> _Said:
    """`model.mtp_layers.*`: the hidden state comes first, and position 0 has no embedding."""
    count = stored.count(r"model\.mtp_layers\.(\d+)\.")
    names = ("input_proj.weight", "token_layernorm.weight", "hidden_layernorm.weight", "final_layernorm.weight")
    modules = [
        _Module(prefix, *(f"{prefix}.{name}" for name in names))
        for prefix in (f"model.mtp_layers.{index}" for index in range(count))
    ]
    options = {"order": "hidden_first", "zero_first": True}
    return _Said("mtp-mimo", modules, options, str(stored.path), _of_target(stored, ("model.mtp_layers.",)))


def _deepseek(stored: Stored, config: Keys) -> _Said:
    """`model.layers.{L + k}`: the numbers go on after the target's. Copies of embedding and head are not read."""
    first, count = config.whole("num_hidden_layers"), config.whole("num_nextn_predict_layers")
    names = ("eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight")
    prefixes = [f"model.layers.{first + index}" for index in range(min(count, 64))]
    modules = [_Module(prefix, *(f"{prefix}.{name}" for name in names)) for prefix in prefixes]
    copies = [f"{p}.{n}" for p in prefixes for n in ("embed_tokens.weight", "shared_head.head.weight")]
    others = _of_target(stored, tuple(f"{prefix}." for prefix in prefixes))
    notes = ("which states are normed differs between engines for this family: `specflow selftest` tells",)
    return _Said("mtp-deepseek", modules, {"zero_first": True}, str(stored.path), [*others, *copies], notes)


def _of_target(stored: Stored, prefixes: tuple[str, ...]) -> list[str]:
    """Tensors that are the target's own."""
    return [name for name in stored.names if not name.startswith(prefixes)]


def _layout(stored: Stored, config: Keys, said: _Said) -> Layout:
    sizes, shape = block_sizes(config, stored, said.modules[0].block)
    shape |= scaling(config)
    if said.name != "mtp-speculators":
        shape.pop("max_positions", None)  # the target's own
    width, wanted = sizes.hidden_size, []
    for index, module in enumerate(said.modules):
        ours = f"mtp.{index}" if len(said.modules) > 1 else "mtp"
        wanted += [
            Wanted(f"{ours}.fc.weight", (module.fc,), (width, 2 * width)),
            Wanted(f"{ours}.pre_fc_norm_embedding.weight", (module.embedding_norm,), (width,)),
            Wanted(f"{ours}.pre_fc_norm_hidden.weight", (module.hidden_norm,), (width,)),
            Wanted(f"{ours}.norm.weight", (module.norm,), (width,)),
            *block_tensors((f"{ours}.layers.0", module.block), sizes, stored),
        ]
    family = config.text("model_type") or "llama"
    offset = said.name in _MAYBE_OFFSET and family not in _PLAIN_NORMS
    options = {"num_modules": len(said.modules), "offset_norms": offset, **said.options, **shape}
    if options["num_modules"] > 64:
        raise CheckpointError(config.where, f"{len(said.modules)} modules", "at most 64")
    layers = config.maybe_whole("num_hidden_layers")
    return Layout(
        name=said.name,
        source="mtp",
        method="mtp",
        path=stored.path,
        options=options,
        readings=_READINGS,
        target=TargetFacts(said.target, config.maybe_whole("vocab_size"), width, layers),
        wanted=tuple(wanted),
        unneeded=tuple(said.unneeded),
        notes=tuple(said.notes),
    )

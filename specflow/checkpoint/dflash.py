"""DFlash's and DSpark's layouts (2602.06036, 2607.05147): z-lab's and SpecForge's, DeepSpec's, and speculators'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from specflow.checkpoint.block import READINGS, block_sizes, block_tensors, refused, scaling
from specflow.checkpoint.layout import Layout, LayoutName, TargetFacts, Wanted
from specflow.checkpoint.speculators import SHARED_KEYS, proposed_tokens, verifier_of
from specflow.checkpoint.vocabulary import map_of, reduced_size
from specflow.errors import CheckpointError

if TYPE_CHECKING:
    from specflow.checkpoint.files import Stored
    from specflow.checkpoint.keys import Keys

__all__ = ["DEEPSPEC", "SPECFORGE", "backbone_deepspec", "backbone_speculators", "dflash_layout"]

DEEPSPEC = ("Qwen3DSparkModel", "Gemma4DSparkModel", "Lfm2DSparkDraftModel")
"""Architectures whose keys stand at the top of config.json."""
SPECFORGE = ("DSparkDraftModel", "DFlash2DraftModel", "DFlashDraftModel")
"""Architectures whose keys stand under dflash_config."""

_KINDS = {"vanilla": "markov", "gated": "gated", "rnn": "rnn"}
_READINGS = READINGS | {"taps", "layout", "causal", "window_from", "mask_token"}
_NOT_READ = ("verifier_norm.weight", "verifier_lm_head.weight")
_HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
_NESTED = (
    *_HEADS,
    "attention_mode",
    "attention_modes",
    "block_size",
    "causal",
    "confidence_head_alpha",
    "final_logit_softcapping",
    "input_embedding_scale",
    "is_causal",
    "mask_token_id",
    "num_anchors",
    "num_target_layers",
    "output_multiplier",
    "projector_type",
    "shift_label",
    "swa_window_size",
    "target_layer_ids",
    "use_swa",
)
_DFLASH2 = ("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size")
_MASK = "the id of the token that fills the unknown slots"


@dataclass(frozen=True, slots=True)
class _Said:
    """What the layouts say, in one form."""

    taps: tuple[int, ...] | None  # as written
    step: int  # from a written number to ours
    options: Mapping[str, Any]
    target: str | None = None
    size: int | None = None  # of the draft vocabulary
    notes: tuple[str, ...] = ()


def dflash_layout(stored: Stored, config: Keys, architectures: Sequence[str]) -> Layout:
    """The layout of z-lab and SpecForge: keys under `dflash_config`, embedding and head the target's.

    Raises:
        CheckpointError: A key has a wrong value, or it is a variant that our sources do not compute.
    """
    inner = config.part("dflash_config")
    if "DFlash2DraftModel" in architectures or any(key in inner for key in _DFLASH2):
        found = "a DFlash-2 drafter: convolutions and a selector of candidates"
        raise refused(config.where, found, "its DFlash predecessor for the same target works")
    projector = inner.text("projector_type") or ("dspark" if "DSparkDraftModel" in architectures else "")
    if projector not in ("", "none", "dflash", "dspark"):
        raise refused(config.where, f"its projector is {projector!r}", "none, or dspark")
    inner.allow(_NESTED)
    _check_forms(config, inner)
    spark = projector == "dspark"
    options = {**_window(config, inner), **_block(config, inner), **_scales(inner), **scaling(config)}
    options["layout"] = "shifted" if spark or inner.flag("shift_label", False) else "fill_in"
    said = _Said(inner.wholes("target_layer_ids", -1), 0, options, notes=_of_taps(inner))
    said = _corrected(stored, _both(config, inner), said)
    return _finished("dspark-specforge" if spark else "dflash", stored, config, said)


def backbone_deepspec(stored: Stored, config: Keys, architectures: Sequence[str]) -> Layout:
    """The layout of DeepSpec: a copy of the target's config with keys of its own; markov_rank 0 is DFlash, shifted.

    What that copy says of rotary positions and gates is the target's and not the drafter's.

    Raises:
        CheckpointError: A key has a wrong value, or it is made for a Gemma or LFM2 target.
    """
    others = [name for name in architectures if name in DEEPSPEC[1:]]
    if others:
        reason = "its layers are Gemma's" if "Gemma" in others[0] else "its rotary positions turn neighbouring values"
        raise refused(config.where, f"a {others[0]}: {reason}")
    if config.wholes("target_layer_ids", -1) is None:
        raise config.lacking("target_layer_ids", "the target layers whose output it reads")
    options = {**_window(config, config), **_block(config, config), "layout": "shifted"}
    said = _corrected(stored, config, _Said(config.wholes("target_layer_ids", -1), 0, options))
    spark = said.options["corrector"] is not None or said.options["confidence_head"]
    return _finished("dspark-deepspec" if spark else "dflash-deepspec", stored, config, said)


def backbone_speculators(stored: Stored, config: Keys, kind: str) -> Layout:
    """The layout of speculators, whose layer numbers are of the layers that are entered.

    Args:
        stored: The checkpoint.
        config: Its configuration.
        kind: dflash or dspark.

    Raises:
        CheckpointError: A key has a wrong value, or it is a variant that our sources do not compute.
    """
    own = ("aux_hidden_state_layer_ids", "block_size", "draft_vocab_size", "mask_token_id", "sample_from_anchor")
    own += ("sliding_window_non_causal", "target_hidden_size", *(_HEADS if kind == "dspark" else ()))
    config.allow((*SHARED_KEYS, *own))
    block = config.part("transformer_layer_config")
    width = config.maybe_whole("target_hidden_size")
    if width not in (None, block.maybe_whole("hidden_size")):
        raise refused(config.where, f"its target is {width} wide, and it is not", "one width for both")
    options = {**_window(block, block), **_block(config, config), **scaling(block)}
    if "window" in options:
        options["window_from"] = "anchor"  # its window ends before the anchor, for all slots
    if config.flag("sliding_window_non_causal", False):
        options["causal"] = False
    options["layout"] = "shifted" if _from_anchor(config, kind, options["block_size"]) else "fill_in"
    size = config.maybe_whole("draft_vocab_size")
    said = _Said(config.wholes("aux_hidden_state_layer_ids"), -1, options, verifier_of(config), size)
    if said.taps is None:
        raise config.lacking("aux_hidden_state_layer_ids", "the target layers whose state it reads")
    said = _corrected(stored, config if kind == "dspark" else config.part("no such part"), said)
    return _finished("dspark-speculators" if kind == "dspark" else "dflash-speculators", stored, block, said)


def _from_anchor(config: Keys, kind: str, block_size: int) -> bool:
    """Whether the anchor's slot predicts: old files leave it out, and the tokens they propose tell."""
    stated = config.maybe_flag("sample_from_anchor")
    if stated is not None:
        return stated
    tokens = proposed_tokens(config)
    spare = None if tokens is None else block_size - tokens
    return spare == 0 if spare in (0, 1) else kind == "dspark"


def _both(config: Keys, inner: Keys) -> Keys:
    """Keys of heads that stand under dflash_config, or at the top in older files."""
    top = {name: config.values[name] for name in _HEADS if name in config}
    return type(config)({**top, **{k: v for k, v in inner.values.items() if v is not None}}, config.where)


def _of_taps(inner: Keys) -> tuple[str, ...]:
    if inner.wholes("target_layer_ids", -1) is not None:
        return ()
    return ("config.json names no target layers: they are spread as DFlash does where nobody says",)


def _check_forms(config: Keys, inner: Keys) -> None:
    modes = {inner.text("attention_mode"), *inner.texts("attention_modes")} - {None, "gqa", "mha"}
    if modes:
        raise refused(config.where, f"its attention is {', '.join(sorted(map(str, modes)))}", "gqa or mha")
    if inner.real("input_embedding_scale", 1.0) != 1.0:
        raise refused(config.where, "it scales the embedding that it reads", "input_embedding_scale: 1")


def _scales(inner: Keys) -> dict[str, Any]:
    scale, cap = inner.real("output_multiplier"), inner.real("final_logit_softcapping")
    found = {"logit_scale": scale, "logit_cap": cap}
    return {name: value for name, value in found.items() if value is not None}


def _block(config: Keys, inner: Keys) -> dict[str, Any]:
    size = inner.maybe_whole("block_size") or config.whole("block_size")
    mask = inner.maybe_whole("mask_token_id", 0)
    mask = config.maybe_whole("mask_token_id", 0) if mask is None else mask
    return {"block_size": size, **({} if mask is None else {"mask_token": mask})}


def _window(config: Keys, inner: Keys) -> dict[str, Any]:
    """What its layers see: kinds of layers and the window, as Qwen 3 has them, or one window for all."""
    found: dict[str, Any] = {}
    causal = [each.maybe_flag(key) for each in (inner, config) for key in ("causal", "is_causal")]
    if (stated := next((each for each in causal if each is not None), None)) is not None:
        found["causal"] = stated
    kinds = config.texts("layer_types")
    if inner is not config and inner.flag("use_swa", False):
        found["window"] = inner.whole("swa_window_size")
        if "sliding_attention" not in kinds:
            return found
    elif "sliding_attention" in kinds:
        found["window"] = config.whole("sliding_window")
    elif not kinds and config.flag("use_sliding_window", False):
        first, count = config.whole("max_window_layers", 28, least=0), config.whole("num_hidden_layers")
        kinds = tuple("sliding_attention" if index >= first else "full_attention" for index in range(min(count, 64)))
        if "sliding_attention" in kinds:
            found["window"] = config.whole("sliding_window")
    if "window" in found:
        found["layer_types"] = kinds
    wrong = set(kinds) - {"full_attention", "sliding_attention"}
    if wrong:
        raise refused(config.where, f"its layers are {', '.join(sorted(wrong))}", "full or sliding attention")
    return found


def _corrected(stored: Stored, heads: Keys, said: _Said) -> _Said:
    """With the corrector and the confidence head that keys and tensors speak of."""
    columns = (*stored.shape("markov_head.markov_w1.weight")[1:2], 0)[0]
    rank = heads.whole("markov_rank", columns, least=0)
    kind = heads.text("markov_head_type") or "vanilla"
    if rank and kind not in _KINDS:
        raise heads.wrong("markov_head_type", f"one of {', '.join(_KINDS)}")
    options = {**said.options, "corrector": _KINDS[kind] if rank else None}
    if rank:
        options["corrector_rank"] = rank
    options["confidence_head"] = heads.flag("enable_confidence_head", "confidence_head.proj.weight" in stored.names)
    if options["confidence_head"]:
        options["confidence_bias"] = True
        options["confidence_tokens"] = heads.flag("confidence_head_with_markov", bool(rank))
        if options["confidence_tokens"] and not rank:
            raise heads.wrong("confidence_head_with_markov", "false: there is no Markov head whose rows it could read")
    return replace(said, options=options)


def _finished(name: LayoutName, stored: Stored, config: Keys, said: _Said) -> Layout:
    """The layout from what was said, and its tensors."""
    sizes, shape = block_sizes(config, stored, "layers.0")
    width, layers = sizes.hidden_size, max(1, stored.count(r"layers\.(\d+)\."))
    stated = config.maybe_whole("num_hidden_layers")
    if stated is not None and stated != layers and stored.under("layers."):
        raise config.wrong("num_hidden_layers", f"{layers}: so many are there")
    options = {**said.options, **shape, "num_layers": layers}
    if said.taps is not None:
        options["taps"] = tuple(tap + said.step for tap in said.taps)
    kinds = options.get("layer_types", ())
    if kinds and len(kinds) != layers:
        raise config.wrong("layer_types", f"one for each of {layers} layers")
    full = config.maybe_whole("vocab_size") or (*stored.shape("t2d"), 0)[0] or None
    size = reduced_size(stored, said.size or config.maybe_whole("draft_vocab_size"), full)
    if size is not None:
        options["draft_vocab_size"] = size
    options["own_head"] = size is not None or "lm_head.weight" in stored.names
    wanted = [
        *_backbone(stored, sizes, options, full),
        *map_of(stored, size),
        *_heads(options, width, (full, size or full)),
    ]
    return Layout(
        name=name,
        source="dspark" if options["corrector"] else "dflash",
        method="dspark" if options["corrector"] else "dflash",
        path=stored.path,
        options=options,
        readings=_READINGS,
        asks={} if "mask_token" in options else {"mask_token": _MASK},
        target=TargetFacts(said.target, full, width, config.maybe_whole("num_target_layers")),
        written_taps=said.taps,
        wanted=tuple(wanted),
        unneeded=tuple(n for n in stored.names if n in (*_NOT_READ, "t2d") or n.endswith("rotary_emb.inv_freq")),
        notes=said.notes,
    )


def _backbone(stored: Stored, sizes: Any, options: Mapping[str, Any], full: int | None) -> list[Wanted]:
    width, columns = sizes.hidden_size, (*stored.shape("fc.weight")[1:2], 0)[0]
    count = len(options["taps"]) if "taps" in options else columns // width
    if columns and columns != count * width:
        found = f"fc.weight has {columns} columns: {columns / width:g} taps of width {width}"
        raise CheckpointError(str(stored.path), found, f"{count}, as config.json says")
    wanted = [
        Wanted("fc.weight", ("fc.weight",), (width, count * width or None)),
        Wanted("hidden_norm.weight", ("hidden_norm.weight",), (width,)),
        Wanted("norm.weight", ("norm.weight",), (width,)),
    ]
    for index in range(options["num_layers"]):
        prefix = f"layers.{index}"
        wanted += block_tensors((prefix, prefix), sizes, stored)
        norms = [f"{prefix}.self_attn.{part}.weight" for part in ("q_norm", "k_norm")]
        have = {each.name for each in wanted}
        wanted += [Wanted(norm, (norm,), (sizes.head_width,)) for norm in norms if norm not in have]
    if "embed_tokens.weight" in stored.names:
        wanted.append(Wanted("embed_tokens.weight", ("embed_tokens.weight",), (full, width)))
    if options["own_head"]:
        rows = options.get("draft_vocab_size", full)
        wanted.append(Wanted("lm_head.weight", ("lm_head.weight",), (rows, width)))
    return wanted


def _heads(options: Mapping[str, Any], width: int, sizes: tuple[int | None, int | None]) -> list[Wanted]:
    """Tensors of the corrector and the confidence head, whose published names are ours.

    Args:
        options: Of the source.
        width: H of the network.
        sizes: Of the target's vocabulary and of the draft's.  # V, Vd
    """
    rank, kind = options.get("corrector_rank", 0), options["corrector"]
    shapes: dict[str, tuple[int | None, ...]] = {}
    if kind is not None:
        shapes["markov_head.markov_w1.weight"] = (sizes[0], rank)
        shapes["markov_head.markov_w2.weight"] = (sizes[1], rank)
    joint = {"gated": ("gate_proj", rank, width + rank), "rnn": ("joint_proj", 3 * rank, 2 * rank + width)}.get(kind)
    if joint is not None:
        part, rows, columns = joint
        shapes[f"markov_head.{part}.weight"] = (rows, columns)
        shapes[f"markov_head.{part}.bias"] = (rows,)
    if options["confidence_head"]:
        shapes["confidence_head.proj.weight"] = (1, width + (rank if options["confidence_tokens"] else 0))
        shapes["confidence_head.proj.bias"] = (1,)
    return [Wanted(name, (name,), shape) for name, shape in shapes.items()]

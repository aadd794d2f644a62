"""Block backbones (DFlash, DSpark) in the layouts of z-lab, DeepSpec and speculators.

Layer numbers: z-lab's and DeepSpec's k is the output of 0-based layer k, as ours is; speculators' k is what enters
layer k, which is the output of layer k - 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from specflow.checkpoint.write_drafter import refuse_unsaid
from specflow.checkpoint.write_parts import (
    BLOCK_OPTIONS,
    Scene,
    Written,
    reduced_ids,
    speculators_keys,
    take_block,
    take_vocabulary,
    transformer_keys,
)
from specflow.draft.backbone_options import BackboneOptions, spread_taps

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["write_official_block", "write_speculators_block"]

_HEADS = frozenset(("corrector", "corrector_rank", "confidence_head", "confidence_bias", "confidence_tokens"))
_BASE = BLOCK_OPTIONS | {"num_layers", "taps", "layout", "block_size", "mask_token", "own_head"}
_CHECKED = frozenset(("causal", "window", "window_from", "layer_types"))
_KINDS = {"markov": "vanilla", "gated": "gated", "rnn": "rnn"}
_BESIDE = {"gated": ("gate_proj", 1, 1), "rnn": ("joint_proj", 3, 2)}
"""Corrector -> its further layer, rows of it and columns beside the hidden row, in ranks."""


def write_official_block(scene: Scene) -> Written:
    """As the authors publish it: DFlash as z-lab does; shifted blocks, correctors and confidence heads as DeepSpec.

    Raises:
        CheckpointError: The layout cannot say an option, a tensor does not fit, or a table of the target is lacking.
    """
    if scene.option("layout") == "shifted":
        return _write_deepspec(scene)
    for name in ("corrector", "confidence_head"):
        if value := scene.option(name):
            hint = "the speculators layout has both" if name == "corrector" else "see also --drop-confidence"
            raise scene.refuse(f"layout fill_in with {name} {value}", "neither corrector nor confidence head", hint)
    return _write_zlab(scene)


def write_speculators_block(scene: Scene) -> Written:
    """As `speculators` writes it: type dflash, or dspark where there is more than a plain fill-in block.

    Raises:
        CheckpointError: As in `write_official_block`.
    """
    options, ids = _options(scene), reduced_ids(scene)
    refuse_unsaid(scene.stored, _BASE | _CHECKED | _HEADS | {"draft_vocab_size", "temperatures"}, scene.layout)
    plain = options.layout == "fill_in" and not scene.option("corrector") and not scene.option("confidence_head")
    keys, tensors = _backbone(scene, options)
    heads, of_heads = ({}, {}) if plain else _heads(scene, ids)
    scene.refuse_unlike("embed_tokens.weight", "embedding")
    tensors |= take_vocabulary(scene, ids, always_head=False) | of_heads
    slots = _slots(scene, options)
    kind = "dflash" if plain else "dspark"
    config = {
        "architectures": ["DFlashSpeculator" if plain else "DSparkSpeculator"],
        **speculators_keys(scene, kind, slots - options.first_slot),
        "transformer_layer_config": keys | _windows(scene, options),
        "draft_vocab_size": scene.vocab_size() if ids is None else len(ids),
        "block_size": slots,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in _taps(scene, options)],
        "mask_token_id": _mask_token(scene, options),
        "sliding_window_non_causal": _both_ways(scene, options),
        "sample_from_anchor": options.layout == "shifted",
        **heads,
    }
    return Written(config, tensors, notes=_uncalibrated(scene))


def _write_zlab(scene: Scene) -> Written:
    options = _options(scene)
    said = _BASE | _CHECKED | {"logit_scale", "logit_cap"}
    refuse_unsaid(scene.stored, said, scene.layout)
    if options.window is not None and options.window_from != "row":
        raise scene.refuse("a window that ends before the anchor", "one that ends at each slot's own position")
    taps = _official_taps(scene, options)
    keys, tensors = _backbone(scene, options)
    for name, theirs in (("embed_tokens.weight", "embedding"), ("lm_head.weight", "head")):
        scene.refuse_unlike(name, theirs)
    inner: dict[str, Any] = {"target_layer_ids": taps, "mask_token_id": _mask_token(scene, options)}
    if options.logit_scale != 1.0:
        inner["output_multiplier"] = options.logit_scale
    if options.logit_cap is not None:
        inner["final_logit_softcapping"] = options.logit_cap
    config = {
        "architectures": ["DFlashDraftModel"],
        **keys,
        **_windows(scene, options),
        "num_target_layers": _num_target_layers(scene),
        "block_size": _slots(scene, options),
        "dflash_config": inner,
    }
    if options.causal is not None:
        config["is_causal"] = options.causal
    return Written(config, tensors)


def _write_deepspec(scene: Scene) -> Written:
    options = _options(scene)
    # Its config begins as a copy of the target's, so readers take a scaling in it for the target's own.
    refuse_unsaid(scene.stored, (_BASE | _HEADS | {"temperatures"}) - {"rope_scaling"}, scene.layout)
    taps = _official_taps(scene, options)
    keys, tensors = _backbone(scene, options)
    heads, of_heads = _heads(scene, None)
    width, full = scene.shape().hidden_size, scene.vocab_size()
    if scene.supply.has("embed_tokens.weight"):
        embedding = scene.supply.take("embed_tokens.weight", (full, width))
    else:
        rows = scene.need("it borrows the target's embedding, whose rows are stored").embedding()
        embedding = scene.like_ours("embedding", rows)
    tensors |= {"embed_tokens.weight": embedding} | take_vocabulary(scene, None, always_head=True) | of_heads
    config = {
        "architectures": ["Qwen3DSparkModel"],
        **keys,
        **_windows(scene, options),
        "num_target_layers": _num_target_layers(scene),
        "block_size": _slots(scene, options),
        "mask_token_id": _mask_token(scene, options),
        "target_layer_ids": taps,
        **heads,
    }
    return Written(config, tensors, notes=_uncalibrated(scene))


def _options(scene: Scene) -> BackboneOptions:
    options = scene.stored.options
    assert isinstance(options, BackboneOptions), "a source of another family has this writer"
    return options


def _backbone(scene: Scene, options: BackboneOptions) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Keys of the blocks, and the tensors that all layouts name alike."""
    supply, shape = scene.supply, scene.shape()
    width = shape.hidden_size
    tensors = {
        "fc.weight": supply.take("fc.weight", (width, len(_taps(scene, options)) * width)),
        "hidden_norm.weight": supply.take("hidden_norm.weight", (width,)),
        "norm.weight": supply.take("norm.weight", (width,)),
    }
    blocks = []
    for index in range(options.num_layers):
        prefix, name = f"layers.{index}", "input_layernorm.weight"
        block = take_block(scene, prefix, shape)
        tensors |= block.under(prefix) | {f"{prefix}.{name}": supply.take(f"{prefix}.{name}", (width,))}
        blocks.append(block)
    return transformer_keys(scene, "qwen3", blocks), tensors


def _taps(scene: Scene, options: BackboneOptions) -> tuple[int, ...]:
    if options.taps:
        return scene.checked_taps(options.taps)
    return spread_taps(options.num_layers, scene.need("config.json leaves its taps to the target").num_layers)


def _official_taps(scene: Scene, options: BackboneOptions) -> list[int]:
    taps = _taps(scene, options)
    last = _num_target_layers(scene) - 1
    if last in taps:
        found = f"tap {last}, the target's last layer before its final norm"
        raise scene.refuse(found, "layers before the last, whose state is read after the norm")
    return list(taps)


def _num_target_layers(scene: Scene) -> int:
    return scene.need("the number of its layers is not known").num_layers


def _mask_token(scene: Scene, options: BackboneOptions) -> int:
    last = scene.vocab_size() - 1
    if options.mask_token is not None and options.mask_token > last:
        expected = f"at most {last}: readers take its row of the target's embedding,"
        raise scene.refuse(f"mask_token {options.mask_token}", expected)
    return last if options.mask_token is None else options.mask_token


def _slots(scene: Scene, options: BackboneOptions) -> int:
    if options.block_size is not None:
        return options.block_size
    if scene.stored.k is None:
        raise scene.refuse("no block_size", "the slots of a block", "write block_size into its config.json")
    return options.slots(scene.stored.k)


def _windows(scene: Scene, options: BackboneOptions) -> dict[str, Any]:
    """Keys that say what each layer sees of the context."""
    kinds = ["sliding_attention" if windowed else "full_attention" for windowed in options.windowed]
    sliding = options.window is not None
    return {"layer_types": kinds, "use_sliding_window": sliding, "sliding_window": options.window}


def _both_ways(scene: Scene, options: BackboneOptions) -> bool:
    """`sliding_window_non_causal`; full layers see the block both ways whatever it says."""
    if options.window is not None and options.window_from != "anchor":
        found = "a window that ends at each slot's own position"
        raise scene.refuse(found, "one that ends before the anchor (window_from: anchor)")
    if options.causal and not all(options.windowed):
        raise scene.refuse("causal blocks in layers without a window", "blocks that such layers see both ways")
    return options.causal is False and options.window is not None


def _heads(scene: Scene, ids: Tensor | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Keys and tensors of the corrector and the confidence head. Biases that ours lack are written as zeros."""
    kind, rank = scene.option("corrector"), scene.option("corrector_rank")
    width, full = scene.shape().hidden_size, scene.vocab_size()
    supply = scene.supply
    tensors: dict[str, Tensor] = {}
    if kind is not None:
        drafted = full if ids is None else len(ids)
        sizes = {"markov_w1": (full, rank), "markov_w2": (drafted, rank)}
        if kind in _BESIDE:
            name, rows, columns = _BESIDE[kind]
            sizes[name] = (rows * rank, columns * rank + width)
            tensors |= _bias(scene, f"markov_head.{name}.bias", rows * rank)
        for name, size in sizes.items():
            tensors[f"markov_head.{name}.weight"] = supply.take(f"markov_head.{name}.weight", size)
    trusted = bool(scene.option("confidence_head"))
    reads_tokens = trusted and kind is not None and scene.option("confidence_tokens") is not False
    if trusted:
        name = "confidence_head.proj"
        tensors[f"{name}.weight"] = supply.take(f"{name}.weight", (1, width + rank * reads_tokens))
        tensors |= _bias(scene, f"{name}.bias", 1)
    keys: Mapping[str, Any] = {
        "markov_rank": 0 if kind is None else rank,
        "markov_head_type": _KINDS.get(kind, "vanilla"),
        "enable_confidence_head": trusted,
        "confidence_head_with_markov": reads_tokens,
    }
    return dict(keys), tensors


def _bias(scene: Scene, name: str, size: int) -> dict[str, Tensor]:
    if scene.supply.has(name):
        return {name: scene.supply.take(name, (size,))}
    return {name: torch.zeros(size, dtype=scene.dtype())}


def _uncalibrated(scene: Scene) -> tuple[str, ...]:
    if not scene.option("temperatures"):
        return ()
    return ("the confidence head's temperatures are not part of the layout: engines take them from elsewhere",)

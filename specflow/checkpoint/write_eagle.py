"""EAGLE-1 and EAGLE-3 in the authors' layouts and in that of speculators.

Layer numbers: the official code and speculators count what enters a layer, so their k is the output of layer k - 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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
from specflow.draft.sources.eagle import default_taps

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.checkpoint.write_parts import Block

__all__ = ["write_official_eagle", "write_speculators_eagle"]

_THIRD = BLOCK_OPTIONS | {"variant", "taps", "draft_vocab_size", "own_head"}
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_TOKENS = 3
"""Draft tokens of a round where nobody says, as the converters of speculators have it."""


def write_official_eagle(scene: Scene) -> Written:
    """As the authors publish it.

    Raises:
        CheckpointError: The layout cannot say an option, a tensor does not fit, or a table of the target is lacking.
    """
    return _write_first(scene) if scene.option("variant") == 1 else _write_third(scene)


def write_speculators_eagle(scene: Scene) -> Written:
    """As `speculators` writes EAGLE-3.

    Raises:
        CheckpointError: As in `write_official_eagle`.
    """
    if scene.option("variant") != 3:
        raise scene.refuse("EAGLE-1 (variant 1)", "EAGLE-3", "--to official has a layout for it")
    refuse_unsaid(scene.stored, _THIRD | {*_FLAGS}, scene.layout)
    taps, ids = _taps(scene), reduced_ids(scene)
    block, tensors = _third(scene, taps, "layers.0")
    family = "qwen3" if block.head_norms else "llama"
    tensors |= take_vocabulary(scene, ids, always_head=True)
    notes = []
    if "embed_tokens.weight" not in tensors and scene.verifier is not None:
        tensors["embed_tokens.weight"] = scene.like_ours("embedding", scene.verifier.embedding())
    elif "embed_tokens.weight" not in tensors:
        notes.append("no embedding is stored, for no target is named: speculators itself needs one, engines do not")
    config = {
        "architectures": ["Eagle3Speculator"],
        **speculators_keys(scene, "eagle3", scene.stored.k or _TOKENS),
        "transformer_layer_config": transformer_keys(scene, family, [block]),
        "draft_vocab_size": scene.vocab_size() if ids is None else len(ids),
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in taps],
        **{name: bool(scene.option(name)) for name in _FLAGS},
        "embed_requires_grad": False,
    }
    return Written(config, tensors, notes=tuple(notes))


def _write_third(scene: Scene) -> Written:
    """EAGLE-3 as published: three taps that its code fixes, and none of the later norms."""
    refuse_unsaid(scene.stored, _THIRD, scene.layout)
    taps, ids = _taps(scene), reduced_ids(scene)
    layers = scene.need("its taps are fixed by the number of the target's layers, which is not known").num_layers
    fixed = (1, layers // 2 - 1, layers - 4)
    if taps != fixed:
        hint = "--to speculators names any taps"
        raise scene.refuse(f"taps {list(taps)}", f"{list(fixed)}, which official code fixes for {layers} layers,", hint)
    block, tensors = _third(scene, taps, "midlayer")
    _refuse_biases(scene, block)
    tensors |= take_vocabulary(scene, ids, always_head=True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **transformer_keys(scene, "llama", [block]),
        "draft_vocab_size": scene.vocab_size() if ids is None else len(ids),
    }
    return Written(config, tensors)


def _write_first(scene: Scene) -> Written:
    """EAGLE-1 as published; EAGLE-2 is the same. It stores the target's embedding."""
    refuse_unsaid(scene.stored, BLOCK_OPTIONS | {"variant", "bias"}, scene.layout)
    supply, shape, biased = scene.supply, scene.shape(), bool(scene.option("bias"))
    width = shape.hidden_size
    block = take_block(scene, "layers.0", shape)
    _refuse_biases(scene, block)
    tensors = block.under("layers.0") | {"fc.weight": supply.take("fc.weight", (width, 2 * width))}
    if biased:
        tensors["fc.bias"] = supply.take("fc.bias", (width,))
    if supply.has("embed_tokens.weight"):
        tensors["embed_tokens.weight"] = supply.take("embed_tokens.weight", (scene.vocab_size(), width))
    else:
        rows = scene.need("it borrows the target's embedding, whose rows are stored").embedding()
        tensors["embed_tokens.weight"] = scene.like_ours("embedding", rows)
    config: Mapping[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        **transformer_keys(scene, "llama", [block]),
        "bias": biased,
    }
    return Written(config, tensors)


def _third(scene: Scene, taps: tuple[int, ...], prefix: str) -> tuple[Block, dict[str, Tensor]]:
    """The block and all tensors but those of the vocabulary, the block under the layout's prefix."""
    supply, shape = scene.supply, scene.shape()
    width = shape.hidden_size
    block = take_block(scene, "midlayer", shape, 2 * width)
    tensors = block.under(prefix)
    for name in ("input_layernorm.weight", "hidden_norm.weight"):
        tensors[f"{prefix}.{name}"] = supply.take(f"midlayer.{name}", (width,))
    sizes: dict[str, tuple[int, ...]] = {"fc.weight": (width, len(taps) * width), "norm.weight": (width,)}
    if scene.option("norm_before_fc"):
        sizes["input_norm.weight"] = (len(taps) * width,)
    if scene.option("fc_norm"):
        sizes |= {f"fc_norm.{index}.weight": (width,) for index in range(len(taps))}
    if supply.has("embed_tokens.weight"):
        sizes["embed_tokens.weight"] = (scene.vocab_size(), width)
    return block, tensors | {name: supply.take(name, size) for name, size in sizes.items()}


def _taps(scene: Scene) -> tuple[int, ...]:
    if own := scene.option("taps"):
        return scene.checked_taps(own)
    return default_taps(scene.need("config.json leaves its taps to the target").num_layers)


def _refuse_biases(scene: Scene, block: Block) -> None:
    if block.attention_bias or block.mlp_bias:
        raise scene.refuse("a block with biases", "a block without")

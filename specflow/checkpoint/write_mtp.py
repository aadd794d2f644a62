"""MTP modules in the layout of speculators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specflow.checkpoint.write_drafter import refuse_unsaid
from specflow.checkpoint.write_parts import (
    BLOCK_OPTIONS,
    Scene,
    Written,
    speculators_keys,
    take_block,
    transformer_keys,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["refuse_official_mtp", "write_speculators_mtp"]

_SAID = BLOCK_OPTIONS | {"num_modules", "unrolled", "hidden", "own_head"}
_NAMES = {
    "fc.weight": "input_proj.weight",
    "pre_fc_norm_hidden.weight": "hidden_layernorm.weight",
    "pre_fc_norm_embedding.weight": "token_layernorm.weight",
    "norm.weight": "final_layernorm.weight",
    "layers.0.input_layernorm.weight": "input_layernorm.weight",
}
_TOKENS = 3
"""Draft tokens of a round where nobody says, as the converters of speculators have it."""


def write_speculators_mtp(scene: Scene) -> Written:
    """One module that serves every draft position.

    Raises:
        CheckpointError: The layout cannot say an option, or a tensor does not fit.
    """
    refuse_unsaid(scene.stored, _SAID, scene.layout)
    if scene.option("num_modules") != 1:
        raise scene.refuse(f"{scene.option('num_modules')} modules", "one module")
    verifier = scene.need("the layout holds the target's own configuration")
    supply, shape = scene.supply, scene.shape()
    width = shape.hidden_size
    block = take_block(scene, "mtp.layers.0", shape)
    tensors: dict[str, Tensor] = block.under("mtp_layers.0")
    for ours, theirs in _NAMES.items():
        size = (width, 2 * width) if ours == "fc.weight" else (width,)
        tensors[f"mtp_layers.0.{theirs}"] = supply.take(f"mtp.{ours}", size)
    for name, table in (("embed_tokens.weight", "embedding"), ("lm_head.weight", "head")):
        scene.refuse_unlike(name, table)
    keys = transformer_keys(scene, "qwen3", [block]) | {"num_hidden_layers": verifier.num_layers}
    tokens = scene.option("unrolled") or scene.stored.k or _TOKENS
    config = {
        "architectures": ["MTPDraftModel"],
        **speculators_keys(scene, "mtp", tokens),
        "transformer_layer_config": keys,
        "num_nextn_predict_layers": 1,
    }
    return Written(config, tensors, notes=_notes(scene))


def _notes(scene: Scene) -> tuple[str, ...]:
    state = "before" if scene.option("hidden") == "pre_norm" else "after"
    notes = [f"the layout does not say that the target's last state is read {state} its final norm, as it is here"]
    if scene.option("unrolled") is None:
        notes.append("the layout does not say that the module goes on along its own output: engines choose")
    return tuple(notes)


def refuse_official_mtp(scene: Scene) -> Written:
    """There is no such layout.

    Raises:
        CheckpointError: Always.
    """
    hint = "its tensors have those names already; --to speculators writes a checkpoint of its own"
    raise scene.refuse("MTP modules, which are published inside their target's checkpoint", "a drafter", hint)

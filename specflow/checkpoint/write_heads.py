"""Medusa heads in the layout of their authors (v1)."""

from __future__ import annotations

from specflow.checkpoint.write_drafter import refuse_unsaid
from specflow.checkpoint.write_parts import Scene, Written

__all__ = ["refuse_speculators_heads", "write_official_heads"]

_SAID = frozenset(("num_heads", "num_layers", "own_heads"))


def write_official_heads(scene: Scene) -> Written:
    """As the authors publish them: every head with its own output layer over the target's vocabulary.

    Raises:
        CheckpointError: The layout cannot say an option, a tensor does not fit, or the target's head is lacking.
    """
    refuse_unsaid(scene.stored, _SAID, scene.layout)
    supply, tensors, verifier = scene.supply, {}, scene.verifier
    width = supply.rows("0.0.linear.weight") or scene.need("the width of its heads is not known").shape.hidden_size
    layers = scene.option("num_layers")
    shared = None
    if not scene.option("own_heads"):
        shared = scene.like_ours("head", scene.need("it borrows the target's head, whose rows are stored").head())
    for head in range(scene.option("num_heads")):
        for layer in range(layers):
            name = f"{head}.{layer}.linear"
            tensors[f"{name}.weight"] = supply.take(f"{name}.weight", (width, width))
            tensors[f"{name}.bias"] = supply.take(f"{name}.bias", (width,))
        name = f"{head}.{layers}.weight"
        rows = supply.rows(name) if verifier is None else verifier.vocab_size
        tensors[name] = supply.take(name, (rows or 0, width)) if shared is None else shared
    config = {
        "medusa_num_heads": scene.option("num_heads"),
        "medusa_num_layers": layers,
        "base_model_name_or_path": None if verifier is None else verifier.reference,
    }
    return Written(config, tensors, file="medusa_lm_head.pt")


def refuse_speculators_heads(scene: Scene) -> Written:
    """There is no such layout.

    Raises:
        CheckpointError: Always.
    """
    raise scene.refuse("Medusa heads", "a drafter", "there is none for Medusa; --to official writes the authors' own")

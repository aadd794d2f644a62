"""Medusa's layouts (2401.10774): the heads alone (v1, and TGI's copies), beside the whole target (v1.0), and vLLM's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from specflow.checkpoint.layout import Layout, TargetFacts, Wanted
from specflow.checkpoint.vocabulary import token_map
from specflow.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.checkpoint.files import Stored
    from specflow.checkpoint.keys import Keys

__all__ = ["is_medusa", "medusa_layout"]

_WHOLE = "medusa_head."
_OFFICIAL = re.compile(r"(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")


def is_medusa(stored: Stored, config: Keys) -> bool:
    """Whether tensors or configuration are of one of its layouts."""
    names = stored.names
    official = bool(names) and all(_OFFICIAL.fullmatch(name) for name in names)
    return (
        official
        or "medusa_num_heads" in config
        or config.values.get("model_type") == "medusa"
        or any(name.startswith(_WHOLE) for name in names)
    )


def medusa_layout(stored: Stored, config: Keys) -> Layout:
    """Recognise which of them it is.

    Raises:
        CheckpointError: It holds no heads.
    """
    if any(name.removeprefix("medusa_heads.").startswith("blocks.") for name in stored.names):
        return _vllm(stored, config)
    return _official(stored, config)


def _official(stored: Stored, config: Keys) -> Layout:
    """Heads as `{k}.{j}.linear` and `{k}.{n}`; the number in config.json is often wrong, so they are counted."""
    whole = any(name.startswith(_WHOLE) for name in stored.names)
    prefix = _WHOLE if whole else ""
    heads = stored.count(rf"{re.escape(prefix)}(\d+)\.")
    layers = _layers(stored, prefix, config)
    if not heads:
        raise CheckpointError(str(stored.path), "no Medusa heads in it", "tensors like 0.0.linear.weight")
    rows, width = (*stored.shape(f"{prefix}0.{layers}.weight"), 0, 0)[:2]
    wanted = []
    for head in range(heads):
        for layer in range(layers):
            name = f"{head}.{layer}.linear"
            wanted.append(Wanted(f"{name}.weight", (f"{prefix}{name}.weight",), (width, width)))
            wanted.append(Wanted(f"{name}.bias", (f"{prefix}{name}.bias",), (width,)))
        wanted.append(Wanted(f"{head}.{layers}.weight", (f"{prefix}{head}.{layers}.weight",), (rows, width)))
    stated, notes = config.maybe_whole("medusa_num_heads"), []
    if stated is not None and stated != heads:
        notes.append(f"config.json speaks of {stated} heads; there are {heads}, and they are what counts")
    if whole:
        notes.append("the target stands beside the heads and was trained with them: use this directory as the target")
    target = config.text("base_model_name_or_path")
    return Layout(
        name="medusa-whole" if whole else "medusa",
        source="medusa",
        method="medusa",
        path=stored.path,
        options={"num_heads": heads, "num_layers": layers, "own_heads": True},
        target=TargetFacts(str(stored.path) if whole else target, rows or None, width or None),
        wanted=tuple(wanted),
        unneeded=tuple(n for n in stored.names if not n.startswith(_WHOLE)) if whole else (),
        notes=tuple(notes),
    )


def _layers(stored: Stored, prefix: str, config: Keys) -> int:
    """Residual blocks of a head: its output follows them."""
    found = [
        int(m.group(1))
        for name in stored.under(f"{prefix}0.")
        if (m := re.fullmatch(r"0\.(\d{1,2})\.weight", name[len(prefix) :]))
    ]
    return found[0] if found else min(config.whole("medusa_num_layers", 1, least=0), 16)


def _vllm(stored: Stored, config: Keys) -> Layout:
    """Heads as `blocks.{k}.layers.{j}` and `lm_heads.{k}`, perhaps without biases, perhaps over fewer tokens."""
    prefix = "medusa_heads." if any(name.startswith("medusa_heads.") for name in stored.names) else ""
    heads, layers = stored.count(rf"{prefix}blocks\.(\d+)\."), stored.count(rf"{prefix}blocks\.0\.layers\.(\d+)\.")
    width = config.whole("hidden_size", (*stored.shape(f"{prefix}blocks.0.layers.0.weight"), 0)[0] or None)
    full = config.whole("vocab_size")
    size = config.whole("truncated_vocab_size", full)
    if config.real("logit_scale", 1.0) != 1.0:
        raise CheckpointError(config.where, "logit_scale is not 1", "heads whose logits are not scaled")
    shared = config.flag("original_lm_head", False)
    biased = config.flag("medusa_fc_bias", any(name.endswith(".bias") for name in stored.names))
    wanted = []
    for head in range(heads):
        for layer in range(layers):
            wanted += _vllm_linear(f"{prefix}blocks.{head}.layers.{layer}", f"{head}.{layer}.linear", width, biased)
        if not shared:
            source = f"{prefix}lm_heads.{head}.weight"
            wanted.append(_vllm_output(stored, source, f"{head}.{layers}.weight", (size, width)))
    options: dict[str, Any] = {"num_heads": heads, "num_layers": layers, "own_heads": not shared}
    if size < full:
        options["draft_vocab_size"] = size
        wanted.append(token_map(stored, size))
    return Layout(
        name="medusa-vllm",
        source="medusa",
        method="medusa",
        path=stored.path,
        options=options,
        target=TargetFacts(None, full, width),
        wanted=tuple(wanted),
        unneeded=(f"{prefix}lm_heads.0.weight", "lm_head.weight") if shared else (),
        notes=("its heads share the target's own output layer",) if shared else (),
    )


def _vllm_linear(theirs: str, ours: str, width: int, biased: bool) -> list[Wanted]:
    weight = Wanted(f"{ours}.weight", (f"{theirs}.weight",), (width, width))
    if biased:
        return [weight, Wanted(f"{ours}.bias", (f"{theirs}.bias",), (width,))]
    return [weight, Wanted(f"{ours}.bias", (f"{theirs}.weight",), (width, width), _no_bias)]


def _vllm_output(stored: Stored, theirs: str, ours: str, shape: tuple[int, int]) -> Wanted:
    """An output layer; of one over all tokens vLLM takes the rows of the reduced vocabulary."""
    found = stored.shape(theirs)
    if len(found) == 2 and found[0] > shape[0] and "token_map" in stored.names:
        cut = partial(_mapped_rows, where=str(stored.path))
        return Wanted(ours, (theirs, "token_map"), (found[0], shape[1]), cut)
    return Wanted(ours, (theirs,), shape)


def _no_bias(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].new_zeros(tensors[0].shape[0])


def _mapped_rows(tensors: Sequence[Tensor], where: str) -> Tensor:
    rows, ids = tensors
    if ids.is_floating_point() or not len(ids) or not 0 <= int(ids.min()) <= int(ids.max()) < len(rows):
        raise CheckpointError(where, "token_map leads beyond the rows of the heads", f"ids from 0 to {len(rows) - 1}")
    return rows[ids.long()]

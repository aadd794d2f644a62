"""EAGLE's layouts: version 1 and 2 (2401.15077, 2406.16858), and version 3 (2503.01840) as its authors, SpecForge and
AngelSlim, DeepSpec and speculators write it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specflow.checkpoint.block import READINGS, block_sizes, block_tensors, refused, scaling
from specflow.checkpoint.layout import Layout, LayoutName, TargetFacts, Wanted
from specflow.checkpoint.speculators import SHARED_KEYS, verifier_of
from specflow.checkpoint.vocabulary import map_of, reduced_size
from specflow.errors import CheckpointError

if TYPE_CHECKING:
    from specflow.checkpoint.files import Stored
    from specflow.checkpoint.keys import Keys

__all__ = ["eagle1_layout", "eagle3_layout", "eagle3_speculators", "is_eagle1", "is_eagle3"]

_ARCHITECTURES = ("Qwen3Eagle3Model", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator")
_NOT_READ = ("verifier_norm.weight", "verifier_lm_head.weight", "t2d")
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_AUX = "eagle_aux_hidden_state_layer_ids"
_READINGS = READINGS | {"taps", "norm_output", "norm_before_residual"}
_NESTED = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
}
"""What `eagle_config` may say without another network being meant."""


def is_eagle3(stored: Stored, architectures: Sequence[str]) -> bool:
    """Whether names or architecture are those of version 3."""
    return bool(set(architectures) & set(_ARCHITECTURES)) or bool(stored.under("midlayer.")) or "d2t" in stored.names


def is_eagle1(stored: Stored) -> bool:
    """Whether tensors are those of version 1: fc over a pair, and a first layer that does not norm its input."""
    first = _first_layer(stored, ("layers.0", "model.layers.0"))
    return _is_pair(stored.shape("fc.weight")) and bool(first) and f"{first}.input_layernorm.weight" not in stored.names


def _is_pair(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and shape[1] == 2 * shape[0]


def _first_layer(stored: Stored, names: Sequence[str]) -> str:
    return next((name for name in names if stored.under(f"{name}.")), "")


def eagle1_layout(stored: Stored, config: Keys) -> Layout:
    """The layout of version 1, which is that of version 2.

    Raises:
        CheckpointError: It has more than one layer, or a key has a wrong value.
    """
    prefix = _first_layer(stored, ("layers.0", "model.layers.0"))
    _one_layer(stored, prefix)
    sizes, options = block_sizes(config, stored, prefix)
    options |= scaling(config)
    width, biased = sizes.hidden_size, "fc.bias" in stored.names
    wanted = [Wanted("fc.weight", ("fc.weight",), (width, 2 * width))]
    if biased:
        wanted.append(Wanted("fc.bias", ("fc.bias",), (width,)))
    wanted += block_tensors(("layers.0", prefix), sizes, stored, normed=False)
    full = config.maybe_whole("vocab_size")
    wanted += _embedding(stored, (full, width))
    if config.maybe_flag("bias") not in (None, biased):
        raise config.wrong("bias", f"{'true' if biased else 'false'}: that is what its tensors say")
    return Layout(
        name="eagle",
        source="eagle",
        method="eagle2",
        path=stored.path,
        options={"variant": 1, "bias": biased, **options},
        readings=_READINGS,
        target=TargetFacts(None, full, width),
        wanted=tuple(wanted),
        unneeded=_unneeded(stored),
    )


def eagle3_layout(stored: Stored, config: Keys, architectures: Sequence[str]) -> Layout:
    """The layout of its authors, SpecForge and AngelSlim, or that of DeepSpec, which names five taps.

    Raises:
        CheckpointError: A key has a wrong value, or it is a variant that our source does not compute.
    """
    deepspec = "Qwen3Eagle3Model" in architectures
    nested = config.part("eagle_config")
    nested.allow((*_NESTED, *_FLAGS, _AUX, "has_lm_head"))
    for name, value in _NESTED.items():
        if nested.values.get(name) not in (None, value):
            raise refused(config.where, f"eagle_config.{name} is {nested.values[name]!r}", f"{value!r} is what ours do")
    flags = {name: config.flag(name, False) or nested.flag(name, False) for name in _FLAGS}
    taps, notes = _deepspec_taps(config) if deepspec else _written_taps(config, nested)
    own = config.maybe_whole("target_hidden_size")
    return _third("eagle3-deepspec" if deepspec else "eagle3", stored, config, _Said(flags, taps, own, notes=notes))


def eagle3_speculators(stored: Stored, config: Keys) -> Layout:
    """The layout of speculators.

    Raises:
        CheckpointError: As in `eagle3_layout`.
    """
    config.allow((*SHARED_KEYS, *_FLAGS, _AUX, "draft_vocab_size", "target_hidden_size", "embed_requires_grad"))
    block = config.part("transformer_layer_config")
    if "sliding_attention" in block.texts("layer_types")[:1]:
        raise refused(config.where, "its layer has a sliding window")
    flags = {name: config.flag(name, False) for name in _FLAGS}
    ids = config.wholes(_AUX)
    size = config.maybe_whole("draft_vocab_size")
    said = _Said(flags, ids, config.maybe_whole("target_hidden_size"), size=size, name=verifier_of(config))
    return _third("eagle3-speculators", stored, block, said)


class _Said:
    """What the layouts of version 3 say, in one form."""

    def __init__(
        self,
        flags: dict[str, bool],
        taps: tuple[int, ...] | None,
        target_width: int | None,
        size: int | None = None,
        name: str | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.flags, self.taps, self.target_width = flags, taps, target_width
        self.size, self.name, self.notes = size, name, notes


def _third(name: LayoutName, stored: Stored, config: Keys, said: _Said) -> Layout:
    prefix = _first_layer(stored, ("midlayer", "layers.0")) or "midlayer"
    _one_layer(stored, prefix)
    sizes, options = block_sizes(config, stored, prefix)
    options |= {} if name == "eagle3-deepspec" else scaling(config)  # a copy of the target's, there
    width = sizes.hidden_size
    if said.target_width not in (None, width):
        raise refused(config.where, f"it is {width} wide, and its target {said.target_width}", "one width for both")
    full = config.maybe_whole("vocab_size") or (stored.shape("t2d")[:1] or (None,))[0]
    size = reduced_size(stored, said.size or config.maybe_whole("draft_vocab_size"), full)
    own_head = size is not None or "lm_head.weight" in stored.names
    taps = None if said.taps is None else tuple(k if name == "eagle3-deepspec" else k - 1 for k in said.taps)
    if taps is not None:
        options["taps"] = taps
    if size is not None:
        options["draft_vocab_size"] = size
    embedding = _embedding(stored, (full, width))
    wanted = [
        *_fusion(stored, said, width),
        *block_tensors(("midlayer", prefix), sizes, stored, input_width=2 * width),
        Wanted("midlayer.hidden_norm.weight", (f"{prefix}.hidden_norm.weight",), (width,)),
        Wanted("norm.weight", ("norm.weight",), (width,)),
        *([Wanted("lm_head.weight", ("lm_head.weight",), (size or full, width))] if own_head else []),
        *map_of(stored, size),
        *embedding,
    ]
    return Layout(
        name=name,
        source="eagle",
        method="eagle3",
        path=stored.path,
        options={"variant": 3, "own_head": own_head, **said.flags, **options},
        readings=_READINGS,
        target=TargetFacts(said.name, full, width, config.maybe_whole("num_target_layers")),
        written_taps=said.taps,
        wanted=tuple(wanted),
        unneeded=_unneeded(stored),
        notes=said.notes,
    )


def _fusion(stored: Stored, said: _Said, width: int) -> list[Wanted]:
    """The layer that fuses the taps, and its norms. Its columns say how many taps there are."""
    columns = (*stored.shape("fc.weight")[1:2], 0)[0]
    count = columns // width if said.taps is None else len(said.taps)
    if columns and columns != count * width:
        found = f"{stored.path}: fc.weight has {columns} columns"
        raise CheckpointError(found, f"{columns / width:g} taps of width {width}", f"{count}, as config.json says")
    if said.taps is None and columns and count != 3:
        raise CheckpointError(
            str(stored.path), f"fc.weight reads {count} taps, and config.json names none", "their layers"
        )
    wanted = [Wanted("fc.weight", ("fc.weight",), (width, count * width))]
    if said.flags["norm_before_fc"]:
        wanted.append(Wanted("input_norm.weight", ("input_norm.weight",), (count * width,)))
    if said.flags["fc_norm"]:
        wanted += [Wanted(f"fc_norm.{i}.weight", (f"fc_norm.{i}.weight",), (width,)) for i in range(count)]
    return wanted


def _deepspec_taps(config: Keys) -> tuple[tuple[int, ...], tuple[str, ...]]:
    taps = config.wholes("target_layer_ids")
    if taps is None:
        raise config.lacking("target_layer_ids", "the target layers whose output it reads")
    return taps, ()


def _written_taps(config: Keys, nested: Keys) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    """Taps as vLLM reads them, the number of the layer that a state enters. The authors' own code has fixed ones."""
    top, inner = config.wholes(_AUX), nested.wholes(_AUX)
    if top is not None or inner is None:
        return top, ()
    note = (
        f"eagle_config.{_AUX} is read as vLLM does: {list(inner)} are layers that are entered. SGLang takes them for "
        f"layers that are left; if `specflow selftest` finds that better, set draft.taps: {list(inner)}"
    )
    return inner, (note,)


def _embedding(stored: Stored, shape: tuple[int | None, int]) -> list[Wanted]:
    names = [name for name in ("embed_tokens.weight", "model.embed_tokens.weight") if name in stored.names]
    return [Wanted("embed_tokens.weight", (names[0],), shape)] if names else []


def _one_layer(stored: Stored, prefix: str) -> None:
    """Version 1 and 3 have one layer; config.json may speak of the target's forty."""
    if stored.under("layers.1.") or stored.under("model.layers.1."):
        raise refused(stored.path, "it has more than one decoder layer")
    if not prefix:
        raise CheckpointError(
            str(stored.path), "no decoder layer in it", "tensors like layers.0.self_attn.q_proj.weight"
        )


def _unneeded(stored: Stored) -> tuple[str, ...]:
    return tuple(name for name in stored.names if name in _NOT_READ or name.endswith("rotary_emb.inv_freq"))

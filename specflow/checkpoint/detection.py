"""Recognises a checkpoint: the question that tells most comes first, since names are reused by later methods."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from specflow.checkpoint.block import refused
from specflow.checkpoint.dflash import DEEPSPEC, SPECFORGE, backbone_deepspec, backbone_speculators, dflash_layout
from specflow.checkpoint.eagle import eagle1_layout, eagle3_layout, eagle3_speculators, is_eagle1, is_eagle3
from specflow.checkpoint.files import weight_pickles
from specflow.checkpoint.keys import Keys
from specflow.checkpoint.layout import Layout, TargetFacts
from specflow.checkpoint.medusa import is_medusa, medusa_layout
from specflow.checkpoint.mtp import is_mtp, mtp_layout, mtp_speculators
from specflow.errors import CheckpointError
from specflow.target.load import read_json

if TYPE_CHECKING:
    from pathlib import Path

    from specflow.checkpoint.files import Stored

__all__ = ["is_published", "layout_of"]

_PUBLISHED = (
    "_name_or_path",
    "architectures",
    "dflash_config",
    "hidden_size",
    "medusa_num_heads",
    "model_type",
    "speculators_model_type",
    "text_config",
    "transformers_version",
)
"""Keys that no configuration of ours has, and every published one has some of."""

_REFUSED_KINDS = {
    "peagle": "a P-EAGLE drafter: it fills all positions of a chain at once",
    "dflash2": "a DFlash-2 drafter: convolutions around its layers and a selector of candidates",
    "xpress": "an Xpress drafter",
    "eagle": "an EAGLE-1 drafter in a layout that speculators has given up",
    "mlp": "an MLP speculator",
}
_WIDE = ("hidden_norm.weight", "fc.weight", "mtp.fc.weight", "mtp.0.fc.weight", "0.0.linear.weight")
"""Tensors of ours whose rows are as many as the target's states are wide."""
_UNCOMPARED = "which tensors this layout has depends on the target: they are compared when a recipe runs it"
_TRAIL = "speculators, DSpark, DFlash, EAGLE-3, EAGLE, Medusa or MTP"


def is_published(directory: Path) -> bool:
    """Whether others wrote a checkpoint: it has a key or a file that ours never have.

    Raises:
        CheckpointError: Its configuration cannot be read.
    """
    file = directory / "config.json"
    if file.is_file() and any(key in read_json(file) for key in _PUBLISHED):
        return True
    return bool(weight_pickles(directory)) or any(directory.glob("medusa_lm_head.*"))


def layout_of(stored: Stored) -> Layout:
    """What a checkpoint is, and how its tensors agree with that.

    Raises:
        CheckpointError: It is none that is known, or one that no source of ours computes.
    """
    layout = _recognised(stored)
    if layout.is_native:
        return layout
    used = {part for wanted in layout.wanted for part in wanted.theirs} | set(layout.unneeded)
    missing, misshapen = [], []
    for wanted in layout.wanted:
        first = wanted.theirs[0]
        if first not in stored.names:
            missing.append(first)
        elif not wanted.fits(shape := stored.shape(first)):
            misshapen.append(f"{first} has shape {shape}, not {_shape(wanted.shape)}")
    kinds = {str(stored.tensors[part].dtype) for w in layout.wanted for part in w.theirs[:1] if part in stored.names}
    return replace(
        layout,
        missing=tuple(dict.fromkeys(missing)),
        misshapen=tuple(dict.fromkeys(misshapen)),
        left_over=tuple(sorted(stored.names - used)),
        dtypes=tuple(sorted(kind.removeprefix("torch.") for kind in kinds)),
    )


def _recognised(stored: Stored) -> Layout:
    config = stored.config or Keys({}, str(stored.path / "config.json"))
    if not is_published(stored.path):
        return _native(stored, config)
    architectures = config.texts("architectures")
    if (kind := config.text("speculators_model_type")) is not None:
        return _speculators(stored, config, kind)
    _refuse_v4(stored, config)
    if set(architectures) & set(DEEPSPEC):
        return backbone_deepspec(stored, config, architectures)
    if set(architectures) & set(SPECFORGE):
        return dflash_layout(stored, config, architectures)
    if is_eagle3(stored, architectures):
        return eagle3_layout(stored, config, architectures)
    if is_eagle1(stored):
        return eagle1_layout(stored, config)
    if is_medusa(stored, config):
        return medusa_layout(stored, config)
    if is_mtp(stored, config):
        return mtp_layout(stored, config)
    named = ", ".join(architectures) or "no architecture"
    some = ", ".join(sorted(stored.names)[:3]) or "no tensors"
    raise CheckpointError(str(stored.path), f"no drafter that is known: {named}; {some}, ...", _TRAIL)


def _native(stored: Stored, config: Keys) -> Layout:
    """Ours: the names of its tensors tell the source, its configuration holds the options."""
    names, source, method = stored.names, "", ""
    if stored.under("adapter."):
        source = method = "skipped_layers"
    elif stored.under("mtp."):
        source = method = "mtp"
    elif "hidden_norm.weight" in names:
        corrected = stored.under("markov_head.") and config.values.get("layout") != "fill_in"
        source = method = "dspark" if corrected else "dflash"
    elif "fc.weight" in names:
        source, method = "eagle", "eagle3" if stored.under("midlayer.") else "eagle2"
    elif stored.under("0."):
        source = method = "medusa"
    width = next((stored.shape(name)[0] for name in _WIDE if stored.shape(name)), None)
    facts = TargetFacts(hidden_size=width)
    return Layout("native", source, method, stored.path, dict(config.values), target=facts, notes=(_UNCOMPARED,))


def _speculators(stored: Stored, config: Keys, kind: str) -> Layout:
    if kind == "eagle3":
        return eagle3_speculators(stored, config)
    if kind in ("dflash", "dspark"):
        return backbone_speculators(stored, config, kind)
    if kind == "mtp":
        return mtp_speculators(stored, config)
    if kind in _REFUSED_KINDS:
        raise refused(config.where, _REFUSED_KINDS[kind])
    raise config.wrong("speculators_model_type", "eagle3, dflash, dspark or mtp")


def _refuse_v4(stored: Stored, config: Keys) -> None:
    """DeepSeek-V4 keeps a DSpark drafter under the names of MTP."""
    under = stored.under("mtp.")
    if "dspark_block_size" in config or any(".markov_head." in n or ".main_proj." in n for n in under):
        reason = "the DSpark drafter of DeepSeek-V4: experts, hyper-connections and 8-bit weights"
        raise refused(config.where, reason)


def _shape(shape: tuple[int | None, ...]) -> str:
    return f"({', '.join('any' if size is None else str(size) for size in shape)}{',' if len(shape) == 1 else ''})"

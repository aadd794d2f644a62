"""Says what a checkpoint is, for which target, and how a recipe uses it: what `specflow inspect` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from specflow.checkpoint.detection import layout_of
from specflow.checkpoint.files import open_stored
from specflow.checkpoint.fitting import misfits
from specflow.checkpoint.layout import TargetFacts
from specflow.checkpoint.native import checked_options

if TYPE_CHECKING:
    from pathlib import Path

    from specflow.checkpoint.files import Stored
    from specflow.checkpoint.layout import Layout

__all__ = ["Report", "inspect_checkpoint"]

_USUAL_K = 5


@dataclass(frozen=True, slots=True)
class Report:
    """A checkpoint, described.

    Args:
        layout: What it is.
        weights: How the user named it.
        tensors: How many there are.
        dtypes: Types of them.
        taps: Target layers it reads, as outputs of 0-based layers; None: it reads none, or the target is not known.
        target: The target it was compared with; None: with none.
        faults: Why it does not fit that target.
    """

    layout: Layout
    weights: str
    tensors: int
    dtypes: tuple[str, ...]
    taps: tuple[int, ...] | None
    target: str | None = None
    faults: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """All tensors are there, none is too many, and the target, if one was named, fits."""
        layout = self.layout
        return not (layout.missing or layout.left_over or layout.misshapen or self.faults)

    @property
    def k(self) -> int:
        """Draft tokens of a round that it is made for."""
        options = self.layout.options
        if self.layout.source in ("dflash", "dspark"):
            usual = "shifted" if self.layout.source == "dspark" else "fill_in"
            first = 0 if options.get("layout", usual) == "shifted" else 1
            return max(1, int(options.get("block_size") or _USUAL_K + first) - first)
        if self.layout.source == "medusa":
            return int(options.get("num_heads", 4))
        if self.layout.source == "mtp":
            return int(options.get("unrolled") or max(options.get("num_modules", 1), 3))
        return _USUAL_K

    @property
    def reads(self) -> str:
        """Which states of the target it drafts from, in words; "" where nothing tells."""
        options, source = self.layout.options, self.layout.source
        if source == "medusa" or options.get("variant") == 1:
            return "the last state, after the final norm"
        if source == "mtp":
            normed = options.get("hidden", "post_norm") == "post_norm"
            return f"the last state, {'after' if normed else 'before'} the final norm"
        return "states of several layers" if source in ("eagle", "dflash", "dspark") else ""

    def recipe(self) -> str:
        """A recipe that uses it, as YAML."""
        import yaml

        named = self.target or self.layout.target.name
        draft: dict[str, Any] = {"method": self.layout.method, "k": self.k, "weights": self.weights}
        draft |= dict.fromkeys(self.layout.asks, 0)
        recipe = {"name": f"{self.layout.method} of a checkpoint", **({"target": {"model": named}} if named else {})}
        lines = yaml.safe_dump({**recipe, "draft": draft}, sort_keys=False, allow_unicode=True).splitlines()
        for number, line in enumerate(lines):
            if (asked := self.layout.asks.get(line.strip().partition(":")[0])) is not None:
                lines[number] = f"{line}  # fill in {asked}"
        return "\n".join(lines) + "\n"

    def data(self) -> dict[str, Any]:
        """As JSON values."""
        layout, facts = self.layout, self.layout.target
        return {
            "path": str(layout.path),
            "layout": layout.name,
            "source": layout.source,
            "method": layout.method,
            "made_for": asdict(facts),
            "target": self.target,
            "faults": list(self.faults),
            "reads": self.reads,
            "taps_written": None if layout.written_taps is None else list(layout.written_taps),
            "taps": None if self.taps is None else list(self.taps),
            "k": self.k,
            "options": {name: list(v) if isinstance(v, tuple) else v for name, v in layout.options.items()},
            "asks": dict(layout.asks),
            "tensors": self.tensors,
            "dtypes": list(self.dtypes),
            "missing": list(layout.missing),
            "left_over": list(layout.left_over),
            "misshapen": list(layout.misshapen),
            "notes": list(layout.notes),
            "whole": self.is_whole,
            "recipe": self.recipe() if layout.method else None,
        }

    def rows(self) -> Iterator[tuple[str, str]]:
        """What it is, line by line."""
        layout, options = self.layout, self.layout.options
        yield "layout", layout.name
        yield "source", layout.source or "not told by its tensors"
        yield from _facts(layout.target)
        if self.reads:
            yield "reads", self.reads
        if layout.written_taps is not None:
            yield "taps as written", _listed(layout.written_taps)
        if self.taps is not None:
            yield "taps (output of 0-based layers)", _listed(self.taps)
        for key, name in _SHOWN.items():
            if options.get(key) is not None:
                yield name, str(options[key])
        yield "draft tokens", str(self.k)
        yield "tensors", f"{self.tensors} ({', '.join(self.dtypes)})"
        faults = {"missing": layout.missing, "left over": layout.left_over, "other shape": layout.misshapen}
        yield from ((name, each) for name, found in faults.items() for each in found)
        for fault in self.faults:
            yield "does not fit", fault
        for note in layout.notes:
            yield "note", note


_SHOWN: Mapping[str, str] = {
    "block_size": "slots of a block",
    "layout": "slots predict",
    "mask_token": "mask token",
    "window": "sliding window",
    "draft_vocab_size": "draft vocabulary",
    "num_layers": "layers",
    "num_heads": "heads",
    "num_modules": "modules",
    "unrolled": "unrolled",
    "corrector": "corrector",
    "confidence_head": "confidence head",
    "rope_theta": "rotary base",
    "max_positions": "positions",
}


def inspect_checkpoint(path: str | Path, target: str | None = None) -> Report:
    """Say what a checkpoint is; nothing is computed.

    Args:
        path: A directory, or a hub id.
        target: A model to compare it with.

    Raises:
        CheckpointError: It cannot be read, is no drafter that is known, or one that our sources cannot compute.
        ModelError: The target, or what the hub should deliver, cannot be had.
    """
    stored = open_stored(path)
    layout = layout_of(stored)
    if layout.is_native and layout.source:
        checked_options(layout.source, layout.options, layout.path)
    facts = None if target is None else _target_facts(target)
    layers = layout.target.num_layers if facts is None else facts.num_layers
    return Report(
        layout=layout,
        weights=str(path),
        tensors=len(stored.names),
        dtypes=layout.dtypes or _dtypes(stored),
        taps=_taps(layout, layers),
        target=target,
        faults=() if facts is None else tuple(misfits(layout, facts)),
    )


def _dtypes(stored: Stored) -> tuple[str, ...]:
    return tuple(sorted({str(stored.tensors[name].dtype).removeprefix("torch.") for name in stored.names}))


def _taps(layout: Layout, num_layers: int | None) -> tuple[int, ...] | None:
    """Layers it reads; those of the method where it names none and the target's depth is known."""
    from specflow.draft.backbone_options import spread_taps
    from specflow.draft.sources.eagle import default_taps

    named = tuple(layout.options.get("taps") or ())
    if named or num_layers is None or layout.source not in ("eagle", "dflash", "dspark"):
        return named or None
    if layout.source == "eagle":
        return default_taps(num_layers) if layout.options.get("variant", 3) == 3 else None
    return spread_taps(layout.options.get("num_layers", _USUAL_K), num_layers)


def _target_facts(name: str) -> TargetFacts:
    from specflow.target.load import read_config, resolve_model

    config = read_config(resolve_model(name)).get_text_config()
    return TargetFacts(name, config.vocab_size, config.hidden_size, config.num_hidden_layers)


def _facts(facts: TargetFacts) -> Iterator[tuple[str, str]]:
    yield "made for", facts.name or "a target that it does not name"
    for key, name in (("vocab_size", "vocabulary"), ("hidden_size", "width"), ("num_layers", "target layers")):
        if (value := getattr(facts, key)) is not None:
            yield name, str(value)


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))

"""What a published checkpoint of a drafter is: its layout, our options for it, and where our tensors come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from specflow.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

__all__ = ["LAYOUTS", "Layout", "LayoutName", "ReadCheckpoint", "TargetFacts", "Wanted", "detect", "read"]

LayoutName = Literal[
    "native",
    "medusa",
    "medusa-whole",
    "medusa-vllm",
    "eagle",
    "eagle3",
    "eagle3-deepspec",
    "eagle3-speculators",
    "dflash",
    "dflash-deepspec",
    "dflash-speculators",
    "dspark-deepspec",
    "dspark-specforge",
    "dspark-speculators",
    "mtp-deepseek",
    "mtp-qwen",
    "mtp-mimo",
    "mtp-speculators",
]
"""Who wrote it and what it is. Without a second part: as the method's authors publish it."""

LAYOUTS: tuple[str, ...] = get_args(LayoutName)

_SHOWN = 12
"""Most names in one error."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One of our tensors and what it is made from.

    Args:
        name: Ours.
        theirs: The published tensors it is made from; those after the first may be absent and are then left out.
        shape: Of the first of them, as far as the configuration knows it.
        make: Makes ours from theirs; None: it is the first as it stands.
    """

    name: str
    theirs: tuple[str, ...]
    shape: tuple[int | None, ...]
    make: Callable[[Sequence[Tensor]], Tensor] | None = None

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether a published tensor of this shape will do."""
        pairs = zip(self.shape, shape, strict=False)
        return len(self.shape) == len(shape) and all(wanted in (None, found) for wanted, found in pairs)


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What a checkpoint says of the model it drafts for; None: nothing."""

    name: str | None = None
    vocab_size: int | None = None  # V
    hidden_size: int | None = None  # H
    num_layers: int | None = None  # L


@dataclass(frozen=True, slots=True)
class Layout:
    """A checkpoint, recognised.

    Args:
        name: Its layout.
        source: Our source that computes it.
        method: The method a recipe names for it.
        path: Its directory.
        options: Options of the source, as its configuration says.
        readings: Those of them that say how the weights are read, not what they are: a recipe may say otherwise.
        asks: Options that it leaves open and that have no safe default: a recipe must set them.
        target: What it says of its target.
        written_taps: Target layers in its own numbering; None: it names none.
        wanted: Our tensors.
        unneeded: Published tensors that are known and not read.
        missing: Published tensors that should be there and are not.
        left_over: Published tensors that nothing is made from.
        misshapen: Tensors of another shape: what was found and what was expected.
        dtypes: Types of its tensors.
        notes: What a user should know.
    """

    name: LayoutName
    source: str
    method: str
    path: Path
    options: Mapping[str, Any]
    readings: frozenset[str] = frozenset()
    asks: Mapping[str, str] = field(default_factory=dict)
    target: TargetFacts = TargetFacts()
    written_taps: tuple[int, ...] | None = None
    wanted: tuple[Wanted, ...] = ()
    unneeded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    left_over: tuple[str, ...] = ()
    misshapen: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_native(self) -> bool:
        """It is ours: options and tensors are read as they stand."""
        return self.name == "native"

    def check(self) -> None:
        """Refuse a checkpoint that is not whole.

        Raises:
            CheckpointError: Naming what is missing, left over or of another shape.
        """
        where = f"{self.path} ({self.name})"
        if self.missing:
            found = f"{_counted(self.missing, 'tensor is', 'tensors are')} missing: {_named(self.missing)}"
            near = f"there are {_named(self.left_over)}" if self.left_over else ""
            raise CheckpointError(where, found, "every tensor of the layout", near)
        if self.misshapen:
            raise CheckpointError(where, _named(self.misshapen), "the shapes that config.json speaks of")
        if self.left_over:
            found = f"{_counted(self.left_over, 'tensor is', 'tensors are')} not part of the layout"
            raise CheckpointError(where, f"{found}: {_named(self.left_over)}", "no others")


@dataclass(frozen=True, slots=True)
class ReadCheckpoint:
    """A checkpoint in our own words.

    Args:
        source: Our source that computes it.
        options: Of the source.
        tensors: Under our own names; each is read when it is asked for.
        layout: What it was.
    """

    source: str
    options: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    layout: Layout


def detect(path: str | Path) -> Layout:
    """Say what a checkpoint is.

    Args:
        path: A local directory, or the id of a model on the hub.

    Raises:
        CheckpointError: It cannot be read, is no drafter that is known, or one that our sources cannot compute.
        ModelError: The hub could not deliver it.
    """
    from specflow.checkpoint.detection import layout_of
    from specflow.checkpoint.files import open_stored

    return layout_of(open_stored(path))


def read(path: str | Path) -> ReadCheckpoint:
    """A checkpoint of any layout in our own words.

    Args:
        path: A local directory, or the id of a model on the hub.

    Raises:
        CheckpointError: As in `detect`, or its tensors are not those of its layout.
        ModelError: The hub could not deliver it.
    """
    from specflow.checkpoint.detection import layout_of
    from specflow.checkpoint.files import open_stored, our_tensors

    stored = open_stored(path)
    layout = layout_of(stored)
    layout.check()
    return ReadCheckpoint(layout.source, layout.options, our_tensors(stored, layout), layout)


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _counted(names: Sequence[str], one: str, many: str) -> str:
    return f"{len(names)} {one if len(names) == 1 else many}"

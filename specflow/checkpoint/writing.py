"""Writes drafters in the layouts that other engines and converters read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from specflow.checkpoint.layout import read
from specflow.checkpoint.native import checked_options
from specflow.checkpoint.write_block import write_official_block, write_speculators_block
from specflow.checkpoint.write_drafter import StoredDrafter, Supply
from specflow.checkpoint.write_eagle import write_official_eagle, write_speculators_eagle
from specflow.checkpoint.write_heads import refuse_speculators_heads, write_official_heads
from specflow.checkpoint.write_mtp import refuse_official_mtp, write_speculators_mtp
from specflow.checkpoint.write_parts import Scene, Written
from specflow.errors import CheckpointError, DataError
from specflow.files import claim_directory, replacing, write_json_atomic

if TYPE_CHECKING:
    from specflow.checkpoint.write_target import Verifier

__all__ = ["OutgoingLayout", "convert", "lay_out", "open_drafter", "save_written"]

OutgoingLayout = Literal["speculators", "official"]
"""speculators: that of the package of this name. official: that of the method's authors."""

_WRITERS: Mapping[tuple[str, OutgoingLayout], Callable[[Scene], Written]] = {
    ("medusa", "official"): write_official_heads,
    ("medusa", "speculators"): refuse_speculators_heads,
    ("mtp", "official"): refuse_official_mtp,
    ("mtp", "speculators"): write_speculators_mtp,
    ("eagle", "official"): write_official_eagle,
    ("eagle", "speculators"): write_speculators_eagle,
    ("dflash", "official"): write_official_block,
    ("dflash", "speculators"): write_speculators_block,
    ("dspark", "official"): write_official_block,
    ("dspark", "speculators"): write_speculators_block,
}


def open_drafter(path: Path | str) -> StoredDrafter:
    """A drafter of any layout that is read, in our own words.

    Raises:
        CheckpointError: It cannot be read, or is no drafter that is known.
    """
    found = read(path)
    if found.source not in {source for source, _ in _WRITERS}:
        some = ", ".join(sorted(found.tensors)[:3]) or "no tensors"
        raise CheckpointError(
            str(path), f"{some}, ...: no drafter that is known", "Medusa, MTP, EAGLE, DFlash or DSpark"
        )
    options = checked_options(found.source, found.options, path)
    return StoredDrafter(found.source, options, found.tensors, str(path))


def lay_out(stored: StoredDrafter, layout: OutgoingLayout, verifier: Verifier | None = None) -> Written:
    """A drafter as a layout has it.

    Args:
        stored: The drafter.
        layout: Which one.
        verifier: Its target; None: only what follows from the drafter itself can be written.

    Raises:
        CheckpointError: The layout cannot say what the drafter is, or something of the target is lacking.
    """
    write = _WRITERS.get((stored.source, layout))
    if write is None:
        known = ", ".join(dict.fromkeys(source for source, _ in _WRITERS))
        raise CheckpointError(stored.where, f"source {stored.source}", f"one that others have layouts for: {known}")
    stored = stored.with_whole_norms()
    supply = Supply(stored.tensors, stored.where)
    written = write(Scene(stored, supply, verifier, layout))
    supply.close(layout)
    return written


def convert(stored: StoredDrafter, layout: OutgoingLayout, output: Path, verifier: Verifier | None = None) -> Written:
    """Write a drafter into a directory of its own.

    Raises:
        CheckpointError: As in `lay_out`.
        DataError: The directory holds something, or cannot be written.
    """
    written = lay_out(stored, layout, verifier)
    claim_directory(output)
    save_written(output, written)
    return written


def save_written(output: Path, written: Written) -> None:
    """Write the tensors, then config.json: a directory without one is not whole.

    Raises:
        DataError: The disk has no room, or does not take the files.
    """
    try:
        with replacing(output / written.file) as stream:
            if written.file.endswith(".safetensors"):
                from safetensors.torch import save

                stream.write(
                    save({name: part.contiguous() for name, part in written.tensors.items()}, {"format": "pt"})
                )
            else:
                import torch

                torch.save(dict(written.tensors), stream)
    except OSError as error:
        found = f"cannot write the drafter: {error.strerror or error}"
        raise DataError(str(output), found, "a writable disk with room") from error
    write_json_atomic(output / "config.json", dict(written.config))

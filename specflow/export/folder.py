"""The folder of an export: whole, or not there.

It is built under a hidden name beside the output and renamed at the end. A failed proof, an error or an interruption
leaves nothing; what a killed process left is removed when the same output is next asked for, a day later or more.
"""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path

from specflow.errors import DataError
from specflow.files import claim_directory

__all__ = ["building", "release"]

_STALE_S = 24 * 3600
"""An export is done long before."""
_HEX = "[0-9a-f]" * 32


@contextmanager
def building(output: Path) -> Iterator[Path]:
    """A folder of this export alone beside the output, gone at the end; what stood at the output stands again.

    Raises:
        DataError: The output is taken, or cannot be written.
    """
    fresh = not output.exists()
    claim_directory(output)
    place = output.resolve()
    work = place.with_name(f".{place.name}.{uuid.uuid4().hex}")
    try:
        _sweep(place)
        work.mkdir()
        yield work
    except OSError as error:
        raise DataError(str(output), f"cannot write: {error.strerror or error}", "a disk with room") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
        if fresh:
            with suppress(OSError):
                output.rmdir()  # where it is still empty


def _sweep(place: Path) -> None:
    """Remove what killed exports to the same output left behind."""
    for left in place.parent.glob(f".{escape(place.name)}.{_HEX}"):
        with suppress(FileNotFoundError):  # its owner is done with it meanwhile
            if time.time() - left.stat().st_mtime > _STALE_S:
                shutil.rmtree(left, ignore_errors=True)


def release(folder: Path, output: Path) -> None:
    """Give the finished folder its name, unless another export was faster.

    Raises:
        DataError: One was.
    """
    try:
        with suppress(FileNotFoundError):
            output.rmdir()
        folder.rename(output)
    except OSError as error:
        found = "another export finished here first; its files stand"
        raise DataError(str(output), found, "a folder of its own for every export") from error

"""Files that survive an interruption: whole or not at all, row by row, and never over what is there."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from specflow.errors import DataError

__all__ = [
    "append_jsonl",
    "claim_directory",
    "file_sha256",
    "lock_for_adding",
    "replace_text",
    "replacing",
    "write_json_atomic",
    "write_text_atomic",
]


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def claim_directory(path: Path, hint: str = "choose another") -> None:
    """Make a directory for output, or take an empty one.

    Raises:
        DataError: It holds files, which are never overwritten, or cannot be made.
    """
    try:
        taken = path.exists() and (not path.is_dir() or any(path.iterdir()))
        if not taken:
            path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(str(path), f"cannot create: {error.strerror or error}", "a writable directory") from error
    if taken:
        raise DataError(str(path), "holds files already; output is never overwritten", "a new or empty directory", hint)


def lock_for_adding(file: Path, where: Path) -> int:
    """A descriptor that keeps other processes from adding to something, where the system can do that.

    Args:
        file: What is locked; it is made where it is not there.
        where: What is added to, for errors.

    Raises:
        DataError: Another process is adding to it.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    with suppress(ImportError):
        import fcntl

        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise DataError(str(where), "another process is adding to it", "one at a time", "wait for it") from error
    return descriptor


def write_json_atomic(path: Path, value: Any) -> None:
    """Write a value as JSON; see `write_text_atomic`."""
    text = json.dumps(value, ensure_ascii=False, indent=2) + "\n"
    write_text_atomic(path, text.encode("utf-8", "backslashreplace").decode("utf-8"))


def write_text_atomic(path: Path, text: str) -> None:
    """As `replace_text`, with the error of a user's output file."""
    try:
        replace_text(path, text)
    except OSError as error:
        raise _cannot_write(path, error) from error


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old content or the new, never half of it.

    Raises:
        OSError: It cannot be written; the old content stands.
    """
    with replacing(path) as stream:
        stream.write(text.encode("utf-8"))


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of another when the body ends: a reader sees the old or the new one.

    Raises:
        OSError: It cannot be written; the old one stands.
    """
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with draft.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(path)
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def append_jsonl(path: Path, row: Mapping[str, Any]) -> None:
    """Append one row and wait until it is on disk. A row that does not fit leaves the earlier rows as they were."""
    line = (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")  # of odd file names
    before = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab", buffering=0) as stream:
            written = 0
            while written < len(line):
                written += stream.write(line[written:])
            os.fsync(stream.fileno())
    except OSError as error:
        with suppress(OSError):
            os.truncate(path, before)
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: OSError) -> DataError:
    return DataError(
        where=str(path),
        found=f"cannot write: {error.strerror or error}",
        expected="a writable file on a disk with room",
        hint="what was written before is intact; make room or choose another directory, and resume",
    )

"""What is kept in the cache directory: folders that are whole or not there, and hashes of files that are taken once.

A folder under its final name is complete: it is built under a temporary name, described by `manifest.json` (size, time
and SHA-256 of every file) and renamed, so a killed process leaves nothing half done and two processes cannot mix their
files. A file whose time is not the manifest's is hashed before it is used.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from specflow.errors import ModelError
from specflow.files import file_sha256, replace_text

__all__ = [
    "SealedFolders",
    "cache_dir",
    "content_hash",
    "disk_errors",
    "full_disk",
    "read_manifest",
    "remembered_sha256",
]

_MANIFEST = "manifest.json"
_TEMPORARY = ".building-"
_STALE_S = 24 * 3600
_SETTLED_NS = 2 * 10**9
"""A file changed more recently than this may change again within the same tick of the file system's clock."""


def cache_dir() -> Path:
    """SPECFLOW_CACHE, or the platform's cache directory."""
    if named := os.environ.get("SPECFLOW_CACHE"):
        return Path(named).expanduser()
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "specflow"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "specflow"


def full_disk(path: Path) -> ModelError:
    """The error of a disk that has no room left."""
    hint = "free space or point SPECFLOW_CACHE elsewhere"
    return ModelError(str(path), "the disk is full; what was written so far is removed", "", hint)


@contextmanager
def disk_errors(root: Path) -> Iterator[None]:
    """Turn the system's errors about a cache directory into ours."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise full_disk(root) from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR, errno.EEXIST):
            hint = "point SPECFLOW_CACHE at a directory you may write"
            raise ModelError(str(root), f"cannot write here ({error})", "a writable cache", hint) from error
        raise


class SealedFolders:
    """Folders of one kind under a cache directory.

    Args:
        root: The cache directory.
        kind: Name of the directory in it that holds the folders.
        fault: What is wrong with a sound manifest, such as that another version wrote it; "" for nothing.
    """

    def __init__(self, root: Path, kind: str, fault: Callable[[Mapping[str, Any]], str] = lambda manifest: "") -> None:
        self.root, self.directory = root, root / kind
        self._fault = fault

    def path(self, name: str) -> Path:
        """Where a folder of this name lies, or would lie."""
        return self.directory / name

    def has(self, name: str) -> bool:
        """Whether there is a folder of this name, sound or not; names that lead elsewhere are none."""
        return name in self.names()

    def names(self) -> list[str]:
        """Folders that are there, sound or not."""
        found = sorted(self.directory.glob("*")) if self.directory.is_dir() else []
        return [path.name for path in found if path.is_dir() and not path.name.startswith(".")]

    def manifest(self, name: str) -> dict[str, Any]:
        """See `read_manifest`."""
        return read_manifest(self.path(name))

    def problems(self, name: str, full: bool = False) -> list[str]:
        """What is wrong with a folder; empty means sound.

        Args:
            full: Hash every file. Without it, those that were touched since they were last hashed.
        """
        directory = self.path(name)
        if not directory.is_dir():
            return ["not cached"]
        manifest = read_manifest(directory)
        if not manifest:
            return [f"{_MANIFEST} is missing or broken"]
        if fault := self._fault(manifest):
            return [fault]
        files = manifest["files"]
        times = {file: _modified(directory / file) for file in files}  # before hashing, to miss no change
        found = [_file_fault(directory / file, entry, full) for file, entry in files.items()]
        if not any(found) and any(entry.get("mtime_ns") != times[file] for file, entry in files.items()):
            for file, entry in files.items():
                entry["mtime_ns"] = times[file]
            with suppress(OSError):  # a cache that cannot be written is hashed again next time
                _write_manifest(directory, manifest)
        return [fault for fault in found if fault]

    def verify(self, name: str) -> list[str]:
        """Hash every file, and note in the manifest when. Returns what is wrong; empty means sound."""
        problems = self.problems(name, full=True)
        if not problems:
            with disk_errors(self.root):
                _write_manifest(self.path(name), {**self.manifest(name), "verified": _now()})
        return problems

    @contextmanager
    def building(self, name: str) -> Iterator[Path]:
        """A directory of this process alone, gone at the end whatever happens. See `commit`."""
        with disk_errors(self.root):
            self.directory.mkdir(parents=True, exist_ok=True)
            self._sweep()
            work = self._temporary(name)
            work.mkdir()
            try:
                yield work
            finally:
                shutil.rmtree(work, ignore_errors=True)

    def commit(self, built: Path, name: str, source: str, facts: Mapping[str, Any]) -> None:
        """Write a manifest into a finished folder and give it its final name.

        A sound folder that came first stays, and this one is discarded; a broken one is replaced.

        Args:
            built: A folder of files within one that `building` made.
            name: Its final name.
            source: What it was made of, for people.
            facts: More for the manifest.
        """
        _seal(built, source, facts)
        directory = self.path(name)
        while True:
            try:
                built.rename(directory)
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            if not self.problems(name, full=True):
                return
            # Moved where `building` removes it.
            with suppress(FileNotFoundError):
                directory.rename(built.parent / f"broken-{uuid.uuid4().hex}")

    def need_space(self, size: int) -> None:
        """Refuse to begin what the disk has no room for.

        Raises:
            ModelError: Fewer bytes than this are free.
        """
        free = shutil.disk_usage(self.directory).free
        if free < size:
            hint = "free space or point SPECFLOW_CACHE elsewhere"
            raise ModelError(str(self.root), f"{free / 1e6:.0f} MB free", f"{size / 1e6:.0f} MB", hint)

    def remove(self, name: str) -> int:
        """Delete a folder. Returns the bytes freed; 0 where there is none."""
        if not self.has(name):
            return 0
        directory = self.path(name)
        size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
        with disk_errors(self.root):
            # Renamed first: readers see the whole folder or none of it.
            doomed = self._temporary(name)
            directory.rename(doomed)
            shutil.rmtree(doomed)
        return size

    def _temporary(self, name: str) -> Path:
        return self.directory / f"{_TEMPORARY}{name}-{uuid.uuid4().hex}"

    def _sweep(self) -> None:
        """Remove what killed processes left behind."""
        for left in self.directory.glob(f"{_TEMPORARY}*"):
            with suppress(FileNotFoundError):  # another process has finished with it meanwhile
                if time.time() - left.stat().st_mtime > _STALE_S:
                    shutil.rmtree(left, ignore_errors=True)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a sealed folder; empty where it is missing or does not have what a manifest has."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return manifest if _is_manifest(manifest) else {}


def remembered_sha256(path: Path, root: Path | None = None) -> str:
    """SHA-256 of a file's bytes, noted in the cache: a large file is not read again at every run.

    The note holds for one path, size and times. A file that changed a moment ago is hashed and not noted, because its
    next change may leave all three as they are.

    Args:
        root: The cache directory; `cache_dir()` by default.

    Raises:
        ModelError: The file cannot be read.
    """
    try:
        before = path.stat()
        named = f"{path.resolve()} {before.st_size} {before.st_mtime_ns} {before.st_ctime_ns}"
        note = (cache_dir() if root is None else root) / "digests" / hashlib.sha256(named.encode()).hexdigest()
        if (known := _noted(note)) is not None:
            return known
        found = file_sha256(path)
    except OSError as error:
        raise ModelError(str(path), f"cannot be read ({error.strerror})", "a readable file") from error
    if time.time_ns() - before.st_mtime_ns > _SETTLED_NS:
        with suppress(OSError):  # a cache that cannot be written is no reason to fail: nothing else is wanted of it yet
            note.parent.mkdir(parents=True, exist_ok=True)
            replace_text(note, found)
    return found


def content_hash(paths: Iterable[Path], root: Path | None = None) -> str:
    """SHA-256 over the names and contents of files, whatever their order and directories.

    Args:
        root: As for `remembered_sha256`.

    Raises:
        ModelError: A file cannot be read.
    """
    lines = sorted(f"{path.name} {remembered_sha256(path, root)}" for path in paths)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _noted(note: Path) -> str | None:
    with suppress(OSError, ValueError):
        known = note.read_text(encoding="ascii")
        return known if len(known) == 64 else None
    return None


def _file_fault(path: Path, entry: Mapping[str, Any], full: bool) -> str:
    """What is wrong with one file; its hash is taken if asked for, or if the file was touched since the last time."""
    if not path.is_file():
        return f"{path.name} is missing"
    if path.stat().st_size != entry["size"]:
        return f"{path.name} has {path.stat().st_size} bytes, not {entry['size']}"
    if (full or _modified(path) != entry.get("mtime_ns")) and file_sha256(path) != entry["sha256"]:
        return f"{path.name} has another sha256"
    return ""


def _modified(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.is_file() else None


def _seal(directory: Path, source: str, facts: Mapping[str, Any]) -> None:
    files = {
        path.name: {
            "sha256": file_sha256(path),
            "size": path.stat().st_size,
            "mtime_ns": path.stat().st_mtime_ns,
        }
        for path in sorted(directory.iterdir())
    }
    joined = "\n".join(f"{name} {entry['sha256']}" for name, entry in files.items())
    whole = hashlib.sha256(joined.encode()).hexdigest()
    _write_manifest(directory, {"source": source, **facts, "hash": whole, "verified": _now(), "files": files})


def _is_manifest(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("files"), dict) or not value["files"]:
        return False
    if not all(isinstance(value.get(key), str) for key in ("source", "hash", "verified")):
        return False
    return all(
        isinstance(entry, dict) and isinstance(entry.get("sha256"), str) and type(entry.get("size")) is int
        for entry in value["files"].values()
    )


def _write_manifest(directory: Path, manifest: Mapping[str, Any]) -> None:
    replace_text(directory / _MANIFEST, json.dumps(manifest, indent=2) + "\n")


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")

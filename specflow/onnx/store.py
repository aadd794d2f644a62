"""The store of ONNX graphs: written once for the same weights, options and precision, and found again.

Layout: `<cache>/onnx/<key>/`, the graphs and their weights beside `manifest.json`; see `sealed` for what holds of such
folders. The key is a hash of all that the bytes of the graphs depend on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specflow.errors import ModelError
from specflow.sealed import SealedFolders, cache_dir

if TYPE_CHECKING:
    from specflow.onnx.graphs import GraphSet, Precision

__all__ = ["GraphStore", "StoredGraphs"]

log = logging.getLogger(__name__)

_KEY_LENGTH = 24
_SHOWN_HASH = 12
_SHOWN_WIDTH = 100
_HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class StoredGraphs:
    """One folder of the store, as its manifest describes it."""

    name: str
    directory: Path
    graphs: tuple[str, ...]  # file names
    precision: str
    source: str  # what they were made of, for people
    identity: Mapping[str, Any]  # the same, whole
    size: int  # bytes
    verified: str  # ISO date and time of the last full check
    writer: int  # WRITER_VERSION of who wrote them; another version does not use them


class GraphStore:
    """Graphs under one cache directory. `find` is a `GraphFinder`.

    Args:
        root: The cache directory; `cache_dir()` by default.
    """

    def __init__(self, root: Path | None = None) -> None:
        self._folders = SealedFolders(cache_dir() if root is None else root, "onnx", _fault)

    def find(self, identity: Mapping[str, object], precision: Precision, write: Callable[[GraphSet], None]) -> Path:
        """The folder of some graphs, written now if they are not there or damaged.

        Only files that were touched since they were written are hashed.

        Args:
            identity: What the graphs depend on beside the precision: weights by content, options, parts. Its order
                does not matter.
            precision: Of the graphs.
            write: Writes them.

        Raises:
            ModelError: The cache is full or cannot be written.
        """
        from specflow.onnx.graphs import GraphSet  # here, because it brings torch, and listing does not need it
        from specflow.onnx.writer import OPSET, WRITER_VERSION

        facts = {
            "identity": _plain(identity),
            "precision": _plain(precision),
            "writer": WRITER_VERSION,
            "opset": OPSET,
        }
        whole = json.dumps(facts, sort_keys=True)
        name = hashlib.sha256(whole.encode()).hexdigest()[:_KEY_LENGTH]
        if not (problems := self._folders.problems(name)):
            return self._folders.path(name)
        source = _summary(facts["identity"])
        if self._folders.has(name):
            log.warning("ONNX graphs of %s are written again: %s", source, "; ".join(problems))
        with self._folders.building(name) as work:
            built = work / "graphs"
            built.mkdir()
            with GraphSet(built, precision) as graphs:
                write(graphs)
            self._folders.commit(built, name, source, facts)
        return self._folders.path(name)

    def cached(self) -> list[StoredGraphs]:
        """Graphs in the store, sound or not, whose manifest can be read."""
        return [self._read(name) for name in self._folders.names() if self._manifest(name)]

    def unreadable(self) -> list[str]:
        """Names in the store whose manifest is missing or damaged."""
        return [name for name in self._folders.names() if not self._manifest(name)]

    def directory_of(self, name: str) -> Path:
        """Where graphs of this name lie, or would lie."""
        return self._folders.path(name)

    def verify(self, name: str) -> list[str]:
        """Recompute every hash of cached graphs. Returns what is wrong; empty means sound.

        Raises:
            ModelError: There are no such graphs.
        """
        self._check_name(name)
        return self._folders.verify(name)

    def remove(self, name: str) -> int:
        """Delete cached graphs, which are written again when they are next wanted. Returns the bytes freed.

        Raises:
            ModelError: There are no such graphs.
        """
        self._check_name(name)
        return self._folders.remove(name)

    def _check_name(self, name: str) -> None:
        if not self._folders.has(name):
            raise ModelError("graphs", f"{name!r} is not in the cache", "", "specflow models lists the cached graphs")

    def _manifest(self, name: str) -> dict[str, Any]:
        manifest = self._folders.manifest(name)
        return {} if _fault(manifest) else manifest

    def _read(self, name: str) -> StoredGraphs:
        manifest = self._manifest(name)
        return StoredGraphs(
            name=name,
            directory=self._folders.path(name),
            graphs=tuple(file for file in manifest["files"] if file.endswith(".onnx")),
            precision=manifest["precision"]["name"],
            source=manifest["source"],
            identity=manifest["identity"],
            size=sum(entry["size"] for entry in manifest["files"].values()),
            verified=manifest["verified"],
            writer=manifest["writer"],
        )


def _fault(manifest: Mapping[str, Any]) -> str:
    """What graphs' manifests hold beside what all have."""
    precision = manifest.get("precision")
    named = isinstance(precision, dict) and isinstance(precision.get("name"), str)
    made = isinstance(manifest.get("identity"), dict) and isinstance(manifest.get("writer"), int)
    return "" if named and made else "manifest.json does not describe graphs"


def _plain(value: object) -> Any:
    """A value as JSON has it, the same whenever it is equal."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted(_plain(each) for each in value)
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    assert isinstance(value, Path), f"{type(value).__name__} cannot identify graphs: {value!r}"
    return str(value)


def _summary(identity: Mapping[str, Any]) -> str:
    """What identifies graphs, short enough for a table: no empty values, hashes by their first characters."""
    whole = ", ".join(f"{name} {value}" for name, value in _leaves(identity)) or "nothing"
    return whole if len(whole) <= _SHOWN_WIDTH else whole[: _SHOWN_WIDTH - 3] + "..."


def _leaves(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value)
        elif value not in (None, False, "", []):
            text = str(value)
            yield name, text[:_SHOWN_HASH] if len(text) == 64 and set(text) <= _HEX else text

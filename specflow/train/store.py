"""Target features of a corpus on disk, made once and read by every drafter that is trained on it.

features.json  whose features they are, and which
NAME.f16       one growing file a feature: rows of all texts, one after another, in float16
index.jsonl    where each text's rows begin; a line follows its rows, so that what it says is there

A store may hold more than a drafter needs, and what is missing of a corpus is added when it is opened.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from specflow.draft.base import Needs
from specflow.errors import DataError, ModelError
from specflow.files import claim_directory, lock_for_adding, write_json_atomic
from specflow.train.capture import features_of, names_of, pass_groups

if TYPE_CHECKING:
    from specflow.build import LoadedTarget
    from specflow.train.capture import OnlineFeatures
    from specflow.train.sequences import Text
    from specflow.types import Features

__all__ = ["FeatureStore", "StoreFacts"]

log = logging.getLogger(__name__)

FORMAT = 1
_HEADER, _INDEX = "features.json", "index.jsonl"
_BYTES = 2  # of a float16


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """Whose features a store holds."""

    model: str
    identity: str  # SHA-256 of what decides the target's numbers
    weights: str  # type of its weights
    hidden_size: int

    @classmethod
    def of(cls, loaded: LoadedTarget) -> StoreFacts:
        """Those of a target."""
        info = loaded.target.info
        return cls(info.name, loaded.identity(), info.weights, info.hidden_size)


class FeatureStore:
    """Features on disk. Opening one that is there cuts off what was half written.

    Args:
        path: Its directory: a store, or absent or empty.
        facts: Whose features it must hold.
        needs: What must be in it; a new one holds that and no more.

    Raises:
        DataError: It holds another target's features, lacks some, or cannot be read.
    """

    def __init__(self, path: Path, facts: StoreFacts, needs: Needs) -> None:
        self.path, self._facts, self._wanted = path, facts, names_of(needs)
        if (path / _HEADER).exists():
            self.names = self._check(_read_header(path))
        else:
            claim_directory(path, f"it has no {_HEADER}, so it is no store of features")
            self.names = self._wanted
            header = {"format": FORMAT, "target": asdict(facts), "tensors": list(self.names), "dtype": "float16"}
            write_json_atomic(path / _HEADER, header)
        self._maps: dict[str, np.ndarray[Any, Any]] = {}
        self.refresh()

    @property
    def needs(self) -> Needs:
        """What a source must give to add to it."""
        taps = tuple(int(name[4:]) for name in self.names if name.startswith("tap."))
        return Needs(taps, "hidden_pre" in self.names, True)

    def refresh(self) -> None:
        """Take note of what is there now."""
        self._index = dict(self._read_index())  # id -> digest, first row, rows
        self._num_rows = max((first + rows for _, first, rows in self._index.values()), default=0)

    def missing(self, texts: Sequence[Text]) -> list[Text]:
        """Texts whose features are not there yet.

        Raises:
            DataError: A text has other tokens than the one of its id that is there.
        """
        return [text for text in texts if not self._has(text)]

    def size_of(self, texts: Sequence[Text]) -> int:
        """Bytes that the features of texts take."""
        return sum(map(len, texts)) * len(self.names) * self._facts.hidden_size * _BYTES

    def add(self, texts: Sequence[Text], source: OnlineFeatures) -> Iterator[int]:
        """Make what is missing. An interrupted call leaves what it has made.

        Args:
            texts: Not in the store.
            source: Makes what the store holds.

        Yields:
            Positions that were added.

        Raises:
            DataError: The disk has no room, or another process is adding to the store.
            ModelError: A state is beyond what float16 holds.
        """
        if not texts:
            return
        free, size = shutil.disk_usage(self.path).free, self.size_of(texts)
        if size > free:
            found = f"{size / 1e9:.1f} GB of features, and {free / 1e9:.1f} GB free"
            raise DataError(str(self.path), found, "a disk with room", "choose another directory, or features online")
        with self._locked():
            for group in pass_groups(sorted(texts, key=len)):
                self._append(group, source.tensors(group))
                yield sum(map(len, group))

    def read(self, texts: Sequence[Text]) -> Features:
        """Features of texts that are there; see `FeatureSource`."""
        places = [self._index[text.id] for text in texts]
        width = max(map(len, texts))
        tensors = {}
        for name in self._wanted:
            rows = torch.zeros(len(texts), width, self._facts.hidden_size)
            for row, (_, first, count) in zip(rows, places, strict=True):
                row[:count] = torch.from_numpy(np.asarray(self._mapped(name)[first : first + count], np.float32))
            tensors[name] = rows
        return features_of(tensors)

    def _has(self, text: Text) -> bool:
        if text.id not in self._index:
            return False
        if self._index[text.id][0] != _digest(text):
            found = f"{text.id!r} with other tokens"
            hint = "choose another directory, or the max_length and corpus that it was made with"
            raise DataError(str(self.path), found, "features of this corpus, cut to this length", hint)
        return True

    def _append(self, texts: Sequence[Text], tensors: Mapping[str, Tensor]) -> None:
        """Rows first, then the lines that speak of them."""
        for name in self.names:
            halves = torch.cat([rows[: len(text)] for rows, text in zip(tensors[name], texts, strict=True)]).half()
            if not bool(halves.isfinite().all()):
                raise ModelError(f"features {name}", "a value beyond float16", "states below 65504", "features online")
            _write_at(self.path / f"{name}.f16", self._num_rows * self._row_bytes, halves.cpu().numpy().tobytes())
        lines = []
        for text in texts:
            self._index[text.id] = (_digest(text), self._num_rows, len(text))
            lines.append(
                json.dumps({"id": text.id, "digest": _digest(text), "first": self._num_rows, "rows": len(text)})
            )
            self._num_rows += len(text)
        file = self.path / _INDEX
        _write_at(file, file.stat().st_size if file.exists() else 0, "".join(f"{line}\n" for line in lines).encode())

    @property
    def _row_bytes(self) -> int:
        return self._facts.hidden_size * _BYTES

    def _mapped(self, name: str) -> np.ndarray[Any, Any]:
        """All rows of a feature.  # [rows, H] float16"""
        if name not in self._maps or len(self._maps[name]) < self._num_rows:
            shape = (self._num_rows, self._facts.hidden_size)
            self._maps[name] = np.memmap(self.path / f"{name}.f16", np.float16, "r", shape=shape)
        return self._maps[name]

    def _check(self, header: Mapping[str, Any]) -> tuple[str, ...]:
        """The names of what is there, if it is of this target and all that is wanted."""
        changed = [
            f"{name} {header['target'].get(name)!r}, now {value!r}"
            for name, value in asdict(self._facts).items()
            if name != "model" and header["target"].get(name) != value
        ]
        if changed:
            raise DataError(str(self.path), f"features of another target: {'; '.join(changed)}", "one store a target")
        lacking = [name for name in self._wanted if name not in header["tensors"]]
        if lacking:
            found = f"it holds {', '.join(header['tensors'])} and lacks {', '.join(lacking)}"
            hint = "make one for all drafters in a new directory: specflow features RECIPE RECIPE ..."
            raise DataError(str(self.path), found, f"all of {', '.join(self._wanted)}", hint)
        return tuple(header["tensors"])

    def _read_index(self) -> Iterator[tuple[str, tuple[str, int, int]]]:
        """Texts whose rows are all there; the index is cut off after the last of them."""
        file = self.path / _INDEX
        sizes = [each.stat().st_size if each.exists() else 0 for each in self._files()]
        whole, good = min(sizes) // self._row_bytes, 0
        for line in file.read_bytes().splitlines(keepends=True) if file.exists() else ():
            try:
                entry = json.loads(line)
                first, rows = int(entry["first"]), int(entry["rows"])
                if not line.endswith(b"\n") or first + rows > whole:
                    raise ValueError("rows are missing")
                yield str(entry["id"]), (str(entry["digest"]), first, rows)
            except (ValueError, KeyError, TypeError) as error:
                log.warning("%s: %s; features from here on are made again", file, error)
                os.truncate(file, good)
                return
            good += len(line)

    def _files(self) -> list[Path]:
        return [self.path / f"{name}.f16" for name in self.names]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes from adding, where the system can do that."""
        descriptor = lock_for_adding(self.path / _HEADER, self.path)
        try:
            yield
        finally:
            os.close(descriptor)


def _digest(text: Text) -> str:
    return blake2b(text.tokens.numpy().tobytes(), digest_size=8).hexdigest()


def _write_at(file: Path, offset: int, content: bytes) -> None:
    """Write and wait until it is on disk; what stood there before from the offset on is gone."""
    try:
        with file.open("r+b" if file.exists() else "xb") as stream:
            stream.seek(offset)
            stream.truncate()
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        hint = "what was made before is intact; make room and call it again"
        raise DataError(str(file), f"cannot write: {error.strerror or error}", "a disk with room", hint) from error


def _read_header(path: Path) -> dict[str, Any]:
    file = path / _HEADER
    try:
        header = json.loads(file.read_text(encoding="utf-8"))
        sound = (
            header["format"] == FORMAT and isinstance(header["target"], dict) and isinstance(header["tensors"], list)
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(str(file), f"cannot be read: {error!r}", "the header of a store of features") from error
    if not sound:
        raise DataError(str(file), "another kind of file", f"the header of a store of features, format {FORMAT}")
    return dict(header)

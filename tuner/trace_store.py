"""Traces on disk: a header, and one small file of arrays for every request and drafter, written whole or not at all.

    DIR/trace.json                  header: what was traced, request by request and drafter by drafter; provenance
    DIR/texts/000000.npz            tokens of request 0, and the probability of each
    DIR/d0/000000.npz               what drafter 0 said at every position of it
    DIR/recipe-0.yaml               the first recipe, as it was traced

Nothing that was written is written again: an interrupted trace goes on where it ended, and drafters can be added.
"""

from __future__ import annotations

import json
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specflow.errors import DataError
from specflow.files import lock_for_adding, replacing, write_json_atomic, write_text_atomic
from specflow.recipe import dump_recipe
from tuner.replay_types import DrafterInfo

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from specflow.recipe import Recipe

__all__ = ["FORMAT", "TraceStore", "drafter_data", "drafter_info", "recipe_file"]

FORMAT = "specflow-trace-1"
HEADER, TEXTS, LOCK = "trace.json", "texts", ".lock"
AGAIN = "trace into a new directory"

DAMAGES = (
    ArithmeticError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
"""What reading a damaged file of arrays may end with."""
SHAPES: Mapping[str, tuple[str, ...]] = {
    TEXTS: ("tokens", "chances"),
    "chain": ("tokens", "match"),
    "tree": ("nodes", "depth", "agree"),
}
"""Arrays that a file of each kind must have."""


class TraceStore:
    """A trace's directory.

    Args:
        path: The directory.
        header: What it holds; see `open` and `create`.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path, self.header = path, header

    @classmethod
    def open(cls, path: Path) -> TraceStore:
        """A trace that is there.

        Raises:
            DataError: There is none, or its header is damaged.
        """
        file = path / HEADER
        try:
            header = json.loads(file.read_text(encoding="utf-8"))
            if header["format"] != FORMAT:
                raise ValueError(f"format {header['format']!r}")
            for name in ("settings", "requests", "drafters", "recipes", "provenance"):
                header[name]
            for data in header["drafters"]:
                drafter_info(data)
        except (OSError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            found = f"cannot be read: {type(error).__name__}: {error}"
            hint = "make one: specflow trace RECIPE --data FILE -o DIR"
            raise DataError(str(file), found, f"the header of a trace, format {FORMAT}", hint) from error
        return cls(path, header)

    @classmethod
    def create(cls, path: Path, settings: Mapping[str, Any], requests: Sequence[Mapping[str, Any]]) -> TraceStore:
        """A new trace, or the one that is there if it was made with the same settings.

        Args:
            path: The directory.
            settings: Everything that decides the texts.
            requests: Key, category and prompt of each.

        Raises:
            DataError: What is there was made otherwise, is no trace, or cannot be written.
        """
        fresh = json.loads(json.dumps({"settings": settings, "requests": list(requests)}))
        if (path / HEADER).exists():
            store = cls.open(path)
            for name, value in fresh["settings"].items():
                if (there := store.header["settings"].get(name)) != value:
                    raise DataError(str(path), f"{name}: {there!r} there, {value!r} here", "equal settings", AGAIN)
            if store.header["requests"] != fresh["requests"]:
                raise DataError(str(path), "a trace of other prompts", "the prompts it was begun with", AGAIN)
            return store
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise DataError(str(path), "holds files that are no trace", "a new or empty directory", AGAIN)
        header = {"format": FORMAT, **fresh, "drafters": [], "recipes": {}, "provenance": []}
        try:
            (path / TEXTS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(str(path), f"cannot create: {error.strerror or error}", "a writable directory") from error
        store = cls(path, header)
        store.save_header()
        return store

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from adding meanwhile.

        Raises:
            DataError: One is adding.
        """
        descriptor = lock_for_adding(self.path / LOCK, self.path)
        try:
            yield
        finally:
            os.close(descriptor)

    def save_header(self) -> None:
        write_json_atomic(self.path / HEADER, self.header)

    def add_drafter(self, info: DrafterInfo) -> int:
        """Note a drafter; its number.

        Raises:
            DataError: There is another one of its name.
        """
        data = json.loads(json.dumps(drafter_data(info)))
        for number, there in enumerate(self.header["drafters"]):
            if there["name"] == info.name:
                for name, value in data.items():
                    if there[name] != value and name != "confidence_from":
                        found = f"drafter {info.name} with another {name}: {there[name]!r} there, {value!r} here"
                        raise DataError(str(self.path), found, "the drafter as it was traced", f"rename it, or {AGAIN}")
                return number
        self.header["drafters"].append(data)
        self.save_header()
        return len(self.header["drafters"]) - 1

    def add_recipe(self, recipe: Recipe, drafters: Sequence[str]) -> None:
        """Keep a recipe, which its name finds, with the names of its drafters."""
        if recipe.name not in self.header["recipes"]:
            number = len(self.header["recipes"])
            write_text_atomic(self.path / f"recipe-{number}.yaml", dump_recipe(recipe))
            self.header["recipes"][recipe.name] = list(drafters)
            self.save_header()

    def has(self, request: int, drafter: int | None = None) -> bool:
        """Whether a file is there: of a drafter, or of the text itself."""
        return self._file(request, drafter).is_file()

    def write(self, request: int, arrays: Mapping[str, NDArray[Any]], drafter: int | None = None) -> None:
        """Write a file for good.

        Raises:
            DataError: It cannot be written; what was there stands.
        """
        file = self._file(request, drafter)
        try:
            file.parent.mkdir(exist_ok=True)
            with replacing(file) as stream:
                np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]
        except OSError as error:
            hint = "what was written before is intact; make room and trace again into the same directory"
            found = f"cannot write: {error.strerror or error}"
            raise DataError(str(file), found, "a disk with room", hint) from error

    def read(self, request: int, drafter: int | None = None) -> dict[str, NDArray[Any]]:
        """The arrays of a file.

        Raises:
            DataError: It is missing or damaged.
        """
        file = self._file(request, drafter)
        kind = TEXTS if drafter is None else "tree" if self.header["drafters"][drafter]["tree"] else "chain"
        try:
            with np.load(file, allow_pickle=False) as found:
                arrays = {name: found[name] for name in found.files}
            if missing := [name for name in SHAPES[kind] if name not in arrays]:
                raise ValueError(f"no array {missing[0]}")
        except FileNotFoundError as error:
            hint = "trace again into the same directory: it goes on where it ended"
            raise DataError(str(file), "is not there: the trace was not finished", "a finished trace", hint) from error
        except DAMAGES as error:
            found_ = f"cannot be read: {type(error).__name__}: {error}"
            raise DataError(str(file), found_, "arrays that were traced", "delete the file and trace again") from error
        return arrays

    def _file(self, request: int, drafter: int | None) -> Path:
        return self.path / (TEXTS if drafter is None else f"d{drafter}") / f"{request:06d}.npz"


def drafter_data(info: DrafterInfo) -> dict[str, Any]:
    """Plain data that `drafter_info` reads."""
    return {name: getattr(info, name) for name in DrafterInfo.__dataclass_fields__}


def drafter_info(data: Mapping[str, Any]) -> DrafterInfo:
    """What `drafter_data` described.

    Raises:
        LookupError: A fact is missing; also ValueError and TypeError.
    """
    facts = {name: data[name] for name in DrafterInfo.__dataclass_fields__}
    return DrafterInfo(**{**facts, "k": int(facts["k"]), "exact_k": tuple(map(int, facts["exact_k"]))})


def recipe_file(path: Path, name: str) -> Path:
    """The file of a recipe as it was traced.

    Raises:
        DataError: The trace does not have it.
    """
    known = list(TraceStore.open(path).header["recipes"])
    if name not in known:
        raise DataError(str(path), f"no recipe '{name}'", f"one of: {', '.join(known)}")
    return path / f"recipe-{known.index(name)}.yaml"

"""Opens a directory of published weights, of the hub or of this machine: its configuration and its tensors by name.

Safetensors are mapped when a tensor is asked for. A pickle (`.bin`, `.pt`) may hold code; it is read by torch's reader
of weights alone, which runs none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specflow.checkpoint.keys import Keys
from specflow.errors import CheckpointError
from specflow.target.load import read_json, read_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.checkpoint.layout import Layout

__all__ = ["Stored", "checkpoint_directory", "open_stored", "our_tensors", "weight_pickles"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt", "model.bin", "model.pt")
_PICKLE_INDEX = "pytorch_model.bin.index.json"


@dataclass(frozen=True)
class Stored:
    """A directory of weights.

    Args:
        path: The directory.
        config: Its config.json; None where there is none.
        tensors: By their published names.
    """

    path: Path
    config: Keys | None
    tensors: Mapping[str, Tensor]

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one tensor; () where it is absent."""
        return tuple(self.tensors[name].shape) if name in self.names else ()

    def under(self, prefix: str) -> list[str]:
        """Names that begin so, in order."""
        return sorted(name for name in self.names if name.startswith(prefix))

    def count(self, pattern: str) -> int:
        """How many numbers in a row, from 0, stand at the group of a pattern of names."""
        found = {int(match.group(1)) for name in self.names if (match := re.match(pattern, name))}
        return next(number for number in range(len(found) + 1) if number not in found)


def checkpoint_directory(path: str | Path) -> Path:
    """Where the files of a checkpoint are; those of a hub id are fetched if they are not cached.

    Raises:
        CheckpointError: There is no such directory, and it is no hub id.
        ModelError: The hub could not deliver it.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        return local
    if _HUB_ID.fullmatch(str(path)) and not local.exists() and not local.parent.is_dir():
        from specflow.target.hub import fetch_snapshot

        return fetch_snapshot(str(path), None, pickles=True)
    found = "a file" if local.exists() else "no such directory"
    raise CheckpointError(str(path), found, "the directory of a drafter's checkpoint, or a hub id (org/name)")


def open_stored(path: str | Path) -> Stored:
    """Open a checkpoint's directory, or a hub id's.

    Raises:
        CheckpointError: A file is missing, truncated, or holds more than tensors.
        ModelError: The hub could not deliver it.
    """
    directory = checkpoint_directory(path)
    file = directory / "config.json"
    config = Keys(read_json(file), str(file)) if file.is_file() else None
    pickles = weight_pickles(directory)
    return Stored(directory, config, _read_pickles(pickles) if pickles else read_tensors(directory))


def weight_pickles(directory: Path) -> list[Path]:
    """The pickled weight files of a checkpoint; empty where it has safetensors.

    Raises:
        CheckpointError: The index of the files is damaged.
    """
    if any(directory.glob("*.safetensors")) or (directory / "model.safetensors.index.json").is_file():
        return []
    if (index := directory / _PICKLE_INDEX).is_file():
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
            raise CheckpointError(str(index), "no proper weight_map", "tensor name -> file name")
        return [directory / name for name in sorted(set(places.values()))]
    return next(([directory / name] for name in _PICKLES if (directory / name).is_file()), [])


def our_tensors(stored: Stored, layout: Layout) -> Mapping[str, Tensor]:
    """Our tensors of a checkpoint that has been recognised, each made when it is asked for."""
    if layout.is_native:
        return stored.tensors
    return _Made(stored, layout)


class _Made(Mapping[str, "Tensor"]):
    """Tensors under our names, made from published ones."""

    def __init__(self, stored: Stored, layout: Layout) -> None:
        self._stored = stored
        self._wanted = {wanted.name: wanted for wanted in layout.wanted}

    def __getitem__(self, name: str) -> Tensor:
        wanted = self._wanted[name]
        parts = [self._stored.tensors[part] for part in wanted.theirs if part in self._stored.names]
        return parts[0] if wanted.make is None else wanted.make(parts)

    def __contains__(self, name: object) -> bool:
        return name in self._wanted

    def __iter__(self) -> Iterator[str]:
        return iter(self._wanted)

    def __len__(self) -> int:
        return len(self._wanted)


def _read_pickles(files: Sequence[Path]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= _read_pickle(file)
    return tensors


def _read_pickle(file: Path) -> dict[str, Tensor]:
    import torch

    def load(mapped: bool) -> Any:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)

    if not file.is_file():
        raise CheckpointError(str(file), "the file is missing", "every file that the index names")
    found = _first_that_works(file, (lambda: load(True), lambda: load(False)))  # old files cannot be mapped
    if not isinstance(found, dict) or not found:
        raise CheckpointError(str(file), f"a {type(found).__name__}", "tensors by their names")
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            entry = f"{str(name)[:60]!r} is a {type(tensor).__name__}"
            raise CheckpointError(str(file), entry, "tensors by their names, nothing else")
    return {name: tensor.detach() for name, tensor in found.items()}


def _first_that_works(file: Path, ways: Sequence[Callable[[], Any]]) -> Any:
    """A damaged or hostile pickle can break its reader in any way; all of them mean that it cannot be read."""
    for number, way in enumerate(ways, 1):
        try:
            return way()
        except Exception as error:
            if number < len(ways):
                continue
            lines = str(error).strip().splitlines()
            if "weights_only" in str(error) or "Unsupported" in str(error):
                hint = "it may run code; convert it to safetensors where you trust it"
                raise CheckpointError(
                    str(file), "a pickle of more than tensors", "a pickle of tensors", hint
                ) from error
            reason = lines[0] if lines else type(error).__name__
            hint = "the file is truncated or damaged; fetch it again"
            raise CheckpointError(str(file), f"cannot be read ({reason[:120]})", "a file of tensors", hint) from error
    raise AssertionError("no way to read it was given")

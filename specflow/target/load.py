"""From a model's name to its files, its tokenizer and its tensors."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specflow.errors import CheckpointError, ModelError
from specflow.target.store import ModelFiles, ModelStore

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

    from specflow.text import TextCodec

__all__ = ["ModelFiles", "load_tokenizer", "read_config", "read_json", "read_tensors", "resolve_model", "weight_files"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_INDEX = "model.safetensors.index.json"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def resolve_model(name: str, revision: str | None = None, trust_remote_code: bool = False) -> ModelFiles:
    """Find a model's files, fetching or converting them where needed.

    Args:
        name: A name of the catalogue, a local directory, a `.gguf` file or a hub id, tried in this order.
        revision: Branch, tag or commit of a hub id.
        trust_remote_code: Fetch the Python files of a hub id too.

    Raises:
        ModelError: There is no such model, or it cannot be fetched.
        CheckpointError: The directory or file does not hold what it should.
    """
    store = ModelStore()
    path = Path(name).expanduser()
    is_hub_id = name not in store.catalogue and not path.exists() and _HUB_ID.fullmatch(name)
    if revision is not None and not is_hub_id:
        raise ModelError("target.revision", f"a revision ({revision}) for {name}", "none: only hub ids have revisions")
    if name in store.catalogue:
        stored = store.ensure(name)
        return ModelFiles(name, stored.directory, None, stored.hash)
    if path.is_dir():
        return _checked(name, path, None)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(name, "a file that is no .gguf file", "a directory with config.json, or a .gguf file")
        stored = store.convert(path)
        return ModelFiles(name, stored.directory, None, stored.hash)
    if is_hub_id and path.suffix.lower() != ".gguf":
        from specflow.target.hub import fetch_snapshot

        snapshot = fetch_snapshot(name, revision, trust_remote_code)
        return _checked(name, snapshot, snapshot.name)
    raise _unknown(name, store)


def load_tokenizer(files: ModelFiles, trust_remote_code: bool = False) -> TextCodec:
    """Tokenizer, chat template and stop ids of a model.

    Args:
        trust_remote_code: Run the model's own Python code where its tokenizer is made by it.

    Raises:
        ModelError: The tokenizer cannot be read, or has no fast form.
    """
    from transformers import AutoTokenizer

    from specflow.text import TextCodec

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(files.directory), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # a tokenizer file can break its reader in any way
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(files.name, f"its tokenizer cannot be read: {reason}", "one transformers loads") from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ModelError(files.name, f"{type(tokenizer).__name__} has no fast form", "a tokenizer.json")
    return TextCodec(tokenizer, _stop_ids(files.directory, tokenizer.eos_token_id), files.name)


def read_config(files: ModelFiles, trust_remote_code: bool = False) -> PretrainedConfig:
    """The configuration of a model.

    Args:
        trust_remote_code: Run the model's own Python code where its configuration is made by it.

    Raises:
        ModelError: It cannot be read.
    """
    from transformers import AutoConfig

    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(files.directory, trust_remote_code=trust_remote_code)
    except Exception as error:  # a config file can break its reader in any way
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        found = f"its configuration cannot be read: {reason}"
        raise ModelError(files.name, found, "a model that transformers knows") from error
    return config


def read_tensors(directory: Path) -> Mapping[str, Tensor]:
    """All tensors of a model directory, each mapped from its safetensors file when it is asked for.

    Raises:
        CheckpointError: A file is missing, truncated, or does not hold what the index says.
    """
    places: dict[str, Path] = {}
    for path in weight_files(directory):
        with _shard(path) as shard:
            places.update(dict.fromkeys(shard.keys(), path))
    if (directory / _INDEX).is_file():
        missing = sorted(set(_weight_map(directory)) - set(places))
        if missing:
            raise CheckpointError(str(directory), f"no tensor {missing[0]} in any file", f"what {_INDEX} lists")
    return _TensorFiles(places)


class _TensorFiles(Mapping[str, "Tensor"]):
    """Opens a file anew for every tensor: pages that were read then leave memory with the tensor, not with the file."""

    def __init__(self, places: Mapping[str, Path]) -> None:
        self._places = places

    def __getitem__(self, name: str) -> Tensor:
        with _shard(self._places[name]) as shard:
            tensor: Tensor = shard.get_tensor(name)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


@contextmanager
def _shard(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as shard:
            yield shard
    except (SafetensorError, OSError) as error:
        hint = "the file is truncated or damaged; fetch it again"
        raise CheckpointError(str(path), f"cannot be read ({error})", "a whole safetensors file", hint) from error


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model: those of its index, or the single one.

    Raises:
        CheckpointError: There is none, or not all that the index names.
    """
    if (directory / _INDEX).is_file():
        files = sorted({directory / name for name in _weight_map(directory).values()})
    elif (directory / "model.safetensors").is_file():
        files = [directory / "model.safetensors"]
    else:
        files = sorted(directory.glob("*.safetensors"))
        if len(files) != 1:
            others = sorted(path.name for path in directory.glob("*") if path.suffix in (".bin", ".pth", ".gguf"))
            found = ", ".join(others or [path.name for path in files]) or "no weight files"
            hint = "name the .gguf file itself" if any(name.endswith(".gguf") for name in others) else ""
            raise CheckpointError(str(directory), found, f"model.safetensors, or {_INDEX} and its files", hint)
    for path in files:
        if not path.is_file():
            raise CheckpointError(str(path), "the file is missing", f"every file that {_INDEX} names")
    return files


def _weight_map(directory: Path) -> dict[str, str]:
    index = read_json(directory / _INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
        raise CheckpointError(str(directory / _INDEX), "no proper weight_map", "tensor name -> file name")
    return index


def _checked(name: str, directory: Path, revision: str | None) -> ModelFiles:
    if not (directory / "config.json").is_file():
        raise ModelError(name, "no config.json in the directory", "a Hugging Face model directory")
    if not any((directory / file).is_file() for file in _TOKENIZERS):
        raise ModelError(name, "no tokenizer in the directory", f"one of {', '.join(_TOKENIZERS)}")
    return ModelFiles(name, directory, revision, _fingerprint(directory))


def _fingerprint(directory: Path) -> str:
    """SHA-256 over small files whole and over the size and header of each weight file.

    Reading all weights for a name in a report would cost more than loading them.
    """
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.json")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for path in weight_files(directory):
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        with path.open("rb") as source:
            length = int.from_bytes(source.read(8), "little")
            digest.update(source.read(min(length, path.stat().st_size)))
    return digest.hexdigest()


def _stop_ids(directory: Path, eos: int | None) -> tuple[int, ...]:
    """What ends a text: the generation config's ids, else the model config's, and the tokenizer's own."""
    for file in ("generation_config.json", "config.json"):
        if (directory / file).is_file():
            value = read_json(directory / file).get("eos_token_id")
            if value is not None:
                ids = value if isinstance(value, list) else [value]
                if not all(isinstance(token, int) for token in ids):
                    raise CheckpointError(str(directory), f"eos_token_id {value!r}", "a token id, or a list of them")
                return tuple(sorted({*ids, *([] if eos is None else [eos])}))
    return () if eos is None else (eos,)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        CheckpointError: It cannot be read, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(str(path), f"cannot be read ({error})", "a JSON object") from error
    if not isinstance(value, dict):
        raise CheckpointError(str(path), f"a {type(value).__name__}", "a JSON object")
    return value


def _unknown(name: str, store: ModelStore) -> ModelError:
    if name.endswith(".gguf") or name.startswith((".", "/", "~")):
        return ModelError(name, "no such file or directory", "an existing model directory or .gguf file")
    near = store.nearest(name)
    known = ", ".join(sorted(store.catalogue))
    hint = f"did you mean {' or '.join(near)}?" if near else "hub ids have an organisation: org/name"
    return ModelError(name, "no such model", f"{known}, a hub id, a directory or a .gguf file", hint)

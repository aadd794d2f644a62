"""Opens a drafter's directory: model.safetensors with its tensors, config.json with the source's own options.

A checkpoint in another published layout is put into these words by `specflow.checkpoint` first.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from pydantic import BaseModel, ValidationError

from specflow.checkpoint.detection import is_published
from specflow.checkpoint.files import checkpoint_directory, weight_pickles
from specflow.checkpoint.fitting import fitted
from specflow.checkpoint.layout import detect, read
from specflow.draft.nn.weights import SeededTensors, WeightReader
from specflow.draft.shipped import drafter_path, shipped_drafters
from specflow.errors import CheckpointError, ModelError
from specflow.law import DraftVocabulary
from specflow.sealed import content_hash
from specflow.target.load import read_json, read_tensors
from specflow.target.store import checkpoint_hash

if TYPE_CHECKING:
    from specflow.target.base import Target

__all__ = ["draft_vocabulary", "open_weights", "read_options", "trained_reader", "weights_identity"]

log = logging.getLogger(__name__)

_READER = 1
"""Counts the ways in which published tensors have been read: a new one makes other weights of the same file."""

M = TypeVar("M", bound=BaseModel)

_OF_THE_RECIPE = ("weights", "seed", "runtime")
"""Options that say where weights come from and what runs them: a checkpoint cannot set them."""


def open_weights(
    weights: str | None, seed: int, target: Target, offset_norms: bool = False, packed: bool = True
) -> WeightReader:
    """A reader of a drafter's tensors, in the dtype and on the device of the target.

    Args:
        weights: Directory or hub id of a checkpoint; None makes random tensors.
        seed: Of the random ones.
        target: The model the drafter is for.
        offset_norms: The checkpoint holds the gains of norms less 1.
        packed: As in `WeightReader`; false for layers that will be written as graphs.

    Raises:
        CheckpointError: There is no such directory, it holds no whole weight file, or it was made for another target.
        ModelError: The hub could not deliver it.
    """
    like = torch.empty(0, dtype=target.info.dtype, device=target.info.device)
    if weights is None:
        log.warning("no draft.weights: the drafter is random and accepts almost nothing; the text is exact")
        return WeightReader(SeededTensors(seed), f"random weights, seed {seed}", like, packed)
    directory = _directory(weights)
    tensors = fitted(read(directory), target.info) if is_published(directory) else read_tensors(directory)
    return WeightReader(_WholeNorms(tensors) if offset_norms else tensors, weights, like, packed)


def trained_reader(tensors: SeededTensors, target: Target) -> WeightReader:
    """A reader of tensors that will be trained, in float32 whatever the target's type."""
    like = torch.empty(0, dtype=torch.float32, device=target.info.device)
    return WeightReader(tensors, "training", like, packed=False, tracked=True)


def weights_identity(weights: str | None, seed: int) -> str:
    """What tells a drafter's weights from all others, wherever they lie: their content, or the seed of random ones.

    Raises:
        CheckpointError: There is no such directory.
        ModelError: A file in it cannot be read.
    """
    if weights is None:
        return f"seed {seed}"
    directory = _directory(weights)
    if not is_published(directory):
        return checkpoint_hash(directory)
    pickles = weight_pickles(directory)
    content = content_hash([directory / "config.json", *pickles]) if pickles else checkpoint_hash(directory)
    return f"published, reader {_READER}: {content}"


class _WholeNorms(Mapping[str, torch.Tensor]):
    """Tensors of a checkpoint with 1 added to the gains of norms."""

    def __init__(self, stored: Mapping[str, torch.Tensor]) -> None:
        self._stored = stored

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._stored[name]
        return tensor.float() + 1.0 if tensor.ndim == 1 and "norm" in name else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def read_options(config: M, weights: str | None) -> M:
    """Options with what the checkpoint says of itself filled in.

    A key of config.json serves where the recipe did not set it. Said twice it must be said alike: a network with
    another shape than its training had drafts nonsense without a word. Null in the recipe leaves it to the checkpoint.

    Args:
        config: What the recipe set.
        weights: The checkpoint's directory; None changes nothing.

    Raises:
        CheckpointError: config.json cannot be read, has a key that is no option, or contradicts the recipe.
    """
    if weights is None:
        return config
    path = (directory := _directory(weights)) / "config.json"
    if is_published(directory):
        return _agreed(config, _published_options(config, directory), path)
    if not path.is_file():
        return config
    found = read_json(path)
    known = [name for name in type(config).model_fields if name not in _OF_THE_RECIPE]
    unknown = sorted(set(found) - set(known))
    if unknown:
        raise CheckpointError(str(path), f"unknown key {unknown[0]!r}", f"options of the source: {', '.join(known)}")
    return _agreed(config, found, path)


def _published_options(config: BaseModel, directory: Path) -> dict[str, Any]:
    """What a checkpoint in a published layout says; how its weights are read is what the recipe says, if it does."""
    layout = detect(directory)
    for note in layout.notes:
        log.info("%s: %s", directory, note)
    if not set(layout.options) <= set(type(config).model_fields):
        found = f"weights of source {layout.source} ({layout.name})"
        raise CheckpointError(str(directory), found, "the recipe's source", f"set draft.method: {layout.method}")
    explicit = {name for name in config.model_fields_set if getattr(config, name) is not None}
    for name, meaning in layout.asks.items():
        if name not in explicit:
            raise CheckpointError(str(directory), f"its config.json does not say {meaning}", "one", f"set draft.{name}")
    return {name: value for name, value in layout.options.items() if not (name in layout.readings and name in explicit)}


def _agreed(config: M, found: Mapping[str, Any], path: Path) -> M:
    """The options of a recipe and of its checkpoint together, which must not contradict each other."""
    explicit = {name: value for name in config.model_fields_set if (value := getattr(config, name)) is not None}
    ours, theirs = _validated(config, {**found, **explicit}, path), _validated(config, {**explicit, **found}, path)
    for name in sorted(set(found) & set(explicit)):
        mine, its = getattr(ours, name), getattr(theirs, name)
        if mine != its:
            hint = f"leave draft.{name} out of the recipe: the checkpoint knows it"
            raise CheckpointError(str(path), f"{name} is {its!r}, and {mine!r} in the recipe", "one value", hint)
    return ours


def draft_vocabulary(reader: WeightReader, vocab_size: int | None, target: Target) -> DraftVocabulary | None:
    """What the draft's ids mean, from tensor `d2t`: target id = draft id + offset.

    Args:
        reader: The drafter's tensors. Random ones get ids spread evenly over the target's vocabulary.
        vocab_size: Rows of the draft's head; None where it has the target's vocabulary.  # Vd
        target: The model the drafter is for.

    Returns:
        None where the ids are the target's: there is no `d2t`, and vocab_size is none or the target's.

    Raises:
        CheckpointError: An id is outside the target's vocabulary or there twice, or `d2t` and vocab_size disagree.
    """
    full, device = target.info.vocab_size, target.info.device
    if vocab_size is None and reader.has("d2t"):
        hint = "set the size of the draft vocabulary in config.json or the recipe"
        raise CheckpointError(reader.where, "a reduced vocabulary (d2t), whose size is not set", "its size", hint)
    reader.skip("t2d")  # the inverse map; it follows from d2t
    if vocab_size is None or (vocab_size == full and not reader.has("d2t")):
        return None
    if vocab_size > full:
        raise CheckpointError(reader.where, f"a draft vocabulary of {vocab_size}", f"at most the target's {full}")
    ids = torch.arange(vocab_size, device=device)
    if reader.is_random and not reader.has("d2t"):
        return DraftVocabulary(ids * full // vocab_size, full)
    ids = ids + reader.take("d2t", (vocab_size,))
    if ids.is_floating_point() or not 0 <= int(ids.min()) <= int(ids.max()) < full:
        found = f"d2t leads to ids from {ids.min().item()} to {ids.max().item()}"
        raise CheckpointError(reader.where, found, f"whole numbers from 0 to {full - 1}", "d2t holds offsets, not ids")
    if int(ids.bincount().max()) > 1:
        raise CheckpointError(reader.where, "d2t gives two draft ids the same target id", "no repeats")
    return DraftVocabulary(ids, full)


def _directory(weights: str) -> Path:
    path = drafter_path(weights)
    if path.is_dir():
        return path
    try:
        return checkpoint_directory(weights)
    except (CheckpointError, ModelError) as error:
        expected = f"a directory, a hub id, or one of {', '.join(shipped_drafters())}"
        raise CheckpointError(f"draft.weights: {weights}", error.found, expected, error.hint) from error


def _validated(config: M, values: Mapping[str, Any], path: Path) -> M:
    try:
        return type(config).model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "its options"
        raise CheckpointError(str(path), f"{key}: {first['msg']}", "options the source knows") from error

"""Whether a published drafter belongs to a target; vocabularies that differ by their padding are made equal."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from specflow.checkpoint.layout import TargetFacts
from specflow.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.checkpoint.layout import Layout, ReadCheckpoint
    from specflow.target.base import TargetInfo

__all__ = ["fitted", "misfits"]

log = logging.getLogger(__name__)

_PADDING = 1024
"""Embeddings are padded to a multiple of some power of two: vocabularies that differ by less may be the same."""
_READ = ("embed_tokens.weight", "markov_head.markov_w1.weight")
"""Tensors with a row for each token that is read, and after them those with a row for each that is drafted."""
_DRAFTED = re.compile(r"lm_head\.weight|markov_head\.markov_w2\.weight|\d+\.\d+\.weight")


def fitted(read: ReadCheckpoint, info: TargetInfo) -> Mapping[str, Tensor]:
    """The tensors of a published drafter as a target needs them.

    Args:
        read: The checkpoint.
        info: Of the target. Its logits have no row for ids beyond its vocabulary, and its tokenizer none for padding.

    Raises:
        CheckpointError: It was made for another width, depth or vocabulary.
    """
    layout, where = read.layout, f"{read.layout.path} ({read.layout.name})"
    target = TargetFacts(info.name, info.vocab_size, info.hidden_size, info.num_layers)
    for fault in misfits(layout, target):
        hint = "" if layout.target.name is None else f"it says that its target is {layout.target.name}"
        raise CheckpointError(where, fault, f"a drafter for {info.name}", hint)
    theirs, ours = layout.target.vocab_size, info.vocab_size
    if theirs is None or theirs == ours:
        return read.tensors
    log.warning("%s: vocabulary of %d, %s has %d: taken for the same but for padding", where, theirs, info.name, ours)
    return _Resized(read.tensors, ours, "draft_vocab_size" in read.options)


def misfits(layout: Layout, target: TargetFacts) -> Iterator[str]:
    """Why a drafter cannot have been made for a target; nothing where it can."""
    made = layout.target
    pairs = (("states of width", made.hidden_size, target.hidden_size), ("layers:", made.num_layers, target.num_layers))
    for name, theirs, ours in pairs:
        if None not in (theirs, ours) and theirs != ours:
            yield f"made for a target with {name} {theirs}, and {target.name} has {ours}"
    for tap in layout.options.get("taps") or ():
        if target.num_layers is not None and tap >= target.num_layers:
            yield f"it reads layer {tap}, and {target.name} has layers 0 to {target.num_layers - 1}"
    if made.vocab_size is not None and target.vocab_size is not None:
        drafts_all = "draft_vocab_size" not in layout.options and any(_DRAFTED.fullmatch(w.name) for w in layout.wanted)
        short = drafts_all and made.vocab_size < target.vocab_size
        if abs(made.vocab_size - target.vocab_size) >= _PADDING or short:
            yield f"made for a vocabulary of {made.vocab_size} tokens, and {target.name} has {target.vocab_size}"


class _Resized(Mapping[str, "Tensor"]):
    """Tensors whose rows of tokens are cut, or filled with zeros, to a vocabulary."""

    def __init__(self, tensors: Mapping[str, Tensor], vocab_size: int, reduced: bool) -> None:
        self._tensors, self._size, self._reduced = tensors, vocab_size, reduced

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if name not in _READ and (self._reduced or not _DRAFTED.fullmatch(name)):
            return tensor
        if len(tensor) >= self._size:
            return tensor[: self._size]
        filled = tensor.new_zeros(self._size, *tensor.shape[1:])
        filled[: len(tensor)] = tensor
        return filled

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

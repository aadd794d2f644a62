"""A source's network with weights that can be trained, and what of it goes into a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from specflow.draft.borrowed import BorrowedHead
from specflow.draft.shapes import ShapeOptions

if TYPE_CHECKING:
    from pathlib import Path

    from pydantic import BaseModel

    from specflow.draft.base import Needs
    from specflow.draft.nn.confidence import LinearConfidence
    from specflow.draft.nn.corrector import TableCorrector
    from specflow.draft.nn.weights import WeightReader
    from specflow.law import DraftVocabulary

__all__ = ["Trainable", "saved_options"]

_NOT_SAVED = ("weights", "seed", "runtime", "method", "source", "k", *ShapeOptions.model_fields)
"""Options of the recipe: a checkpoint says nothing about them. It drafts chains as well as trees."""


@dataclass(frozen=True, slots=True)
class Trainable:
    """What a source builds for training. Its layers are those that draft.

    Args:
        network: Its layers; their type says how they are run over whole texts.
        options: Of the source, with everything that decides the shape of its tensors.
        reader: Made the layers, tracked; gives their tensors back under the published names.
        needs: Target features that it reads.
        vocabulary: What its ids mean; None: they are the target's.
        corrector: Follows the token before, where there is one.
        confidence: Says whether a token will stand, where there is one.
        layout: The config.json of a checkpoint that other loaders read too; None: the options that are set.
        accompany: Writes what else belongs into a checkpoint's directory.
    """

    network: nn.Module
    options: BaseModel
    reader: WeightReader
    needs: Needs
    vocabulary: DraftVocabulary | None = None
    corrector: TableCorrector | None = None
    confidence: LinearConfidence | None = None
    layout: Mapping[str, Any] | None = None
    accompany: Callable[[Path], None] | None = None

    def modules(self) -> nn.ModuleList:
        """All that is trained, as one module."""
        return nn.ModuleList([part for part in (self.network, self.corrector, self.confidence) if part is not None])

    def parameters(self) -> Iterator[nn.Parameter]:
        """What is trained: all but what is borrowed from the target."""
        borrowed = {
            id(parameter)
            for module in self.network.modules()
            if isinstance(module, BorrowedHead)
            for parameter in module.parameters()
        }
        return (each for each in self.modules().parameters() if id(each) not in borrowed)

    def state(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint."""
        return self.reader.state()

    def config(self) -> Mapping[str, Any]:
        """The config.json of a checkpoint."""
        return saved_options(self.options) if self.layout is None else self.layout


def saved_options(options: BaseModel) -> dict[str, Any]:
    """Options that a checkpoint keeps: those that are set and are not the recipe's."""
    found = options.model_dump(mode="json", exclude_unset=True)
    return {name: value for name, value in found.items() if name not in _NOT_SAVED}

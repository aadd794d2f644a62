"""What all families of drafters take when they are run over whole texts, and where they say how that is done."""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch
from typing import TYPE_CHECKING

from torch import nn

from specflow.errors import GraphError

if TYPE_CHECKING:
    from specflow.draft.trainable import Trainable
    from specflow.train.batch import Drafting

__all__ = ["DraftingOptions", "drafting_of"]


@dataclass(frozen=True, slots=True)
class DraftingOptions:
    """How much is drafted over a text."""

    depth: int  # K: draft positions of a chain
    anchors: int = 64  # chains of a text, where each of them costs a pass of its own (DFlash, DSpark)


@singledispatch
def drafting_of(network: nn.Module, trainable: Trainable, options: DraftingOptions) -> Drafting:
    """How a network is run over whole texts; each family registers its own.

    Raises:
        GraphError: Nobody said how, or the network drafts fewer positions.
    """
    found = f"{type(network).__name__} is not run over whole texts"
    raise GraphError("draft.source", found, "a source whose network can be trained")

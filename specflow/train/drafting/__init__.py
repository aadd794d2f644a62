"""Drafters run over whole texts, a file for each family: what training learns from and what it is measured by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specflow.train.drafting.base import DraftingOptions, drafting_of
from specflow.train.drafting.block import BlockDrafting
from specflow.train.drafting.early_exit import ExitDrafting
from specflow.train.drafting.feature import FeatureDrafting
from specflow.train.drafting.heads import HeadsDrafting
from specflow.train.drafting.language_model import TextDrafting

if TYPE_CHECKING:
    from specflow.draft.trainable import Trainable
    from specflow.train.batch import Drafting

__all__ = [
    "BlockDrafting",
    "DraftingOptions",
    "ExitDrafting",
    "FeatureDrafting",
    "HeadsDrafting",
    "TextDrafting",
    "drafting_for",
]


def drafting_for(trainable: Trainable, options: DraftingOptions) -> Drafting:
    """A trainable drafter over whole texts, by what its network is.

    Raises:
        GraphError: Its network is of no family that is trained, or drafts fewer positions.
    """
    return drafting_of(trainable.network, trainable, options)

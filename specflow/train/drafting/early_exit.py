"""Early exits over whole texts: drafts are made from the target's own states at the exit layer.

With the text's own tokens for drafts, those are the very states of plain decoding, at every draft position alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specflow.draft.lm_shared import AdaptedExit
from specflow.train.batch import Batch, Drafting, Slot
from specflow.train.drafting.base import DraftingOptions, drafting_of
from specflow.train.drafting.windows import chains_apart

if TYPE_CHECKING:
    from specflow.draft.trainable import Trainable

__all__ = ["ExitDrafting"]


class ExitDrafting(Drafting):
    """An early exit over whole texts.

    Args:
        trainable: Its adapter.
        options: How deep it drafts, and how many chains of each text: the target's whole head makes their logits.
    """

    def __init__(self, trainable: Trainable, options: DraftingOptions) -> None:
        super().__init__()
        assert isinstance(trainable.network, AdaptedExit)
        self.exit, self._options = trainable.network, options

    def forward(self, batch: Batch) -> Sequence[Slot]:
        """See `Drafting.forward`."""
        chains = chains_apart(batch, self._options.depth, self._options.anchors)
        left = batch.features.taps[self.exit.layer - 1].flatten(0, 1)[chains.at]  # [K, n, H]
        logits = self.exit(left)
        return [Slot(*each) for each in zip(logits, chains.at, chains.known, strict=True)]


@drafting_of.register(AdaptedExit)
def _of_exit(network: AdaptedExit, trainable: Trainable, options: DraftingOptions) -> ExitDrafting:
    return ExitDrafting(trainable, options)

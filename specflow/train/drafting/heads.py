"""Medusa heads (2401.10774) over whole texts: a chain begins wherever heads can be read.

Head k, from 1, at position t foretells the token at t + 1 + k. The anchor of its chain stands at t + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specflow.draft.nn.medusa import MedusaHeads
from specflow.errors import GraphError
from specflow.train.batch import Batch, Drafting, Slot
from specflow.train.drafting.base import DraftingOptions, drafting_of
from specflow.train.drafting.corrected import Chains, SlotHeads

if TYPE_CHECKING:
    from specflow.draft.trainable import Trainable

__all__ = ["HeadsDrafting"]


class HeadsDrafting(Drafting):
    """Heads over whole texts.

    Args:
        trainable: The heads, and what stands on them.
        options: How deep they draft.

    Raises:
        GraphError: There are fewer heads than positions to draft.
    """

    def __init__(self, trainable: Trainable, options: DraftingOptions) -> None:
        super().__init__()
        heads = trainable.network
        assert isinstance(heads, MedusaHeads)
        if len(heads.blocks) < options.depth:
            found, expected = f"{options.depth} draft positions to train", f"at most its {len(heads.blocks)} heads"
            raise GraphError("draft.num_heads", found, expected, "set num_heads, or train fewer positions")
        self.heads, self.over = heads, SlotHeads(trainable)
        self._depth = options.depth

    def forward(self, batch: Batch) -> Sequence[Slot]:
        """See `Drafting.forward`."""
        text, base = batch.begins[:, 1:].nonzero(as_tuple=True)
        hidden = batch.hidden[text, base]
        features = hidden.to(next(self.heads.parameters(), hidden).dtype)
        marginals = (self.heads.head(k, features) for k in range(self._depth))
        slots: Sequence[Slot] = self.over(batch, Chains.of(batch, text, base + 1, self._depth), marginals)
        return slots


@drafting_of.register(MedusaHeads)
def _of_heads(network: MedusaHeads, trainable: Trainable, options: DraftingOptions) -> HeadsDrafting:
    return HeadsDrafting(trainable, options)

"""What stands on networks that fill all positions at once, over whole texts: corrector and confidence head.

Both read the token before a position. It is the text's own (teacher forcing), so what the corrector's table says of all
of them is looked up once: each look-up has a gradient as large as the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from specflow.train.batch import Batch, Slot

if TYPE_CHECKING:
    from specflow.draft.trainable import Trainable

__all__ = ["Chains", "SlotHeads"]


@dataclass(frozen=True, slots=True)
class Chains:
    """Where n chains of K draft positions stand in their texts."""

    at: Tensor  # [K, n] as in `Slot`: the flat position of the token before each
    known: Tensor  # [K, n] as in `Slot`, and so are those before it in the chain

    @classmethod
    def of(cls, batch: Batch, text: Tensor, anchor: Tensor, depth: int) -> Chains:
        """Chains that begin after their anchors.

        Args:
            batch: The texts.
            text: Of each chain.  # [n]
            anchor: Position of its anchor in the text.  # [n]
            depth: K.
        """
        width = batch.tokens.shape[1]
        before = anchor + torch.arange(depth, device=anchor.device).unsqueeze(1)
        known = batch.judged(text.expand_as(before), before).cumprod(0).bool()
        return cls(text * width + before.clamp_max(width - 1), known)


class SlotHeads(nn.Module):
    """Makes slots from what a network says of each position.

    Args:
        trainable: Has the corrector and the confidence head, or one, or none of them.
    """

    def __init__(self, trainable: Trainable) -> None:
        super().__init__()
        self.corrector, self.confidence = trainable.corrector, trainable.confidence

    def forward(self, batch: Batch, chains: Chains, marginals: Iterable[tuple[Tensor, Tensor]]) -> list[Slot]:
        """Slots of all positions.

        Args:
            batch: The texts.
            chains: Positions in them.
            marginals: Logits and hidden rows of draft positions 1 .. K.  # [n, Vd], [n, H] each
        """
        before = batch.tokens.flatten()[chains.at]  # [K, n]
        rows = None if self.corrector is None else self.corrector.embed(before).unbind(0)
        slots = []
        for k, (logits, hidden) in enumerate(self._corrected(marginals, rows)):
            sure = None
            if self.confidence is not None:
                sure = self.confidence.logits(hidden, before[k], None if rows is None else rows[k])
            slots.append(Slot(logits, chains.at[k], chains.known[k], None, sure))
        return slots

    def _corrected(
        self, marginals: Iterable[tuple[Tensor, Tensor]], rows: Sequence[Tensor] | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The same with the bias of each position in its logits.  # [n, r] each"""
        if self.corrector is None or rows is None:
            yield from marginals
            return
        state = self.corrector.begin(len(rows[0]))
        for (logits, hidden), row in zip(marginals, rows, strict=True):
            bias, state = self.corrector.follow(row, hidden, state)
            yield logits + bias, hidden

"""A language model of its own over whole texts: it knows the target by its text alone.

With the text's own tokens for drafts, a position says the same at every place of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from specflow.draft.lm_new import TextLayers
from specflow.draft.nn.block import Pass
from specflow.draft.nn.rope import RotaryTable
from specflow.train.batch import Batch, Drafting, Slot
from specflow.train.drafting.base import DraftingOptions, drafting_of
from specflow.train.drafting.chain_attention import TextRows
from specflow.train.drafting.windows import chains_apart

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.draft.trainable import Trainable

__all__ = ["TextDrafting"]


class TextDrafting(Drafting):
    """A language model over whole texts.

    Args:
        trainable: Its layers.
        options: How deep it drafts, and how many chains of each text are scored.
    """

    def __init__(self, trainable: Trainable, options: DraftingOptions) -> None:
        super().__init__()
        assert isinstance(trainable.network, TextLayers)
        self.layers, self._options = trainable.network, options
        shape, like = self.layers.shape, self.layers.embedding
        self._rotary = RotaryTable.plain(shape.rope_theta, shape.head_width, like.dtype, like.device)

    def forward(self, batch: Batch) -> Sequence[Slot]:
        """See `Drafting.forward`."""
        chains = chains_apart(batch, self._options.depth, self._options.anchors)
        logits = self.layers.score(self._read(batch, chains.at.flatten())).tensor_split(self._options.depth)
        return [Slot(*each) for each in zip(logits, chains.at, chains.known, strict=True)]

    def _read(self, batch: Batch, needed: Tensor) -> Tensor:
        """What the layers make of some positions, each after the text before it.  # [N] flat -> [N, H]"""
        num_texts, width = batch.tokens.shape
        self._rotary.grow(width)
        positions = torch.arange(width, device=batch.tokens.device).repeat(num_texts)
        shape = self.layers.shape
        cos, sin = self._rotary.at(positions, shape.num_heads + shape.num_kv_heads, shape.num_kv_heads)
        hidden = self.layers.embed(batch.tokens.flatten())
        for index, block in enumerate(self.layers.blocks):
            last = index + 1 == len(self.layers.blocks)
            rows = TextRows(num_texts, needed if last else None)
            shared = Pass(cos, sin, rows, rows, None, split=False)
            change = block.attend(hidden, index, shared)  # type: ignore[operator]
            hidden = (hidden[needed] if last else hidden) + change
            hidden = hidden + block.feed(hidden, shared)  # type: ignore[operator]
        return hidden


@drafting_of.register(TextLayers)
def _of_text_layers(network: TextLayers, trainable: Trainable, options: DraftingOptions) -> TextDrafting:
    return TextDrafting(trainable, options)

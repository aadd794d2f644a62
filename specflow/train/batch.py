"""What training shares: batches of texts with the target's features, and drafts made all over them.

A draft over a text is teacher-forced: n chains of K draft positions, each standing somewhere in an answer. `Slot` k
holds position k of all chains. Every family of drafters makes slots in its own way; losses and measures read them
alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from specflow.law import DraftVocabulary
    from specflow.types import Features

__all__ = ["Batch", "Drafting", "Slot", "TargetLaw"]


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts of prompts and answers, right-padded, and what the target made of them."""

    tokens: Tensor  # [B, T] int64; padding is 0
    valid: Tensor  # [B, T] bool; false for padding
    answer: Tensor  # [B, T] bool; tokens of the answer: what drafts are judged by
    features: Features  # of every position: what the drafter needs, and hidden_post always
    key: int  # of random choices made for this batch

    @property
    def hidden(self) -> Tensor:
        """The target's last state after its final norm, from which its law follows.  # [B, T, H]"""
        assert self.features.hidden_post is not None, "batches always carry hidden_post"
        return self.features.hidden_post

    @property
    def begins(self) -> Tensor:
        """Anchors of rounds: tokens of the answer that are followed by one of it.  # [B, T - 1] bool"""
        return self.answer[:, :-1] & self.answer[:, 1:]

    def labels(self, at: Tensor) -> Tensor:
        """The token after each position; any token at the end of a text.  # [n] flat positions -> [n]"""
        width = self.tokens.shape[1]
        return self.tokens.flatten()[torch.where((at + 1) % width == 0, at, at + 1)]

    def judged(self, row: Tensor, position: Tensor) -> Tensor:
        """Whether the token after a position is in its text, and of the answer.  # [n], [n] -> [n] bool"""
        width = self.tokens.shape[1]
        inside = (position >= 0) & (position + 1 < width)
        return inside & self.answer[row, (position + 1).clamp(0, width - 1)]


@dataclass(frozen=True, slots=True)
class Slot:
    """One draft position of n chains."""

    logits: Tensor  # [n, Vd] over the draft's vocabulary
    at: Tensor  # [n] flat position b * T + t of the text whose following token is drafted here; any where not known
    known: Tensor  # [n] bool; the token is in the text, and of the answer
    hidden: Tensor | None = None  # [n, H] what the next position reads in place of the target's state (EAGLE-1)
    confidence: Tensor | None = None  # [n] log-odds that the token stands, given that those before do


class Drafting(nn.Module):
    """A drafter run over whole texts, with the layers that draft.

    Logits of position k of a chain must be those that the drafter would make after the same text, in a round whose
    earlier draft tokens were the text's own.
    """

    def forward(self, batch: Batch) -> Sequence[Slot]:
        """Draft positions 1 .. K of the same n chains."""
        raise NotImplementedError


class TargetLaw:
    """The target's law at positions of a batch, made where it is asked for.

    Args:
        batch: Gives the target's states.
        head: Of the target.  # [V, H]
        bias: # [V]
        vocabulary: Of the draft; None: the target's.
    """

    def __init__(
        self, batch: Batch, head: Tensor, bias: Tensor | None = None, vocabulary: DraftVocabulary | None = None
    ) -> None:
        self._hidden = batch.hidden.flatten(0, 1)
        self._head, self._bias = head, bias
        self.ids = None if vocabulary is None else vocabulary.to_target
        self._small = head if self.ids is None else head[self.ids]
        self._small_bias = bias if bias is None or self.ids is None else bias[self.ids]

    @torch.no_grad()
    def over_drafted(self, at: Tensor) -> Tensor:
        """Over the draft's vocabulary, made to sum to 1 there (EAGLE-3).  # [n] -> [n, Vd] float32"""
        return F.linear(self._hidden[at], self._small, self._small_bias).float().softmax(-1)

    @torch.no_grad()
    def whole(self, at: Tensor) -> Tensor:
        """Over the target's vocabulary.  # [n] -> [n, V] float32"""
        return F.linear(self._hidden[at], self._head, self._bias).float().softmax(-1)

    @torch.no_grad()
    def best(self, at: Tensor) -> Tensor:
        """The likeliest tokens, as target ids.  # [n] -> [n]"""
        return F.linear(self._hidden[at], self._head, self._bias).argmax(-1)

    def drafted(self, whole: Tensor) -> Tensor:
        """What of a law over the target's vocabulary falls to the draft's tokens.  # [n, V] -> [n, Vd]"""
        return whole if self.ids is None else whole[:, self.ids]

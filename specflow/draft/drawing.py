"""How draft tokens are chosen from draft logits, and the law they were chosen from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from specflow.law import Dense, PointMass, Reduced
from specflow.sampling import draw_tokens, is_greedy, lowest_argmax, warp
from specflow.types import Sampling

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.draft.base import Draw, Uniforms
    from specflow.law import DraftVocabulary
    from specflow.types import Law

__all__ = ["Choices", "Chooser"]

_STREAMS = {"sampled": "draft", "coupled": "target"}


class Chooser:
    """Remembers how each request samples.

    Drafts take a request's temperature and truncation, so that q is near the p it is weighed against; penalties and
    biases act on the target alone. Any q is lossless as long as it is the one that was drawn from.

    Args:
        draw: See `Draw`.
        vocab_size: The target's.  # V
        vocabulary: What draft ids mean, where they are not the target's.
    """

    def __init__(self, draw: Draw, vocab_size: int, vocabulary: DraftVocabulary | None = None) -> None:
        self.draw, self.vocab_size, self.vocabulary = draw, vocab_size, vocabulary
        self._rows: list[Sampling] = []

    def reset(self, batch: int) -> None:
        self._rows = [Sampling()] * batch

    def start(self, row: int, sampling: Sampling) -> None:
        self._rows[row] = sampling

    def select(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[row] for row in rows]

    @property
    def rows(self) -> Sequence[Sampling]:
        """How each row samples.  # [B]"""
        return self._rows

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn: every choice follows from its prefix."""
        return self.draw == "greedy" or all(map(is_greedy, self._rows))

    def law(self, tokens: Tensor, probs: Tensor | None) -> Law:
        """What tokens were chosen from.

        Args:
            tokens: PAD where a row has none.  # [B, N]
            probs: What each was drawn from; None where none was.  # [B, N, Vd]
        """
        if probs is None or self.draw == "coupled":
            return PointMass(tokens, self.vocab_size)  # of coupled draws no rule may ask the law
        return Dense(tokens, probs) if self.vocabulary is None else Reduced(tokens, probs, self.vocabulary)

    def open(self, starts: Sequence[int], depth: int, uniforms: Uniforms, device: torch.device) -> Choices:
        """Begin a chain.

        Args:
            starts: Absolute position of each row's anchor.  # [B]
            depth: Most tokens of the chain.
            uniforms: The round's numbers.
            device: Where logits live.
        """
        numbers = None
        if not self.greedy:
            stream = _STREAMS[self.draw]
            table = [
                [uniforms.uniform(stream, row, start + 1 + step) for step in range(depth)]
                for row, start in enumerate(starts)
            ]
            numbers = torch.tensor(table, dtype=torch.float64, device=device)
        return Choices(self, self._rows, numbers)


def draft_probs(logits: Tensor, rows: Sequence[Sampling]) -> Tensor:
    """What draft tokens are drawn from, as each request samples.

    Logits that overflowed say nothing; such a row drafts token 0 with certainty, which any rule weighs as it is.

    Args:
        logits: Of the draft.  # [B, R, Vd]
        rows: # [B]

    Returns:
        # [B, R, Vd] float32 or wider
    """
    probs = warp(logits, rows)
    lost = ~probs[..., :1].isfinite()  # a softmax that overflowed anywhere is nowhere a number
    probs = probs.masked_fill_(lost, 0.0)
    probs[..., :1] += lost
    return probs


class Choices:
    """One chain while it is chosen, token by token.

    Args:
        chooser: Whose vocabulary and manner.
        rows: Sampling of each row.  # [B]
        numbers: Numbers to draw with, None where every choice is the most likely token.  # [B, depth] float64
    """

    def __init__(self, chooser: Chooser, rows: Sequence[Sampling], numbers: Tensor | None) -> None:
        self._chooser, self._rows, self._numbers = chooser, rows, numbers
        greedy = [is_greedy(row) for row in rows]
        self._certain = torch.tensor(greedy, device=numbers.device) if numbers is not None and any(greedy) else None
        self._probs: list[Tensor] = []
        self.tokens: list[Tensor] = []  # [B] each, target ids
        self.confidences: list[Tensor] = []  # [B] each: the probability the draft gave its own choice

    def choose(self, logits: Tensor, confidence: bool = False) -> Tensor:
        """The next token of every row.

        Args:
            logits: Of the draft, over its own vocabulary.  # [B, Vd]
            confidence: Note the probability of the choice too.

        Returns:
            Target ids.  # [B] int64
        """
        if self._numbers is None:
            ids = lowest_argmax(logits)
            if confidence:
                self.confidences.append(_largest(logits))
        else:
            probs = draft_probs(logits.unsqueeze(1), self._rows).squeeze(1)
            ids = draw_tokens(probs, self._numbers[:, len(self.tokens)])
            self._probs.append(probs)
            if confidence:
                found = probs.gather(1, ids.unsqueeze(1)).squeeze(1)
                # A greedy row's law is one-hot: how sure its draft is shows in the logits, as when it is alone.
                self.confidences.append(
                    found if self._certain is None else torch.where(self._certain, _largest(logits), found)
                )
        vocabulary = self._chooser.vocabulary
        self.tokens.append(ids if vocabulary is None else vocabulary.to_target[ids])
        return self.tokens[-1]

    def law(self, tokens: Tensor) -> Law:
        """What the chain was chosen from.

        Args:
            tokens: The chain, PAD where a row has none.  # [B, N]
        """
        probs = None if self._numbers is None else torch.stack(self._probs[: tokens.shape[1]], dim=1)
        return self._chooser.law(tokens, probs)


def _largest(logits: Tensor) -> Tensor:
    """Probability of the most likely token, at temperature 1.  # [B, Vd] -> [B] float32 or wider"""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (wide.amax(-1) - wide.logsumexp(-1)).exp()

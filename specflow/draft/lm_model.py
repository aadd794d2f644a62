"""A whole language model as a drafting network, with a cache of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from specflow.draft.base import Needs
from specflow.draft.lm_steps import DraftRows, ModelPass, PassSteps
from specflow.draft.pending import TOGETHER
from specflow.law import DraftVocabulary

if TYPE_CHECKING:
    from specflow.draft.base import SourceContext
    from specflow.target.base import Cache, Target
    from specflow.types import Observation

__all__ = ["LanguageModel"]

CHUNK = 512
"""Prompt tokens of one pass."""
_PADDING = 0


class LanguageModel:
    """Drafts with a model that reads the text as the target does.

    Its cache holds all committed tokens but the anchor, like the target's. What it wrote for the accepted part of its
    own latest chain stays; the rest of the news, one or two tokens after a round, runs when the next round opens.
    Rounds that do not draft cost nothing.

    A token that the draft model lacks is read as its first one: the text stands, the draft after it may be poor.

    Args:
        model: The draft model.
        context: Of the target.
        vocabulary: What its ids mean; None: they are the target's, as far as it has them.
    """

    needs = Needs()

    def __init__(self, model: Target, context: SourceContext, vocabulary: DraftVocabulary | None = None) -> None:
        ours, full = model.info.vocab_size, context.target.info.vocab_size
        home = context.target.info.device
        self.most_positions, self.most_depth = model.info.context_length, context.k
        if vocabulary is None and ours < full:
            vocabulary = DraftVocabulary(torch.arange(ours, device=home), full)
        self.vocabulary = vocabulary
        ids = None if vocabulary is None else vocabulary.from_target.clamp_min(0)
        self._pass = ModelPass(model, num_logits=full, home=home, ids=ids)
        self._cache: Cache
        self._texts: list[list[int]] = []  # [B] all tokens of each row, the anchor included
        self._opened: list[bool] = []  # [B] whether rows of `_steps`, from the anchor's on, stand above the boundary
        self._steps: PassSteps | None = None

    def reset(self, batch: int, num_nodes: int, cache: Cache) -> None:
        slots = min(cache.capacity, self.most_positions) + max(num_nodes + 1, TOGETHER)
        self._cache = self._pass.model.new_cache(batch, slots)
        self._texts = [[] for _ in range(batch)]
        self._opened = [False] * batch

    def start(self, row: int, prompt: Sequence[int]) -> None:
        self._cache.clear(row)
        self._texts[row] = list(prompt)
        self._opened[row] = False

    def observe(self, observation: Observation, rows: Sequence[int]) -> None:
        own = observation.own or (0,) * len(rows)
        kept = [0] * len(self._texts)
        for index, row in enumerate(rows):
            if self._opened[row] and self._steps is not None:
                kept[row] = 1 + min(own[index], self._steps.num_chained)
            self._opened[row] = False
            self._texts[row].extend(observation.news(index, len(self._texts[row])))
        if any(kept):
            self._cache.keep(kept)

    def select(self, rows: Sequence[int]) -> None:
        self._cache.select(rows)
        self._texts = [self._texts[row] for row in rows]
        self._opened = [self._opened[row] for row in rows]

    def open(self, anchors: Sequence[int], active: Sequence[bool]) -> PassSteps:
        """See `StepModel.open`. Rows that are not drafted for ride along and stay behind."""
        for row, drafting in enumerate(active):
            assert self._texts[row][-1] == anchors[row], "the anchor is not the last token that was observed"
            if drafting:
                self._read_prompt(row)
        news = [self._news(row) if drafting else [] for row, drafting in enumerate(active)]
        counts = [len(tokens) for tokens in news]
        scored = self._pass.score(self._padded(news, max(counts)), self._cache)
        self._cache.keep([max(0, count - 1) for count in counts])
        above = self._cache.fork()
        above.keep([1] * len(news))
        self._opened = list(active)
        self._steps = PassSteps(self._pass, above, self._cache.lengths, scored.last(counts))
        return self._steps

    def _news(self, row: int) -> list[int]:
        """Tokens of a row that the cache does not hold."""
        return self._texts[row][self._cache.lengths[row] :]

    def _read_prompt(self, row: int) -> None:
        """Of a long piece of news, all but the last token."""
        unread, view = self._news(row), self._cache.row(row)
        if len(unread) <= TOGETHER:
            return
        for begin in range(0, len(unread) - 1, CHUNK):
            part = unread[begin : min(begin + CHUNK, len(unread) - 1)]
            tokens = torch.tensor([part], device=self._pass.home)
            positions = torch.arange(len(part), device=self._pass.home).unsqueeze(0) + view.lengths[0]
            self._pass.prefill(DraftRows(tokens, positions), view)
            view.keep([len(part)])

    def _padded(self, news: Sequence[Sequence[int]], width: int) -> DraftRows:
        padded = [[*tokens, *[_PADDING] * (width - len(tokens))] for tokens in news]
        places = [range(length, length + width) for length in self._cache.lengths]
        tokens, positions = torch.tensor([padded, [list(place) for place in places]], device=self._pass.home)
        return DraftRows(tokens, positions)

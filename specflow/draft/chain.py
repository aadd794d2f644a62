"""The drafter of chains: one token after another, from any network that offers steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from specflow.device import asking_is_free
from specflow.draft.drawing import Choices, Chooser
from specflow.tree import chain
from specflow.types import PAD, DraftBlock

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.draft.base import Needs, SourceContext, Uniforms
    from specflow.draft.steps import StepModel
    from specflow.target.base import Cache
    from specflow.types import DraftBudget, Entry, Observation, Sampling

__all__ = ["ChainDrafter", "ConfidenceHead", "limits_of"]

ConfidenceHead = Callable[["Tensor", "Tensor", int], "Tensor"]
"""(hidden [B, H] of a step, token before it [B], step from 0) -> probability that the step's token stands  # [B]"""


def limits_of(budget: DraftBudget, starts: Sequence[int], model: StepModel) -> list[int]:
    """Deepest draft position of each row: its budget, within the positions and depth the network was made for."""
    room = (max(0, model.most_positions - 1 - start) for start in starts)
    return [min(most, model.most_depth, left) for most, left in zip(budget.tokens, room, strict=True)]


class ChainDrafter:
    """Drafts chains. Batch rows go on together; what a row must not have is PAD.

    Args:
        model: The network.
        context: Target, depth, and how tokens are chosen.
        head: Says how likely a token is to stand before it is chosen; None: the probability of the chosen token serves.
    """

    branches = False

    def __init__(self, model: StepModel, context: SourceContext, head: ConfidenceHead | None = None) -> None:
        info = context.target.info
        self.num_nodes = min(context.k, model.most_depth)
        self._model, self._head, self._wanted = model, head, context.confidence
        self._device = info.device
        self._chooser = Chooser(context.draw, info.vocab_size, model.vocabulary)
        self._cache: Cache

    @property
    def needs(self) -> Needs:
        return self._model.needs

    def reset(self, batch: int, cache: Cache) -> None:
        self._cache = cache
        self._model.reset(batch, self.num_nodes, cache)
        self._chooser.reset(batch)

    def start(self, row: int, prompt: Sequence[int], sampling: Sampling) -> None:
        self._model.start(row, prompt)
        self._chooser.start(row, sampling)

    def observe(self, observation: Observation, rows: Sequence[int]) -> None:
        self._model.observe(observation, rows)

    def select(self, rows: Sequence[int]) -> None:
        self._model.select(rows)
        self._chooser.select(rows)

    @torch.inference_mode()
    def propose(self, anchors: Sequence[int], budget: DraftBudget, uniforms: Uniforms) -> DraftBlock | None:
        starts = self._cache.lengths
        limits = limits_of(budget, starts, self._model)
        depth = max(limits, default=0)
        if depth <= 0:
            return None
        steps = self._model.open(anchors, [limit > 0 for limit in limits])
        choices = self._chooser.open(starts, depth, uniforms, self._device)
        stop = None if budget.stop_below is None else torch.tensor(budget.stop_below, device=self._device)
        own = stop is not None or (self._wanted and self._head is None)
        heads: list[Tensor] = []
        before = torch.tensor(anchors, device=self._device)
        logits, alive = steps.logits, torch.tensor([limit > 0 for limit in limits], device=self._device)
        there = [alive]  # [B] bool each
        for step in range(depth):
            if self._wanted and self._head is not None:
                heads.append(self._head(steps.hidden, before, step))
            before = choices.choose(logits, own)
            if stop is not None:
                alive = alive & (choices.confidences[-1] >= stop)
            if step + 1 == depth or (stop is not None and asking_is_free(self._device) and not bool(alive.any())):
                break
            there.append(alive)
            logits = steps.extend(before.unsqueeze(1)).squeeze(1)
        return self._block(choices, limits, there, heads, steps.entry(before.unsqueeze(1)))

    def _block(
        self,
        choices: Choices,
        limits: Sequence[int],
        there: Sequence[Tensor],
        heads: Sequence[Tensor],
        entry: Entry | None,
    ) -> DraftBlock:
        width = len(choices.tokens)
        tokens = torch.stack(choices.tokens, dim=1)
        ragged = min(limits) < width
        if ragged:
            reach = torch.tensor(limits, device=self._device).unsqueeze(1)
            tokens = tokens.masked_fill(torch.arange(width, device=self._device) >= reach, PAD)
        tokens = tokens.masked_fill(~torch.stack(list(there), dim=1), PAD)
        confidences = heads or choices.confidences
        return DraftBlock(
            tokens=tokens,
            lengths=tuple(min(limit, width) for limit in limits),
            topology=chain(width, self._device),
            law=choices.law(tokens),
            confidence=torch.stack(list(confidences), dim=1) if confidences and self._wanted else None,
            confidence_from="prefix" if heads else "self",
            lengths_from="context" if len(there) == 1 else "prefix",
            entry=entry,
        )

"""The drafter of chains: one token after another, from any network that offers steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from specflow.device import asking_is_free
from specflow.draft.network import NetworkDrafter
from specflow.tree import chain
from specflow.types import PAD, DraftBlock

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.draft.base import SourceContext, Uniforms
    from specflow.draft.drawing import Choices
    from specflow.draft.steps import StepModel
    from specflow.types import DraftBudget, Entry

__all__ = ["ChainDrafter", "ConfidenceHead"]

ConfidenceHead = Callable[["Tensor", "Tensor", int], "Tensor"]
"""(hidden [B, H] of a step, token before it [B], step from 0) -> probability that the step's token stands  # [B]"""


class ChainDrafter(NetworkDrafter):
    """Drafts chains. Batch rows go on together; what a row must not have is PAD.

    Args:
        model: The network.
        context: Target, depth, and how tokens are chosen.
        head: Says how likely a token is to stand before it is chosen; None: the probability of the chosen token serves.
    """

    branches = False

    def __init__(self, model: StepModel, context: SourceContext, head: ConfidenceHead | None = None) -> None:
        self.num_nodes = min(context.k, model.most_depth)
        super().__init__(model, context, self.num_nodes)
        self._head, self._wanted = head, context.confidence

    @torch.inference_mode()
    def propose(self, anchors: Sequence[int], budget: DraftBudget, uniforms: Uniforms) -> DraftBlock | None:
        limits = self._limits(budget)
        depth = max(limits, default=0)
        if depth <= 0:
            return None
        steps = self._model.open(anchors, [limit > 0 for limit in limits])
        choices = self._chooser.open(self._cache.lengths, depth, uniforms, self._device)
        stop = None if budget.stop_below is None else torch.tensor(budget.stop_below, device=self._device)
        own = stop is not None or (self._wanted and self._head is None)
        heads: list[Tensor] = []
        before = torch.tensor(anchors, device=self._device)
        logits, reach = steps.logits, torch.tensor(limits, device=self._device)  # [B]
        there = [] if stop is None else [reach > 0]  # [B] bool each, by step; none where nothing ends a chain early
        for step in range(depth):
            if self._wanted and self._head is not None:
                heads.append(self._head(steps.hidden, before, step))
            before = choices.choose(logits, own)
            if step + 1 == depth:
                break
            if stop is not None:
                alive = there[-1] & (choices.confidences[-1] >= stop) & (reach > step + 1)
                if asking_is_free(self._device) and not bool(alive.any()):
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
        if there:
            tokens = tokens.masked_fill(~torch.stack(list(there), dim=1), PAD)
        elif min(limits) < width:
            reach = torch.tensor(limits, device=self._device).unsqueeze(1)
            tokens = tokens.masked_fill(torch.arange(width, device=self._device) >= reach, PAD)
        confidences = heads or choices.confidences
        return DraftBlock(
            tokens=tokens,
            lengths=tuple(min(limit, width) for limit in limits),
            topology=chain(width, self._device),
            law=choices.law(tokens),
            confidence=torch.stack(list(confidences), dim=1) if confidences and self._wanted else None,
            confidence_from="prefix" if heads else "self",
            lengths_from="prefix" if there else "context",
            entry=entry,
        )

"""Hears what a drafting network says of each step, and makes its drafter draft a given text.

Under rules that weigh p against q the text is not that of plain decoding with the same seed, only its law is. What a
replay needs is how the drafter weighs the text that is there: q of each of its tokens, after the ones before. So the
network is asked in the usual way, its logits are noted, and the drafter gets logits that leave it no choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

import torch

from specflow.sampling import is_greedy, warp

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.draft.steps import Frontier, StepModel, Steps
    from specflow.types import Entry, Sampling

__all__ = ["Heard", "Watchable", "chance_of", "listen"]


@runtime_checkable
class Watchable(Protocol):
    """A drafter on a network that can be heard."""

    def watch(self, wrap: Callable[[StepModel], StepModel]) -> None: ...


class Heard:
    """What the network of one drafter said in the latest round, and the text it is led along, if any.

    Args:
        drafter: On the network.
    """

    def __init__(self, drafter: Watchable) -> None:
        self.model: StepModel
        self.logits: list[Tensor] = []  # [B, Vd] each, by step
        self.text: Tensor | None = None  # [B, K] target ids that the drafter must draft; None leaves it alone
        drafter.watch(self._wrap)

    def begin(self, text: Sequence[Sequence[int]] | None = None) -> None:
        """Forget the latest round, and lead the coming one along a text, ragged ends apart.  # [B][<= K]"""
        self.logits = []
        if text is None:
            self.text = None
            return
        width = max(map(len, text))
        self.text = torch.tensor([[*row, *[0] * (width - len(row))] for row in text])

    def draft_ids(self, tokens: Tensor) -> Tensor:
        """Ids of the network's own vocabulary, -1 where it has none.  # [B, N] -> [B, N]"""
        vocabulary = self.model.vocabulary
        return tokens if vocabulary is None else vocabulary.from_target[tokens.clamp_min(0)]

    def hear(self, logits: Tensor) -> Tensor:
        """Note a step's logits; those that the drafter gets.  # [B, Vd] -> [B, Vd]"""
        step = len(self.logits)
        self.logits.append(logits)
        if self.text is None:
            return logits
        ids = self.draft_ids(self.text[:, step].to(logits.device)).clamp_min(0)
        return torch.full_like(logits, -torch.inf).scatter_(1, ids.unsqueeze(1), 0.0)

    def _wrap(self, model: StepModel) -> StepModel:
        self.model = model
        return cast("StepModel", _Model(model, self))


def listen(drafter: object) -> Heard | None:
    """An ear on a drafter's network; None where it has none."""
    return Heard(drafter) if isinstance(drafter, Watchable) else None


def chance_of(heard: Heard, tokens: Tensor, sampling: Sampling) -> Tensor:
    """The probability that the network gave each token of a chain: its law's, or the largest where nothing is drawn.

    Args:
        heard: One round.
        tokens: The chain.  # [B, N]
        sampling: Of all rows.

    Returns:
        # [B, N] float32 or wider
    """
    ids = heard.draft_ids(tokens)
    found = []
    for step in range(tokens.shape[1]):
        logits = heard.logits[step]
        if is_greedy(sampling):
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            found.append((wide.amax(-1) - wide.logsumexp(-1)).exp())
            continue
        probs = warp(logits.unsqueeze(1), [sampling] * len(logits)).squeeze(1)
        own = probs.gather(1, ids[:, step : step + 1].clamp_min(0)).squeeze(1)
        found.append(own.masked_fill(ids[:, step] < 0, 0.0))
    return torch.stack(found, dim=1)


class _Model:
    """A network that is heard."""

    def __init__(self, model: StepModel, heard: Heard) -> None:
        self._model, self._heard = model, heard

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def open(self, anchors: Sequence[int], active: Sequence[bool]) -> Steps:
        return _Steps(self._model.open(anchors, active), self._heard)


class _Steps:
    """Its steps of one round."""

    def __init__(self, steps: Steps, heard: Heard) -> None:
        self._steps, self._heard = steps, heard
        self.logits = heard.hear(steps.logits)

    @property
    def hidden(self) -> Tensor:
        return self._steps.hidden

    def extend(self, tokens: Tensor, frontier: Frontier | None = None) -> Tensor:
        found = self._steps.extend(tokens, frontier)
        return found if frontier is not None else self._heard.hear(found.squeeze(1)).unsqueeze(1)

    def entry(self, last: Tensor) -> Entry | None:
        return self._steps.entry(last)

"""Figures of a drafter on texts: on held-out ones, and on some that it is trained on, to set beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch

from specflow.train.acceptance import Acceptance, judge
from specflow.train.batch import Drafting, TargetLaw
from specflow.train.sequences import key_of, make_batch, packed

if TYPE_CHECKING:
    from specflow.train.capture import FeatureSource
    from specflow.train.opening import Trainee
    from specflow.train.processes import Processes
    from specflow.train.sequences import Text

__all__ = ["HeldOut", "sample"]


class HeldOut:
    """Texts in fixed batches, with fixed random choices: only the weights change what is measured.

    Args:
        texts: What is measured on; may be none.
        batch_tokens: Most positions of a batch.
        source: Of their features.
        processes: That share the batches.
    """

    def __init__(self, texts: Sequence[Text], batch_tokens: int, source: FeatureSource, processes: Processes) -> None:
        lengths = [len(text) for text in texts]
        self._batches = [[texts[i] for i in batch] for batch in packed(range(len(texts)), lengths, batch_tokens)]
        self._source, self._processes = source, processes

    @torch.no_grad()
    def measure(self, drafting: Drafting, trainee: Trainee) -> dict[str, Any]:
        """Acceptance as `AcceptanceReport` names it, null where nothing is known; empty without texts."""
        if not self._batches:
            return {}
        tables, found = trainee.tables, Acceptance(trainee.depth)
        for number in self._processes.share(len(self._batches)):
            texts = self._batches[number]
            batch = make_batch(texts, self._source.read(texts), key_of("held out", number))
            law = TargetLaw(batch, tables.head, tables.head_bias, trainee.trainable.vocabulary)
            # A block may be wider than what is drafted of it.
            found.add(judge(drafting(batch)[: trainee.depth], law))
        found.sums = self._processes.total(found.sums.to(tables.head.device)).cpu()
        return {name: _numbers(value) for name, value in asdict(found.report()).items()}


def sample(texts: Sequence[Text], tokens: int) -> list[Text]:
    """Texts of so many tokens together, the same ones whatever others there are; at least one."""
    chosen: list[Text] = []
    for text in sorted(texts, key=lambda text: key_of("sample", text.id)):
        if chosen and sum(map(len, chosen)) + len(text) > tokens:
            break
        chosen.append(text)
    return chosen


def _numbers(value: Any) -> Any:
    """Numbers as JSON has them, in as many digits as mean anything."""
    if isinstance(value, tuple):
        return [_numbers(each) for each in value]
    return round(value, 5) if isfinite(value) else None

"""From slots to one loss: which positions count, how much, and by which losses.

Sums are pooled over the tokens of all chains, processes and accumulated batches: a loss is `sum / weight`, both added
up before the division. (A mean for each text first would make tokens of short answers count more.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from specflow.errors import RecipeError
from specflow.train.batch import Batch, Drafting, Slot, TargetLaw
from specflow.train.law_table import LAW_ROWS, LawTable, positions_of
from specflow.train.losses.confidence import confidence
from specflow.train.losses.cross_entropy import cross_entropy
from specflow.train.losses.divergence import divergence, soft_cross_entropy
from specflow.train.losses.feature import feature
from specflow.train.losses.likelihood import lk_hybrid, nla
from specflow.train.losses.rows import RowTerms, row_blocks, row_terms
from specflow.train.losses.total_variation import total_variation
from specflow.train.losses.weights import dpace, exponential_decay, power_decay

if TYPE_CHECKING:
    from specflow.draft.borrowed import TargetTables
    from specflow.law import DraftVocabulary
    from specflow.train.objective_options import LossName, ObjectiveOptions

__all__ = ["Loss", "Objective"]

_LEAST = 1e-12
"""Of a sum of weights that something is divided by."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What a batch adds to the loss."""

    sum: Tensor  # [] with a gradient
    weight: Tensor  # [] what all sums are divided by
    terms: dict[str, Tensor]  # [] the sum of each loss, without its factor and without a gradient


class Objective(nn.Module):
    """A drafting with what judges it.

    Args:
        drafting: Makes the slots; what it holds is trained.
        tables: Of the target.
        vocabulary: Of the draft; None: the target's.
        options: Losses and weights.
    """

    def __init__(
        self, drafting: Drafting, tables: TargetTables, vocabulary: DraftVocabulary | None, options: ObjectiveOptions
    ) -> None:
        super().__init__()
        self.drafting, self.options = drafting, options
        self._tables, self._vocabulary = tables, vocabulary

    def forward(self, batch: Batch) -> Loss:
        """The loss of a batch. Every loss is a weighted mean over the positions that it counts.

        Raises:
            RecipeError: A loss asks for what the drafter does not give.
        """
        slots = self.drafting(batch)
        judged = _Judged(batch, slots, self._law(batch), self._vocabulary, self.options)
        weights = judged.weights()
        pooled = (weights * judged.met).sum()
        # D-PACE's weights grow as the draft does: that is the gradient of the length, so they are not divided out.
        weight = judged.met.sum().to(pooled) if self.options.decay == "dpace" else pooled
        total = weights.new_zeros(())
        terms: dict[str, Tensor] = {}
        for name, factor in self.options.losses.items():
            value, counts = judged.value(name)
            share = 1.0 if counts is judged.met else pooled / (weights * counts).sum().clamp_min(_LEAST)
            term = (weights * torch.where(counts, value, 0.0)).sum() * share
            total, terms[name] = total + factor * term, term.detach()
        return Loss(total, weight, terms)

    def _law(self, batch: Batch) -> TargetLaw:
        return TargetLaw(batch, self._tables.head, self._tables.head_bias, self._vocabulary)


class _Judged:
    """Slots of a batch as [n, K] tensors: which count, and what each loss makes of them."""

    def __init__(
        self,
        batch: Batch,
        slots: Sequence[Slot],
        law: TargetLaw,
        vocabulary: DraftVocabulary | None,
        options: ObjectiveOptions,
    ) -> None:
        self._batch, self._slots, self._law, self._options = batch, slots, law, options
        known = torch.stack([slot.known for slot in slots], 1)
        self._at = torch.stack([slot.at for slot in slots], 1).masked_fill(~known, 0)
        labels = batch.labels(self._at.flatten()).view_as(self._at)
        if vocabulary is not None:
            labels = vocabulary.from_target[labels]
        self._has = labels >= 0  # [n, K] the draft can make the token
        if options.contiguous:
            before = nn.functional.pad(self._has[:, :-1], (1, 0), value=True)
            known = (known & before).cumprod(1).bool()
        self.known = known  # [n, K] may count
        self.met = known & self._has  # [n, K] counts in losses that ask for the token
        self._table = LawTable.over_drafted(law, self._at, known) if _needs_law(options) else None
        self._rows = self._row_terms(labels.clamp_min(0))

    def _row_terms(self, labels: Tensor) -> RowTerms:
        law = self._table
        each = [
            row_terms(slot.logits, labels[:, k], *(() if law is None else (law.probs, law.row_of[:, k])))
            for k, slot in enumerate(self._slots)
        ]
        return RowTerms(*(torch.stack(rows, 1) for rows in zip(*each, strict=True)))

    def weights(self) -> Tensor:
        """w_k of every position, whether it counts or not.  # [n, K]"""
        label, options = self._rows.label, self._options
        if options.decay == "dpace":
            return dpace(label.detach().masked_fill(~self._has, -torch.inf), self.known, options.rate)
        decay = exponential_decay if options.decay == "exponential" else power_decay
        return decay(len(self._slots), options.rate).to(label).expand_as(label)

    def value(self, name: LossName) -> tuple[Tensor, Tensor]:
        """A loss at every position, and where it counts.  # [n, K] twice"""
        if name == "feature":
            return self._feature(), self.known
        if name == "confidence":
            return self._confidence()
        rows = self._rows
        if name == "cross_entropy":
            found = cross_entropy(rows.label)
        elif name == "soft_cross_entropy":
            found = soft_cross_entropy(rows.cross)
        elif name == "divergence":
            found = divergence(rows.cross, self._entropy())
        elif name == "total_variation":
            found = total_variation(rows.overlap)
        elif name == "nla":
            found = nla(rows.overlap)
        else:
            found = lk_hybrid(divergence(rows.cross, self._entropy()), rows.overlap, self._options.eta)
        return found, self.met

    def _entropy(self) -> Tensor:
        assert self._table is not None
        return self._table.entropy().to(self._rows.cross.dtype)

    def _feature(self) -> Tensor:
        """# [n, K]"""
        true = self._batch.hidden.flatten(0, 1)
        drafted = [_given("feature", slot.hidden) for slot in self._slots]
        return torch.stack([feature(each, true[self._at[:, k]].to(each)) for k, each in enumerate(drafted)], 1)

    def _confidence(self) -> tuple[Tensor, Tensor]:
        """# [n, K] twice"""
        odds = torch.stack([_given("confidence", slot.confidence) for slot in self._slots], 1)
        greedy = self._options.confidence_of == "agreement"
        if self._law.ids is None and not greedy:
            return confidence(odds, self._rows.overlap), self.known
        every = self._options.confidence_every
        shown = self.known & ((self._at + self._batch.key) % every == 0)
        if greedy:
            return confidence(odds, self._agreement(shown)), shown
        table = LawTable.of_whole(self._law, self._at, shown)
        overlap = [_overlap(slot.logits, table, k, shown[:, k]) for k, slot in enumerate(self._slots)]
        return confidence(odds, torch.stack(overlap, 1)), shown

    @torch.no_grad()
    def _agreement(self, shown: Tensor) -> Tensor:
        """1 where draft and target find the same token likeliest, else 0.  # [n, K] bool -> [n, K]"""
        positions, row_of = positions_of(self._at, shown)
        best = torch.cat([self._law.best(each) for each in torch.split(positions, LAW_ROWS)])[row_of]
        drafted = torch.stack([slot.logits.argmax(-1) for slot in self._slots], 1)
        return (best == (drafted if self._law.ids is None else self._law.ids[drafted])).to(self._rows.label.dtype)


def _needs_law(options: ObjectiveOptions) -> bool:
    unasked = {"cross_entropy", "feature", *(["confidence"] if options.confidence_of == "agreement" else ())}
    return not set(options.losses) <= unasked


def _given(name: str, found: Tensor | None) -> Tensor:
    if found is None:
        what = "a confidence head" if name == "confidence" else "states that stand for the target's"
        raise RecipeError(f"losses.{name}", "a drafter that has nothing it could judge", what, f"leave {name} out")
    return found


@torch.no_grad()
def _overlap(logits: Tensor, table: LawTable, slot: int, shown: Tensor) -> Tensor:
    """sum_v min(p, q) over the target's vocabulary, where it is shown; else 0.  # [n, Vd], [n] -> [n]"""
    rows = shown.nonzero().squeeze(1)
    found = torch.zeros(len(logits), dtype=table.probs.dtype, device=logits.device)
    for block in row_blocks(torch.Size((len(rows), logits.shape[1])), logits.device):
        chosen = rows[block]
        q = logits[chosen].to(table.probs.dtype).softmax(-1)
        found[chosen] = torch.minimum(table.probs[table.row_of[chosen, slot]], q, out=q).sum(-1)
    return found

"""What of a drafter would be accepted, from slots of held-out texts: the figures that foretell a decoding run.

A token drawn from q stands with probability alpha = sum_v min(p, q) (2211.17192, section 3), q being 0 for what a
reduced vocabulary lacks; at temperature 0 it stands where both laws have the same largest entry. Drafts are made over
the text (teacher-forced), so a chain's probability of standing up to k is the product of its first alphas. Chains that
leave the text are counted up to where they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specflow.train.law_table import LAW_ROWS, positions_of

if TYPE_CHECKING:
    from specflow.train.batch import Slot, TargetLaw

__all__ = ["Acceptance", "AcceptanceReport", "JudgedChains", "judge"]

_SUMS = ("known", "accept", "agree", "reached", "survive", "before", "greedy_survive", "greedy_before")


@dataclass(frozen=True, slots=True)
class JudgedChains:
    """What happens to n chains of K draft tokens."""

    accept: Tensor  # [n, K] float64; alpha, 0 where not known
    agree: Tensor  # [n, K] bool; the draft's arg-max is the target's
    known: Tensor  # [n, K] bool


@dataclass(frozen=True, slots=True)
class AcceptanceReport:
    """Figures of held-out texts. NaN where nothing is known."""

    counts: tuple[int, ...]  # known positions k
    accept_rate: tuple[float, ...]  # mean alpha of position k, whatever became of those before
    conditional: tuple[float, ...]  # of position k, given that those before stand
    survival: tuple[float, ...]  # of all positions up to k
    agreement: tuple[float, ...]  # share of positions k with the target's arg-max
    greedy_conditional: tuple[float, ...]
    greedy_survival: tuple[float, ...]
    length: float  # expected acceptance length tau, the target's own token included
    greedy_length: float  # the same at temperature 0


@torch.no_grad()
def judge(slots: Sequence[Slot], law: TargetLaw) -> JudgedChains:
    """Judge chains by the target's law over its whole vocabulary, which is made once for each position.

    Args:
        slots: Draft positions of the same chains.
        law: Of their batch.
    """
    known = torch.stack([slot.known for slot in slots], 1)
    at = torch.stack([slot.at for slot in slots], 1).masked_fill(~known, 0)
    positions, row_of = positions_of(at, known)
    accept = torch.zeros(known.shape, dtype=torch.float64, device=known.device)
    agree = torch.zeros_like(known)
    for start in range(0, len(positions), LAW_ROWS):
        whole = law.whole(positions[start : start + LAW_ROWS])
        drafted, best = law.drafted(whole), whole.argmax(-1)
        here = known & (row_of >= start) & (row_of < start + LAW_ROWS)
        for k, slot in enumerate(slots):
            for chains in torch.split(here[:, k].nonzero().squeeze(1), LAW_ROWS):
                rows = row_of[chains, k] - start
                q = slot.logits[chains].to(drafted.dtype).softmax(-1)
                top = q.argmax(-1)
                agree[chains, k] = (top if law.ids is None else law.ids[top]) == best[rows]
                accept[chains, k] = torch.minimum(drafted[rows], q, out=q).sum(-1, dtype=torch.float64)
    return JudgedChains(accept, agree, known)


class Acceptance:
    """Sums over batches, from which the figures follow. Processes add up their `sums`.

    Args:
        num_slots: K.
    """

    def __init__(self, num_slots: int) -> None:
        self.sums = torch.zeros(len(_SUMS), num_slots, dtype=torch.float64)

    def add(self, judged: JudgedChains) -> None:
        """Count the chains of a batch."""
        reached = judged.known.cumprod(1).double()
        chances = [judged.accept * reached, judged.agree * reached]
        survival = [each.cumprod(1) for each in chances]
        before = [torch.nn.functional.pad(each[:, :-1], (1, 0), value=1.0) * reached for each in survival]
        parts = [
            judged.known.double(),
            judged.accept * judged.known,
            (judged.agree & judged.known).double(),
            reached,
            survival[0],
            before[0],
            survival[1],
            before[1],
        ]
        self.sums += torch.stack([part.sum(0) for part in parts]).to(self.sums.device)

    def report(self) -> AcceptanceReport:
        """The figures of all that was added."""
        sums = dict(zip(_SUMS, self.sums, strict=True))
        survival, greedy = sums["survive"] / sums["reached"], sums["greedy_survive"] / sums["reached"]
        return AcceptanceReport(
            counts=tuple(int(count) for count in sums["known"]),
            accept_rate=_floats(sums["accept"] / sums["known"]),
            conditional=_floats(sums["survive"] / sums["before"]),
            survival=_floats(survival),
            agreement=_floats(sums["agree"] / sums["known"]),
            greedy_conditional=_floats(sums["greedy_survive"] / sums["greedy_before"]),
            greedy_survival=_floats(greedy),
            length=1.0 + float(survival.sum()),
            greedy_length=1.0 + float(greedy.sum()),
        )


def _floats(values: Tensor) -> tuple[float, ...]:
    return tuple(values.tolist())

"""Why a text is not the baseline's: the rounding of two nearly equal logits, or a bug.

Both questions are put to the target itself, without any drafter and outside all timed sections. The margin is the
gap between the two candidate tokens after a fresh prefill of what both texts share. The control scores the baseline's
own text in passes of many rows and compares its choices with the text: where they differ too, numerics alone explain
a divergence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal

import torch

from specflow.bench.methods import first_divergence
from specflow.handover import Prompt, empty_block, prefill
from specflow.law import PointMass
from specflow.sampling import BatchSampler
from specflow.tree import chain
from specflow.types import DraftBlock

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.bench.methods import Ask
    from specflow.target.base import Cache, Target
    from specflow.types import Sampling

__all__ = ["TIE_MARGINS", "Control", "Divergence", "DivergenceJudge"]

TIE_MARGINS = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.25}
"""Logit gaps that the order of summation alone can close: logits near 20 have steps of 0.125 in bfloat16, so two
roundings reach 0.25; float16 takes the same, because its sums overflow into coarser steps on the way; float32 and
float64 stay orders of magnitude above the differences that passes of one and of many rows show."""

PREFILL_TOKENS = 512
SCORED_ROWS = 32  # rows up to which a row-invariant target promises equal bits


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token that differs from the baseline's."""

    kind: Literal["tie", "bug"]
    margin: float | None  # logit gap of the two candidates; None where one text goes on or a candidate is impossible
    tolerance: float


@dataclass(frozen=True, slots=True)
class Control:
    """The baseline's text against the target's own choices in passes of many rows."""

    agreeing: int  # positions with the same token
    scored: int
    first_mismatch: int | None


class DivergenceJudge:
    """Asks a target why two greedy texts differ. Repetitions ask again, so the answers of a prompt are kept.

    Args:
        target: The model that every recipe of the run used.
        sampling: Of the run; edits of the logits are part of what is compared.
    """

    def __init__(self, target: Target, sampling: Sampling) -> None:
        self._target = target
        self._sampling = sampling
        self._prompt: tuple[int, ...] = ()
        self._known: dict[tuple[int, ...], dict[str, Any]] = {}

    def explain(self, ask: Ask, tokens: Sequence[int], reference: Sequence[int]) -> dict[str, Any]:
        """What a results row says of a diverging text; nothing of a sampled one, whose draws no margin explains.

        Args:
            ask: What both were asked.
            tokens: The text that differs.
            reference: The baseline's.
        """
        at = first_divergence(tokens, reference)
        if at is None or self._sampling.temperature > 0.0:
            return {}
        if ask.prompt != self._prompt:
            self._prompt, self._known = ask.prompt, {}
        key = (*tokens[: at + 1], -1, *reference)
        if key not in self._known:
            found, control = self.judge(ask, tokens, reference), self.control(ask, reference)
            self._known[key] = {
                "divergence": found.kind,
                "divergence_margin": found.margin,
                "divergence_tolerance": found.tolerance,
                "control_agrees": control.agreeing,
                "control_scored": control.scored,
                "control_first_mismatch": control.first_mismatch,
            }
        return self._known[key]

    def judge(self, ask: Ask, tokens: Sequence[int], reference: Sequence[int]) -> Divergence:
        """Tie or bug: whether the two candidates' logits are as close as rounding can bring them."""
        at = first_divergence(tokens, reference)
        assert at is not None
        tolerance = TIE_MARGINS[self._target.info.dtype]
        if at >= min(len(tokens), len(reference)):
            return Divergence("bug", None, tolerance)
        shared = tuple(reference[:at])
        cache = self._target.new_cache(1, len(ask.prompt) + at)
        output, _ = prefill(self._target, cache, Prompt((*ask.prompt, *shared), PREFILL_TOKENS, 0), None)
        sampler = self._sampler(ask)
        sampler.commit([0], [shared])
        info = self._target.info
        scores = sampler.law(output.logits, empty_block(1, info.vocab_size, info.device), [at]).logits[0, -1]  # [V]
        margin = abs(float(scores[tokens[at]]) - float(scores[reference[at]]))
        if not isfinite(margin):
            return Divergence("bug", None, tolerance)
        return Divergence("tie" if margin < tolerance else "bug", margin, tolerance)

    def control(self, ask: Ask, reference: Sequence[int]) -> Control:
        """Score the baseline's text many rows a pass, as a draft that is always right, and compare the choices."""
        chosen = [token for part in self._choices(ask, reference) for token in part.tolist()]
        wrong = [index for index, pair in enumerate(zip(chosen, reference, strict=True)) if pair[0] != pair[1]]
        return Control(len(chosen) - len(wrong), len(chosen), wrong[0] if wrong else None)

    def _choices(self, ask: Ask, reference: Sequence[int]) -> Iterator[Tensor]:
        """The target's choice at every position of the text, in parts.  # [<= SCORED_ROWS]"""
        info, sampler = self._target.info, self._sampler(ask)
        cache = self._target.new_cache(1, len(ask.prompt) + len(reference))
        if len(ask.prompt) > 1:
            prefill(self._target, cache, Prompt(ask.prompt[:-1], PREFILL_TOKENS, 0), None)
        before = [ask.prompt[-1], *reference[:-1]]  # the token in front of each position
        for begin in range(0, len(before), SCORED_ROWS):
            rows = torch.tensor([before[begin : begin + SCORED_ROWS]], device=info.device)  # [1, M]
            logits = self._score(rows, cache)
            block = DraftBlock(
                rows[:, 1:],
                (rows.shape[1] - 1,),
                chain(rows.shape[1] - 1, info.device),
                PointMass(rows[:, 1:], info.vocab_size),
            )
            yield sampler.law(logits, block, [begin]).draw()[0]
            sampler.commit([0], [reference[begin : begin + SCORED_ROWS]])

    def _score(self, rows: Tensor, cache: Cache) -> Tensor:
        width, start = rows.shape[1], cache.lengths[0]
        positions = torch.arange(start, start + width, device=rows.device).unsqueeze(0)
        output = self._target.forward(rows, positions, cache)
        cache.keep([width])
        return output.logits

    def _sampler(self, ask: Ask) -> BatchSampler:
        info = self._target.info
        sampler = BatchSampler(info.vocab_size, info.stop_ids, info.device)
        sampler.reset(1)
        sampler.start(0, ask.sampling(self._sampling), ask.seed, ask.prompt)
        return sampler

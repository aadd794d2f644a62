"""What a change of weights or kernels does to a model's predictions, measured on real text.

Reference and candidate read the same tokens; nothing is generated. Their logits are compared position by position and
dropped, so that memory stays at two sequences' logits however long the text is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["QUALITY_TEXT", "Predict", "Quality", "Threshold", "load_quality_text", "measure_quality"]

QUALITY_TEXT = Path(__file__).resolve().parents[1] / "data" / "quality.jsonl"
"""English prose, documentation and code; sources and licences stand in LICENSE-quality.txt beside it."""

Predict: TypeAlias = Callable[[list[int]], "Tensor | NDArray[np.float32]"]
"""Tokens [R] -> logits [R, V] of the token after each of them."""


@dataclass(frozen=True, slots=True)
class Quality:
    """How far a candidate's predictions are from the reference's."""

    positions: int  # next-token predictions compared
    agreement: float  # share of them with the same most likely token
    reference_perplexity: float
    perplexity: float
    largest_difference: float  # of the log-probability of any token at any position
    mean_difference: float  # absolute, over all tokens and positions

    @property
    def perplexity_change(self) -> float:
        """Relative to the reference; below 0 where the candidate predicts the text better."""
        return self.perplexity / self.reference_perplexity - 1

    def __str__(self) -> str:
        change = f"{self.reference_perplexity:.4g} -> {self.perplexity:.4g} ({self.perplexity_change:+.2%})"
        return (
            f"{self.agreement:.2%} of {self.positions} next tokens agree, perplexity {change}, "
            f"log-probabilities differ by {self.mean_difference:.3g} on average, {self.largest_difference:.3g} at most"
        )


@dataclass(frozen=True, slots=True)
class Threshold:
    """What a candidate must keep of the reference's predictions to pass."""

    agreement: float = 0.95  # least share of next tokens that agree
    perplexity: float = 0.02  # most relative rise of perplexity

    def refusal(self, quality: Quality) -> str:
        """Why a quality does not pass, each figure with its limit; empty where it passes."""
        reasons = []
        # Written so that a figure that is not a number is refused as well.
        if not quality.agreement >= self.agreement:
            reasons.append(f"{quality.agreement:.2%} of next tokens agree, the least is {self.agreement:.2%}")
        if not quality.perplexity_change <= self.perplexity:
            reasons.append(
                f"perplexity changes by {quality.perplexity_change:+.2%}, the most is {self.perplexity:+.2%}"
            )
        return "; ".join(reasons)


@dataclass(slots=True)
class _Sums:
    """Running sums over positions, in double precision."""

    positions: int = 0
    agreeing: int = 0
    reference_loss: float = 0.0
    loss: float = 0.0
    largest: float = 0.0
    mean: float = 0.0

    def add(self, reference: Tensor, candidate: Tensor, following: Tensor) -> None:
        """Count the predictions of one sequence.  # [R, V], [R, V], [R]"""
        rows = torch.arange(len(following))
        self.positions += len(following)
        self.agreeing += int((reference.argmax(-1) == candidate.argmax(-1)).sum())
        reference, candidate = reference.log_softmax(-1), candidate.log_softmax(-1)
        self.reference_loss -= float(reference[rows, following].double().sum())
        self.loss -= float(candidate[rows, following].double().sum())
        # Equal entries differ by 0 even where both are minus infinity.
        gap = torch.where(reference == candidate, 0.0, (reference - candidate).abs())
        # torch's maximum keeps what is not a number, Python's may lose it.
        self.largest = float(torch.maximum(gap.max().double(), torch.tensor(self.largest, dtype=torch.float64)))
        self.mean += float(gap.double().mean(-1).sum())


def measure_quality(reference: Predict, candidate: Predict, sequences: Iterable[Sequence[int]]) -> Quality:
    """Compare two models' predictions of every token of every sequence but the first."""
    sums = _Sums()
    for sequence in sequences:
        tokens = list(sequence)
        if len(tokens) < 2:
            continue
        following = torch.tensor(tokens[1:])
        sums.add(_predicted(reference, tokens), _predicted(candidate, tokens), following)
    assert sums.positions, "no sequence holds two tokens"
    return Quality(
        positions=sums.positions,
        agreement=sums.agreeing / sums.positions,
        reference_perplexity=_exp(sums.reference_loss / sums.positions),
        perplexity=_exp(sums.loss / sums.positions),
        largest_difference=sums.largest,
        mean_difference=sums.mean / sums.positions,
    )


def load_quality_text() -> list[str]:
    """The passages shipped for measuring quality."""
    lines = QUALITY_TEXT.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


def _predicted(predict: Predict, tokens: list[int]) -> Tensor:
    """Logits of every position that another token follows, in float32 on the host.  # [R] -> [R - 1, V]"""
    logits = torch.as_tensor(predict(tokens)).detach().to("cpu", torch.float32)
    assert logits.shape[:-1] == (len(tokens),), f"logits of shape {tuple(logits.shape)} for {len(tokens)} tokens"
    return logits[:-1]


def _exp(loss: float) -> float:
    """e to the loss; infinite where a double cannot hold it."""
    return math.exp(loss) if loss < 709 else (loss if math.isnan(loss) else math.inf)

"""Calibration of confidence heads: whether what a head promises happens as often as it says.

A length policy multiplies confidences into the probability that a whole prefix stands, so that product is what must be
right. Sequential temperature scaling (DSpark, 2607.05147, section 3; methods 8.3) fits one temperature a position, left
to right: T_k minimises the expected calibration error of prod_{i <= k} sigmoid(z_i / T_i) against the survival of the
prefix, with T_1 .. T_{k-1} fixed. A temperature never changes which of two blocks is the more promising at a position.

What happened to a position is one of three things. It stood: survival 1. It was refused, or stands behind a refused
one: survival 0; such a position says nothing of its own conditional rate, but the product it belongs to did fail. It
was not drafted, and nothing before it was refused: unknown, NaN, and left out.
Fit on rounds of a fixed length: a policy that shortens blocks by confidence also chooses which outcomes are seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, nan

import torch
from torch import Tensor

__all__ = [
    "Calibration",
    "area_under_curve",
    "brier_score",
    "calibration_by_position",
    "cumulative_confidence",
    "expected_calibration_error",
    "fit_temperatures",
    "prefix_survival",
]

NUM_BINS = 20
GRID = tuple(exp(log(1.02) * step) for step in sorted(range(-81, 82), key=abs))
"""Temperatures that are tried, 0.2 to 5 in steps of 2 %, those near 1 first: of equals the mildest wins.

At far higher ones every confidence is 1/2, which has no error where half of all blocks stand, and no use.
"""


@dataclass(frozen=True, slots=True)
class Calibration:
    """How well the confidence of one draft position, as the product up to it, foretells survival."""

    position: int  # k, from 1
    count: int  # blocks in which its survival is known
    error: float  # expected calibration error
    area: float  # under the curve of true against false positives; NaN where only one outcome occurred
    brier: float  # mean squared error


def prefix_survival(accepted: Sequence[int], drafted: Sequence[int], num_positions: int) -> Tensor:
    """What became of every position of a run.

    Args:
        accepted: Draft tokens kept of each block.  # [n]
        drafted: Draft tokens verified of each block.  # [n]
        num_positions: K.

    Returns:
        1 where the block stood up to the position, 0 where it did not, NaN where nobody knows.  # [n, K] float64
    """
    kept, tried = torch.tensor([accepted, drafted]).unsqueeze(2)  # [n, 1] each
    stood: Tensor = (torch.arange(num_positions) < kept).double()
    return stood.masked_fill((torch.arange(num_positions) >= tried) & (kept == tried), nan)


def cumulative_confidence(logits: Tensor, temperatures: Sequence[float] = ()) -> Tensor:
    """Probability that each prefix stands, as the head says: the product of its confidences.

    Args:
        logits: Log-odds of every position given that the ones before stand.  # [n, K]
        temperatures: T_1 .. T_K; none are 1.

    Returns:
        # [n, K] float64
    """
    odds = logits.double()
    if temperatures:
        odds = odds / torch.tensor(list(temperatures[: odds.shape[1]]), dtype=odds.dtype, device=odds.device)
    return odds.sigmoid().cumprod(1)


def fit_temperatures(logits: Tensor, survived: Tensor) -> tuple[float, ...]:
    """Sequential temperature scaling.

    Args:
        logits: Log-odds of a head without temperatures, NaN where a position was not drafted.  # [n, K]
        survived: Survival of every prefix: 0 or 1, or its expectation; NaN where unknown.  # [n, K]

    Returns:
        T_1 .. T_K; 1 for a position of which nothing is known.
    """
    assert logits.shape == survived.shape, f"logits {tuple(logits.shape)}, survival {tuple(survived.shape)}"
    before = torch.ones(len(logits), dtype=torch.float64, device=logits.device)
    chosen: list[float] = []
    for odds, outcome in zip(logits.double().unbind(1), survived.double().unbind(1), strict=True):
        errors = [expected_calibration_error(before * (odds / t).sigmoid(), outcome) for t in GRID]
        chosen.append(GRID[errors.index(min(errors))])
        before = before * (odds / chosen[-1]).sigmoid()
    return tuple(chosen)


def expected_calibration_error(probability: Tensor, outcome: Tensor, num_bins: int = NUM_BINS) -> float:
    """Mean distance between promise and outcome, over bins of equal width, weighted by what is in them.

    Args:
        probability: What was promised; NaN is left out.  # [n]
        outcome: What happened, 0 to 1; NaN is left out.  # [n]
        num_bins: Bins of the unit interval.

    Returns:
        0 to 1; 0 of nothing.
    """
    probability, outcome = _known(probability, outcome)
    if not len(probability):
        return 0.0
    bins = (probability * num_bins).long().clamp_max(num_bins - 1)
    gaps = torch.zeros(num_bins, dtype=torch.float64, device=bins.device).index_add_(0, bins, probability - outcome)
    return float(gaps.abs().sum()) / len(probability)


def area_under_curve(probability: Tensor, outcome: Tensor) -> float:
    """Probability that of two blocks with different outcomes the one that stood was promised more; ties count half.

    Args:
        probability: What was promised; NaN is left out.  # [n]
        outcome: What happened; an expectation between 0 and 1 counts in part on both sides.  # [n]

    Returns:
        0 to 1; NaN where only one outcome occurred.
    """
    probability, outcome = _known(probability, outcome)
    values, group = probability.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    stood = torch.zeros_like(values).index_add_(0, group, outcome)
    fell = torch.zeros_like(values).index_add_(0, group, 1.0 - outcome)
    pairs = float(stood.sum() * fell.sum())
    return float((stood * (fell.cumsum(0) - fell / 2)).sum()) / pairs if pairs > 0 else nan


def brier_score(probability: Tensor, outcome: Tensor) -> float:
    """Mean squared error of what was promised; pairs with NaN are left out.  # [n], [n]"""
    probability, outcome = _known(probability, outcome)
    return float((probability - outcome).square().mean())


def calibration_by_position(logits: Tensor, survived: Tensor, temperatures: Sequence[float] = ()) -> list[Calibration]:
    """Quality of every position's cumulative confidence, on rounds that were not used to fit it.

    Args:
        logits: As in `fit_temperatures`.  # [n, K]
        survived: Likewise.  # [n, K]
        temperatures: What to apply; none are 1.
    """
    promised, happened = cumulative_confidence(logits, temperatures), survived.double()
    return [
        Calibration(
            position=k + 1,
            count=len(_known(promised[:, k], happened[:, k])[0]),
            error=expected_calibration_error(promised[:, k], happened[:, k]),
            area=area_under_curve(promised[:, k], happened[:, k]),
            brier=brier_score(promised[:, k], happened[:, k]),
        )
        for k in range(promised.shape[1])
    ]


def _known(probability: Tensor, outcome: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of which both sides are known.  # [n] twice -> [m] float64 twice"""
    known = ~(probability.isnan() | outcome.isnan())
    return probability[known].double(), outcome[known].double()

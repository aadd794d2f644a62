"""A measured profile as SGLang reads it: steps a second by tokens of a pass, and temperatures of the confidence head.

Formats of 0.5.23 (`speculative/dspark_components/dspark_sps.py`, `dspark_sts.py`). A pass over R requests with a budget
of b draft tokens has M = R + b tokens: every request's anchor counts. The flat table is looked up at the largest probe
not above M; the additive one says step time = bias + alpha(R) + theta(M), linear between its probes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from specflow.curves import isotonic

if TYPE_CHECKING:
    from specflow.cost import CostModel

__all__ = ["additive_table", "flat_table", "temperature_file"]

SWEEPS = 50  # of backfitting; the fit of two terms settles in a few
DIGITS = 9


def flat_table(costs: CostModel, k: int, context: int) -> dict[str, Any]:
    """Steps a second by tokens of a pass. Of several passes of one size the slowest counts: that errs on the safe side.

    Args:
        costs: What `specflow profile` measured.
        k: Draft tokens of a round, the bonus token excluded.
        context: Committed tokens of each row.
    """
    slowest: dict[int, float] = {}
    for (_, tokens), seconds in _step_seconds(costs, k, context).items():
        slowest[tokens] = max(seconds, slowest.get(tokens, 0.0))
    probes = sorted(slowest)
    reached = 0.0
    speeds = []
    for tokens in probes:
        reached = max(reached, slowest[tokens])
        speeds.append(round(1.0 / reached, DIGITS))
    return {"sample_batch_tokens": probes, "sample_steps_per_sec": speeds, "max_batch_tokens": probes[-1]}


def additive_table(costs: CostModel, k: int, context: int) -> dict[str, Any]:
    """Step time as a sum of what requests cost and what tokens cost, fitted to all measured batches.

    Both terms are fitted in turn, each to what the other leaves (backfitting), and neither falls as it grows.

    Args:
        costs: What `specflow profile` measured.
        k: Draft tokens of a round, the bonus token excluded.
        context: Committed tokens of each row.
    """
    points = _step_seconds(costs, k, context)
    requests, tokens = (sorted({place[axis] for place in points}) for axis in (0, 1))
    alpha = dict.fromkeys(requests, 0.0)
    theta = dict.fromkeys(tokens, 0.0)
    for _ in range(SWEEPS):
        theta = _fitted(tokens, {place: seconds - alpha[place[0]] for place, seconds in points.items()}, 1)
        alpha = _fitted(requests, {place: seconds - theta[place[1]] for place, seconds in points.items()}, 0)
    bias = max(10.0**-DIGITS, alpha[requests[0]] + theta[tokens[0]])
    return {
        "bias_seconds": round(bias, DIGITS),
        "bs_probes": requests,
        "alpha_seconds": [round(alpha[each] - alpha[requests[0]], DIGITS) for each in requests],
        "m_probes": tokens,
        "theta_seconds": [round(theta[each] - theta[tokens[0]], DIGITS) for each in tokens],
    }


def temperature_file(temperatures: Sequence[float], k: int) -> dict[str, Any] | None:
    """Temperatures of the confidence head, one a draft position; None where they do not reach position k.

    Args:
        temperatures: As calibrated.
        k: Draft tokens of a round.
    """
    if len(temperatures) < k or not k:
        return None
    return {"temperatures": list(temperatures[:k]), "dataset": "", "num_samples": 0, "ece_before": [], "ece_after": []}


def _step_seconds(costs: CostModel, k: int, context: int) -> dict[tuple[int, int], float]:
    """(requests, tokens of the pass) -> seconds of a round that drafts k tokens and verifies that many."""
    found: dict[tuple[int, int], float] = {}
    for batch in sorted({timing.batch for timing in costs.target}):
        drafting = costs.draft_s(k, batch, context) + costs.overhead_s(k, batch)
        for rows in range(1, k + 2):
            found[batch, batch * rows] = drafting + costs.target_s(rows, batch, context)
    return found


def _fitted(probes: Sequence[int], points: Mapping[tuple[int, int], float], axis: int) -> dict[int, float]:
    means = [fmean(value for place, value in points.items() if place[axis] == probe) for probe in probes]
    return dict(zip(probes, isotonic(means), strict=True))

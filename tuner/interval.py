"""Intervals of speed-ups and of shorter latencies, measured prompt by prompt. Plain numbers.

A speed-up is the ratio of two rates, each of all tokens over all seconds of the same prompts, so long texts weigh more
and a prompt that was slow for both counts for neither. Its spread comes from leaving one prompt out at a time (the
jackknife: Quenouille 1956, Tukey 1958), on the logarithm, with Student's quantiles because prompts are few.

A latency is a quantile, of which the jackknife says nothing (Efron 1979), so the ratio of two comes with the interval
of the bootstrap: prompts are drawn with replacement, the same for both. Of 12 prompts it covers the truth nine times in
ten, of 30 as often as it says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, isinf, log, sqrt

import numpy as np

from specflow.measure import quantile
from tuner.result import Interval

__all__ = ["FEWEST_PROMPTS", "SLOW", "Measured", "Work", "latency_s", "ratio_of_latencies", "ratio_of_rates"]

FEWEST_PROMPTS = 3
"""Of fewer prompts nobody can say how far their ratios spread."""
LIKELY = {
    1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23,
    12: 2.18, 15: 2.13, 20: 2.09, 30: 2.04, 60: 2.00,
}  # fmt: skip
"""Degrees of freedom -> the two-sided 95 % quantile of Student's t."""
WIDEST = 700.0  # exp of more is no float
SLOW = 0.95
"""The share of requests that are done within the latency that is told."""
DRAWS = 400


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens made, and the seconds they took."""

    tokens: float
    seconds: float
    spans: tuple[float, ...] = ()  # seconds of each request, first token to last; () is one request, all the seconds

    @property
    def requests_s(self) -> tuple[float, ...]:
        """Seconds of each request, from its first token to its last."""
        return self.spans or (self.seconds,)

    def __add__(self, other: Work) -> Work:
        return Work(self.tokens + other.tokens, self.seconds + other.seconds)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


Measured = Mapping[str, Work]
"""Prompt, or prompts decoded together -> work done on them."""


def ratio_of_rates(mine: Measured, base: Measured) -> Interval | None:
    """How much faster `mine` is than `base` on the prompts that both have; None where there is nothing to compare.

    Args:
        mine: Prompt -> work done on it, over all repetitions.
        base: The same of what it is compared with.
    """
    shared = _shared(mine, base)
    if not shared:
        return None
    whole = _log_ratio(mine, base, shared)
    if len(shared) < FEWEST_PROMPTS:
        return Interval(value=exp(whole), low=0.0, high=exp(whole) * 1e3)
    left_out = [_log_ratio(mine, base, [key for key in shared if key != out]) for out in shared]
    count = len(shared)
    mean = sum(left_out) / count
    error = sqrt((count - 1) / count * sum((each - mean) ** 2 for each in left_out))
    reach = _quantile(count - 1) * error
    assert not isinf(reach)
    return Interval(value=exp(whole), low=exp(max(whole - reach, -WIDEST)), high=exp(min(whole + reach, WIDEST)))


def latency_s(work: Measured) -> float | None:
    """Seconds from first token to last within which 95 % of the requests are done; None of nothing."""
    return quantile([span for each in work.values() if _least(each) > 0 for span in each.requests_s], SLOW)


def ratio_of_latencies(mine: Measured, base: Measured) -> Interval | None:
    """How many times shorter the 95 % latency of `mine` is than that of `base`, on the prompts that both have.

    Args:
        mine: Prompt -> work done on it.
        base: The same of what it is compared with.
    """
    shared = _shared(mine, base)
    if not shared:
        return None
    spans = [np.array([each[key].requests_s for key in shared]) for each in (base, mine)]  # [G, R] each
    value = float(np.quantile(spans[0], SLOW) / np.quantile(spans[1], SLOW))
    if len(shared) < FEWEST_PROMPTS:
        return Interval(value=value, low=0.0, high=value * 1e3)
    drawn = np.random.default_rng(0).integers(len(shared), size=(DRAWS, len(shared)))
    theirs, ours = (np.quantile(each[drawn].reshape(DRAWS, -1), SLOW, axis=1) for each in spans)
    low, high = np.quantile(theirs / ours, (0.025, 0.975))
    return Interval(value=value, low=min(value, float(low)), high=max(value, float(high)))


def _shared(mine: Measured, base: Measured) -> list[str]:
    """Prompts on which both have made something."""
    return [key for key in mine if key in base and min(_least(mine[key]), _least(base[key])) > 0]


def _least(work: Work) -> float:
    return min(work.tokens, work.seconds)


def _log_ratio(mine: Mapping[str, Work], base: Mapping[str, Work], keys: list[str]) -> float:
    one = sum((mine[key] for key in keys), Work(0.0, 0.0))
    other = sum((base[key] for key in keys), Work(0.0, 0.0))
    return log(one.rate / other.rate)


def _quantile(freedom: int) -> float:
    """The value of the table at or below: never too narrow."""
    return LIKELY[max(known for known in LIKELY if known <= freedom)]

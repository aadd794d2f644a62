"""Intervals of speed-ups measured prompt by prompt. Plain numbers.

A speed-up is the ratio of two rates, each of all tokens over all seconds of the same prompts, so long texts weigh more
and a prompt that was slow for both counts for neither. Its spread comes from leaving one prompt out at a time (the
jackknife: Quenouille 1956, Tukey 1958), on the logarithm, with Student's quantiles because prompts are few.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, isinf, log, sqrt

from tuner.result import Interval

__all__ = ["FEWEST_PROMPTS", "Work", "ratio_of_rates"]

FEWEST_PROMPTS = 3
"""Of fewer prompts nobody can say how far their ratios spread."""
LIKELY = {
    1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23,
    12: 2.18, 15: 2.13, 20: 2.09, 30: 2.04, 60: 2.00,
}  # fmt: skip
"""Degrees of freedom -> the two-sided 95 % quantile of Student's t."""
WIDEST = 700.0  # exp of more is no float


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens made, and the seconds they took."""

    tokens: float
    seconds: float

    def __add__(self, other: Work) -> Work:
        return Work(self.tokens + other.tokens, self.seconds + other.seconds)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def ratio_of_rates(mine: Mapping[str, Work], base: Mapping[str, Work]) -> Interval | None:
    """How much faster `mine` is than `base` on the prompts that both have; None where there is nothing to compare.

    Args:
        mine: Prompt -> work done on it, over all repetitions.
        base: The same of what it is compared with.
    """
    shared = [key for key in mine if key in base and min(_least(mine[key]), _least(base[key])) > 0]
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


def _least(work: Work) -> float:
    return min(work.tokens, work.seconds)


def _log_ratio(mine: Mapping[str, Work], base: Mapping[str, Work], keys: list[str]) -> float:
    one = sum((mine[key] for key in keys), Work(0.0, 0.0))
    other = sum((base[key] for key in keys), Work(0.0, 0.0))
    return log(one.rate / other.rate)


def _quantile(freedom: int) -> float:
    """The value of the table at or below: never too narrow."""
    return LIKELY[max(known for known in LIKELY if known <= freedom)]

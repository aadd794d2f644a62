"""What decides: the objectives of a run in their order, and how far one contestant is ahead of another. No torch.

A race measures throughput and latency; memory is known beforehand. Drafting has to beat plain decoding in the first
objective that is measured: no drafter takes less memory than none. Among those that do, the objectives decide one after
the other; each leaves whom it cannot tell from the best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tuner.interval import Measured, ratio_of_latencies, ratio_of_rates
from tuner.result import Interval
from tuner.scoring import OBJECTIVES, Score
from tuner.space import Candidate

__all__ = ["ALIKE", "EVEN", "Aims", "alike", "even", "gain_of", "hurdle_of", "sort_key"]

AHEAD = {"throughput": ratio_of_rates, "latency": ratio_of_latencies}
"""By objective that a race measures: how many times better one is than another."""
ALIKE = 0.01
"""Predictions, and amounts of memory, that differ by a smaller share are one: a run would not tell them apart."""
EVEN = Interval(value=1.0, low=1.0, high=1.0)


@dataclass(frozen=True, slots=True)
class Aims:
    """What decides, what matters most first."""

    objectives: tuple[str, ...] = ("throughput",)
    memory: Mapping[Candidate, int] = field(default_factory=dict)  # bytes beyond what plain decoding takes

    @property
    def hurdle(self) -> str:
        """The objective in which drafting has to beat plain decoding."""
        return hurdle_of(self.objectives)

    def ahead(self, mine: Measured, base: Measured, objective: str = "") -> Interval | None:
        """How many times better `mine` is than `base` in an objective that is measured, else in the hurdle."""
        return AHEAD[objective or self.hurdle](mine, base)

    def best(
        self, objective: str, among: Sequence[Candidate], measured: Mapping[Candidate, Measured]
    ) -> list[Candidate]:
        """Who cannot be told from the best in one objective."""
        if objective not in AHEAD:
            least = min(self.memory.get(each, 0) for each in among)
            return [each for each in among if alike(self.memory.get(each, 0), least)]
        ups = {each: self.ahead(measured[each], measured[among[0]], objective) for each in among}
        first = max(among, key=lambda each: up.value if (up := ups[each]) is not None else 0.0)
        return [each for each in among if each == first or even(self.ahead(measured[each], measured[first], objective))]


def hurdle_of(objectives: Sequence[str]) -> str:
    """The first objective that a race measures; throughput where none is named."""
    return next((name for name in objectives if name in AHEAD), "throughput")


def even(ahead: Interval | None) -> bool:
    """Whether two cannot be told apart."""
    return ahead is not None and ahead.low <= 1.0 <= ahead.high


def alike(one: float, other: float) -> bool:
    """Whether two figures are one."""
    return abs(one - other) <= ALIKE * max(abs(one), abs(other))


def gain_of(score: Score, plain: Score, objective: str) -> float:
    """How many times better than plain decoding a prediction is, in an objective that is measured."""
    if objective == "latency":
        return plain.latency_p95_s / score.latency_p95_s if score.latency_p95_s > 0 else 0.0
    return score.throughput / plain.throughput if plain.throughput > 0 else 0.0


def sort_key(score: Score, objectives: Sequence[str]) -> tuple[float, ...]:
    """Orders predictions by the objectives, the best first; what has to be beaten stands in for what is not named."""
    names = dict.fromkeys((*objectives, hurdle_of(objectives)))
    return tuple(OBJECTIVES[name].of(score) * (-1.0 if OBJECTIVES[name].better(1.0, 0.0) else 1.0) for name in names)

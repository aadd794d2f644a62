"""What predictions say beside the best: which choices matter, what is on the Pareto front, where drafting breaks even.

Plain numbers; no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from statistics import fmean, pvariance
from typing import Protocol

from tuner.result import BreakEven, Importance
from tuner.scoring import OBJECTIVES, Score
from tuner.space import Candidate

__all__ = ["Prices", "break_even_of", "importances", "pareto"]


class Prices(Protocol):
    """The price of a round; `specflow.cost.CostModel` is one."""

    def plain_steps(self, depth: int, batch: int, context: int) -> float: ...

    def break_even(self, depth: int, batch: int, context: int) -> float | None: ...


def importances(scores: Mapping[Candidate, Score], objective: str = "throughput") -> list[Importance]:
    """How much of the spread of a predicted objective each choice explains by itself, the largest share first.

    Of a choice: the variance of the means of its values, over the whole variance (a first-order Sobol index). The
    method is judged over all candidates, a knob among those of its recipe.
    """
    rates = {each: OBJECTIVES[objective].of(score) for each, score in scores.items()}
    found = []
    share = _share([(each.recipe, rate) for each, rate in rates.items()])
    if share is not None:
        found.append(Importance(scope="method", key="recipe", share=share))
    for recipe in dict.fromkeys(each.recipe for each in rates):
        mine = {each: rate for each, rate in rates.items() if each.recipe == recipe and each.settings}
        for key in dict.fromkeys(key for each in mine for key in each.values):
            share = _share([(each.values.get(key), rate) for each, rate in mine.items()])
            if share is not None:
                found.append(Importance(scope=recipe, key=key, share=share))
    return sorted(found, key=lambda each: (each.scope != "method", -each.share, each.scope, each.key))


def _share(pairs: Sequence[tuple[Hashable, float]]) -> float | None:
    """Variance between groups over all variance; None where there is nothing to compare."""
    groups: dict[Hashable, list[float]] = defaultdict(list)
    for group, value in pairs:
        groups[group].append(value)
    whole = pvariance([value for _, value in pairs]) if len(pairs) > 1 else 0.0
    if len(groups) < 2 or whole <= 0.0:
        return None
    mean = fmean(value for _, value in pairs)
    between = sum(len(values) * (fmean(values) - mean) ** 2 for values in groups.values()) / len(pairs)
    return min(1.0, between / whole)


def pareto(scores: Mapping[Candidate, Score], objectives: Sequence[str]) -> set[Candidate]:
    """Candidates that no other one beats in one objective without losing in another."""
    chosen = [OBJECTIVES[name] for name in objectives]
    values = {each: [objective.of(score) for objective in chosen] for each, score in scores.items()}

    def beats(one: Candidate, other: Candidate) -> bool:
        pairs = list(zip(chosen, values[one], values[other], strict=True))
        never_worse = not any(objective.better(theirs, mine) for objective, mine, theirs in pairs)
        return never_worse and any(objective.better(mine, theirs) for objective, mine, theirs in pairs)

    return {each for each in scores if not any(beats(other, each) for other in scores)}


def break_even_of(
    candidate: Candidate, prices: Prices, place: tuple[int, int], reached: tuple[float | None, float | None, bool]
) -> BreakEven:
    """From which acceptance on a candidate's depth pays, and what it reached.

    Args:
        candidate: With a K of 1 or more.
        prices: Of its rounds.
        place: Batch and context.
        reached: Acceptance length and speed-up, and whether they were measured.
    """
    length, speed_up, measured = reached
    return BreakEven(
        recipe=candidate.recipe,
        k=candidate.k,
        plain_steps=prices.plain_steps(candidate.k, *place),
        chance=prices.break_even(candidate.k, *place),
        acceptance_length=length,
        speed_up=speed_up,
        measured=measured,
    )

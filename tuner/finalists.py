"""Which candidates are run for real: the best few by prediction, of several methods, and what nobody could predict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tuner.scoring import Objective, Score
from tuner.space import Candidate

__all__ = ["finalists"]

WORTH_A_RUN = 0.97
"""A candidate that promises less than this share of plain throughput is not run, unless it is the best there is."""
ALIKE = 0.01
"""Predictions that differ by a smaller share are one: a run would not tell them apart either."""
METHODS = 3
"""Recipes whose best candidate takes part before a second one of any recipe does."""
UNPREDICTED = 3


def finalists(
    scores: Mapping[Candidate, Score],
    plain: Score | None,
    objective: Objective,
    unpredicted: Sequence[Candidate] = (),
    most: int = 4,
) -> list[Candidate]:
    """Who takes part in the race.

    Args:
        scores: Predictions.
        plain: That of plain decoding.
        objective: What is wanted most.
        unpredicted: Candidates that could not be replayed; a few of them take part as they are.
        most: Predicted candidates at most.
    """
    order = sorted(scores, key=lambda each: objective.of(scores[each]), reverse=objective.direction == "maximize")
    least = WORTH_A_RUN * plain.throughput if plain is not None else 0.0
    worth = [each for each in order if scores[each].throughput >= least] or order[:1]
    kept = _told_apart(worth, scores, objective)
    first_of = {each.recipe: each for each in reversed(kept)}
    chosen = [each for each in kept if first_of[each.recipe] == each][: min(METHODS, most)]
    chosen += [each for each in kept if each not in chosen][: most - len(chosen)]
    return [*chosen, *(each for each in unpredicted[:UNPREDICTED] if each not in chosen)]


def _told_apart(order: Sequence[Candidate], scores: Mapping[Candidate, Score], objective: Objective) -> list[Candidate]:
    """Of candidates of one recipe that promise about the same, the one with the smallest K and the simplest policy."""
    alike: list[list[Candidate]] = []
    for each in order:
        value = objective.of(scores[each])
        group = next(
            (g for g in alike if g[0].recipe == each.recipe and _near(objective.of(scores[g[0]]), value)), None
        )
        if group is None:
            alike.append([each])
        else:
            group.append(each)
    return [min(group, key=lambda each: (each.k, each.policy != "fixed", each.label)) for group in alike]


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= ALIKE * max(abs(one), abs(other))

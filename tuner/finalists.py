"""Which candidates are run for real: the best few by prediction, of several methods, and what nobody could predict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tuner.aims import alike, gain_of, hurdle_of, sort_key
from tuner.scoring import OBJECTIVES, Score
from tuner.space import Candidate

__all__ = ["finalists"]

WORTH_A_RUN = 0.97
"""A candidate that promises less than this share of what plain decoding has is not run, unless it is the best."""
METHODS = 3
"""Recipes whose best candidate takes part before a second one of any recipe does."""
UNPREDICTED = 3
Scores = Mapping[Candidate, Score]


def finalists(
    scores: Scores,
    plain: Score | None,
    objectives: Sequence[str],
    unpredicted: Sequence[Candidate] = (),
    most: int = 4,
) -> list[Candidate]:
    """Who takes part in the race.

    Args:
        scores: Predictions.
        plain: That of plain decoding.
        objectives: What is wanted, what matters most first. The best of each further one takes part too.
        unpredicted: Candidates that could not be replayed; a few of them take part as they are.
        most: Predicted candidates at most.
    """
    order = sorted(scores, key=lambda each: sort_key(scores[each], objectives))
    hurdle = hurdle_of(objectives)
    worth = [each for each in order if plain is None or gain_of(scores[each], plain, hurdle) >= WORTH_A_RUN]
    worth = worth or sorted(order, key=lambda each: sort_key(scores[each], (hurdle,)))[:1]
    kept = _told_apart(worth, scores, objectives)
    first_of = {each.recipe: each for each in reversed(kept)}
    chosen = kept[:1]
    for objective in objectives[1:] if kept else ():
        chosen.append(min(kept, key=lambda each: sort_key(scores[each], (objective, *objectives))))
    chosen += [each for each in kept if first_of[each.recipe] == each][:METHODS]
    chosen = list(dict.fromkeys([*chosen, *kept]))[:most]
    return [*chosen, *(each for each in unpredicted[:UNPREDICTED] if each not in chosen)]


def _told_apart(order: Sequence[Candidate], scores: Scores, objectives: Sequence[str]) -> list[Candidate]:
    """Of candidates of one recipe that promise about the same, the one with the smallest K and the simplest policy."""
    groups: list[list[Candidate]] = []
    for each in order:
        group = next((g for g in groups if g[0].recipe == each.recipe and _near(scores, g[0], each, objectives)), None)
        if group is None:
            groups.append([each])
        else:
            group.append(each)
    return [min(group, key=lambda each: (each.k, each.policy != "fixed", each.label)) for group in groups]


def _near(scores: Scores, one: Candidate, other: Candidate, objectives: Sequence[str]) -> bool:
    names = (*objectives, hurdle_of(objectives))
    return all(alike(OBJECTIVES[name].of(scores[one]), OBJECTIVES[name].of(scores[other])) for name in names)

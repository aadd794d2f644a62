"""Which contestant wins: the fastest beyond the noise; of those that cannot be told apart, the simplest. No torch.

Speculation has to beat plain decoding by more than the noise and by more than a margin; where it does not, plain
decoding is the answer, and a good one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specflow.recipe import Recipe
from specflow.recipe_draft import SourceSection
from tuner.interval import Work, ratio_of_rates
from tuner.result import Interval
from tuner.space import Candidate

__all__ = ["MARGIN", "Effort", "Measured", "Verdict", "choose", "effort", "told_apart"]

MARGIN = 0.02
"""A speed-up of less than this is not worth a second model, a second cache and a second thing to go wrong."""
AXES = ("history", "skipped_layers", "target_features", "small_model")
"""Where drafts come from, what needs least first."""

Effort = tuple[int, int, int, int, str]
Measured = Mapping[str, Work]
"""Prompt -> work done on it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who won, by how much, and who could not be told from it."""

    winner: Candidate
    speed_up: Interval  # over plain decoding
    reason: str
    ties: tuple[Candidate, ...] = ()


def effort(candidate: Candidate, recipe: Recipe) -> Effort:
    """How much there is to a candidate: sources, where they come from, a policy that decides, then K."""
    draft = recipe.draft
    if draft is None or draft.k == 0:
        return 0, 0, 0, 0, candidate.recipe
    axes = [_axis(part) for part in draft.parts]
    return len(axes), max(axes), int(recipe.length.policy != "fixed"), draft.k, candidate.recipe


def _axis(part: SourceSection) -> int:
    return AXES.index(part.info.axis)


def choose(measured: Mapping[Candidate, Measured], plain: Candidate, efforts: Mapping[Candidate, Effort]) -> Verdict:
    """The answer from measured work.

    Args:
        measured: Contestant -> its work, plain decoding among them.
        plain: Which of them is plain decoding.
        efforts: Of each; see `effort`.
    """
    base = measured[plain]
    ups = {each: ratio_of_rates(work, base) for each, work in measured.items() if each != plain}
    known = {each: up for each, up in ups.items() if up is not None}
    even = Interval(value=1.0, low=1.0, high=1.0)
    if not known:
        return Verdict(plain, even, "nothing that drafts could be measured: do not speculate")
    fastest = max(known, key=lambda each: known[each].value)
    beaten = [each for each, up in known.items() if up.low > 1.0 and up.value > 1.0 + MARGIN]
    if not beaten:
        return Verdict(plain, even, _why_plain(fastest, known[fastest]))
    best = max(beaten, key=lambda each: known[each].value)
    ties = [each for each in beaten if each == best or _even(measured[each], measured[best])]
    winner = min(ties, key=lambda each: efforts[each])
    others = tuple(sorted((each for each in ties if each != winner), key=lambda each: efforts[each]))
    return Verdict(winner, known[winner], _why(winner, known[winner], others), others)


def _even(one: Measured, other: Measured) -> bool:
    """Whether two cannot be told apart on the prompts both decoded."""
    ratio = ratio_of_rates(one, other)
    return ratio is not None and ratio.low <= 1.0 <= ratio.high


def _why(winner: Candidate, up: Interval, others: Sequence[Candidate]) -> str:
    won = f"{winner.label} decodes {up.value:.2f} times as fast as plain decoding ({up.low:.2f} to {up.high:.2f})"
    if not others:
        return won
    names = ", ".join(each.label for each in others)
    return f"{won}; {names} could not be told from it, and it is the simplest of them"


def _why_plain(fastest: Candidate, up: Interval) -> str:
    gain = f"{fastest.label} came nearest: {up.value:.2f} times plain speed ({up.low:.2f} to {up.high:.2f})"
    if up.high < 1.0:
        return f"every drafter is slower than plain decoding here; {gain}. Do not speculate."
    return f"nothing beats plain decoding by more than the noise and {MARGIN:.0%}; {gain}. Do not speculate."


def told_apart(measured: Mapping[Candidate, Measured], plain: Candidate) -> bool:
    """Whether the fastest contestant, plain decoding among them, is clear of all others."""
    base = measured[plain]
    best, value = plain, 1.0
    for each, work in measured.items():
        up = ratio_of_rates(work, base)
        if up is not None and up.value > value:
            best, value = each, up.value
    return not any(_even(work, measured[best]) for each, work in measured.items() if each != best)

"""Which contestant wins: the best beyond the noise; of those about as fast that noise may have ordered, the simplest.

No torch. Speculation has to beat plain decoding, in throughput or latency as the run's objectives say, by more than the
noise and by more than a margin; where it does not, plain decoding is the answer, and a good one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specflow.recipe import Recipe
from specflow.recipe_draft import SourceSection
from tuner.aims import EVEN, Aims, even
from tuner.interval import Measured, latency_s, ratio_of_rates
from tuner.result import Interval
from tuner.space import Candidate

__all__ = ["MARGIN", "SIMPLICITY", "SLACK", "Effort", "Measured", "Verdict", "choose", "effort", "told_apart"]

MARGIN = 0.02
"""A speed-up of less than this is not worth a second model, a second cache and a second thing to go wrong."""
SLACK = 0.03
"""What simplicity may cost: one that measured slower by more is not taken, though noise could have made it so."""
SIMPLICITY = "simplicity"
"""What decides where no objective does."""
AXES = ("history", "skipped_layers", "target_features", "small_model")
"""Where drafts come from, what needs least first."""

Effort = tuple[int, int, int, int, str]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who won, by how much, and who could not be told from it."""

    winner: Candidate
    speed_up: Interval  # throughput, over plain decoding
    reason: str
    ties: tuple[Candidate, ...] = ()
    gain: Interval = EVEN  # how many times better than plain decoding in the objective that had to be won
    decided_by: str = "throughput"  # the objective that left one contestant, or simplicity


def effort(candidate: Candidate, recipe: Recipe) -> Effort:
    """How much there is to a candidate: sources, where they come from, what decides its length, then K."""
    draft = recipe.draft
    if draft is None or draft.k == 0:
        return 0, 0, 0, 0, candidate.recipe
    axes = [_axis(part) for part in draft.parts]
    return len(axes), max(axes), _rules(recipe), draft.k, candidate.recipe


def _rules(recipe: Recipe) -> int:
    """What decides the length beside k."""
    return int(recipe.length.policy != "fixed") + int(recipe.length.until is not None)


def _axis(part: SourceSection) -> int:
    return AXES.index(part.info.axis)


def choose(
    measured: Mapping[Candidate, Measured],
    plain: Candidate,
    efforts: Mapping[Candidate, Effort],
    aims: Aims = Aims(),  # noqa: B008 - frozen
) -> Verdict:
    """The answer from measured work.

    Args:
        measured: Contestant -> its work, plain decoding among them.
        plain: Which of them is plain decoding.
        efforts: Of each; see `effort`.
        aims: What decides.
    """
    base = measured[plain]
    ups = {each: aims.ahead(work, base) for each, work in measured.items() if each != plain}
    known = {each: up for each, up in ups.items() if up is not None}
    if not known:
        return _plain(plain, "nothing that drafts could be measured: do not speculate", aims)
    beaten = [each for each, up in known.items() if up.low > 1.0 and up.value > 1.0 + MARGIN]
    if not beaten:
        best = max(known, key=lambda each: known[each].value)
        return _plain(plain, _why_plain(best, known[best], aims), aims)
    ties, decided_by = _told(beaten, measured, aims)
    winner = min(_near(ties, known), key=lambda each: efforts[each])
    others = tuple(sorted((each for each in ties if each != winner), key=lambda each: efforts[each]))
    reason = _why(winner, known[winner], (measured[winner], base), aims) + _why_it(len(beaten), others, decided_by)
    speed_up = ratio_of_rates(measured[winner], base) or EVEN
    return Verdict(winner, speed_up, reason, others, known[winner], decided_by)


def _plain(plain: Candidate, reason: str, aims: Aims) -> Verdict:
    return Verdict(plain, EVEN, reason, decided_by=aims.hurdle)


def _told(
    beaten: Sequence[Candidate], measured: Mapping[Candidate, Measured], aims: Aims
) -> tuple[list[Candidate], str]:
    """Who is left when the objectives have decided in their order, and the last that told anybody apart."""
    left, decided_by = list(beaten), aims.hurdle
    for objective in aims.objectives:
        kept = aims.best(objective, left, measured)
        decided_by = objective if len(kept) < len(left) else decided_by
        left = kept
    return left, decided_by if len(left) == 1 else SIMPLICITY


def _near(ties: Sequence[Candidate], ups: Mapping[Candidate, Interval]) -> list[Candidate]:
    """Of those that cannot be told apart, who measured about as well as the best."""
    best = max(ups[each].value for each in ties)
    return [each for each in ties if ups[each].value >= best * (1.0 - SLACK)]


def _why(winner: Candidate, up: Interval, works: tuple[Measured, Measured], aims: Aims) -> str:
    """What it gains, in the objective in which it had to beat plain decoding."""
    between = f"({up.low:.2f} to {up.high:.2f})"
    if aims.hurdle == "throughput":
        return f"{winner.label} decodes {up.value:.2f} times as fast as plain decoding {between}"
    mine, plain = (latency_s(work) or 0.0 for work in works)
    return (
        f"with {winner.label} 95 % of the requests are done within {mine:.2f} s of their first token, "
        f"{plain:.2f} s with plain decoding: {up.value:.2f} times shorter {between}"
    )


def _why_it(num_beaten: int, others: Sequence[Candidate], decided_by: str) -> str:
    """Why this one of all that beat plain decoding."""
    if others:
        names = ", ".join(each.label for each in others)
        return f"; {names} could not be told from it; of all within {SLACK:.0%} of the best it is the simplest"
    return f"; {decided_by} decided among {num_beaten} that beat plain decoding" if num_beaten > 1 else ""


def _why_plain(best: Candidate, up: Interval, aims: Aims) -> str:
    speed = "plain speed" if aims.hurdle == "throughput" else "as short a latency"
    gain = f"{best.label} came nearest: {up.value:.2f} times {speed} ({up.low:.2f} to {up.high:.2f})"
    if up.high < 1.0:
        return f"every drafter is slower than plain decoding here; {gain}. Do not speculate."
    return f"nothing beats plain decoding by more than the noise and {MARGIN:.0%}; {gain}. Do not speculate."


def told_apart(
    measured: Mapping[Candidate, Measured],
    plain: Candidate,
    aims: Aims = Aims(),  # noqa: B008 - frozen
) -> bool:
    """Whether the best contestant, plain decoding among them, is clear of all others."""
    base = measured[plain]
    best, value = plain, 1.0
    for each, work in measured.items():
        up = aims.ahead(work, base)
        if up is not None and up.value > value:
            best, value = each, up.value
    return not any(even(aims.ahead(work, measured[best])) for each, work in measured.items() if each != best)

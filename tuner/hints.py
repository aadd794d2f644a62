"""What the shape of acceptance hints at. Plain numbers.

Shapes that text does not make by itself: a cliff after some position, a drafter that never drafts, acceptance that
fades with the context. Each hint names the usual cause and what to try.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from specflow.measure import ContextRate, acceptance_by_context, acceptance_by_position, acceptance_length, cliff
from specflow.types import Counts
from tuner.result import Acceptance, Choice, ContextLength, Position
from tuner.space import Candidate

__all__ = ["acceptance_of", "hints_on"]

FEWEST_ROUNDS = 20  # of a range of contexts, before its acceptance says anything
FADED = 0.6
"""Draft tokens a round at long contexts, as a share of those at short ones, below which it is called a decay."""
RARELY = 0.05
"""A drafter that drafts in fewer of the rounds hardly fires."""
FEWEST_DRAFTS = 50  # first draft tokens, before they are compared with what was recorded
FALLEN = 0.6
"""First draft tokens that stand, as a share of what was recorded, below which that is said."""
POOR = 1.15
"""Acceptance length below which the drafter is hardly ever right."""


def acceptance_of(candidate: Candidate, counts: Counts, recorded: float | None) -> Acceptance:
    """Acceptance of one contestant, with hints; `recorded` as in `hints_on`."""
    return Acceptance(
        choice=Choice.of(candidate),
        positions=[Position(**asdict(rate)) for rate in acceptance_by_position(counts)],
        contexts=[ContextLength(**asdict(rate)) for rate in acceptance_by_context(counts)],
        drafting_rounds=counts.num_spec_steps,
        rounds=counts.num_rounds,
        hints=hints_on(counts, recorded),
    )


def hints_on(counts: Counts, recorded: float | None = None) -> list[str]:
    """Suspicious shapes, in words.

    Args:
        counts: Of all rounds.
        recorded: How often the first draft token agreed when the drafter was made; None: unknown.
    """
    if not counts.num_rounds:
        return []
    fired = counts.num_spec_steps / counts.num_rounds
    if not counts.num_spec_steps:
        return [
            "never fired: no round had a draft. A copying drafter needs a shorter shortest match (draft.min_match) or "
            "text that repeats itself; a length policy may also have found that drafting does not pay"
        ]
    found = []
    if fired < RARELY:
        found.append(f"fired in {fired:.1%} of the rounds only: lower draft.min_match, or give it another source")
    place = cliff(counts)
    if place is not None:
        found.append(
            f"a cliff after position {place}: acceptance all but ends there. Causes seen in the field: blocks drafted "
            "wider than the drafter was trained for, sliding windows ignored, positions off by some. Try "
            f"draft.k={place}"
        )
    length = acceptance_length(counts)
    if length is not None and length < POOR and place is None and fired >= RARELY:
        found.append(
            f"acceptance length {length:.2f}: hardly a token is accepted. Check that the drafter was trained for this "
            "very target, its quantisation and chat template"
        )
    return found + _below(counts, recorded) + _decay(acceptance_by_context(counts))


def _below(counts: Counts, recorded: float | None) -> list[str]:
    first = acceptance_by_position(counts)[0]
    if recorded is None or first.conditional is None or first.reached < FEWEST_DRAFTS:
        return []
    if first.conditional >= FALLEN * recorded:
        return []
    return [
        f"{first.conditional:.0%} of first draft tokens stand, where the self-test kept beside the weights has "
        f"{recorded:.0%}. Texts unlike those it was trained on do that, and so do weights that are read wrongly or "
        "made for another target: specflow selftest tells"
    ]


def _decay(contexts: Sequence[ContextRate]) -> list[str]:
    known = [rate for rate in contexts if rate.rounds >= FEWEST_ROUNDS]
    if len(known) < 2:
        return []
    first, last = known[0], known[-1]
    if last.acceptance_length - 1.0 >= FADED * (first.acceptance_length - 1.0):
        return []
    return [
        f"acceptance fades with the context: {first.acceptance_length:.2f} below {first.context_to} tokens, "
        f"{last.acceptance_length:.2f} from {last.context_from} on. Drafters trained on short texts do that: train on "
        "longer ones, use a sliding window, or switch speculation off beyond that length"
    ]

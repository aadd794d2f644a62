"""From which length of context on drafting stops paying, and the contestants that stop there. No torch.

Drafters trained on short texts fade in long ones (speculators PR 684: 2.3 tokens a round at 2k committed tokens, 1.08
at 20k). A policy that weighs costs parks there by itself; a fixed length goes on drafting, so it is run a second time
with `length.until`, and has to win with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specflow.cost import CostModel
from specflow.measure import acceptance_by_context
from tuner.aims import Aims
from tuner.confirm import Race
from tuner.hints import FEWEST_ROUNDS
from tuner.space import POLICY, UNTIL, Candidate

__all__ = ["SwitchOff", "contestants_of", "joined", "switch_offs"]

MOST = 2
"""Contestants that are run again with a length to stop at."""


@dataclass(frozen=True, slots=True)
class SwitchOff:
    """A contestant that should stop drafting somewhere."""

    candidate: Candidate
    until: int  # committed tokens
    reached: float  # acceptance length from there on
    price: float  # what a round costs there, in plain steps

    @property
    def contestant(self) -> Candidate:
        """The same, stopping there."""
        return Candidate.of(self.candidate.recipe, {**self.candidate.values, UNTIL: self.until})

    def __str__(self) -> str:
        found = f"{self.reached:.2f} tokens a round for {self.price:.2f} plain steps"
        return f"{self.candidate.label}: drafting stops paying at {self.until} committed tokens ({found})"


def switch_offs(race: Race, costs: Mapping[str, CostModel], batch: int, aims: Aims) -> list[SwitchOff]:
    """Contestants of a fixed length that pay in short contexts and not in long ones, the best first.

    Args:
        race: What was measured.
        costs: By recipe.
        batch: Requests decoded together.
        aims: In what the best is best.
    """
    measured = race.measured()
    gains = {each: aims.ahead(work, measured[race.plain]) for each, work in measured.items()}
    order = sorted(measured, key=lambda each: -up.value if (up := gains[each]) is not None else 0.0)
    found = [_found(each, race, costs[each.recipe], batch) for each in order if each.values.get(POLICY) == "fixed"]
    return [each for each in found if each is not None][:MOST]


def _found(candidate: Candidate, race: Race, costs: CostModel, batch: int) -> SwitchOff | None:
    """Where every range of contexts from one on costs more than it yields, and one before it does not."""
    if candidate.values.get(UNTIL) is not None:
        return None
    ranges = [each for each in acceptance_by_context(race.counts(candidate)) if each.rounds >= FEWEST_ROUNDS]
    prices = [costs.plain_steps(candidate.k, batch, each.context_from or each.context_to // 2) for each in ranges]
    pays = [each.acceptance_length > price for each, price in zip(ranges, prices, strict=True)]
    last = max((place for place, paid in enumerate(pays) if paid), default=None)
    if last is None or last + 1 == len(pays):
        return None
    first = ranges[last + 1]
    return SwitchOff(candidate, first.context_from, first.acceptance_length, prices[last + 1])


def contestants_of(found: Sequence[SwitchOff], winner: Candidate, plain: Candidate) -> list[Candidate]:
    """Who runs once more: those that stop, and whom they have to beat."""
    return [*([winner] if winner != plain else []), *(each.contestant for each in found)]


def joined(first: Race, second: Race) -> Race:
    """Two races over the same prompts as one: who ran in both has the runs of the second.

    Plain decoding ran in turns with everybody, so it keeps the runs of both.
    """
    runs = {**first.runs, **second.runs}
    both = first.runs.get(first.plain, {}), second.runs.get(first.plain, {})
    runs[first.plain] = {key: [*both[0].get(key, []), *both[1].get(key, [])] for key in {**both[0], **both[1]}}
    return Race(
        first.plain,
        runs,
        {**first.groups, **second.groups},
        {**first.failures, **second.failures},
        [each for each in first.dropped if each not in second.runs] + second.dropped,
        first.complete and second.complete,
    )

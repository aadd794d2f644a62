"""Real runs of the best few and of plain decoding, taking turns on every prompt, so that a slow minute falls on all.

No torch: what decodes is handed in. A contestant that is clearly behind drops out; the race ends when the best is
clear of all others, or with the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol

from specflow.errors import SpecFlowError
from specflow.measure import merge_counts
from specflow.types import Counts, Timings
from tuner.aims import Aims
from tuner.budget import BudgetSpent
from tuner.choose import told_apart
from tuner.interval import FEWEST_PROMPTS, Measured, Work
from tuner.result import Split
from tuner.space import Candidate

__all__ = ["Group", "Race", "RacePlan", "Run", "Runner", "in_turns"]

DROP_AFTER = 6
"""Groups that everybody has decoded before anybody may drop out."""
BEHIND = 0.93
"""Who cannot reach this share of the best drops out."""
Advance = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Group:
    """Requests that are decoded together."""

    key: str
    category: str  # "" where they differ
    prompts: tuple[tuple[int, ...], ...]
    seed: int


@dataclass(frozen=True, slots=True)
class Run:
    """One group decoded by one contestant. Prefills are in none of the figures."""

    work: Work
    counts: Counts  # of all its requests
    timings: Timings  # spans of its rounds, each round once
    num_rounds: int  # target passes, however many requests shared them
    equal: bool | None = None  # its tokens are plain decoding's; None: not compared


class Runner(Protocol):
    """Decodes."""

    def warm_up(self, candidate: Candidate, group: Group) -> None:
        """A first run that nobody counts.

        Raises:
            SpecFlowError: It cannot run.
        """

    def run(self, candidate: Candidate, group: Group) -> Run:
        """Decode a group.

        Raises:
            SpecFlowError: It failed; the race goes on without it.
        """


@dataclass(frozen=True, slots=True)
class RacePlan:
    """How long a race may take."""

    ends: float | None = None  # reading of the clock at which it ends
    most_passes: int = 5  # over all groups
    drops: bool = True  # who is clearly behind drops out
    aims: Aims = field(default_factory=Aims)  # in what
    clock: Callable[[], float] = monotonic


@dataclass
class Race:
    """What was measured in a race.

    Args:
        plain: Plain decoding, the contestant all others are compared with. It never drops out.
    """

    plain: Candidate
    runs: dict[Candidate, dict[str, list[Run]]] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    failures: dict[Candidate, str] = field(default_factory=dict)
    dropped: list[Candidate] = field(default_factory=list)
    complete: bool = False  # intervals separated, or all passes were made: the budget did not end it

    def measured(self, category: str | None = None) -> dict[Candidate, Measured]:
        """Contestant -> group -> work, of all groups or of one category; failed contestants are left out."""
        return {
            each: {
                key: run.work
                for key, run in self.typical(each).items()
                if category is None or self.groups[key].category == category
            }
            for each in self.runs
            if each not in self.failures
        }

    def typical(self, candidate: Candidate) -> dict[str, Run]:
        """Of each group the run of middle speed, of two the faster one: one that the machine stalled is no measure."""
        by_group = self.runs.get(candidate, {})
        return {key: sorted(runs, key=lambda run: run.work.rate)[len(runs) // 2] for key, runs in by_group.items()}

    def counts(self, candidate: Candidate, category: str | None = None) -> Counts:
        """Counts of a contestant's first runs of every group."""
        by_group = self.runs.get(candidate, {})
        kept = (key for key in by_group if category is None or self.groups[key].category == category)
        return merge_counts(by_group[key][0].counts for key in kept)

    def split(self, candidate: Candidate) -> Split:
        """Seconds of its mean round."""
        runs = list(self.typical(candidate).values())
        rounds = sum(run.num_rounds for run in runs)
        if not rounds:
            return Split()
        names = ("draft_s", "target_s", "verify_s", "other_s")
        spans = {name: sum(getattr(run.timings, name) for run in runs) / rounds for name in names}
        whole = sum(run.work.seconds for run in runs) / rounds
        return Split(**spans, unexplained_s=max(0.0, whole - sum(spans.values())))

    def all_runs(self, candidate: Candidate) -> list[Run]:
        return [run for runs in self.runs.get(candidate, {}).values() for run in runs]

    @property
    def categories(self) -> list[str]:
        """Classes of requests that were measured."""
        found = dict.fromkeys(self.groups[key].category for key in self.runs.get(self.plain, {}))
        return [category for category in found if category]


def in_turns(
    contestants: Sequence[Candidate],
    plain: Candidate,
    groups: Sequence[Group],
    runner: Runner,
    plan: RacePlan,
    advance: Advance = lambda what: None,
) -> Race:
    """Run a race.

    Args:
        contestants: All that take part, plain decoding left out.
        plain: Plain decoding.
        groups: What is decoded, in this order; classes should be mixed.
        runner: Decodes.
        plan: How long.
        advance: Called with the name of what was done.

    Raises:
        BudgetSpent: The budget ended before anything could be compared.
        SpecFlowError: Plain decoding itself failed.
    """
    race = Race(plain, groups={group.key: group for group in groups})
    alive = _warmed(race, [plain, *contestants], groups[0], runner)
    fewest = min(FEWEST_PROMPTS, len(groups))
    for turn in range(plan.most_passes):
        for index, group in enumerate(groups):
            if plan.ends is not None and plan.clock() >= plan.ends:
                if len(race.runs.get(plain, {})) >= fewest:
                    return race
                expected = f"time for {fewest} prompts with each of {len(alive)} contestants"
                raise BudgetSpent("--budget", "it ended before anything could be compared", expected, "raise it")
            shift = (turn + index) % len(alive)
            for candidate in [*alive[shift:], *alive[:shift]]:
                _run(race, candidate, group, runner)
                advance(f"{group.key} · {candidate.label}")
            alive = [each for each in alive if each not in race.failures]
            alive = _still_in(race, alive, plan.aims) if plan.drops else alive
        if told_apart(_of(race, alive), plain, plan.aims):
            break
    race.complete = True
    return race


def _warmed(race: Race, contestants: Sequence[Candidate], group: Group, runner: Runner) -> list[Candidate]:
    alive = []
    for each in contestants:
        try:
            runner.warm_up(each, group)
        except SpecFlowError as error:
            if each == race.plain:
                raise
            race.failures[each] = str(error)
            continue
        alive.append(each)
    return alive


def _run(race: Race, candidate: Candidate, group: Group, runner: Runner) -> None:
    try:
        run = runner.run(candidate, group)
    except SpecFlowError as error:
        if candidate == race.plain:
            raise
        race.failures[candidate] = str(error)
        return
    race.runs.setdefault(candidate, {}).setdefault(group.key, []).append(run)


def _of(race: Race, alive: Sequence[Candidate]) -> Mapping[Candidate, Measured]:
    return {each: work for each, work in race.measured().items() if each in alive}


def _still_in(race: Race, alive: Sequence[Candidate], aims: Aims) -> list[Candidate]:
    """Who is not clearly behind the best."""
    measured = _of(race, alive)
    base = measured[race.plain]
    if len(base) < DROP_AFTER:
        return list(alive)
    ups = {each: up for each in alive if (up := aims.ahead(measured[each], base)) is not None}
    best = max(ups, key=lambda each: ups[each].value)
    kept = []
    for each in alive:
        gap = aims.ahead(measured[each], measured[best])
        if each in (race.plain, best) or gap is None or gap.high >= BEHIND:
            kept.append(each)
        else:
            race.dropped.append(each)
    return kept

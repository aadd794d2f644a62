"""One tuning run: preflight, profile, trace, search, confirm; and the result that all reports are made from.

What is loaded, timed or decoded is behind `lab.Lab`, so that the whole run can be judged on made-up machines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from specflow.cost import CostModel
from specflow.errors import SpecFlowError
from specflow.recipe import Recipe, recipe_data
from tuner.aims import Aims, hurdle_of
from tuner.analysis import importances
from tuner.budget import Budget, BudgetSpent
from tuner.choose import Verdict, choose, effort
from tuner.confirm import Group, Race, RacePlan, Runner, in_turns
from tuner.finalists import finalists
from tuner.findings import break_evens, category_answers, confirmed_of, divergences, predictions_of
from tuner.hints import acceptance_of
from tuner.interval import FEWEST_PROMPTS
from tuner.lab import Advance, Lab
from tuner.result import Answer, Choice, Predicted, Refused, TuneResult, Workload
from tuner.schedule import Best, make_schedule
from tuner.scoring import Score, Scorer, check_objectives, hopeless
from tuner.shared_costs import SharedCosts
from tuner.space import Candidate, K, Space, own_settings
from tuner.study import Study, StudyPlan
from tuner.switch_off import SwitchOff, contestants_of, joined, switch_offs

__all__ = ["TunePlan", "Tuning", "tune"]

SEARCH_SHARE = 0.25
"""Of what is left of the budget when the search begins."""


@dataclass(frozen=True, slots=True)
class TunePlan:
    """How to tune."""

    workload: Workload
    storage: str  # of the studies
    study: str  # their name; one study a concurrency
    objectives: tuple[str, ...] = ("throughput",)
    concurrency: tuple[int, ...] = (1,)
    trials: int = 300
    seed: int = 0
    finalists: int = 4
    most_passes: int = 5


@dataclass
class Tuning:
    """A run under way.

    Args:
        plain: Plain decoding, as a recipe.
        lab: Measures.
        plan: How to tune.
        budget: How long it may take.
        advance: Called with the name of what was done.
    """

    plain: Recipe
    lab: Lab
    plan: TunePlan
    budget: Budget
    advance: Advance = lambda what: None
    refused: list[Refused] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    costs: dict[str, CostModel] = field(default_factory=dict)
    scores: dict[int, dict[Candidate, Score]] = field(default_factory=dict)
    plain_scores: dict[int, Score] = field(default_factory=dict)
    races: dict[int, Race] = field(default_factory=dict)
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    profile_seconds: dict[str, float] = field(default_factory=dict)
    trials: int = 0
    hopeless: int = 0
    space: Space = field(default_factory=lambda: Space({}))
    shared: SharedCosts = field(init=False)

    @property
    def nobody(self) -> Candidate:
        """Plain decoding as a candidate."""
        return Candidate(self.plain.name)

    def run(self, recipes: Mapping[str, Recipe]) -> TuneResult:
        """All phases.

        Raises:
            BudgetSpent: It ended too early for an answer.
            DataError: The machine is too noisy, the storage cannot be reached, the workload has no rounds.
        """
        with self._phase("preflight"):
            self.shared = self._shared_costs()
            kept, refused, warnings = self.lab.applies(recipes)
            self.refused += refused
            self.warnings += warnings
            self.space = Space({self.plain.name: self.plain, **kept})
        with self._phase("profile"):
            kept = self._profile(kept)
        with self._phase("trace"):
            scorer = self._trace(kept)
        with self._phase("search"):
            for concurrency in self.plan.concurrency:
                self._search(scorer, concurrency)
        with self._phase("confirm"):
            for concurrency in self.plan.concurrency:
                self._confirm(kept, concurrency)
        return self.result()

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self.budget.check(name)
        began = self.budget.clock()
        yield
        self.seconds[name] = round(self.budget.clock() - began, 3)

    def _refuse(self, recipe: str, phase: str, reason: str) -> None:
        self.refused.append(Refused(recipe=recipe, phase=phase, reason=reason))

    def _profile(self, recipes: Mapping[str, Recipe]) -> dict[str, Recipe]:
        """Cost models; recipes that cannot be measured are left out."""
        target = self._profiled(self.plain, None)
        kept = {}
        for name, recipe in recipes.items():
            self.budget.check("profile")
            try:
                self._profiled(self._deepest(recipe), target)
            except BudgetSpent:
                raise
            except SpecFlowError as error:
                self._refuse(name, "profile", str(error))
                continue
            kept[name] = recipe
        return kept

    def _shared_costs(self) -> SharedCosts:
        """Profiles that all workers of the study share; those of other batches are none of theirs."""
        loads = "-".join(map(str, sorted({1, *self.plan.concurrency})))
        facts = {f"target {name}": value for name, value in self.lab.target.items()} | dict(self.lab.machine)
        return SharedCosts(self.plan.storage, f"{self.plan.study}-costs-{loads}", facts)

    def _profiled(self, recipe: Recipe, target: CostModel | None) -> CostModel:
        """One cost model; warns of timings that spread wide, of those of the target once, under plain decoding."""
        name, began = recipe.name, self.budget.clock()
        found = self.shared.get(
            name, lambda: self.lab.profile(recipe, target, self.advance), lambda: self.budget.check("profile")
        )
        self.profile_seconds[name] = round(self.budget.clock() - began, 3)
        self.costs[name] = found.model
        own = [each for each in found.doubts if target is None or not each.startswith("target ")]
        if own:
            self.warnings.append(f"{name}: {len(own)} timings spread wide, such as {own[0]}")
        return found.model

    def _deepest(self, recipe: Recipe) -> Recipe:
        """The recipe at its largest K, so that no price has to be guessed beyond what was timed."""
        depths = next((knob.choices for knob in self.space.knobs[recipe.name] if knob.key == K), ())
        most = max((each for each in depths if isinstance(each, int)), default=None)
        deep = None if most is None else self.space.recipe(self.space.candidate(recipe.name, {K: most}))
        return deep or recipe

    def _trace(self, recipes: Mapping[str, Recipe]) -> Scorer:
        def advance(what: str) -> None:
            self.advance(what)
            self.budget.check("trace")

        scorer, refused = self.lab.trace(recipes, self.space, self.costs, advance)
        self.refused += refused
        for concurrency in self.plan.concurrency:
            self.plain_scores[concurrency] = scorer.score(self.nobody, concurrency)
        return scorer

    def _search(self, scorer: Scorer, concurrency: int) -> None:
        def ruled_out(candidate: Candidate) -> str | None:
            return hopeless(candidate.k, self.costs[candidate.recipe], concurrency, self.lab.context)

        lost = {each.recipe for each in self.refused}
        plan = StudyPlan(
            name=f"{self.plan.study}-{concurrency}",
            storage=self.plan.storage,
            objectives=self.plan.objectives,
            concurrency=concurrency,
            trials=self.plan.trials,
            seed=self.plan.seed,
        )
        usable = {name: recipe for name, recipe in self.space.recipes.items() if name not in lost}
        study = Study(Space(usable), scorer, ruled_out, plan)
        ends, clock = self.budget.share(SEARCH_SHARE), self.budget.clock
        tried = study.run(lambda: ends is None or clock() < ends, self.advance)
        self.trials += len(tried)
        self.hopeless += study.num_ruled_out + sum(each.hopeless for each in tried)
        self.scores[concurrency] = {each.candidate: each.score for each in tried if each.score is not None}
        if concurrency == self.plan.concurrency[0]:
            self._say_what_failed([(each.candidate, each.reason) for each in tried if each.score is None], usable)

    def _say_what_failed(self, lost: Sequence[tuple[Candidate, str]], usable: Mapping[str, Recipe]) -> None:
        """One line a recipe none of whose candidates has a score."""
        scored = {each.recipe for each in self.scores[self.plan.concurrency[0]]}
        reasons: dict[str, str | None] = {}
        for candidate, reason in lost:
            reasons.setdefault(candidate.recipe, f"{candidate.label}: {reason}")
        for name, recipe in usable.items():
            if recipe.draft is not None and name not in scored:
                found = reasons.get(name) or self._hopeless_reason(name)
                if found:
                    self._refuse(name, "search", found)

    def _hopeless_reason(self, name: str) -> str | None:
        deep = self._deepest(self.space.recipes[name])
        assert deep.draft is not None
        return hopeless(deep.draft.k, self.costs[name], self.plan.concurrency[0], self.lab.context)

    def _confirm(self, recipes: Mapping[str, Recipe], concurrency: int) -> None:
        scores, plain = self.scores[concurrency], self.plain_scores.get(concurrency)
        never = {each.recipe for each in self.refused if each.phase in ("preflight", "profile")}
        without = [
            Candidate.of(name, own_settings(recipe))
            for name, recipe in recipes.items()
            if name not in never and not any(each.recipe == name for each in scores) and not self._hopeless_reason(name)
        ]
        chosen = finalists(scores, plain, self.plan.objectives, without, self.plan.finalists)
        later = len(self.plan.concurrency) - list(self.plan.concurrency).index(concurrency) - 1
        aims, ends = self._aims(chosen), self.budget.share(1.0 / (1 + later))
        drops = aims.objectives[0] == aims.hurdle  # who is slow may still take the least memory
        plan = RacePlan(ends, self.plan.most_passes, drops, aims, self.budget.clock)
        groups, runner = self.lab.groups(concurrency), self.lab.runner(self.space, concurrency, self.costs)
        race = in_turns(chosen, self.nobody, groups, runner, plan, self.advance)
        verdict = choose(race.measured(), self.nobody, self._efforts(race), aims)
        if stops := switch_offs(race, self.costs, concurrency, aims):
            race, verdict = self._stopping(stops, (race, verdict), (groups, runner, plan))
        self.races[concurrency], self.verdicts[concurrency] = race, verdict
        for each, reason in race.failures.items():
            self._refuse(each.label, "confirm", reason)

    def _stopping(
        self, stops: Sequence[SwitchOff], so_far: tuple[Race, Verdict], how: tuple[Sequence[Group], Runner, RacePlan]
    ) -> tuple[Race, Verdict]:
        """The race and the verdict once those that fade in long contexts have run with a length to stop at."""
        race, verdict = so_far
        groups, runner, plan = how
        again = contestants_of(stops, verdict.winner, self.nobody)
        plan = replace(plan, aims=self._aims([*race.runs, *again]))
        try:
            second = in_turns(again, self.nobody, groups, runner, plan, self.advance)
        except BudgetSpent:
            self.warnings += [f"{each}; length.until={each.until} was not run for lack of time" for each in stops]
            return race, verdict
        self.warnings += [f"{each}; it ran with length.until={each.until} too" for each in stops]
        found = choose(second.measured(), self.nobody, self._efforts(second), plan.aims)
        same = found.winner == verdict.winner
        return joined(race, second), replace(found, ties=found.ties or verdict.ties) if same else found

    def _aims(self, contestants: Iterable[Candidate]) -> Aims:
        made = {each: self.space.recipe(each) for each in contestants}
        memory = {each: self.lab.memory(recipe) for each, recipe in made.items() if recipe is not None}
        return Aims(self.plan.objectives, memory)

    def _efforts(self, race: Race) -> dict[Candidate, tuple[int, int, int, int, str]]:
        made = {each: self.space.recipe(each) for each in race.runs}
        return {each: effort(each, recipe) for each, recipe in made.items() if recipe is not None}

    def tuned(self) -> Recipe:
        """The answer as a recipe that runs as it stands."""
        winner = self.verdicts[self.plan.concurrency[0]].winner
        recipe = self.space.recipe(winner)
        assert recipe is not None
        together = recipe.runtime.model_copy(update={"batch": self.plan.concurrency[0]})
        recipe = recipe.model_copy(update={"name": f"{recipe.name}-tuned", "runtime": together, "tune": {}})
        return self.lab.with_costs(recipe, self.costs[winner.recipe]) if winner.settings else recipe

    def result(self) -> TuneResult:
        """What was found."""
        first = self.plan.concurrency[0]
        race, verdict, scores = self.races[first], self.verdicts[first], self.scores[first]
        aims = self._aims({each for one in self.races.values() for each in one.runs})
        confirmed = {
            each: confirmed_of(self.races[each], self.scores[each], self.plain_scores.get(each), each, aims)
            for each in self.plan.concurrency
        }
        judged = (first, self.lab.context), aims.hurdle
        raced = [each for each in race.runs if each != self.nobody]
        recorded = {name: self._recorded(name) for name in dict.fromkeys(each.recipe for each in raced)}
        acceptance = [acceptance_of(each, race.counts(each), recorded[each.recipe]) for each in raced]
        if len(race.groups) < FEWEST_PROMPTS:
            self.warnings.append(f"{len(race.groups)} prompts are too few to say how sure a speed-up is")
        warnings = [*self.warnings, *divergences(race, str(self.lab.target.get("exactness")))]
        return TuneResult(
            answer=_answer(verdict, aims),
            recipe=recipe_data(self.tuned()),
            target=dict(self.lab.target),
            machine=dict(self.lab.machine),
            workload=self.plan.workload,
            objectives=list(self.plan.objectives),
            concurrency=list(self.plan.concurrency),
            refused=self.refused,
            warnings=[*warnings, *([] if race.complete else ["the budget ended the race before it was decided"])],
            predictions=list(self._predictions()),
            confirmed=[row for each in self.plan.concurrency for row in confirmed[each]],
            acceptance=acceptance,
            break_even=break_evens(self.costs, scores, confirmed[first], self.plain_scores.get(first), judged),
            importance=importances(scores, self.plan.objectives[0]),
            schedule=make_schedule(self._best()) if len(self.plan.concurrency) > 1 else [],
            categories=category_answers(race, verdict, self._efforts(race), aims),
            drafters={name: self.lab.placed(each) for name, each in self.space.recipes.items() if each.draft},
            hopeless=self.hopeless,
            trials=self.trials,
            seconds=self.seconds,
            profile_seconds=self.profile_seconds,
            costs={name: model.to_data() for name, model in self.costs.items()},
            provenance=self.lab.provenance([Path(name) for name in self.plan.workload.files]),
        )

    def _recorded(self, name: str) -> float | None:
        """What a recipe's drafter agreed in when it was made, where that is known."""
        try:
            return self.lab.recorded(self.space.recipes[name])
        except SpecFlowError as error:
            self.warnings.append(f"{name}: {error}")
            return None

    def _predictions(self) -> Iterator[Predicted]:
        for each in self.plan.concurrency:
            yield from predictions_of(self.scores[each], self.plain_scores.get(each), each, self.plan.objectives)

    def _best(self) -> list[Best]:
        hurdle = hurdle_of(self.plan.objectives)
        return [
            Best(load, Choice.of(verdict.winner), verdict.winner.k, verdict.speed_up.value, True, latency_gain=shorter)
            for load, verdict in self.verdicts.items()
            for shorter in [verdict.gain.value if hurdle == "latency" else None]
        ]


def tune(
    recipes: Mapping[str, Recipe], plain: Recipe, lab: Lab, plan: TunePlan, how: tuple[Budget, Advance]
) -> tuple[TuneResult, Recipe]:
    """Choose how to decode.

    Args:
        recipes: To choose from, by name; all have the lab's target.
        plain: Plain decoding of it.
        lab: Measures.
        plan: How to tune.
        how: How long it may take, and what to call with the name of what was done.

    Returns:
        The result, and the recipe to run.

    Raises:
        DataError: There is nothing to choose from or no answer; see `Tuning.run`.
    """
    check_objectives(plan.objectives)
    tuning = Tuning(plain, lab, plan, *how)
    result = tuning.run(recipes)
    return result, tuning.tuned()


def _answer(verdict: Verdict, aims: Aims) -> Answer:
    return Answer(
        speculate=bool(verdict.winner.settings),
        choice=Choice.of(verdict.winner),
        speed_up=verdict.speed_up,
        reason=verdict.reason,
        ties=[each.label for each in verdict.ties],
        objective=aims.hurdle,
        gain=verdict.gain,
        decided_by=verdict.decided_by,
    )

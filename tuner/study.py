"""The search: an Optuna study over candidates, scored without running them.

A small space is gone through once (a grid), a large one is sampled (TPE, seeded). Trials live in the storage, so a
killed search goes on where it stopped and several workers share one study: whoever opens it first queues the grid, all
take from the queue. What the cost model rules out is never queued.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specflow.errors import SpecFlowError
from tuner.scoring import OBJECTIVES, BatchScorer, Score, Scorer
from tuner.space import Candidate, Knob, Space, Value
from tuner.storage import open_storage, storage_errors
from tuner.workers import abandoned, wait_until, worker

if TYPE_CHECKING:
    import optuna

__all__ = ["Study", "StudyPlan", "Tried"]

GRID_MOST = 512
"""Up to so many combinations, all are tried."""
AHEAD = 64
"""Queued candidates that are replayed together."""
Advance = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class StudyPlan:
    """How to search."""

    name: str  # workers of one name share a study
    storage: str  # a path of a journal, or any storage URL of Optuna
    objectives: tuple[str, ...] = ("throughput",)
    concurrency: int = 1
    trials: int = 300  # of a sampled study; a grid has as many as it has candidates
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Tried:
    """One trial that ended."""

    candidate: Candidate
    score: Score | None
    reason: str = ""  # why it has no score

    @property
    def hopeless(self) -> bool:
        return self.reason.startswith(HOPELESS)


HOPELESS = "hopeless: "


class Study:
    """A study of candidates at one concurrency.

    Args:
        space: What there is to try.
        scorer: What it is worth.
        ruled_out: Why the cost model rules a candidate out; None where it does not.
        plan: How.

    Raises:
        DataError: The storage cannot be reached.
    """

    def __init__(
        self, space: Space, scorer: Scorer, ruled_out: Callable[[Candidate], str | None], plan: StudyPlan
    ) -> None:
        self._space, self._scorer, self._ruled_out, self.plan = space, scorer, ruled_out, plan
        self._names = [name for name, knobs in space.knobs.items() if knobs]
        self.grid = space.size <= GRID_MOST
        self.num_ruled_out = 0
        self._seen: dict[Candidate, Score | SpecFlowError] = {}
        with storage_errors(plan.storage):
            self._study = self._open()

    def run(self, goes_on: Callable[[], bool] = lambda: True, advance: Advance = lambda what: None) -> list[Tried]:
        """Search until everything is tried, the trials are used up, or `goes_on` says that time is.

        Raises:
            DataError: The storage went away.
        """
        with storage_errors(self.plan.storage):
            while self._names and self._more() and goes_on():
                trial = self._study.ask()
                if self.grid and "candidate" not in trial.user_attrs:  # the queue ran dry between two looks
                    self._study.tell(trial, state=_states().FAIL)
                    break
                self._try(trial, advance)
            return self.tried()

    def tried(self) -> list[Tried]:
        """Every candidate that any worker tried, once, oldest trial first."""
        states = (_states().COMPLETE, _states().PRUNED)
        found: dict[Candidate, Tried] = {}
        with storage_errors(self.plan.storage):
            for trial in self._study.get_trials(deepcopy=False, states=states):
                data, attrs = trial.user_attrs.get("candidate"), trial.user_attrs
                if data is None:
                    continue
                candidate = Candidate.of(data["recipe"], data["settings"])
                score = Score.from_data(attrs["score"]) if "score" in attrs else None
                found.setdefault(candidate, Tried(candidate, score, attrs.get("reason", "")))
        return list(found.values())

    def _more(self) -> bool:
        states = _states()
        if self.grid:
            return bool(self._study.get_trials(deepcopy=False, states=(states.WAITING,)))
        done = self._study.get_trials(deepcopy=False, states=(states.COMPLETE, states.PRUNED))
        return len(done) < self.plan.trials

    def _try(self, trial: optuna.Trial, advance: Advance) -> None:
        trial.set_user_attr("worker", worker())
        candidate = self._suggest(trial)
        if "candidate" not in trial.user_attrs:
            trial.set_user_attr("candidate", {"recipe": candidate.recipe, "settings": candidate.values})
        reason = self._refusal(candidate)
        found = None if reason else self._scored(candidate)
        if isinstance(found, Score):
            trial.set_user_attr("score", found.to_data())
            values = [OBJECTIVES[name].of(found) for name in self.plan.objectives]
            self._study.tell(trial, values)
        else:
            trial.set_user_attr("reason", reason or str(found))
            self._study.tell(trial, state=_states().PRUNED)
        advance(candidate.label)

    def _refusal(self, candidate: Candidate) -> str | None:
        if self._space.recipe(candidate) is None:
            return "these values do not go together"
        reason = self._ruled_out(candidate)
        return f"{HOPELESS}{reason}" if reason else None

    def _scored(self, candidate: Candidate) -> Score | SpecFlowError:
        """Its score, or why it has none; a sampler comes back to what it likes, and replay says the same again."""
        if candidate not in self._seen and self.grid and isinstance(self._scorer, BatchScorer):
            ahead = self._ahead(candidate)
            self._seen.update(zip(ahead, self._scorer.score_many(ahead, self.plan.concurrency), strict=True))
        if candidate not in self._seen:
            try:
                self._seen[candidate] = self._scorer.score(candidate, self.plan.concurrency)
            except SpecFlowError as error:
                self._seen[candidate] = error
        return self._seen[candidate]

    def _ahead(self, candidate: Candidate) -> list[Candidate]:
        """A candidate and those that are next in the queue: replayed together they take less time each."""
        waiting = self._study.get_trials(deepcopy=False, states=(_states().WAITING,))
        queued = [_key(trial.user_attrs.get("candidate")) for trial in waiting]
        return [candidate, *(each for each in queued if each is not None and each not in self._seen)][:AHEAD]

    def _suggest(self, trial: optuna.Trial) -> Candidate:
        recipe = trial.suggest_categorical("recipe", self._names)
        values: dict[str, Value] = {}
        knobs = sorted(self._space.knobs[recipe], key=lambda knob: knob.only_with is not None)
        for knob in knobs:
            if knob.only_with in (None, values.get("length.policy")):
                values[knob.key] = _ask(trial, f"{recipe}:{knob.key}", knob)
        return self._space.candidate(recipe, values)

    def _params(self, candidate: Candidate) -> dict[str, Any]:
        """The parameters that lead `_suggest` to a candidate."""
        knobs = {knob.key: knob for knob in self._space.knobs[candidate.recipe]}
        chosen = {f"{candidate.recipe}:{key}": _spelt(knobs[key], value) for key, value in candidate.settings}
        return {"recipe": candidate.recipe, **chosen}

    def _open(self) -> optuna.Study:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        storage, made = open_storage(self.plan.storage), True
        facts: dict[str, Any] = {
            "study_name": self.plan.name,
            "directions": [OBJECTIVES[name].direction for name in self.plan.objectives],
        }
        try:
            study = optuna.create_study(storage=storage, sampler=self._sampler(0), **facts)
        except optuna.exceptions.DuplicatedStudyError:
            study, made = optuna.load_study(study_name=self.plan.name, storage=storage), False
            study.sampler = self._sampler(len(study.get_trials(deepcopy=False)))
        candidates = self._candidates() if self.grid else []
        if not made and self.grid:
            wait_until(lambda: "queued" in study.user_attrs)
        self._take_back(study)
        if self.grid and "queued" not in study.user_attrs:
            self._queue(study, candidates)
            study.set_user_attr("queued", len(candidates))
        return study

    def _sampler(self, so_far: int) -> optuna.samplers.BaseSampler:
        import optuna

        return optuna.samplers.TPESampler(seed=self.plan.seed + so_far)

    def _candidates(self) -> list[Candidate]:
        """All that the cost model does not rule out."""
        listed = self._space.listed(GRID_MOST)
        kept = [candidate for candidate in listed if self._ruled_out(candidate) is None]
        self.num_ruled_out = len(listed) - len(kept)
        return kept

    def _queue(self, study: optuna.Study, candidates: Sequence[Candidate]) -> None:
        """Queue what no trial has yet: a worker may have been killed while it did this."""
        there = {_key(trial.user_attrs.get("candidate")) for trial in study.get_trials(deepcopy=False)}
        for candidate in candidates:
            data = {"recipe": candidate.recipe, "settings": candidate.values}
            if _key(data) not in there:
                study.enqueue_trial(self._params(candidate), user_attrs={"candidate": data})

    def _take_back(self, study: optuna.Study) -> None:
        """Trials of workers that are gone are failures, and what they were about is queued again."""
        for trial in study.get_trials(deepcopy=False, states=(_states().RUNNING,)):
            if not abandoned(trial):
                continue
            with suppress(RuntimeError, ValueError):  # another worker has done it
                study.tell(trial.number, state=_states().FAIL)
                if self.grid and (data := trial.user_attrs.get("candidate")) is not None:
                    candidate = Candidate.of(data["recipe"], data["settings"])
                    study.enqueue_trial(self._params(candidate), user_attrs={"candidate": data})


def _ask(trial: optuna.Trial, name: str, knob: Knob) -> Value:
    """A value for a knob. Numbers are asked for by their place in the list, because they have an order."""
    if _ordered(knob):
        return knob.choices[trial.suggest_int(name, 0, len(knob.choices) - 1)]
    found: Value = trial.suggest_categorical(name, list(knob.choices))
    return found


def _spelt(knob: Knob, value: Value) -> Any:
    return knob.choices.index(value) if _ordered(knob) else value


def _ordered(knob: Knob) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in knob.choices)


def _key(data: Mapping[str, Any] | None) -> Candidate | None:
    return None if data is None else Candidate.of(data["recipe"], data["settings"])


def _states() -> Any:
    from optuna.trial import TrialState

    return TrialState

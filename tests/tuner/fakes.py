"""Recipes, prices and scorers whose answers are known, so that a search can be judged in milliseconds."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from specflow.cost import CostModel, Timing
from specflow.errors import CheckpointError, DataError
from specflow.measure import Spread, context_bucket
from specflow.recipe import Recipe, load_recipe, parse_recipe
from specflow.types import Counts, Timings
from tuner.budget import Budget
from tuner.confirm import Group, Run
from tuner.interval import Work
from tuner.profile import Profiled
from tuner.result import Refused, TuneResult, Workload
from tuner.scoring import Score
from tuner.space import Candidate
from tuner.tune import TunePlan, tune


def sure(seconds: float) -> Spread:
    return Spread(seconds, seconds, seconds, 5)


def prices(step: float = 0.03, per_row: float = 0.001, per_draft: float = 0.002, fixed: float = 0.001) -> CostModel:
    """A machine on which a pass costs `step` and a little for every further row."""
    target = tuple(
        Timing(rows, batch, context, sure(step + per_row * rows * batch + 1e-6 * context))
        for rows in (1, 2, 4, 8, 16, 32, 64)
        for batch in (1, 4, 16)
        for context in (64, 512)
    )
    draft = tuple(Timing(k, batch, 64, sure(per_draft * k)) for k in (1, 2, 4, 8, 16, 48) for batch in (1, 4, 16))
    return CostModel(target=target, draft=draft, overhead=(Timing(0, 1, 64, sure(fixed)),))


def recipes(*names: str, ks: tuple[int, ...] = (1, 2, 4, 8)) -> dict[str, Recipe]:
    """Recipes that copy from the text, so that they need no weights, and plain decoding."""
    made = {"vanilla": load_recipe("vanilla")}
    for name in names or ("copying",):
        tune = {"draft.k": {"choices": list(ks)}, "length.policy": {"choices": ["fixed"]}}
        made[name] = parse_recipe({"name": name, "draft": {"method": "ngram", "k": 8}, "tune": tune})
    return made


@dataclass
class MadeUp:
    """Scores by a chance of each token to stand, and remembers what it was asked."""

    chances: Mapping[str, float]
    costs: CostModel = field(default_factory=prices)
    broken: tuple[str, ...] = ()
    asked: list[Candidate] = field(default_factory=list)

    def score(self, candidate: Candidate, concurrency: int) -> Score:
        self.asked.append(candidate)
        if candidate.recipe in self.broken:
            raise DataError(candidate.recipe, "its trace ends in the middle", "a whole trace")
        chance = self.chances.get(candidate.recipe, 0.0)
        length = sum(chance**position for position in range(candidate.k + 1))
        seconds = self.costs.round_s(candidate.k, concurrency, 64)
        throughput = concurrency * length / seconds
        return Score(throughput, 50 * seconds / length, 1000 * candidate.k, length)


PLAIN = load_recipe("vanilla")
LONG = 5000
"""Committed tokens of a long prompt."""


@dataclass
class FakeLab:
    """A machine on which decoding goes as the prices and the chances say, with some noise, on a clock of its own."""

    chances: Mapping[str, float]
    costs: CostModel = field(default_factory=prices)
    drafts: Mapping[str, CostModel] = field(default_factory=dict)
    noise: float = 0.01
    broken: Mapping[str, str] = field(default_factory=dict)  # recipe -> phase in which it fails
    prompts: int = 12
    now: float = 0.0
    context: int = 64
    real: Mapping[str, float] = field(default_factory=dict)  # recipe -> chance in real runs, where it differs
    by_category: Mapping[str, float] = field(default_factory=dict)
    fades: Mapping[str, float] = field(default_factory=dict)  # recipe -> chance in the long half of the prompts
    agreed: Mapping[str, float] = field(default_factory=dict)  # recipe -> what a self-test had
    stalls: Mapping[str, float] = field(default_factory=dict)  # recipe -> times longer that its slowest requests take

    def __post_init__(self) -> None:
        self.chance = random.Random(11)
        self.target = {"name": "made-up", "dtype": "float32", "device": "cpu", "runtime": "native"} | {
            "exactness": "bit-exact"
        }
        self.machine = {"cpu_model": "abacus", "threads": 2}

    def clock(self) -> float:
        return self.now

    def applies(self, recipes: Mapping[str, Recipe]) -> tuple[dict[str, Recipe], list[Refused], list[str]]:
        lost = [name for name in recipes if self.broken.get(name) == "preflight"]
        refused = [Refused(recipe=name, phase="preflight", reason="no trained weights") for name in lost]
        return {name: recipe for name, recipe in recipes.items() if name not in lost}, refused, []

    def profile(self, recipe: Recipe, target: CostModel | None, advance: object) -> Profiled:
        self.now += 1.0
        if self.broken.get(recipe.name) == "profile":
            raise DataError(recipe.name, "too noisy", "a quiet machine")
        return Profiled(self.drafts.get(recipe.name, self.costs))

    def trace(
        self, recipes: Mapping[str, Recipe], space: object, costs: object, advance: Callable[[str], None]
    ) -> tuple[MadeUp, list[Refused]]:
        for number in range(self.prompts):
            self.now += 1.0
            advance(str(number))
        lost = [name for name in recipes if self.broken.get(name) == "trace"]
        refused = [Refused(recipe=name, phase="trace", reason="its drafts depend on earlier requests") for name in lost]
        broken = tuple(name for name, phase in self.broken.items() if phase in ("search", "trace"))
        return MadeUp(self.chances, self.costs, broken), refused

    def groups(self, concurrency: int) -> list[Group]:
        categories = ("code", "chat")
        return [Group(str(n), categories[n % 2], ((1, 2),) * concurrency, n) for n in range(self.prompts)]

    def runner(self, space: object, concurrency: int, costs: object) -> FakeLab:
        return self

    def warm_up(self, candidate: Candidate, group: Group) -> None:
        if self.broken.get(candidate.recipe) == "confirm":
            raise DataError(candidate.recipe, "out of memory", "room")

    def run(self, candidate: Candidate, group: Group) -> Run:
        batch, k = len(group.prompts), candidate.k
        context = LONG if self.fades and int(group.key) % 4 > 1 else 64
        until = candidate.values.get("length.until")
        k = 0 if isinstance(until, int) and context >= until else k
        chance = self.real.get(candidate.recipe, self.chances.get(candidate.recipe, 0.0))
        chance = self.by_category.get(group.category, chance)
        chance = self.fades.get(candidate.recipe, chance) if context == LONG else chance
        length = sum(chance**position for position in range(k + 1))
        rounds, seconds = 50, 50 * self.costs.round_s(k, batch, context) * (1 + self.chance.gauss(0.0, self.noise))
        seconds *= self.stalls.get(candidate.recipe, 1.0) if int(group.key) < 3 else 1.0
        self.now += seconds
        stood = [round(rounds * chance**position) for position in range(1, k + 1)]
        reached = [rounds, *stood[:-1]] if k else []
        before = [0] * context_bucket(context)
        counts = Counts(
            rounds, rounds if k else 0, rounds if k else 0, rounds * k, sum(stood), rounds + sum(stood) + 1,
            [rounds] * k, reached, stood, [*before, rounds] if k else [], [*before, sum(stood)] if k else [],
        )  # fmt: skip
        spent = Timings(draft_s=seconds * 0.1, target_s=seconds * 0.8, verify_s=seconds * 0.04, other_s=seconds * 0.04)
        return Run(Work(batch * rounds * length, seconds, (seconds / length,) * batch), counts, spent, rounds, True)

    def memory(self, recipe: Recipe) -> int:
        return 1000 * recipe.draft.k if recipe.draft is not None else 0

    def placed(self, recipe: Recipe) -> str:
        return "on paper"

    def recorded(self, recipe: Recipe) -> float | None:
        if self.broken.get(recipe.name) == "recorded":
            raise CheckpointError("selftest.json", "cannot be read", "a self-test's figures")
        return self.agreed.get(recipe.name)

    def with_costs(self, recipe: Recipe, model: CostModel) -> Recipe:
        return recipe

    def provenance(self, files: object = ()) -> dict[str, object]:
        return {"git_sha": "0" * 40, "argv": ["test"]}


def plan_of(folder: Path, **changes: object) -> TunePlan:
    workload = Workload(files={}, prompts=12, categories={"code": 6, "chat": 6}, max_new_tokens=64)
    facts = {"workload": workload, "storage": str(folder / "study.journal"), "study": "s", **changes}
    return TunePlan(**facts)  # type: ignore[arg-type]


def tuned(folder: Path, lab: FakeLab, *names: str, budget: float | None = None, **plan: object) -> TuneResult:
    """A whole run on a made-up machine."""
    some = {name: recipe for name, recipe in recipes(*names).items() if recipe.draft is not None}
    how = Budget(budget, lab.clock), lambda what: None
    return tune(some if names else {}, PLAIN, lab, plan_of(folder, **plan), how)[0]  # type: ignore[arg-type]

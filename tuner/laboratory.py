"""Everything of a tuning run that loads, times or decodes. `tune` decides what is asked of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specflow.bench.methods import target_facts
from specflow.build import build_drafter, build_rule, threads_beside
from specflow.cost import CostModel, ProfileKey, find_profile, profile_data, profiles_dir, save_profile
from specflow.cost_table import costs_section
from specflow.engine import EngineParts
from specflow.errors import SpecFlowError
from specflow.length import Fixed
from specflow.profiling import CONTEXTS, ROWS, Plan, Profiler, make_plan
from specflow.provenance import Provenance
from specflow.recipe_sections import TuneRange
from tuner.confirm import Group, Runner
from tuner.engines import EngineRunner
from tuner.interval import FEWEST_PROMPTS
from tuner.preflight import Conditions, free_memory, memory_need, placed, preflight, recorded_agreement, warnings_of
from tuner.profile import Profiled, measured_twice, with_target
from tuner.replay_scorer import ReplayScorer
from tuner.result import Refused
from tuner.scoring import Scorer
from tuner.space import Candidate, K, Space
from tuner.trace import TracedPrompt, TracePlan, load_trace, record

if TYPE_CHECKING:
    from specflow.build import LoadedTarget
    from specflow.recipe import Recipe

__all__ = ["LabPlan", "Laboratory"]

MOST_ROWS = 160
"""Rows of all requests together that are timed: beyond them passes take long, and the slope is known."""
REPEAT = 5
Advance = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LabPlan:
    """Under which conditions everything is measured."""

    directory: Path
    max_new_tokens: int = 128
    ignore_eos: bool = False
    seed: int = 0
    concurrency: tuple[int, ...] = (1,)
    trust_noise: bool = False
    target_s: float = 90.0  # most that the profile of a target may take
    drafter_s: float = 60.0  # and that of a drafter


class Laboratory:
    """Measures on one loaded target.

    Args:
        loaded: The target.
        plain: Plain decoding of it, as a recipe.
        prompts: The workload.
        plan: Conditions.
        config: The target's own config, for warnings.
    """

    def __init__(
        self,
        loaded: LoadedTarget,
        plain: Recipe,
        prompts: Sequence[TracedPrompt],
        plan: LabPlan,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self._loaded, self._plain, self._prompts, self._plan = loaded, plain, list(prompts), plan
        self._config = dict(config or {})

    @property
    def target(self) -> dict[str, Any]:
        """Facts about the target."""
        info = self._loaded.target.info
        return {"name": info.name, **target_facts(info)}

    @property
    def machine(self) -> dict[str, Any]:
        """Facts that decide speed: the fingerprint of everything measured here."""
        return dict(ProfileKey.of(self._plain, self._loaded.target.info).machine)

    @property
    def context(self) -> int:
        """Committed tokens of a request half way through, on average."""
        lengths = [len(each.tokens) for each in self._prompts]
        return sum(lengths) // len(lengths) + self._plan.max_new_tokens // 2

    def applies(self, recipes: Mapping[str, Recipe]) -> tuple[dict[str, Recipe], list[Refused], list[str]]:
        """Recipes that apply, refusals, and warnings."""
        info, conditions = self._loaded.target.info, self._conditions()
        kept, refused = preflight(recipes, info, conditions, partial(build_drafter, loaded=self._loaded))
        return kept, refused, warnings_of(kept, self._config, str(info.device))

    def memory(self, recipe: Recipe) -> int:
        """Bytes a recipe needs beyond plain decoding."""
        return memory_need(recipe, self._loaded.target.info, self._conditions()).total

    def placed(self, recipe: Recipe) -> str:
        """Where a recipe's drafters compute, and in what."""
        return placed(recipe, self._loaded.target.info)

    def recorded(self, recipe: Recipe) -> float | None:
        """How often its first draft token agreed when the drafter was made, if that is known."""
        return recorded_agreement(recipe)

    def profile(self, recipe: Recipe, target: CostModel | None, advance: Advance) -> Profiled:
        """The cost model of a recipe: kept from before where the fingerprint matches, else measured and kept.

        Args:
            recipe: What to measure.
            target: The profile of plain decoding, whose passes serve all recipes; None measures them.
            advance: Called with the name of what was timed.

        Raises:
            DataError: The machine is too noisy, or the time did not last.
            SpecFlowError: The drafter cannot be built.
        """
        known = find_profile(recipe, self._loaded)
        if known is not None and self._covers(known, recipe):
            return measured_twice(recipe.name, lambda times: known, self._plan.trust_noise)
        parts, most = self._parts(recipe), target is None

        def measure(times: int) -> CostModel:
            models = [self._measure(parts, recipe, batch, (most, times), advance) for batch in self._batches]
            found = _together(models)
            return found if target is None else with_target(found, target)

        found = measured_twice(recipe.name, measure, self._plan.trust_noise)
        self._keep(recipe, found.model)
        return found

    def trace(
        self, recipes: Mapping[str, Recipe], space: Space, costs: Mapping[str, CostModel], advance: Advance
    ) -> tuple[Scorer, list[Refused]]:
        """Trace the workload with all recipes; those that cannot be traced are left out with their reasons."""
        plan = TracePlan(self._plan.max_new_tokens, self._plan.ignore_eos, self._plan.seed)
        path = self._plan.directory / "trace"
        deep = {name: _as_deep(recipe, space) for name, recipe in recipes.items()}
        refused = []
        try:
            record({self._plain.name: self._plain, **deep}, self._prompts, path, self._loaded, plan, advance)
        except SpecFlowError:
            for name, recipe in {self._plain.name: self._plain, **deep}.items():
                try:
                    record({name: recipe}, self._prompts, path, self._loaded, plan, advance)
                except SpecFlowError as error:
                    if recipe.draft is None:
                        raise
                    refused.append(Refused(recipe=name, phase="trace", reason=str(error)))
        return ReplayScorer(load_trace(path), space, costs, self.memory), refused

    def groups(self, concurrency: int) -> list[Group]:
        """Requests that are decoded together, classes mixed; prompts come again where there are too few."""
        mixed = list(_mixed(self._prompts))
        count = len(mixed) if concurrency == 1 else max(FEWEST_PROMPTS, len(mixed) // concurrency)
        endless = cycle(enumerate(mixed))
        found = []
        for number in range(count):
            part = list(islice(endless, concurrency))
            same = {prompt.category for _, prompt in part}
            key = part[0][1].key if concurrency == 1 else f"{concurrency} at once, {number + 1}"
            tokens = tuple(prompt.tokens for _, prompt in part)
            found.append(Group(key, same.pop() if len(same) == 1 else "", tokens, self._plan.seed + part[0][0]))
        return found

    def runner(self, space: Space, concurrency: int, costs: Mapping[str, CostModel]) -> Runner:
        """What decodes contestants, each with the costs that its recipe was priced with."""

        def made(candidate: Candidate) -> Recipe | None:
            recipe, model = space.recipe(candidate), costs.get(candidate.recipe)
            return self.with_costs(recipe, model) if recipe and recipe.draft and model else recipe

        settings = {"max_new_tokens": self._plan.max_new_tokens, "ignore_eos": self._plan.ignore_eos}
        return EngineRunner(made, self._loaded, settings, concurrency, Candidate(self._plain.name))

    def with_costs(self, recipe: Recipe, model: CostModel) -> Recipe:
        """The recipe with its cost table in it."""
        section = costs_section(ProfileKey.of(recipe, self._loaded.target.info), model)
        return recipe.model_copy(update={"runtime": recipe.runtime.model_copy(update={"costs": section})})

    def provenance(self, files: Sequence[Path] = ()) -> dict[str, Any]:
        """Where the figures come from."""
        return asdict(Provenance.collect(str(self._loaded.target.info.device), [self._plan.seed], files))

    @property
    def _batches(self) -> tuple[int, ...]:
        return tuple(sorted({1, *self._plan.concurrency}))

    def _conditions(self) -> Conditions:
        context = max(len(each.tokens) for each in self._prompts) + self._plan.max_new_tokens
        return Conditions(max(self._batches), context, free_memory(str(self._loaded.target.info.device)))

    def _covers(self, model: CostModel, recipe: Recipe) -> bool:
        """Whether a kept profile has every batch size, and depths as deep as the recipe drafts."""
        k = recipe.draft.k if recipe.draft is not None else 0
        batches = {timing.batch for timing in model.target}
        deepest = max((timing.size for timing in model.draft), default=0)
        return set(self._batches) <= batches and (k == 0 or deepest >= min(k, MOST_ROWS))

    def _parts(self, recipe: Recipe) -> EngineParts:
        return EngineParts(
            target=self._loaded.target,
            codec=self._loaded.codec,
            rule=build_rule(recipe),
            length=Fixed(recipe.draft.k if recipe.draft is not None else 0),
            drafter=build_drafter(recipe, self._loaded),
            torch_threads=threads_beside(recipe, self._loaded),
        )

    def _measure(
        self, parts: EngineParts, recipe: Recipe, batch: int, how: tuple[bool, int], advance: Advance
    ) -> CostModel:
        """One batch size; `how` says whether all rows are timed, and by what the repeats are multiplied."""
        all_rows, times = how
        most = max(2, MOST_ROWS // batch)
        k = min(recipe.draft.k, most) if recipe.draft is not None else 0
        longest = self._conditions().context
        contexts = tuple(each for each in CONTEXTS if each <= 2 * longest) or CONTEXTS[:1]
        seconds = (self._plan.target_s if all_rows else self._plan.drafter_s) * times / len(self._batches)
        asked = Plan(
            rows=tuple(rows for rows in ROWS if rows <= most) if all_rows else (1,),
            contexts=contexts,
            batches=(batch,),
            repeat=REPEAT * times,
            budget_s=seconds,
        )
        return Profiler(parts, make_plan(parts, k, asked, stretch=True), recipe.sampling).measure(advance)

    def _keep(self, recipe: Recipe, model: CostModel) -> None:
        key = ProfileKey.of(recipe, self._loaded.target.info)
        save_profile(profiles_dir() / key.file_name, profile_data(key, model, self.provenance()))


def _together(models: Sequence[CostModel]) -> CostModel:
    """One model of several batch sizes."""
    tables = {
        name: tuple(timing for model in models for timing in getattr(model, name))
        for name in ("target", "draft", "own_blocks", "overhead")
    }
    return CostModel(**tables, nodes={depth: count for model in models for depth, count in model.nodes.items()})


def _as_deep(recipe: Recipe, space: Space) -> Recipe:
    """The recipe with its search space for K said aloud, so that drafters are recorded that deep."""
    depths = next((knob.choices for knob in space.knobs[recipe.name] if knob.key == K), ())
    return recipe.model_copy(update={"tune": {K: TuneRange(choices=depths)}}) if depths else recipe


def _mixed(prompts: Sequence[TracedPrompt]) -> Iterator[TracedPrompt]:
    """One prompt of each class in turn, as long as there are some."""
    by_class: dict[str, list[TracedPrompt]] = {}
    for each in prompts:
        by_class.setdefault(each.category, []).append(each)
    for place in range(max(map(len, by_class.values()))):
        yield from (group[place] for group in by_class.values() if place < len(group))

"""Traces of tiny models, and real runs of the same requests with every round noted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from tiny import NumberText, tiny_target

from specflow.build import LoadedTarget, build_drafter, build_rule
from specflow.engine import Engine, EngineParts, EngineSettings
from specflow.length import POLICIES, ByMatch, Costs, ExpectedGain, Fixed, LengthPolicy, Until
from specflow.measure import merge_counts
from specflow.recipe import Recipe, load_recipe
from specflow.request import RequestState
from specflow.types import Counts, Generation
from tuner.recorded import Trace
from tuner.trace import TracedPrompt, TracePlan, record

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
PHRASE = (5, 9, 33, 17, 40, 41)
PROMPTS = (PHRASE * 3, (7,), (*PHRASE, 3, *PHRASE, 4, 5, 9), (11,) * 20, (8, 30, 8))
TARGET = LoadedTarget(tiny_target(), NumberText())  # type: ignore[arg-type]
GENERAL: dict[str, list[list[str]]] = {
    "ngram": [["length.policy=match"], ["length.policy=match", "length.per_match=1.0"], ["length.policy=additive"]],
    "dspark": [
        ["length.policy=additive", "length.up=1", "length.down=2"],
        ["length.policy=threshold", "length.start=0.05", "length.step=0.5"],
        ["length.policy=confidence", "length.threshold=0.4"],
        ["length.policy=confidence", "length.threshold=0.2", "length.cumulative=true"],
        ["length.policy=expected_gain", "length.probe=2"],
        ["length.policy=expected_gain", "length.trim=false", "length.probe=1"],
    ],
    "layer_skip": [
        ["length.policy=threshold", "length.start=0.3", "length.step=0.3"],
        ["length.policy=confidence", "length.threshold=0.3"],
        ["length.policy=expected_gain", "length.probe=3"],
        ["length.policy=additive", "length.start=1"],
    ],
    "history_then_dspark": [
        ["length.policy=fixed"],
        ["length.policy=additive"],
        ["length.policy=expected_gain", "length.probe=2"],
    ],
    "eagle2": [["length.policy=additive"], ["length.policy=expected_gain", "length.probe=2"]],
}
"""Recipes and length policies that together take every way through a replay."""
PLAN = TracePlan(max_new_tokens=24, seed=3, batch=2)


def recipe_at(path: Path, k: int, settings: Sequence[str] = ()) -> Recipe:
    """A shipped recipe with blocks of k, its lists of layers folded into the few that the tiny target has."""
    draft = load_recipe(str(path)).draft
    asked = list(settings) if draft is None else [f"draft.k={k}", *settings]
    for name, field in getattr(type(draft), "model_fields", {}).items():
        if isinstance(field.json_schema_extra, dict) and field.json_schema_extra.get("of") == "layers":
            layers = sorted({layer % TARGET.target.info.num_layers for layer in getattr(draft, name)})
            asked.append(f"draft.{name}={layers}")
    return load_recipe(str(path), asked)


def recorded(
    recipes: Mapping[str, Recipe], path: Path, plan: TracePlan = PLAN, prompts: Sequence[tuple[int, ...]] = PROMPTS
) -> Trace:
    work = [TracedPrompt(str(number), f"kind{number % 2}", tokens) for number, tokens in enumerate(prompts)]
    return record(recipes, work, path, TARGET, plan)


class SteepCosts:
    """Rounds whose rows cost much, and more in long contexts; cheap drafts."""

    def draft_s(self, depth: int, batch: int, context: int) -> float:
        return 1e-4 * depth

    def verify_s(self, depth: int, batch: int, context: int) -> float:
        return 1e-3 * (1.0 + 0.25 * depth * batch + 1e-3 * context)

    def overhead_s(self, depth: int = 0, batch: int = 1) -> float:
        return 1e-4

    def round_s(self, depth: int, batch: int, context: int) -> float:
        spent = self.draft_s(depth, batch, context) + self.verify_s(depth, batch, context)
        return spent + self.overhead_s(depth, batch)


@dataclass(frozen=True)
class Real:
    """A real run."""

    rounds: list[tuple[tuple[int, int], ...]]  # by request: drafted and accepted of every round
    counts: Counts
    made: list[Generation]


def run_for_real(
    recipe: Recipe,
    costs: Costs | None = None,
    plan: TracePlan = PLAN,
    batch: int = 1,
    prompts: Sequence[tuple[int, ...]] = PROMPTS,
) -> Real:
    """The same requests decoded by the engine; each round is what it adds to its request's counts."""
    policy: LengthPolicy = Fixed(0)
    if recipe.draft is not None and recipe.draft.k:
        policy = POLICIES[recipe.length.policy].policy(k=recipe.draft.k, **recipe.length.options)
        if costs is not None and isinstance(policy, ExpectedGain | ByMatch):
            policy.use(costs)
        policy = policy if recipe.length.until is None else Until(policy, recipe.length.until)
    parts = EngineParts(TARGET.target, TARGET.codec, build_rule(recipe), policy, build_drafter(recipe, TARGET))
    engine = Engine(parts, EngineSettings(batch, prefill_chunk=recipe.runtime.prefill_chunk))
    asked = {"max_new_tokens": plan.max_new_tokens, "ignore_eos": plan.ignore_eos}
    each = [recipe.sampling.model_copy(update={**asked, "seed": plan.seed + n}) for n in range(len(prompts))]
    rounds: list[list[tuple[int, int]]] = [[] for _ in prompts]
    count_round = RequestState.count_round

    def note(state: RequestState, *told: int) -> None:
        before = state.counts.num_draft_tokens, state.counts.num_accepted_draft_tokens
        count_round(state, *told)
        after = state.counts.num_draft_tokens, state.counts.num_accepted_draft_tokens
        rounds[state.request.index].append((after[0] - before[0], after[1] - before[1]))

    with patch.object(RequestState, "count_round", note):
        made = engine.generate(prompts, each)
    return Real([tuple(each) for each in rounds], merge_counts(one.counts for one in made), made)

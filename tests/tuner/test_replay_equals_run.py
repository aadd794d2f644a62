"""A replay is a real run, round by round: every shipped recipe, length, policy, cascade and batch, on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
from tracing import GENERAL, RECIPES, ROOT, SteepCosts, recipe_at, recorded, run_for_real

from specflow.errors import DataError
from specflow.recipe import Recipe
from tuner.recorded import Trace
from tuner.replay import Replayer
from tuner.replay_types import ReplayConfig, ReplayResult

DEEPEST = 6
DRAFTING = [path for path in RECIPES if path.stem != "vanilla"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """All recipes in one trace."""
    made = [recipe_at(path, DEEPEST) for path in RECIPES]
    return recorded({recipe.name: recipe for recipe in made}, tmp_path_factory.mktemp("trace") / "all")


def check(trace: Trace, recipe: Recipe, costs: SteepCosts | None = None, batch: int = 1) -> ReplayResult:
    """Replay and real run agree in every round and every count."""
    result = Replayer(trace, costs).run(ReplayConfig.of(recipe, trace.info, concurrency=batch))
    real = run_for_real(recipe, costs, batch=batch)
    assert [each.rounds for each in result.requests] == real.rounds
    assert result.counts == real.counts
    assert [each.tokens for each in result.requests] == [len(made.tokens) for made in real.made]
    return result


def test_texts_end_in_all_ways(trace: Trace) -> None:
    """Some at a stop id, some at their length, or the tests below see too little."""
    full = [request.num_tokens == request.most for request in trace.requests]
    assert any(full)
    assert not all(full)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_as_it_stands(path: Path, trace: Trace) -> None:
    check(trace, recipe_at(path, DEEPEST))


@pytest.mark.parametrize("path", DRAFTING, ids=lambda path: path.stem)
def test_every_recipe_with_every_k_the_trace_is_exact_for(path: Path, trace: Trace) -> None:
    """Others are refused, with the reason: a block of another width, or a tree laid out for another depth."""
    drafters = trace.info.recipes[path.stem]
    exact = set.intersection(*(set(trace.info.drafters[name].exact_k) for name in drafters))
    for k in (2, DEEPEST):
        recipe = recipe_at(path, k, ["length.policy=fixed"])
        if k in exact:
            check(trace, recipe)
        else:
            with pytest.raises(DataError, match=r"(?s)draft\.k of .*trace it again"):
                Replayer(trace).run(ReplayConfig.of(recipe, trace.info))
    assert DEEPEST in exact


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", GENERAL)
def test_every_policy(name: str, batch: int, trace: Trace) -> None:
    """With costs that make long blocks dear, so that policies have something to decide."""
    path, policies = ROOT / "recipes" / f"{name}.yaml", GENERAL[name]
    assert sum(check(trace, recipe_at(path, DEEPEST, each), SteepCosts(), batch).accepted for each in policies) > 0


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", GENERAL)
def test_drafting_that_ends_at_a_length_of_context(name: str, batch: int, trace: Trace) -> None:
    """Of some requests before their first token, of some in the middle, of some never."""
    path, drafted = ROOT / "recipes" / f"{name}.yaml", []
    for until in ([], ["length.until=26"], ["length.until=1"]):
        each = [[*policy, *until] for policy in (["length.policy=fixed"], *GENERAL[name])]
        drafted.append(sum(check(trace, recipe_at(path, DEEPEST, one), SteepCosts(), batch).drafted for one in each))
    assert drafted[0] > drafted[1] > drafted[2] == 0


@pytest.mark.parametrize("name", ["dspark", "layer_skip", "history_then_dspark"])
def test_cuts_that_are_remembered_are_those_of_a_real_run(name: str, trace: Trace) -> None:
    """One player for several options, each of them twice: what one weighed serves the others."""
    asked = [
        recipe_at(ROOT / "recipes" / f"{name}.yaml", DEEPEST, [f"length.{option}", "length.policy=expected_gain"])
        for option in ("probe=2", "probe=1", "hysteresis=1.5", "trim=false")
    ]
    player = Replayer(trace, SteepCosts())
    for _ in range(2):
        for recipe in asked:
            result, real = player.run(ReplayConfig.of(recipe, trace.info)), run_for_real(recipe, SteepCosts())
            assert [each.rounds for each in result.requests] == real.rounds
            assert result.drafted > 0


@pytest.mark.parametrize("batch", [3])
@pytest.mark.parametrize("path", DRAFTING, ids=lambda path: path.stem)
def test_every_recipe_in_batches(path: Path, batch: int, trace: Trace) -> None:
    check(trace, recipe_at(path, DEEPEST), SteepCosts(), batch)

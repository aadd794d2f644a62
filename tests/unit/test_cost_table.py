"""Costs that a recipe carries: they come back as they were, serve only where they were measured, and are checked."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny import NumberText, tiny_target

from specflow import build
from specflow.build import LoadedTarget, build_engine
from specflow.cost import CostModel, ProfileKey, Timing
from specflow.cost_table import carried_costs, costs_section, model_of
from specflow.errors import RecipeError
from specflow.measure import Spread
from specflow.recipe import Recipe, dump_recipe, parse_recipe
from specflow.recipe_yaml import read_yaml
from specflow.types import Sampling

LOADED = LoadedTarget(tiny_target(), NumberText())  # type: ignore[arg-type]
MODEL = CostModel(
    target=tuple(Timing(rows, 1, 64, Spread(0.01 * rows, 0.009 * rows, 0.011 * rows, 5)) for rows in (1, 4, 8)),
    draft=(Timing(4, 1, 64, Spread(0.002, 0.002, 0.002, 5)),),
    overhead=(Timing(0, 1, 64, Spread(0.0, 0.0, 0.0, 5)),),
    nodes={4: 9},
)


def tuned(**draft: object) -> Recipe:
    recipe = parse_recipe(
        {"name": "tuned", "draft": {"method": "ngram", "k": 4, **draft}, "length": {"policy": "expected_gain"}}
    )
    section = costs_section(ProfileKey.of(recipe, LOADED.target.info), MODEL)
    return recipe.model_copy(update={"runtime": recipe.runtime.model_copy(update={"costs": section})})


def test_it_survives_the_file() -> None:
    again = parse_recipe(read_yaml(dump_recipe(tuned()), "tuned.yaml").data)
    assert again == tuned()
    assert again.runtime.costs is not None
    assert model_of(again.runtime.costs) == MODEL


def test_it_is_used_where_it_was_measured(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(build, "find_profile", lambda recipe, loaded: pytest.fail("the recipe has a table"))
    engine = build_engine(tuned(), LOADED)
    assert engine.generate([[5, 6, 5, 6, 5]], Sampling(max_new_tokens=4))
    assert not caplog.records


def test_another_k_is_the_same_table_and_another_draft_is_not(caplog: pytest.LogCaptureFixture) -> None:
    recipe = tuned()
    assert recipe.draft is not None
    shorter = recipe.model_copy(update={"draft": recipe.draft.model_copy(update={"k": 2})})
    assert carried_costs(shorter, LOADED) == MODEL
    other = recipe.model_copy(update={"draft": recipe.draft.model_copy(update={"min_match": 2})})
    assert carried_costs(other, LOADED) is None
    assert "another draft section" in caplog.text


def test_on_another_machine_it_is_refused_with_what_differs(caplog: pytest.LogCaptureFixture) -> None:
    recipe = tuned()
    costs = recipe.runtime.costs
    assert costs is not None
    moved = costs.model_copy(update={"machine": {**costs.machine, "cpu_model": "abacus"}})
    there = recipe.model_copy(update={"runtime": recipe.runtime.model_copy(update={"costs": moved})})
    assert carried_costs(there, LOADED) is None
    assert "machine cpu_model: 'abacus' there" in caplog.text


def test_a_recipe_without_a_table_carries_none() -> None:
    assert carried_costs(parse_recipe({"draft": {"method": "ngram"}}), LOADED) is None


@pytest.mark.parametrize(
    "line", ["", "1 1 64", "a 1 64 0.1 0.1 0.1 5", "1 0 64 0.1 0.1 0.1 5", "1 1 64 nan 0.1 0.1 5", "1 1 64 0 0 0 5"]
)
def test_a_line_that_is_no_timing_is_named(line: str) -> None:
    costs = tuned().runtime.costs
    assert costs is not None
    with pytest.raises(RecipeError, match=r"runtime\.costs\.passes\.1"):
        model_of(costs.model_copy(update={"passes": (costs.passes[0], line)}))


def test_a_table_without_the_target_is_none() -> None:
    costs = tuned().runtime.costs
    assert costs is not None
    with pytest.raises(RecipeError, match="at least one timing"):
        model_of(costs.model_copy(update={"passes": ()}))


def test_rounding_keeps_four_digits() -> None:
    exact = replace(MODEL, target=(Timing(1, 1, 64, Spread(0.0123456, 0.0123456, 0.0123456, 5)),))
    key = ProfileKey.of(tuned(), LOADED.target.info)
    assert model_of(costs_section(key, exact)).target[0].seconds.median == 0.01235

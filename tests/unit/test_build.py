"""From a recipe to an engine: which runtime a model gets, and that mistakes show before anything is loaded."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_gguf import made_store
from tiny import NumberText, tiny_target
from transformers import AutoTokenizer, MambaConfig

from specflow import build, recipe_draft
from specflow.build import LoadedTarget, build_drafter, build_engine, load_target
from specflow.cost import ProfileKey
from specflow.draft.base import Needs, SourceContext
from specflow.draft.registry import discover
from specflow.errors import ModelError, RecipeError
from specflow.length import POLICIES
from specflow.recipe import Recipe, load_recipe, parse_recipe, shipped_recipes, trained_recipes
from specflow.recipe_sections import CostsSection, TargetSection
from specflow.target.wheel import WheelModel
from specflow.types import Sampling

VANILLA = Path(__file__).resolve().parents[2] / "recipes" / "vanilla.yaml"


@pytest.fixture
def directory(made_wheel: tuple[WheelModel, Path], model_cache: Path) -> Path:
    """A tiny Llama."""
    return made_store(made_wheel, model_cache).ensure("tiny").directory


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_auto_takes_the_native_decoder(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = load_target(TargetSection(model=str(directory), runtime="torch")).target
    assert target.info.runtime == "native"
    assert caplog.records == []


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32}


def test_auto_falls_to_the_adapter_where_native_does_not_compute_the_positions(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change_config(directory, rope_parameters=DYNAMIC)
    with caplog.at_level(logging.WARNING, logger="specflow"):
        target = load_target(TargetSection(model=str(directory))).target
    assert (target.info.runtime, target.info.context_length) == ("transformers", 32)
    assert [record.getMessage() for record in caplog.records if record.name == "specflow.target.opening"] == [
        f"{directory}: the native decoder does not compute rope_type 'dynamic'; transformers runs it"
    ]
    with pytest.raises(ModelError, match="native does not compute rope_type 'dynamic'"):
        load_target(TargetSection(model=str(directory), implementation="native"))


def test_row_invariance_is_refused_by_the_adapter_alone(directory: Path) -> None:
    with pytest.raises(ModelError, match="cannot promise"):
        load_target(TargetSection(model=str(directory), implementation="transformers", row_invariant=True))


def test_recurrent_models_are_refused(directory: Path) -> None:
    MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=1).save_pretrained(directory)
    with pytest.raises(ModelError, match="cannot be rolled back"):
        load_target(TargetSection(model=str(directory)))


def test_rule_and_length_are_made_before_the_target_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(recipe: object) -> Any:
        raise ModelError("verify", "made too late")

    monkeypatch.setattr(build, "build_rule", refuse)
    monkeypatch.setattr(build, "load_target", lambda section: pytest.fail("loaded first"))
    with pytest.raises(ModelError, match="made too late"):
        build_engine(load_recipe(str(VANILLA)))


@pytest.mark.parametrize("trusted", [False, True])
def test_the_tokenizer_is_trusted_as_the_model_is(
    trusted: bool, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, plain = [], AutoTokenizer.from_pretrained

    def load(*args: Any, **options: Any) -> Any:
        asked.append(options["trust_remote_code"])
        return plain(*args, **options)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", load)
    load_target(TargetSection(model=str(directory), trust_remote_code=trusted))
    assert asked == [trusted]


class MadeCosts:
    """A pass costs the same for any depth, so that drafting pays."""

    def round_s(self, depth: int, batch: int, context: int) -> float:
        return 1.0

    def verify_s(self, depth: int, batch: int, context: int) -> float:
        return 1.0


@pytest.mark.parametrize("policy", ["expected_gain", "fixed"])
def test_a_policy_that_weighs_costs_gets_the_profile_of_this_machine(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def find(recipe: Recipe, loaded: LoadedTarget) -> MadeCosts:
        asked.append(recipe.length.policy)
        return MadeCosts()

    monkeypatch.setattr(build, "find_profile", find)
    target = LoadedTarget(tiny_target(), NumberText())  # type: ignore[arg-type]
    recipe = parse_recipe({"draft": {"method": "ngram", "k": 4}, "length": {"policy": policy}})
    engine = build_engine(recipe, target)
    assert asked == (["expected_gain"] if policy == "expected_gain" else [])
    assert engine.generate([[5, 6, 5, 6, 5]], Sampling(max_new_tokens=4))


@pytest.mark.parametrize("where", ["this machine", "another machine"])
def test_expected_gain_without_measured_costs_is_refused(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is guessed: a table that was measured elsewhere is no better than none."""
    monkeypatch.setattr(build, "find_profile", lambda recipe, loaded: None)
    target = LoadedTarget(tiny_target(), NumberText())  # type: ignore[arg-type]
    recipe = parse_recipe({"name": "mine", "draft": {"method": "ngram"}, "length": {"policy": "expected_gain"}})
    if where == "another machine":
        machine = {**ProfileKey.of(recipe, target.target.info).machine, "cpu_model": "abacus"}
        costs = CostsSection(target={}, machine=machine, passes=("1 1 64 0.1 0.1 0.1 5",))
        recipe = recipe.model_copy(update={"runtime": recipe.runtime.model_copy(update={"costs": costs})})
    with pytest.raises(RecipeError) as error:
        build_engine(recipe, target)
    assert error.value.where == "mine: length.policy"
    assert "no cost profile" in error.value.found
    assert all(each in error.value.hint for each in ("specflow profile", "specflow tune", "length.policy=fixed"))


@pytest.mark.parametrize("policy", ["fixed", "match"])
def test_policies_that_can_do_without_costs_run_without_them(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_profile", lambda recipe, loaded: None)
    target = LoadedTarget(tiny_target(), NumberText())  # type: ignore[arg-type]
    recipe = parse_recipe({"draft": {"method": "ngram"}, "length": {"policy": policy}})
    assert build_engine(recipe, target).generate([[5, 6, 5, 6, 5]], Sampling(max_new_tokens=4))


@pytest.mark.parametrize("batch", [1, 2])
def test_beyond_length_until_no_draft_is_asked_for_and_the_text_is_the_same(batch: int) -> None:
    target = LoadedTarget(tiny_target(), NumberText())  # type: ignore[arg-type]
    prompts, made = [[5, 6, 5, 6, 5], [7, 8] * 6], {}
    for until in (None, 20):
        length = {"policy": "fixed"} if until is None else {"policy": "fixed", "until": until}
        recipe = parse_recipe({"draft": {"method": "ngram", "k": 2}, "length": length, "runtime": {"batch": batch}})
        made[until] = build_engine(recipe, target).generate(prompts, Sampling(max_new_tokens=40, ignore_eos=True))
    assert [each.tokens for each in made[None]] == [each.tokens for each in made[20]]
    for free, stopped, prompt in zip(made[None], made[20], prompts, strict=True):
        assert stopped.counts.num_draft_calls <= 20 - len(prompt) < free.counts.num_draft_calls


@pytest.mark.parametrize("name", [*shipped_recipes(), *trained_recipes()])
def test_every_recipe_that_ships_runs_without_a_profile(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.draft is None or not POLICIES[recipe.length.policy].needs_costs


def test_parts_of_a_combination_are_built_with_what_is_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merged tokens must follow from their prefix, so rules that weigh laws get drafts without chance there."""
    seen: list[SourceContext] = []

    def note(config: object, context: SourceContext) -> SimpleNamespace:
        seen.append(context)
        return SimpleNamespace(needs=Needs(), num_nodes=context.k, branches=False)

    spied = {name: replace(info, build=note) for name, info in discover().items()}
    monkeypatch.setattr(recipe_draft, "discover", lambda: spied)
    target = LoadedTarget(tiny_target(), NumberText())  # type: ignore[arg-type]
    parts = ({"method": "ngram"}, {"method": "suffix", "k": 3})
    for policy, rule, draw in (
        ("first_of", "rejection", "sampled"),
        ("first_of", "match", "coupled"),
        ("merge", "rejection", "greedy"),
        ("merge", "match", "coupled"),
    ):
        seen.clear()
        recipe = parse_recipe({"draft": {policy: parts, "k": 5}, "verify": {"rule": rule}})
        assert build_drafter(recipe, target) is not None
        assert [context.k for context in seen] == [5, 3]
        assert [context.dependency for context in seen] == ["copy", "copy"]
        assert {context.draw for context in seen} == {draw}

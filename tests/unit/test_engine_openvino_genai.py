"""openvino-genai: settings out and in, and every trap of its GenerationConfig by name."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
from engine_trips import (
    NUMBERS,
    errors,
    export,
    export_recipe,
    findings,
    gaps,
    meaning,
    mutated,
    read,
    recipes,
    same_again,
    survives,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from specflow.errors import RecipeError
from specflow.export.engines.base import Exported
from specflow.export.engines.openvino_genai_read import FIELDS, most_candidates
from specflow.export.recipe_view import Step
from specflow.recipe import load_recipe, parse_recipe, shipped_recipes

NAME = "openvino_genai"
FILE = "settings.json"
ERAS = ("2026.4.1", "2025.4")

HISTORY = st.tuples(st.integers(1, 256), st.integers(1, 256)).map(
    lambda drawn: {"method": "ngram", "k": drawn[0], "min_match": 1, "max_match": drawn[1]}
)
MODEL = st.integers(1, 256).map(lambda k: {"method": "small_model", "k": k, "model": "org/draft"})
CHAIN = st.integers(1, 256).map(lambda k: {"method": "eagle3", "k": k, "weights": "org/eagle3"})
FIXED = st.just({"policy": "fixed"})


def said(exported: Exported) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(exported.files[FILE])
    return found


def config(exported: Exported) -> dict[str, Any]:
    found: dict[str, Any] = said(exported)["generation_config"]
    return found


@pytest.mark.parametrize("version", ERAS)
@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_shipped_recipes_come_back_as_they_went(name: str, version: str) -> None:
    exported = export(NAME, name, version=version)
    assert set(config(exported)) <= set(FIELDS)
    ast.parse(exported.files["generate.py"])
    same_again(NAME, exported, version, FILE)


@given(recipes(HISTORY | MODEL | CHAIN | st.none(), FIXED, st.just("match")))
@settings(max_examples=60, deadline=None)
def test_import_after_export_means_the_same(recipe: Any) -> None:
    exported = export_recipe(NAME, recipe)
    assert set(gaps(exported)) <= {"verify"}
    assert meaning(same_again(NAME, exported, file=FILE)) == meaning(recipe)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_trees_come_back_within_their_room(depth: int, branch: int, nodes: int) -> None:
    overrides = ["length.policy=fixed", "verify.rule=match", "draft.shape=beam"]
    overrides += [f"draft.k={depth}", f"draft.branch={branch}", f"draft.nodes={nodes}"]
    exported = export(NAME, "eagle3", *overrides)
    found = config(exported)
    assert (found["tree_depth"], found["branching_factor"]) == (depth, branch)
    assert depth <= found["num_assistant_tokens"] <= max(depth, most_candidates(branch, depth))
    assert ("draft.nodes" in gaps(exported)) == (found["num_assistant_tokens"] != nodes)
    same_again(NAME, exported, file=FILE)


@given(NUMBERS.filter(bool))
@settings(max_examples=20, deadline=None)
def test_a_threshold_comes_back(bar: float) -> None:
    data = {
        "draft": {"method": "small_model", "model": "a/b"},
        "length": {"policy": "threshold", "start": bar, "step": 0.0},
    }
    back = same_again(NAME, export_recipe(NAME, parse_recipe(data)), file=FILE)
    assert back.length.options["start"] == bar


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_fuzz_raises_our_errors_only(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["ngram", "small_model", "eagle3"]))
    survives(NAME, data.draw(mutated(export(NAME, name, "sampling.temperature=0.5").files[FILE])))
    survives(NAME, json.dumps(data.draw(st.dictionaries(st.sampled_from(FIELDS), st.integers(-2, 99) | st.text()))))


def test_a_number_of_tokens_and_a_threshold_exclude_each_other() -> None:
    data = {"draft": {"method": "small_model", "model": "a/b"}, "length": {"policy": "threshold", "start": 0.5}}
    exported = export_recipe(NAME, parse_recipe(data))
    assert config(exported)["assistant_confidence_threshold"] == 0.5
    assert "num_assistant_tokens" not in config(exported)
    assert {"length", "draft.k"} <= set(gaps(exported))
    both = json.dumps({"num_assistant_tokens": 5, "assistant_confidence_threshold": 0.5})
    assert findings(read(NAME, both), "assistant_confidence_threshold")[0].severity == "error"
    assert "assistant_confidence_threshold" not in config(export(NAME, "small_model"))


def test_an_unset_number_acts_as_five() -> None:
    pipeline = {**said(export(NAME, "small_model", "draft.model=a/b")), "generation_config": {"max_new_tokens": 5}}
    imported = read(NAME, json.dumps(pipeline))
    assert imported.recipe().draft.k == 5  # type: ignore[union-attr]
    assert findings(imported, "num_assistant_tokens")


def test_an_npu_adapts_the_number() -> None:
    pipeline = {**said(export(NAME, "small_model", "draft.model=a/b")), "device": "NPU"}
    assert "adapts" in findings(read(NAME, json.dumps(pipeline)), "device")[0].meaning


def test_prompt_lookup_needs_a_number_and_the_flag_of_the_pipeline() -> None:
    exported = export(NAME, "ngram", "draft.k=6")
    assert said(exported)["prompt_lookup"] is True
    assert (config(exported)["num_assistant_tokens"], config(exported)["max_ngram_size"]) == (6, 4)
    assert findings(read(NAME, json.dumps({"max_ngram_size": 3})), "max_ngram_size")[0].severity == "error"
    unflagged = {**said(exported), "prompt_lookup": False}
    assert "prompt_lookup=True" in findings(read(NAME, json.dumps(unflagged)), "max_ngram_size")[0].meaning
    lookup_alone = {**said(exported), "generation_config": {"num_assistant_tokens": 5}}
    assert findings(read(NAME, json.dumps(lookup_alone)), "max_ngram_size")[0].severity == "error"


def test_a_draft_model_and_prompt_lookup_exclude_each_other() -> None:
    both = {**said(export(NAME, "small_model", "draft.model=a/b")), "prompt_lookup": True}
    assert findings(read(NAME, json.dumps(both)), "max_ngram_size")[0].severity == "error"


def test_trees_are_greedy_and_have_room() -> None:
    tree = {"num_assistant_tokens": 4, "branching_factor": 2, "tree_depth": 5, "do_sample": True}
    errors = [each.where for each in read(NAME, json.dumps(tree)).findings if each.severity == "error"]
    assert errors == ["tree_depth", "num_assistant_tokens"]
    wide = {"num_assistant_tokens": 400, "branching_factor": 2, "tree_depth": 5}
    assert findings(read(NAME, json.dumps(wide)), "num_assistant_tokens")[0].fix == "num_assistant_tokens: 18"
    overrides = ["draft.shape=beam", "verify.rule=match", "length.policy=fixed", "sampling.temperature=0.5"]
    assert "greedy" in gaps(export(NAME, "eagle3", *overrides))["draft.shape"]
    assert "level by level" in gaps(export(NAME, "eagle3", "draft.shape=best_first", *overrides[1:3]))["draft.shape"]


def test_trees_came_with_2026_3() -> None:
    tree = json.dumps({"num_assistant_tokens": 8, "branching_factor": 2, "tree_depth": 3})
    assert findings(read(NAME, tree, "2025.4"), "tree_depth")[0].severity == "error"
    assert "no such method" in gaps(export(NAME, "eagle3", version="2025.4"))["draft"]


def test_a_config_read_from_a_file_leaves_things_out_in_silence() -> None:
    imported = read(
        NAME, json.dumps({"num_assistant_tokens": 5, "rng_seed": 3, "stop_token_ids": [4], "max_ngramsize": 2})
    )
    assert all(findings(imported, name) for name in ("rng_seed", "stop_token_ids", "max_ngramsize"))
    assert findings(imported, "max_ngramsize")[0].fix == "did you mean max_ngram_size?"
    exported = export(NAME, "ngram", "sampling.temperature=0.5", "sampling.seed=3", "sampling.stop_ids=[4]")
    assert (config(exported)["rng_seed"], config(exported)["stop_token_ids"]) == (3, [4])
    assert not [each for each in read(NAME, exported.files[FILE]).findings if each.where == "rng_seed"]


def test_temperature_zero_and_sampling_exclude_each_other() -> None:
    assert config(export(NAME, "vanilla")) == {"max_new_tokens": 256, "do_sample": False}
    assert findings(read(NAME, json.dumps({"do_sample": True, "temperature": 0})), "temperature")[0].severity == "error"


def test_a_top_k_that_keeps_everything_is_a_huge_number_there() -> None:
    assert read(NAME, json.dumps({"do_sample": True, "top_k": 2**64 - 1})).recipe().sampling.top_k == 0
    assert "top_k" not in config(export(NAME, "vanilla", "sampling.temperature=0.5"))


def test_beams_do_not_go_with_drafts() -> None:
    imported = read(NAME, json.dumps({"num_assistant_tokens": 5, "num_beams": 4, "num_return_sequences": 2}))
    assert errors(imported) == [
        "num_beams",
        "num_return_sequences",
    ]


def test_gaps_say_what_happens_instead() -> None:
    assert "no such method" in gaps(export(NAME, "medusa"))["draft"]
    assert gaps(export(NAME, "ngram", "draft.min_match=3"))["draft.min_match"] == "a match of one token drafts"
    assert "not checked" in gaps(export(NAME, "small_model", "sampling.temperature=1"))["verify"]
    recipe = load_recipe("small_model", ["draft.model=a/b", "runtime.batch=2"])
    exported = export_recipe(NAME, recipe, schedule=(Step(1, 1, 4), Step(2, 2, 1)))
    assert config(exported)["num_assistant_tokens"] == 1
    assert {"measured schedule", "runtime.batch"} <= set(gaps(exported))


@pytest.mark.parametrize("text", ["", "{}", '{"a": 1}', "not json", "[1]"])
def test_what_is_no_generation_config(text: str) -> None:
    with pytest.raises(RecipeError):
        read(NAME, text)


def test_a_command_line_is_not_read() -> None:
    with pytest.raises(RecipeError, match=r"settings\.json"):
        read(NAME, ["python", "generate.py"])

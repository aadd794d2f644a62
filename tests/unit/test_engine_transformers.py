"""transformers: scripts and generation configs out and in, and every trap of its arguments by name."""

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
from specflow.export.engines.transformers_read import OF_DRAFTERS, OF_SPECULATION
from specflow.export.recipe_view import Step
from specflow.recipe import load_recipe, parse_recipe, shipped_recipes

NAME = "transformers"
FILE = "generate.py"
ERAS = ("5.24.0", "4.50.0")
EARLY = "assistant_early_exit"

HISTORY = st.tuples(st.integers(1, 256), st.integers(1, 256)).map(
    lambda drawn: {"method": "ngram", "k": drawn[0], "min_match": 1, "max_match": drawn[1]}
)
MODEL = st.integers(1, 256).map(lambda k: {"method": "small_model", "k": k, "model": "org/draft"})
LAYERS = st.tuples(st.integers(1, 64), st.integers(1, 40)).map(
    lambda drawn: {"method": "early_exit", "k": drawn[0], "exit_layer": drawn[1]}
)
FIXED = st.just({"policy": "fixed"})
BARS = NUMBERS.filter(bool).map(lambda bar: {"policy": "threshold", "start": bar})
GROWING = st.integers(1, 64).map(lambda start: {"policy": "additive", "start": start})


def constants(exported: Exported) -> dict[str, Any]:
    """What the script's constants say."""
    found: dict[str, Any] = {}
    for node in ast.parse(exported.files[FILE]).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = ast.literal_eval(node.value)
    return found


@pytest.mark.parametrize("version", ERAS)
@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_shipped_recipes_come_back_as_they_went(name: str, version: str) -> None:
    exported = export(NAME, name, version=version)
    assert json.loads(exported.files["generation_config.json"]) == constants(exported)["SETTINGS"]
    same_again(NAME, exported, version, FILE)


@given(recipes(MODEL | LAYERS | st.none(), FIXED, st.just("rejection")))
@settings(max_examples=60, deadline=None)
def test_import_after_export_means_the_same(recipe: Any) -> None:
    exported = export_recipe(NAME, recipe)
    assert not exported.not_expressible
    assert meaning(same_again(NAME, exported, file=FILE)) == meaning(recipe)


@given(recipes(HISTORY, FIXED, st.just("match")))
@settings(max_examples=40, deadline=None)
def test_prompt_lookup_sizes_come_back(recipe: Any) -> None:
    exported = export_recipe(NAME, recipe)
    assert set(gaps(exported)) <= {"verify"}
    assert meaning(same_again(NAME, exported, file=FILE)) == meaning(recipe)


@given(recipes(MODEL, BARS | GROWING, st.just("rejection")))
@settings(max_examples=40, deadline=None)
def test_thresholds_and_schedules_come_back(recipe: Any) -> None:
    exported = export_recipe(NAME, recipe)
    assert set(gaps(exported)) == {"length"}
    back = same_again(NAME, exported, file=FILE)
    assert back.length.policy == recipe.length.policy
    if recipe.length.policy == "threshold":
        assert back.length == recipe.length


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_fuzz_raises_our_errors_only(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["ngram", "small_model"]))
    exported = export(NAME, name, "sampling.temperature=0.5", "sampling.logit_bias={3: 1.5}")
    survives(NAME, data.draw(mutated(data.draw(st.sampled_from(sorted(exported.files.values()))))))
    words = [f"{key}={value}" for key, value in constants(exported)["SETTINGS"].items()]
    survives(NAME, data.draw(mutated(" ".join(words))).split(" "))


def test_fields_are_those_of_the_installed_generation_config() -> None:
    from transformers import GenerationConfig

    empty = GenerationConfig()
    assert [name for name in OF_SPECULATION if not hasattr(empty, name)] == []
    assert [name for name in OF_SPECULATION if getattr(empty, name) is not None] == []
    defaults = GenerationConfig._get_default_generation_params()
    assert [defaults[name] for name in OF_DRAFTERS] == [20, "constant", 0.4]
    for name in ("ngram", "small_model", "early_exit", "mtp", "dflash"):
        more = ["draft.exit_layer=5"] if name == "early_exit" else []
        said = constants(export(NAME, name, "sampling.temperature=0.5", "sampling.top_k=0", *more))
        for part in (said["SETTINGS"], said["DRAFTING"]):
            assert [key for key in part if not hasattr(empty, key)] == []
            GenerationConfig(**part).validate(strict=True)


def test_confidence_threshold_is_on_by_default_and_switched_off() -> None:
    drafting = constants(export(NAME, "small_model"))["DRAFTING"]
    assert drafting["assistant_confidence_threshold"] == 0.0
    assert drafting["num_assistant_tokens_schedule"] == "constant"
    imported = read(NAME, ["assistant_model=org/draft"])
    (finding,) = findings(imported, "assistant_confidence_threshold")
    assert finding.severity == "warning"
    assert imported.recipe().length.options["start"] == 0.4


def test_settings_of_the_assistant_have_no_effect_as_arguments_of_generate() -> None:
    text = """
from transformers import AutoModelForCausalLM
target = AutoModelForCausalLM.from_pretrained("org/target")
draft = AutoModelForCausalLM.from_pretrained("org/draft")
target.generate(**inputs, assistant_model=draft, num_assistant_tokens=5, assistant_confidence_threshold=0)
"""
    imported = read(NAME, text)
    (finding,) = findings(imported, "num_assistant_tokens")[:1]
    assert finding.severity == "warning"
    assert finding.fix == "assistant.generation_config.num_assistant_tokens = 5"
    recipe = imported.recipe()
    assert (recipe.target.model, recipe.draft.k) == ("org/target", 20)  # type: ignore[union-attr]
    right = text.replace("target.generate", "draft.generation_config.num_assistant_tokens = 5\ntarget.generate")
    assert read(NAME, right).recipe().draft.k == 5  # type: ignore[union-attr]
    assert not findings(imported, "assistant_model")  # it is followed: its value is known


def test_a_generation_config_object_is_followed() -> None:
    text = """
config = GenerationConfig(do_sample=True, top_k=0)
config.prompt_lookup_num_tokens = 7
model = AutoModelForCausalLM.from_pretrained("org/target")
model.generate(ids, generation_config=config, max_new_tokens=LENGTH)
"""
    imported = read(NAME, text)
    recipe = imported.recipe()
    assert (recipe.draft.k, recipe.sampling.temperature) == (7, 1.0)  # type: ignore[union-attr]
    assert findings(imported, "max_new_tokens")[0].severity == "note"
    assert not findings(imported, "generation_config")


def test_temperature_zero_and_sampling_exclude_each_other() -> None:
    imported = read(NAME, '{"do_sample": true, "temperature": 0.0, "prompt_lookup_num_tokens": 4}')
    assert errors(imported) == ["temperature"]
    assert imported.recipe().sampling.temperature == 0.0


def test_top_k_of_50_is_written_over() -> None:
    said = constants(export(NAME, "ngram", "sampling.temperature=1"))["SETTINGS"]
    assert (said["do_sample"], said["top_k"], said["repetition_penalty"]) == (True, 0, 1.0)
    imported = read(NAME, ["do_sample=True"])
    assert imported.recipe().sampling.top_k == 50
    assert findings(imported, "top_k")


def test_prompt_lookup_matches_two_tokens_by_default_and_down_to_one() -> None:
    imported = read(NAME, ["prompt_lookup_num_tokens=10"])
    assert imported.data["draft"] == {"method": "ngram", "k": 10, "min_match": 1, "max_match": 2}
    assert findings(imported, "max_matching_ngram_size")
    assert gaps(export(NAME, "ngram", "draft.min_match=3"))["draft.min_match"] == "a match of one token drafts"
    with pytest.raises(RecipeError, match="refuses 0"):
        read(NAME, ["prompt_lookup_num_tokens=0"])


def test_prompt_lookup_goes_before_an_assistant() -> None:
    imported = read(NAME, ["prompt_lookup_num_tokens=10", "assistant_model=org/draft"])
    assert imported.data["draft"]["method"] == "ngram"
    assert "not used" in findings(imported, "assistant_model")[0].meaning


def test_schedules_grow_without_an_end_and_one_stays_grown() -> None:
    drafter = {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "heuristic"}
    drafter["assistant_confidence_threshold"] = 0
    imported = read(NAME, json.dumps(drafter))
    assert imported.recipe().length.options == {"start": 4, "up": 2, "down": 1}
    assert any("next call" in each.meaning for each in findings(imported, "num_assistant_tokens_schedule"))
    said = constants(export(NAME, "small_model", "length.policy=additive", "length.start=2"))["DRAFTING"]
    assert said["num_assistant_tokens_schedule"] == "heuristic_transient"
    assert said["num_assistant_tokens"] == 2
    with pytest.raises(RecipeError, match="heuristic_transient"):
        read(NAME, json.dumps({"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "heuristics_transient"}))


def test_early_exit_reads_the_models_own_config() -> None:
    exported = export(NAME, "early_exit", "draft.exit_layer=9", "length.policy=fixed")
    said = constants(exported)
    assert said["SETTINGS"][EARLY] == 9
    assert said["DRAFTING"]["num_assistant_tokens"] == 4
    assert said["ASSISTANT"] is None
    assert "draft.exit_layer" in gaps(export(NAME, "early_exit"))["draft"]


def test_mtp_and_dflash_came_with_5_15() -> None:
    assert constants(export(NAME, "mtp"))["SETTINGS"]["use_mtp"] is True
    assert constants(export(NAME, "dflash"))["SETTINGS"]["speculation_type"] == "dflash"
    for name in ("mtp", "dflash"):
        assert "no such method" in gaps(export(NAME, name, version="4.50"))["draft"]
    assert findings(read(NAME, ["use_mtp=True"], "4.50"), "use_mtp")[0].severity == "error"


def test_dflash_drafts_its_block_whatever_k_says() -> None:
    assert "block" in gaps(export(NAME, "dflash", "draft.weights=org/a-DFlash-b16"))["draft.k"]
    assert "draft.k" not in gaps(export(NAME, "dflash", "draft.weights=org/a-DFlash-b16", "draft.k=15"))


def test_batch_static_cache_and_beams_do_not_go_with_drafts() -> None:
    assert "one request" in gaps(export(NAME, "small_model", "runtime.batch=4"))["runtime.batch"]
    imported = read(NAME, ["assistant_model=a/b", "num_beams=4", "cache_implementation=static"])
    assert set(errors(imported)) == {
        "num_beams",
        "cache_implementation",
    }


def test_an_ensemble_is_lossy() -> None:
    imported = read(NAME, ["assistant_model=a/b", "assistant_ensemble_weight=0.5"])
    assert "law" in findings(imported, "assistant_ensemble_weight")[0].meaning


def test_misspelt_names_are_kept_in_silence_there() -> None:
    imported = read(NAME, json.dumps({"prompt_lookup_num_token": 10}))
    assert findings(imported, "prompt_lookup_num_token")[0].fix == "did you mean prompt_lookup_num_tokens?"


def test_tokenizers_that_differ_are_passed_or_refused_by_the_script() -> None:
    script = export(NAME, "small_model", "draft.model=org/draft").files[FILE]
    assert '"assistant_tokenizer": other' in script
    assert "tokens have other ids" in script


def test_a_schedule_shrinks_to_the_declared_batch() -> None:
    recipe = load_recipe("small_model", ["draft.model=a/b"])
    exported = export_recipe(NAME, recipe, schedule=(Step(1, 4, 3), Step(5, 8, 0)))
    assert constants(exported)["DRAFTING"]["num_assistant_tokens"] == 3
    assert "measured schedule" in gaps(exported)


def test_of_several_sources_one_drafts_and_the_others_are_gaps() -> None:
    found = gaps(export(NAME, "history_then_dspark", "length.policy=expected_gain"))
    assert found["draft.first_of.1"] == "transformers drafts with one method: suffix"
    assert found["length.policy"] == "every round drafts k tokens"


def test_sampling_comes_back() -> None:
    wanted = ["temperature=0.5", "min_p=0.1", "min_new_tokens=2", "stop_strings=['a']", "stop_ids=[5]", "seed=4"]
    exported = export(NAME, "vanilla", *(f"sampling.{each}" for each in [*wanted, "logit_bias={3: -1.5}"]))
    assert not exported.not_expressible
    back = same_again(NAME, exported, file=FILE)
    assert (back.sampling.logit_bias, back.sampling.stop_ids, back.sampling.seed) == ({3: -1.5}, (5,), 4)
    assert "stop ids are impossible" in gaps(export(NAME, "vanilla", "sampling.ignore_eos=true"))["sampling.ignore_eos"]


def test_lossy_rules_are_gaps() -> None:
    typical = {"draft": {"method": "ngram"}, "verify": {"rule": "typical", "lossless": False}}
    assert "keeps the law" in gaps(export_recipe(NAME, parse_recipe(typical)))["verify"]


@pytest.mark.parametrize("text", ["def f(:", "x = 1", "(" * 500, "[1, 2]", "{", "\0"])
def test_what_is_neither_json_nor_a_script_that_generates(text: str) -> None:
    with pytest.raises(RecipeError):
        read(NAME, text)

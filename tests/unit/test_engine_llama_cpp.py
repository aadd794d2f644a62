"""llama.cpp: command lines out and in, in the flags of three eras, and every trap of its flags by name."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
from engine_trips import (
    NUMBERS,
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
from specflow.export.recipe_view import Step
from specflow.recipe import load_recipe, parse_recipe, shipped_recipes

NAME = "llama_cpp"
ERAS = ("b10752", "b8400", "b6000")
NEW_FLAGS = re.compile(r"--spec-draft-|--spec-ngram-(simple|map|mod)")
OLD_FLAGS = re.compile(r"--draft-(max|min)|--spec-ngram-size")

HISTORY = st.tuples(st.integers(1, 256), st.integers(1, 256), st.booleans()).map(
    lambda drawn: {"method": "ngram", "k": drawn[0], "min_match": drawn[1], "max_match": drawn[1], "share": drawn[2]}
)
MODEL = st.integers(1, 256).map(lambda k: {"method": "small_model", "k": k, "model": "org/draft"})
BOTH = st.tuples(HISTORY, MODEL).map(
    lambda drawn: {"k": max(part["k"] for part in drawn), "first_of": tuple(dict(part) for part in drawn)}
)
FIXED = st.just({"policy": "fixed"})
BARS = NUMBERS.filter(bool).map(lambda bar: {"policy": "confidence", "threshold": bar})
OLD_BARS = NUMBERS.filter(bool).map(lambda bar: {"policy": "threshold", "start": bar, "step": 0.0})


def value(command: tuple[str, ...], flag: str) -> str:
    return command[command.index(flag) + 1]


@pytest.mark.parametrize("version", ERAS)
@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_shipped_recipes_come_back_as_they_went(name: str, version: str) -> None:
    exported = export(NAME, name, version=version)
    assert exported.command[0] == "llama-server"
    same_again(NAME, exported, version)


@given(recipes(HISTORY | MODEL | BOTH | st.none(), FIXED, st.just("match")))
@settings(max_examples=60, deadline=None)
def test_import_after_export_means_the_same(recipe: Any) -> None:
    exported = export_recipe(NAME, recipe)
    back = same_again(NAME, exported)
    assert not exported.not_expressible
    assert meaning(back) == meaning(recipe)


@given(recipes(MODEL, BARS, st.just("match")))
@settings(max_examples=30, deadline=None)
def test_a_confidence_bar_comes_back(recipe: Any) -> None:
    exported = export_recipe(NAME, recipe)
    assert not exported.not_expressible
    assert meaning(same_again(NAME, exported)) == meaning(recipe)


@given(recipes(MODEL, OLD_BARS | FIXED, st.just("match")), st.sampled_from(ERAS[1:]))
@settings(max_examples=30, deadline=None)
def test_old_builds_keep_the_unsure_token_and_so_does_the_recipe(recipe: Any, version: str) -> None:
    exported = export_recipe(NAME, recipe, version)
    assert not exported.not_expressible
    assert meaning(same_again(NAME, exported, version)) == meaning(recipe)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_fuzz_raises_our_errors_only(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["history_then_dspark", "ngram", "small_model"]))
    version = data.draw(st.sampled_from(ERAS))
    words = shlex.join(export(NAME, name, "sampling.temperature=0.5", version=version).command)
    text = data.draw(mutated(words))
    survives(NAME, text, version)
    survives(NAME, text.split(" "), version)


def test_flags_renamed_in_april_2026() -> None:
    new, old = (" ".join(export(NAME, "small_model", version=version).command) for version in ERAS[:2])
    assert "--spec-draft-n-max 4" in new
    assert not OLD_FLAGS.search(new)
    assert "--draft-max 4" in old
    assert not NEW_FLAGS.search(old)


@pytest.mark.parametrize("flag", ["--draft", "--draft-n", "--draft-max", "--draft-min", "--draft-n-min"])
def test_removed_flags_are_errors_that_name_their_heirs(flag: str) -> None:
    imported = read(NAME, ["llama-server", "-m", "a.gguf", "-md", "b.gguf", flag, "2"])
    (finding,) = [each for each in findings(imported, flag) if each.severity == "error"]
    assert "refuse" in finding.meaning
    assert "--spec-draft-n-" in finding.fix
    assert "--spec-ngram-mod-n-" in finding.fix
    assert not [
        each for each in read(NAME, ["x", "-m", "a.gguf", flag, "4"], "b8000").findings if each.severity == "error"
    ]


def test_removed_context_and_replace_flags_have_no_heir() -> None:
    imported = read(NAME, ["llama-server", "-m", "a.gguf", "--spec-draft-ctx-size", "100", "--spec-replace", "x"])
    assert {each.fix.partition(":")[0] for each in imported.findings if each.severity == "error"} == {"leave it out"}


def test_new_flags_are_not_there_in_old_builds() -> None:
    imported = read(NAME, ["llama-server", "-m", "a.gguf", "-md", "b.gguf", "--spec-draft-n-max", "4"], "b8000")
    (finding,) = findings(imported, "--spec-draft-n-max")
    assert finding.fix == "write --draft-max"


def test_draft_model_flag_never_existed() -> None:
    imported = read(NAME, ["llama-server", "-m", "a.gguf", "--draft-model", "b.gguf"])
    assert findings(imported, "--draft-model")[0].severity == "error"


def test_unknown_speculative_flag_has_a_suggestion() -> None:
    imported = read(NAME, ["llama-server", "-m", "a.gguf", "--spec-draft-nmax", "4"])
    assert "--spec-draft-n-max" in findings(imported, "--spec-draft-nmax")[0].fix


def test_p_min_default_changed_under_the_same_name() -> None:
    words = ["llama-server", "-m", "a.gguf", "-md", "b.gguf", "--spec-type", "draft-simple"]
    assert read(NAME, words).recipe().length.policy == "fixed"
    old = read(NAME, ["llama-server", "-m", "a.gguf", "-md", "b.gguf"], "b8000")
    assert old.recipe().length.options == {"start": 0.75, "target": 0.9, "step": 0.0}
    assert findings(old, "--draft-p-min")[0].severity == "warning"
    for version in ERAS:
        command = export(NAME, "small_model", version=version).command
        flag = "--spec-draft-p-min" if version == ERAS[0] else "--draft-p-min"
        assert value(command, flag) == "0"


def test_n_max_default_is_3_and_was_16() -> None:
    words = ["llama-server", "-m", "a.gguf", "-md", "b.gguf"]
    assert read(NAME, words).recipe().draft.k == 3  # type: ignore[union-attr]
    assert read(NAME, words, "b8000").recipe().draft.k == 16  # type: ignore[union-attr]


def test_ngram_mod_defaults_never_draft() -> None:
    imported = read(NAME, ["llama-server", "-m", "a.gguf", "--spec-type", "ngram-mod"])
    (finding,) = findings(imported, "--spec-ngram-mod-n-min")
    assert finding.severity == "warning"
    assert finding.found == "48"
    assert finding.fix == "--spec-ngram-mod-n-min 1"
    default = read(NAME, ["llama-server", "-m", "a.gguf", "--spec-default"])
    assert default.recipe() == imported.recipe()


def test_exported_ngram_mod_may_draft_one_token() -> None:
    command = export(NAME, "ngram", "draft.share=true", "draft.min_match=20", "draft.max_match=20").command
    assert value(command, "--spec-ngram-mod-n-min") == "1"
    assert value(command, "--spec-ngram-mod-n-match") == "20"


def test_a_smallest_draft_above_the_largest_never_drafts() -> None:
    words = ["x", "-m", "a", "--spec-type", "ngram-mod", "--spec-ngram-mod-n-min", "9", "--spec-ngram-mod-n-max", "8"]
    assert findings(read(NAME, words), "--spec-ngram-mod-n-min")[0].severity == "error"
    words = ["x", "-m", "a", "-md", "b", "--spec-draft-n-max", "2", "--spec-draft-n-min", "3"]
    assert findings(read(NAME, words), "--spec-draft-n-min")[0].severity == "error"


def test_a_long_match_is_rare() -> None:
    imported = read(NAME, ["llama-server", "-m", "a.gguf", "--spec-type", "ngram-simple"])
    assert imported.recipe().draft.k == 48  # type: ignore[union-attr]
    assert findings(imported, "--spec-ngram-simple-size-n")[0].severity == "warning"


def test_a_draft_model_alone_drafts_nothing_since_b9464() -> None:
    imported = read(NAME, ["llama-server", "-m", "a.gguf", "-md", "b.gguf", "--spec-draft-n-max", "4"])
    (finding,) = findings(imported, "-md")
    assert "b9464" in finding.meaning
    assert "--spec-type" in export(NAME, "small_model").command


def test_a_drafter_type_needs_a_draft_model() -> None:
    imported = read(NAME, ["llama-server", "-m", "a.gguf", "--spec-type", "draft-eagle3"])
    assert findings(imported, "--spec-type")[0].severity == "error"
    assert not findings(read(NAME, ["x", "-m", "a.gguf", "--spec-type", "draft-mtp"]), "--spec-type")


def test_drafts_from_history_go_first() -> None:
    imported = read(NAME, ["x", "-m", "a", "-md", "b", "--spec-type", "draft-simple,ngram-simple"])
    assert [part["method"] for part in imported.data["draft"]["first_of"]] == ["ngram", "small_model"]
    data = {"k": 4, "first_of": [{"method": "small_model", "model": "a/b"}, {"method": "ngram"}]}
    exported = export_recipe(NAME, parse_recipe({"draft": data}))
    assert value(exported.command, "--spec-type") == "ngram-simple,draft-simple"
    assert "history" in gaps(exported)["draft.first_of"]


def test_dflash_is_cut_to_its_block() -> None:
    words = ["x", "-m", "a", "--spec-type", "draft-dflash", "-md", "org/a-DFlash-b16", "--spec-draft-n-max", "16"]
    (finding,) = [each for each in read(NAME, words).findings if "trained block" in each.meaning]
    assert finding.fix == "15 draft tokens"


def test_old_variables_have_no_effect_and_say_nothing() -> None:
    words = ["LLAMA_ARG_DRAFT_MAX=9", "LLAMA_ARG_SPEC_TYPE=draft-simple", "llama-server", "-m", "a", "-md", "b"]
    imported = read(NAME, words)
    assert imported.recipe().draft.k == 3  # type: ignore[union-attr]
    assert findings(imported, "LLAMA_ARG_DRAFT_MAX")[0].fix == "write LLAMA_ARG_SPEC_DRAFT_N_MAX"
    assert read(NAME, words, "b8000").recipe().draft.k == 9  # type: ignore[union-attr]


def test_a_flag_goes_over_its_variable_and_underscores_are_dashes() -> None:
    words = ["LLAMA_ARG_SPEC_DRAFT_N_MAX=9", "llama-server", "-m", "a", "-md", "b", "--spec_draft_n_max", "5"]
    assert read(NAME, words).recipe().draft.k == 5  # type: ignore[union-attr]


def test_values_are_words_of_their_own() -> None:
    imported = read(NAME, ["llama-server", "-m", "a", "--temp=0"])
    assert findings(imported, "--temp")[0].severity == "error"


def test_temperature_comes_last_unless_it_is_told() -> None:
    command = export(NAME, "vanilla", "sampling.temperature=0.7", "sampling.top_p=0.9").command
    assert value(command, "--samplers").split(";")[1] == "temperature"
    imported = read(NAME, ["x", "-m", "a", "--temp", "0.7", "--top-p", "0.9"])
    assert "keep other tokens" in findings(imported, "--samplers")[0].meaning
    assert not findings(read(NAME, command), "--samplers")


def test_sampling_is_on_by_default() -> None:
    sampling = read(NAME, ["llama-server", "-m", "a"]).recipe().sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.8, 40, 0.95, 0.05)


def test_contexts_are_shared_by_the_slots() -> None:
    command = export(NAME, "vanilla", "runtime.batch=4", "runtime.context=1000").command
    assert value(command, "-c") == "4000"
    assert read(NAME, command).recipe().runtime.context == 1000


def test_methods_it_does_not_have_are_launched_plainly() -> None:
    for name in ("medusa", "eagle", "layer_skip"):
        exported = export(NAME, name)
        assert "--spec-type" not in exported.command
        assert "left out" in gaps(exported)["draft"]
    assert "no such drafts in builds" in gaps(export(NAME, "ngram", version=ERAS[2]))["draft"]


def test_trees_and_lossy_rules_and_schedules_are_gaps() -> None:
    exported = export(NAME, "eagle3", "draft.shape=beam", "verify.rule=match", "length.policy=fixed")
    assert gaps(exported)["draft.shape"] == "a chain of 5"
    typical = {"draft": {"method": "ngram"}, "verify": {"rule": "typical", "lossless": False}}
    assert "match" in gaps(export_recipe(NAME, parse_recipe(typical)))["verify"]
    recipe = load_recipe("small_model", ["runtime.batch=6", "draft.model=a/b"])
    exported = export_recipe(NAME, recipe, schedule=(Step(1, 4, 4), Step(5, 8, 2), Step(9, 32, 0)))
    assert value(exported.command, "--spec-draft-n-max") == "2"
    assert "runtime.batch 6" in gaps(exported)["measured schedule"]


def test_a_schedule_that_says_plain_launches_plainly() -> None:
    recipe = load_recipe("small_model", ["runtime.batch=20", "draft.model=a/b"])
    exported = export_recipe(NAME, recipe, schedule=(Step(1, 8, 4), Step(9, 32, 0)))
    assert "--spec-draft-n-max" not in exported.command


def test_a_script_is_read_as_its_command() -> None:
    text = "#!/bin/sh\nset -e\nexec /opt/llama-server -m a.gguf \\\n  --spec-type ngram-simple \\\n  --temp 0 # fast\n"
    assert read(NAME, text).recipe().draft is not None


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["x", "-m", "a", "--spec-type", "ngram-sinple"], "ngram-simple"),
        (["x", "-m", "a", "-md", "b", "--spec-draft-n-max", "many"], "a whole number"),
        (["x", "-m", "a", "--spec-type", "draft-simple", "-md", "b", "--spec-draft-p-min", "2"], "0 to 1"),
        (["x", "-m", "a", "--temp", "nan"], "a number"),
        (["x", "-m"], "VALUE"),
        (["x", "-m", "a", "--spec-type", "ngram-mod", "--spec-ngram-mod-n-max", "0"], "1 or more"),
    ],
)
def test_errors_say_what_was_expected(words: list[str], expected: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read(NAME, words)
    assert expected in str(caught.value)


def test_other_text_is_not_llama_cpp() -> None:
    with pytest.raises(RecipeError, match="no command"):
        read(NAME, "vllm serve org/model")

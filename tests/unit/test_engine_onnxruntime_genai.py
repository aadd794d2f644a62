"""onnxruntime-genai: overlays out and in, and every trap of its configuration by name."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
from engine_trips import (
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
from specflow.export.engines.onnxruntime_genai_read import OPTIONS
from specflow.export.recipe_view import Step
from specflow.recipe import load_recipe, parse_recipe, shipped_recipes

NAME = "onnxruntime_genai"
FILE = "settings.json"
ERAS = ("0.18.0", "0.16.1")

HISTORY = st.tuples(st.integers(1, 16), st.integers(1, 15)).map(
    lambda drawn: {"method": "ngram", "k": drawn[0], "min_match": drawn[1], "max_match": drawn[1]}
)
MODEL = st.integers(1, 16).map(lambda k: {"method": "small_model", "k": k, "model": "org/draft"})
FIXED = st.just({"policy": "fixed"})


def speculative(exported: Exported) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(exported.files[FILE])["overlay"].get("speculative", {})
    return found


def config(**options: Any) -> str:
    """A `genai_config.json` as far as it is about drafts."""
    return json.dumps({"model": {"type": "llama"}, "search": {}, "speculative": options})


@pytest.mark.parametrize("version", ERAS)
@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_shipped_recipes_come_back_as_they_went(name: str, version: str) -> None:
    exported = export(NAME, name, version=version)
    assert set(speculative(exported)) <= set(OPTIONS)
    ast.parse(exported.files["generate.py"])
    same_again(NAME, exported, version, FILE)


@given(recipes(HISTORY | MODEL | st.none(), FIXED, st.just("rejection")))
@settings(max_examples=60, deadline=None)
def test_import_after_export_means_the_same(recipe: Any) -> None:
    exported = export_recipe(NAME, recipe)
    back, wanted = dict(meaning(same_again(NAME, exported, file=FILE))), dict(meaning(recipe))
    if "verify" in gaps(exported):
        assert (back.pop("rule"), wanted.pop("rule")) == ("match", "rejection")
    assert set(gaps(exported)) <= {"verify"}
    assert back == wanted


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_fuzz_raises_our_errors_only(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["ngram", "small_model"]))
    survives(NAME, data.draw(mutated(export(NAME, name, "sampling.temperature=0.5").files[FILE])))
    odd = st.integers(-2, 99) | st.text(max_size=4) | st.booleans() | st.none()
    survives(NAME, config(**data.draw(st.dictionaries(st.sampled_from(OPTIONS), odd))))


def test_an_ngram_of_size_n_matches_one_token_fewer() -> None:
    assert speculative(export(NAME, "ngram", "draft.min_match=3"))["ngram_size"] == 4
    imported = read(NAME, config(ngram_size=4))
    assert imported.data["draft"] == {"method": "ngram", "k": 4, "min_match": 3, "max_match": 3}
    assert "the last 3 tokens" in findings(imported, "ngram_size")[0].meaning
    assert "not preferred" in gaps(export(NAME, "ngram"))["draft.max_match"]


@pytest.mark.parametrize("size", [1, 17])
def test_sizes_outside_are_refused_there(size: int) -> None:
    assert findings(read(NAME, config(ngram_size=size)), "ngram_size")[0].severity == "error"


def test_drafts_have_one_to_sixteen_tokens() -> None:
    exported = export(NAME, "ngram")
    assert speculative(exported)["max_draft_tokens"] == 16
    assert gaps(exported)["draft.k"] == "16, the most there is"
    assert findings(read(NAME, config(ngram_size=3, max_draft_tokens=17)), "max_draft_tokens")[0].severity == "error"
    assert read(NAME, config(ngram_size=3)).recipe().draft.k == 4  # type: ignore[union-attr]


def test_an_adaptive_length_has_no_end_but_sixteen() -> None:
    assert speculative(export(NAME, "small_model"))["min_adaptive_k"] == 0
    imported = read(NAME, config(ngram_size=3, max_draft_tokens=4, min_adaptive_k=2))
    assert "no upper end" in findings(imported, "min_adaptive_k")[0].meaning
    recipe = imported.recipe()
    assert (recipe.draft.k, recipe.length.policy) == (16, "expected_gain")  # type: ignore[union-attr]


def test_ngrams_and_a_draft_model_exclude_each_other() -> None:
    both = json.dumps({"model": {"draft": {"filename": "d.onnx"}}, "speculative": {"ngram_size": 3}})
    assert findings(read(NAME, both), "ngram_size")[0].severity == "error"


def test_a_draft_model_has_no_name_in_the_config() -> None:
    imported = read(NAME, json.dumps({"model": {"draft": {"filename": "d.onnx"}}}))
    assert imported.data["draft"] == {"method": "small_model", "k": 4}
    assert findings(imported, "model.draft")[0].severity == "warning"


def test_chained_lookup_needs_a_size() -> None:
    assert findings(read(NAME, config(ngram_chained_lookup=True)), "ngram_chained_lookup")[0].severity == "error"
    assert (
        findings(read(NAME, config(ngram_size=3, ngram_chained_lookup=True)), "ngram_chained_lookup")[0].severity
        == "note"
    )


def test_unknown_options_are_refused_there() -> None:
    (finding,) = findings(read(NAME, config(max_draft_token=3)), "max_draft_token")
    assert (finding.severity, finding.fix) == ("error", "did you mean max_draft_tokens?")


def test_beams_and_repetition_bans_do_not_go_with_a_draft_model() -> None:
    data = {"model": {"draft": {}}, "search": {"num_beams": 4, "no_repeat_ngram_size": 2}}
    imported = read(NAME, json.dumps(data))
    assert errors(imported) == [
        "num_beams",
        "no_repeat_ngram_size",
    ]


def test_top_k_of_50_is_written_over() -> None:
    search = json.loads(export(NAME, "vanilla", "sampling.temperature=0.5").files[FILE])["overlay"]["search"]
    assert search["top_k"] == 0
    assert read(NAME, json.dumps({"search": {"do_sample": True}})).recipe().sampling.top_k == 50


def test_temperature_zero_is_greedy_whatever_do_sample_says() -> None:
    text = json.dumps({"search": {"do_sample": True, "temperature": 0.0}})
    assert read(NAME, text).recipe().sampling.temperature == 0.0


def test_ngrams_came_after_draft_models() -> None:
    assert "no such method" in gaps(export(NAME, "ngram", version="0.16"))["draft"]
    assert findings(read(NAME, config(ngram_size=3), "0.16"), "ngram_size")[0].severity == "error"
    assert speculative(export(NAME, "small_model", version="0.16"))["max_draft_tokens"] == 4


def test_gaps_say_what_happens_instead() -> None:
    found = gaps(export(NAME, "vanilla", "sampling.temperature=0.5", "sampling.min_p=0.1", "sampling.stop_ids=[4]"))
    assert set(found) == {"sampling.min_p", "sampling.stop_ids"}
    typical = {"draft": {"method": "ngram"}, "verify": {"rule": "typical", "lossless": False}}
    assert "keeps the law" in gaps(export_recipe(NAME, parse_recipe(typical)))["verify"]
    recipe = load_recipe("small_model", ["draft.model=a/b"])
    assert speculative(export_recipe(NAME, recipe, schedule=(Step(1, 8, 0),))) == {}


@pytest.mark.parametrize("text", ["", "{}", '{"a": 1}', "not json", "[1]"])
def test_what_is_no_config(text: str) -> None:
    with pytest.raises(RecipeError):
        read(NAME, text)


def test_a_command_line_is_not_read() -> None:
    with pytest.raises(RecipeError, match=r"genai_config\.json"):
        read(NAME, ["python", "generate.py"])

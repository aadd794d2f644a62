"""TensorRT-LLM: two meanings of a schedule's keys, every other trap, and the way back."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from engine_meaning import STARVED, harmless, made_costs, recipes, round_trip, shipped
from hypothesis import given, settings
from hypothesis import strategies as st

from specflow.errors import RecipeError
from specflow.export.batch_schedule import batch_schedule
from specflow.export.engines.base import Exported, Finding, Given, Imported, choose_dialect
from specflow.export.engines.tensorrt_llm import ENGINE
from specflow.export.engines.tensorrt_llm_schema import BASE, CLASSES
from specflow.export.recipe_view import Step, view_of
from specflow.recipe import Recipe, load_recipe, parse_recipe

ENDS, UNSURE, STARTS = ENGINE.dialects
GAIN = {"policy": "expected_gain"}
POLICY = (Step(1, 4, 4), Step(5, 8, 2), Step(9, 32, 1), Step(33, 64, 0))
EAGLE3 = {"method": "eagle3", "k": 4, "weights": "w"}


def exported(data: dict[str, Any], dialect: Any = ENDS, **more: Any) -> Exported:
    return ENGINE.export(view_of(parse_recipe(data), **more), dialect)


def spec_of(done: Exported) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(done.files["trtllm.yaml"])["speculative_config"]
    return found


def read(spec: dict[str, Any], version: str | None = None, **server: Any) -> Imported:
    text = yaml.safe_dump({**server, "speculative_config": spec})
    return ENGINE.read(Given(text=text, name="f.yaml"), choose_dialect(ENGINE, version))


def finding(done: Imported, where: str) -> Finding:
    found = [each for each in done.findings if each.where == where]
    assert found, done.findings
    return found[0]


@pytest.mark.parametrize("dialect", ENGINE.dialects, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("recipe", shipped(), ids=lambda recipe: recipe.name)
def test_import_of_export_means_the_same_for_shipped_recipes(recipe: Recipe, dialect: Any) -> None:
    round_trip(ENGINE, recipe, dialect)


@given(recipes())
@settings(max_examples=60, deadline=None, suppress_health_check=STARVED)
def test_import_of_export_means_the_same(recipe: Recipe) -> None:
    for dialect in ENGINE.dialects:
        round_trip(ENGINE, recipe, dialect)


@given(recipes(), st.sampled_from((0.0, 0.5, 0.95)))
@settings(max_examples=30, deadline=None, suppress_health_check=STARVED)
def test_a_measured_schedule_comes_back_as_a_policy_that_measures(recipe: Recipe, acceptance: float) -> None:
    assert recipe.draft is not None
    costs = made_costs(min(recipe.draft.k, 8))
    view = view_of(recipe, costs, batch_schedule(costs, recipe.draft.k, acceptance, 64), 64)
    for dialect in (ENDS, STARTS):
        round_trip(ENGINE, recipe, dialect, view)


@given(recipes())
@settings(max_examples=60, deadline=None, suppress_health_check=STARVED)
def test_every_written_key_belongs_to_its_class(recipe: Recipe) -> None:
    for dialect in ENGINE.dialects:
        data = yaml.safe_load(ENGINE.export(view_of(recipe), dialect).files["trtllm.yaml"])
        if spec := data.get("speculative_config"):
            assert set(spec) <= {*BASE, *CLASSES[spec["decoding_type"]]}


class TestSchedules:
    """The policy "4 for 1-4, 2 for 5-8, 1 for 9-32, off above" in both meanings (reference: engine configs, B.7)."""

    def test_keys_are_upper_ends_now(self) -> None:
        done = exported({"draft": EAGLE3, "length": GAIN}, schedule=POLICY)
        assert spec_of(done)["draft_len_schedule"] == {4: 4, 8: 2, 32: 1}

    def test_keys_were_lower_ends_before(self) -> None:
        done = exported({"draft": {"method": "ngram", "k": 4}, "length": GAIN}, STARTS, schedule=POLICY)
        assert spec_of(done)["draft_len_schedule"] == {1: 4, 5: 2, 9: 1, 33: 0}

    def test_the_meaning_stands_in_the_file_as_a_comment(self) -> None:
        now = exported({"draft": EAGLE3, "length": GAIN}, schedule=POLICY).files["trtllm.yaml"]
        assert "# draft_len_schedule by batch size: 4 at 1 to 4, 2 at 5 to 8, 1 at 9 to 32; 0 above 32" in now
        data = {"draft": {"method": "ngram", "k": 4}, "length": GAIN}
        assert "4 from 1 on, 2 from 5 on" in exported(data, STARTS, schedule=POLICY).files["trtllm.yaml"]

    def test_among_the_candidates_that_changed_it_no_schedule_is_written(self) -> None:
        done = exported({"draft": {"method": "ngram", "k": 4}, "length": GAIN}, UNSURE, schedule=POLICY)
        assert "draft_len_schedule" not in spec_of(done)
        assert spec_of(done)["max_concurrency"] == 32
        assert any(gap.what.startswith("length.policy") for gap in done.not_expressible)
        assert choose_dialect(ENGINE, "1.3.0rc8") is UNSURE

    def test_the_smallest_key_says_max_draft_len(self) -> None:
        steps = (Step(1, 4, 3), Step(5, 8, 1))
        done = exported({"draft": EAGLE3, "length": GAIN}, schedule=steps)
        assert spec_of(done)["max_draft_len"] == 3
        assert any(gap.what.startswith("draft.k") for gap in done.not_expressible)

    @pytest.mark.parametrize("dialect", [ENDS, STARTS], ids=["ends", "starts"])
    def test_each_dialect_reads_its_own_schedule_as_the_same_policy(self, dialect: Any) -> None:
        draft = EAGLE3 if dialect is ENDS else {"method": "ngram", "k": 4}
        done = exported({"draft": draft, "length": GAIN}, dialect, schedule=POLICY)
        back = ENGINE.read(Given(text=done.files["trtllm.yaml"], name="f"), dialect)
        said = finding(back, "draft_len_schedule").found
        assert said.startswith("4 at 1 to 4, 2 at 5 to 8, 1 at 9 to 32, 0 at 33 to ")
        assert not [each for each in back.findings if each.severity != "note"]

    def test_an_older_schedule_is_read_upside_down_now(self) -> None:
        done = read({"decoding_type": "Eagle3", "speculative_model": "w", "max_draft_len": 4, **OLD_SCHEDULE})
        turned = finding(done, "draft_len_schedule")
        assert "first of its range" in turned.meaning
        assert turned.fix == "draft_len_schedule: {3: 4, 7: 2}"

    def test_a_newer_schedule_is_refused_by_older_versions(self) -> None:
        schedule = {"draft_len_schedule": {4: 4, 8: 2, 32: 1}}
        done = read({"decoding_type": "NGram", "max_draft_len": 4, **schedule}, "1.2.0", disable_overlap_scheduler=True)
        turned = finding(done, "draft_len_schedule")
        assert turned.severity == "error"
        assert turned.fix == "draft_len_schedule: {1: 4, 5: 2, 9: 1, 33: 0}"

    def test_longer_drafts_for_larger_batches_are_suspicious(self) -> None:
        schedule = {"draft_len_schedule": {4: 1, 8: 4}}
        done = read({"decoding_type": "Eagle3", "speculative_model": "w", "max_draft_len": 1, **schedule})
        assert any("opposite" in each.meaning for each in done.findings)

    def test_the_smallest_key_has_to_say_max_draft_len(self) -> None:
        schedule = {"draft_len_schedule": {4: 3}}
        done = read({"decoding_type": "Eagle3", "speculative_model": "w", "max_draft_len": 4, **schedule})
        assert finding(done, "draft_len_schedule").severity == "error"

    def test_max_concurrency_excludes_a_schedule(self) -> None:
        spec = {"decoding_type": "Eagle3", "speculative_model": "w", "max_draft_len": 4, "max_concurrency": 8}
        done = read({**spec, "draft_len_schedule": {4: 4}})
        assert finding(done, "max_concurrency").severity == "error"

    @pytest.mark.parametrize("given_schedule", [[], {}, {"a": 1}, {0: 4}, {4: -1}, {4: "x"}, 7])
    def test_a_broken_schedule_is_our_error(self, given_schedule: Any) -> None:
        with pytest.raises(RecipeError):
            read({"decoding_type": "NGram", "max_draft_len": 4, "draft_len_schedule": given_schedule})


OLD_SCHEDULE = {"draft_len_schedule": {1: 4, 4: 2, 8: 0}}


class TestWriting:
    """What an export has to get right."""

    def test_the_file_option_was_renamed(self) -> None:
        data = {"draft": EAGLE3}
        assert exported(data).command == ("trtllm-serve", VANILLA_TARGET, "--config", "trtllm.yaml")
        assert "--extra_llm_api_options" in exported(data, STARTS).command

    def test_draft_target_has_two_spellings(self) -> None:
        data = {"draft": {"method": "small_model", "k": 4, "model": "m"}}
        assert spec_of(exported(data))["decoding_type"] == "Draft_Target"
        assert spec_of(exported(data, STARTS))["decoding_type"] == "DraftTarget"

    def test_a_dynamic_tree_is_switched_on_and_within_its_bounds(self) -> None:
        for nodes, branch, wanted in ((24, 8, 24), (2, 8, 4), (90, 3, 12)):
            spec = spec_of(exported({"draft": {**EAGLE3, "shape": "beam", "nodes": nodes, "branch": branch}}))
            assert spec["use_dynamic_tree"] is True
            assert spec["dynamic_tree_max_topK"] == branch
            assert spec["max_total_draft_tokens"] == wanted
            assert spec["max_draft_len"] <= wanted <= branch * spec["max_draft_len"]

    def test_mtp_has_its_older_name_in_older_versions(self) -> None:
        data = {"draft": {"method": "mtp", "k": 2}}
        assert spec_of(exported(data))["max_draft_len"] == 2
        assert spec_of(exported(data, STARTS))["num_nextn_predict_layers"] == 2

    def test_older_versions_cannot_overlap_two_models(self) -> None:
        for method in ("ngram", "small_model"):
            text = exported({"draft": {"method": method, "k": 4}}, STARTS).files["trtllm.yaml"]
            assert yaml.safe_load(text)["disable_overlap_scheduler"] is True
        assert "disable_overlap_scheduler" not in exported({"draft": {"method": "ngram"}}).files["trtllm.yaml"]

    def test_ngram_takes_the_newest_match_of_its_own_request(self) -> None:
        spec = spec_of(exported({"draft": {"method": "ngram", "k": 4, "max_match": 3}}))
        assert (spec["is_use_oldest"], spec["is_public_pool"], spec["max_matching_ngram_size"]) == (False, False, 3)

    def test_a_suffix_automaton_in_front_of_a_drafter(self) -> None:
        parts = [{"method": "suffix", "min_match": 5}, {"method": "eagle3", "weights": "w"}]
        done = exported({"draft": {"k": 4, "first_of": parts}})
        assert spec_of(done)["sa_config"] == {"threshold": 5, "enable_global_pool": False}
        assert not done.not_expressible
        back = ENGINE.read(Given(text=done.files["trtllm.yaml"], name="f"), ENDS).recipe()
        assert back.draft is not None
        assert [part.method for part in back.draft.parts] == ["suffix", "eagle3"]

    def test_match_is_the_default_and_rejection_has_a_switch(self) -> None:
        assert "use_rejection_sampling" not in spec_of(exported({"draft": EAGLE3}))
        assert spec_of(exported({"draft": EAGLE3, "verify": {"rule": "rejection"}}))["use_rejection_sampling"] is True
        older = exported({"draft": EAGLE3, "verify": {"rule": "rejection"}}, STARTS)
        assert any(gap.what.startswith("verify.rule") for gap in older.not_expressible)

    @pytest.mark.parametrize("method", ["medusa", "eagle", "eagle2", "layer_skip"])
    def test_methods_that_are_not_there(self, method: str) -> None:
        done = exported({"draft": {"method": method, "k": 4}})
        assert "speculative_config" not in (yaml.safe_load(done.files["trtllm.yaml"]) or {})
        assert any(method in gap.what for gap in done.not_expressible)

    def test_taps_and_the_corrector_go_along(self) -> None:
        assert spec_of(exported({"draft": {**EAGLE3, "taps": [1, 14, 26]}}))["eagle3_layers_to_capture"] == [1, 14, 26]
        spec = spec_of(exported({"draft": {"method": "dspark", "k": 7, "weights": "w", "corrector": "rnn"}}))
        assert (spec["markov_head_type"], spec["block_size"]) == ("rnn", 7)

    def test_drafts_that_never_pay_are_not_launched(self) -> None:
        done = exported({"draft": EAGLE3, "length": GAIN}, schedule=(Step(1, 8, 0),))
        assert "speculative_config" not in (yaml.safe_load(done.files["trtllm.yaml"]) or {})


VANILLA_TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"


class TestTraps:
    """What is wrong about files that people have."""

    def test_a_rate_below_the_threshold_is_off_for_good(self) -> None:
        spec = {"decoding_type": "Eagle3", "speculative_model": "w", "max_draft_len": 4}
        done = read({**spec, "acceptance_rate_threshold": 0.3})
        assert "for good" in finding(done, "acceptance_rate_threshold").meaning

    @pytest.mark.parametrize("name", ["acceptance_window", "acceptance_length_threshold", "use_sa_spec"])
    def test_older_names(self, name: str) -> None:
        spec = {"decoding_type": "Eagle3", "speculative_model": "w", "max_draft_len": 4, name: 2}
        assert finding(read(spec), name).severity == "error"
        assert finding(read(spec), name).fix
        assert finding(read(spec, "1.1.0"), name).severity == "note"

    def test_num_nextn_predict_layers_is_deprecated(self) -> None:
        done = read({"decoding_type": "MTP", "num_nextn_predict_layers": 3})
        assert done.data["draft"] == {"method": "mtp", "k": 3}
        assert finding(done, "num_nextn_predict_layers").fix == "max_draft_len"

    def test_spellings_of_draft_target(self) -> None:
        spec = {"speculative_model": "m", "max_draft_len": 4}
        assert finding(read({"decoding_type": "DraftTarget", **spec}), "decoding_type").fix == "Draft_Target"
        older = read({"decoding_type": "Draft_Target", **spec}, "1.1.0", disable_overlap_scheduler=True)
        assert finding(older, "decoding_type").fix == "DraftTarget"

    def test_eagle_is_an_alias_of_eagle3(self) -> None:
        done = read({"decoding_type": "Eagle", "speculative_model_dir": "w", "max_draft_len": 4})
        assert done.data["draft"]["method"] == "eagle3"
        assert finding(done, "decoding_type").fix == "Eagle3"

    def test_topk_without_use_dynamic_tree_is_ignored(self) -> None:
        spec = {"decoding_type": "Eagle3", "speculative_model": "w", "max_draft_len": 4, "dynamic_tree_max_topK": 8}
        done = read(spec)
        assert "shape" not in done.data["draft"]
        assert "ignored" in finding(done, "dynamic_tree_max_topK").meaning

    def test_a_tree_out_of_bounds_is_refused(self) -> None:
        tree = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 2, "max_total_draft_tokens": 9}
        done = read({"decoding_type": "Eagle3", "speculative_model": "w", "max_draft_len": 4, **tree})
        assert finding(done, "max_total_draft_tokens").severity == "error"

    def test_relaxed_acceptance_is_lossy(self) -> None:
        done = read({"decoding_type": "MTP", "max_draft_len": 1, "use_relaxed_acceptance_for_thinking": True})
        assert "lossy" in finding(done, "use_relaxed_acceptance_for_thinking").meaning

    def test_older_versions_need_the_overlap_scheduler_off(self) -> None:
        done = read({"decoding_type": "NGram", "max_draft_len": 4}, "1.1.0")
        assert finding(done, "disable_overlap_scheduler").severity == "error"

    def test_the_oldest_match_is_the_default(self) -> None:
        done = read({"decoding_type": "NGram", "max_draft_len": 4})
        assert done.data["draft"]["max_match"] == 2
        assert finding(done, "is_use_oldest").fix == "false"

    def test_a_suffix_size_of_0_is_refused(self) -> None:
        done = read({"decoding_type": "SA", "max_draft_len": 4, "max_matching_ngram_size": 0})
        assert finding(done, "max_matching_ngram_size").severity == "error"

    def test_the_automaton_has_a_threshold_of_4_by_default(self) -> None:
        spec = {"decoding_type": "Eagle3", "speculative_model": "w", "max_draft_len": 4, "sa_config": {}}
        done = read(spec)
        assert done.data["draft"]["first_of"][0]["min_match"] == 4
        assert finding(done, "sa_config.threshold")

    def test_static_trees_are_going(self) -> None:
        spec = {"decoding_type": "Eagle3", "speculative_model": "w", "max_draft_len": 2, "eagle_choices": [[0]]}
        assert "deprecated" in finding(read(spec), "eagle_choices").meaning

    def test_advanced_sampling_has_no_effect_any_more(self) -> None:
        spec = {
            "decoding_type": "Eagle3",
            "speculative_model": "w",
            "max_draft_len": 2,
            "allow_advanced_sampling": True,
        }
        assert finding(read(spec), "allow_advanced_sampling").severity == "note"

    def test_a_block_other_than_the_draft_length(self) -> None:
        spec = {"decoding_type": "DSpark", "speculative_model": "x_block7", "max_draft_len": 9, "block_size": 7}
        done = read(spec)
        assert finding(done, "block_size").fix == "9"
        assert "above the 7" in finding(done, "max_draft_len").meaning

    def test_a_drafter_is_required(self) -> None:
        assert finding(read({"decoding_type": "Eagle3", "max_draft_len": 4}), "speculative_model").severity == "error"

    def test_unknown_keys_and_types_get_a_suggestion(self) -> None:
        done = read({"decoding_type": "NGram", "max_draft_length": 4})
        assert finding(done, "max_draft_length").fix == "did you mean max_draft_len?"
        assert finding(read({"decoding_type": "Eagle4"}), "decoding_type").severity == "error"

    @pytest.mark.parametrize("kind", ["PARD", "AUTO", "User_Provided", "SaveState", "Medusa", "Lookahead"])
    def test_types_that_are_no_recipe(self, kind: str) -> None:
        done = read({"decoding_type": kind})
        assert "draft" not in done.data
        assert finding(done, "decoding_type")


def test_a_command_reads_its_file_and_says_where_there_is_none(tmp_path: Any) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("max_batch_size: 4\nspeculative_config: {decoding_type: NGram, max_draft_len: 4}\n")
    words = ("trtllm-serve", "serve", "some/target", "--config", str(file), "--max_seq_len", "512")
    done = ENGINE.read(Given(argv=words), ENDS)
    assert done.data["target"] == {"model": "some/target"}
    assert done.data["runtime"] == {"batch": 4, "context": 512}
    assert done.data["draft"]["k"] == 4
    missing = ENGINE.read(Given(argv=("trtllm-serve", "t", "--config", "none.yaml")), ENDS)
    assert "not read" in missing.findings[0].meaning
    with pytest.raises(RecipeError, match=r"nothing of TensorRT-LLM's"):
        ENGINE.read(Given(text="a: 1", name="f.yaml"), ENDS)


KEYS = st.sampled_from((*BASE, *CLASSES["Eagle3"], *CLASSES["MTP"], *CLASSES["SA"], *CLASSES["DSpark"], "x"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 1 << 70) | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.integers(-1, 50) | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.sampled_from((*CLASSES, "x")), st.dictionaries(KEYS, VALUES, max_size=6))
@settings(max_examples=120, deadline=None, suppress_health_check=STARVED)
def test_fuzzed_files_raise_our_errors_only(kind: str, spec: dict[str, Any]) -> None:
    text = yaml.safe_dump({"speculative_config": {**spec, "decoding_type": kind}})
    for dialect in ENGINE.dialects:
        harmless(ENGINE, Given(text=text, name="f"), dialect)


@given(st.integers(0, 300), st.binary(min_size=1, max_size=3))
@settings(max_examples=100, deadline=None, suppress_health_check=STARVED)
def test_mutated_files_raise_our_errors_only(place: int, put: bytes) -> None:
    text = ENGINE.export(view_of(load_recipe("eagle3")), ENDS).files["trtllm.yaml"].encode()
    changed = (text[:place] + put + text[place + len(put) :]).decode("utf-8", errors="replace")
    harmless(ENGINE, Given(text=changed, name="trtllm.yaml"), ENDS)


@given(st.lists(st.text(max_size=10) | st.sampled_from(("trtllm-serve", "--config", "t")), max_size=6))
@settings(max_examples=80, deadline=None, suppress_health_check=STARVED)
def test_fuzzed_command_lines_raise_our_errors_only(words: list[str]) -> None:
    harmless(ENGINE, Given(argv=tuple(words)), ENDS)
    harmless(ENGINE, Given(text=re.sub("\0", "", " ".join(words)), name="f"), ENDS)

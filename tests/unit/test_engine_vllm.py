"""vLLM: what is written loads there, every trap is named, and the way back means the same."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from engine_meaning import STARVED, harmless, made_costs, recipes, round_trip, shipped
from hypothesis import given, settings
from hypothesis import strategies as st

from specflow.errors import RecipeError
from specflow.export.batch_schedule import batch_schedule
from specflow.export.engines.base import Exported, Finding, Given, Imported, choose_dialect
from specflow.export.engines.vllm import ENGINE
from specflow.export.engines.vllm_reader import METHOD_OF, METHODS
from specflow.export.engines.vllm_schema import FIELDS, MTP_NAMES, NEVER
from specflow.export.recipe_view import view_of
from specflow.recipe import Recipe, load_recipe, parse_recipe

NOW, OLDER = ENGINE.dialects


def exported(data: dict[str, Any], **more: Any) -> Exported:
    return ENGINE.export(view_of(parse_recipe(data), **more), NOW)


def spec_of(done: Exported) -> dict[str, Any]:
    words = list(done.command)
    found: dict[str, Any] = json.loads(words[words.index("--speculative-config") + 1])
    return found


def read(spec: object, *words: str, version: str | None = None) -> Imported:
    argv = ("vllm", "serve", "some/target", "--speculative-config", json.dumps(spec), *words)
    return ENGINE.read(Given(argv=argv), choose_dialect(ENGINE, version))


def finding(done: Imported, where: str) -> Finding:
    found = [each for each in done.findings if each.where == where]
    assert found, done.findings
    return found[0]


@pytest.mark.parametrize("dialect", ENGINE.dialects)
@pytest.mark.parametrize("recipe", shipped(), ids=lambda recipe: recipe.name)
def test_import_of_export_means_the_same_for_shipped_recipes(recipe: Recipe, dialect: Any) -> None:
    round_trip(ENGINE, recipe, dialect)


def test_a_factor_above_k_comes_back_as_k() -> None:
    data = {"draft": {"method": "suffix", "k": 1}, "length": {"policy": "match", "per_match": 2.0}}
    done = round_trip(ENGINE, parse_recipe(data), NOW)
    assert spec_of(done)["suffix_decoding_max_spec_factor"] == 1.0


@given(recipes())
@settings(max_examples=60, deadline=None, suppress_health_check=STARVED)
def test_import_of_export_means_the_same(recipe: Recipe) -> None:
    for dialect in ENGINE.dialects:
        round_trip(ENGINE, recipe, dialect)


@given(recipes(), st.sampled_from((0.3, 0.8, 0.95)))
@settings(max_examples=40, deadline=None, suppress_health_check=STARVED)
def test_a_measured_schedule_comes_back_as_a_policy_that_measures(recipe: Recipe, acceptance: float) -> None:
    assert recipe.draft is not None
    costs = made_costs(min(recipe.draft.k, 8))
    steps = batch_schedule(costs, recipe.draft.k, acceptance, 64)
    round_trip(ENGINE, recipe, NOW, view_of(recipe, costs, steps, 64))


@pytest.mark.parametrize("recipe", shipped(), ids=lambda recipe: recipe.name)
def test_the_file_says_what_the_command_says(recipe: Recipe) -> None:
    done = ENGINE.export(view_of(recipe), NOW)
    by_words = ENGINE.read(Given(argv=done.command), NOW)
    by_file = ENGINE.read(Given(text=done.files["vllm.yaml"], name="vllm.yaml"), NOW)
    assert by_file.data == by_words.data


class TestSchema:
    """Keys and methods are those of the installed SpeculativeConfig; without vLLM those of 0.33.0, kept here."""

    def source(self) -> ast.Module | None:
        spec = importlib.util.find_spec("vllm")
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            file = Path(folder) / "config" / "speculative.py"
            if file.is_file():
                return ast.parse(file.read_text(encoding="utf-8"))
        return None

    def fields(self) -> set[str]:
        tree = self.source()
        if tree is None:
            return {*FIELDS, *NEVER, "tensor_parallel_size"}
        (config,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "SpeculativeConfig"]
        return {ast.unparse(node.target) for node in config.body if isinstance(node, ast.AnnAssign)}

    def literals(self, *names: str) -> set[str]:
        """Words of some Literal types of the source."""
        tree = self.source()
        if tree is None:
            kept = {"standard", "synthetic", "block", "fly", "greedy", "probabilistic", *MTP_NAMES, "mtp"}
            return kept | METHODS["current"]
        found: set[str] = set()
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in names:
                found |= {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
        return found

    def test_kept_names_are_those_of_the_source(self) -> None:
        assert {*FIELDS, *NEVER, "tensor_parallel_size"} == self.fields()
        assert set(MTP_NAMES) <= self.literals("MTPModelTypes")

    @given(recipes())
    @settings(max_examples=60, deadline=None, suppress_health_check=STARVED)
    def test_every_written_key_and_method_exists(self, recipe: Recipe) -> None:
        done = ENGINE.export(view_of(recipe), NOW)
        if "--speculative-config" not in done.command:
            return
        spec = spec_of(done)
        names = ("SpeculativeMethod", "EagleModelTypes", "MTPModelTypes", "DFlashModelTypes", "DSparkModelTypes")
        assert set(spec) <= self.fields()
        assert spec["method"] in self.literals(*names)
        assert spec["rejection_sample_method"] in self.literals("RejectionSampleMethod")
        assert spec["draft_sample_method"] in self.literals("DraftSampleMethod")


class TestWriting:
    """What an export has to get right."""

    def test_method_is_always_said(self) -> None:
        for family, method in METHOD_OF.items():
            data = {"draft": {"method": family, "k": 3}}
            done = ENGINE.export(view_of(parse_recipe(data)), OLDER)
            assert spec_of(done)["method"] == method

    def test_row_67_k_excludes_the_bonus_token(self) -> None:
        spec = spec_of(exported({"draft": {"method": "dflash", "k": 15, "weights": "z-lab/Qwen3-8B-DFlash-b16"}}))
        assert spec["num_speculative_tokens"] == 15

    def test_medusa_is_gone_from_the_current_versions(self) -> None:
        done = exported({"draft": {"method": "medusa", "k": 4, "weights": "some/heads"}})
        assert "--speculative-config" not in done.command
        assert any("medusa" in gap.what and "without speculation" in gap.instead for gap in done.not_expressible)

    def test_lookup_bounds_are_said_because_both_default_to_5(self) -> None:
        spec = spec_of(exported({"draft": {"method": "ngram", "k": 9, "min_match": 2, "max_match": 3}}))
        assert (spec["prompt_lookup_min"], spec["prompt_lookup_max"]) == (2, 3)

    def test_suffix_probability_is_off_and_the_tree_holds_match_and_draft(self) -> None:
        spec = spec_of(exported({"draft": {"method": "suffix", "k": 10, "max_match": 20}}))
        assert spec["suffix_decoding_min_token_prob"] == 0.0
        assert spec["suffix_decoding_max_tree_depth"] == 30
        assert spec["suffix_decoding_max_cached_requests"] == 0

    def test_suffix_needs_arctic_inference(self) -> None:
        assert any("arctic-inference==0.1.1" in note for note in exported({"draft": {"method": "suffix"}}).notes)

    def test_a_greedy_draft_is_one_hot_so_sampling_rules_ask_for_probabilities(self) -> None:
        for rule, method in (("rejection", "standard"), ("block", "block")):
            spec = spec_of(exported({"draft": {"method": "eagle3", "k": 3, "weights": "x"}, "verify": {"rule": rule}}))
            assert spec["draft_sample_method"] == "probabilistic"
            assert spec["rejection_sample_method"] == method

    def test_adaptive_verification_is_for_dspark_alone(self) -> None:
        for family in METHOD_OF:
            done = ENGINE.export(view_of(parse_recipe({"draft": {"method": family}, "length": GAIN})), OLDER)
            assert ("enable_adaptive_verification" in spec_of(done)) == (family == "dspark")

    def test_the_batch_schedule_has_inclusive_ranges_from_1_on_and_no_k_above_k(self) -> None:
        costs = made_costs(6)
        steps = batch_schedule(costs, 6, 0.7, 64)
        data = {"draft": {"method": "eagle3", "k": 6, "weights": "x"}, "length": GAIN}
        done = exported(data, costs=costs, schedule=steps)
        rows = spec_of(done)["num_speculative_tokens_per_batch_size"]
        assert rows[0][0] == 1
        assert all(low <= high and k <= 6 for low, high, k in rows)
        assert any("data parallelism" in note for note in done.notes)
        assert not any(gap.what.startswith("length") for gap in done.not_expressible)

    def test_mtp_modules_and_a_bundled_dspark_are_part_of_the_target(self) -> None:
        assert "model" not in spec_of(exported({"draft": {"method": "mtp", "k": 1}}))

    def test_a_random_drafter_is_a_word_to_replace(self) -> None:
        done = exported({"draft": {"method": "eagle3", "k": 3}})
        assert spec_of(done)["model"] == "DRAFTER"
        assert any("DRAFTER" in note for note in done.notes)

    def test_all_sampling_options_are_in_the_request(self) -> None:
        sampling = {"temperature": 0.5, "seed": 3, "stop_strings": ["a"], "logit_bias": {5: 1.0}, "min_new_tokens": 2}
        done = exported({"sampling": sampling})
        body = json.loads(done.files["request.json"])
        assert (body["seed"], body["stop"], body["min_tokens"], body["logit_bias"]) == (3, ["a"], 2, {"5": 1.0})
        assert not done.not_expressible

    def test_what_no_engine_can_do_is_listed(self) -> None:
        done = exported(
            {
                "target": {"model": "t", "runtime": "onnx", "threads": 2},
                "draft": {"method": "eagle3", "k": 3, "weights": "w", "shape": "beam", "norm_output": True},
                "verify": {"rule": "typical", "lossless": False, "epsilon": 0.2},
                "length": {"policy": "additive", "up": 3},
                "sampling": {"temperature": 0.7, "speculate": False},
            }
        )
        named = {gap.what.partition(":")[0] for gap in done.not_expressible}
        wanted = {"target.runtime", "target.threads", "draft.shape", "draft.norm_output", "verify.rule"}
        assert wanted | {"verify.epsilon", "length.policy", "length.up", "sampling.speculate"} <= named


GAIN = {"policy": "expected_gain"}


class TestTraps:
    """What is wrong about configurations that people have."""

    def test_a_method_that_is_not_said_is_guessed_from_the_name(self) -> None:
        done = read({"model": "yuhuili/EAGLE-LLaMA3-Instruct-8B", "num_speculative_tokens": 3})
        assert done.data["draft"]["method"] == "eagle"
        assert finding(done, "method").fix == '"method": "eagle"'

    @pytest.mark.parametrize(
        ("model", "method"),
        [("pkg.proposers.Mine", "custom_class"), ("org/ngram-draft", "draft_model"), ("ngram", "ngram")],
    )
    def test_guesses_are_those_of_its_source(self, model: str, method: str) -> None:
        done = read({"model": model, "num_speculative_tokens": 3})
        assert [each.fix for each in done.findings if each.where == "method" and each.severity == "warning"] == [
            f'"method": "{method}"'
        ]
        assert ("draft" in done.data) == (method != "custom_class")

    @pytest.mark.parametrize(("method", "recipe"), [("draft_model", "small_model"), ("mtp", "mtp")])
    def test_a_name_goes_over_the_method_that_is_asked_for(self, method: str, recipe: str) -> None:
        done = read({"method": method, "model": "org/my-dflash-sized", "num_speculative_tokens": 3})
        assert done.data["draft"]["method"] == "dflash"
        assert "whatever method says" in finding(done, "method").meaning
        key = "model" if recipe == "small_model" else "weights"
        notes = ENGINE.export(view_of(load_recipe(recipe, [f"draft.{key}=org/my-dflash-sized"])), NOW).notes
        assert any("reads dflash in the name" in note for note in notes)

    def test_medusa_is_gone(self) -> None:
        spec = {"method": "medusa", "model": "m", "num_speculative_tokens": 3}
        assert finding(read(spec), "method").severity == "error"
        assert not [each for each in read(spec, version="0.29.0").findings if each.where == "method"]

    def test_family_names_of_mtp_are_deprecated(self) -> None:
        done = read({"method": "deepseek_mtp", "num_speculative_tokens": 1})
        assert done.data["draft"]["method"] == "mtp"
        assert finding(done, "method").fix == "mtp"

    def test_older_names_of_the_rejection_method(self) -> None:
        spec = {
            "method": "eagle3",
            "model": "m",
            "num_speculative_tokens": 3,
            "rejection_sample_method": "probabilistic",
        }
        done = read(spec)
        assert done.data["verify"] == {"rule": "rejection"}
        assert "renamed" in finding(done, "rejection_sample_method").meaning

    @pytest.mark.parametrize("method", ["fly", "synthetic"])
    def test_lossy_methods_are_named(self, method: str) -> None:
        done = read({"method": "ngram", "num_speculative_tokens": 4, "rejection_sample_method": method})
        assert "lossy" in finding(done, "rejection_sample_method").meaning

    @pytest.mark.parametrize(
        "name",
        ["tensor_parallel_size", "adaptive_verification", "disable_by_batch_size", "ngram_prompt_lookup_max"],
    )
    def test_renamed_and_removed_keys(self, name: str) -> None:
        done = read({"method": "ngram", "num_speculative_tokens": 4, name: 2})
        assert finding(done, name).severity == "error"
        assert finding(done, name).fix

    def test_unknown_keys_get_a_suggestion(self) -> None:
        done = read({"method": "ngram", "num_speculative_token": 4})
        assert finding(done, "num_speculative_token").fix == "did you mean num_speculative_tokens?"

    def test_flags_of_older_versions(self) -> None:
        argv = ("vllm", "serve", "t", "--speculative-model", "m", "--num-speculative-tokens", "3")
        done = ENGINE.read(Given(argv=argv), NOW)
        assert done.data["draft"]["k"] == 3
        assert finding(done, "--speculative-model").severity == "error"

    def test_short_flags_and_dotted_keys(self) -> None:
        argv = ("vllm", "serve", "t", "--spec-method", "ngram", "--speculative-config.num_speculative_tokens", "3")
        assert ENGINE.read(Given(argv=argv), NOW).data["draft"]["k"] == 3

    def test_lookup_without_bounds_never_drafts_below_5(self) -> None:
        done = read({"method": "ngram", "num_speculative_tokens": 4})
        assert (done.data["draft"]["min_match"], done.data["draft"]["max_match"]) == (5, 5)
        assert finding(done, "prompt_lookup_min").severity == "warning"

    def test_one_lookup_bound_is_both(self) -> None:
        done = read({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3})
        assert (done.data["draft"]["min_match"], done.data["draft"]["max_match"]) == (3, 3)

    def test_bounds_the_wrong_way_round_are_refused(self) -> None:
        done = read({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 6, "prompt_lookup_max": 3})
        assert finding(done, "prompt_lookup_min").severity == "error"

    def test_row_79_a_minimum_so_high_that_it_never_drafts(self) -> None:
        spec = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 8, "prompt_lookup_max": 9}
        assert "never drafted" in finding(read(spec), "prompt_lookup_min").meaning

    def test_a_suffix_threshold_is_on_by_default(self) -> None:
        done = read({"method": "suffix"})
        assert finding(done, "suffix_decoding_min_token_prob").found == "on by default, 0.1"
        assert done.data["draft"]["k"] == 24

    def test_k_above_the_trained_block(self) -> None:
        spec = {"method": "dflash", "model": "z-lab/Qwen3-8B-DFlash-b16", "num_speculative_tokens": 16}
        assert "above the 15" in finding(read(spec), "num_speculative_tokens").meaning

    def test_k_not_divisible_by_n_predict(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"n_predict": 2}')
        done = read({"method": "mtp", "model": str(tmp_path), "num_speculative_tokens": 3})
        assert "not divisible" in finding(done, "num_speculative_tokens").meaning

    def test_k_missing_is_the_drafters_own_or_refused(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"n_predict": 2}')
        assert read({"method": "mtp", "model": str(tmp_path)}).data["draft"]["k"] == 2
        done = read({"method": "eagle3", "model": "m"})
        assert finding(done, "num_speculative_tokens").severity == "error"

    def test_adaptive_verification_without_dspark(self) -> None:
        spec = {"method": "eagle3", "model": "m", "num_speculative_tokens": 3, "enable_adaptive_verification": True}
        assert finding(read(spec), "enable_adaptive_verification").severity == "error"

    def test_a_schedule_read_upside_down(self) -> None:
        rows = [[1, 4, 1], [5, 8, 4]]
        done = read(SCHEDULED | {"num_speculative_tokens_per_batch_size": rows})
        assert "opposite" in finding(done, "num_speculative_tokens_per_batch_size").meaning

    @pytest.mark.parametrize("rows", [[[2, 4, 1]], [[1, 4, 2], [4, 8, 1]]])
    def test_a_schedule_with_holes_at_the_start_or_overlaps_is_refused(self, rows: list[list[int]]) -> None:
        done = read(SCHEDULED | {"num_speculative_tokens_per_batch_size": rows})
        assert finding(done, "num_speculative_tokens_per_batch_size").severity == "error"

    def test_a_schedule_goes_on_behind_its_end(self) -> None:
        done = read(SCHEDULED | {"num_speculative_tokens_per_batch_size": [[1, 8, 3]]})
        assert any("larger batches keep 3" in each.meaning for each in done.findings)

    def test_a_schedule_is_ignored_with_data_parallelism(self) -> None:
        spec = SCHEDULED | {"num_speculative_tokens_per_batch_size": [[1, 8, 3], [9, 99, 0]]}
        assert finding(read(spec, "--data-parallel-size", "2"), "--data-parallel-size").severity == "warning"

    def test_model_runner_v1_drops_a_schedule_of_suffix_decoding(self) -> None:
        spec = {"method": "suffix", "num_speculative_tokens_per_batch_size": [[1, 8, 3], [9, 99, 0]]}
        done = read(spec)
        assert any("Model Runner V1" in each.meaning for each in done.findings)

    def test_different_vocabularies_are_for_draft_models_alone(self) -> None:
        done = read(SCHEDULED | {"use_heterogeneous_vocab": True})
        assert finding(done, "use_heterogeneous_vocab").severity == "error"

    def test_a_drafter_is_required_or_must_be_left_out(self) -> None:
        assert finding(read({"method": "eagle3", "num_speculative_tokens": 3}), "model").severity == "error"
        assert finding(read({"method": "dspark", "num_speculative_tokens": 3}), "model").severity == "note"
        assert not read({"method": "mtp", "num_speculative_tokens": 1}).findings

    def test_parallel_drafting_is_read_as_steps(self) -> None:
        assert finding(read(SCHEDULED | {"parallel_drafting": True}), "parallel_drafting").severity == "warning"

    def test_methods_that_are_no_recipe(self) -> None:
        done = read({"method": "custom_class", "model": "a.B", "num_speculative_tokens": 3})
        assert "draft" not in done.data
        assert finding(done, "method").severity == "error"


SCHEDULED = {"method": "eagle3", "model": "m", "num_speculative_tokens": 4}


def test_other_settings_of_the_server_are_read() -> None:
    words = ("--max-num-seqs", "8", "--max-model-len=4096", "--dtype", "half", "--trust-remote-code")
    data = read(SCHEDULED, *words, "--override-generation-config", '{"temperature": 0.5, "top_k": -1}').data
    assert data["runtime"] == {"batch": 8, "context": 4096}
    assert data["target"] == {"model": "some/target", "dtype": "float16", "trust_remote_code": True}
    assert data["sampling"] == {"temperature": 0.5, "top_k": 0}


def test_json_alone_and_scripts_are_read() -> None:
    alone = ENGINE.read(Given(text=json.dumps(SCHEDULED), name="spec.json"), NOW)
    assert alone.data["draft"]["method"] == "eagle3"
    script = f"#!/bin/bash\nCUDA_VISIBLE_DEVICES=0 vllm serve t \\\n  -sc '{json.dumps(SCHEDULED)}'\n"
    assert ENGINE.read(Given(text=script, name="run.sh"), NOW).data["target"] == {"model": "t"}
    with pytest.raises(RecipeError, match=r"nothing of vLLM's"):
        ENGINE.read(Given(text="a: 1", name="x.yaml"), NOW)


KEYS = st.sampled_from((*FIELDS, "x", "tensor_parallel_size"))
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 1 << 70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(("ngram", "suffix")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(KEYS, VALUES, max_size=6), st.sampled_from((*METHODS["with medusa"], "mtp", "x", None)))
@settings(max_examples=120, deadline=None, suppress_health_check=STARVED)
def test_fuzzed_configurations_raise_our_errors_only(spec: dict[str, Any], method: str | None) -> None:
    data = spec if method is None else {**spec, "method": method}
    harmless(ENGINE, Given(argv=("vllm", "serve", "t", "--speculative-config", json.dumps(data))), NOW)


@given(st.lists(st.text(max_size=12) | st.sampled_from(("vllm", "--spec-tokens", "-sc", "{}", "--config")), max_size=8))
@settings(max_examples=150, deadline=None, suppress_health_check=STARVED)
def test_fuzzed_command_lines_raise_our_errors_only(words: list[str]) -> None:
    harmless(ENGINE, Given(argv=tuple(words)), NOW)
    harmless(ENGINE, Given(text=" ".join(words), name="f"), NOW)


@given(st.integers(0, 400), st.binary(min_size=1, max_size=3))
@settings(max_examples=150, deadline=None, suppress_health_check=STARVED)
def test_mutated_files_raise_our_errors_only(place: int, put: bytes) -> None:
    text = ENGINE.export(view_of(load_recipe("suffix")), NOW).files["vllm.yaml"].encode()
    changed = (text[:place] + put + text[place + len(put) :]).decode("utf-8", errors="replace")
    harmless(ENGINE, Given(text=changed, name="vllm.yaml"), NOW)


def test_what_is_no_part_of_a_recipe_is_said() -> None:
    done = read(SCHEDULED | {"draft_tensor_parallel_size": 1}, "--tensor-parallel-size", "2", "--port", "1")
    assert finding(done, "the server").found == "tensor-parallel-size"
    assert finding(done, "--speculative-config").found == "draft_tensor_parallel_size"

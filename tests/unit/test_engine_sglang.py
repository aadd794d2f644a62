"""SGLang: what is written loads there, every trap is named, tables fit their loader, and the way back holds."""

from __future__ import annotations

import ast
import bisect
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
from specflow.export.engines.sglang import ENGINE
from specflow.export.engines.sglang_schema import ALGORITHMS, FLAGS, OLDER, SWITCHES
from specflow.export.engines.sglang_tables import additive_table, flat_table, temperature_file
from specflow.export.recipe_view import view_of
from specflow.recipe import Recipe, parse_recipe

NOW, ANCHOR, WINDOWS = ENGINE.dialects
GAIN = {"policy": "expected_gain"}
EAGLE3 = {"method": "eagle3", "k": 4, "weights": "w"}


def exported(data: dict[str, Any], dialect: Any = NOW, **more: Any) -> Exported:
    return ENGINE.export(view_of(parse_recipe(data), **more), dialect)


def flag(done: Exported, name: str) -> str | None:
    words = list(done.command)
    return words[words.index(name) + 1] if name in words else None


def read(words: str, version: str | None = None) -> Imported:
    argv = ("python", "-m", "sglang.launch_server", "--model-path", "t", *words.split())
    return ENGINE.read(Given(argv=argv), choose_dialect(ENGINE, version))


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
@settings(max_examples=40, deadline=None, suppress_health_check=STARVED)
def test_a_measured_profile_comes_back_as_a_policy_that_measures(recipe: Recipe, acceptance: float) -> None:
    assert recipe.draft is not None
    costs = made_costs(min(recipe.draft.k, 8))
    round_trip(ENGINE, recipe, NOW, view_of(recipe, costs, batch_schedule(costs, recipe.draft.k, acceptance, 64), 64))


class TestSchema:
    """Flags are those of the installed release; without SGLang those of 0.5.23, kept here."""

    def flags(self) -> set[str]:
        spec = importlib.util.find_spec("sglang")
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            file = Path(folder) / "srt" / "arg_groups" / "fields" / "spec.py"
            if file.is_file():
                tree = ast.parse(file.read_text(encoding="utf-8"))
                names = [ast.unparse(node.target) for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)]
                found = {f"--{name.replace('_', '-')}" for name in names if name.startswith("speculative_")}
                return found - {"--speculative-boundary-reduction"}  # has no flag
        return set(FLAGS)

    def test_kept_flags_are_those_of_the_source(self) -> None:
        assert set(FLAGS) == self.flags()

    @given(recipes())
    @settings(max_examples=60, deadline=None, suppress_health_check=STARVED)
    def test_every_written_flag_exists(self, recipe: Recipe) -> None:
        for dialect in ENGINE.dialects:
            done = ENGINE.export(view_of(recipe), dialect)
            given_flags = {word for word in done.command if word.startswith("--speculative-")}
            assert given_flags <= {*self.flags(), *OLDER[dialect.name]}
            assert flag(done, "--speculative-algorithm") in (*ALGORITHMS, None)

    def test_switches_are_flags(self) -> None:
        assert {each for each in SWITCHES if each.startswith("--speculative-")} <= set(FLAGS)


class TestWriting:
    """What an export has to get right."""

    def test_num_draft_tokens_counts_the_anchor(self) -> None:
        done = exported({"draft": {"method": "dflash", "k": 15, "weights": "z-lab/Qwen3-8B-DFlash-b16"}})
        assert flag(done, "--speculative-num-draft-tokens") == "16"

    def test_all_three_of_steps_topk_and_tokens_are_said(self) -> None:
        done = exported({"draft": EAGLE3})
        names = ("num-steps", "eagle-topk", "num-draft-tokens")
        assert [flag(done, f"--speculative-{name}") for name in names] == ["4", "1", "5"]

    def test_a_tree_has_its_nodes_and_the_anchor(self) -> None:
        done = exported({"draft": {"method": "eagle2", "k": 5, "nodes": 24, "branch": 8, "weights": "w"}})
        assert flag(done, "--speculative-num-draft-tokens") == "25"
        assert flag(done, "--speculative-eagle-topk") == "8"

    def test_dspark_block_size_counts_no_anchor_now_and_did_before(self) -> None:
        data = {"draft": {"method": "dspark", "k": 7, "weights": "w"}}
        now, before = exported(data), exported(data, ANCHOR)
        assert flag(now, "--speculative-dspark-block-size") == "7"
        assert flag(before, "--speculative-dspark-block-size") is None
        assert flag(now, "--speculative-num-draft-tokens") == flag(before, "--speculative-num-draft-tokens") == "8"

    def test_rejection_and_block_verification_are_off_unless_said(self) -> None:
        rule = {"rejection": "--speculative-use-rejection-sampling", "block": "--speculative-use-block-verification"}
        for name, wanted in rule.items():
            assert wanted in exported({"draft": EAGLE3, "verify": {"rule": name}}).command
        assert not set(rule.values()) & set(exported({"draft": EAGLE3}).command)

    def test_a_tree_cannot_have_rejection_sampling(self) -> None:
        data = {"draft": {**EAGLE3, "shape": "sampled"}, "verify": {"rule": "rejection"}}
        done = exported(data)
        assert "--speculative-use-rejection-sampling" not in done.command
        assert {"draft.shape", "verify.rule"} <= {gap.what.partition(":")[0] for gap in done.not_expressible}

    def test_ngram_is_one_trie_for_all_requests(self) -> None:
        done = exported({"draft": {"method": "ngram", "k": 8, "min_match": 2}})
        named = {gap.what.partition(":")[0] for gap in done.not_expressible}
        assert {"draft.method", "draft.share", "draft.min_match"} <= named
        older = exported({"draft": {"method": "ngram", "k": 8, "min_match": 2, "max_match": 5}}, WINDOWS)
        assert flag(older, "--speculative-ngram-min-match-window-size") == "2"
        assert flag(older, "--speculative-ngram-max-match-window-size") == "5"

    def test_the_schedule_has_lower_ends_as_keys(self) -> None:
        costs = made_costs(6)
        steps = batch_schedule(costs, 6, 0.7, 64)
        done = exported({"draft": {**EAGLE3, "k": 6}, "length": GAIN}, costs=costs, schedule=steps)
        table = json.loads(done.files["adaptive.json"])
        assert {int(key): row["candidate_steps"] for key, row in table.items()} == {s.low: [s.k] for s in steps}
        assert int(flag(done, "--speculative-num-steps") or 0) in {step.k for step in steps}

    def test_zero_steps_are_for_current_versions(self) -> None:
        costs = made_costs(6, slope=0.4)
        steps = batch_schedule(costs, 6, 0.7, 64)
        assert steps[-1].k == 0
        data = {"draft": {**EAGLE3, "k": 6}, "length": GAIN}
        assert "[\n      0\n    ]" in exported(data, costs=costs, schedule=steps).files["adaptive.json"]
        older = exported(data, ANCHOR, costs=costs, schedule=steps)
        assert "[\n      0\n    ]" not in older.files["adaptive.json"]
        assert any("0 steps came later" in gap.instead for gap in older.not_expressible)

    def test_drafts_that_never_pay_are_not_launched(self) -> None:
        costs = made_costs(4)
        steps = batch_schedule(costs, 4, 0.0, 64)
        done = exported({"draft": EAGLE3, "length": GAIN}, costs=costs, schedule=steps)
        assert "--speculative-algorithm" not in done.command
        assert any("fastest" in gap.instead for gap in done.not_expressible)

    def test_a_tuned_dspark_arrives_with_its_scheduler_filled(self) -> None:
        draft = {"method": "dspark", "k": 3, "weights": "w", "temperatures": [1.1, 1.2, 1.3, 1.4]}
        done = exported({"draft": draft, "length": GAIN, "verify": {"rule": "block"}}, costs=made_costs(3))
        assert done.command[:2] == ("env", "SGLANG_RAGGED_VERIFY_MODE=compact")
        assert {"sps_table.json", "sps_table_flat.json", "temperatures.json"} <= set(done.files)
        assert flag(done, "--speculative-dspark-sps-table-path") == "sps_table.json"
        assert json.loads(done.files["temperatures.json"])["temperatures"] == [1.1, 1.2, 1.3]
        assert not done.not_expressible

    def test_temperatures_come_from_the_checkpoint_too(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"temperatures": [0.9, 1.5], "block_size": 2}')
        done = exported({"draft": {"method": "dspark", "k": 2, "weights": str(tmp_path)}})
        assert json.loads(done.files["temperatures.json"])["temperatures"] == [0.9, 1.5]

    def test_a_confidence_threshold_exists_in_older_versions_only(self) -> None:
        length = {"policy": "confidence", "threshold": 0.4}
        data = {"draft": {"method": "dspark", "k": 7, "weights": "w"}, "length": length}
        assert flag(exported(data, ANCHOR), "--speculative-dspark-confidence-threshold") == "0.4"
        now = exported(data)
        assert flag(now, "--speculative-dspark-confidence-threshold") is None
        assert {"length.policy", "length.threshold"} <= {gap.what.partition(":")[0] for gap in now.not_expressible}

    def test_medusa_is_not_there(self) -> None:
        done = exported({"draft": {"method": "medusa", "k": 4, "weights": "w"}})
        assert "--speculative-algorithm" not in done.command


class TestTables:
    """The two forms of the steps-per-second table, and the temperature file."""

    def test_the_flat_table_is_what_its_loader_checks(self) -> None:
        table = flat_table(made_costs(4), 4, 64)
        probes, speeds = table["sample_batch_tokens"], table["sample_steps_per_sec"]
        assert probes == sorted(set(probes))
        assert len(probes) == len(speeds)
        assert table["max_batch_tokens"] >= probes[-1]
        assert speeds == sorted(speeds, reverse=True)

    def test_the_flat_table_is_never_faster_than_measured(self) -> None:
        costs = made_costs(4)
        table = flat_table(costs, 4, 64)
        for batch in (1, 2, 4, 8, 16):
            for rows in range(1, 6):
                place = bisect.bisect_right(table["sample_batch_tokens"], batch * rows) - 1
                measured = 1 / (costs.target_s(rows, batch, 64) + costs.draft_s(4, batch, 64))
                assert table["sample_steps_per_sec"][place] <= measured * 1.0001

    def test_the_additive_table_gives_back_costs_that_are_additive(self) -> None:
        costs = made_costs(4, batches=(1, 2, 3, 5))
        table = additive_table(costs, 4, 64)
        assert table["bias_seconds"] > 0
        assert table["alpha_seconds"][0] == table["theta_seconds"][0] == 0
        for values in (table["alpha_seconds"], table["theta_seconds"]):
            assert values == sorted(values)
        alpha = dict(zip(table["bs_probes"], table["alpha_seconds"], strict=True))
        theta = dict(zip(table["m_probes"], table["theta_seconds"], strict=True))
        for batch in (1, 2, 3, 5):
            for rows in range(1, 6):
                wanted = costs.target_s(rows, batch, 64) + costs.draft_s(4, batch, 64)
                said = table["bias_seconds"] + alpha[batch] + theta[batch * rows]
                assert said == pytest.approx(wanted, rel=0.05)

    def test_temperatures_reach_every_position_or_are_not_written(self) -> None:
        assert temperature_file((1.0, 2.0), 3) is None
        table = temperature_file((1.0, 2.0, 3.0), 2)
        assert table is not None
        assert set(table) == {"temperatures", "dataset", "num_samples", "ece_before", "ece_after"}


class TestTraps:
    """What is wrong about command lines that people have."""

    def test_the_anchor_is_counted_off_by_one(self) -> None:
        words = "--speculative-algorithm EAGLE3 --speculative-draft-model-path w --speculative-eagle-topk 1 "
        done = read(words + "--speculative-num-steps 4 --speculative-num-draft-tokens 4")
        assert done.data["draft"]["k"] == 4
        assert "counts the anchor" in finding(done, "--speculative-num-draft-tokens").meaning

    def test_vllms_k_of_a_dflash_block_loses_a_token_here(self) -> None:
        words = "--speculative-algorithm DFLASH --speculative-draft-model-path z-lab/Qwen3-8B-DFlash-b16"
        done = read(f"{words} --speculative-num-draft-tokens 15")
        assert done.data["draft"]["k"] == 14
        assert finding(done, "--speculative-num-draft-tokens").fix == "16"
        assert not read(f"{words} --speculative-num-draft-tokens 16").findings

    def test_a_block_above_the_trained_one(self) -> None:
        words = "--speculative-algorithm DFLASH --speculative-draft-model-path z-lab/Qwen3-8B-DFlash-b16"
        done = read(f"{words} --speculative-dflash-block-size 20")
        assert "above the 15" in finding(done, "--speculative-num-draft-tokens").meaning

    def test_two_block_sizes_that_differ_are_refused(self) -> None:
        words = "--speculative-algorithm DFLASH --speculative-draft-model-path w --speculative-dflash-block-size 8"
        done = read(f"{words} --speculative-num-draft-tokens 9")
        assert finding(done, "--speculative-num-draft-tokens").severity == "error"

    def test_dspark_block_size_means_something_else_in_older_versions(self) -> None:
        words = "--speculative-algorithm DSPARK --speculative-draft-model-path w --speculative-dspark-block-size 7"
        assert read(words).data["draft"]["k"] == 7
        older = read(words, "0.5.18")
        assert older.data["draft"]["k"] == 6
        assert finding(older, "--speculative-dspark-block-size").severity == "warning"
        wrong = read(f"{words} --speculative-num-draft-tokens 7")
        assert finding(wrong, "--speculative-num-draft-tokens").fix == "8"

    def test_some_of_the_three_sizes_alone(self) -> None:
        done = read("--speculative-algorithm EAGLE3 --speculative-draft-model-path w --speculative-num-steps 4")
        assert any("all three" in each.meaning for each in done.findings)

    def test_none_of_the_three_sizes_is_a_guess_of_sglang(self) -> None:
        done = read("--speculative-algorithm EAGLE3 --speculative-draft-model-path w")
        assert done.data["draft"]["k"] == 3
        assert finding(done, "--speculative-num-steps").severity == "note"

    @pytest.mark.parametrize("name", ["single", "acc"])
    def test_accept_thresholds_below_1_are_lossy(self, name: str) -> None:
        words = f"--speculative-algorithm NGRAM --speculative-accept-threshold-{name} 0.9"
        assert "lossy" in finding(read(words), f"--speculative-accept-threshold-{name}").meaning

    def test_rejection_sampling_needs_a_chain(self) -> None:
        words = (
            "--speculative-algorithm STANDALONE --speculative-draft-model-path w --speculative-use-rejection-sampling"
        )
        assert finding(read(words), "--speculative-use-rejection-sampling").severity == "error"

    def test_a_token_map_is_ignored_for_eagle3(self) -> None:
        words = "--speculative-algorithm EAGLE3 --speculative-draft-model-path w --speculative-token-map f.pt"
        assert "ignored" in finding(read(words), "--speculative-token-map").meaning

    @pytest.mark.parametrize(
        "flag_name",
        [
            "--speculative-dflash-draft-window-size",
            "--speculative-ngram-min-match-window-size",
            "--speculative-dspark-confidence-threshold",
        ],
    )
    def test_removed_and_renamed_flags(self, flag_name: str) -> None:
        done = read(f"--speculative-algorithm NGRAM {flag_name} 1")
        assert finding(done, flag_name).severity == "error"
        assert finding(done, flag_name).fix

    def test_unknown_flags_get_a_suggestion(self) -> None:
        done = read("--speculative-algorithm NGRAM --speculative-num-draft-token 5")
        hint = "did you mean --speculative-num-draft-tokens?"
        assert finding(done, "--speculative-num-draft-token").fix == hint

    def test_row_79_a_window_that_never_drafts(self) -> None:
        words = "--speculative-algorithm NGRAM --speculative-ngram-min-match-window-size 10"
        assert "never drafted" in finding(read(words, "0.5.10"), "--speculative-ngram-min-match-window-size").meaning

    def test_ngram_defaults_draft_a_tree_of_11(self) -> None:
        done = read("--speculative-algorithm NGRAM --speculative-ngram-max-trie-depth 64")
        assert done.data["draft"]["k"] == 11
        assert "tree of 11 nodes" in finding(done, "--speculative-ngram-max-bfs-breadth").meaning

    def test_nextn_is_eagle_and_eagle_without_a_drafter_is_mtp(self) -> None:
        sizes = "--speculative-num-steps 1 --speculative-eagle-topk 1 --speculative-num-draft-tokens 2"
        assert read(f"--speculative-algorithm NEXTN {sizes}").data["draft"] == {"method": "mtp", "k": 1}
        assert read(f"--speculative-algorithm EAGLE {sizes}").data["draft"]["method"] == "mtp"

    def test_adaptive_is_switched_off_without_a_word_for_other_methods(self) -> None:
        done = read("--speculative-algorithm NGRAM --speculative-adaptive")
        assert "without an error" in finding(done, "--speculative-adaptive").meaning

    def adaptive(self, folder: Path, rows: dict[str, Any], version: str | None = None) -> Imported:
        file = folder / "adaptive.json"
        file.write_text(json.dumps(rows))
        sizes = "--speculative-num-steps 4 --speculative-eagle-topk 1 --speculative-num-draft-tokens 5"
        words = f"--speculative-algorithm EAGLE3 --speculative-draft-model-path w {sizes} --speculative-adaptive"
        return read(f"{words} --speculative-adaptive-config {file}", version)

    def test_a_schedule_read_upside_down(self, tmp_path: Path) -> None:
        done = self.adaptive(tmp_path, {"1": {"candidate_steps": [1]}, "8": {"candidate_steps": [4]}})
        assert any("opposite" in each.meaning for each in done.findings)
        assert done.data["length"] == GAIN

    def test_steps_that_are_no_candidate_are_refused(self, tmp_path: Path) -> None:
        done = self.adaptive(tmp_path, {"1": {"candidate_steps": [3]}})
        assert finding(done, "--speculative-num-steps").severity == "error"

    def test_zero_candidate_steps_are_refused_by_older_versions(self, tmp_path: Path) -> None:
        rows = {"1": {"candidate_steps": [4]}, "8": {"candidate_steps": [0]}}
        assert not [each for each in self.adaptive(tmp_path, rows).findings if each.severity == "error"]
        assert [each for each in self.adaptive(tmp_path, rows, "0.5.18").findings if each.severity == "error"]

    @pytest.mark.parametrize("rows", [{}, {"a": 1}, {"1": 3}, {"1": {"candidate_steps": [-1]}}])
    def test_a_broken_schedule_is_our_error(self, rows: dict[str, Any], tmp_path: Path) -> None:
        with pytest.raises(RecipeError):
            self.adaptive(tmp_path, rows)

    def test_a_cost_table_without_its_mode_does_nothing(self) -> None:
        words = "--speculative-algorithm DSPARK --speculative-draft-model-path w --speculative-dspark-sps-table-path f"
        assert "without effect" in finding(read(words), "--speculative-dspark-sps-table-path").meaning

    def test_without_a_cost_table_whole_blocks_are_verified(self) -> None:
        done = read("--speculative-algorithm DSPARK --speculative-draft-model-path w")
        assert finding(done, "--speculative-dspark-sps-table-path").severity == "note"

    @pytest.mark.parametrize("name", ["UNO", "EAGLE_HARNESS"])
    def test_algorithms_that_are_no_recipe(self, name: str) -> None:
        done = read(f"--speculative-algorithm {name}")
        assert "draft" not in done.data
        assert finding(done, "--speculative-algorithm")

    def test_flags_without_an_algorithm_do_nothing(self) -> None:
        assert read("--speculative-num-steps 3").findings[0].severity == "warning"


def test_ngram_uses_no_draft_model() -> None:
    words = ("--model-path", "t", "--speculative-algorithm", "NGRAM", "--speculative-draft-model-path", "d")
    done = ENGINE.read(Given(argv=("python", "-m", "sglang.launch_server", *words)), ENGINE.dialects[0])
    (found,) = [each for each in done.findings if each.where == "--speculative-draft-model-path"]
    assert "not used" in found.meaning
    assert done.recipe().draft is not None


def test_a_yaml_file_is_read() -> None:
    text = "model-path: t\nspeculative-algorithm: NGRAM\nspeculative-num-draft-tokens: 9\ncontext_length: 512\n"
    done = ENGINE.read(Given(text=text, name="f.yaml"), NOW)
    assert done.data["draft"]["k"] == 8
    assert done.data["runtime"] == {"context": 512}
    with pytest.raises(RecipeError, match=r"nothing of SGLang's"):
        ENGINE.read(Given(text="a: 1", name="f.yaml"), NOW)


WORDS = st.sampled_from(
    (*FLAGS, *OLDER["windows"], "EAGLE3", "NGRAM", "DSPARK", "dflash", "1", "-1", "0.5", "{}", "x", "w")
)


@given(st.sampled_from((*ALGORITHMS, "x")), st.lists(WORDS | st.text(max_size=6), max_size=10))
@settings(max_examples=120, deadline=None, suppress_health_check=STARVED)
def test_fuzzed_command_lines_raise_our_errors_only(algorithm: str, words: list[str]) -> None:
    argv = ("python", "-m", "sglang.launch_server", "--speculative-algorithm", algorithm, *words)
    for dialect in ENGINE.dialects:
        harmless(ENGINE, Given(argv=argv), dialect)


@given(st.text(max_size=60))
@settings(max_examples=100, deadline=None, suppress_health_check=STARVED)
def test_fuzzed_files_raise_our_errors_only(text: str) -> None:
    harmless(ENGINE, Given(text=f"model-path: t\n{text}", name="f"), NOW)

"""The frame of engines: how they are found, versions, the account of what gets lost, schedules, and reading."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from engine_meaning import STARVED, made_costs
from hypothesis import given, settings
from hypothesis import strategies as st

from specflow.errors import RecipeError, SpecFlowError
from specflow.export.batch_schedule import batch_schedule
from specflow.export.drafter_facts import facts_of
from specflow.export.engine_input import Fields, as_mapping, find_command, read_flags
from specflow.export.engines import base
from specflow.export.engines.base import Exported, Finding, Given, Imported, choose_dialect, engines, find_engine
from specflow.export.pair_checks import check_block, check_match, check_pair
from specflow.export.recipe_view import Ledger, Step, view_of
from specflow.recipe import load_recipe, parse_recipe, shipped_recipes


class MadeEngine:
    """An engine of another package."""

    name = "made"
    dialects = (base.Dialect("1.0", "1.2"),)

    def export(self, view: Any, dialect: base.Dialect) -> Exported:
        return Exported("made", dialect.versions, ("made", view.target))

    def read(self, given: Given, dialect: base.Dialect) -> Imported:
        return Imported("made", {}, (), dialect.versions)


def with_entry_point(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    point = EntryPoint("made", value, base.ENTRY_POINTS)
    monkeypatch.setattr(base, "entry_points", lambda group: [point] if group == base.ENTRY_POINTS else [])
    engines.cache_clear()


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    engines.cache_clear()
    yield
    engines.cache_clear()


def test_engines_are_found_by_listing_the_folder() -> None:
    assert {"vllm", "sglang", "tensorrt_llm"} <= set(engines())
    assert all(isinstance(engine, base.Engine) and engine.name == name for name, engine in engines().items())


def test_an_entry_point_adds_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with_entry_point(monkeypatch, "test_engine_base:ENGINE")
    assert find_engine("made").name == "made"


@pytest.mark.parametrize("value", ["test_engine_base:Path", "test_engine_base:SECOND"])
def test_what_is_no_engine_or_a_second_one_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_entry_point(monkeypatch, value)
    with pytest.raises(RecipeError, match=r"fits `Engine`|one engine of each name"):
        engines()


@pytest.mark.parametrize(("name", "hint"), [("vlm", "vllm"), ("sglan", "sglang"), ("tensorrt", "tensorrt_llm")])
def test_a_wrong_name_is_answered_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(RecipeError, match=f"did you mean {hint}"):
        find_engine(name)


@pytest.mark.parametrize("name", ["tensorrt-llm", "TensorRT-LLM", "tensorrt_llm", "vLLM"])
def test_spelling_of_names_is_forgiving(name: str) -> None:
    assert find_engine(name).name in ("tensorrt_llm", "vllm")


def test_a_version_chooses_its_dialect_and_an_old_one_is_refused() -> None:
    vllm = find_engine("vllm")
    assert choose_dialect(vllm, None) is vllm.dialects[0]
    assert choose_dialect(vllm, "0.34.1") is vllm.dialects[0]
    assert choose_dialect(vllm, "v0.29.0") is vllm.dialects[1]
    with pytest.raises(RecipeError, match="older than every known vllm"):
        choose_dialect(vllm, "0.5.0")
    with pytest.raises(RecipeError, match="no version number"):
        choose_dialect(vllm, "latest")


def test_versions_are_ordered() -> None:
    for small, large in (("1.3.0rc8", "1.3.0"), ("1.2.9", "1.3.0rc0"), ("b10048", "b10752"), ("0.5.9", "0.5.23")):
        assert base.version_key(small) < base.version_key(large)
    assert base.version_key("0.33.0+cu129") == base.version_key("0.33.0.post1") == base.version_key("0.33")


def test_every_key_that_nobody_settles_becomes_a_gap() -> None:
    data = {"draft": {"method": "eagle3", "k": 3, "norm_output": True}, "target": {"model": "x", "threads": 2}}
    ledger = Ledger(view_of(parse_recipe(data)))
    ledger.says("target.model", "draft.k", "draft.method", "verify", "sampling")
    ledger.lacks("length.policy", "what is done")
    named = {gap.what.partition(":")[0]: gap.instead for gap in ledger.gaps()}
    assert named["length.policy"] == "what is done"
    assert "config.json" in named["draft.norm_output"]
    assert "threads" in named["target.threads"]
    assert len(named) == 3


def test_options_that_say_the_default_are_no_gap() -> None:
    """A recipe with weights keeps what was written out, defaults too."""
    said = view_of(load_recipe("eagle3", ["draft.weights=w"])).said
    assert not {"draft.shape", "draft.norm_output"} & set(said)
    assert said["draft.weights"] == "w"


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_a_view_says_what_its_recipe_says(name: str) -> None:
    recipe = load_recipe(name)
    view = view_of(recipe)
    assert view.k == (recipe.draft.k if recipe.draft else 0)
    assert all(draft.at == "draft" or draft.at.startswith("draft.first_of.") for draft in view.drafts)
    assert ("draft.k" in view.said) == (recipe.draft is not None)
    assert not {"name", "description"} & set(view.said)


def test_k_0_is_plain_decoding() -> None:
    assert view_of(load_recipe("ngram", ["draft.k=0"])).drafts == ()


class TestSchedules:
    """Draft tokens by batch size, from measured costs."""

    def test_larger_batches_get_shorter_drafts_and_ranges_have_no_holes(self) -> None:
        steps = batch_schedule(made_costs(8), 8, 0.7, 64)
        assert steps[0].low == 1
        assert steps[-1].high == 16
        assert all(later.low == earlier.high + 1 for earlier, later in pairwise(steps))
        assert [step.k for step in steps] == sorted({step.k for step in steps}, reverse=True)
        assert len(steps) > 1

    def test_it_is_the_best_length_at_every_batch(self) -> None:
        costs = made_costs(6)
        for step in batch_schedule(costs, 6, 0.8, 64):
            for batch in (step.low, step.high):
                best = max(range(7), key=lambda k: sum(0.8**i for i in range(k + 1)) / costs.round_s(k, batch, 64))
                assert step.k == best

    def test_drafts_that_never_stand_are_never_made(self) -> None:
        assert batch_schedule(made_costs(4), 4, 0.0, 64) == (Step(1, 16, 0),)

    def test_drafts_that_cost_nothing_are_always_made(self) -> None:
        (step,) = batch_schedule(made_costs(4, slope=0.0), 4, 0.9, 64)
        assert step == Step(1, 16, 4)


class TestDrafterFacts:
    """What a drafter's config.json or name says of its blocks."""

    @pytest.mark.parametrize(
        ("config", "family", "trained"),
        [
            ({"block_size": 16}, "dflash", 15),
            ({"dflash_config": {"block_size": 10}}, "dflash", 9),
            ({"block_size": 7}, "dspark", 7),
            ({"dspark_block_size": 5}, "dspark", 5),
            ({"block_size": 8, "layout": "fill_in"}, "dspark", 7),
            ({"block_size": 8, "layout": "shifted"}, "dflash", 8),
            ({"speculators_config": {"proposal_methods": [{"speculative_tokens": 6}]}, "block_size": 9}, "dflash", 6),
            ({"block_size": "9"}, "dflash", None),
            ({"speculators_config": 3}, "dflash", None),
        ],
    )
    def test_the_trained_block_in_draft_tokens(self, config: object, family: str, trained: int, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert facts_of(str(tmp_path), family).trained_k == trained

    def test_names_of_published_drafters_say_it_too(self) -> None:
        assert facts_of("z-lab/Qwen3-8B-DFlash-b16", "dflash").trained_k == 15
        assert facts_of("deepseek-ai/dspark_qwen3_8b_block7", "dspark").trained_k == 7
        assert facts_of("some/model-8b", "dflash").trained_k is None

    @given(st.binary(max_size=60))
    @settings(max_examples=60, deadline=None, suppress_health_check=STARVED)
    def test_any_bytes_in_config_json_are_survived(self, data: bytes) -> None:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_bytes(data)
            facts_of(folder, "dflash")


class TestPairs:
    """Faults that users reported, found before anything is launched (reference: user reports)."""

    def write(self, folder: Path, **config: object) -> str:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    def test_row_65_k_other_than_the_trained_block(self) -> None:
        (above,) = check_block(9, "x/dspark_block7", "dspark", "k")
        (below,) = check_block(5, "x/dspark_block7", "dspark", "k")
        assert (above.severity, below.severity) == ("warning", "note")
        assert not list(check_block(7, "x/dspark_block7", "dspark", "k"))

    def test_k_not_divisible_by_the_modules_of_the_drafter(self, tmp_path: Path) -> None:
        place = self.write(tmp_path / "mtp", n_predict=3)
        (found,) = check_block(4, place, "mtp", "k")
        assert found.severity == "error"
        assert found.fix == "3 or 6"
        assert not list(check_block(6, place, "mtp", "k"))
        assert not list(check_block(2, place, "mtp", "k"))

    def test_row_79_a_shortest_match_that_never_drafts(self) -> None:
        assert list(check_match(48, "n-min"))
        assert not list(check_match(3, "n-min"))

    def test_rows_41_and_42_vocabularies_that_differ(self, tmp_path: Path) -> None:
        target = self.write(tmp_path / "a", vocab_size=151936)
        draft = self.write(tmp_path / "b", vocab_size=152064)
        (found,) = check_pair(target, draft, "small_model", None)
        assert "152064" in found.found
        assert not list(check_pair(target, draft, "eagle3", None))

    def test_row_43_other_tokenizers_are_told_where_they_work(self, tmp_path: Path) -> None:
        target, draft = self.write(tmp_path / "a", vocab_size=10), self.write(tmp_path / "b", vocab_size=20)
        (found,) = check_pair(target, draft, "small_model", None)
        assert "use_heterogeneous_vocab" in found.fix

    @pytest.mark.parametrize("key", ["bos_token", "chat_template"])
    def test_row_45_another_template_or_first_token(self, key: str, tmp_path: Path) -> None:
        folders = [self.write(tmp_path / name, vocab_size=10) for name in "ab"]
        for folder, value in zip(folders, ("x", "y"), strict=True):
            (Path(folder) / "tokenizer_config.json").write_text(json.dumps({key: value}))
        (found,) = check_pair(folders[0], folders[1], "small_model", None)
        assert found.severity == "warning"
        assert not list(check_pair(folders[0], folders[0], "small_model", None))

    def test_row_64_windowed_layers_that_may_run_as_full_attention(self, tmp_path: Path) -> None:
        draft = self.write(tmp_path / "b", layer_types=["sliding_attention", "full_attention"])
        (found,) = check_pair("some/target", draft, "dflash", None)
        assert "by position" in found.fix

    def test_row_40_requests_longer_than_the_drafter_was_trained_for(self, tmp_path: Path) -> None:
        target = self.write(tmp_path / "a", max_position_embeddings=40960)
        draft = self.write(tmp_path / "b", max_position_embeddings=2048)
        (found,) = check_pair(target, draft, "eagle3", None)
        assert "2048" in found.found
        assert not list(check_pair(target, draft, "eagle3", 2048))


class TestReading:
    """Words, scripts and mappings from outside."""

    def test_flags_with_and_without_values(self) -> None:
        words = ["env", "A=1", "serve", "m", "--a_b", "3", "--on", "--c=x=y", "--d", "-1", "-sc", "{}"]
        flags = read_flags(words, ("--on",), {"-sc": "--spec"})
        assert flags.words == ("serve", "m")
        assert flags.environment == {"A": "1"}
        assert flags.values == {"--a-b": "3", "--on": None, "--c": "x=y", "--d": "-1", "--spec": "{}"}

    def test_a_command_is_found_in_a_script(self) -> None:
        script = "#!/bin/sh\nexport X=1\n# vllm serve no\nY=2 vllm serve m \\\n  --a 'b c'\n"
        assert find_command(script, ("vllm",)) == ("Y=2", "vllm", "serve", "m", "--a", "b c")
        assert find_command("echo 'unclosed", ("vllm",)) is None

    @pytest.mark.parametrize("text", ["[1]", "", "{a: 1", "a: *b", '"\\UFFFFFFFF": 1', "{" * 50, "a: !!int x"])
    def test_what_is_no_mapping_is_our_error(self, text: str) -> None:
        with pytest.raises(RecipeError):
            as_mapping(text, "f")

    def test_values_have_their_type_or_are_refused(self) -> None:
        fields = Fields({"a": "3", "b": True, "c": "x", "d": 0.5}, "f")
        assert (fields.whole("a"), fields.truth("b"), fields.text("c"), fields.number("d")) == (3, True, "x", 0.5)
        assert (fields.whole("none"), fields.number("none"), fields.text("none")) == (None, None, None)
        for read in (lambda: fields.whole("b"), lambda: fields.whole("d"), lambda: fields.number("c")):
            with pytest.raises(RecipeError, match="f: "):
                read()

    @given(st.text(max_size=80))
    @settings(max_examples=150, deadline=None, suppress_health_check=STARVED)
    def test_any_text_is_a_mapping_or_our_error(self, text: str) -> None:
        find_command(text, ("vllm",))
        try:
            as_mapping(text, "f")
        except SpecFlowError:
            return


def test_findings_come_worst_first_and_once() -> None:
    note, error = Finding("note", "a", "b", "c"), Finding("error", "a", "b", "c", "d")
    assert base.worst_first([note, error, note]) == (error, note)
    assert str(error) == "error: a: b: c\n  fix: d"


ENGINE = MadeEngine()


class Second(MadeEngine):
    """An engine whose name is taken."""

    name = "vllm"


SECOND = Second()

"""The self-test tells a right reading of weights from a wrong one, with drafters that know their target by heart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cycling import CYCLE, DRAFTERS, LAYERS, LOADED, MODEL, lay_down, recipe_of, write_config
from outgoing import verifier_of
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from specflow.checkpoint.writing import convert, open_drafter
from specflow.cli.app import app
from specflow.errors import CheckpointError, DataError, RecipeError
from specflow.recipe import dump_recipe, load_recipe, parse_recipe
from specflow.train.selftest import Found, SelfTest, greedy_texts, parts_to_test, run_selftest
from specflow.train.sequences import Text

TEXTS = greedy_texts(LOADED, [[3], [8, 21], [19, 4, 9]], 60)


def found_with(path: Path, method: str, **options: Any) -> SelfTest:
    weights = path / method
    weights = weights if weights.exists() else lay_down(weights, method)
    return run_selftest(parts_to_test(recipe_of(method, weights, **options))[0], LOADED, TEXTS)


def test_texts_are_the_targets_own() -> None:
    for text in TEXTS:
        place = {int(token): index for index, token in enumerate(CYCLE)}
        for before, after in zip(text.tokens[text.num_prompt - 1 :], text.answer, strict=False):
            assert place[int(after)] == (place[int(before)] + 1) % len(CYCLE)
    assert [len(text.answer) for text in TEXTS] == [20, 20, 20]
    with pytest.raises(DataError, match="none"):
        greedy_texts(LOADED, [])


@pytest.mark.parametrize("method", list(DRAFTERS))
def test_the_right_reading_agrees_everywhere(tmp_path: Path, method: str) -> None:
    found = found_with(tmp_path, method)
    assert found.declared.agreement == 1.0
    assert found.count == 57
    assert found.better is None
    assert found.healthy


ALTERNATIVES = {
    "medusa": {"state before the final norm", "second head first", "heads one token later"},
    "mtp": {"order hidden_first", "hidden pre_norm", "gains stored less 1"},
    "eagle": {"state before the final norm"},
    "eagle3": {"taps one layer lower", "taps one layer higher"},
    "dflash": {"layout shifted", "taps one layer lower", "taps one layer higher"},
}
"""Readings under which these weights are nonsense."""


@pytest.mark.parametrize("method", list(DRAFTERS))
def test_plausible_readings_are_tried_and_do_not_agree(tmp_path: Path, method: str) -> None:
    found = {reading.name: reading.agreement for reading in found_with(tmp_path, method).readings}
    for name in ALTERNATIVES[method]:
        assert found[name] < 0.5, name


WRONG: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "tap k, not k-1": ("eagle3", {"taps": [1, 2, 3]}, "taps one layer lower", "taps: [0, 1, 2]"),
    "tap k-1, not k": ("eagle3", {"taps": [-1, 0, 1]}, "taps one layer higher", "taps: [0, 1, 2]"),
    "tap of a backbone": ("dflash", {"taps": [3]}, "taps one layer lower", "taps: [2]"),
    "slot": ("dflash", {"layout": "shifted"}, "layout fill_in", "layout: fill_in"),
    "norm": ("mtp", {"hidden": "pre_norm"}, "hidden post_norm", "hidden: post_norm"),
    "order": ("mtp", {"order": "hidden_first"}, "order embedding_first", "order: embedding_first"),
    "gains": ("mtp", {"offset_norms": True}, "gains stored whole", "offset_norms: false"),
}


@pytest.mark.parametrize(("method", "options", "better", "change"), WRONG.values(), ids=list(WRONG))
def test_a_wrong_reading_is_found_and_the_right_one_named(
    tmp_path: Path, method: str, options: dict[str, Any], better: str, change: str
) -> None:
    found = found_with(tmp_path, method, **options)
    assert found.better is not None
    assert (found.better.name, found.better.change) == (better, change)
    assert found.better.agreement == 1.0
    assert not found.healthy


def test_heads_one_off_are_found(tmp_path: Path) -> None:
    """A file whose first head foretells what the target's own head does (off by one in training)."""
    weights = lay_down(tmp_path / "medusa", "medusa")
    tensors = load_file(weights / "model.safetensors")
    later = {"0.0.weight": torch.zeros_like(tensors["0.0.weight"])}
    moved = {f"{head + 1}.0.weight": tensors[f"{head}.0.weight"] for head in range(2)}
    save_file({**later, **moved}, weights / "model.safetensors")
    found = found_with(tmp_path, "medusa")
    assert found.better is not None
    assert found.better.name == "second head first"


def test_who_sees_whom_is_tried_where_it_matters(tmp_path: Path) -> None:
    names = [reading.name for reading in found_with(tmp_path, "dflash").readings]
    assert "block seen both ways" in names
    assert "causal block" not in names  # layers with a window are causal as it is
    names = [reading.name for reading in found_with(tmp_path, "dflash", causal=False).readings]
    assert "causal block" in names
    assert "block seen both ways" not in names


def test_random_weights_are_not_healthy(tmp_path: Path) -> None:
    weights = lay_down(tmp_path / "mtp", "mtp")
    noise = {name: torch.randn_like(part) for name, part in load_file(weights / "model.safetensors").items()}
    save_file(noise, weights / "model.safetensors")
    found = found_with(tmp_path, "mtp")
    assert found.declared.agreement < 0.3


@pytest.mark.parametrize(
    ("declared", "other", "count", "clear"),
    [(0.60, 0.69, 1000, False), (0.60, 0.72, 1000, True), (0.50, 0.62, 20, False), (0.0, 0.1, 200, True)],
)
def test_what_clearly_better_means(declared: float, other: float, count: int, clear: bool) -> None:
    found = SelfTest("x", "w", count, (Found("as declared", declared, ""), Found("other", other, "key: value")))
    assert (found.better is not None) == clear
    assert found.healthy == (not clear)
    assert not SelfTest("x", "w", count, (Found("as declared", 0.09, ""),)).healthy


def test_a_reduced_vocabulary_is_put_into_the_targets_words(tmp_path: Path) -> None:
    weights, ids = lay_down(tmp_path / "eagle3", "eagle3"), CYCLE.sort().values
    tensors = load_file(weights / "model.safetensors")
    save_file({**tensors, "d2t": ids - torch.arange(len(ids))}, weights / "model.safetensors")
    write_config(weights, draft_vocab_size=len(ids), own_head=False)
    assert found_with(tmp_path, "eagle3").declared.agreement == 1.0


def test_published_layouts_are_tested_as_they_are_read(tmp_path: Path) -> None:
    """The same weights for other engines; then a file that counts its layers one too high."""
    weights = lay_down(tmp_path / "eagle3", "eagle3")
    write_config(weights, taps=(0, 1, 2))
    out = tmp_path / "out"
    config = dict(convert(open_drafter(weights), "speculators", out, verifier_of(MODEL)).config)
    recipe = parse_recipe({"draft": {"method": "eagle3", "k": 2, "weights": str(out)}})
    found = run_selftest(parts_to_test(recipe)[0], LOADED, TEXTS)
    assert found.declared.agreement == 1.0
    assert found.healthy
    write_config(out, **{**config, "eagle_aux_hidden_state_layer_ids": [2, 3, 4]})
    found = run_selftest(parts_to_test(recipe)[0], LOADED, TEXTS)
    assert found.better is not None
    assert (found.better.name, found.better.change) == ("taps one layer lower", "taps: [0, 1, 2]")


def test_what_config_json_says_counts(tmp_path: Path) -> None:
    weights = lay_down(tmp_path / "mtp", "mtp")
    write_config(weights, hidden="pre_norm")
    found = found_with(tmp_path, "mtp")
    assert found.better is not None
    assert found.better.name == "hidden post_norm"


def test_what_cannot_be_tested_is_refused(tmp_path: Path) -> None:
    for recipe in ("vanilla", "ngram", "eagle3"):
        with pytest.raises(RecipeError, match=r"draft\.weights"):
            parts_to_test(load_recipe(recipe))
    weights = lay_down(tmp_path / "mtp", "mtp")
    tensors = load_file(weights / "model.safetensors")
    save_file({name: part for name, part in tensors.items() if name != "mtp.fc.weight"}, weights / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"mtp\.fc\.weight"):
        found_with(tmp_path, "mtp")
    lay_down(tmp_path / "eagle3", "eagle3")
    section = parts_to_test(recipe_of("eagle3", tmp_path / "eagle3"))[0]
    with pytest.raises(DataError, match="too short"):
        run_selftest(section, LOADED, [Text("one", CYCLE[:4], 3)])


class TestTheVerb:
    @pytest.fixture(autouse=True)
    def _target(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("specflow.build.load_target", lambda section: LOADED)

    def call(self, path: Path, *words: str, **options: Any) -> tuple[int, str, str]:
        weights = path / "eagle3"
        weights = weights if weights.exists() else lay_down(weights, "eagle3")
        file = path / "recipe.yaml"
        file.write_text(dump_recipe(recipe_of("eagle3", weights, **options)))
        done = CliRunner().invoke(app, ["selftest", str(file), *words])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done.exit_code, done.stdout, done.stderr

    def test_a_healthy_drafter(self, tmp_path: Path) -> None:
        code, out, err = self.call(tmp_path, "--tokens", "60")
        assert code == 0
        assert "as declared" in out
        assert "100.0%" in out
        assert "warning" not in err

    def test_a_wrong_tap_ends_with_1_and_what_to_change(self, tmp_path: Path) -> None:
        code, out, err = self.call(tmp_path, "--tokens", "60", taps=[1, 2, LAYERS - 1])
        assert code == 1
        assert "taps one layer lower" in out
        assert "taps: [0, 1, 2]" in err

    def test_figures_as_json_over_prompts_of_a_file(self, tmp_path: Path) -> None:
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text('{"prompt": "abc"}\n{"prompt": ""}\n')
        code, out, err = self.call(tmp_path, "--json", "--data", str(prompts))
        assert code == 0
        (found,) = json.loads(out)
        assert found["healthy"] is True
        assert found["readings"][0] == {"name": "as declared", "agreement": 1.0, "change": ""}
        assert "prompts.jsonl:2" in err

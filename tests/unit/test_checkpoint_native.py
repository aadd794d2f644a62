"""Drafters of our own layout as `inspect` and `convert` take them, and files of others that lie beside a drafter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_checkpoint_layouts import CASES
from test_cli_convert import call, run_of
from tiny import tiny_model
from typer.testing import CliRunner

from specflow.checkpoint.layout import detect
from specflow.checkpoint.report import inspect_checkpoint
from specflow.cli.app import app
from specflow.errors import CheckpointError, RecipeError

WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "taps: a number": ("fc.weight", {"taps": 5}),
    "taps: words": ("fc.weight", {"taps": ["a"]}),
    "size of the vocabulary": ("fc.weight", {"draft_vocab_size": "x"}),
    "key": ("fc.weight", {"unknown_key": 1}),
    "modules": ("mtp.fc.weight", {"num_modules": "x"}),
    "unrolled": ("mtp.fc.weight", {"unrolled": "x"}),
    "state": ("mtp.fc.weight", {"hidden": 4}),
    "slots": ("hidden_norm.weight", {"block_size": [1]}),
    "layers": ("hidden_norm.weight", {"num_layers": 10**9}),
    "heads": ("0.0.linear.weight", {"num_heads": "x"}),
}


def write(path: Path, tensors: dict[str, torch.Tensor], options: dict[str, Any]) -> Path:
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(options))
    return path


@pytest.mark.parametrize(("name", "options"), WRONG.values(), ids=list(WRONG))
def test_options_that_no_source_takes_are_named(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    folder = write(tmp_path, {name: torch.zeros(4, 8)}, options)
    with pytest.raises(CheckpointError, match=next(iter(options))):
        inspect_checkpoint(folder)


def test_a_drafter_of_another_width_does_not_fit(tmp_path: Path) -> None:
    tiny_model(layers=6).save_pretrained(tmp_path / "target")
    (tmp_path / "target" / "tokenizer.json").write_text("{}")
    (tmp_path / "drafter").mkdir()
    drafter = write(tmp_path / "drafter", {"fc.weight": torch.zeros(24, 48)}, {"variant": 1})
    done = CliRunner().invoke(app, ["inspect", str(drafter), "--target", str(tmp_path / "target")])
    assert done.exit_code == 1, done.output
    assert "made for a target with states of width 24" in done.stdout


def test_it_says_that_tensors_are_compared_later(tmp_path: Path) -> None:
    report = inspect_checkpoint(run_of(tmp_path / "run", "mtp"))
    assert report.is_whole
    assert "compared when a recipe runs it" in dict(report.rows())["note"]


def test_a_recipe_of_another_program_is_passed_over(tmp_path: Path) -> None:
    """Other tools leave a recipe.yaml beside what they write."""
    folder = Path(CASES["medusa"].write(tmp_path / "in"))
    (folder / "recipe.yaml").write_text("default_stage:\n  default_modifiers: {}\n")
    code, _, noted = call(str(folder), "--to", "official", "-o", str(tmp_path / "out"))
    assert code == 0
    assert "recipe.yaml is no recipe of ours" in noted


def test_a_broken_recipe_of_ours_is_not(tmp_path: Path) -> None:
    folder = Path(CASES["medusa"].write(tmp_path / "in"))
    (folder / "recipe.yaml").write_text("draft:\n  methud: medusa\n")
    with pytest.raises(RecipeError):
        call(str(folder), "--to", "official", "-o", str(tmp_path / "out"))


def test_later_norms_are_referred_to_the_layout_that_says_them(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", "eagle", fc_norm=True)
    with pytest.raises(CheckpointError, match="--to speculators has a word for it"):
        call(str(run), "--to", "official", "-o", str(tmp_path / "out"))


@pytest.mark.parametrize(("name", "offset"), [("mtp-deepseek", False), ("mtp-mimo", False), ("mtp-qwen", True)])
def test_gains_less_one_are_of_some_layouts_only(tmp_path: Path, name: str, offset: bool) -> None:
    """A family that nobody knows, under DeepSeek's names, has plain gains."""
    folder = Path(CASES[name].write(tmp_path))
    file = folder / "config.json"
    config = json.loads(file.read_text())
    (config.get("text_config") or config)["model_type"] = "made_up"
    file.write_text(json.dumps(config))
    assert detect(folder).options["offset_norms"] is offset

"""`specflow export onnx`: what it says, what it refuses, and that it says nothing where there is nothing to do."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from made_gguf import made_store
from typer.testing import CliRunner, Result

from specflow.cli.app import app
from specflow.target.wheel import WheelModel


@pytest.fixture
def tiny(made_wheel: tuple[WheelModel, Path], model_cache: Path) -> Path:
    return made_store(made_wheel, model_cache).ensure("tiny").directory


def export(tiny: Path | None, *words: str) -> Result:
    model = [] if tiny is None else ["--set", f"target.model={tiny}", "--proof-rounds", "4"]
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, ["export", "onnx", *words, *model])


def test_the_table_fits_and_ends_with_what_to_do_next(tiny: Path, tmp_path: Path) -> None:
    done = export(tiny, "eagle3", "-o", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    table = [line for line in lines if line.strip().startswith(("target/", "drafter/"))]
    assert [line.split()[0] for line in table] == ["target/target", "drafter/fusion", "drafter/head", "drafter/step"]
    assert max(len(line) for line in table) <= 80
    assert "4 rounds with torch and with the graphs: 4 of 4 drafts and 4 of 4 tokens the same" in done.stdout
    assert lines[-1] == f"next: python {tmp_path}/out/drafter/run_drafter.py {tmp_path}/out/drafter/example.npz"
    assert "decoding 4 rounds with both ..." in done.stderr
    assert done.stderr.count("no draft.weights") <= 1


def test_quality_is_printed_with_its_limits(tiny: Path, tmp_path: Path) -> None:
    done = export(tiny, "vanilla", "--what", "target", "--dtype", "float16", "-o", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    assert "quality against float32: 9" in done.stdout.replace("100.0%", "99.9%")
    assert "(at least 95%), perplexity" in done.stdout
    settings = f"--set target.model={tiny} --set target.dtype=float16 --set target.runtime=onnx"
    assert done.stdout.splitlines()[-1] == f"next: specflow run vanilla {settings}"


def test_what_to_do_next_can_be_pasted(tiny: Path, tmp_path: Path) -> None:
    odd = tmp_path / "a [b] c"
    done = export(tiny, "medusa", "-o", str(odd))
    assert done.exit_code == 0, done.output
    script, example = odd / "drafter" / "run_drafter.py", odd / "drafter" / "example.npz"
    assert shlex.split(done.stdout.splitlines()[-1]) == ["next:", "python", str(script), str(example)]
    assert f"in {odd}" in done.stdout


def test_another_dtype_than_the_recipes_is_said(tiny: Path, tmp_path: Path) -> None:
    done = export(tiny, "vanilla", "-o", str(tmp_path / "out"), "--set", "target.dtype=float64")
    assert done.exit_code == 0, done.output
    assert "the recipe decodes in float64; the graphs are float32, as --dtype says" in done.stderr
    assert "target.dtype=float32" in done.stdout.splitlines()[-1]


def test_json_holds_the_manifest_and_the_seconds(tiny: Path, tmp_path: Path) -> None:
    done = export(tiny, "medusa", "--json", "-o", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["manifest"] == json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert {step.partition(" ")[0] for step in told["seconds"]} >= {"loading", "writing", "comparing", "decoding"}


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("ngram", "ngram has no network: there is no drafter to export"),
        ("vanilla", "vanilla decodes plainly: there is no drafter to export"),
    ],
)
def test_nothing_to_export_is_one_sentence_and_no_error(recipe: str, said: str, tmp_path: Path) -> None:
    done = export(None, recipe, "--what", "drafter", "-o", str(tmp_path / "out"))
    assert (done.exit_code, done.stdout, done.stderr.strip()) == (0, "", said)
    assert not (tmp_path / "out").exists()


def test_a_source_without_a_network_leaves_the_target(tiny: Path, tmp_path: Path) -> None:
    done = export(tiny, "suffix", "-o", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    assert "suffix has no network" in done.stderr
    assert (tmp_path / "out" / "target" / "target.onnx").is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--what", "drafter,head"], "'head' is not one of drafter, target"),
        (["--dtype", "float64"], "'float64' is not one of float32"),
        (["--proof-rounds", "-1"], "--proof-rounds"),
    ],
)
def test_wrong_words_are_refused_before_anything_is_loaded(words: list[str], said: str, tmp_path: Path) -> None:
    done = export(None, "eagle3", "-o", str(tmp_path / "out"), *words)
    assert done.exit_code == 2
    assert said in done.stderr.replace("│", "").replace("\n", " ")
    assert not (tmp_path / "out").exists()


def test_help_stays_short() -> None:
    done = CliRunner().invoke(app, ["export", "--help"])
    assert done.exit_code == 0
    assert "onnx" in done.stdout

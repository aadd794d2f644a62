"""`specflow inspect`: what it says of published and of our own checkpoints, by path, by hub id, beside a target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_gguf import made_store
from published import BLOCK, drafted, law_of
from test_checkpoint_layouts import CASES
from tiny import VOCAB
from typer.testing import CliRunner, Result

from specflow.cli.app import app
from specflow.draft.checkpoint import read_options
from specflow.draft.sources.dflash import DFlashConfig
from specflow.errors import CheckpointError, ModelError
from specflow.target import hub
from specflow.target.wheel import WheelModel


def inspect(*words: str) -> Result:
    return CliRunner().invoke(app, ["inspect", *words], catch_exceptions=True)


def test_it_says_what_a_checkpoint_is(tmp_path: Path) -> None:
    done = inspect(CASES["dspark-speculators"].write(tmp_path))
    assert done.exit_code == 0, done.output
    said = dict(line.split("  ", 1) for line in done.stdout.split("\n\n")[0].splitlines() if "  " in line)
    said = {name: text.strip() for name, text in said.items()}
    assert said["layout"] == "dspark-speculators"
    assert said["made for"] == "org/target"
    assert said["taps as written"] == "2, 5"
    assert said["taps (output of 0-based layers)"] == "1, 4"
    assert (said["slots of a block"], said["draft tokens"]) == (str(BLOCK), str(BLOCK))
    assert (said["vocabulary"], said["draft vocabulary"]) == (str(VOCAB), "20")
    assert said["tensors"].endswith("(bool, float32, int64)") or "float32" in said["tensors"]
    assert f"method: dspark\n  k: {BLOCK}\n  weights: {tmp_path}" in done.stdout


def test_json_says_the_same(tmp_path: Path) -> None:
    done = inspect(CASES["eagle3-eagle-config"].write(tmp_path), "--json")
    found = json.loads(done.stdout)
    assert (found["layout"], found["source"], found["method"]) == ("eagle3", "eagle", "eagle3")
    assert (found["taps_written"], found["taps"]) == ([2, 4, 8], [1, 3, 7])
    assert (found["missing"], found["left_over"], found["whole"]) == ([], [], True)
    assert "SGLang" in found["notes"][0]
    assert found["reads"] == "states of several layers"
    assert found["made_for"]["vocab_size"] == VOCAB


def test_what_is_missing_and_left_over_is_listed(tmp_path: Path) -> None:
    case = CASES["medusa"]
    tensors = {**case.theirs(), "stray": case.theirs()["0.1.weight"]}
    del tensors["1.0.linear.bias"]
    done = inspect(case.write(tmp_path, tensors))
    assert done.exit_code == 1
    assert "reads         the last state, after the final norm" in done.stdout
    assert "missing       1.0.linear.bias" in done.stdout
    assert "left over     stray" in done.stdout
    assert "config.json speaks of 2 heads; there are 3" in done.stdout


def test_what_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    done = inspect(CASES["dflash"].write(tmp_path, architectures=["DFlash2DraftModel"]))
    assert isinstance(done.exception, CheckpointError)
    assert "DFlash-2" in str(done.exception)


def test_a_target_is_compared(made_wheel: tuple[WheelModel, Path], model_cache: Path, tmp_path: Path) -> None:
    tiny = made_store(made_wheel, model_cache).ensure("tiny").directory
    done = inspect(CASES["dflash"].write(tmp_path), "--target", str(tiny), "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 1
    assert any(fault.startswith("made for a target with layers: 8, and") for fault in found["faults"])
    assert f"model: {tiny}" in found["recipe"]


def test_taps_that_nobody_names_are_those_of_the_method(
    made_wheel: tuple[WheelModel, Path], model_cache: Path, tmp_path: Path
) -> None:
    """The authors' EAGLE-3 has fixed ones: what enters layers 2, L // 2 and L - 3."""
    tiny = made_store(made_wheel, model_cache).ensure("tiny").directory
    layers = json.loads((tiny / "config.json").read_text())["num_hidden_layers"]
    weights = CASES["eagle3"].write(tmp_path)
    assert json.loads(inspect(weights, "--json").stdout)["taps"] is None
    taps = json.loads(inspect(weights, "--target", str(tiny), "--json").stdout)["taps"]
    assert taps == [min(1, layers - 1), max(layers // 2 - 1, 0), max(layers - 4, 0)]


def test_our_own_are_told_by_their_tensors(tmp_path: Path) -> None:
    for name in ("dspark-deepspec", "mtp-mimo", "eagle3", "medusa"):
        found = json.loads(inspect(CASES[name].write_ours(tmp_path / name), "--json").stdout)
        assert (found["layout"], found["source"], found["whole"]) == ("native", CASES[name].source, True)


def test_hub_ids_are_fetched_pickles_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, bool]] = []

    def fetch(name: str, revision: str | None, with_code: bool = False, pickles: bool = False) -> Path:
        asked.append((name, pickles))
        if name == "org/none":
            raise ModelError(name, "no such model on the hub", "an id like org/name", "check the spelling")
        return tmp_path

    monkeypatch.setattr(hub, "fetch_snapshot", fetch)
    case = CASES["eagle3"]
    case.write(tmp_path)
    assert json.loads(inspect("org/drafter", "--json").stdout)["recipe"].endswith("weights: org/drafter\n")
    assert law_of(drafted("eagle", "org/drafter")).shape[-1] == 20
    assert set(asked) == {("org/drafter", True)}
    with pytest.raises(CheckpointError, match="no such model on the hub") as error:
        read_options(DFlashConfig(), "org/none")
    assert error.value.where == "draft.weights: org/none"


def test_pickles_are_fetched_where_there_is_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloads are the hub client's; what is asked of it is a list of patterns."""
    import huggingface_hub

    asked: list[list[str]] = []

    def download(name: str, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub.fetch_snapshot("org/drafter", None, pickles=True) == tmp_path
    assert ["*.bin" in patterns for patterns in asked] == [False, True]
    (tmp_path / "model.safetensors").write_bytes(b"")
    asked.clear()
    hub.fetch_snapshot("org/drafter", None, pickles=True)
    assert ["*.bin" in patterns for patterns in asked] == [False]

"""The verbs `models` and `doctor`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from made_gguf import flip, made_store
from typer.testing import CliRunner

from specflow.cli import doctor as doctor_module
from specflow.cli import models as models_module
from specflow.errors import ModelError
from specflow.onnx import screened
from specflow.target import hub
from specflow.target.store import CATALOGUE
from specflow.target.wheel import WheelModel


def test_the_models_verb_lists_verifies_and_removes(
    made_wheel: tuple[WheelModel, Path], model_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models_module, "_store", lambda: made_store(made_wheel, model_cache))
    call = CliRunner().invoke
    assert [row["cached"] for row in json.loads(call(models_module.app, ["--json"]).stdout)] == [False]
    row = json.loads(call(models_module.app, ["fetch", "tiny", "--json"]).stdout)
    assert json.loads(call(models_module.app, ["--json"]).stdout) == [row]
    shown = call(models_module.app, []).stdout
    assert row["verified"][:10] in shown
    assert row["verified"] not in shown
    assert row["path"] in "".join(line.split("│")[-2].strip() for line in shown.splitlines() if "│" in line)
    assert json.loads(call(models_module.app, ["verify", "--json"]).stdout) == {"tiny": []}
    flip(Path(row["path"]) / "model.safetensors")
    broken = call(models_module.app, ["verify", "tiny"])
    assert (broken.exit_code, broken.stdout) == (1, "tiny: model.safetensors has another sha256\n")
    (Path(row["path"]) / "manifest.json").write_text('{"files": {}}')
    (damaged,) = json.loads(call(models_module.app, ["--json"]).stdout)
    assert (damaged["name"], damaged["kind"], damaged["source"]) == (
        "tiny", "broken", "manifest.json is missing or broken",
    )  # fmt: skip
    assert "broken" in call(models_module.app, []).stdout
    broken = call(models_module.app, ["verify"])
    assert (broken.exit_code, broken.stdout) == (1, "tiny: manifest.json is missing or broken\n")
    assert "freed" in call(models_module.app, ["remove", "tiny"]).stdout
    assert not Path(row["path"]).exists()
    assert call(models_module.app, ["--json", "verify"]).exit_code == 2
    assert isinstance(call(models_module.app, ["remove", "../tiny"]).exception, ModelError)


def test_hub_models_are_listed_with_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = tmp_path / "models--org--model"
    (repo / "snapshots" / "abc").mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    (repo / "snapshots" / "abc" / "config.json").write_text("{}")
    from huggingface_hub import scan_cache_dir

    monkeypatch.setattr("huggingface_hub.scan_cache_dir", lambda: scan_cache_dir(tmp_path))
    assert [(model.name, model.size) for model in hub.cached_hub_models()] == [("org/model", 2)]
    monkeypatch.setattr("huggingface_hub.scan_cache_dir", lambda: scan_cache_dir(tmp_path / "absent"))
    assert hub.cached_hub_models() == []


def test_doctor_reports_as_json_and_fails_where_something_is_missing(
    model_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import typer

    app = typer.Typer()
    app.command()(doctor_module.doctor)
    sound = CliRunner().invoke(app, ["--json"])
    report = json.loads(sound.stdout)
    assert (sound.exit_code, report["missing"]) == (0, [])
    assert report["devices"][-1]["device"] == "cpu"
    assert set(report["packed_linears"]["row_invariant"]) == {"float32", "bfloat16", "float16"}
    assert report["cache"]["not_cached"] == list(CATALOGUE)
    assert report["greedy_head"].partition(":")[0] in ("screened", "whole")
    monkeypatch.setattr(doctor_module, "_PACKAGES", ("torch", "absent-package"))
    broken = CliRunner().invoke(app, [])
    assert broken.exit_code == 1
    assert "absent-package is not installed" in broken.stdout


def test_doctor_says_what_onnxruntime_would_run_on(model_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offered = ["CUDAExecutionProvider", "AzureExecutionProvider", "CPUExecutionProvider"]
    runtime = SimpleNamespace(get_available_providers=lambda: offered)
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime)
    found = doctor_module._onnxruntime()
    assert (found["compiled_in"], found["problem"]) == (offered, "")
    assert found["chosen"] == {"cpu": offered[2:], "cuda": [offered[0], offered[2]]}
    report = {"onnxruntime": found, "devices": [{"device": "cpu"}], "cpu": {"threads": 2}}
    assert doctor_module._onnx_rows(report) == [
        ("onnx compiled in", "CUDA, Azure, CPU"),
        ("onnx on cpu", "CPU, 2 threads as torch"),
        ("onnx on cuda", "CUDA then CPU; no such device here"),
    ]
    report["devices"].append({"device": "cuda:0"})
    assert doctor_module._onnx_rows(report)[-1] == ("onnx on cuda", "CUDA then CPU")


def test_doctor_says_why_greedy_steps_read_the_whole_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screened, "screens_hold", lambda: True)
    assert doctor_module._greedy_head() == "screened"
    monkeypatch.setattr(screened, "screens_hold", lambda: False)
    assert doctor_module._greedy_head() == f"whole: {screened.SATURATES}"

    def fail() -> bool:
        raise ModelError("screen.onnx", "no operators")

    monkeypatch.setattr(screened, "screens_hold", fail)
    assert doctor_module._greedy_head() == "whole: no operators"


def test_doctor_names_an_onnxruntime_that_is_missing_or_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert doctor_module._onnxruntime()["problem"].startswith("onnxruntime is not usable")
    monkeypatch.setattr(doctor_module, "package_version", lambda name: "2.0" if name == "torch" else None)
    assert doctor_module._onnxruntime()["problem"] == "onnxruntime is not installed"


def test_doctor_fits_a_terminal_and_lets_onnxruntime_write_nothing(tmp_path: Path) -> None:
    """The runtime keeps an identifier and a data base of events in the home directory unless told not to."""
    names = ("HOME", "SPECFLOW_CACHE", "XDG_CACHE_HOME", "ORT_DISABLE_TELEMETRY")
    env = {name: value for name, value in os.environ.items() if name not in names}
    home = tmp_path / "home"
    home.mkdir()
    result = subprocess.run(
        [sys.executable, "-m", "specflow", "doctor"],
        env={**env, "HOME": str(home), "COLUMNS": "80"}, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "onnx on cpu" in result.stdout
    assert "onnx greedy head" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert [path for path in home.rglob("*") if "onnxruntime" in str(path)] == []


def test_doctor_names_a_model_whose_manifest_is_damaged(model_cache: Path) -> None:
    (model_cache / "models" / "gguf-1").mkdir(parents=True)
    (model_cache / "models" / "gguf-1" / "manifest.json").write_text('{"files": {}}')
    assert (doctor_module._cache()["models"], doctor_module._cache()["broken"]) == ([], ["gguf-1"])


def test_graphs_are_listed_verified_and_removed(model_cache: Path) -> None:
    from specflow.onnx.graphs import GraphSet, Precision
    from specflow.onnx.store import GraphStore

    def write(graphs: GraphSet) -> None:
        with graphs.graph("same") as writer:
            writer.output(writer.input("tokens", ["rows"]), "same", ["rows"])

    folder, other = (GraphStore().find({"model": name}, Precision("int8"), write) for name in ("m", "n"))
    call = CliRunner().invoke
    rows = {row["name"]: row for row in json.loads(call(models_module.app, ["--json"]).stdout)}
    row = rows[f"onnx/{folder.name}"]
    assert (row["kind"], row["path"], row["source"]) == ("graphs", str(folder), "int8, model m")
    assert (row["precision"], row["graphs"], row["identity"]) == ("int8", ["same.onnx"], {"model": "m"})
    assert "int8, model m" in call(models_module.app, []).stdout
    (folder / "same.onnx").unlink()
    broken = call(models_module.app, ["verify", row["name"]])
    assert (broken.exit_code, broken.stdout) == (1, f"{row['name']}: same.onnx is missing\n")
    (folder / "manifest.json").unlink()
    rows = {row["name"]: row["kind"] for row in json.loads(call(models_module.app, ["--json"]).stdout)}
    assert (rows[f"onnx/{folder.name}"], rows[f"onnx/{other.name}"]) == ("broken", "graphs")
    assert set(json.loads(call(models_module.app, ["verify", "--json"]).stdout)) == {
        f"onnx/{folder.name}",
        f"onnx/{other.name}",
    }
    assert "freed" in call(models_module.app, ["remove", f"onnx/{folder.name}"]).stdout
    assert (folder.exists(), other.exists()) == (False, True)
    assert json.loads(call(models_module.app, ["remove", "onnx", "--json"]).stdout)["freed"] > 0
    assert not other.exists()
    assert isinstance(call(models_module.app, ["remove", row["name"]]).exception, ModelError)


def test_graphs_of_a_cached_model_carry_its_name(
    made_wheel: tuple[WheelModel, Path], model_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specflow.onnx.graphs import Precision
    from specflow.onnx.store import GraphStore

    monkeypatch.setattr(models_module, "_store", lambda: made_store(made_wheel, model_cache))
    stored = made_store(made_wheel, model_cache).ensure("tiny")
    GraphStore().find({"model": stored.hash, "part": "head"}, Precision("float32"), lambda graphs: None)
    rows = json.loads(CliRunner().invoke(models_module.app, ["--json"]).stdout)
    assert [row["source"] for row in rows if row["kind"] == "graphs"] == ["float32, model tiny, part head"]


def test_listing_models_loads_no_torch(model_cache: Path) -> None:
    heavy = "{'torch', 'transformers', 'onnxruntime'}"
    program = f"import sys, specflow.cli.models as models; models._rows(); print({heavy} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "set()"

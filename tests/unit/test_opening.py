"""Which runtime a target opens in, and what is refused."""

from __future__ import annotations

import gc
import json
import logging
import sys
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_model

from specflow.errors import MissingExtra, ModelError
from specflow.target import opening
from specflow.target.base import TargetOptions
from specflow.target.opening import Opening, open_target
from specflow.target.store import ModelFiles

CPU = torch.device("cpu")


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opening:
    """A tiny Llama in a directory, and an empty cache."""
    monkeypatch.setenv("SPECFLOW_CACHE", str(tmp_path / "cache"))
    return _opening(tmp_path, "llama_biases_tied")


def _opening(tmp_path: Path, family: str, **options: Any) -> Opening:
    model = make_model(family)
    model.save_pretrained(tmp_path / family)
    files = ModelFiles(family, tmp_path / family, None, "")
    return Opening(files, model.config, TargetOptions(family, torch.float32, CPU, (2,)), **options)


def _verdicts(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((tmp_path / "cache" / "runtimes").glob("*.json"))]


class TestAuto:
    @pytest.mark.parametrize(
        ("torch_s", "onnx_s", "best"), [(2.0, 1.0, "onnx"), (1.0, 2.0, "native"), (1.0, 0.95, "native")]
    )
    def test_the_clearly_faster_one_is_measured_once(
        self, made: Opening, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch_s: float, onnx_s: float, best: str
    ) -> None:
        timed: list[str] = []

        def time(target: Any) -> float:
            timed.append(target.info.runtime)
            return {"native": torch_s, "onnx": onnx_s}[target.info.runtime]

        monkeypatch.setattr(opening, "_time", time)
        assert open_target(made).info.runtime == best
        assert open_target(made).info.runtime == best
        assert timed == ["native", "onnx"]
        (verdict,) = _verdicts(tmp_path)
        assert verdict["seconds"] == {"torch": torch_s, "onnx": onnx_s}

    def test_real_timings_are_positive_and_kept(self, made: Opening, tmp_path: Path) -> None:
        target = open_target(made)
        (verdict,) = _verdicts(tmp_path)
        assert all(seconds > 0 for seconds in verdict["seconds"].values())
        assert {"torch": "native", "onnx": "onnx"}[verdict["runtime"]] == target.info.runtime

    def test_row_invariance_is_not_given_up_for_speed(
        self, made: Opening, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(opening, "_time", lambda target: 1.0 if target.info.runtime == "onnx" else 3.0)
        monkeypatch.setattr("specflow.target.onnx.passes_agree", lambda target: False)
        with caplog.at_level(logging.WARNING):
            assert open_target(made).info.runtime == "native"
        assert "onnx is 3.00 times as fast" in caplog.text

    def test_the_loser_is_gone_before_the_winner_is_opened_again(
        self, made: Opening, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(opening, "_time", lambda target: 2.0 if target.info.runtime == "onnx" else 1.0)
        opened: list[Any] = []
        open_torch, open_onnx = opening._open_torch, opening._open_onnx

        def note(opener: Any, asked: Opening) -> Any:
            gc.collect()
            assert not [each for each in opened if each() is not None]
            target = opener(asked)
            opened.append(weakref.ref(target))
            return target

        monkeypatch.setattr(opening, "_open_torch", partial(note, open_torch))
        monkeypatch.setattr(opening, "_open_onnx", partial(note, open_onnx))
        assert open_target(made).info.runtime == "native"
        assert len(opened) == 3

    def test_a_runtime_whose_rows_do_not_hold_is_named(
        self, made: Opening, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("specflow.target.onnx.passes_agree", lambda target: False)
        with caplog.at_level(logging.WARNING):
            target = open_target(replace(made, options=replace(made.options, row_invariant=True)))
        assert target.info.runtime == "native"
        assert "onnx is no choice here: passes of float32" in caplog.text

    def test_another_number_of_threads_is_another_question(self, made: Opening, tmp_path: Path) -> None:
        open_target(made)
        torch.set_num_threads(2)
        try:
            open_target(made)
        finally:
            torch.set_num_threads(1)
        assert len(_verdicts(tmp_path)) == 2

    def test_a_damaged_verdict_is_measured_again(self, made: Opening, tmp_path: Path) -> None:
        open_target(made)
        (path,) = (tmp_path / "cache" / "runtimes").glob("*.json")
        path.write_text('{"runtime": "gpu"}')
        open_target(made)
        assert json.loads(path.read_text())["runtime"] in ("torch", "onnx")

    @pytest.mark.parametrize("invariant", [None, True, False])
    def test_torch_runs_it_where_onnx_runtime_cannot(
        self,
        made: Opening,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        invariant: bool | None,
    ) -> None:
        def full(*_: Any) -> Any:
            raise ModelError("cache", "the disk is full")

        monkeypatch.setattr(opening, "_open_onnx", full)
        with caplog.at_level(logging.WARNING):
            asked = replace(made, options=replace(made.options, row_invariant=invariant))
            assert open_target(asked).info.runtime == "native"
        assert caplog.messages == ["runtime auto: onnx is no choice here: the disk is full"]
        assert not _verdicts(tmp_path), "next time it may be able to"

    def test_without_the_package(
        self, made: Opening, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setitem(sys.modules, "onnxruntime", None)
        with caplog.at_level(logging.WARNING):
            assert open_target(made).info.runtime == "native"
        assert "onnxruntime cannot be imported" in caplog.text
        with pytest.raises(MissingExtra, match="onnxruntime cannot be imported"):
            open_target(replace(made, runtime="onnx"))

    def test_a_verdict_that_cannot_be_kept(
        self, made: Opening, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / "runtimes").write_text("in the way")
        with caplog.at_level(logging.WARNING):
            assert open_target(made).info.runtime in ("native", "onnx")
        assert "both are timed every time" in caplog.text

    def test_fewer_positions_than_a_probe_has(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SPECFLOW_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(opening, "_PROBED_ROWS", (1, 400))
        assert open_target(_opening(tmp_path, "qwen3")).info.context_length == 256

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_dtypes_without_graphs_stay_in_torch(self, made: Opening, tmp_path: Path, dtype: torch.dtype) -> None:
        wide = replace(made, options=replace(made.options, dtype=dtype))
        assert open_target(wide).info.runtime == "native"
        assert not _verdicts(tmp_path)

    def test_models_without_graphs_stay_in_transformers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SPECFLOW_CACHE", str(tmp_path / "cache"))
        assert open_target(_opening(tmp_path, "gpt2")).info.runtime == "transformers"


class TestAutoWithInt8:
    @pytest.fixture
    def int8(self, made: Opening) -> Opening:
        return replace(made, options=replace(made.options, quantization="int8"))

    @pytest.mark.parametrize(
        ("onnx_s", "openvino_s", "best"), [(2.0, 1.0, "openvino"), (1.0, 2.0, "onnx"), (1.0, 0.95, "onnx")]
    )
    def test_the_clearly_faster_one_is_measured_once(
        self,
        int8: Opening,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        onnx_s: float,
        openvino_s: float,
        best: str,
    ) -> None:
        timed: list[str] = []

        def time(target: Any) -> float:
            timed.append(target.info.runtime)
            return {"onnx": onnx_s, "openvino": openvino_s}[target.info.runtime]

        monkeypatch.setattr(opening, "_time", time)
        assert [open_target(int8).info.runtime for _ in range(2)] == [best, best]
        assert timed == ["onnx", "openvino"]
        (verdict,) = _verdicts(tmp_path)
        assert verdict["seconds"] == {"onnx": onnx_s, "openvino": openvino_s}

    def test_row_invariance_is_not_given_up_for_speed(
        self, int8: Opening, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(opening, "_time", lambda target: 1.0 if target.info.runtime == "openvino" else 3.0)
        monkeypatch.setattr("specflow.target.onnx.passes_agree", lambda target: target.info.runtime == "onnx")
        with caplog.at_level(logging.WARNING):
            assert open_target(int8).info.runtime == "onnx"
        assert "openvino is 3.00 times as fast" in caplog.text

    def test_without_the_package_there_is_nothing_to_time(
        self, int8: Opening, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "openvino", None)
        assert open_target(int8).info.runtime == "onnx"
        assert not _verdicts(tmp_path)


class TestAskedFor:
    def test_torch(self, made: Opening) -> None:
        assert open_target(replace(made, runtime="torch")).info.runtime == "native"

    def test_onnx(self, made: Opening) -> None:
        target = open_target(replace(made, runtime="onnx"))
        assert (target.info.runtime, target.info.weights) == ("onnx", "float32")

    @pytest.mark.parametrize(("quantization", "runtime"), [("int8", "onnx"), ("int4", "auto")])
    def test_quantised_weights_run_in_onnx_runtime(self, made: Opening, quantization: str, runtime: Any) -> None:
        asked = replace(made, runtime=runtime, options=replace(made.options, quantization=quantization))
        target = open_target(asked)
        assert (target.info.runtime, target.info.weights) == ("onnx", quantization)
        assert target.info.dtype == torch.float32

    def test_row_invariance_that_does_not_hold_is_refused(self, made: Opening, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("specflow.target.onnx.passes_agree", lambda target: False)
        with pytest.raises(ModelError, match="change their bits"):
            open_target(replace(made, runtime="onnx", options=replace(made.options, row_invariant=True)))

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"implementation": "transformers"}, "implementation: transformers"),
            ({"dtype": torch.float64}, "no float64 graphs"),
            ({"dtype": torch.bfloat16}, "no bfloat16 on CPUs"),
            ({"device": torch.device("mps")}, "does not run on mps"),
        ],
    )
    def test_what_onnx_runtime_lacks(self, made: Opening, changes: dict[str, Any], reason: str) -> None:
        if "implementation" in changes:
            asked = replace(made, runtime="onnx", **changes)
        else:
            asked = replace(made, runtime="onnx", options=replace(made.options, **changes))
        with pytest.raises(ModelError, match=reason):
            open_target(asked)

    @pytest.mark.parametrize("quantization", [None, "int8"])
    def test_openvino(self, made: Opening, quantization: str | None) -> None:
        options = replace(made.options, quantization=quantization)
        target = open_target(replace(made, runtime="openvino", options=options))
        assert (target.info.runtime, target.info.weights) == ("openvino", quantization or "float32")

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"dtype": torch.bfloat16}, "float32 and int8 weights here, not bfloat16"),
            ({"quantization": "int4"}, "float32 and int8 weights here, not int4"),
            ({"device": torch.device("cuda")}, "runs on CPUs here, not on cuda"),
        ],
    )
    def test_what_openvino_lacks(self, made: Opening, changes: dict[str, Any], reason: str) -> None:
        with pytest.raises(ModelError, match=reason):
            open_target(replace(made, runtime="openvino", options=replace(made.options, **changes)))

    def test_transformers_in_openvino(self, made: Opening) -> None:
        with pytest.raises(ModelError, match="openvino, and implementation: transformers"):
            open_target(replace(made, runtime="openvino", implementation="transformers"))

    def test_openvino_without_the_package(self, made: Opening, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "openvino", None)
        with pytest.raises(MissingExtra, match="openvino cannot be imported"):
            open_target(replace(made, runtime="openvino"))

    def test_a_family_without_graphs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SPECFLOW_CACHE", str(tmp_path / "cache"))
        with pytest.raises(ModelError, match="graphs do not compute model_type 'gpt2'"):
            open_target(_opening(tmp_path, "gpt2", runtime="onnx"))

    def test_quantised_weights_in_torch(self, made: Opening) -> None:
        with pytest.raises(ModelError, match="int8 weights, and runtime torch"):
            open_target(replace(made, runtime="torch", options=replace(made.options, quantization="int8")))

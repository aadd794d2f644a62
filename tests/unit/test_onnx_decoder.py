"""Graphs as files: valid, named, the same every time, and finite in half precision. Their values: test_target.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from families import NATIVE, gap, make_model, make_native, make_onnx, make_tokens, prefill, score

from specflow.onnx.decoder import DecoderPart, write_decoder, write_head
from specflow.onnx.graphs import GraphSet, OutputError, Precision
from specflow.onnx.layers import linear_of
from specflow.onnx.store import GraphStore
from specflow.onnx.writer import CONTRIB, OPSET
from specflow.target.base import TargetOptions
from specflow.target.onnx import OnnxTarget, model_graphs
from specflow.types import Skip

WHOLE = DecoderPart()
SKIPPING = DecoderPart(0, 2, Skip(frozenset({1}), frozenset({0})))
UPPER = DecoderPart(1, 3, enters=True)


def write(folder: Path, family: str, part: DecoderPart = WHOLE, dtype: str = "float32") -> onnx.ModelProto:
    model = make_model(family)
    folder.mkdir(exist_ok=True)
    with GraphSet(folder, Precision.named(dtype)) as graphs, graphs.graph("model") as writer:
        write_decoder(writer, model.config, dict(model.state_dict()), part)
    return onnx.load(folder / "model.onnx", load_external_data=False)


def shapes(values: Any) -> dict[str, list[int | str]]:
    return {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in values}


@pytest.mark.parametrize("part", [WHOLE, SKIPPING, UPPER], ids=["whole", "skipping", "upper"])
@pytest.mark.parametrize("family", NATIVE)
def test_the_checker_and_shape_inference_pass(family: str, part: DecoderPart, tmp_path: Path) -> None:
    write(tmp_path, family, part)
    onnx.checker.check_model(str(tmp_path / "model.onnx"), full_check=True)
    inferred = onnx.shape_inference.infer_shapes(onnx.load(tmp_path / "model.onnx"), strict_mode=True)
    assert len(inferred.graph.node) > 10


def test_names_and_dimensions_say_what_they_are(tmp_path: Path) -> None:
    graph = write(tmp_path, "qwen2_mixed").graph
    inputs, outputs = shapes(graph.input), shapes(graph.output)
    assert {name: inputs[name] for name in ("tokens", "positions", "starts", "bias", "bias_windowed", "scored")} == {
        "tokens": ["batch", "rows"],
        "positions": ["batch", "rows"],
        "starts": ["batch"],
        "bias": ["batch", "rows", "slots"],
        "bias_windowed": ["batch", "rows", "slots"],
        "scored": ["scored"],
    }
    slots = ["batch", 2, "slots", 16]
    for layer in range(3):
        for kind in ("key", "value"):
            assert inputs[f"past_{kind}.{layer}"] == outputs[f"present_{kind}.{layer}"] == slots
    assert outputs["logits"] == ["batch", "scored", 64]
    states = ("hidden_pre", "hidden_post", "tap.-1", "tap.0", "tap.1", "tap.2")
    assert all(outputs[name] == ["batch", "rows", 64] for name in states)
    assert all(node.name for node in graph.node)
    assert any(node.output[0].startswith("layers.2.") for node in graph.node)


def test_versions_are_stated_and_weights_lie_outside(tmp_path: Path) -> None:
    model = write(tmp_path, "qwen3")
    assert {each.domain: each.version for each in model.opset_import} == {"": OPSET, CONTRIB: 1}
    assert model.producer_name == "specflow"
    outside = [each for each in model.graph.initializer if each.external_data]
    large = sum(parameter.numel() for parameter in make_model("qwen3").parameters()) * 4
    held = {(e.external_data[1].value, int(e.external_data[2].value)) for e in outside}
    assert sum(size for _, size in held) > 0.9 * large
    assert (tmp_path / "model.onnx").stat().st_size < 100_000


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "int4"])
def test_the_same_weights_give_the_same_bytes(tmp_path: Path, dtype: str) -> None:
    for name in ("one", "two"):
        write(tmp_path / name, "llama3_rope", dtype=dtype)
    for file in ("model.onnx", "weights.bin"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_equal_weights_are_written_once(tmp_path: Path) -> None:
    weight = torch.randn(500, 64)
    with GraphSet(tmp_path, Precision("float32")) as graphs:
        for name in ("one", "two"):
            with graphs.graph(name) as writer:
                write_head(writer, weight)
    assert weight.numel() * 4 <= (tmp_path / "weights.bin").stat().st_size < weight.numel() * 5


def test_float16_stays_finite_in_a_long_context() -> None:
    model, tokens = make_model("llama3_rope", max_position_embeddings=600), make_tokens(513)
    target, plain = make_onnx(model, torch.float16), make_native(model)
    logits = prefill(target, tokens, target.new_cache(1, 513), chunk=200)
    expected = prefill(plain, tokens, plain.new_cache(1, 513))
    assert logits.isfinite().all()
    assert gap(logits, expected) <= 0.03 * float(expected.abs().max())


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_quantised_graphs_stay_near(dtype: str, tmp_path: Path) -> None:
    """Random weights are the worst case of blocks: no outlier, all levels in use."""
    model, tokens = make_model("qwen2"), make_tokens(20)
    options = TargetOptions("tiny", torch.float32, torch.device("cpu"), quantization=dtype)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    graphs = model_graphs(model.config, tensors, GraphStore(tmp_path).find, {}, options)
    target, plain = OnnxTarget(graphs, options), make_native(model)
    found = score(target, tokens, target.new_cache(1, 64)).logits
    expected = score(plain, tokens, plain.new_cache(1, 64)).logits
    error = gap(found, expected) / float(expected.abs().max())
    assert 1e-5 < error < {"int8": 0.05, "int4": 0.4}[dtype]
    assert target.info.exactness == "bit-exact"


def test_packed_layers_are_refused() -> None:
    with pytest.raises(AssertionError, match="load the layers unpacked"):
        linear_of(None, "rows", (torch.empty(0), None), "name")  # type: ignore[arg-type]


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("side", [0, 1])
def test_an_error_that_is_no_number_is_the_worst_of_all(broken: float, side: int) -> None:
    pair = [torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0])]
    pair[side][1] = broken
    sound = OutputError.between(("graph", "sound"), torch.ones(2), torch.tensor([1.0, 2.0]))
    assert sound.relative == 0.5
    for order in (1, -1):
        errors = [sound, OutputError.between(("graph", "broken"), *pair), sound][::order]
        assert max(errors, key=lambda error: error.relative).output == "broken"


def test_two_weights_of_one_name_are_refused(tmp_path: Path) -> None:
    with GraphSet(tmp_path, Precision("float32")) as graphs, graphs.graph("twice") as w:
        w.weight(torch.ones(3), "gain")
        w.weight(torch.ones(3), "gain")
        with pytest.raises(AssertionError, match="two weights are called gain"):
            w.weight(torch.ones(4), "gain")

"""Block quantisation: near the weights, exact where they lie on a grid, and packed as ONNX Runtime reads it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from specflow.onnx.quantize import FORMS, BlockWeights, QuantForm, dequantize, quantize

Floats = NDArray[np.float32]

ALL = [
    QuantForm(bits, size, form)  # type: ignore[arg-type]
    for bits, size, form in product((4, 8), (16, 32), ("symmetric", "zero_point", "minimum"))
]
ODD = [(33, 96), (5, 32), (7, 40), (1, 1), (3, 161)]
"""[out, in]: three blocks, one, partly filled ones, a single weight."""


def drawn(shape: tuple[int, int], seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def grid(shape: tuple[int, int], levels: NDArray[np.int64], block: int) -> Floats:
    """Weights d q + m with the 11 bits that GGUF stores of d and m."""
    draw = np.random.default_rng(7)
    blocks = (shape[0], shape[1] // block, 1)
    step = draw.uniform(0.001, 0.02, blocks).astype(np.float16).astype(np.float32)
    low = draw.uniform(-0.2, 0.1, blocks).astype(np.float16).astype(np.float32)
    weight: Floats = step * levels.reshape(*blocks[:2], block).astype(np.float32) + low
    return weight.reshape(shape)


def steps(weights: BlockWeights) -> Floats:
    """The step of every weight.  # [out, in]"""
    scales = weights.scales.reshape(weights.out_width, -1)
    every: Floats = np.repeat(scales, weights.block_size, axis=1)[:, : weights.in_width]
    return every


def run_operator(weights: BlockWeights, rows: Floats, accuracy_level: int) -> Floats:
    """rows W^T by ONNX Runtime, and what the form "minimum" adds to it."""
    onnx = pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    inputs = {"quants": weights.quants, "scales": weights.scales}
    if weights.zero_points is not None:
        inputs["zero_points"] = weights.zero_points
    helper = onnx.helper
    node = helper.make_node(
        "MatMulNBits",
        ["rows", *inputs],
        ["product"],
        domain="com.microsoft",
        K=weights.in_width,
        N=weights.out_width,
        bits=weights.bits,
        block_size=weights.block_size,
        accuracy_level=accuracy_level,
    )
    values = [helper.make_tensor_value_info(name, 1, ["R", None]) for name in ("rows", "product")]
    constants = [onnx.numpy_helper.from_array(value, name) for name, value in inputs.items()]
    graph = helper.make_graph([node], "product", values[:1], values[1:], constants)
    domains = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=domains, ir_version=10).SerializeToString()
    session: Any = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    product: Floats = session.run(None, {"rows": rows})[0]
    if weights.offset is not None:
        product = np.add(product, (rows @ weights.membership) @ weights.offset, dtype=np.float32)
    return product


@pytest.mark.parametrize("form", ALL, ids=str)
@pytest.mark.parametrize("shape", ODD, ids=str)
def test_no_weight_moves_by_more_than_half_a_step(form: QuantForm, shape: tuple[int, int]) -> None:
    weight = drawn(shape)
    weights = quantize(weight, form)
    assert weights.quants.shape == (shape[0], weights.blocks, form.block_size * form.bits // 8)
    assert (np.abs(dequantize(weights) - weight) <= 0.5001 * steps(weights) + 1e-7).all()


@given(
    shape=st.tuples(st.integers(1, 6), st.integers(1, 70)),
    form=st.sampled_from(ALL),
    seed=st.integers(0, 2**16),
    exponent=st.integers(-60, 60),
    middle=st.sampled_from([0.0, 0.5, -3.0, 40.0]),
)
@settings(max_examples=150, deadline=None)
def test_half_a_step_holds_for_any_size_and_scale(
    shape: tuple[int, int], form: QuantForm, seed: int, exponent: int, middle: float
) -> None:
    weight = np.ldexp(drawn(shape, seed) + np.float32(middle), exponent).astype(np.float32)
    weights = quantize(weight, form)
    rounding = np.abs(weight).max() * 1e-6
    assert (np.abs(dequantize(weights) - weight) <= 0.501 * steps(weights) + rounding).all()


def test_weights_on_a_grid_of_16_levels_come_back_exactly() -> None:
    levels = np.random.default_rng(1).integers(0, 16, (64, 256))
    weight = grid((64, 256), levels, 32)
    assert np.abs(dequantize(quantize(weight, QuantForm(4, 32, "minimum"))) - weight).max() < 1e-7


@pytest.mark.parametrize("most", range(1, 15))
def test_blocks_that_use_few_levels_of_their_grid_come_back_exactly(most: int) -> None:
    levels = np.random.default_rng(most).integers(0, most + 1, (9, 96))
    weight = grid((9, 96), levels, 32)
    weight[0, :32] = grid((1, 32), np.arange(32) % 16, 32)
    assert np.abs(dequantize(quantize(weight, QuantForm(4, 32, "minimum"))) - weight).max() < 1e-7


def test_grids_beyond_the_first_blocks_are_found() -> None:
    levels = np.random.default_rng(3).integers(2, 14, (512, 256))
    weight = grid((512, 256), levels, 32)
    assert np.abs(dequantize(quantize(weight, QuantForm(4, 32, "minimum"))) - weight).max() < 1e-7


def test_a_symmetric_8_bit_grid_comes_back_exactly() -> None:
    levels = np.random.default_rng(2).integers(-127, 128, (16, 4, 32))
    levels[..., 5] = 127
    scale = np.random.default_rng(3).uniform(0.001, 0.1, (16, 4, 1)).astype(np.float16).astype(np.float32)
    weight = (scale * levels.astype(np.float32)).reshape(16, 128)
    assert (dequantize(quantize(weight, QuantForm(8, 32, "symmetric"))) == weight).all()


@pytest.mark.parametrize("form", ALL, ids=str)
@pytest.mark.parametrize("value", [0.0, 0.37, -2.5, 3e38, -3e38, 1e-30])
def test_constant_weights_come_back(form: QuantForm, value: float) -> None:
    weight = np.full((3, 48), value, dtype=np.float32)
    weights = quantize(weight, form)
    assert np.isfinite(weights.scales).all()
    np.testing.assert_allclose(dequantize(weights), weight, rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", ALL, ids=str)
def test_huge_and_tiny_weights_stay_finite(form: QuantForm) -> None:
    weight = np.array([[1.7e38, -1.6e38, 1e-45, 0.0] * 8, [1e-45, -1e-45, 0.0, 1e-38] * 8], dtype=np.float32)
    weights = quantize(weight, form)
    assert np.isfinite(weights.scales).all()
    assert weights.offset is None or np.isfinite(weights.offset).all()
    assert np.isfinite(dequantize(weights)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused(bad: float) -> None:
    weight = drawn((4, 32))
    weight[2, 3] = bad
    with pytest.raises(AssertionError, match="not finite"):
        quantize(weight, ALL[0])


def test_block_sizes_that_the_operator_lacks_are_refused() -> None:
    with pytest.raises(AssertionError, match="blocks of 48"):
        QuantForm(8, 48, "symmetric")


def test_slabs_join_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = drawn((50, 64))
    whole = quantize(weight, QuantForm(4, 32, "zero_point"))
    monkeypatch.setattr("specflow.onnx.quantize._SLAB_WEIGHTS", 7 * 64)
    parts = quantize(weight, QuantForm(4, 32, "zero_point"))
    assert (whole.quants == parts.quants).all()
    assert (whole.scales == parts.scales).all()


@pytest.mark.parametrize("form", ALL, ids=str)
@pytest.mark.parametrize("shape", ODD, ids=str)
def test_onnx_runtime_reads_the_weights_we_mean(form: QuantForm, shape: tuple[int, int]) -> None:
    weights = quantize(drawn(shape), form)
    rows = drawn((3, shape[1]), seed=5)
    expected = rows @ dequantize(weights).T
    for accuracy_level, tolerance in ((0, 1e-4), (1, 1e-4), (4, 0.02)):
        found = run_operator(weights, rows, accuracy_level)
        size = np.linalg.norm(rows, axis=1, keepdims=True) * np.linalg.norm(dequantize(weights), axis=1)
        assert (np.abs(found - expected) <= tolerance * size + 1e-6).all(), f"accuracy level {accuracy_level}"


@pytest.mark.parametrize("dtype", sorted(FORMS))
@pytest.mark.parametrize("kind", ["head", "body"])
def test_a_row_has_the_same_bits_alone_and_among_others(dtype: str, kind: str) -> None:
    weights = quantize(drawn((48, 96)), FORMS[dtype][kind])
    rows = drawn((9, 96), seed=6)
    bare = replace(weights, offset=None)
    alone = np.concatenate([run_operator(bare, row[None], 4) for row in rows])
    assert (run_operator(bare, rows, 4) == alone).all()


def test_the_module_needs_neither_torch_nor_onnx() -> None:
    code = "import sys, specflow.onnx.quantize; print({'torch', 'onnx', 'onnxruntime'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"

"""Correctors against their formulas, written out number by number."""

from __future__ import annotations

from math import exp, tanh

import pytest
import torch
from torch import Tensor

from specflow.draft.nn.corrector import CorrectorShape, TableCorrector, read_corrector
from specflow.draft.nn.weights import SeededTensors, WeightReader
from specflow.errors import CheckpointError
from specflow.types import PAD

V, VD, H, R = 11, 7, 5, 3
SHAPE = CorrectorShape(rank=R, hidden_size=H, vocab_size=V, draft_vocab_size=VD)
LIKE = torch.empty(0, dtype=torch.float64)
EXTRA = {"markov": {}, "gated": {"gate_proj": (R, H + R)}, "rnn": {"joint_proj": (3 * R, 2 * R + H)}}
KINDS = sorted(EXTRA)


def tensors(kind: str, bias: bool = True) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes: dict[str, tuple[int, ...]] = {"markov_w1.weight": (V, R), "markov_w2.weight": (VD, R)}
    for name, shape in EXTRA[kind].items():
        shapes[f"{name}.weight"] = shape
        if bias:
            shapes[f"{name}.bias"] = shape[:1]
    return {
        f"markov_head.{name}": torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def read(kind: str, found: dict[str, Tensor]) -> TableCorrector:
    reader = WeightReader(found, "made here", LIKE)
    corrector = read_corrector(kind, reader, SHAPE)
    reader.close()
    return corrector


def sigmoid(x: float) -> float:
    return 1 / (1 + exp(-x))


def product(weight: list[list[float]], x: list[float], bias: list[float] | None = None) -> list[float]:
    return [
        sum(w * v for w, v in zip(row, x, strict=True)) + (bias[i] if bias else 0.0) for i, row in enumerate(weight)
    ]


def by_hand(
    kind: str, found: dict[str, Tensor], token: int, hidden: list[float], state: list[float]
) -> tuple[list[float], list[float]]:
    part = {name.removeprefix("markov_head."): tensor.tolist() for name, tensor in found.items()}
    row, out = part["markov_w1.weight"][token], part["markov_w2.weight"]
    if kind == "markov":
        return product(out, row), state
    if kind == "gated":
        gate = product(part["gate_proj.weight"], hidden + row, part.get("gate_proj.bias"))
        return product(out, [sigmoid(g) * r for g, r in zip(gate, row, strict=True)]), state
    joint = product(part["joint_proj.weight"], state + row + hidden, part.get("joint_proj.bias"))
    gate, candidate, output = joint[:R], joint[R : 2 * R], joint[2 * R :]
    after = [sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c) for g, s, c in zip(gate, state, candidate, strict=True)]
    return product(out, [tanh(o) for o in output]), after


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_of_steps_follows_the_formula(kind: str, bias: bool) -> None:
    found = tensors(kind, bias)
    corrector = read(kind, dict(found))
    tokens = [[3, 10, 0, 3], [1, 1, 9, 2]]
    hidden = torch.randn(2, 4, H, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    state = corrector.begin(2).unsqueeze(1)
    states = [[0.0] * int(state.shape[-1]) for _ in range(2)]
    for step in range(4):
        previous = torch.tensor([[row[step]] for row in tokens])
        bias_rows, state = corrector.correct(previous, hidden[:, step : step + 1], state)
        assert bias_rows.shape == (2, 1, VD)
        for b in range(2):
            expected, states[b] = by_hand(kind, found, tokens[b][step], hidden[b, step].tolist(), states[b])
            assert bias_rows[b, 0].tolist() == pytest.approx(expected, abs=1e-12)
            assert state[b, 0].tolist() == pytest.approx(states[b], abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_tree_are_independent(kind: str) -> None:
    corrector = read(kind, tensors(kind))
    generator = torch.Generator().manual_seed(3)
    previous = torch.randint(V, (2, 4), generator=generator)
    hidden = torch.randn(2, 4, H, generator=generator, dtype=torch.float64)
    state = torch.randn(2, 4, corrector.begin(2).shape[-1], generator=generator, dtype=torch.float64)
    together, after = corrector.correct(previous, hidden, state)
    for b in range(2):
        for r in range(4):
            one = (slice(b, b + 1), slice(r, r + 1))
            alone, alone_after = corrector.correct(previous[one], hidden[one], state[one])
            assert torch.allclose(together[one], alone, atol=1e-12)
            assert torch.allclose(after[one], alone_after, atol=1e-12)


def test_only_the_rnn_remembers() -> None:
    widths = {kind: read(kind, tensors(kind)).begin(3).shape for kind in KINDS}
    assert widths == {"markov": (3, 0), "gated": (3, 0), "rnn": (3, R)}
    assert not read("rnn", tensors("rnn")).begin(3).any()


def test_padding_does_no_harm() -> None:
    corrector = read("markov", tensors("markov"))
    bias, _ = corrector.correct(torch.tensor([[PAD, 4]]), torch.zeros(1, 2, H), torch.zeros(1, 2, 0))
    assert torch.isfinite(bias).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_compute_the_same(kind: str, dtype: torch.dtype) -> None:
    exact = read_corrector(kind, WeightReader(SeededTensors(4), "random", LIKE), SHAPE)
    packed = read_corrector(kind, WeightReader(SeededTensors(4), "random", LIKE.to(dtype)), SHAPE)
    previous, hidden = torch.tensor([[1, 2], [3, 4]]), torch.randn(2, 2, H, generator=torch.Generator().manual_seed(5))
    state = exact.begin(2).unsqueeze(1).expand(-1, 2, -1)
    bias, after = exact.correct(previous, hidden.double(), state)
    close, close_after = packed.correct(previous, hidden.to(dtype), state.to(dtype))
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    assert close.dtype == dtype
    assert torch.allclose(close.double(), bias, atol=tolerance)
    assert torch.allclose(close_after.double(), after, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_or_misshapen_tensor_is_named(kind: str) -> None:
    for name in tensors(kind, bias=False):
        found = tensors(kind)
        del found[name]
        with pytest.raises(CheckpointError, match=name):
            read(kind, found)
        found = {**tensors(kind), name: torch.zeros(2, 2)}
        with pytest.raises(CheckpointError, match=name):
            read(kind, found)


def test_the_parts_of_another_corrector_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"joint_proj"):
        read("markov", tensors("rnn"))

"""Correctors as ONNX graphs against their torch layers, over chains and trees."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from test_corrector import KINDS, SHAPE, tensors
from torch import Tensor

from specflow.draft.nn.corrector import TableCorrector, read_corrector
from specflow.draft.nn.weights import WeightReader
from specflow.draft.onnx_corrector import OnnxCorrector, compare_corrector, write_corrector
from specflow.draft.parallel import Marginals, MarginalSteps
from specflow.draft.steps import Frontier
from specflow.errors import ModelError
from specflow.onnx.graphs import GraphSet, Precision
from specflow.onnx.session import OnnxSession, Place
from specflow.types import PAD

CPU = Place(torch.device("cpu"), 1)
SINGLE = Precision.named("float32")
READS = {"markov": {"tokens"}, "gated": {"tokens", "scored"}, "rnn": {"tokens", "scored", "state"}}


def read(kind: str, bias: bool = True, dtype: torch.dtype = torch.float32) -> TableCorrector:
    return read_corrector(
        kind, WeightReader(tensors(kind, bias), "made here", torch.empty(0, dtype=dtype), False), SHAPE
    )


def written(corrector: TableCorrector, folder: Path, precision: Precision = SINGLE) -> OnnxCorrector:
    with GraphSet(folder, precision) as graphs:
        write_corrector(graphs, corrector, SHAPE.hidden_size)
    return OnnxCorrector(folder, CPU)


def noise(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_of_steps_is_torchs(kind: str, bias: bool, tmp_path: Path) -> None:
    corrector = read(kind, bias)
    graph, hidden = written(corrector, tmp_path), noise(3, 9, SHAPE.hidden_size)
    tokens = torch.randint(SHAPE.vocab_size, (3, 9), generator=torch.Generator().manual_seed(1))
    ours, theirs = graph.begin(3).unsqueeze(1), corrector.begin(3).unsqueeze(1)
    for step in range(9):
        at = slice(step, step + 1)
        got, ours = graph.correct(tokens[:, at], hidden[:, at], ours)
        expected, theirs = corrector.correct(tokens[:, at], hidden[:, at], theirs)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_tree_are_torchs(kind: str, tmp_path: Path) -> None:
    """Behind `MarginalSteps`: views that are not contiguous, and states picked by their parents."""
    corrector = read(kind)
    found = Marginals(noise(2, 3, SHAPE.draft_vocab_size), noise(2, 3, SHAPE.hidden_size, seed=1))
    anchors = torch.tensor([3, 8])
    steps = [MarginalSteps(found, each, anchors) for each in (written(corrector, tmp_path), corrector)]
    torch.testing.assert_close(steps[0].logits, steps[1].logits, atol=1e-5, rtol=1e-4)
    for parents in ([[0, 0, 0], [0, 0, 0]], [[1, 3, 1, 2], [3, 3, 2, 1]]):
        tokens = torch.randint(SHAPE.vocab_size, (2, len(parents[0])), generator=torch.Generator().manual_seed(4))
        frontier = Frontier(torch.tensor(parents), torch.ones(2, len(parents[0]), 1, dtype=torch.bool))
        got, expected = (each.extend(tokens, frontier) for each in steps)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_graph_reads_what_the_corrector_reads(kind: str, tmp_path: Path) -> None:
    written(read(kind), tmp_path)
    path = tmp_path / "corrector.onnx"
    onnx.checker.check_model(str(path), full_check=True)
    session = OnnxSession(path, CPU)
    assert set(session.inputs) == READS[kind]
    assert set(session.outputs) == ({"bias", "next_state"} if kind == "rnn" else {"bias"})
    with pytest.raises(ModelError, match="tokens"):
        session.run({}, {"bias": (1, 1, SHAPE.draft_vocab_size)})


@pytest.mark.parametrize("kind", KINDS)
def test_padding_does_no_harm(kind: str, tmp_path: Path) -> None:
    graph = written(read(kind), tmp_path)
    state = graph.begin(1).unsqueeze(1).expand(-1, 2, -1)
    bias, _ = graph.correct(torch.tensor([[PAD, 4]]), torch.zeros(1, 2, SHAPE.hidden_size), state)
    assert bias.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_comparison_tells_other_weights(kind: str, tmp_path: Path) -> None:
    corrector = read(kind)
    written(corrector, tmp_path)
    assert max(e.relative for e in compare_corrector(corrector, SHAPE.hidden_size, tmp_path, SINGLE, CPU)) < 1e-5
    corrector.out.weight.data[0] += 1.0
    assert max(e.relative for e in compare_corrector(corrector, SHAPE.hidden_size, tmp_path, SINGLE, CPU)) > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision(kind: str, tmp_path: Path) -> None:
    half, corrector = Precision.named("float16"), read(kind)
    graph = written(corrector, tmp_path, half)
    assert graph.begin(1).dtype == torch.float16
    assert max(e.relative for e in compare_corrector(corrector, SHAPE.hidden_size, tmp_path, half, CPU)) < 0.01

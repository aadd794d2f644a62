"""The confidence head: its formula, its names, and how options build it over any network."""

from __future__ import annotations

from math import exp
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from specflow.draft.base import SourceContext
from specflow.draft.corrected import ConfidenceOptions, CorrectorOptions, confidence_of, read_heads
from specflow.draft.nn.confidence import LinearConfidence, read_confidence
from specflow.draft.nn.corrector import RNNCorrector
from specflow.draft.nn.weights import SeededTensors, WeightReader
from specflow.draft.parallel import ParallelModel
from specflow.errors import CheckpointError, GraphError
from specflow.law import DraftVocabulary

V, H, R = 11, 5, 3
LIKE = torch.empty(0, dtype=torch.float64)
TABLE = torch.randn(V, R, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def embed(tokens: Tensor) -> Tensor:
    return TABLE[tokens]


def reader(width: int, bias: bool = True) -> WeightReader:
    generator = torch.Generator().manual_seed(1)
    found = {"confidence_head.proj.weight": torch.randn(1, width, generator=generator, dtype=torch.float64)}
    if bias:
        found["confidence_head.proj.bias"] = torch.tensor([0.7], dtype=torch.float64)
    return WeightReader(found, "made here", LIKE)


@pytest.mark.parametrize("temperatures", [(), (0.5, 2.0)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("with_tokens", [True, False])
def test_it_follows_the_formula(with_tokens: bool, bias: bool, temperatures: tuple[float, ...]) -> None:
    source = reader(H + R * with_tokens, bias)
    head = read_confidence(source, H, bias, (embed, R) if with_tokens else None, temperatures)
    source.close()
    hidden = torch.randn(2, H, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for step in range(2):
        got = head(hidden, torch.tensor([4, 9]), step)
        assert got.shape == (2,)
        for b, token in enumerate((4, 9)):
            seen = hidden[b].tolist() + (TABLE[token].tolist() if with_tokens else [])
            z = sum(w * x for w, x in zip(head.proj.weight[0].tolist(), seen, strict=True)) + (0.7 if bias else 0.0)
            z /= temperatures[step] if temperatures else 1.0
            assert float(got[b]) == pytest.approx(1 / (1 + exp(-z)), abs=1e-12)


def test_positions_behind_the_last_temperature_have_none() -> None:
    hidden, before = torch.ones(1, H, dtype=torch.float64), torch.tensor([4])
    plain, heated = (read_confidence(reader(H), H, temperatures=heats) for heats in ((), (0.5,)))
    assert not torch.equal(heated(hidden, before, 0), plain(hidden, before, 0))
    assert torch.equal(heated(hidden, before, 1), plain(hidden, before, 1))


def test_rows_of_a_tree_have_the_values_they_have_alone() -> None:
    head = read_confidence(reader(H + R), H, True, (embed, R))
    hidden = torch.randn(2, 4, H, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    before = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]])
    together = head(hidden, before, 0)
    for r in range(4):
        assert torch.allclose(together[:, r], head(hidden[:, r], before[:, r], 0), atol=1e-14)


def test_it_computes_in_float32_where_the_model_does_not() -> None:
    head = read_confidence(WeightReader(SeededTensors(0), "random", LIKE.to(torch.bfloat16)), H)
    assert head(torch.randn(2, H).to(torch.bfloat16), torch.tensor([1, 2]), 0).dtype == torch.float32


def test_a_bias_that_is_missing_or_left_over_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"confidence_head.proj.bias"):
        read_confidence(reader(H, bias=False), H)
    left = reader(H)
    read_confidence(left, H, bias=False)
    with pytest.raises(CheckpointError, match=r"confidence_head.proj.bias"):
        left.close()


class Network:
    """A network of which only its facts are asked."""

    needs, most_positions, most_depth = None, 99, 4

    def __init__(self, vocabulary: DraftVocabulary | None = None) -> None:
        self.vocabulary = vocabulary


def context(dependency: str, k: int = 4) -> SourceContext:
    target = SimpleNamespace(info=SimpleNamespace(vocab_size=V, hidden_size=H))
    return SourceContext(target=target, k=k, dependency=dependency)  # type: ignore[arg-type]


def put_together(dependency: str, vocabulary: DraftVocabulary | None = None, k: int = 4, **options: object) -> tuple:  # type: ignore[type-arg]
    random = WeightReader(SeededTensors(0), "random", LIKE)
    network = Network(vocabulary)
    heads = read_heads(network, CorrectorOptions(**options), random, context(dependency, k))  # type: ignore[arg-type]
    return ParallelModel(network, heads.corrector), heads.confidence  # type: ignore[arg-type]


def test_options_build_corrector_and_head() -> None:
    model, head = put_together("parallel")
    assert (model._corrector, head) == (None, None)
    model, head = put_together("parallel+corrector", corrector="rnn", corrector_rank=R, confidence_head=True)
    assert isinstance(model._corrector, RNNCorrector)
    assert isinstance(head, LinearConfidence)
    assert head.proj.weight.shape == (1, H + R)
    assert head.proj.bias is not None
    _, head = put_together(
        "parallel+corrector", corrector="markov", confidence_head=True, confidence_tokens=False, confidence_bias=False
    )
    assert head.proj.weight.shape == (1, H)
    assert head.proj.bias is None
    _, head = put_together("parallel", confidence_head=True, temperatures=(1.0, 2.0, 1.5, 1.2))
    assert head.temperatures == (1.0, 2.0, 1.5, 1.2)
    assert head.proj.weight.shape == (1, H)


def test_a_reduced_vocabulary_narrows_the_output_and_not_the_table() -> None:
    vocabulary = DraftVocabulary(torch.tensor([1, 4, 9]), V)
    model, _ = put_together("parallel+corrector", vocabulary, corrector="gated", corrector_rank=R)
    assert model._corrector.table.shape == (V, R)
    assert model._corrector.out.out_features == 3


def test_a_head_over_an_autoregressive_network_reads_its_hidden_row_alone() -> None:
    random = WeightReader(SeededTensors(0), "random", LIKE)
    head = confidence_of(ConfidenceOptions(confidence_head=True), random, H, depth=16)
    assert head is not None
    assert head(torch.zeros(2, H, dtype=torch.float64), torch.tensor([0, 1]), 15).shape == (2,)
    assert confidence_of(ConfidenceOptions(), random, H, depth=16) is None


def test_corrector_and_dependency_must_agree() -> None:
    with pytest.raises(GraphError, match=r"without a corrector[\s\S]*hint: name one"):
        put_together("parallel+corrector")
    with pytest.raises(GraphError, match=r"corrector markov with dependency parallel[\s\S]*leave the corrector out"):
        put_together("parallel", corrector="markov")
    with pytest.raises(GraphError, match="corrector"):
        put_together("", corrector="markov")


def test_there_is_a_temperature_for_every_position() -> None:
    with pytest.raises(GraphError, match="2 temperatures for 4 draft positions"):
        put_together("parallel", confidence_head=True, temperatures=(1.0, 2.0))
    _, head = put_together("parallel", k=2, confidence_head=True, temperatures=(1.0, 2.0))
    assert head is not None


@pytest.mark.parametrize(
    "options",
    [
        {"temperatures": (1.0,)},
        {"confidence_head": True, "temperatures": (0.0,)},
        {"confidence_head": True, "temperatures": (float("nan"),)},
        {"confidence_head": True, "confidence_tokens": True},
        {"corrector": "lstm"},
        {"corrector_rank": 0},
    ],
)
def test_senseless_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        CorrectorOptions(**options)

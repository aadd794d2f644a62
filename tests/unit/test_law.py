"""Every small law says what the dense law of the same distribution says."""

from __future__ import annotations

import pytest
import torch

from specflow.errors import GraphError
from specflow.law import Dense, DraftVocabulary, PointMass, Reduced, Sparse
from specflow.types import PAD, Law

VOCAB, SHAPE, ROWS = 7, (2, 4), [0, 1]
TOKENS = torch.tensor([[3, 5, 0, PAD], [6, PAD, PAD, PAD]])
IDS = torch.tensor([5, 0, 3, 6])  # the reduced vocabulary, in an order of its own
VOCABULARY = DraftVocabulary(IDS, VOCAB)


def small_probs(dtype: torch.dtype) -> torch.Tensor:
    draws = torch.Generator().manual_seed(0)
    return torch.randn(*SHAPE, len(IDS), generator=draws, dtype=dtype).softmax(-1)


def dense_probs(dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(*SHAPE, VOCAB, dtype=dtype).index_copy(-1, IDS, small_probs(dtype))


def pairs(dtype: torch.dtype) -> dict[str, tuple[Law, torch.Tensor]]:
    one_hot = torch.zeros(*SHAPE, VOCAB, dtype=dtype).scatter(-1, TOKENS.clamp_min(0).unsqueeze(-1), 1.0)
    return {
        "point": (PointMass(TOKENS, VOCAB), one_hot),
        "reduced": (Reduced(TOKENS, small_probs(dtype), VOCABULARY), dense_probs(dtype)),
        "sparse": (Sparse(TOKENS, IDS.expand(*SHAPE, -1), small_probs(dtype), VOCAB), dense_probs(dtype)),
    }


@pytest.mark.parametrize("kind", ["point", "reduced", "sparse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_small_law_equals_its_dense_form(kind: str, dtype: torch.dtype) -> None:
    small, probs = pairs(dtype)[kind]
    dense = Dense(TOKENS, probs)
    draws = torch.Generator().manual_seed(1)
    p = torch.randn(*SHAPE, VOCAB, generator=draws, dtype=dtype).softmax(-1)
    scale = torch.rand(SHAPE, generator=draws, dtype=dtype)
    before = p.clone()
    assert small.prob().to(dtype).equal(dense.prob())
    whole = (scale.unsqueeze(-1) * p - probs).clamp_min(0)
    for law in (small, dense):
        assert torch.allclose(
            law.excess_mass(scale, p), whole.double().sum(-1), rtol=0, atol=8 * torch.finfo(dtype).eps
        )
        for node in ([0, 3], [2, 1]):
            scaled = scale[ROWS, node].unsqueeze(-1) * p[ROWS, node]
            kept = scaled.clone()
            assert law.excess_at(torch.tensor(node), scaled).equal(whole[ROWS, node])
            assert law.excess_at(torch.tensor(node), scaled).dtype == dtype
            assert scaled.equal(kept)
        for node in ([0, 3], [2, 1]):
            assert law.row(torch.tensor(node)).equal(probs[ROWS, node])
        for width in (0, 1, 4):
            narrow = law.narrow(width)
            assert narrow.prob().equal(law.prob()[:, :width])
            assert narrow.excess_mass(scale[:, :width], p[:, :width]).equal(law.excess_mass(scale, p)[:, :width])
            assert narrow.is_point == law.is_point
    assert p.equal(before)  # the caller's tensors stay as they were
    assert small.is_point == (kind == "point")
    assert not dense.is_point


def test_padding_has_probability_one_and_dense_reads_the_token() -> None:
    probs = dense_probs(torch.float64)
    assert Dense(TOKENS, probs).prob()[0].tolist() == [*(float(probs[0, i, t]) for i, t in enumerate((3, 5, 0))), 1.0]


def test_a_token_outside_the_draft_vocabulary_has_probability_zero() -> None:
    tokens = torch.tensor([[1, 2, 4, 3], [1, 1, 1, 1]])
    for law in (
        Reduced(tokens, small_probs(torch.float64), VOCABULARY),
        Sparse(tokens, IDS.expand(*SHAPE, -1), small_probs(torch.float64), VOCAB),
    ):
        assert (law.prob() > 0).tolist() == [[False, False, False, True], [False] * 4]


def test_unused_candidates_say_nothing_and_repeated_ones_add_up() -> None:
    tokens = torch.tensor([[0]])
    law = Sparse(tokens, torch.tensor([[[0, 2, 0, PAD]]]), torch.tensor([[[0.25, 0.5, 0.25, 9.0]]]), 3)
    assert law.prob().tolist() == [[0.5]]
    assert law.row(torch.tensor([0])).tolist() == [[0.5, 0.0, 0.5]]
    p = torch.tensor([[[0.75, 0.125, 0.125]]])
    assert law.excess_at(torch.tensor([0]), p[0]).tolist() == [[0.25, 0.125, 0.0]]
    assert law.excess_mass(torch.ones(1, 1), p).tolist() == [[0.375]]
    assert law.excess_mass(torch.full((1, 1), 0.5), p).tolist() == [[0.0625]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_probabilities_are_refused(dtype: torch.dtype) -> None:
    probs = dense_probs(torch.float32).to(dtype)
    with pytest.raises(GraphError, match="float32 or wider"):
        Dense(TOKENS, probs)
    with pytest.raises(GraphError, match="softmax in float32"):
        Reduced(TOKENS, probs[..., IDS], VOCABULARY)
    with pytest.raises(GraphError, match="draft law"):
        Sparse(TOKENS, IDS.expand(*SHAPE, -1), probs[..., IDS], VOCAB)

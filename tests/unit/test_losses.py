"""Losses and weights against values worked out by hand, by enumeration and by finite differences."""

from __future__ import annotations

from math import exp, log

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specflow.train.losses.confidence import confidence
from specflow.train.losses.cross_entropy import cross_entropy
from specflow.train.losses.divergence import divergence, soft_cross_entropy
from specflow.train.losses.feature import feature
from specflow.train.losses.likelihood import lk_hybrid, nla
from specflow.train.losses.rows import row_blocks, row_terms
from specflow.train.losses.total_variation import total_variation
from specflow.train.losses.weights import dpace, exponential_decay, power_decay

P = (0.5, 0.3, 0.2)
Q = (0.2, 0.2, 0.6)
OVERLAP = 0.2 + 0.2 + 0.2
ENTROPY = -sum(p * log(p) for p in P)
CROSS = sum(p * log(q) for p, q in zip(P, Q, strict=True))


def logits_of(q: tuple[float, ...], shift: float = 3.0) -> Tensor:
    return torch.tensor([q], dtype=torch.float64).log() + shift


def hand_terms() -> tuple[Tensor, Tensor, Tensor]:
    probs = torch.tensor([P], dtype=torch.float64)
    return tuple(row_terms(logits_of(Q), torch.tensor([1]), probs, torch.tensor([0])))  # type: ignore[return-value]


def random_rows(n: int = 9, m: int = 5, width: int = 37) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(3)
    logits = torch.randn(n, width, generator=made, dtype=torch.float64) * 2
    probs = (torch.randn(m, width, generator=made, dtype=torch.float64) * 2).softmax(-1)
    labels = torch.randint(0, width, (n,), generator=made)
    return logits, labels, probs, torch.randint(0, m, (n,), generator=made)


def test_terms_by_hand() -> None:
    label, cross, overlap = hand_terms()
    assert label.item() == pytest.approx(log(0.2))
    assert cross.item() == pytest.approx(CROSS)
    assert overlap.item() == pytest.approx(OVERLAP)


def test_losses_by_hand() -> None:
    label, cross, overlap = hand_terms()
    entropy = torch.tensor([ENTROPY], dtype=torch.float64)
    kl = sum(p * log(p / q) for p, q in zip(P, Q, strict=True))
    assert cross_entropy(label).item() == pytest.approx(-log(0.2))
    assert soft_cross_entropy(cross).item() == pytest.approx(-CROSS)
    assert divergence(cross, entropy).item() == pytest.approx(kl)
    assert total_variation(overlap).item() == pytest.approx(0.3 + 0.1 + 0.4)
    assert nla(overlap).item() == pytest.approx(-log(0.6))
    share = exp(-3 * 0.6)
    assert lk_hybrid(divergence(cross, entropy), overlap).item() == pytest.approx(share * kl + (1 - share) * 0.4)


def test_the_share_of_the_hybrid_has_no_gradient() -> None:
    overlap = torch.tensor([0.6], dtype=torch.float64, requires_grad=True)
    lk_hybrid(torch.tensor([2.0], dtype=torch.float64), overlap, rate=2.0).sum().backward()
    assert overlap.grad is not None
    assert overlap.grad.item() == pytest.approx(-(1 - exp(-1.2)))


def test_laws_that_share_nothing_have_a_finite_loss() -> None:
    overlap = torch.zeros(1, requires_grad=True)
    nla(overlap).sum().backward()
    assert torch.isfinite(nla(overlap)).all()
    assert overlap.grad is not None
    assert torch.isfinite(overlap.grad).all()


def test_feature_by_hand() -> None:
    drafted = torch.tensor([[0.5, 3.0], [1.0, 1.0]])
    true = torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    assert feature(drafted, true).tolist() == pytest.approx([(0.5 * 0.25 + 1.5) / 2, 0.0])


def test_confidence_by_hand() -> None:
    odds = torch.tensor([log(3.0)])  # a confidence of 3/4
    overlap = torch.tensor([0.6], requires_grad=True)
    found = confidence(odds, overlap)
    assert found.item() == pytest.approx(-(0.6 * log(0.75) + 0.4 * log(0.25)))
    assert not found.requires_grad


def test_terms_equal_the_plain_formulas() -> None:
    logits, labels, probs, at = random_rows()
    label, cross, overlap = row_terms(logits, labels, probs, at)
    p, q = probs[at], logits.softmax(-1)
    assert torch.allclose(label, -F.cross_entropy(logits, labels, reduction="none"))
    assert torch.allclose(cross, (p * q.log()).sum(-1))
    assert torch.allclose(total_variation(overlap), (p - q).abs().sum(-1))
    assert torch.allclose(row_terms(logits, labels).label, label)


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_gradients_by_finite_differences(used: tuple[int, ...]) -> None:
    logits, labels, probs, at = random_rows()
    logits.requires_grad_(True)
    assert torch.autograd.gradcheck(lambda x: tuple(row_terms(x, labels, probs, at)[i] for i in used), (logits,))


def test_gradients_of_every_loss() -> None:
    logits, labels, probs, at = random_rows()
    p = probs[at]
    entropy = torch.special.entr(p).sum(-1)
    made = logits.clone().requires_grad_(True)
    label, cross, overlap = row_terms(made, labels, probs, at)
    ours = {
        "cross_entropy": cross_entropy(label),
        "divergence": divergence(cross, entropy),
        "total_variation": total_variation(overlap),
        "nla": nla(overlap),
    }
    plain = logits.clone().requires_grad_(True)
    q = plain.softmax(-1)
    theirs = {
        "cross_entropy": F.cross_entropy(plain, labels, reduction="none"),
        "divergence": F.kl_div(q.log(), p, reduction="none").sum(-1),
        "total_variation": (p - q).abs().sum(-1),
        "nla": -torch.minimum(p, q).sum(-1).log(),
    }
    for name, found in ours.items():
        assert torch.allclose(found, theirs[name]), name
        (one,) = torch.autograd.grad(found.square().sum(), made, retain_graph=True)
        (other,) = torch.autograd.grad(theirs[name].square().sum(), plain, retain_graph=True)
        assert torch.allclose(one, other, atol=1e-12), name


def test_gradients_of_the_tokens_alone() -> None:
    logits, labels, _, _ = random_rows()
    logits.requires_grad_(True)
    assert torch.autograd.gradcheck(lambda x: row_terms(x, labels).label, (logits,))


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels, probs, at = random_rows()
    found = []
    for size in (37 * 2, 37 * 100, 1):
        monkeypatch.setitem(row_blocks.__globals__["_BLOCK"], "cpu", size)
        made = logits.clone().requires_grad_(True)
        terms = row_terms(made, labels, probs, at)
        sum(each.sum() for each in terms).backward()  # type: ignore[union-attr]
        assert made.grad is not None
        found.append((*terms, made.grad))
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


def test_a_token_that_cannot_be_has_a_finite_loss() -> None:
    logits = torch.tensor([[200.0, -200.0]], requires_grad=True)
    label = row_terms(logits, torch.tensor([1])).label
    label.sum().backward()
    assert label.item() == -400.0
    assert logits.grad is not None
    assert logits.grad.tolist() == [[-1.0, 1.0]]


def test_half_precision_logits_are_read_in_float32() -> None:
    logits, labels, probs, at = random_rows()
    half = logits.bfloat16().requires_grad_(True)
    terms = row_terms(half, labels, probs.float(), at)
    wide = row_terms(half.detach().float(), labels, probs.float(), at)
    assert all(torch.equal(one, two) for one, two in zip(terms, wide, strict=True))
    terms.overlap.sum().backward()
    assert half.grad is not None
    assert half.grad.dtype == torch.bfloat16


def test_decays_by_hand() -> None:
    assert exponential_decay(3, 4.0).tolist() == pytest.approx([1.0, exp(-0.25), exp(-0.5)])
    assert power_decay(3, 0.8).tolist() == pytest.approx([1.0, 0.8, 0.64])
    fast = power_decay(3, 0.6)
    assert (fast / fast.sum()).tolist() == pytest.approx([0.5102, 0.3061, 0.1837], abs=1e-4)


def test_dpace_by_hand() -> None:
    label = torch.tensor([[0.6, 0.2, 0.9], [0.5, 0.5, 0.5]]).log().requires_grad_(True)
    known = torch.tensor([[True, True, True], [True, False, True]])
    found = dpace(label, known, alpha=0.5)
    first, second, third = 0.8, 0.8 * 0.6, 0.8 * 0.6 * 0.95
    assert found[0].tolist() == pytest.approx([first + second + third, second + third, third])
    assert found[1].tolist() == pytest.approx([0.75, 0.0, 0.0])
    assert not found.requires_grad


def test_dpace_of_a_token_that_the_draft_lacks() -> None:
    label = torch.tensor([[0.0, -torch.inf, 0.0]])
    found = dpace(label, torch.ones(1, 3, dtype=torch.bool), alpha=0.5)
    assert found.tolist() == [[2.0, 1.0, 0.5]]


def test_dpace_is_the_gradient_of_the_length() -> None:
    label = torch.tensor([[0.6, 0.2, 0.9]], dtype=torch.float64).log().requires_grad_(True)
    length = label.exp().cumprod(1).sum()
    (slope,) = torch.autograd.grad(length, label)
    assert torch.allclose(dpace(label, torch.ones(1, 3, dtype=torch.bool), alpha=0.0), slope)

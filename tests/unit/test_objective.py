"""The objective against loops over chains, positions and tokens; and what must not count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp, log
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor, nn

from specflow.errors import RecipeError
from specflow.law import DraftVocabulary
from specflow.train.batch import Batch, Drafting, Slot
from specflow.train.objective import Loss, Objective
from specflow.train.objective_options import OBJECTIVES, ObjectiveOptions, block_gamma
from specflow.types import Features

V, H, K, N = 11, 6, 3, 7
TEXTS, WIDTH = 2, 8
ALL = {
    "cross_entropy": 0.1,
    "soft_cross_entropy": 0.3,
    "divergence": 0.2,
    "total_variation": 0.9,
    "nla": 0.5,
    "lk_hybrid": 0.7,
    "feature": 1.5,
    "confidence": 1.0,
}
REDUCED = DraftVocabulary(torch.tensor([0, 2, 3, 5, 7, 10]), V)


class Tables:
    """What an objective reads of a target."""

    def __init__(self) -> None:
        made = torch.Generator().manual_seed(5)
        self.head = torch.randn(V, H, generator=made)
        self.head_bias = torch.randn(V, generator=made)


class Fixed(Drafting):
    """Slots that are given; the logits are what is trained."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        super().__init__()
        self.logits = nn.ParameterList([nn.Parameter(slot.logits.clone()) for slot in slots])
        self._slots = slots

    def forward(self, batch: Batch) -> Sequence[Slot]:
        return [replace(slot, logits=logits) for slot, logits in zip(self._slots, self.logits, strict=True)]


def make_batch(seed: int = 1) -> Batch:
    made = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, V, (TEXTS, WIDTH), generator=made)
    sure = torch.ones(TEXTS, WIDTH, dtype=torch.bool)
    hidden = torch.randn(TEXTS, WIDTH, H, generator=made)
    return Batch(tokens, sure, sure, Features({}, hidden_post=hidden), key=0)


def make_slots(width: int = V, seed: int = 2) -> list[Slot]:
    made = torch.Generator().manual_seed(seed)
    start = torch.randint(0, WIDTH - 1, (N,), generator=made)
    row = torch.randint(0, TEXTS, (N,), generator=made)
    slots = []
    for k in range(K):
        at = row * WIDTH + start + k
        known = (start + k + 1 < WIDTH) & (torch.rand(N, generator=made) > 0.15)
        logits = torch.randn(N, width, generator=made) * 2
        hidden, odds = torch.randn(N, H, generator=made), torch.randn(N, generator=made)
        slots.append(Slot(logits, at.masked_fill(~known, 10**6), known, hidden, odds))
    return slots


def run(
    slots: Sequence[Slot], options: ObjectiveOptions, vocabulary: DraftVocabulary | None = None
) -> tuple[Loss, list[Tensor]]:
    drafting = Fixed(slots)
    loss = Objective(drafting, cast(Any, Tables()), vocabulary, options)(make_batch())
    loss.sum.backward()
    return loss, [cast(Tensor, each.grad) for each in drafting.logits]


def weight_of(options: ObjectiveOptions, k: int) -> float:
    return exp(-k / options.rate) if options.decay == "exponential" else options.rate**k


def by_loops(slots: Sequence[Slot], options: ObjectiveOptions, vocabulary: DraftVocabulary | None) -> dict[str, float]:
    """Weighted means of all losses, and the weight of the tokens."""
    batch, tables = make_batch(), Tables()
    ids = torch.arange(V) if vocabulary is None else vocabulary.to_target
    sums: dict[str, float] = dict.fromkeys(ALL, 0.0)
    weights: dict[str, float] = dict.fromkeys(ALL, 0.0)
    for chain in range(N):
        for k, slot in enumerate(slots):
            if not slot.known[chain]:
                if options.contiguous:
                    break
                continue
            text, place = divmod(int(slot.at[chain]), WIDTH)
            token = int(batch.tokens[text, place + 1])
            state = batch.hidden[text, place]
            whole = (tables.head @ state + tables.head_bias).double().softmax(-1)
            p = whole[ids] / whole[ids].sum()
            q = slot.logits[chain].double().softmax(-1)
            assert slot.hidden is not None
            assert slot.confidence is not None
            overlap, stands = float(torch.minimum(p, q).sum()), float(torch.minimum(whole[ids], q).sum())
            kl = float((p * (p / q).log()).sum())
            share = exp(-options.eta * overlap)
            sure = float(slot.confidence[chain].double().sigmoid())
            values = {
                "feature": float(F.smooth_l1_loss(slot.hidden[chain], state)),
                "confidence": -(stands * torch.tensor(sure).log() + (1 - stands) * torch.tensor(1 - sure).log()).item(),
            }
            if token in ids:
                values |= {
                    "cross_entropy": -float(q[ids.tolist().index(token)].log()),
                    "soft_cross_entropy": -float((p * q.log()).sum()),
                    "divergence": kl,
                    "total_variation": float((p - q).abs().sum()),
                    "nla": -float(torch.tensor(overlap).log()),
                    "lk_hybrid": share * kl + (1 - share) * (1 - overlap),
                }
            for name, value in values.items():
                sums[name] += weight_of(options, k) * value
                weights[name] += weight_of(options, k)
            if options.contiguous and token not in ids:
                break
    return {name: sums[name] / weights[name] for name in sums} | {"weight": weights["cross_entropy"]}


@pytest.mark.parametrize("vocabulary", [None, REDUCED], ids=["whole", "reduced"])
@pytest.mark.parametrize(
    "options",
    [
        ObjectiveOptions(losses=ALL, rate=0.8, confidence_every=1),
        ObjectiveOptions(losses=ALL, decay="exponential", rate=2.0, contiguous=True, confidence_every=1),
    ],
    ids=["power", "contiguous"],
)
def test_losses_equal_loops(options: ObjectiveOptions, vocabulary: DraftVocabulary | None) -> None:
    slots = make_slots(V if vocabulary is None else len(vocabulary.to_target))
    loss, _ = run(slots, options, vocabulary)
    expected = by_loops(slots, options, vocabulary)
    assert float(loss.weight) == pytest.approx(expected.pop("weight"), rel=1e-5)
    found = {name: float(term / loss.weight) for name, term in loss.terms.items()}
    assert found == pytest.approx(expected, rel=1e-4)
    total = sum(factor * expected[name] for name, factor in ALL.items())
    assert float(loss.sum.detach() / loss.weight) == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize("vocabulary", [None, REDUCED], ids=["whole", "reduced"])
def test_confidence_for_greedy_decoding_learns_agreement(vocabulary: DraftVocabulary | None) -> None:
    """The target's likeliest token counts wherever it is, in the draft's vocabulary or not."""
    ids = torch.arange(V) if vocabulary is None else vocabulary.to_target
    slots, batch, tables = make_slots(len(ids)), make_batch(), Tables()
    laws = batch.hidden.flatten(0, 1) @ tables.head.t() + tables.head_bias
    told = laws[slots[0].at.clamp_max(len(laws) - 1)][:, ids]
    slots[0] = replace(slots[0], logits=told)  # agrees wherever the target's choice can be drafted
    options = ObjectiveOptions(
        losses={"cross_entropy": 1.0, "confidence": 1.0}, confidence_of="agreement", confidence_every=1
    )
    loss, _ = run(slots, options, vocabulary)
    losses, seen = [], set()
    for slot in slots:
        for chain in range(N):
            if slot.known[chain]:
                best = int(laws[slot.at[chain]].argmax())
                stands = best == int(ids[slot.logits[chain].argmax()])
                seen.add((stands, best in ids))
                sure = cast(Tensor, slot.confidence)[chain].double().sigmoid()
                losses.append(-float(sure.log() if stands else (1 - sure).log()))
    assert {stands for stands, _ in seen} == {True, False}
    assert vocabulary is None or (False, False) in seen
    found = float(loss.terms["confidence"] / loss.weight)
    assert found == pytest.approx(sum(losses) / len(losses), rel=1e-4)


@pytest.mark.parametrize("vocabulary", [None, REDUCED], ids=["whole", "reduced"])
@pytest.mark.parametrize("decay", ["exponential", "dpace"])
def test_what_is_not_known_contributes_nothing(decay: Any, vocabulary: DraftVocabulary | None) -> None:
    options = ObjectiveOptions(losses=ALL, decay=decay, rate=0.5, confidence_every=1)
    slots = make_slots(V if vocabulary is None else len(vocabulary.to_target))
    loss, gradients = run(slots, options, vocabulary)
    noise = [
        replace(
            slot,
            logits=torch.where(slot.known.unsqueeze(1), slot.logits, 7.0 - slot.logits),
            at=slot.at.masked_fill(~slot.known, 3),
            hidden=torch.where(slot.known.unsqueeze(1), cast(Tensor, slot.hidden), 9.0),
            confidence=torch.where(slot.known, cast(Tensor, slot.confidence), -9.0),
        )
        for slot in slots
    ]
    other, others = run(noise, options, vocabulary)
    assert torch.equal(loss.sum, other.sum)
    assert torch.equal(loss.weight, other.weight)
    for slot, one, two in zip(slots, gradients, others, strict=True):
        assert torch.equal(one[slot.known], two[slot.known])
        assert not one[~slot.known].any()
    changed = [replace(slots[0], logits=slots[0].logits + torch.eye(N, slots[0].logits.shape[1])), *slots[1:]]
    assert not torch.equal(loss.sum, run(changed, options, vocabulary)[0].sum)


def test_a_token_outside_the_draft_vocabulary_is_not_counted() -> None:
    slots = make_slots(len(REDUCED.to_target))
    options = ObjectiveOptions(losses={"cross_entropy": 1.0, "total_variation": 1.0})
    _, gradients = run(slots, options, REDUCED)
    batch = make_batch()
    missed = 0
    for slot, gradient in zip(slots, gradients, strict=True):
        labels = batch.labels(slot.at.masked_fill(~slot.known, 0))
        lacks = REDUCED.from_target[labels] < 0
        missed += int((lacks & slot.known).sum())
        assert gradient[slot.known & ~lacks].any(-1).all()
        assert not gradient[lacks].any()
    assert missed > 0


def test_sums_of_batches_add_up() -> None:
    options = ObjectiveOptions(losses={"cross_entropy": 0.5, "divergence": 1.0}, rate=0.7)
    slots = make_slots()
    halves = [[_chains(slot, part) for slot in slots] for part in (slice(0, 3), slice(3, N))]
    whole, gradients = run(slots, options)
    parts = [run(half, options) for half in halves]
    assert torch.allclose(whole.sum, parts[0][0].sum + parts[1][0].sum)
    assert torch.allclose(whole.weight, parts[0][0].weight + parts[1][0].weight)
    for k, gradient in enumerate(gradients):
        assert torch.allclose(gradient, torch.cat([part[1][k] for part in parts]))


@pytest.mark.parametrize("vocabulary", [None, REDUCED], ids=["whole", "reduced"])
def test_dpace_weighs_by_the_chain(vocabulary: DraftVocabulary | None) -> None:
    """A token that the draft lacks has a confidence of 0, which lowers what those around it weigh."""
    options = ObjectiveOptions(losses={"cross_entropy": 1.0}, decay="dpace", rate=0.5)
    ids = list(range(V)) if vocabulary is None else vocabulary.to_target.tolist()
    slots = make_slots(len(ids))
    loss, _ = run(slots, options, vocabulary)
    batch, expected, count = make_batch(), 0.0, 0
    for chain in range(N):
        labels = [int(batch.tokens.flatten()[slot.at[chain] + 1]) if slot.known[chain] else -1 for slot in slots]
        count += sum(label in ids for label in labels)
        probs: list[float] = []
        for slot, label in zip(slots, labels, strict=True):
            if label < 0:
                break
            probs.append(float(slot.logits[chain].softmax(-1)[ids.index(label)]) if label in ids else 0.0)
        smoothed = [0.5 * q + 0.5 for q in probs]
        products = torch.tensor(smoothed, dtype=torch.float64).cumprod(0)
        expected += sum(-float(products[j:].sum()) * log(q) for j, q in enumerate(probs) if q > 0.0)
    assert float(loss.sum.detach()) == pytest.approx(expected, rel=1e-4)
    assert float(loss.weight) == count


def test_confidence_learns_at_some_positions_of_a_reduced_vocabulary() -> None:
    slots = make_slots(len(REDUCED.to_target))
    odds = [cast(Tensor, slot.confidence).clone().requires_grad_(True) for slot in slots]
    shown = [replace(slot, confidence=each) for slot, each in zip(slots, odds, strict=True)]
    run(shown, ObjectiveOptions(losses={"confidence": 1.0}, confidence_every=2), REDUCED)
    for slot, each in zip(slots, odds, strict=True):
        assert torch.equal(cast(Tensor, each.grad) != 0, slot.known & (slot.at % 2 == 0))


def test_no_chains_make_no_loss() -> None:
    options = ObjectiveOptions(losses=ALL, confidence_every=1)
    for slots in ([_chains(slot, slice(0, 0)) for slot in make_slots()], [_unknown(slot) for slot in make_slots()]):
        loss, gradients = run(slots, options)
        assert float(loss.sum.detach()) == float(loss.weight) == 0.0
        assert not any(each.any() for each in gradients)


@pytest.mark.parametrize("name", ["feature", "confidence"])
def test_a_loss_that_the_drafter_cannot_serve_is_refused(name: Any) -> None:
    slots = [replace(slot, hidden=None, confidence=None) for slot in make_slots()]
    with pytest.raises(RecipeError, match=name):
        run(slots, ObjectiveOptions(losses={name: 1.0}))


@pytest.mark.parametrize(
    "wrong",
    [
        {"losses": {}},
        {"losses": {"cross_entropy": 0.0}},
        {"losses": {"cross_entropy": -1.0}},
        {"losses": {"entropy": 1.0}},
        {"losses": {"nla": 1.0}, "decay": "power", "rate": 2.0},
        {"losses": {"nla": 1.0}, "rate": 0.0},
    ],
)
def test_options_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ObjectiveOptions(**wrong)


def test_gamma_of_published_blocks() -> None:
    assert [block_gamma(size) for size in (7, 8, 10, 16)] == [4.0, 4.0, 5.0, 7.0]


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_published_objectives_run(name: str) -> None:
    loss, gradients = run(make_slots(), OBJECTIVES[name])
    assert set(loss.terms) == set(OBJECTIVES[name].losses)
    assert all(each.isfinite().all() and each.any() for each in gradients)


def _chains(slot: Slot, part: slice) -> Slot:
    return Slot(
        slot.logits[part],
        slot.at[part],
        slot.known[part],
        cast(Tensor, slot.hidden)[part],
        cast(Tensor, slot.confidence)[part],
    )


def _unknown(slot: Slot) -> Slot:
    return replace(slot, known=torch.zeros_like(slot.known))

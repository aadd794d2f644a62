"""Acceptance figures against loops over whole laws and chains."""

from __future__ import annotations

from math import isnan

import pytest
import torch
from torch import Tensor

from specflow.law import DraftVocabulary
from specflow.train import acceptance
from specflow.train.acceptance import Acceptance, JudgedChains, judge
from specflow.train.batch import Batch, Slot, TargetLaw
from specflow.types import Features

V, H, K, N, WIDTH = 9, 5, 3, 40, 60
REDUCED = DraftVocabulary(torch.tensor([1, 2, 4, 5, 8]), V)


def make(vocabulary: DraftVocabulary | None, seed: int = 0) -> tuple[list[Slot], TargetLaw, Tensor]:
    made = torch.Generator().manual_seed(seed)
    hidden = torch.randn(1, WIDTH, H, generator=made)
    tokens = torch.zeros(1, WIDTH, dtype=torch.int64)
    batch = Batch(tokens, tokens == 0, tokens == 0, Features({}, hidden_post=hidden), key=0)
    head = torch.randn(V, H, generator=made)
    start = torch.randint(0, WIDTH - K, (N,), generator=made)
    size = V if vocabulary is None else len(vocabulary.to_target)
    slots = []
    for k in range(K):
        known = torch.rand(N, generator=made) > 0.2
        near = (hidden[0] @ head.t())[start + k]
        near = near if vocabulary is None else near[:, vocabulary.to_target]
        logits = near + torch.randn(N, size, generator=made)
        at = (start + k).masked_fill(~known, -5)
        slots.append(Slot(logits, at, known, confidence=torch.randn(N, generator=made)))
    laws = (hidden[0].double() @ head.double().t()).softmax(-1)
    return slots, TargetLaw(batch, head, None, vocabulary), laws


def spread(q: Tensor, vocabulary: DraftVocabulary | None) -> Tensor:
    if vocabulary is None:
        return q
    whole = torch.zeros(V, dtype=q.dtype)
    whole[vocabulary.to_target] = q
    return whole


@pytest.mark.parametrize("vocabulary", [None, REDUCED], ids=["whole", "reduced"])
@pytest.mark.parametrize("rows", [7, 256])
def test_chains_equal_loops(vocabulary: DraftVocabulary | None, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "LAW_ROWS", rows)
    slots, law, laws = make(vocabulary)
    judged = judge(slots, law)
    for k, slot in enumerate(slots):
        for chain in range(N):
            assert bool(judged.known[chain, k]) == bool(slot.known[chain])
            if not slot.known[chain]:
                assert float(judged.accept[chain, k]) == 0.0
                continue
            p, q = laws[slot.at[chain]], spread(slot.logits[chain].double().softmax(-1), vocabulary)
            stands = sum(min(float(p[v]), float(q[v])) for v in range(V))
            assert float(judged.accept[chain, k]) == pytest.approx(stands, abs=1e-5)
            assert bool(judged.agree[chain, k]) == (int(p.argmax()) == int(q.argmax()))


def test_figures_equal_loops() -> None:
    slots, law, _ = make(REDUCED)
    judged = judge(slots, law)
    total = Acceptance(K)
    for part in (slice(0, 11), slice(11, N)):
        total.add(JudgedChains(judged.accept[part], judged.agree[part], judged.known[part]))
    report = total.report()
    length, greedy_length = 1.0, 1.0
    for k in range(K):
        known = [c for c in range(N) if judged.known[c, k]]
        reached = [c for c in range(N) if judged.known[c, : k + 1].all()]
        alphas = [float(judged.accept[c, k]) for c in known]
        up_to = [float(judged.accept[c, : k + 1].prod()) for c in reached]
        before = [float(judged.accept[c, :k].prod()) for c in reached]
        greedy = [float(judged.agree[c, : k + 1].all()) for c in reached]
        tried = [float(judged.agree[c, :k].all()) for c in reached]
        assert report.counts[k] == len(known)
        assert report.accept_rate[k] == pytest.approx(sum(alphas) / len(known))
        assert report.agreement[k] == pytest.approx(sum(float(judged.agree[c, k]) for c in known) / len(known))
        assert report.survival[k] == pytest.approx(sum(up_to) / len(reached))
        assert report.conditional[k] == pytest.approx(sum(up_to) / sum(before))
        assert report.greedy_survival[k] == pytest.approx(sum(greedy) / len(reached))
        assert report.greedy_conditional[k] == pytest.approx(sum(greedy) / sum(tried))
        length += report.survival[k]
        greedy_length += report.greedy_survival[k]
    assert report.length == pytest.approx(length)
    assert report.greedy_length == pytest.approx(greedy_length)


def test_length_is_that_of_all_outcomes() -> None:
    """Every way in which three tokens stand or fall, with its probability and the tokens it gives."""
    alphas = (0.7, 0.5, 0.9)
    total = Acceptance(3)
    total.add(JudgedChains(torch.tensor([alphas], dtype=torch.float64), torch.tensor([[True, False, True]]), _all(1)))
    expected = 0.0
    for outcome in range(8):
        stood = [bool(outcome >> k & 1) for k in range(3)]
        chance = 1.0
        for alpha, each in zip(alphas, stood, strict=True):
            chance *= alpha if each else 1.0 - alpha
        expected += chance * (1 + [*stood, False].index(False))
    assert total.report().length == pytest.approx(expected)
    assert total.report().greedy_length == 2.0


def test_a_draft_that_is_the_target_is_always_accepted() -> None:
    slots, law, laws = make(None)
    same = [Slot(laws[slot.at.clamp_min(0)].log().float(), slot.at, slot.known) for slot in slots]
    total = Acceptance(K)
    total.add(judge(same, law))
    assert total.report().length == pytest.approx(1.0 + K, abs=1e-5)
    assert total.report().greedy_length == 1.0 + K


def test_sums_of_processes_add_up() -> None:
    slots, law, _ = make(None)
    judged = judge(slots, law)
    whole, parts = Acceptance(K), [Acceptance(K), Acceptance(K)]
    whole.add(judged)
    for number, each in enumerate(parts):
        part = slice(number * 9, 9 if number == 0 else N)
        each.add(JudgedChains(judged.accept[part], judged.agree[part], judged.known[part]))
    joined = Acceptance(K)
    joined.sums = parts[0].sums + parts[1].sums
    assert joined.report().length == pytest.approx(whole.report().length)
    assert joined.report().counts == whole.report().counts


def test_nothing_known_is_no_figure() -> None:
    total = Acceptance(2)
    total.add(JudgedChains(torch.zeros(3, 2).double(), torch.zeros(3, 2).bool(), torch.zeros(3, 2).bool()))
    report = total.report()
    assert report.counts == (0, 0)
    assert all(isnan(each) for each in (*report.accept_rate, *report.survival, report.length))


def _all(count: int) -> Tensor:
    return torch.ones(count, 3, dtype=torch.bool)

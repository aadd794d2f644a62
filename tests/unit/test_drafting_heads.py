"""Medusa heads over whole texts: the logits of drafting, where chains begin, what is trained and what is saved."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from forced import TABLES, TARGET, all_places, check_slots, reduced_ids, replay, texts, trainable

from specflow.draft.sources.medusa import SOURCE, MedusaConfig, MedusaModel
from specflow.draft.trainable import Trainable
from specflow.errors import GraphError
from specflow.train.batch import Batch, Drafting
from specflow.train.drafting import DraftingOptions, drafting_for
from specflow.types import Features

K = 3
FORMS: dict[str, dict[str, object]] = {
    "plain": {},
    "two-layers": {"num_layers": 2},
    "own-outputs": {"own_heads": True},
    "markov": {"corrector": "markov"},
    "gated": {"corrector": "gated", "own_heads": True},
    "rnn": {"corrector": "rnn", "confidence_head": True},
    "trusted": {"confidence_head": True},
}


def medusa(reduced: bool = False, **extra: object) -> Trainable:
    sizes = {"draft_vocab_size": len(reduced_ids())} if reduced else {}
    config = MedusaConfig(**{"num_heads": K, "corrector_rank": 6, **sizes, **extra})  # type: ignore[arg-type]
    return trainable(SOURCE, config, K, reduced)


def drafting(made: Trainable, depth: int = K) -> Drafting:
    return drafting_for(made, DraftingOptions(depth))


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
@pytest.mark.parametrize("reduced", [False, True], ids=["", "reduced"])
def test_logits_and_confidence_are_those_of_drafting(form: dict[str, object], reduced: bool) -> None:
    made, batch, places = medusa(reduced, **form), texts(), all_places()
    slots = drafting(made)(batch)
    assert len(slots) == K
    check_slots(slots, batch, places, replay(made, MedusaModel, batch, places, K))
    assert slots[0].logits.shape[1] == (len(reduced_ids()) if reduced else TARGET.info.vocab_size)


def test_fewer_positions_than_heads_can_be_drafted() -> None:
    made, batch = medusa(), texts()
    deep, flat = drafting(made)(batch), drafting(made, 2)(batch)
    assert [torch.equal(one.logits, other.logits) for one, other in zip(flat, deep, strict=False)] == [True, True]
    with pytest.raises(GraphError, match="at most its 3 heads"):
        drafting(made, 4)


@torch.no_grad()
def test_a_chain_reads_the_row_before_its_anchor_alone() -> None:
    made, batch, places = drafting(medusa()), texts(), all_places()
    hidden, plain = batch.hidden.clone(), made(batch)
    hidden[0, 20] += 1.0
    odd = made(replace(batch, features=Features({}, hidden_post=hidden)))
    for before, after in zip(plain, odd, strict=True):
        assert (before.logits != after.logits).any(-1).tolist() == [place == (0, 21) for place in places]


@torch.no_grad()
def test_a_corrector_reads_the_tokens_before_a_position() -> None:
    """Markov: the one before; RNN: all of the block, the anchor included."""
    batch, places = texts(), all_places()
    tokens = batch.tokens.clone()
    tokens[0, 20] = (tokens[0, 20] + 1) % 40
    for kind in ("markov", "rnn"):
        made = drafting(medusa(corrector=kind))
        slots = zip(made(batch), made(replace(batch, tokens=tokens)), strict=True)
        for k, (before, after) in enumerate(slots):
            earliest = 20 - k
            anchors = range(earliest, 21) if kind == "rnn" else [earliest]
            changed = (before.logits != after.logits).any(-1).tolist()
            assert changed == [text == 0 and at in anchors for text, at in places]


def total(made: Trainable, batch: Batch) -> torch.Tensor:
    slots = drafting(made)(batch)
    known = torch.stack([slot.logits.log_softmax(-1)[slot.known, 3].sum() for slot in slots])
    return known.sum() + sum(slot.confidence.sum() for slot in slots if slot.confidence is not None)


@pytest.mark.parametrize("reduced", [False, True], ids=["", "reduced"])
def test_gradients_reach_all_that_is_trained_and_nothing_borrowed(reduced: bool) -> None:
    made = medusa(reduced, corrector="rnn", confidence_head=True)
    total(made, texts()).backward()
    parameters = list(made.parameters())
    assert len(parameters) == 2 * K + 3 + 2  # blocks of the heads, corrector without bias, confidence head
    assert all(each.grad is not None and bool(each.grad.any()) for each in parameters)
    assert TABLES.head.grad is None


def test_a_step_of_training_is_saved() -> None:
    """The drafter made from the saved tensors says what the trained one says, not what it said before."""
    made, batch, places = medusa(True, corrector="markov", own_heads=True), texts(), all_places()
    first = drafting(made)(batch)
    total(made, batch).backward()
    before = {name: tensor.clone() for name, tensor in made.state().items()}
    with torch.no_grad():
        for each in made.parameters():
            each -= 0.01 * each.grad  # type: ignore[operator]
    assert {name for name, tensor in made.state().items() if torch.equal(tensor, before[name])} == {"d2t"}
    slots = drafting(made)(batch)
    assert not torch.equal(slots[0].logits, first[0].logits)
    check_slots(slots, batch, places, replay(made, MedusaModel, batch, places, K))

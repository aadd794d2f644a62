"""Block backbones over whole texts: the logits of drafting, who sees whom, what is trained and what is saved."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forced import (
    ANSWERS,
    TABLES,
    TAPS,
    TARGET,
    all_places,
    check_slots,
    context,
    reduced_ids,
    replay,
    texts,
    trainable,
)
from safetensors.torch import save_file

from specflow.draft.backbone import ContextBackbone
from specflow.draft.borrowed import BorrowedHead
from specflow.draft.sources.dflash import SOURCE as DFLASH
from specflow.draft.sources.dflash import DFlashConfig
from specflow.draft.sources.dspark import SOURCE as DSPARK
from specflow.draft.sources.dspark import DSparkConfig
from specflow.draft.trainable import Trainable
from specflow.errors import GraphError
from specflow.train.batch import Batch, Drafting
from specflow.train.drafting import DraftingOptions, drafting_for
from specflow.types import DraftBudget, Features, Observation, Sampling

K = 4
FORMS: dict[str, dict[str, object]] = {
    "fill-in": {},
    "shifted": {"layout": "shifted"},
    "causal": {"causal": True},
    "window": {"window": 5},
    "window-1": {"window": 1},
    "window-both-ways": {"window": 3, "causal": False},
    "window-from-anchor": {"window": 4, "window_from": "anchor"},
    "window-from-anchor-both-ways": {"window": 3, "window_from": "anchor", "causal": False},
    "mixed-layers": {"window": 4, "layer_types": ("full_attention", "sliding_attention")},
    "own-sizes": {"num_heads": 2, "num_kv_heads": 1, "head_width": 12, "mlp_size": 20, "rope_theta": 500.0},
    "scaled-and-capped": {"logit_scale": 0.5, "logit_cap": 3.0, "mask_token": 7},
    "wide-block": {"block_size": 7},
    "swapped-taps": {"taps": (0, -1)},
    "trusted": {"confidence_head": True},
}
OVER: dict[str, dict[str, object]] = {
    "markov": {},
    "gated": {"corrector": "gated", "window": 4},
    "rnn": {"corrector": "rnn", "logit_cap": 2.0},
    "fill-in": {"corrector": "rnn", "layout": "fill_in"},
    "blind-confidence": {"confidence_tokens": False, "confidence_bias": False},
    "plain": {"corrector": None},
}


def dflash(reduced: bool = False, **extra: object) -> Trainable:
    config = DFlashConfig(**{"taps": TAPS, "num_layers": 2, "seed": 5, **extra})  # type: ignore[arg-type]
    return trainable(DFLASH, config, K, reduced)


def dspark(reduced: bool = False, **extra: object) -> Trainable:
    config = DSparkConfig(**{"taps": TAPS, "num_layers": 2, "corrector_rank": 6, **extra})  # type: ignore[arg-type]
    return trainable(DSPARK, config, K, reduced)


def everywhere(made: Trainable) -> Drafting:
    """Blocks at all anchors."""
    return drafting_for(made, DraftingOptions(K, anchors=100))


def anchors(batch: Batch, most: int = 100) -> list[tuple[int, int]]:
    """Text and position of each chain's anchor."""
    first = drafting_for(dflash(), DraftingOptions(K, most))(batch)[0]
    return [(int(at) // batch.tokens.shape[1], int(at) % batch.tokens.shape[1]) for at in first.at]


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_dflash_logits_are_those_of_drafting(form: dict[str, object]) -> None:
    made, batch, places = dflash(**form), texts(), all_places()
    slots = everywhere(made)(batch)
    depth = made.options.slots(K) - made.options.first_slot  # type: ignore[attr-defined]
    assert len(slots) == depth
    check_slots(slots, batch, places, replay(made, ContextBackbone, batch, places, depth))


@pytest.mark.parametrize("form", OVER.values(), ids=list(OVER))
@pytest.mark.parametrize("reduced", [False, True], ids=["", "reduced"])
def test_dspark_logits_and_confidence_are_those_of_drafting(form: dict[str, object], reduced: bool) -> None:
    sizes = {"draft_vocab_size": len(reduced_ids())} if reduced else {}
    made, batch, places = dspark(reduced, **form, **sizes), texts(), all_places()
    slots = everywhere(made)(batch)
    check_slots(slots, batch, places, replay(made, ContextBackbone, batch, places, K))
    assert slots[0].logits.shape[1] == (len(reduced_ids()) if reduced else TARGET.info.vocab_size)


def test_rows_of_the_targets_head_serve_a_reduced_vocabulary() -> None:
    made, batch, places = dflash(True, draft_vocab_size=len(reduced_ids()), own_head=False), texts(), all_places()
    check_slots(everywhere(made)(batch), batch, places, replay(made, ContextBackbone, batch, places, K))
    assert any(isinstance(module, BorrowedHead) for module in made.network.modules())


def test_anchors_are_of_the_answer_and_followed_by_a_token_of_it() -> None:
    assert anchors(texts()) == all_places()
    few = anchors(texts(), most=6)
    assert set(few) < set(all_places())
    assert [sum(text == each for each, _ in few) for text in range(len(ANSWERS))] == [6, 6, 1, 6]
    assert len(set(few)) == len(few)


def test_the_key_of_a_batch_chooses_its_anchors() -> None:
    assert anchors(texts(1), 6) == anchors(texts(1), 6)
    assert anchors(texts(1), 6) != anchors(texts(2), 6)


def test_a_chain_ends_with_its_answer() -> None:
    """Beyond the end, the next answer of a conversation is nothing that this chain would reach."""
    batch = texts()
    answer = batch.answer.clone()
    answer[0, 20] = False
    slots = everywhere(dflash())(replace(batch, answer=answer))
    at = [int(each) for each in slots[0].at]
    assert [bool(slot.known[at.index(18)]) for slot in slots] == [True, False, False, False]
    assert [bool(slot.known[at.index(21)]) for slot in slots] == [True] * K
    assert not {19, 20} & set(at)


@pytest.mark.parametrize("sizes", [{}, {"draft_vocab_size": len(reduced_ids())}], ids=["", "reduced"])
def test_a_batch_without_an_answer_has_no_chains(sizes: dict[str, object]) -> None:
    batch = texts()
    slots = everywhere(dspark(bool(sizes), **sizes))(replace(batch, answer=torch.zeros_like(batch.answer)))
    assert [len(slot.at) for slot in slots] == [0] * K
    assert slots[0].logits.shape == (0, sizes.get("draft_vocab_size", TARGET.info.vocab_size))


def moved(batch: Batch, text: int, position: int) -> Batch:
    """Other features at one position of one text."""
    taps = {tap: values.clone() for tap, values in batch.features.taps.items()}
    for values in taps.values():
        values[text, position] += 1.0
    return replace(batch, features=Features(taps, hidden_post=batch.hidden))


@pytest.mark.parametrize("window", [None, 6])
@torch.no_grad()
def test_a_block_sees_the_features_before_its_anchor_alone(window: int | None) -> None:
    """Of all chains, bits change in those that see the position with other features, and in no others."""
    drafting, batch, places = everywhere(dflash(window=window)), texts(), all_places()
    plain, reach = drafting(batch), window or 100
    for text, position in ((0, 0), (0, 2), (0, 3), (0, 20), (0, 39), (1, 8), (1, 15), (3, 30)):
        # Later slots read the first one, whose window reaches furthest back.
        expected = [each == text and anchor - reach < position < anchor for each, anchor in places]
        for before, after in zip(plain, drafting(moved(batch, text, position)), strict=True):
            assert (before.logits != after.logits).any(-1).tolist() == expected


@torch.no_grad()
def test_only_the_anchors_token_is_read_without_a_corrector() -> None:
    drafting, batch, places = everywhere(dflash()), texts(), all_places()
    plain, tokens = drafting(batch), batch.tokens.clone()
    tokens[0, 20] = (tokens[0, 20] + 1) % 40
    odd = drafting(replace(batch, tokens=tokens))
    for before, after in zip(plain, odd, strict=True):
        changed = (before.logits != after.logits).any(-1).tolist()
        assert changed == [place == (0, 20) for place in places]


@pytest.mark.parametrize("made", [dflash, dspark], ids=["dflash", "dspark"])
def test_gradients_reach_all_that_is_trained_and_nothing_borrowed(made: object) -> None:
    for extra in ({}, {"draft_vocab_size": len(reduced_ids())}):
        one = made(bool(extra), **extra)  # type: ignore[operator]
        slots = everywhere(one)(texts())
        total = sum(slot.logits.log_softmax(-1)[slot.known, 3].sum() for slot in slots)
        total = total + sum(slot.confidence.sum() for slot in slots if slot.confidence is not None)
        total.backward()
        parameters = list(one.parameters())
        assert len(parameters) == len(list(one.modules().parameters()))
        assert all(each.grad is not None and bool(each.grad.any()) for each in parameters)
    assert TABLES.head.grad is None
    assert TABLES.embedding.grad is None


def test_a_step_of_training_is_saved_and_drafted_with(tmp_path: Path) -> None:
    """Greedy drafts of the source's own drafter, from the checkpoint, are the likeliest tokens of the slots."""
    made, batch = dflash(True, draft_vocab_size=len(reduced_ids())), texts()
    drafting = everywhere(made)
    torch.stack([slot.logits.logsumexp(-1).mean() for slot in drafting(batch)]).sum().backward()
    before = {name: tensor.clone() for name, tensor in made.state().items()}
    with torch.no_grad():
        for each in made.parameters():
            each -= 0.5 * each.grad
    assert {name for name, tensor in made.state().items() if torch.equal(tensor, before[name])} == {"d2t"}
    save_file({name: tensor.contiguous() for name, tensor in made.state().items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(made.config()))
    config = DFlashConfig(weights=str(tmp_path))
    drafter = DFLASH.build(config, context(config, K))
    slots, places = drafting(batch), all_places()
    for chain in (0, 17, 40, len(places) - 6):
        text, anchor = places[chain]
        cache = TARGET.new_cache(1, 64)
        drafter.reset(1, cache)
        drafter.start(0, [3], Sampling(temperature=0.0))
        taps = {tap: values[text : text + 1, :anchor] for tap, values in batch.features.taps.items()}
        said = (tuple(batch.tokens[text, 1 : anchor + 1].tolist()),)
        drafter.observe(Observation(said, (0,), (anchor,), Features(taps)), [0])
        cache.keep([anchor])
        block = drafter.propose([int(batch.tokens[text, anchor])], DraftBudget((K,)), None)  # type: ignore[arg-type]
        assert block is not None
        assert block.tokens[0].tolist() == [int(reduced_ids()[slot.logits[chain].argmax()]) for slot in slots]


def test_a_block_that_is_too_narrow_is_refused() -> None:
    made = dflash(block_size=5)
    with pytest.raises(GraphError, match=r"5 draft positions to train\n.*at most the 4 of its blocks"):
        drafting_for(made, DraftingOptions(5, 2))

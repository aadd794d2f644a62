"""MTP and EAGLE over whole texts: logits of every slot are those of a round of decoding, and gradients go where due."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_steps import FEATURES, NUM_TAPS, TARGET, TEXT, WIDTH, Config, Stage
from safetensors.torch import save_file
from tiny import VOCAB, tiny_target
from torch import Tensor, nn

from specflow.draft.base import SourceContext
from specflow.draft.borrowed import BorrowedHead, TargetTables
from specflow.draft.feature_model import FeatureModel
from specflow.draft.nn.weights import SeededTensors
from specflow.draft.sources import eagle, mtp
from specflow.draft.sources.eagle import EagleConfig
from specflow.draft.sources.mtp import MTPConfig
from specflow.draft.trainable import Trainable
from specflow.errors import GraphError
from specflow.train.batch import Batch, Slot
from specflow.train.drafting import DraftingOptions, FeatureDrafting, drafting_for
from specflow.train.drafting.chain_attention import attend_densely, attend_in_flashes
from specflow.types import Features

TABLES = TargetTables(tiny_target(torch.float32))
DEPTH, LONGEST = 4, 24
ANSWERS = ((9, 24), (1, 7), (5, 5), (3, 18))
"""Where answers begin and texts end: one fills the batch, one begins at once, one is empty, one is padded."""
BASES = [(0, base) for base in range(8, 22)] + [(1, base) for base in range(5)] + [(3, base) for base in range(2, 16)]
"""Chains: the anchor, and the token after it, are of the answer."""
SIZES: dict[str, Any] = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_width": 6,
    "mlp_size": 20,
    "rope_theta": 500.0,
    "eps": 1e-4,
}
SMALL: dict[str, Any] = {"taps": (-1, 0, 1), "draft_vocab_size": 20}
CASES: dict[str, Config] = {
    "mtp": MTPConfig(),
    "mtp-other": MTPConfig(order="hidden_first", recycle="pre_norm", hidden="pre_norm", zero_first=True),
    "mtp-modules": MTPConfig(num_modules=4),
    "mtp-modules-other": MTPConfig(num_modules=5, order="hidden_first", recycle="pre_norm", zero_first=True),
    "mtp-unrolled": MTPConfig(unrolled=4, **SIZES),
    "eagle1": EagleConfig(variant=1, confidence_head=True),
    "eagle3": EagleConfig(taps=(-1, 0, 1), confidence_head=True),
    "eagle3.1": EagleConfig(taps=(1, 0, -1), fc_norm=True, norm_output=True, **SIZES),
    "eagle3-normed": EagleConfig(taps=(-1, 0, 1), norm_before_fc=True, norm_before_residual=True),
    "eagle3-own-head": EagleConfig(own_head=True, **SMALL),
    "eagle3-borrowed-head": EagleConfig(own_head=False, **SMALL),
}
MEMBERS = pytest.mark.parametrize("config", CASES.values(), ids=CASES)


def trainable_of(config: Config) -> Trainable:
    source: Any = mtp if isinstance(config, MTPConfig) else eagle
    context = SourceContext(target=TABLES, k=DEPTH)  # type: ignore[arg-type]
    size, given = getattr(config, "draft_vocab_size", None), {}
    if size is not None:
        given = {"d2t": torch.arange(size) * VOCAB // size - torch.arange(size)}
    made: Trainable = source.trainable(config, context, SeededTensors(config.seed, given))
    for parameter in made.parameters():
        parameter.requires_grad_(True)
    return made


def batch_of(config: Config, tokens: Tensor = TEXT, features: Tensor = FEATURES) -> Batch:
    """The requests of `Stage` as texts; padding holds nonsense that nobody may see."""
    rows = features[:, :LONGEST].float().view(len(features), LONGEST, NUM_TAPS, WIDTH)
    begins, ends = (torch.tensor(side)[: len(tokens), None] for side in zip(*ANSWERS, strict=True))
    places = torch.arange(LONGEST)
    valid = places < ends
    taps = {layer: rows[:, :, index] for index, layer in enumerate(getattr(config, "taps", ()))}
    found = Features(taps, hidden_pre=rows[:, :, 0], hidden_post=rows[:, :, 0])
    return Batch(tokens[:, :LONGEST], valid, valid & (places >= begins), found, key=0)


def slots_of(config: Config, batch: Batch | None = None, made: Trainable | None = None) -> list[Slot]:
    drafting = drafting_for(made or trainable_of(config), DraftingOptions(DEPTH))
    return list(drafting(batch_of(config) if batch is None else batch))


def model_of(config: Config) -> FeatureModel:
    source: Any = mtp if isinstance(config, MTPConfig) else eagle
    model: FeatureModel = source.build(config, SourceContext(target=TARGET, k=DEPTH))._model
    return model


def drafted(model: FeatureModel, text: int, base: int) -> tuple[Tensor, Tensor]:
    """Logits and hidden rows of a round that begins after a text's token at `base` + 1, its next tokens forced.

    # [K, Vd], [K, H]
    """
    stage = Stage(model, [text])
    stage.commit([base + 1])
    steps = model.open(stage.anchors(), [True])
    logits, hidden = [steps.logits], [steps.hidden]
    for token in TEXT[text, base + 2 : base + 1 + DEPTH]:
        logits.append(steps.extend(token.view(1, 1)).squeeze(1))
        hidden.append(steps.hidden)
    return torch.cat(logits), torch.cat(hidden)


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert bool(((found - expected).abs().max() < 1e-4 * expected.abs().max().clamp_min(1.0)).all())


def compare(slots: list[Slot], config: Config) -> None:
    """Every slot against a round of decoding."""
    assert len(slots) == DEPTH
    model = model_of(config)
    for chain, (text, base) in enumerate(BASES):
        expected, hidden = drafted(model, text, base)
        for step, slot in enumerate(slots):
            known = base + step + 2 < ANSWERS[text][1]
            assert slot.logits.shape == (len(BASES), expected.shape[1])
            assert bool(slot.known[chain]) == known
            if not known:
                continue
            assert int(slot.at[chain]) == text * LONGEST + base + step + 1
            assert_close(slot.logits[chain], expected[step])
            if getattr(config, "variant", 3) == 1:
                assert slot.hidden is not None
                assert_close(slot.hidden[chain], hidden[step])


@MEMBERS
def test_slots_equal_rounds_of_decoding(config: Config) -> None:
    compare(slots_of(config), config)


@pytest.mark.parametrize("name", ["mtp-modules", "mtp-unrolled", "eagle1", "eagle3-own-head", "eagle3-borrowed-head"])
def test_what_was_trained_drafts_the_same_once_it_is_stored(name: str, tmp_path: Path) -> None:
    made = trainable_of(CASES[name])
    numbers = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=numbers)
    save_file({name: tensor.contiguous() for name, tensor in made.state().items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(made.config()))
    kind = type(CASES[name])
    fixed = {"variant": 1} if getattr(CASES[name], "variant", 3) == 1 else {}
    compare(slots_of(CASES[name], made=made), kind(weights=str(tmp_path), **fixed))  # type: ignore[arg-type]


def changed(one: list[Slot], other: list[Slot]) -> list[list[bool]]:
    """Whether the bits of logits differ, where they are judged.  # [K, n]"""
    return [((mine.logits != its.logits).any(-1) & mine.known).tolist() for mine, its in zip(one, other, strict=True)]


@MEMBERS
def test_a_slot_follows_from_its_own_past_alone(config: Config) -> None:
    """Slot s of a chain with base i reads tokens up to i + s and features up to i, all of them, and nothing else."""
    made = trainable_of(config)
    plain = slots_of(config, made=made)
    first = 2 if getattr(config, "zero_first", False) else 1  # the row at position 0 reads the token after it
    for text, place in ((0, 12), (0, 1), (3, 9), (1, 9), (2, 3)):
        tokens, features = TEXT.clone(), FEATURES.clone()
        tokens[text, place] = (tokens[text, place] + 1) % VOCAB
        features[text, place] += 1.0
        by_token = changed(plain, slots_of(config, batch_of(config, tokens=tokens), made))
        by_feature = changed(plain, slots_of(config, batch_of(config, features=features), made))
        for step, slot in enumerate(plain, start=1):
            for chain, (owner, base) in enumerate(BASES):
                mine = owner == text and bool(slot.known[chain])
                assert by_token[step - 1][chain] == (mine and first <= place <= base + step)
                assert by_feature[step - 1][chain] == (mine and place <= base)


@MEMBERS
def test_gradients_reach_all_that_is_trained(config: Config) -> None:
    made = trainable_of(config)
    slots = slots_of(config, made=made)
    numbers = torch.Generator().manual_seed(4)
    total = torch.zeros(())
    for slot in slots:
        total = total + (slot.logits * torch.randn(slot.logits.shape, generator=numbers)).sum()
        total = total if slot.confidence is None else total + slot.confidence.square().sum()
    total.backward()  # type: ignore[no-untyped-call]
    spare = {id(each) for step in list(made.network.steps)[DEPTH:] for each in step.parameters()}  # type: ignore[arg-type]
    for parameter in made.parameters():
        assert (parameter.grad is None or not bool(parameter.grad.any())) == (id(parameter) in spare)
    for module in made.network.modules():
        if isinstance(module, BorrowedHead):
            assert all(each.grad is None for each in module.parameters())
    assert TABLES.embedding.grad is None


def test_confidence_is_of_the_row_that_the_head_reads() -> None:
    made = trainable_of(CASES["eagle3"])
    assert made.confidence is not None
    slots, model = slots_of(CASES["eagle3"], made=made), model_of(CASES["eagle3"])
    for chain, (text, base) in enumerate(BASES):
        _, hidden = drafted(model, text, base)
        for step, slot in enumerate(slots):
            assert slot.confidence is not None
            if slot.known[chain]:
                assert_close(slot.confidence[chain], made.confidence.logits(hidden[step], slot.at))


@MEMBERS
def test_a_batch_without_an_answer_has_no_chains(config: Config) -> None:
    batch = batch_of(config)
    slots = slots_of(config, replace(batch, answer=torch.zeros_like(batch.answer)))
    assert [slot.logits.shape[0] for slot in slots] == [0] * DEPTH
    assert all(slot.at.shape == slot.known.shape == (0,) for slot in slots)


def test_measuring_before_training_leaves_nothing_behind() -> None:
    """Tables that grow in inference mode must serve a backward pass all the same."""
    made = trainable_of(CASES["eagle3"])
    drafting = drafting_for(made, DraftingOptions(DEPTH))
    tokens = torch.randint(3, VOCAB, (1, 300), generator=torch.Generator().manual_seed(2))
    rows = torch.randn(1, 300, WIDTH, generator=torch.Generator().manual_seed(1))
    answer = torch.ones_like(tokens, dtype=torch.bool)
    batch = Batch(tokens, answer, answer, Features(dict.fromkeys((-1, 0, 1), rows), hidden_post=rows), key=0)
    with torch.inference_mode():
        before = drafting(batch)[-1].logits.clone()
    after = drafting(batch)[-1].logits
    after.sum().backward()
    assert torch.equal(before, after)


@pytest.mark.parametrize("steps", [1, 3])
def test_both_ways_of_attention_agree_in_values_and_gradients(steps: int) -> None:
    """Bases in any order, one text without any, and scores that are far from zero."""
    numbers = torch.Generator().manual_seed(7)
    bases = torch.tensor([26, 0, 3, 8, 24, 7, 20])  # of 3 texts of 9 positions
    sizes = (7, 2, 3, 4), (7, 2, 2, steps, 4), (3, 2, 9, 4), (3, 2, 9, 4)
    inputs = [(3.0 * torch.randn(size, dtype=torch.float64, generator=numbers)).requires_grad_() for size in sizes]
    found = attend_in_flashes(*inputs, bases)
    expected = attend_densely(*inputs, bases)
    assert (found - expected).abs().max() < 1e-12
    weight = torch.randn(found.shape, dtype=torch.float64, generator=numbers)
    pairs = zip(*(torch.autograd.grad((each * weight).sum(), inputs) for each in (found, expected)), strict=True)
    assert all((one - other).abs().max() < 1e-11 for one, other in pairs)


def test_more_positions_than_modules_are_refused() -> None:
    with pytest.raises(GraphError, match="at most its 4 modules"):
        drafting_for(trainable_of(CASES["mtp-modules"]), DraftingOptions(5))
    assert isinstance(drafting_for(trainable_of(CASES["mtp"]), DraftingOptions(9)), FeatureDrafting)


def test_a_network_that_nobody_trains_is_refused() -> None:
    with pytest.raises(GraphError, match="Identity"):
        drafting_for(replace(trainable_of(CASES["mtp"]), network=nn.Identity()), DraftingOptions(1))

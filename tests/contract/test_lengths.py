"""What every length policy owes the engine. Policies are found through their registry."""

from __future__ import annotations

import inspect
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from pydantic import ValidationError
from questions import NoQuestions
from tiny import NumberText, Ragged, tiny_target

from specflow.draft.base import Uniforms
from specflow.engine import Engine, EngineParts, EngineSettings
from specflow.law import Dense, PointMass
from specflow.length import POLICIES, LengthPolicy
from specflow.tree import chain, from_parents
from specflow.types import PAD, DraftBlock, DraftBudget, Entry, Sampling
from specflow.verify import Match

K = 6
NAMES = sorted(POLICIES)
VOCAB, WIDTH = 7, 3
PRICED = [name for name in NAMES if POLICIES[name].priced]
CPU = torch.device("cpu")


class Prices:
    """Each column of the pass costs a tenth of a plain step, each drafted token a twentieth."""

    def verify_s(self, depth: int, batch: int, context: int) -> float:
        return 1.0 + 0.1 * depth + 1e-4 * context

    def round_s(self, depth: int, batch: int, context: int) -> float:
        return self.verify_s(depth, batch, context) + 0.05 * depth


def started(name: str, batch: int = 3, k: int = K, priced: bool = False) -> LengthPolicy:
    policy: Any = POLICIES[name].policy(k)
    if priced:
        policy.use(Prices())
    policy.reset(batch)
    for row in range(batch):
        policy.start(row)
    return policy  # type: ignore[no-any-return]


def continued(*matches: int) -> DraftBlock:
    """An empty proposal that continues matches of these lengths."""
    tokens = torch.empty(len(matches), 0, dtype=torch.int64)
    law = PointMass(tokens, VOCAB)
    return DraftBlock(tokens, (0,) * len(matches), chain(0, CPU), law, match_lengths=matches)


def sure_block(
    seed: int, source: Literal["context", "prefix", "self"], lengths: Sequence[int] = (4, 2, 0)
) -> DraftBlock:
    """A chain with everything a block may carry, drawn from a dense law."""
    draws = torch.Generator().manual_seed(seed)
    shape = len(lengths), max(lengths)
    probs = torch.randn(*shape, VOCAB, generator=draws).softmax(-1)
    tokens = torch.randint(VOCAB, shape, generator=draws)
    tokens = tokens.masked_fill(torch.arange(shape[1]) >= torch.tensor(lengths).unsqueeze(1), PAD)
    entry = Entry(1, torch.randn(shape[0], shape[1] + 1, WIDTH, generator=draws))
    block = DraftBlock(tokens, tuple(lengths), chain(shape[1], CPU), Dense(tokens, probs), entry=entry)
    return replace(block, confidence=torch.rand(shape, generator=draws), confidence_from=source)


def play(policy: LengthPolicy, rng: random.Random, batch: int, rounds: int = 1) -> list[DraftBudget]:
    """Rounds with drafts and acceptances of all kinds."""
    budgets = []
    for _ in range(rounds):
        budget = policy.budget([rng.choice([0, 1, 2, 99]) for _ in range(batch)])
        lengths = tuple(rng.randint(1, 20) for _ in range(batch))
        drafted = [min(rng.choice([0, 99]), budget.most(row, lengths[row])) for row in range(batch)]
        policy.trim(continued(*lengths))
        policy.observe(drafted, [rng.randint(0, most) for most in drafted])
        budgets.append(budget)
    return budgets


@pytest.mark.parametrize("name", NAMES)
def test_options_are_frozen_closed_and_the_arguments_of_the_class(name: str) -> None:
    policy = POLICIES[name]
    defaults = policy.config()
    assert all(field.description for field in policy.config.model_fields.values())
    assert policy.config.model_config["frozen"]
    with pytest.raises(ValidationError):
        policy.config(no_such_option=1)
    arguments = inspect.signature(policy.policy).parameters
    assert next(iter(arguments)) == "k"
    assert {argument: arguments[argument].default for argument in arguments if argument != "k"} == dict(defaults)
    assert policy.policy(k=K, **dict(defaults)).k == K


@pytest.mark.parametrize("name", NAMES)
def test_a_fresh_request_may_draft(name: str) -> None:
    budget = started(name).budget([99] * 3)
    assert all(budget.most(row, 20) > 0 for row in range(3))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("k", [1, 2, 16])
def test_budgets_stay_within_k_and_within_each_rows_limit(name: str, k: int) -> None:
    policy, rng = started(name, k=k, priced=name in PRICED), random.Random(k)
    for _ in range(200):
        limits = [rng.choice([-1, 0, 1, 3, 99]) for _ in range(3)]
        budget = policy.budget(limits, [rng.randrange(3000) for _ in range(3)])
        assert len(budget.tokens) == 3
        assert all(type(tokens) is int for tokens in budget.tokens)
        assert all(0 <= tokens <= max(0, min(k, limit)) for tokens, limit in zip(budget.tokens, limits, strict=True))
        drafted = [budget.most(row, 4) for row in range(3)]
        policy.trim(continued(4, 4, 4))
        policy.observe(drafted, [rng.randint(0, tokens) for tokens in drafted])


@pytest.mark.parametrize("name", NAMES)
def test_rows_do_not_see_each_other(name: str) -> None:
    """A row decides the same alone and beside neighbours of any luck."""
    rng = random.Random(3)
    alone, together = started(name, 1), started(name, 3)
    for _ in range(60):
        own, others = alone.budget([99]), together.budget([99] * 3)
        assert own.most(0, 5) == others.most(1, 5)
        drafted = [own.most(0, 5), others.most(0, 5), others.most(2, 5)]
        accepted = [rng.randint(0, tokens) for tokens in drafted]
        for policy, order in ((alone, [0]), (together, [1, 0, 2])):
            policy.trim(continued(*(5,) * len(order)))
            policy.observe([drafted[i] for i in order], [accepted[i] for i in order])


@pytest.mark.parametrize("name", NAMES)
def test_select_moves_what_was_learnt_with_its_row(name: str) -> None:
    policy, same = started(name), started(name)
    play(policy, random.Random(1), 3, 30)
    play(same, random.Random(1), 3, 30)
    policy.select([2, 0])
    kept, whole = policy.budget([99, 99]), same.budget([99] * 3)
    for length in range(1, 20):
        assert [kept.most(row, length) for row in (0, 1)] == [whole.most(row, length) for row in (2, 0)]


@pytest.mark.parametrize("name", NAMES)
def test_a_new_request_inherits_nothing(name: str) -> None:
    fresh = started(name, 1).budget([99])
    for renew in ("start", "reset"):
        policy = started(name, 1)
        play(policy, random.Random(2), 1, 40)
        if renew == "start":
            policy.start(0)
        else:
            policy.reset(1)
        assert policy.budget([99]) == fresh


@pytest.mark.parametrize("name", NAMES)
def test_the_same_rounds_give_the_same_budgets(name: str) -> None:
    one, two = (play(started(name), random.Random(7), 3, 50) for _ in range(2))
    assert one == two


@pytest.mark.parametrize("name", NAMES)
def test_rounds_without_a_block_are_no_surprise(name: str) -> None:
    """Where no row had a proposal, nothing is trimmed and nothing was drafted."""
    policy = started(name)
    before = policy.budget([99] * 3)
    for _ in range(5):
        policy.observe([0] * 3, [0] * 3)
    assert policy.budget([99] * 3) == before


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("source", ["context", "prefix", "self"])
def test_what_is_left_of_a_block_is_its_beginning_and_fits_together(
    name: str, source: Literal["context", "prefix", "self"]
) -> None:
    policy = started(name, k=4, priced=name in PRICED)
    policy.budget([4] * 3, [30] * 3)
    for seed in range(30):
        block = sure_block(seed, source)
        left = policy.trim(block)
        assert left.lengths_from != "self"
        width = left.num_nodes
        tokens = torch.full_like(block.tokens, PAD)
        for row, length in enumerate(left.lengths):
            tokens[row, :length] = block.tokens[row, :length]
        assert left.tokens.equal(tokens[:, :width])
        assert left.topology is chain(width, CPU)
        assert left.law.prob().shape == (3, width)
        assert left.law.prob()[left.tokens >= 0].equal(block.law.prob()[:, :width][left.tokens >= 0])
        assert left.confidence is not None
        assert left.confidence.equal(block.confidence[:, :width])  # type: ignore[index]
        assert left.entry is not None
        assert left.entry.hidden.equal(block.entry.hidden[:, : width + 1])  # type: ignore[union-attr]
        assert width == max(left.lengths)


@pytest.mark.parametrize("name", NAMES)
def test_an_accelerator_is_asked_nothing_and_says_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropped tokens are masked there; the columns stay, so a policy that weighs costs has nothing to gain by a cut."""
    policy = started(name, k=4, priced=name in PRICED)
    policy.budget([4] * 3, [30] * 3)
    for seed in range(10):
        block = sure_block(seed, "prefix")
        left = policy.trim(block)
        with monkeypatch.context() as patch:
            for module in ("length_confidence", "length_gain"):
                patch.setattr(f"specflow.{module}.asking_is_free", lambda device: False)
            with NoQuestions():
                masked = policy.trim(block)
        if name in PRICED:
            assert masked is block
            continue
        assert masked.num_nodes == block.num_nodes
        assert masked.lengths == block.lengths
        assert masked.lengths_from == left.lengths_from
        assert masked.tokens[:, : left.num_nodes].equal(left.tokens)
        assert bool((masked.tokens[:, left.num_nodes :] == PAD).all())


@pytest.mark.parametrize("name", NAMES)
def test_blocks_without_confidence_without_nodes_and_trees_stay_as_they_are(name: str) -> None:
    policy = started(name, k=4, priced=name in PRICED)
    policy.budget([4] * 3, [30] * 3)
    block = sure_block(0, "prefix")
    tree = replace(block, topology=from_parents(torch.tensor([[-1, -1, 0, 0]])))
    for whole in (replace(block, confidence=None), tree, continued(3, 0, 1), sure_block(0, "self", (0, 0, 0))):
        assert policy.trim(whole) is whole


class Doubtful(Ragged):
    """Right for a while; says so of some tokens and doubts others, right or wrong."""

    def propose(self, anchors: Sequence[int], budget: DraftBudget, uniforms: Uniforms) -> DraftBlock | None:
        block = super().propose(anchors, budget, uniforms)
        assert block is not None
        confidence = ((block.tokens % 5) + 1) / 6
        source: Any = ("context", "prefix", "self")[self.calls % 3]
        return replace(block, confidence=confidence, confidence_from=source, match_lengths=(4,) * len(anchors))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_text_is_plain_decodings_whatever_the_policy(name: str, temperature: float) -> None:
    """Three requests in two rows, drafts right and wrong, cut or not."""
    target, prompts = tiny_target(), [[1, 5, 9], [1, 8], [1, 30, 31, 32]]
    sampling = [Sampling(temperature=temperature, seed=7 + row, max_new_tokens=40) for row in range(3)]

    def engine(policy: LengthPolicy, drafter: Any = None) -> Engine:
        codec: Any = NumberText()
        return Engine(EngineParts(target, codec, Match(), policy, drafter), EngineSettings(batch=2))

    plain = engine(POLICIES["fixed"].policy(0)).generate(prompts, sampling)
    futures = [each.tokens for each in plain]
    policy = started(name, k=4, priced=name in PRICED)
    found = engine(policy, Doubtful(futures)).generate(prompts, sampling)
    assert [each.tokens for each in found] == [each.tokens for each in plain]
    assert sum(each.counts.num_draft_tokens for each in found) > 10
    assert sum(each.counts.num_accepted_draft_tokens for each in found) > 0

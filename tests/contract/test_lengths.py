"""What every length policy owes the engine. Policies are found through their registry."""

from __future__ import annotations

import inspect
import random
from types import SimpleNamespace
from typing import cast

import pytest
from pydantic import ValidationError

from specflow.length import POLICIES, LengthPolicy
from specflow.types import DraftBlock, DraftBudget

K = 6
NAMES = sorted(POLICIES)


def started(name: str, batch: int = 3, k: int = K) -> LengthPolicy:
    policy = POLICIES[name].policy(k)
    policy.reset(batch)
    for row in range(batch):
        policy.start(row)
    return policy


def play(policy: LengthPolicy, rng: random.Random, batch: int, rounds: int = 1) -> list[DraftBudget]:
    """Rounds with drafts and acceptances of all kinds."""
    budgets = []
    for _ in range(rounds):
        budget = policy.budget([rng.choice([0, 1, 2, 99]) for _ in range(batch)])
        lengths = tuple(rng.randint(1, 20) for _ in range(batch))
        drafted = [min(rng.choice([0, 99]), budget.most(row, lengths[row])) for row in range(batch)]
        policy.trim(cast(DraftBlock, SimpleNamespace(match_lengths=lengths)))
        policy.observe(drafted, [rng.randint(0, most) for most in drafted])
        budgets.append(budget)
    return budgets


@pytest.mark.parametrize("name", NAMES)
def test_options_are_frozen_closed_and_the_arguments_of_the_class(name: str) -> None:
    policy = POLICIES[name]
    defaults = policy.config()
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
    policy, rng = started(name, k=k), random.Random(k)
    for _ in range(200):
        limits = [rng.choice([-1, 0, 1, 3, 99]) for _ in range(3)]
        budget = policy.budget(limits)
        assert len(budget.tokens) == 3
        assert all(type(tokens) is int for tokens in budget.tokens)
        assert all(0 <= tokens <= max(0, min(k, limit)) for tokens, limit in zip(budget.tokens, limits, strict=True))
        drafted = [budget.most(row, 4) for row in range(3)]
        policy.trim(cast(DraftBlock, SimpleNamespace(match_lengths=(4, 4, 4))))
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
            policy.trim(cast(DraftBlock, SimpleNamespace(match_lengths=(5,) * len(order))))
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

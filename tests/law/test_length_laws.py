"""Exact laws of the chain rules with every policy that shortens blocks: all drafts, each cut by the policy itself.

Also the two ways of shortening that bias the text (reference: methods 0.2), as controls that must fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tables import CPU, GAMMA, RULES_BY_NAME, VOCAB, Models, law_error
from torch import Tensor

from specflow.draft.base import Needs, SourceContext
from specflow.draft.chain import ChainDrafter
from specflow.errors import GraphError
from specflow.length import Confidence, ExpectedGain, LengthPolicy, Threshold
from specflow.length_confidence import cut
from specflow.noise import RoundNoise
from specflow.sampling import TargetLaw
from specflow.tree import chain
from specflow.types import DraftBlock, DraftBudget, Sampling
from specflow.verify import RULES

EXACT, BIASED = 1e-12, 1e-3
rules = pytest.mark.parametrize("rule", RULES_BY_NAME)


class Prices:
    """A draft costs as much as a third of a plain step, and each column of the target pass a little more."""

    def __init__(self, verify: Sequence[float] = (1.0, 1.5, 2.0, 2.3), draft: float = 0.3) -> None:
        self._verify, self._draft = verify, draft

    def verify_s(self, depth: int, batch: int, context: int) -> float:
        return self._verify[depth]

    def round_s(self, depth: int, batch: int, context: int) -> float:
        return self._verify[depth] + (self._draft if depth else 0.0)


def expected_gain(batch: int = 1, prices: Prices | None = None) -> ExpectedGain:
    policy = ExpectedGain(GAMMA)
    policy.use(prices or Prices())
    policy.reset(batch)
    for row in range(batch):
        policy.start(row)
    policy.budget([GAMMA] * batch, [40] * batch)
    return policy


POLICIES: dict[str, Callable[[], LengthPolicy]] = {
    "confidence": lambda: Confidence(GAMMA, 0.5),
    "cumulative confidence": lambda: Confidence(GAMMA, 0.4, cumulative=True),
    "expected gain": expected_gain,
}


def confidences(models: Models, source: str, seed: int = 0) -> Tensor:
    """A confidence for every node of every block, from random tables of what it may depend on.  # [B, N]"""
    draws = torch.Generator().manual_seed(100 + seed)
    columns = []
    for node in range(models.gamma):
        seen = {"context": 0, "prefix": node, "self": node + 1}[source]
        table = torch.rand(VOCAB**seen, generator=draws, dtype=torch.float64)
        columns.append(table[models.prefixes[seen]])
    return torch.stack(columns, 1)


def one(models: Models, row: int, confidence: Tensor, source: Any) -> DraftBlock:
    """One of all blocks, whole."""
    tokens = models.tokens[row : row + 1]
    law = models.law(tokens, models.draft_rows[row : row + 1])
    whole = DraftBlock(tokens, (models.gamma,), chain(models.gamma, CPU), law)
    return replace(whole, confidence=confidence[row : row + 1], confidence_from=source)


def cut_lengths(models: Models, confidence: Tensor, source: str, make: Callable[[], LengthPolicy]) -> Tensor:
    """How many tokens of each block the policy leaves, each block seen alone.  # [B]"""
    found = []
    for row in range(len(models.tokens)):
        block = make().trim(one(models, row, confidence, source))
        assert block.law.is_point or block.lengths_from != "self"
        found.append(block.lengths[0])
    return torch.tensor(found)


def error_of(models: Models, lengths: Tensor, rule: str) -> float:
    block = models.block(lengths)
    return law_error(models, block, RULES_BY_NAME[rule](block, models.target_rows))


@rules
@pytest.mark.parametrize("source", ["context", "prefix", "self"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["dense", "reduced", "point"])
def test_every_policy_keeps_the_law(policy: str, source: str, kind: str, rule: str) -> None:
    """One-hot drafts may even be cut by what the dropped token says: it follows from the context."""
    seen = set()
    for seed in range(5):
        models = Models(seed, kind)
        lengths = cut_lengths(models, confidences(models, source, seed), source, POLICIES[policy])
        seen |= set(lengths.tolist())
        assert error_of(models, lengths, rule) < EXACT
    assert len(seen) > 1


@rules
@pytest.mark.parametrize("source", ["prefix", "self"])
def test_a_batch_that_shares_its_pass_keeps_each_rows_law(source: str, rule: str) -> None:
    """Whatever the neighbour drafted and however sure of it: 27 blocks beside each of some neighbours."""
    models, seen = Models(2), set()
    confidence = confidences(models, source, 3)
    for neighbour in (0, 5, 13, 22):
        lengths = []
        for row in range(len(models.tokens)):
            pair = [row, neighbour]
            tokens = models.tokens[pair]
            block = DraftBlock(tokens, (GAMMA,) * 2, chain(GAMMA, CPU), models.law(tokens, models.draft_rows[pair]))
            facts: Any = {"confidence": confidence[pair], "confidence_from": source}
            block = replace(block, **facts)
            lengths.append(expected_gain(2).trim(block).lengths[0])
        seen |= set(lengths)
        assert error_of(models, torch.tensor(lengths), rule) < EXACT
    assert len(seen) > 1


class TableSteps:
    """A drafting network that is a table; all blocks are drafted at once, one in each row."""

    needs, vocabulary, most_positions, most_depth, hidden = Needs(), None, 99, GAMMA, torch.zeros(VOCAB**GAMMA, 1)

    def __init__(self, models: Models) -> None:
        self._models, self._depth = models, 0

    def reset(self, batch: int, num_nodes: int, cache: object) -> None:
        self._depth = 0

    def start(self, row: int, prompt: Sequence[int]) -> None:
        pass

    def open(self, anchors: Sequence[int], active: Sequence[bool]) -> TableSteps:
        return self

    @property
    def logits(self) -> Tensor:
        return self._models.q[0].log().expand(len(self._models.tokens), -1)

    def extend(self, tokens: Tensor, frontier: object = None) -> Tensor:
        self._depth += 1
        assert tokens.squeeze(1).equal(self._models.tokens[:, self._depth - 1])
        return self._models.draft_rows[:, self._depth].log().unsqueeze(1)

    def entry(self, last: Tensor) -> None:
        return None


class Choosing:
    """Numbers with which each row draws its own block."""

    def __init__(self, models: Models) -> None:
        before = models.draft_rows.cumsum(-1) - models.draft_rows / 2
        self._numbers = before.gather(2, models.tokens.unsqueeze(-1)).squeeze(-1)

    def uniform(self, stream: str, row: int, position: int) -> float:
        return float(self._numbers[row, position - 1])


def drafted(models: Models, budget: DraftBudget, head: Any = None) -> DraftBlock:
    """Every block, drafted by the real drafter of chains."""
    target: Any = SimpleNamespace(info=SimpleNamespace(vocab_size=VOCAB, device=CPU))
    network: Any = TableSteps(models)
    drafter = ChainDrafter(network, SourceContext(target, GAMMA, draw="sampled", confidence=head is not None), head)
    cache: Any = SimpleNamespace(lengths=(0,) * len(models.tokens))
    drafter.reset(len(models.tokens), cache)
    for row in range(len(models.tokens)):
        drafter.start(row, (0,), Sampling(temperature=1.0))
    block = drafter.propose([0] * len(models.tokens), budget, Choosing(models))
    assert block is not None
    return block


@rules
@pytest.mark.parametrize("bar", [0.0, 0.3, 1.0])
def test_drafting_that_stops_after_an_unsure_token_keeps_the_law(bar: float, rule: str) -> None:
    models = Models(1)
    policy = Threshold(GAMMA, start=bar)
    policy.reset(len(models.tokens))
    block = drafted(models, policy.budget([GAMMA] * len(models.tokens)))
    lengths = (block.tokens >= 0).sum(1)
    expected = {0.0: {3}, 1.0: {1}}.get(bar, {1, 2, 3})
    assert set(lengths.tolist()) == expected
    assert block.lengths_from != "self"
    told = block.law.probs  # type: ignore[attr-defined]
    assert torch.allclose(told, models.draft_rows[:, : block.num_nodes])
    assert error_of(models, lengths, rule) < EXACT


@rules
def test_a_head_that_speaks_before_its_token_may_drop_it(rule: str) -> None:
    """The whole way: drafter of chains, a head's confidence, the cut of a batch."""
    models = Models(4)
    table = confidences(models, "prefix", 1)
    block = drafted(models, DraftBudget((GAMMA,) * len(models.tokens)), lambda hidden, before, step: table[:, step])
    assert block.confidence_from == "prefix"
    trimmed = Confidence(GAMMA, 0.5).trim(block)
    assert trimmed.lengths_from == "prefix"
    lengths = (trimmed.tokens >= 0).sum(1)
    assert len(set(lengths.tolist())) > 1
    assert error_of(models, lengths, rule) < EXACT


@rules
def test_control_dropping_the_unsure_token_itself_is_biased_and_refused(rule: str) -> None:
    models = Models(1)
    own = models.draft_rows.gather(2, models.tokens.unsqueeze(-1)).squeeze(-1)
    lengths = []
    for row in range(len(models.tokens)):
        block = one(models, row, own, "self")
        dropped = cut(block, own[row : row + 1] >= 0.3, "self")
        lengths.append(dropped.lengths[0])
        p = models.target_rows[row : row + 1, : dropped.num_nodes + 1].log()
        law, noise = TargetLaw(p, p, [False]), RoundNoise([0], [0], CPU)
        with pytest.raises(GraphError, match="its own sampled tokens"):
            RULES[rule]().verify(dropped, law, noise)
    assert error_of(models, torch.tensor(lengths), rule) > BIASED
    safe = cut_lengths(models, own, "self", lambda: Confidence(GAMMA, 0.3))
    assert error_of(models, safe, rule) < EXACT


@rules
def test_control_the_best_length_in_hindsight_is_biased(rule: str) -> None:
    """A source says of confidences that follow the drafted tokens that they follow the context: all are weighed."""
    models = Models(2)
    prices = Prices((1.0, 1.9, 2.0, 2.1))
    errors = {}
    for claim in ("prefix", "context"):
        found = [
            cut_lengths(models, confidences(models, "prefix", seed), claim, lambda: expected_gain(prices=prices))
            for seed in range(6)
        ]
        errors[claim] = max(error_of(models, lengths, rule) for lengths in found)
    assert errors["prefix"] < EXACT
    assert errors["context"] > BIASED


@pytest.mark.parametrize(("claim", "expected"), [("prefix", (0.7, 0.3)), ("context", (0.85, 0.15))])
def test_the_published_counter_example(claim: str, expected: tuple[float, float]) -> None:
    """DSpark (2607.05147): steps a second 1, .5, .45, a_1 = .8, c_2 = .9 after token 0, else 0. First token's law.

    p = (.7, .3) and q = (.5, .5), so a_1 = 1 - |p - q| / 2 = .8. The search over all lengths submits token 0 alone.
    """
    p, q = torch.tensor([0.7, 0.3], dtype=torch.float64), torch.tensor([0.5, 0.5], dtype=torch.float64)
    policy = ExpectedGain(2)
    policy.use(Prices((1.0, 2.0, 1 / 0.45), draft=0.0))
    policy.reset(1)
    policy.start(0)
    policy.budget([2])
    mass = torch.zeros(2, dtype=torch.float64)
    for token, second in ((0, 0.9), (1, 0.0)):
        tokens = torch.tensor([[token, 0]])
        law = Models(0).law(tokens, q.expand(1, 2, 2))
        confidence: Any = {"confidence": torch.tensor([[0.8, second]]), "confidence_from": claim}
        block = policy.trim(DraftBlock(tokens, (2,), chain(2, CPU), law, **confidence))
        if block.num_nodes:
            stands = min(1.0, float(p[token] / q[token]))
            mass[token] += q[token] * stands
            mass += q[token] * (1 - stands) * torch.tensor([1.0, 0.0])  # all that p has more than q is token 0
        else:
            mass += q[token] * p
    assert mass.tolist() == pytest.approx(list(expected))

"""Exact laws of the chain rules: all drafts and all decisions enumerated, with the rules' own formulas.

A draft block of up to GAMMA tokens is drawn from q, verified, and the text completed by the target; the joint law of
GAMMA + 1 tokens must be the target's. Acceptance probabilities and residuals come from the functions that the rules
call; that the rules turn numbers into decisions with those probabilities is checked at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tables import CPU, GAMMA, KINDS, RULES_BY_NAME, Models, Outcome, block_outcome, chance, law_error
from torch import Tensor

from specflow.law import Dense
from specflow.noise import RoundNoise
from specflow.sampling import TargetLaw, draw_tokens
from specflow.tree import chain
from specflow.types import PAD, DraftBlock
from specflow.verify import BlockRule, Rejection, block_odds, residual


def mean_accepted(models: Models, outcome: Outcome) -> float:
    return float((models.weights() @ outcome[0]) @ torch.arange(models.gamma + 1.0, dtype=torch.float64))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", RULES_BY_NAME)
@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_the_joint_law_is_the_targets(rule: str, kind: str, gamma: int) -> None:
    for seed in range(4):
        models = Models(seed, kind, gamma)
        for length in range(gamma + 1):  # shorter rows of a wider block
            block = models.block(models.fixed(length))
            assert law_error(models, block, RULES_BY_NAME[rule](block, models.target_rows)) < 1e-12


@pytest.mark.parametrize("rule", RULES_BY_NAME)
def test_a_length_that_depends_on_earlier_tokens_keeps_the_law(rule: str) -> None:
    """Drafting stops after a token of low confidence, which stays in the block."""
    models = Models(1)
    unsure = models.draft_rows.gather(2, models.tokens.unsqueeze(-1)).squeeze(-1) < 0.3
    lengths = torch.where(unsure.any(1), unsure.long().argmax(1) + 1, GAMMA)
    assert len(set(lengths.tolist())) == GAMMA
    block = models.block(lengths)
    assert law_error(models, block, RULES_BY_NAME[rule](block, models.target_rows)) < 1e-12


@pytest.mark.parametrize("rule", RULES_BY_NAME)
def test_control_dropping_the_unsure_token_itself_is_biased(rule: str) -> None:
    models = Models(1)
    unsure = models.draft_rows.gather(2, models.tokens.unsqueeze(-1)).squeeze(-1) < 0.3
    block = models.block(torch.where(unsure.any(1), unsure.long().argmax(1), GAMMA))
    assert law_error(models, block, RULES_BY_NAME[rule](block, models.target_rows)) > 1e-3


@pytest.mark.parametrize("rule", RULES_BY_NAME)
def test_control_q_before_processing_is_biased(rule: str) -> None:
    """Tokens drawn at temperature 0.5, law claimed at temperature 1."""
    models = Models(2)
    raw = models.draft_rows.sqrt()
    block = models.block(models.fixed(GAMMA), raw / raw.sum(-1, keepdim=True))
    assert law_error(models, block, RULES_BY_NAME[rule](block, models.target_rows)) > 1e-3


@pytest.mark.parametrize("rule", RULES_BY_NAME)
def test_control_drafting_in_bfloat16_is_biased(rule: str) -> None:
    """Tokens drawn from bfloat16 logits of a usual size, law claimed from the float32 ones; refused when admitted."""
    models = Models(3)
    logits = models.draft_rows.log().float() + 20.3
    models.q = [q.log().float().add(20.3).bfloat16().double().softmax(-1) for q in models.q]
    models.draft_rows = logits.bfloat16().double().softmax(-1)
    lied = models.block(models.fixed(GAMMA), logits.double().softmax(-1))
    honest = models.block(models.fixed(GAMMA))
    assert law_error(models, lied, RULES_BY_NAME[rule](lied, models.target_rows)) > 1e-3
    assert law_error(models, honest, RULES_BY_NAME[rule](honest, models.target_rows)) < 1e-12


def test_control_block_acceptance_with_the_token_rules_residual_is_biased() -> None:
    models = Models(4)
    block = models.block(models.fixed(GAMMA))
    reached, _ = block_outcome(block, models.target_rows)
    assert law_error(models, block, (reached, torch.ones_like(reached[:, 1:]))) > 1e-3


def test_control_block_acceptance_that_stops_at_the_first_refusal_is_biased() -> None:
    models = Models(4)
    block = models.block(models.fixed(GAMMA))
    bar, weight, reach = block_odds(block, models.target_rows)
    passed = torch.cat((torch.ones_like(bar[:, :1]), chance(bar, weight).cumprod(1), torch.zeros_like(bar[:, :1])), 1)
    assert law_error(models, block, (passed[:, :-1] - passed[:, 1:], reach)) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_block_verification_accepts_at_least_as_much(kind: str) -> None:
    gains = []
    for seed in range(12):
        models = Models(seed, kind)
        block = models.block(models.fixed(GAMMA))
        token, whole = (mean_accepted(models, each(block, models.target_rows)) for each in RULES_BY_NAME.values())
        assert whole >= token - 1e-12
        gains.append(whole - token)
    assert max(gains) > 1e-3 or kind == "point"


class GivenNoise(RoundNoise):
    """Numbers from a table in place of keyed ones: accept numbers by node, one number for whatever is drawn."""

    def __init__(self, accept: Tensor, following: Tensor) -> None:
        self._accept, self._following = accept, following

    def nodes(self, stream: str, topology: object) -> Tensor:
        assert stream == "accept"
        return self._accept

    def once(self, stream: str) -> Tensor:
        assert stream == "residual"
        return self._following

    def rows(self, stream: str, topology: object) -> Tensor:
        assert stream == "target"
        return self._following.unsqueeze(1).expand(-1, self._accept.shape[1] + 1)


@pytest.mark.parametrize(("rule", "name"), [(Rejection(), "rejection"), (BlockRule(), "block")])
@pytest.mark.parametrize("kind", KINDS)
def test_rules_decide_with_these_probabilities(rule: Rejection | BlockRule, name: str, kind: str) -> None:
    """A regular grid of numbers for every node and draw: frequencies equal probabilities to the grid's width."""
    models, grid, chosen = Models(5, kind, gamma=2), 24, 4
    middle = (torch.arange(grid, dtype=torch.float64) + 0.5) / grid
    points = torch.cartesian_prod(middle, middle, middle)
    every = models.block(models.fixed(2))
    reached, reach = RULES_BY_NAME[name](every, models.target_rows)
    for row in models.weights().topk(chosen).indices.tolist():
        if models.weights()[row] == 0:
            continue
        many = torch.full((len(points),), row)
        tokens = models.tokens[many]
        law = models.law(tokens, models.draft_rows[many])
        block = DraftBlock(tokens, (2,) * len(points), chain(2, CPU), law)
        p = models.target_rows[many]
        noise = GivenNoise(points[:, :2], points[:, 2])
        verdict = rule.verify(block, TargetLaw(p.log(), p.log(), [False] * len(p)), noise)
        for accepted in range(3):
            hit = verdict.accepted == accepted
            assert float(hit.double().mean()) == pytest.approx(float(reached[row, accepted]), abs=2.5 / grid)
            over, _ = residual(every, models.target_rows, reach, torch.full((len(every.tokens),), accepted))
            if hit.any():
                expected = draw_tokens(over[row].expand(int(hit.sum()), -1), points[hit, 2])
                assert verdict.tokens[hit, accepted].equal(expected)


P_AFTER = torch.tensor(
    [[0.57, 0.19, 0.24], [0.17, 0.14, 0.69], [0.1, 0.72, 0.18]], dtype=torch.float64
)  # by token before
Q_AFTER = torch.tensor([[0.38, 0.34, 0.28], [0.08, 0.51, 0.41], [0.48, 0.35, 0.17]], dtype=torch.float64)


class KeyedByPosition(RoundNoise):
    """Numbers that forget in which round they are asked for."""

    def __init__(self, seeds: Sequence[int], starts: Sequence[int], device: torch.device) -> None:
        super().__init__(seeds, starts, device)
        self._first = RoundNoise(seeds, [0] * len(seeds), device)

    def _key(self, stream: str, row: int) -> int:
        return self._first._key(stream, row)


def chi_square(rule: Rejection | BlockRule, noise_type: type[RoundNoise], requests: int) -> float:
    """Misfit of the first three tokens that the real rounds produce, drafts drawn with the rounds' own numbers."""
    p, q = P_AFTER, Q_AFTER
    gamma, wanted = 3, 4
    text = torch.full((requests, wanted + gamma + 1), PAD)
    text[:, 0] = 0
    sizes = torch.zeros(requests, dtype=torch.int64)
    while int(sizes.min()) < wanted - 1:
        busy = (sizes < wanted - 1).nonzero().squeeze(1)
        starts = sizes[busy].tolist()
        noise = noise_type(busy.tolist(), starts, CPU)
        drafts, rows = [], [p[text[busy, sizes[busy]]]]
        laws, before = [], text[busy, sizes[busy]]
        for step in range(gamma):
            u = [noise.uniform("draft", row, start + step + 1) for row, start in enumerate(starts)]
            laws.append(q[before])
            before = draw_tokens(q[before], torch.tensor(u, dtype=torch.float64))
            drafts.append(before)
            rows.append(p[before])
        tokens, target = torch.stack(drafts, 1), torch.stack(rows, 1).log()
        block = DraftBlock(tokens, (gamma,) * len(busy), chain(gamma, CPU), Dense(tokens, torch.stack(laws, 1)))
        verdict = rule.verify(block, TargetLaw(target, target, [False] * len(busy)), noise)
        columns = sizes[busy].unsqueeze(1) + 1 + torch.arange(gamma + 1)
        text[busy.unsqueeze(1), columns.clamp_max(text.shape[1] - 1)] = verdict.tokens
        sizes[busy] += verdict.accepted + 1
    codes = (text[:, 1] * 3 + text[:, 2]) * 3 + text[:, 3]
    observed = torch.bincount(codes, minlength=27).double() / requests
    expected = (p[0].view(3, 1, 1) * p.unsqueeze(2) * p.unsqueeze(0)).flatten()
    return float(((observed - expected) ** 2 / expected).sum()) * requests


@pytest.mark.parametrize("rule", [Rejection(), BlockRule()])
def test_rounds_that_follow_each_other_keep_the_law(rule: Rejection | BlockRule) -> None:
    """Chi-square with 26 degrees of freedom: 60 has probability 2e-4, and seeds are fixed."""
    assert chi_square(rule, RoundNoise, 4000) < 60


def test_control_numbers_used_again_in_the_next_round_bias_block_verification() -> None:
    assert chi_square(BlockRule(), KeyedByPosition, 4000) > 120

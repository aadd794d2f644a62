"""Rules on small cases worked by hand, and the match rule against plain decoding on random trees."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from specflow.law import Dense, PointMass
from specflow.noise import RoundNoise
from specflow.sampling import BatchSampler, TargetLaw
from specflow.tree import chain, from_parents
from specflow.types import PAD, DraftBlock, Sampling
from specflow.verify import BlockRule, Match, Rejection, Typical, block_odds, residual

CPU = torch.device("cpu")
VOCAB = 7


def law_of_probs(p: Tensor) -> TargetLaw:
    return TargetLaw(p.log(), p.log(), [False] * len(p))


def tree_block(tokens: list[int], parents: list[int]) -> DraftBlock:
    ids = torch.tensor([tokens])
    return DraftBlock(ids, (len(tokens),), from_parents(torch.tensor([parents])), PointMass(ids, VOCAB))


def peaked(choices: list[int], likely: float = 1.0) -> Tensor:
    """Rows that say one token each with this probability.  # [1, M, V] float64"""
    p = torch.full((1, len(choices), VOCAB), (1 - likely) / (VOCAB - 1), dtype=torch.float64)
    return p.scatter(2, torch.tensor(choices).view(1, -1, 1), likely)


NOISE = RoundNoise([0], [10], CPU)


def test_match_takes_the_longest_path_of_a_tree() -> None:
    block = tree_block([4, 5, 6, 2, 3], [-1, -1, 1, 1, 3])  # rows 1..5
    law = law_of_probs(peaked([5, 0, 2, 0, 3, 1]))  # anchor says 5 (row 2), it says 2 (row 4), it says 3 (row 5)
    verdict = Match().verify(block, law, NOISE)
    assert verdict.tokens.tolist() == [[5, 2, 3, 1, PAD, PAD]]
    assert verdict.path.tolist() == [[0, 2, 4, 5, PAD, PAD]]
    assert verdict.accepted.tolist() == [3]


def test_match_takes_the_first_of_equal_branches() -> None:
    verdict = Match().verify(tree_block([5, 5], [-1, -1]), law_of_probs(peaked([5, 1, 1])), NOISE)
    assert verdict.path.tolist() == [[0, 1, PAD]]


@pytest.mark.parametrize("num_nodes", [0, 1, 4])
def test_a_chain_has_the_verdict_it_has_as_a_tree(num_nodes: int) -> None:
    """Ragged rows, of which some agree with the target to their end and some do not."""
    numbers = torch.Generator().manual_seed(num_nodes)
    said = torch.randint(3, (64, num_nodes + 1), generator=numbers)
    tokens = torch.randint(3, (64, num_nodes), generator=numbers)
    short = torch.randint(num_nodes + 1, (64, 1), generator=numbers)
    tokens = tokens.masked_fill(torch.arange(num_nodes) >= short, PAD)
    logits = torch.nn.functional.one_hot(said, VOCAB).float()
    law, nodes = TargetLaw(logits, logits, [True] * 64), (num_nodes,) * 64
    line = torch.arange(num_nodes).unsqueeze(0) - 1
    quick, general = (
        Match().verify(DraftBlock(tokens, nodes, shape, PointMass(tokens, VOCAB)), law, NOISE)
        for shape in (chain(num_nodes, CPU), from_parents(line))
    )
    for name in ("tokens", "path", "accepted"):
        assert torch.equal(getattr(quick, name), getattr(general, name)), name


def test_equal_logits_go_to_the_lowest_id_in_both_paths() -> None:
    logits = torch.zeros(1, 3, VOCAB)
    logits[..., 3:] = 1.0
    tokens = torch.tensor([[3, 4]])
    block = DraftBlock(tokens, (2,), chain(2, CPU), PointMass(tokens, VOCAB))
    verdict = Match().verify(block, TargetLaw(logits, logits, [True]), NOISE)
    assert verdict.tokens.tolist() == [[3, 3, PAD]]


def test_block_odds_of_a_worked_example() -> None:
    """p_1 = (.5 .5 0 ..), q_1 = (.8 .2 0 ..), x_1 = 0; p_2 = (.2 .8), q_2 = (.6 .4), x_2 = 0; computed by hand."""
    p = torch.zeros(1, 3, VOCAB, dtype=torch.float64)
    p[0, :, :2] = torch.tensor([[0.5, 0.5], [0.2, 0.8], [1.0, 0.0]])
    q = torch.zeros(1, 2, VOCAB, dtype=torch.float64)
    q[0, :, :2] = torch.tensor([[0.8, 0.2], [0.6, 0.4]])
    tokens = torch.tensor([[0, 0]])
    block = DraftBlock(tokens, (2,), chain(2, CPU), Dense(tokens, q))
    bar, weight, reach = block_odds(block, p)
    p1 = 0.5 / 0.8
    s1 = p1 * 0.8 - 0.4
    assert bar[0].tolist() == pytest.approx([s1, p1 * 0.2 / 0.6])
    assert weight[0].tolist() == pytest.approx([s1 + 1 - p1, 1.0])
    assert reach.tolist() == [pytest.approx([1.0, p1])]
    for accepted, over in ((0, [0.0, 0.3]), (1, [0.0, s1]), (2, [1.0, 0.0])):
        weights, bonus = residual(block, p, reach, torch.tensor([accepted]))
        assert weights[0, :2].tolist() == pytest.approx(over)
        assert bonus.tolist() == [accepted == 2]


def test_block_verification_may_accept_past_a_refused_node() -> None:
    """u_1 fails and u_2 passes: both nodes stand."""
    p = torch.full((1, 3, 2), 0.5, dtype=torch.float64)
    p[0, 0] = torch.tensor([0.4, 0.6])
    p[0, 1] = torch.tensor([0.9, 0.1])
    q = torch.tensor([[[0.8, 0.2], [0.45, 0.55]]], dtype=torch.float64)  # P_1 = .5, P_2 = min(1, .5 * 2) = 1
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    block = DraftBlock(tokens, (2,), chain(2, CPU), Dense(tokens, q))

    class Given(RoundNoise):
        def nodes(self, stream: str, topology: object) -> Tensor:
            return torch.tensor([[0.999, 0.999]], dtype=torch.float64)

    given = Given([0], [0], CPU)
    assert BlockRule().verify(block, law_of_probs(p), given).accepted.tolist() == [2]
    assert Rejection().verify(block, law_of_probs(p), given).accepted.tolist() == [0]


class Table(RoundNoise):
    """The given accept numbers, and one number for whatever is drawn."""

    def __init__(self, accept: list[float], drawn: float = 0.5) -> None:
        super().__init__([0], [0], CPU)
        self._accept, self._drawn = torch.tensor([accept], dtype=torch.float64), torch.tensor([drawn]).double()

    def nodes(self, stream: str, num_nodes: int) -> Tensor:
        return self._accept

    def once(self, stream: str) -> Tensor:
        return self._drawn


def row(*first: float) -> list[float]:
    return [*first, *[0.0] * (VOCAB - len(first))]


def test_rejection_tries_siblings_one_after_another() -> None:
    """p = (.2 .3 .5), q = (.6 .2 .2), drawn 0 then 1; by hand.

    Node 0 stands below .2 / .6. A refusal leaves p' = (0 .1 .3) / .4 and q' = (0 .5 .5), so node 1 stands below
    .25 / .5; a second refusal leaves token 2 alone.
    """
    p = torch.tensor([[row(0.2, 0.3, 0.5), row(1.0), row(1.0)]], dtype=torch.float64)
    q = torch.tensor([[row(0.6, 0.2, 0.2)] * 2], dtype=torch.float64)
    tokens = torch.tensor([[0, 1]])
    topology = from_parents(torch.tensor([[-1, -1]]), max_depth=1, max_siblings=2)
    block = DraftBlock(tokens, (2,), topology, Dense(tokens, q), without_replacement=True)
    for accept, path, first in (
        ([0.33, 0.99], [0, 1], 0),
        ([0.34, 0.49], [0, 2], 1),
        ([0.34, 0.51], [0, PAD], 2),
    ):
        verdict = Rejection().verify(block, law_of_probs(p), Table(accept))
        assert verdict.path.tolist() == [path]
        assert int(verdict.tokens[0, 0]) == first


def test_rejection_of_ranked_siblings_takes_their_mass_away() -> None:
    """p = (.2 .3 .5), children 1 then 0: node 0 stands below .3, node 1 below .2 / .7, else token 2 follows."""
    p = torch.tensor([[row(0.2, 0.3, 0.5), row(1.0), row(1.0)]], dtype=torch.float64)
    block = tree_block([1, 0], [-1, -1])
    for accept, first in (([0.29, 0.99], 1), ([0.31, 0.28], 0), ([0.31, 0.29], 2)):
        verdict = Rejection().verify(block, law_of_probs(p), Table(accept))
        assert int(verdict.tokens[0, 0]) == first
        assert verdict.accepted.tolist() == [int(first != 2)]


def test_the_token_after_a_leaf_of_a_tree_is_plain_decodings() -> None:
    """Nothing was refused there, so the number of its position is used."""
    p = torch.rand(1, 3, VOCAB, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p[0, 0] = torch.tensor(row(0.0, 0.0, 1.0))
    p = p / p.sum(-1, keepdim=True)
    seen = set()
    for seed in range(20):
        noise = RoundNoise([seed], [10], CPU)
        verdict = Rejection().verify(tree_block([2, 3], [-1, -1]), law_of_probs(p), noise)
        plain = Match().verify(tree_block([2, 3], [-1, -1]), law_of_probs(p), noise)
        assert verdict.tokens.tolist() == plain.tokens.tolist()
        seen.add(int(verdict.tokens[0, 1]))
    assert len(seen) > 1


@pytest.mark.parametrize("rule", [Rejection(), BlockRule()])
def test_equal_laws_accept_everything_and_never_divide_by_zero(rule: Rejection | BlockRule) -> None:
    p = torch.randn(1, 5, VOCAB, generator=torch.Generator().manual_seed(0)).softmax(-1)
    for seed in range(40):
        tokens = torch.randint(VOCAB, (1, 4), generator=torch.Generator().manual_seed(seed))
        block = DraftBlock(tokens, (4,), chain(4, CPU), Dense(tokens, p[:, :4]))
        verdict = rule.verify(block, TargetLaw(p.log(), p.log(), [False]), RoundNoise([seed], [3], CPU))
        assert bool((verdict.tokens < VOCAB).all())
        same = DraftBlock(tokens, (4,), chain(4, CPU), Dense(tokens, law_of_probs(p).probs()[:, :4]))
        assert rule.verify(same, law_of_probs(p), RoundNoise([seed], [3], CPU)).accepted.tolist() == [4]


@pytest.mark.parametrize("rule", [Rejection(), BlockRule()])
def test_a_greedy_row_among_sampled_ones_is_greedy(rule: Rejection | BlockRule) -> None:
    """Row 0 samples, row 1 is at temperature 0: its accepted and recovered tokens are the arg-max ones."""
    for seed in range(20):
        draws = torch.Generator().manual_seed(seed)
        logits = torch.randn(2, 4, VOCAB, generator=draws)
        q = torch.randn(2, 3, VOCAB, generator=draws).softmax(-1)
        best = logits[1].argmax(-1).tolist()
        tokens = torch.randint(VOCAB, (2, 3), generator=draws)
        tokens[1, 0] = best[0]
        block = DraftBlock(tokens, (3, 3), chain(3, CPU), Dense(tokens, q))
        verdict = rule.verify(block, TargetLaw(logits, logits, [False, True]), RoundNoise([seed, seed], [0, 0], CPU))
        text = [token for token in verdict.tokens[1].tolist() if token != PAD]
        assert text == best[: len(text)]
        assert len(text) > 1


def test_typical_takes_the_longest_path_then_the_likeliest() -> None:
    p = torch.full((1, 5, VOCAB), 0.02, dtype=torch.float64)
    p[0, 0, :4] = torch.tensor([0.30, 0.40, 0.22, 0.02])
    p[0, 1:, 6] = 0.88
    block = tree_block([0, 1, 2, 3], [-1, -1, -1, -1])
    verdict = Typical(epsilon=0.2, delta=1.0).verify(block, law_of_probs(p), NOISE)
    assert verdict.path.tolist() == [[0, 2, PAD, PAD, PAD]]
    deeper = tree_block([0, 1, 2, 6], [-1, -1, -1, 2])
    assert Typical(epsilon=0.2, delta=1.0).verify(deeper, law_of_probs(p), NOISE).path.tolist() == [[0, 3, 4, PAD, PAD]]


def test_typical_asks_less_of_a_node_where_the_target_is_unsure() -> None:
    """delta exp(-entropy): 0.3 / 7 at an even row, so a probability of 1/7 passes; 0.3 where it is certain."""
    even = torch.full((1, 2, VOCAB), 1 / VOCAB, dtype=torch.float64)
    block = tree_block([4], [-1])
    assert Typical(epsilon=0.9).verify(block, law_of_probs(even), NOISE).accepted.tolist() == [1]
    assert Typical(epsilon=0.9).verify(block, law_of_probs(peaked([1, 1], 0.8)), NOISE).accepted.tolist() == [0]


@pytest.mark.parametrize("options", [{"epsilon": 0.0}, {"epsilon": 1.0}, {"delta": 0.0}, {"delta": float("nan")}])
def test_typical_refuses_senseless_thresholds(options: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match=next(iter(options))):
        Typical(**options)


class TableModel:
    """Logits by the last three tokens of a text: a target whose law depends on its prefix."""

    def __init__(self, seed: int) -> None:
        draws = torch.Generator().manual_seed(seed)
        self._table = torch.randn(VOCAB + 1, VOCAB + 1, VOCAB + 1, VOCAB, generator=draws) * 2

    def __call__(self, text: Sequence[int]) -> Tensor:
        return self._table[tuple([VOCAB, VOCAB, *text][-3:])]

    def rows(self, text: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Logits of the anchor's row and of every node's.  # [M, V]"""
        texts = [list(text)]
        for token, parent in zip(tokens, parents, strict=True):
            texts.append([*texts[parent + 1], max(token, 0)])
        return torch.stack([self(each) for each in texts])


SETTINGS = (
    Sampling(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.2),
    Sampling(temperature=1.0),
    Sampling(temperature=0.8, top_k=5, top_p=0.9, presence_penalty=0.5, logit_bias={3: 1.0}),
    Sampling(temperature=1.4, min_p=0.05, min_new_tokens=10, stop_ids=(4,)),
)


class Run:
    """A batch of requests decoded by the match rule, drafts given from outside."""

    def __init__(self, prompts: list[list[int]], wanted: int) -> None:
        self.prompts, self.wanted, self.model = prompts, wanted, TableModel(0)
        self.sampler = BatchSampler(VOCAB, (2,), CPU)
        self.sampler.reset(len(prompts))
        self.texts: list[list[int]] = [[] for _ in prompts]
        for row, (prompt, sampling) in enumerate(zip(prompts, SETTINGS, strict=True)):
            self.sampler.start(row, sampling, row, prompt)

    def round(self, tokens: list[list[int]], parents: list[list[int]] | None) -> None:
        shape = (len(tokens), len(tokens[0]))
        ids = torch.tensor(tokens, dtype=torch.int64).view(shape)
        topology = chain(shape[1], CPU) if parents is None else from_parents(torch.tensor(parents).view(shape))
        block = DraftBlock(ids, (shape[1],) * shape[0], topology, PointMass(ids, VOCAB))
        above = parents or [[node - 1 for node in range(shape[1])]] * shape[0]
        whole = [prompt + text for prompt, text in zip(self.prompts, self.texts, strict=True)]
        logits = torch.stack([self.model.rows(*each) for each in zip(whole, tokens, above, strict=True)])
        law = self.sampler.law(logits, block, [len(text) for text in self.texts])
        noise = RoundNoise([5, 6, 7, 8], [len(text) - 1 for text in whole], CPU)
        verdict = Match().verify(block, law, noise)
        new = [[token for token in row if token != PAD] for row in verdict.tokens.tolist()]
        self.sampler.commit(range(shape[0]), new)
        for text, more in zip(self.texts, new, strict=True):
            text.extend(more)

    def result(self) -> list[list[int]]:
        return [text[: self.wanted] for text in self.texts]


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("skill", [0.0, 0.5, 0.9])
def test_match_says_token_for_token_what_plain_decoding_says(shape: str, skill: float) -> None:
    """Any tree, right or wrong, any processors, ragged prompts; nodes are vanilla's tokens with some probability."""
    prompts, wanted = [[1, 3, 3], [5], [6, 6, 1, 0], [2, 4]], 24
    plain = Run(prompts, wanted + 12)
    while len(plain.texts[0]) < plain.wanted:
        plain.round([[]] * 4, None)
    draws = random.Random(str((shape, skill)))
    for num_nodes in (1, 2, 5, 9):
        run, rounds = Run(prompts, wanted), 0
        while min(map(len, run.texts)) < wanted:
            parents = [[draws.randrange(-1, node) for node in range(num_nodes)] for _ in range(4)]
            if shape == "chain":
                parents = [list(range(-1, num_nodes - 1))] * 4
            tokens = []
            for text, future, above in zip(run.texts, plain.texts, parents, strict=True):
                row: list[int] = []
                for node in range(num_nodes):
                    depth, at = 0, node
                    while at >= 0:
                        depth, at = depth + 1, above[at]
                    right = draws.random() < skill and len(text) + depth <= len(future)
                    row.append(future[len(text) + depth - 1] if right else draws.randrange(-1, VOCAB))
                tokens.append(row)
            run.round(tokens, None if shape == "chain" else parents)
            rounds += 1
        assert run.result() == [text[:wanted] for text in plain.texts]
        if skill > 0.8 and num_nodes > 1:
            assert rounds < wanted

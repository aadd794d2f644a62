"""The suite every verification rule passes: what the engine relies on, whatever the rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from questions import NoQuestions
from torch import Tensor

from specflow.errors import GraphError
from specflow.law import Dense, PointMass
from specflow.noise import RoundNoise
from specflow.rules import RULE_INFOS
from specflow.sampling import BatchSampler, TargetLaw, draw_tokens
from specflow.tree import chain, from_parents
from specflow.types import PAD, DraftBlock, Sampling, Topology, Verdict
from specflow.verify import RULES, Match, Rule

VOCAB, BATCH, NODES = 11, 6, 4
CPU = torch.device("cpu")
SEEDS, STARTS, LENGTHS = [3, 3, 8, 9, 10, 11], [7, 20, 9, 0, 1, 90], (4, 4, 2, 0, 3, 1)
TREE = torch.tensor([[-1, -1, 0, 2], [-1, 0, 0, 1], [-1, -1, -1, -1], [-1, 0, 1, 2], [-1, -1, 1, 1], [-1, 0, 0, 0]])

rules = pytest.mark.parametrize("rule", [pytest.param(make(), id=name) for name, make in RULES.items()])


def logits_for(seed: int, rows: int = NODES + 1, dtype: torch.dtype = torch.float64) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    return (torch.randn(BATCH, rows, VOCAB, generator=draws, dtype=torch.float64) * 2).to(dtype)


def law_of(logits: Tensor, sampling: Sampling, block: DraftBlock) -> TargetLaw:
    sampler = BatchSampler(VOCAB, (2,), CPU)
    sampler.reset(len(logits))
    for row in range(len(logits)):
        sampler.start(row, sampling, 0, [1, 2, 3])
    return sampler.law(logits, block, [1] * len(logits))


def sampled_block(seed: int, lengths: Sequence[int] = LENGTHS, topology: Topology | None = None) -> DraftBlock:
    """Drafts drawn from a random dense law, ragged by `lengths`."""
    draws = torch.Generator().manual_seed(seed)
    shape = (len(lengths), NODES)
    q = torch.randn(*shape, VOCAB, generator=draws, dtype=torch.float64).mul(2).softmax(-1)
    tokens = draw_tokens(q, torch.rand(shape, generator=draws, dtype=torch.float64))
    tokens = tokens.masked_fill(torch.arange(NODES) >= torch.tensor(lengths).unsqueeze(1), PAD)
    topology = topology or chain(NODES, CPU)
    return DraftBlock(tokens, tuple(lengths), topology, Dense(tokens, q), without_replacement=not topology.is_chain)


def noise_for(rows: Sequence[int] = range(BATCH), round_: int = 0) -> RoundNoise:
    return RoundNoise([SEEDS[row] + 100 * round_ for row in rows], [STARTS[row] for row in rows], CPU)


def check_layout(verdict: Verdict, block: DraftBlock) -> None:
    """The verdict's three tensors tell one story, and only of nodes that exist."""
    for b, accepted in enumerate(verdict.accepted.tolist()):
        path, tokens = verdict.path[b].tolist(), verdict.tokens[b].tolist()
        parents = block.topology.parents[b if len(block.topology.parents) > 1 else 0].tolist()
        assert len(path) == len(tokens) == block.topology.max_depth + 1
        assert path[0] == 0
        assert path[accepted + 1 :] == tokens[accepted + 1 :] == [PAD] * (len(path) - accepted - 1)
        assert 0 <= tokens[accepted] < VOCAB
        assert 0 <= accepted <= block.lengths[b]
        for depth in range(1, accepted + 1):
            node = path[depth] - 1
            assert parents[node] + 1 == path[depth - 1]
            assert tokens[depth - 1] == int(block.tokens[b, node]) != PAD


@rules
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_verdicts_are_laid_out_as_promised(rule: Rule, dtype: torch.dtype, temperature: float) -> None:
    for seed in range(20):
        shapes = [chain(NODES, CPU), from_parents(TREE)] if RULE_INFOS[rule.name].trees else [chain(NODES, CPU)]
        for topology in shapes:
            block = sampled_block(seed, topology=topology)
            law = law_of(logits_for(seed + 50, dtype=dtype), Sampling(temperature=temperature), block)
            check_layout(rule.verify(block, law, noise_for(round_=seed)), block)


@rules
def test_a_rule_is_registered_under_its_name(rule: Rule) -> None:
    assert isinstance(rule, RULES[rule.name])  # type: ignore[arg-type]


def test_every_rule_of_recipes_exists_and_takes_its_options() -> None:
    assert set(RULES) == set(RULE_INFOS)
    for name, info in RULE_INFOS.items():
        assert RULES[name](**info.config().model_dump()).name == name


@rules
def test_a_block_shaped_by_its_own_sampled_tokens_is_refused_or_does_no_harm(rule: Rule) -> None:
    """What a confidence depends on is no matter; what the length depends on is."""
    block = sampled_block(0)
    law = law_of(logits_for(0), Sampling(temperature=1.0), block)
    copied = replace(block, law=PointMass(block.tokens, VOCAB))
    sure = replace(block, confidence=torch.ones(block.tokens.shape), confidence_from="self")
    for harmless in (sure, replace(block, lengths_from="prefix"), replace(copied, structure_from="sampled")):
        rule.verify(harmless, law, noise_for())
    rule.verify(replace(copied, lengths_from="self"), law, noise_for())
    for harmful in (replace(block, lengths_from="self"), replace(block, structure_from="sampled")):
        if RULE_INFOS[rule.name].needs_law:
            with pytest.raises(GraphError, match="its own sampled tokens"):
                rule.verify(harmful, law, noise_for())
            RULES[rule.name](lossless=False).verify(harmful, law, noise_for())
        else:
            rule.verify(harmful, law, noise_for())


@rules
def test_trees_are_taken_or_refused_with_the_reason(rule: Rule) -> None:
    block = sampled_block(0, topology=from_parents(TREE))
    law = law_of(logits_for(0), Sampling(temperature=1.0), block)
    if RULE_INFOS[rule.name].trees:
        check_layout(rule.verify(block, law, noise_for()), block)
    else:
        with pytest.raises(GraphError, match="tree"):
            rule.verify(block, law, noise_for())


@rules
def test_sampled_siblings_must_be_drawn_as_the_rule_needs_them(rule: Rule) -> None:
    block = replace(sampled_block(0, topology=from_parents(TREE)), without_replacement=False)
    law = law_of(logits_for(0), Sampling(temperature=1.0), block)
    info = RULE_INFOS[rule.name]
    if info.without_replacement:
        with pytest.raises(GraphError, match="siblings were sampled"):
            rule.verify(block, law, noise_for())
        RULES[rule.name](lossless=False).verify(block, law, noise_for())
        rule.verify(replace(block, law=PointMass(block.tokens, VOCAB)), law, noise_for())
    elif info.trees:
        rule.verify(block, law, noise_for())


tree_rules = pytest.mark.parametrize(
    "rule", [pytest.param(make(), id=name) for name, make in RULES.items() if RULE_INFOS[name].trees]
)


@tree_rules
@pytest.mark.parametrize("point", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_chain_called_a_tree_has_the_verdict_of_the_chain(rule: Rule, point: bool, temperature: float) -> None:
    accepted = 0
    for seed in range(20):
        block, logits = sampled_block(seed), logits_for(seed + 50)
        if point:
            block = replace(block, law=PointMass(block.tokens, VOCAB))
        law, noise = law_of(logits, Sampling(temperature=temperature), block), noise_for(round_=seed)
        one_wide = from_parents(torch.arange(NODES).unsqueeze(0) - 1)
        tree = replace(block, topology=one_wide, without_replacement=True)
        found, expected = rule.verify(tree, law, noise), rule.verify(block, law, noise)
        assert found.tokens.equal(expected.tokens)
        assert found.path.equal(expected.path)
        accepted += int(found.accepted.sum())
    assert accepted > 0


@tree_rules
@pytest.mark.parametrize("point", [True, False])
@pytest.mark.parametrize("parents", [[], [-1], [-1] * NODES, [-1, 0, 0, 0], [-1, 0, -1, 2]])
def test_degenerate_trees(rule: Rule, point: bool, parents: list[int]) -> None:
    """Nothing, one node, depth 1, one child with all the rest, twins; ragged, with rows that have nothing at all."""
    draws = torch.Generator().manual_seed(1)
    for seed in range(10):
        q = torch.randn(BATCH, len(parents), VOCAB, generator=draws, dtype=torch.float64).softmax(-1)
        tokens = torch.randint(VOCAB, q.shape[:2], generator=draws)
        reach = torch.tensor(LENGTHS).clamp_max(len(parents))
        tokens = tokens.masked_fill(torch.arange(len(parents)) >= reach.unsqueeze(1), PAD)
        law = PointMass(tokens, VOCAB) if point else Dense(tokens, q)
        topology = from_parents(torch.tensor([parents], dtype=torch.int64))
        block = DraftBlock(tokens, tuple(reach.tolist()), topology, law, without_replacement=True)
        target = law_of(logits_for(seed, rows=len(parents) + 1), Sampling(temperature=1.0), block)
        check_layout(rule.verify(block, target, noise_for(round_=seed)), block)


@tree_rules
def test_nothing_below_a_node_that_is_not_there_is_accepted(rule: Rule) -> None:
    """Row 0 lacks the first child of the anchor, whose child the target would have said."""
    tokens = torch.tensor([[PAD, 4, 5], [3, 4, 5]])
    logits = torch.full((2, 4, VOCAB), -30.0, dtype=torch.float64)
    for row, said in ((0, 3), (1, 4), (2, 0), (3, 1)):
        logits[:, row, said] = 0.0
    block = DraftBlock(tokens, (2, 3), from_parents(torch.tensor([[-1, 0, -1]])), PointMass(tokens, VOCAB))
    for temperature in (0.0, 1.0):
        law = law_of(logits, Sampling(temperature=temperature), block)
        assert rule.verify(block, law, noise_for([0, 1])).accepted.tolist() == [0, 2]


@rules
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_without_a_draft_every_rule_is_plain_decoding(rule: Rule, temperature: float) -> None:
    """So a request that does not speculate has vanilla's text under any rule, token for token."""
    tokens = torch.empty(BATCH, 0, dtype=torch.int64)
    block = DraftBlock(tokens, (0,) * BATCH, chain(0, CPU), PointMass(tokens, VOCAB))
    for seed in range(10):
        law = law_of(logits_for(seed, rows=1), Sampling(temperature=temperature), block)
        verdict = rule.verify(block, law, noise_for(round_=seed))
        assert verdict.tokens.equal(law.draw(noise_for(round_=seed).rows("target", block.topology)))
        assert verdict.path.tolist() == [[0]] * BATCH
        assert verdict.accepted.tolist() == [0] * BATCH


@rules
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_does_not_see_its_neighbours(rule: Rule, temperature: float) -> None:
    for seed in range(10):
        block, logits = sampled_block(seed), logits_for(seed + 9)
        verdict = rule.verify(block, law_of(logits, Sampling(temperature=temperature), block), noise_for(round_=seed))
        for b in range(BATCH):
            probs = block.law.probs[b : b + 1]  # type: ignore[attr-defined]
            tokens = block.tokens[b : b + 1]
            alone = DraftBlock(tokens, block.lengths[b : b + 1], block.topology, Dense(tokens, probs))
            law = law_of(logits[b : b + 1], Sampling(temperature=temperature), alone)
            assert rule.verify(alone, law, noise_for([b], seed)).tokens.equal(verdict.tokens[b : b + 1])


@rules
def test_at_temperature_zero_lossless_rules_are_the_match_rule(rule: Rule) -> None:
    accepted = 0
    for seed in range(30):
        logits = logits_for(seed)
        block = sampled_block(seed)
        right = torch.rand(BATCH, NODES, generator=torch.Generator().manual_seed(seed)) < 0.6
        tokens = torch.where(right & (block.tokens >= 0), logits[:, :-1].argmax(-1), block.tokens)
        block = DraftBlock(tokens, LENGTHS, block.topology, Dense(tokens, block.law.probs))  # type: ignore[attr-defined]
        law = law_of(logits, Sampling(), block)
        verdict, expected = rule.verify(block, law, noise_for()), Match().verify(block, law, noise_for())
        if not RULE_INFOS[rule.name].lossy:
            assert verdict.tokens.equal(expected.tokens)
        accepted += int(verdict.accepted.sum())
    assert accepted > 0


@tree_rules
@pytest.mark.parametrize("point", [True, False])
def test_at_temperature_zero_lossless_rules_are_the_match_rule_on_trees(rule: Rule, point: bool) -> None:
    """Also where a neighbour samples, so that the rule weighs laws that are one-hot. Twins may end a walk early."""
    accepted = 0
    for seed in range(30):
        logits = logits_for(seed)
        block = sampled_block(seed, topology=from_parents(TREE))
        parents = block.topology.parents
        rank = (parents.unsqueeze(2) == parents.unsqueeze(1)).tril(-1).sum(2)
        wrong = torch.randint(-2, 1, parents.shape[:1], generator=torch.Generator().manual_seed(seed)).unsqueeze(1)
        said = logits.argmax(-1).gather(1, parents + 1) + rank + wrong  # no siblings alike, at most one right
        tokens = torch.where(block.tokens >= 0, said % VOCAB, PAD)
        q = Dense(tokens, block.law.probs)  # type: ignore[attr-defined]
        block = replace(block, tokens=tokens, law=PointMass(tokens, VOCAB) if point else q)
        expected = Match().verify(block, TargetLaw(logits, logits, [True] * BATCH), noise_for())
        for greedy in ([True] * BATCH, [True, True, False, True, True, True]):
            verdict = rule.verify(block, TargetLaw(logits, logits, greedy), noise_for())
            rows = torch.tensor(greedy)
            if not RULE_INFOS[rule.name].lossy:
                assert verdict.tokens[rows].equal(expected.tokens[rows])
        accepted += int(expected.accepted.sum())
    assert accepted > 0


@rules
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_the_target_cannot_say_is_never_accepted(rule: Rule, temperature: float) -> None:
    """An adversarial drafter, whose tokens have probability 0; nor does any recovered token."""
    for seed in range(20):
        block, logits = sampled_block(seed), logits_for(seed)
        logits[:, :-1].scatter_(2, block.tokens.clamp_min(0).unsqueeze(-1), -torch.inf)
        law = law_of(logits, Sampling(temperature=temperature), block)
        verdict = rule.verify(block, law, noise_for(round_=seed))
        assert verdict.accepted.tolist() == [0] * BATCH
        said = law.probs()[:, 0].gather(1, verdict.tokens[:, :1])
        assert bool((said > 0).all())


@rules
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_the_target_must_say_is_accepted_whole_with_a_bonus(rule: Rule, temperature: float) -> None:
    """An oracle drafter; every row gets the token after its own last node, ragged or not."""
    block = sampled_block(1)
    logits = torch.full((BATCH, NODES + 1, VOCAB), -torch.inf, dtype=torch.float64)
    logits[:, :-1].scatter_(2, block.tokens.clamp_min(0).unsqueeze(-1), 0.0)
    bonus = torch.arange(BATCH)
    logits[bonus, torch.tensor(LENGTHS)] = -torch.inf
    logits[bonus, torch.tensor(LENGTHS), bonus + 2] = 0.0
    logits[:, -1, 0] = -50.0  # rows past a length say something, too
    oracle = DraftBlock(block.tokens, LENGTHS, block.topology, PointMass(block.tokens, VOCAB))
    for drafted in (block, oracle):
        verdict = rule.verify(drafted, law_of(logits, Sampling(temperature=temperature), drafted), noise_for())
        assert verdict.accepted.tolist() == list(LENGTHS)
        assert verdict.tokens.gather(1, verdict.accepted.unsqueeze(1)).squeeze(1).tolist() == (bonus + 2).tolist()


PROCESSED = Sampling(
    temperature=0.7,
    top_k=6,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={1: 0.5},
    min_new_tokens=8,
)


@rules
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, top_p=0.8), PROCESSED])
def test_a_round_asks_the_device_nothing(rule: Rule, sampling: Sampling) -> None:
    block, logits, noise = sampled_block(0), logits_for(0), noise_for()
    sampler = BatchSampler(VOCAB, (2,), CPU)
    sampler.reset(BATCH)
    for row in range(BATCH):
        sampler.start(row, sampling, 0, [1, 2, 3])
    with NoQuestions():
        law = sampler.law(logits, block, [1] * BATCH)
        verdict = rule.verify(block, law, noise)
        law.logprob(verdict.tokens, verdict.path)
    with NoQuestions(), pytest.raises(AssertionError, match="waits"):
        verdict.accepted[0].item()


@tree_rules
@pytest.mark.parametrize("point", [True, False])
def test_a_tree_asks_an_accelerator_nothing(rule: Rule, point: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specflow.verify_tree.asking_is_free", lambda device: False)
    block, logits, noise = sampled_block(0, topology=from_parents(TREE, max_siblings=4)), logits_for(0), noise_for()
    block = replace(block, law=PointMass(block.tokens, VOCAB)) if point else block
    law = law_of(logits, Sampling(temperature=1.0), block)
    with NoQuestions():
        asked = rule.verify(block, law, noise)
    monkeypatch.undo()
    assert rule.verify(block, law, noise).tokens.equal(asked.tokens)

"""Combinations of drafters: who drafts which row, how blocks meet in a batch, and that the text stays vanilla's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import VOCAB, NumberText, tiny_target
from torch import Tensor

from specflow.build import LoadedTarget, build_engine
from specflow.draft.base import Needs, Uniforms
from specflow.draft.combine import FirstOf, Merge, Part
from specflow.law import ByRow, Dense, DraftVocabulary, PointMass, Reduced, Sparse
from specflow.measure import check_counts
from specflow.recipe import parse_recipe
from specflow.target.base import Cache
from specflow.tree import chain, from_parents
from specflow.types import PAD, DraftBlock, DraftBudget, Entry, Generation, Law, Observation, Sampling

CPU = torch.device("cpu")
TARGET = LoadedTarget(tiny_target(), NumberText())  # type: ignore[arg-type]
CACHE = TARGET.target.new_cache(1, 8)


class NoRandomness:
    def uniform(self, stream: str, row: int, position: int) -> float:
        raise AssertionError("nothing is drawn here")


class Fixed:
    """Proposes, of a block that was made before, the rows it is asked for, and notes everything it is told."""

    num_nodes = 5

    def __init__(self, block: DraftBlock | None, needs: Needs | None = None, branches: bool = False) -> None:
        self.needs, self.branches = needs or Needs(), branches
        self.block = block
        self.told: list[Any] = []

    def reset(self, batch: int, cache: Cache) -> None:
        self.told.append(("reset", batch))

    def start(self, row: int, prompt: Sequence[int], sampling: Sampling) -> None:
        self.told.append(("start", row, tuple(prompt)))

    def observe(self, observation: Observation, rows: Sequence[int]) -> None:
        self.told.append(observation)

    def select(self, rows: Sequence[int]) -> None:
        self.told.append(("select", tuple(rows)))

    def propose(self, anchors: Sequence[int], budget: DraftBudget, uniforms: Uniforms) -> DraftBlock | None:
        self.told.append(budget.tokens)
        if self.block is None:
            return None
        asked = torch.tensor(budget.tokens).unsqueeze(1)
        tokens = self.block.tokens.masked_fill(self.block.topology.depth[:, 1:] > asked, PAD)
        lengths = tuple((tokens >= 0).sum(1).tolist())
        return replace(self.block, tokens=tokens, lengths=lengths)


def block_of(rows: Sequence[Sequence[int]], parents: Sequence[Sequence[int]] | None = None, **more: Any) -> DraftBlock:
    """Rows padded to each other; a chain where no parents are given."""
    width = max(map(len, rows))
    tokens = torch.tensor([[*row, *[PAD] * (width - len(row))] for row in rows])
    topology = chain(width, CPU)
    if parents is not None:
        topology = from_parents(torch.tensor([[*each, *[-1] * (width - len(each))] for each in parents]))
    law = more.pop("law", None) or PointMass(tokens, VOCAB)
    return DraftBlock(tokens, tuple(len(row) for row in rows), topology, law, **more)


def first_of(*drafters: Fixed, k: int = 5, batch: int = 3) -> FirstOf:
    found = FirstOf([Part(drafter, k) for drafter in drafters], VOCAB, CPU)
    found.reset(batch, CACHE)
    return found


def propose(drafter: FirstOf | Merge, *budget: int) -> DraftBlock:
    block = drafter.propose([1] * len(budget), DraftBudget(budget), NoRandomness())
    assert block is not None
    return block


def paths(block: DraftBlock, row: int) -> set[tuple[int, ...]]:
    """Token paths of a row, one a node."""
    parents = block.topology.parents.expand(len(block.tokens), -1)[row].tolist()
    tokens = block.tokens[row].tolist()
    found: dict[int, tuple[int, ...]] = {-1: ()}
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if token != PAD:
            assert parent in found, "a node without its parent"
            found[node] = (*found[parent], token)
    listed = [path for node, path in found.items() if node >= 0]
    assert len(listed) == len(set(listed)), "a node twice"
    return set(listed)


def test_each_row_goes_to_the_first_that_has_something() -> None:
    first = Fixed(block_of([[5, 6, 7], [], []], match_lengths=(4, 0, 0)))
    second = Fixed(block_of([[8, 8], [9, 9], [9, 8]]))
    block = propose(first_of(first, second), 5, 5, 0)
    assert first.told[-1] == (5, 5, 0)
    assert second.told[-1] == (0, 5, 0)
    assert block.tokens.tolist() == [[5, 6, 7], [9, 9, PAD], [PAD] * 3]
    assert block.lengths == (3, 2, 0)
    assert block.topology.is_chain
    assert block.topology.max_depth == 3
    assert block.match_lengths == (4, 0, 0)
    assert block.law.is_point


def test_the_second_rests_where_the_first_serves_all_and_works_where_it_serves_none() -> None:
    one, two = Fixed(block_of([[5], [6]])), Fixed(block_of([[7, 7], [8, 8]]))
    assert propose(first_of(one, two, batch=2), 2, 2).tokens.tolist() == [[5], [6]]
    assert two.told == [("reset", 2)]
    assert propose(first_of(Fixed(None), two, batch=2), 2, 2).tokens.tolist() == [[7, 7], [8, 8]]
    assert first_of(one, two, batch=2).propose([1, 1], DraftBudget((0, 0)), NoRandomness()) is None
    assert first_of(Fixed(None), Fixed(None)).propose([1] * 3, DraftBudget((2, 2, 2)), NoRandomness()) is None


def test_a_part_drafts_no_deeper_than_its_own_k() -> None:
    drafter = Fixed(block_of([[5, 6, 7, 8]]))
    combined = FirstOf([Part(drafter, 2), Part(Fixed(None), 5)], VOCAB, CPU)
    combined.reset(1, CACHE)
    assert propose(combined, 5).lengths == (2,)


def test_own_rows_are_those_a_part_has_served() -> None:
    first, second = Fixed(block_of([[5, 6], [], []])), Fixed(block_of([[], [7, 8], [9, 9]]))
    combined = first_of(first, second)
    propose(combined, 2, 2, 0)
    told = Observation(((5, 6, 1), (7, 2), (3,)), (4, 4, 4), (3, 2, 1), own=(2, 1, 0))
    combined.observe(told, range(3))
    assert first.told[-1] == replace(told, own=(2, 0, 0))
    assert second.told[-1] == replace(told, own=(0, 1, 0))
    prompt = Observation(((5,),), (0,), (1,))
    combined.start(1, [4, 5], Sampling())
    combined.observe(prompt, [1])
    assert first.told[-1] == second.told[-1] == prompt


def test_a_row_is_cut_as_if_it_were_alone() -> None:
    """Beside a row that copies from history, with a policy that cuts by confidence and a rule that weighs drafts."""
    draft = {"first_of": [{"method": "suffix", "min_match": 3}, {"method": "small_model"}], "k": 5}
    data = {"draft": draft, "verify": {"rule": "block"}, "length": {"policy": "confidence", "threshold": 0.05}}
    target = LoadedTarget(tiny_target(), NumberText())  # type: ignore[arg-type]
    prompts, sampling = (
        [[7, 3, 50], [5, 9, 33] * 5],
        Sampling(max_new_tokens=24, ignore_eos=True, temperature=1.0, seed=4),
    )
    made = [
        build_engine(parse_recipe({**data, "runtime": {"batch": batch}}), target).generate(prompts, sampling)
        for batch in (1, 2)
    ]
    assert [generation.tokens for generation in made[0]] == [generation.tokens for generation in made[1]]
    assert made[0][0].counts.num_draft_tokens == made[1][0].counts.num_draft_tokens > 0


def test_own_rows_move_with_the_batch() -> None:
    first, second = Fixed(block_of([[5], [], []])), Fixed(block_of([[], [7], [8]]))
    combined = first_of(first, second)
    propose(combined, 1, 1, 1)
    combined.select([2, 0])
    combined.observe(Observation(((8, 1), (5, 1)), (4, 4), (2, 2), own=(1, 1)), range(2))
    assert first.told[-1].own == (0, 1)
    assert second.told[-1].own == (1, 0)


@pytest.mark.parametrize("kind", [FirstOf, Merge])
def test_everything_else_goes_to_all_parts(kind: type) -> None:
    drafters = [
        Fixed(None, Needs(taps=(3, 1))),
        Fixed(None, Needs(taps=(1, 7), hidden_post=True), branches=True),
    ]
    parts = [Part(drafter, 3) for drafter in drafters]
    combined = FirstOf(parts, VOCAB, CPU) if kind is FirstOf else Merge(parts, 4, VOCAB, CPU)
    assert combined.needs == Needs(taps=(1, 3, 7), hidden_post=True)
    assert combined.num_nodes == 5
    assert combined.branches
    combined.reset(2, CACHE)
    combined.start(1, [4], Sampling())
    combined.select([1])
    for drafter in drafters:
        assert drafter.told == [("reset", 2), ("start", 1, (4,)), ("select", (1,))]


def test_chains_and_trees_meet_in_one_batch() -> None:
    tree = block_of([[], [5, 6, 7, 8]], [[], [-1, -1, 0, 1]])
    block = propose(first_of(Fixed(block_of([[1, 2, 3], []])), Fixed(tree), batch=2), 5, 5)
    assert not block.topology.is_chain
    assert paths(block, 0) == {(1,), (1, 2), (1, 2, 3)}
    assert paths(block, 1) == {(5,), (6,), (5, 7), (6, 8)}
    assert block.topology.depth.tolist() == [[0, 1, 2, 3, 1], [0, 1, 1, 2, 2]]


def test_what_a_mixed_block_says_of_itself_is_the_most_careful_of_its_parts() -> None:
    probs = torch.full((2, 2, VOCAB), 1 / VOCAB)
    tokens = torch.tensor([[PAD, PAD], [7, 8]])
    sure = torch.tensor([[0.9, 0.8], [0.7, 0.6]])
    entry = Entry(1, torch.zeros(2, 3, 4))
    sampled = block_of([[], [7, 8]], law=Dense(tokens, probs), confidence=sure, confidence_from="prefix", entry=entry)
    copied = block_of([[5, 6, 4], []], lengths_from="prefix")
    block = propose(first_of(Fixed(copied), Fixed(sampled), batch=2), 3, 3)
    assert block.confidence is not None
    torch.testing.assert_close(
        block.confidence, torch.tensor([[1.0, 1.0, 1.0], [0.7, 0.6, 1.0]])
    )  # nobody doubts copies
    assert (block.lengths_from, block.confidence_from, block.structure_from) == ("prefix", "prefix", "context")
    assert block.without_replacement
    assert block.entry is None
    assert not block.law.is_point
    spoken = replace(copied, confidence=torch.tensor([[0.5, 0.4, 0.3]] * 2), confidence_from="self")
    block = propose(first_of(Fixed(spoken), Fixed(sampled), batch=2), 3, 3)
    assert block.confidence is not None
    torch.testing.assert_close(block.confidence, torch.tensor([[0.5, 0.4, 0.3], [0.7, 0.6, 1.0]]))
    assert block.confidence_from == "self"
    assert propose(first_of(Fixed(sampled), batch=2), 0, 3).entry is None


def laws(batch: int, generator: torch.Generator) -> list[tuple[Law, Tensor]]:
    """One of each kind, of different widths."""
    found: list[tuple[Law, Tensor]] = []
    for width, kind in ((3, "point"), (5, "dense"), (2, "reduced"), (4, "sparse")):
        ids = torch.tensor([2, 5, 7, 11])
        tokens = ids[torch.randint(0, 4, (batch, width), generator=generator)]
        probs = torch.rand(batch, width, 13 if kind == "dense" else 4, generator=generator, dtype=torch.float64)
        probs /= probs.sum(-1, keepdim=True)
        law: Law
        if kind == "point":
            law = PointMass(tokens, 13)
        elif kind == "dense":
            law = Dense(tokens, probs)
        elif kind == "reduced":
            law = Reduced(tokens, probs, DraftVocabulary(ids, 13))
        else:
            law = Sparse(tokens, ids.expand(batch, width, 4), probs, 13)
        found.append((law, tokens))
    return found


def test_a_law_by_row_is_each_rows_own_law() -> None:
    generator = torch.Generator().manual_seed(0)
    batch = 8
    each = laws(batch, generator)
    serves = torch.tensor([0, 1, 2, 3, 3, 2, 1, 0])
    law = ByRow([law for law, _ in each], [tokens.shape[1] for _, tokens in each], serves, 5)
    p = torch.rand(batch, 5, 13, generator=generator, dtype=torch.float64)
    p /= p.sum(-1, keepdim=True)
    scale = torch.rand(batch, 5, generator=generator, dtype=torch.float64)
    assert not law.is_point
    for width in (5, 3, 1):
        node = torch.arange(batch) % width
        cut = law.narrow(width)
        prob, mass = cut.prob(), cut.excess_mass(scale[:, :width], p[:, :width])
        at, row = cut.excess_at(node, p[:, 0]), cut.row(node)
        assert prob.shape == mass.shape == (batch, width)
        for b, number in enumerate(serves.tolist()):
            single, tokens = each[number]
            known = min(width, tokens.shape[1])
            single = single.narrow(known)
            torch.testing.assert_close(prob[b, :known].double(), single.prob()[b].double())
            assert (prob[b, known:] == 1).all()
            torch.testing.assert_close(mass[b, :known], single.excess_mass(scale[:, :known], p[:, :known])[b])
            if node[b] < known:
                torch.testing.assert_close(at[b], single.excess_at(node.clamp_max(known - 1), p[:, 0])[b])
                torch.testing.assert_close(row[b].double(), single.row(node.clamp_max(known - 1))[b].double())


def merge(nodes: int, *drafters: Fixed, batch: int = 1) -> Merge:
    found = Merge([Part(drafter, 9) for drafter in drafters], nodes, VOCAB, CPU)
    found.reset(batch, CACHE)
    return found


def test_shared_prefixes_become_one_node() -> None:
    one = Fixed(block_of([[5, 6, 7]]))
    two = Fixed(block_of([[5, 8, 6, 9]], [[-1, -1, 0, 2]], entry=Entry(1, torch.zeros(1, 5, 4))))
    block = propose(merge(9, one, two), 9)
    assert paths(block, 0) == {(5,), (5, 6), (5, 6, 7), (8,), (5, 6, 9)}
    assert block.tokens[0, :5].tolist() == [5, 8, 6, 7, 9]
    assert block.topology.max_depth >= 3
    assert block.law.is_point
    assert (block.entry, block.match_lengths, block.confidence) == (None, None, None)


def test_shallow_nodes_come_first_and_of_one_depth_the_first_drafters() -> None:
    one, two = Fixed(block_of([[1, 2, 3]])), Fixed(block_of([[4, 5, 6]]))
    for nodes, kept in ((1, [1]), (2, [1, 4]), (3, [1, 4, 2]), (5, [1, 4, 2, 5, 3])):
        block = propose(merge(nodes, one, two), 9)
        assert block.tokens[0].tolist() == kept
        assert block.num_nodes == nodes


def random_tree(rng: random.Random, size: int) -> tuple[list[int], list[int]]:
    """Tokens and parents; siblings differ."""
    tokens: list[int] = []
    parents: list[int] = []
    known = {()}
    at: list[tuple[int, ...]] = []
    while len(tokens) < size:
        parent, token = rng.randrange(-1, len(tokens)), rng.randrange(3)
        path = (*(at[parent] if parent >= 0 else ()), token)
        if path not in known:
            known.add(path)
            at.append(path)
            tokens.append(token)
            parents.append(parent)
    return tokens, parents


@pytest.mark.parametrize("seed", range(25))
def test_merging_equals_merging_by_hand(seed: int) -> None:
    rng = random.Random(seed)
    batch, nodes = 3, rng.randint(1, 14)
    blocks = []
    for _ in range(rng.randint(2, 3)):
        rows = [random_tree(rng, rng.choice([0, 1, rng.randint(2, 7)])) for _ in range(batch)]
        if all(not tokens for tokens, _ in rows):
            rows[0] = ([1], [-1])
        blocks.append(block_of([tokens for tokens, _ in rows], [parents for _, parents in rows]))
    block = propose(merge(nodes, *map(Fixed, blocks), batch=batch), 9, 9, 9)
    for row in range(batch):
        expected: dict[tuple[int, ...], tuple[int, int, int]] = {}
        for number, each in enumerate(blocks):
            at: dict[int, tuple[int, ...]] = {-1: ()}
            for node, token in enumerate(each.tokens[row].tolist()):
                if token != PAD:
                    at[node] = (*at[int(each.topology.parents[row, node])], token)
                    expected.setdefault(at[node], (len(at[node]), number, node))
        kept = sorted(expected, key=expected.__getitem__)[:nodes]
        assert paths(block, row) == set(kept)
        there = block.tokens[row][block.tokens[row] >= 0].tolist()
        assert there == [path[-1] for path in kept]
        assert block.lengths[row] >= len(kept)
        assert block.tokens[row, len(kept) :].tolist() == [PAD] * (block.num_nodes - len(kept))


def test_merged_rows_are_nobodys_own() -> None:
    one, two = Fixed(block_of([[5, 6]])), Fixed(block_of([[5, 7]]))
    combined = merge(4, one, two)
    propose(combined, 2)
    combined.observe(Observation(((5, 6, 1),), (4,), (3,), own=(2,)), [0])
    assert one.told[-1].own == two.told[-1].own == (0,)


SUFFIX = {"method": "suffix", "min_match": 2}
SMALL = {"method": "small_model", "width": 16, "heads": 2}
DSPARK = {"method": "dspark", "num_layers": 1, "corrector_rank": 8, "head_width": 8}
COMBINATIONS = {
    "history_then_model": {"first_of": (SUFFIX, SMALL)},
    "history_then_dspark": {"first_of": (SUFFIX, DSPARK)},
    "history_then_tree": {"first_of": (SUFFIX, {"method": "medusa"})},
    "exit_after_history": {"first_of": (SUFFIX, {"method": "early_exit", "exit_layer": 1})},
    "three": {"first_of": ({**SUFFIX, "k": 1}, {**SUFFIX, "min_match": 1, "k": 1}, {"method": "layer_skip"})},
    "merged_chains": {"merge": (SUFFIX, SMALL)},
    "merged_trees": {"merge": ({"method": "ngram"}, {"method": "medusa"}), "nodes": 12},
    "merged_layers": {"merge": ({"method": "layer_skip", "skip_mlp": (0,)}, {"method": "early_exit"})},
}
PHRASE = [5, 9, 33, 17, 40, 41]
PROMPTS = [PHRASE * 3, [7], [*PHRASE, 3, *PHRASE, 4, 5, 9], [11] * 20]
GREEDY = Sampling(max_new_tokens=20, ignore_eos=True, seed=3)
WARM = GREEDY.model_copy(update={"temperature": 0.8, "logit_bias": {9: 50.0, 33: 50.0}})


def decode(draft: dict[str, Any] | None, sampling: Sampling, batch: int, rule: str = "match") -> list[Generation]:
    data: dict[str, Any] = {"runtime": {"batch": batch, "prefill_chunk": 8}, "verify": {"rule": rule}}
    if draft is not None:
        data["draft"] = draft
    return build_engine(parse_recipe(data), TARGET).generate(PROMPTS, sampling)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["T0", "T0.8"])
@pytest.mark.parametrize("name", COMBINATIONS)
def test_text_equals_vanilla(name: str, sampling: Sampling, batch: int) -> None:
    expected = [generation.tokens for generation in decode(None, sampling, batch)]
    accepted = 0
    for k in (1, 5):
        got = decode({**COMBINATIONS[name], "k": k}, sampling, batch)
        assert [generation.tokens for generation in got] == expected
        for generation in got:
            check_counts(generation.counts)
            accepted += generation.counts.num_accepted_draft_tokens
    assert accepted


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("history_then_model", "block"),
        ("history_then_dspark", "rejection"),
        ("history_then_tree", "rejection"),
        ("merged_trees", "rejection"),
    ],
)
def test_rules_that_weigh_p_against_q_take_mixed_rows(name: str, rule: str) -> None:
    expected = [generation.tokens for generation in decode(None, GREEDY, 4)]
    draft = {**COMBINATIONS[name], "k": 4}
    assert [generation.tokens for generation in decode(draft, GREEDY, 4, rule)] == expected
    together = [generation.tokens for generation in decode(draft, WARM, 4, rule)]
    assert together == [generation.tokens for generation in decode(draft, WARM, 1, rule)]

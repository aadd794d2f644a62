"""The family of feature steps: every member equals its formulas, however its rows came to be committed."""

from __future__ import annotations

import pytest
import torch
from dense_steps import FEATURES, SPAN, TEXT, WIDTH, Config, Dense, Stage, network_of, stage
from tiny import VOCAB
from torch import Tensor

from specflow.draft import feature_model
from specflow.draft.nn.feature_step import Pairs
from specflow.draft.sources.eagle import EagleConfig
from specflow.draft.sources.mtp import MTPConfig
from specflow.draft.steps import Frontier
from specflow.target.cache import KVCache

SIZES = {"num_heads": 2, "num_kv_heads": 1, "head_width": 6, "mlp_size": 20, "rope_theta": 500.0, "eps": 1e-4}
CASES: dict[str, Config] = {
    "mtp": MTPConfig(),
    "mtp-other": MTPConfig(order="hidden_first", recycle="pre_norm", hidden="pre_norm", zero_first=True),
    "mtp-modules": MTPConfig(num_modules=3),
    "mtp-modules-other": MTPConfig(num_modules=4, order="hidden_first", recycle="pre_norm", zero_first=True),
    "mtp-unrolled": MTPConfig(unrolled=4, **SIZES),
    "eagle1": EagleConfig(variant=1),
    "eagle1-plain": EagleConfig(variant=1, bias=False, **SIZES),
    "eagle3": EagleConfig(taps=(-1, 0, 1)),
    "eagle3.1": EagleConfig(taps=(1, 0, -1), fc_norm=True, norm_output=True),
    "eagle3-normed": EagleConfig(taps=(-1, 0, 1), norm_before_fc=True, norm_before_residual=True),
    "eagle3-reduced": EagleConfig(taps=(-1, 0, 1), draft_vocab_size=20, **SIZES),
}
MEMBERS = pytest.mark.parametrize("config", CASES.values(), ids=CASES)
ROUNDS = ((1, 3, 2, 7), (4, 1, 1, 1), (1, 1, 5, 2), (2, 4, 1, 40), (1, 1, 1, 1), (3, 2, 6, 1))
"""Tokens committed in each round, a row each: nothing accepted up to much accepted, prompts among them."""


def drafts(turn: int, scene: Stage) -> Tensor:
    """Tokens to draft in a round, as deep as the model goes.  # [B, D]"""
    numbers = torch.Generator().manual_seed(turn)
    depth = min(4, scene.model.most_depth - 1)
    return torch.randint(0, VOCAB, (len(scene.requests), depth), generator=numbers)


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 1e-9


@MEMBERS
def test_steps_equal_training_whatever_was_drafted_before(config: Config) -> None:
    """Drafted rows leave nothing behind: each round equals a computation from nothing with true features."""
    scene = stage(config)
    for turn, counts in enumerate(ROUNDS):
        scene.commit(counts)
        tokens = drafts(turn, scene)
        assert_same(scene.draft(tokens), scene.expected(config, tokens))


@MEMBERS
def test_opening_twice_gives_the_same(config: Config) -> None:
    scene = stage(config)
    scene.commit((3, 1, 2, 2))
    first = scene.draft(drafts(1, scene))
    scene.draft(drafts(2, scene))
    assert torch.equal(scene.draft(drafts(1, scene)), first)


@MEMBERS
def test_rounds_without_a_draft_are_made_up_for(config: Config) -> None:
    scene = stage(config)
    for counts in ROUNDS[:4]:
        scene.commit(counts)
    tokens = drafts(0, scene)
    assert_same(scene.draft(tokens), scene.expected(config, tokens))


@MEMBERS
def test_rows_leave_and_new_requests_take_their_place(config: Config) -> None:
    scene = stage(config)
    scene.commit(ROUNDS[0])
    scene.draft(drafts(0, scene))
    scene.commit(ROUNDS[1])
    scene.select([3, 1])
    scene.restart(1, request=0)
    for turn, counts in enumerate([(2, 6), (1, 1), (3, 2)]):
        scene.commit(counts)
        tokens = drafts(turn, scene)
        assert_same(scene.draft(tokens), scene.expected(config, tokens))


@MEMBERS
def test_a_row_is_the_same_alone_and_among_others(config: Config) -> None:
    together, alone = stage(config), [stage(config, [request]) for request in range(4)]
    for turn, counts in enumerate(ROUNDS):
        together.commit(counts)
        tokens = drafts(turn, together)
        found = together.draft(tokens)
        for row, single in enumerate(alone):
            single.commit([counts[row]])
            assert_same(single.draft(tokens[row : row + 1]), found[row : row + 1])


@MEMBERS
def test_trees_equal_their_paths(config: Config) -> None:
    """Two levels of three nodes each, hung differently in every batch row, then one more node on one of them."""
    scene = stage(config)
    scene.commit((2, 5, 1, 3))
    scene.draft(drafts(0, scene))
    scene.commit((1, 2, 4, 1))
    batch, levels = 4, [3, 3, 2][: min(3, scene.model.most_depth - 1)]
    numbers = torch.Generator().manual_seed(5)
    steps = scene.model.open(scene.anchors(), [True] * batch)
    chains: list[list[list[int]]] = [[[]] for _ in range(batch)]  # tokens to every row so far
    above: list[list[set[int]]] = [[set()] for _ in range(batch)]  # rows 1, 2, ... that lead to every row
    begin = 0
    for size in levels:
        last, first = len(chains[0]), begin
        parents = torch.randint(first, last, (batch, size), generator=numbers)
        tokens = torch.randint(0, VOCAB, (batch, size), generator=numbers)
        visible = torch.zeros(batch, size, last - 1 + size, dtype=torch.bool)
        for row in range(batch):
            for node in range(size):
                parent = int(parents[row, node])
                chains[row].append([*chains[row][parent], int(tokens[row, node])])
                above[row].append(above[row][parent] | {last + node})
                visible[row, node, [seen - 1 for seen in above[row][-1]]] = True
        logits = steps.extend(tokens, Frontier(parents, visible))
        assert steps.hidden.shape[:2] == (batch, size)
        for node in range(size):
            paths = torch.tensor([chains[row][last + node] for row in range(batch)])
            assert_same(logits[:, node], scene.expected(config, paths)[:, -1])
        begin = last


@MEMBERS
def test_only_distances_between_positions_count(config: Config) -> None:
    """The same rows, all standing 9 positions later, give the same logits, as long as none is at position 0."""
    network = network_of(config)
    shape, found = network.shape, []
    for first in (1, 10):
        cache = KVCache(1, 1, shape.num_kv_heads, SPAN, shape.head_width, like=FEATURES)
        pairs = Pairs(
            TEXT[:1, 1:13], network.fuse(FEATURES[:1, :12])[..., :WIDTH], torch.arange(12).unsqueeze(0) + first
        )
        found.append(network.score(network.run(0, pairs, cache).scored))
    assert (found[0] - found[1]).abs().max() < 1e-5  # angles are float32


@MEMBERS
def test_a_long_prompt_runs_in_chunks(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_model, "CHUNK", 16)
    scene = stage(config, [0, 1])
    scene.commit((50, 2))
    tokens = drafts(0, scene)
    assert_same(scene.draft(tokens), scene.expected(config, tokens))


def test_training_predicts_what_drafting_says_at_every_position() -> None:
    """One unrolled pass over a text holds the logits of every round of decoding it, accepted tokens forced."""
    config, depth, length = CASES["eagle3"], 3, 12
    unrolled = Dense(config).trained_logits(TEXT[0], FEATURES[0, :length], depth)
    scene = stage(config, [0])
    for position in range(1, length + 1):
        scene.commit([1])
        found = scene.draft(TEXT[:1, position + 1 : position + 1 + depth])
        assert_same(found[0], unrolled[:, position - 1])


def test_a_drafted_feature_is_replaced_by_the_true_one() -> None:
    """Negative control of the rounds above: keeping a drafted row would be seen."""
    config = CASES["eagle3"]
    honest, lazy = stage(config, [0]), stage(config, [0])
    for scene in (honest, lazy):
        scene.commit([5])
    steps = lazy.model.open(lazy.anchors(), [True])
    steps.extend(TEXT[:1, 6:7])
    lazy.model.caches[0].keep([1])
    lazy.cache.keep([1])
    honest.commit([1])
    wrong = lazy.draft(TEXT[:1, 7:8])[:, 1:]
    assert (honest.draft(TEXT[:1, 7:8])[:, 1:] - wrong).abs().max() > 1e-3

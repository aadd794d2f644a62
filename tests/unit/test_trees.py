"""Trees against plain Python: every shape on networks whose law after every prefix is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, pairwise, product

import pytest
import torch
from fake_steps import TableCorrector, TableMarginals, TableModel, cache_of, context_of, corrected, noise_of
from pydantic import ValidationError
from torch import Tensor

from specflow.draft.base import Draw
from specflow.draft.chain import ChainDrafter
from specflow.draft.growth import best_children
from specflow.draft.parallel import ParallelModel
from specflow.draft.shapes import ShapeOptions, generic_accuracies, greedy_paths, make_drafter, rank_accuracies
from specflow.draft.steps import StepModel
from specflow.draft.trees import TreeDrafter
from specflow.law import Dense, DraftVocabulary, PointMass, Reduced
from specflow.types import PAD, DraftBlock, DraftBudget, Sampling

ANCHORS = [3, 11, 40]
STARTS = [9, 4, 30]
WARM = Sampling(temperature=0.8, top_k=4)
Logits = Callable[[int, Sequence[int]], Tensor]
Ids = tuple[int, ...]


def propose(
    model: StepModel,
    options: ShapeOptions,
    limits: Sequence[int],
    draw: Draw = "greedy",
    sampling: Sampling = WARM,
    vocab_size: int = 61,
) -> DraftBlock | None:
    """One round of the first rows of the batch."""
    batch = len(limits)
    drafter = make_drafter(options, model, context_of(vocab_size, max(limits), draw))
    drafter.reset(batch, cache_of(STARTS[:batch]))
    for row in range(batch):
        drafter.start(row, [1], sampling)
    block = drafter.propose(ANCHORS[:batch], DraftBudget(tuple(limits)), noise_of(STARTS[:batch]))
    assert block is None or block.num_nodes <= drafter.num_nodes
    return block


def paths_of(block: DraftBlock, row: int) -> list[Ids | None]:
    """Tokens from the anchor to each node, None for PAD; checks that the tree is one."""
    parents = block.topology.parents.expand(len(block.tokens), -1)[row].tolist()
    tokens, paths = block.tokens[row].tolist(), []
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        assert -1 <= parent < node
        above = () if parent < 0 else paths[parent]
        assert token == PAD or above is not None, "a node hangs from nothing"
        paths.append(None if token == PAD else (*above, token))
    there = [path for path in paths if path is not None]
    assert len(set(there)) == len(there), "two siblings are the same token"
    assert len(there) <= block.lengths[row]
    assert max(map(len, there), default=0) <= block.topology.max_depth
    return paths


def log_law(logits: Tensor) -> list[float]:
    values: list[float] = logits.log_softmax(-1).tolist()
    return values


def by_rank(logits: Tensor) -> list[int]:
    values = logits.tolist()
    return sorted(range(len(values)), key=lambda token: -values[token])


def best_of_all(logits: Logits, depth: int, nodes: int, num_draft: int) -> set[Ids]:
    """The best nodes of the full tree, by enumeration."""
    scores: dict[Ids, float] = {(): 0.0}
    for level in range(depth):
        for path in list(product(range(num_draft), repeat=level)):
            law = log_law(logits_of(logits, path))
            scores.update({(*path, token): scores[path] + law[token] for token in range(num_draft)})
    del scores[()]
    return set(sorted(scores, key=lambda path: -scores[path])[:nodes])


def logits_of(logits: Logits, path: Ids) -> Tensor:
    return logits(ANCHORS[0], path)


def warm_law(logits: Tensor) -> list[float]:
    """What WARM leaves of a law."""
    law, kept = [0.0] * len(logits), logits.topk(WARM.top_k)
    for token, share in zip(kept.indices.tolist(), (kept.values / WARM.temperature).softmax(-1).tolist(), strict=True):
        law[token] = share
    return law


def beam_by_hand(logits: Callable[[Ids], Tensor], width: int, nodes: int, depth: int) -> list[Ids]:
    """EAGLE-2 as its paper tells it, without any short cut."""
    generated: list[tuple[Ids, float]] = []
    frontier: list[tuple[Ids, float]] = [((), 0.0)]
    for _ in range(depth):
        level = []
        for path, score in frontier:
            law = log_law(logits(path))
            level += [((*path, token), score + law[token]) for token in by_rank(logits(path))[:width]]
        generated += level
        frontier = sorted(level, key=lambda each: -each[1])[:width]
    order = sorted(range(len(generated)), key=lambda index: -generated[index][1])[:nodes]
    return [generated[index][0] for index in sorted(order)]


def sampled_by_hand(
    model: TableModel, row: int, widths: Sequence[int], draw: Draw
) -> tuple[list[Ids | None], list[list[float]]]:
    """Siblings drawn one after another, and the law of each before any was drawn."""
    paths: list[Ids | None] = []
    laws: list[list[float]] = []
    level: list[Ids | None] = [()]
    for depth, width in enumerate(widths):
        above, level = level, []
        for path in above:
            law = [0.0] * 6 if path is None else warm_law(model.logits_after(ANCHORS[row], path))
            left = list(law)
            for sibling in range(width):
                coupled = draw == "coupled" and sibling == 0
                position = STARTS[row] + 1 + (depth if coupled else len(paths) + len(level))
                number = noise_of(STARTS).uniform("target" if coupled else "draft", row, position)
                token = next((token for token in range(6) if sum(left[: token + 1]) > number * sum(left)), None)
                level.append(None if path is None or token is None else (*path, token))
                laws.append(law)
                if token is not None:
                    left[token] = 0.0
        paths += level
    return paths, laws


def marginal_logits(model: TableMarginals, corrector: TableCorrector | None = None) -> Logits:
    def after(anchor: int, path: Sequence[int]) -> Tensor:
        found = model.table[anchor, len(path)]
        if corrector is None:
            return found
        before = (0, anchor, *path)
        return found + corrector.near[before[-1]] + corrector.far[before[-2]]

    return after


@pytest.mark.parametrize("nodes", [1, 2, 7, 24, 40])
@pytest.mark.parametrize("width", [1, 2, 3, 8])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_beam_is_the_one_grown_by_hand(depth: int, width: int, nodes: int) -> None:
    model = TableModel(6, seed=depth + 10 * nodes)
    options = ShapeOptions(shape="beam", nodes=nodes, branch=width)
    block = propose(model, options, [depth] * 3, vocab_size=6)
    assert block is not None
    for row, anchor in enumerate(ANCHORS):
        expected = beam_by_hand(lambda path, anchor=anchor: model.logits_after(anchor, path), width, nodes, depth)  # type: ignore[misc]
        assert paths_of(block, row) == expected
    assert block.lengths == (len(expected),) * 3
    assert sum(frontier.parents.shape[1] for frontier in model.frontiers) == model.num_rows


@pytest.mark.parametrize("nodes", [1, 2, 3, 9, 24, 60])
@pytest.mark.parametrize("kind", ["marginals", "corrected", "conditional"])
def test_best_first_finds_the_best_nodes_of_all(kind: str, nodes: int) -> None:
    depth, num_draft = 4, 4
    marginals, corrector = TableMarginals(num_draft, nodes, depth), TableCorrector(num_draft)
    table = TableModel(num_draft, seed=nodes)
    model, logits = {
        "marginals": (ParallelModel(marginals), marginal_logits(marginals)),
        "corrected": (ParallelModel(marginals, corrector), marginal_logits(marginals, corrector)),
        "conditional": (table, table.logits_after),
    }[kind]
    block = propose(model, ShapeOptions(shape="best_first", nodes=nodes), [depth], vocab_size=num_draft)  # type: ignore[arg-type]
    assert block is not None
    assert block.num_nodes == nodes
    assert set(paths_of(block, 0)) == best_of_all(logits, depth, nodes, num_draft)


def test_certain_children_come_after_their_parents() -> None:
    """Where parents and children have the very same score, order decides: no child may take its parent's place."""
    marginals = TableMarginals(4, depth=3)
    marginals.table = torch.full((64, 3, 4), -200.0)
    marginals.table[:, :, 1] = 0.0
    marginals.table[:, 0, 2] = 0.0
    for nodes in range(1, 7):
        block = propose(ParallelModel(marginals), ShapeOptions(shape="best_first", nodes=nodes), [3], vocab_size=4)
        assert block is not None
        levels = [path and len(path) for path in paths_of(block, 0)]
        assert levels == [1, 1, 2, 2, 3, 3][:nodes]


def test_impossible_tokens_are_not_drafted() -> None:
    marginals = TableMarginals(6, depth=2)
    marginals.table[:, :, 3:] = -torch.inf
    for shape in ("static", "beam", "best_first"):
        options = ShapeOptions(shape=shape, nodes=12)
        block = propose(ParallelModel(marginals), options, [2], vocab_size=6)
        assert block is not None
        there = [path for path in paths_of(block, 0) if path is not None]
        assert there
        assert all(token < 3 for path in there for token in path)


@pytest.mark.parametrize("kind", ["corrected", "conditional"])
def test_static_nodes_are_the_ranks_their_paths_say(kind: str) -> None:
    paths = [(2,), (0,), (2, 1), (0, 0), (0, 3), (2, 1, 0), (0, 3, 1), (5,), (2, 1, 0, 0)]
    model = corrected(6, 16) if kind == "corrected" else TableModel(6)
    logits = marginal_logits(TableMarginals(6), TableCorrector(6)) if kind == "corrected" else model.logits_after  # type: ignore[attr-defined]
    for depth in range(1, 6):
        block = propose(model, ShapeOptions(shape="static", paths=tuple(paths)), [depth] * 3, vocab_size=6)
        assert block is not None
        for row, anchor in enumerate(ANCHORS):
            expected = set()
            for path in paths:
                tokens: Ids = ()
                for rank in path:
                    tokens = (*tokens, by_rank(logits(anchor, tokens))[rank])
                if len(path) <= depth:
                    expected.add(tokens)
            assert set(paths_of(block, row)) == expected
        assert block.topology.max_depth == min(depth, 4)
        assert block.law.is_point


def test_blind_positions_give_the_cartesian_tree_of_medusa() -> None:
    marginals = TableMarginals(9, depth=3)
    block = propose(ParallelModel(marginals), ShapeOptions(shape="static", nodes=20), [3], vocab_size=9)
    assert block is not None
    ranks = [by_rank(marginals.table[ANCHORS[0], level]) for level in range(3)]
    for path in paths_of(block, 0):
        assert path is not None
        assert (*(ranks[level].index(token) for level, token in enumerate(path)),) in set(
            greedy_paths(generic_accuracies(3, 8), 20)
        )


@pytest.mark.parametrize("draw", ["sampled", "coupled"])
@pytest.mark.parametrize("widths", [(3, 2, 1), (1,), (1, 1, 1, 1), (6, 2)])
def test_sampled_siblings_are_drawn_from_what_the_earlier_ones_left(widths: tuple[int, ...], draw: Draw) -> None:
    model = TableModel(6, seed=5)
    block = propose(model, ShapeOptions(shape="sampled", widths=widths), [4] * 3, draw, vocab_size=6)
    assert block is not None
    for row in range(3):
        expected, laws = sampled_by_hand(model, row, widths, draw)
        assert paths_of(block, row) == expected
        if draw == "sampled":
            assert isinstance(block.law, Dense)
            for node, path in enumerate(expected):
                assert path is None or block.law.probs[row, node].tolist() == pytest.approx(laws[node])
    assert block.without_replacement == (draw == "sampled")
    assert block.structure_from == "context"
    assert block.law.is_point == (draw == "coupled")


def test_nothing_drawn_means_the_likeliest_children() -> None:
    """A greedy request, or a drafter that never draws, gets as many children as the widths say."""
    model, options = TableModel(6), ShapeOptions(shape="sampled", widths=(3, 2))
    cold = propose(model, options, [2], "sampled", Sampling(), vocab_size=6)
    never = propose(model, options, [2], "greedy", vocab_size=6)
    assert cold is not None
    assert never is not None
    assert cold.tokens.equal(never.tokens)
    assert cold.tokens[0, :3].tolist() == by_rank(model.logits_after(ANCHORS[0], ()))[:3]
    assert (cold.tokens >= 0).all()
    assert not cold.without_replacement
    assert isinstance(cold.law, PointMass)


def test_a_greedy_row_beside_a_sampled_one_has_one_child_a_node() -> None:
    drafter = TreeDrafter(TableModel(6), context_of(6, 2, "sampled"), ShapeOptions(shape="sampled", widths=(3, 2)))
    drafter.reset(2, cache_of(STARTS[:2]))
    drafter.start(0, [1], Sampling())
    drafter.start(1, [1], Sampling(temperature=1.0))
    block = drafter.propose(ANCHORS[:2], DraftBudget((2, 2)), noise_of(STARTS[:2]))
    assert block is not None
    assert [path is not None for path in paths_of(block, 0)] == [True, False, False, True] + [False] * 5
    assert all(path is not None for path in paths_of(block, 1))


SHAPES = [
    ShapeOptions(shape="static", nodes=15),
    ShapeOptions(shape="beam", nodes=15, branch=3),
    ShapeOptions(shape="best_first", nodes=15),
    ShapeOptions(shape="sampled", widths=(3, 2, 1, 1)),
]
by_shape = pytest.mark.parametrize("options", SHAPES, ids=lambda options: options.shape)


@by_shape
@pytest.mark.parametrize("limits", [(4, 2, 3), (0, 4, 1), (2, 0, 0), (1, 1, 1)])
def test_each_row_has_the_tree_it_has_alone(options: ShapeOptions, limits: tuple[int, ...]) -> None:
    model = TableModel(61, seed=2)
    together = propose(model, options, limits, "sampled")
    assert together is not None
    drafter = make_drafter(options, model, context_of(61, max(limits), "sampled"))
    for row, limit in enumerate(limits):
        there = [path for path in paths_of(together, row) if path is not None]
        assert bool(there) == (limit > 0)
        assert max(map(len, there), default=0) <= limit
        drafter.reset(1, cache_of([STARTS[row]]))
        drafter.start(0, [1], WARM)
        alone = drafter.propose([ANCHORS[row]], DraftBudget((limit,)), noise_of([STARTS[row]], 7 + row))
        assert (alone is None) == (limit == 0)
        assert there == ([] if alone is None else [path for path in paths_of(alone, 0) if path is not None])


@by_shape
def test_nothing_to_draft_is_no_block(options: ShapeOptions) -> None:
    model = TableModel(61)
    assert propose(model, options, [0, 0]) is None
    model.most_positions = STARTS[0] + 1  # type: ignore[misc]
    assert propose(model, options, [3]) is None
    model.most_positions = STARTS[0] + 3  # type: ignore[misc]
    block = propose(model, options, [3])
    assert block is not None
    assert block.topology.max_depth == 2


@pytest.mark.parametrize("shape", ["static", "beam", "best_first", "sampled"])
@pytest.mark.parametrize(("nodes", "branch", "depth"), [(1, 1, 1), (1, 8, 5), (9, 1, 5), (9, 8, 1), (3, 1, 16)])
def test_degenerate_trees(shape: str, nodes: int, branch: int, depth: int) -> None:
    width: dict[str, object] = {"branch": branch} if shape in ("static", "beam") else {}
    if shape == "sampled":
        width = {"widths": (min(branch, nodes),)}
    model = TableModel(2, seed=3)
    options = ShapeOptions(shape=shape, nodes=nodes, **width)  # type: ignore[arg-type]
    block = propose(model, options, [depth, 1], vocab_size=2)
    assert block is not None
    assert 1 <= block.num_nodes <= nodes
    if shape == "beam" and branch == 1:
        chain = ChainDrafter(model, context_of(2, min(depth, nodes)))
        chain.reset(1, cache_of(STARTS[:1]))
        straight = chain.propose(ANCHORS[:1], DraftBudget((depth,)), noise_of(STARTS[:1]))
        assert straight is not None
        assert block.tokens[:1].equal(straight.tokens[:, :nodes])
    for row in range(2):
        assert paths_of(block, row)[0] is not None


def test_draft_ids_become_target_ids() -> None:
    vocabulary = DraftVocabulary(torch.tensor([50, 7, 22, 60, 1]), 61)
    model = TableModel(5, vocabulary=vocabulary)
    for options in SHAPES:
        block = propose(model, options, [3], "sampled")
        assert block is not None
        there = {token for path in paths_of(block, 0) if path is not None for token in path}
        assert there <= set(vocabulary.to_target.tolist())
        assert isinstance(block.law, Reduced if options.shape == "sampled" else PointMass)
        if isinstance(block.law, Reduced):
            assert (block.law.prob() > 0).all()


def test_equal_rows_are_read_once() -> None:
    logits = torch.randn(2, 1, 9, generator=torch.Generator().manual_seed(0))
    once, each = best_children(logits.expand(-1, 4, -1), 3), best_children(logits.repeat(1, 4, 1), 3)
    assert once.tokens.equal(each.tokens)
    assert once.scores.equal(each.scores)
    assert once.scores.stride(1) == 0


def test_half_precision_scores_are_summed_in_float32() -> None:
    assert best_children(torch.zeros(1, 1, 9, dtype=torch.bfloat16), 2).scores.dtype == torch.float32


def closed_sets(paths: Sequence[Ids], size: int) -> list[tuple[Ids, ...]]:
    return [chosen for chosen in combinations(paths, size) if all(len(p) == 1 or p[:-1] in chosen for p in chosen)]


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5])
def test_greedy_paths_expect_the_most_tokens(nodes: int) -> None:
    draws = torch.Generator().manual_seed(nodes)
    table = torch.rand(
        3, 2, generator=draws, dtype=torch.float64
    ).tolist()  # ranks in no order: measured ones need not be
    paths = [path for depth in (1, 2, 3) for path in product(range(2), repeat=depth)]

    def worth(tree: Sequence[Ids]) -> float:
        return sum(torch.tensor([table[level][rank] for level, rank in enumerate(path)]).prod().item() for path in tree)

    found = greedy_paths(table, nodes)
    assert len(found) == nodes
    assert worth(found) == pytest.approx(max(map(worth, closed_sets(paths, nodes))))
    assert greedy_paths(table, 3)[: min(nodes, 3)] == found[:3]


def test_worthless_nodes_are_left_out() -> None:
    assert greedy_paths([[0.5, 0.0], [0.0, 0.0]], 10) == ((0,),)
    with pytest.raises(ValueError, match="between 0 and 1"):
        greedy_paths([[1.5]], 1)


def test_rank_accuracies_count_where_the_truth_stood() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0], [2.0, 3.0, 1.0], [3.0, 1.0, 1.0]])
    truth = torch.tensor([0, 1, -1, 1])
    assert rank_accuracies([logits], [truth], 2) == [[0.25, 0.25]]
    assert rank_accuracies([logits], [truth], 3) == [[0.25, 0.25, 0.25]]


def test_a_static_tree_is_built_from_measured_accuracies() -> None:
    """The second rank is the better one at depth 2: the tree follows the table, within depth and vocabulary."""
    table = ((0.5, 0.3), (0.1, 0.4, 0.05))
    options = ShapeOptions(shape="static", nodes=3, accuracies=table)
    assert set(options.static_paths(2, 8)) == {(0,), (1,), (0, 1)}
    assert set(options.static_paths(1, 8)) == {(0,), (1,)}
    assert set(options.static_paths(2, 1)) == {(0,), (0, 0)}


def test_the_generic_table_decays() -> None:
    table = generic_accuracies(4, 5)
    assert all(level == sorted(level, reverse=True) and sum(level) <= 1.0 for level in table)
    assert all(above[0] > below[0] for above, below in pairwise(table))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"nodes": 0}, "greater than or equal to 1"),
        ({"branch": 0}, "greater than or equal to 1"),
        ({"shape": "bush"}, "'chain', 'static'"),
        ({"shape": "static", "paths": []}, "no nodes"),
        ({"shape": "static", "paths": [[0], [1, 0]]}, r"path \[1, 0\] hangs from \[1\]"),
        ({"shape": "static", "paths": [[0], [0]]}, "twice"),
        ({"shape": "static", "paths": [[-1]]}, "negative rank"),
        ({"shape": "static", "paths": [[]]}, "the anchor itself"),
        ({"shape": "static", "paths": [[0], [1]], "nodes": 1}, "2 nodes, more than nodes: 1"),
        ({"shape": "beam", "paths": [[0]]}, "shape is beam"),
        ({"shape": "sampled", "widths": [4, 4, 4]}, "84 nodes, more than nodes: 24"),
        ({"widths": [2, 0]}, "at least one child"),
        ({"widths": []}, "at least one child"),
        ({"widths": [2, 1]}, "widths goes with shape sampled, and shape is chain"),
        ({"shape": "best_first", "branch": 4}, "branch goes with shape beam or static, and shape is best_first"),
        ({"shape": "static", "accuracies": [[1.5]]}, "accuracies are probabilities, between 0 and 1"),
        ({"shape": "static", "accuracies": [[]]}, "accuracies lack ranks"),
        ({"shape": "beam", "accuracies": [[0.5]]}, "accuracies goes with shape static"),
        ({"shape": "static", "paths": [[0]], "accuracies": [[0.5]]}, "paths and accuracies both describe"),
        ({"shape": "static", "paths": [[0]], "branch": 4}, "branch is of the generic tree, and there are paths"),
    ],
)
def test_wrong_shapes_are_refused_in_words(given: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        ShapeOptions.model_validate(given)


def test_a_network_shallower_than_k_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = TableModel(61)
    for options in (ShapeOptions(), ShapeOptions(shape="beam")):
        caplog.clear()
        make_drafter(options, model, context_of(61, model.most_depth))
        assert not caplog.records
        make_drafter(options, model, context_of(61, model.most_depth + 1))
        assert "draft.k is 17, and the drafter goes 16 positions deep" in caplog.text


def test_the_default_shape_is_a_chain() -> None:
    assert isinstance(make_drafter(ShapeOptions(), TableModel(61), context_of(61, 4)), ChainDrafter)

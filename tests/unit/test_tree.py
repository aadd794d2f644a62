"""Tree algebra against walks along the parents."""

from __future__ import annotations

import random

import pytest
import torch

from specflow.law import PointMass
from specflow.tree import chain, extents, from_parents, from_paths, path_to, scoring_rows, valid_nodes
from specflow.types import PAD, DraftBlock

CPU = torch.device("cpu")


def random_parents(seed: int, batch: int, num_nodes: int) -> list[list[int]]:
    draws = random.Random(seed)
    return [[draws.randrange(-1, node) for node in range(num_nodes)] for _ in range(batch)]


def walk(parents: list[int], row: int) -> list[int]:
    """Rows from the anchor to a row."""
    path = [row]
    while path[0]:
        path.insert(0, parents[path[0] - 1] + 1)
    return path


@pytest.mark.parametrize("num_nodes", [0, 1, 2, 5, 17, 40])
def test_depth_ancestors_and_paths_follow_the_parents(num_nodes: int) -> None:
    parents = random_parents(num_nodes, 3, num_nodes)
    topology = from_parents(torch.tensor(parents, dtype=torch.int64).view(3, num_nodes))
    assert topology.max_depth == num_nodes
    assert not topology.is_chain
    for row in range(num_nodes + 1):
        paths = path_to(topology, torch.full((3,), row))
        for b in range(3):
            path = walk(parents[b], row)
            assert topology.depth[b, row] == len(path) - 1
            assert topology.ancestors[b, row].nonzero().flatten().tolist() == path
            assert paths[b].tolist() == path + [PAD] * (num_nodes + 1 - len(path))


def test_a_chain_is_the_tree_with_one_path() -> None:
    for num_nodes in range(9):
        tree = from_parents(torch.arange(num_nodes).unsqueeze(0) - 1)
        straight = chain(num_nodes, CPU)
        assert straight.is_chain
        assert straight.max_depth == tree.max_depth
        for field in ("parents", "depth", "ancestors"):
            assert getattr(straight, field).equal(getattr(tree, field))


def test_a_known_depth_narrows_paths() -> None:
    parents = torch.tensor([[-1, -1, -1, 0, 1, 3]])
    topology = from_parents(parents, max_depth=3)
    assert topology.depth.equal(from_parents(parents).depth)
    assert path_to(topology, torch.tensor([6])).tolist() == [[0, 1, 4, 6]]
    assert path_to(topology, torch.tensor([2])).tolist() == [[0, 2, PAD, PAD]]


@pytest.mark.parametrize("seed", range(6))
def test_paths_and_parents_say_the_same(seed: int) -> None:
    draws = random.Random(seed)
    paths: list[tuple[int, ...]] = []
    while len(paths) < 20:
        path = (*draws.choice([(), *paths]), draws.randrange(4))
        if path not in paths:
            paths.append(path)
    topology = from_paths(paths, CPU)
    assert topology.depth[0, 1:].tolist() == [len(path) for path in paths]
    assert topology.max_depth == max(map(len, paths))
    for row, path in enumerate(paths, start=1):
        above = [node + 1 for node, other in enumerate(paths) if path[: len(other)] == other]
        assert topology.ancestors[0, row].nonzero().flatten().tolist() == sorted([0, *above])
    parents = topology.parents[0].tolist()
    assert topology.max_siblings == max(parents.count(parent) for parent in parents)


def test_no_paths_are_the_empty_tree() -> None:
    topology = from_paths([], CPU)
    assert topology.parents.shape == (1, 0)
    assert topology.max_depth == 0
    assert topology.depth.tolist() == [[0]]


def test_one_topology_serves_rows_that_end_in_different_places() -> None:
    assert path_to(chain(3, CPU), torch.tensor([0, 3, 1])).tolist() == [
        [0, PAD, PAD, PAD],
        [0, 1, 2, 3],
        [0, 1, PAD, PAD],
    ]
    assert scoring_rows(chain(3, CPU), 2).tolist() == [[0, 1, 2]] * 2


def test_chains_are_built_once() -> None:
    assert chain(5, CPU) is chain(5, CPU)


def test_valid_nodes_are_those_with_a_token() -> None:
    tokens = torch.tensor([[4, 0, PAD], [PAD, PAD, PAD]])
    block = DraftBlock(tokens, (2, 0), chain(3, CPU), PointMass(tokens, 5))
    assert valid_nodes(block).tolist() == [[True, True, False], [False, False, False]]


@pytest.mark.parametrize("num_nodes", [0, 1, 6])
def test_extents_are_counted_by_row(num_nodes: int) -> None:
    draws = random.Random(num_nodes)
    for parents in (random_parents(num_nodes, 3, num_nodes), [list(range(-1, num_nodes - 1))] * 3):
        straight = parents[0] == list(range(-1, num_nodes - 1))
        sizes = [draws.randrange(num_nodes + 1) for _ in parents]
        tokens = torch.tensor([[4] * size + [PAD] * (num_nodes - size) for size in sizes]).view(3, num_nodes).long()
        tree = from_parents(torch.tensor(parents, dtype=torch.int64).view(3, num_nodes))
        deep = [
            max((len(walk(row, node)) - 1 for node in range(size + 1)), default=0)
            for row, size in zip(parents, sizes, strict=True)
        ]
        for shape in (tree, chain(num_nodes, CPU)) if straight else (tree,):
            block = DraftBlock(tokens, tuple(sizes), shape, PointMass(tokens, 9))
            assert extents(block).tolist() == [[size, depth] for size, depth in zip(sizes, deep, strict=True)]

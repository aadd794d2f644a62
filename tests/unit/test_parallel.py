"""Steps over the marginals of a block, against a walk along every path."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from specflow.draft.nn.corrector import CorrectorShape, TableCorrector, read_corrector
from specflow.draft.nn.weights import SeededTensors, WeightReader
from specflow.draft.parallel import Marginals, MarginalSteps
from specflow.draft.steps import Frontier

B, K, V, H, R = 2, 4, 11, 5, 3
KINDS = [None, "markov", "gated", "rnn"]


def marginals(seed: int = 0) -> Marginals:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(B, K, V, generator=generator, dtype=torch.float64)
    return Marginals(logits, torch.randn(B, K, H, generator=generator, dtype=torch.float64))


def corrector(kind: str | None) -> TableCorrector | None:
    if kind is None:
        return None
    reader = WeightReader(SeededTensors(1), "random", torch.empty(0, dtype=torch.float64))
    return read_corrector(kind, reader, CorrectorShape(R, H, V, V))


def along(found: Marginals, bias: TableCorrector | None, row: int, path: Sequence[int]) -> Tensor:
    """Logits after a path from the anchor, the anchor included, by a loop over its tokens."""
    state = None if bias is None else bias.begin(1)
    added = torch.zeros(V, dtype=torch.float64)
    for step, token in enumerate(path):
        if bias is not None:
            assert state is not None
            made, after = bias.correct(
                torch.tensor([[token]]), found.hidden[row, step].view(1, 1, -1), state.view(1, 1, -1)
            )
            added, state = made[0, 0], after[0, 0]
    return found.logits[row, len(path) - 1] + added


@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_is_read_position_by_position(kind: str | None) -> None:
    found, bias = marginals(), corrector(kind)
    anchors, drafted = torch.tensor([3, 8]), torch.tensor([[1, 2, 9], [8, 8, 0]])
    steps = MarginalSteps(found, bias, anchors)
    got = [steps.logits]
    assert torch.equal(steps.hidden, found.hidden[:, 0])
    for step in range(3):
        got.append(steps.extend(drafted[:, step : step + 1]).squeeze(1))
        assert torch.equal(steps.hidden, found.hidden[:, step + 1])
    for b in range(B):
        for step, logits in enumerate(got):
            path = [int(anchors[b]), *drafted[b, :step].tolist()]
            assert torch.allclose(logits[b], along(found, bias, b, path), atol=1e-12)


TREES = (
    [[0, 0, 0], [1, 3, 1, 2], [7, 4, 4]],  # parents by level, as row numbers; rows are numbered as they are added
    [[0, 0, 0], [3, 3, 2, 1], [4, 7, 5]],
)


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_of_a_tree_scores_as_its_own_path_does(kind: str | None) -> None:
    found, bias = marginals(), corrector(kind)
    generator = torch.Generator().manual_seed(4)
    anchors = torch.tensor([3, 8])
    steps = MarginalSteps(found, bias, anchors)
    paths = [[[int(anchor)]] for anchor in anchors]  # of every row so far, for each batch row
    for level in range(3):
        parents = torch.tensor([tree[level] for tree in TREES])
        tokens = torch.randint(V, parents.shape, generator=generator)
        visible = torch.ones(B, parents.shape[1], len(paths[0]) - 1 + parents.shape[1], dtype=torch.bool)
        logits = steps.extend(tokens, Frontier(parents, visible))
        assert logits.shape == (B, parents.shape[1], V)
        assert steps.hidden.shape == (B, parents.shape[1], H)
        for b in range(B):
            for r in range(parents.shape[1]):
                path = [*paths[b][int(parents[b, r])], int(tokens[b, r])]
                assert torch.allclose(logits[b, r], along(found, bias, b, path), atol=1e-12)
                assert torch.equal(steps.hidden[b, r], found.hidden[b, level + 1])
                paths[b].append(path)


def test_siblings_of_an_rnn_differ_by_their_parents() -> None:
    """The test above is only worth something where the state matters."""
    found, bias = marginals(), corrector("rnn")
    steps = MarginalSteps(found, bias, torch.tensor([3, 8]))
    steps.extend(
        torch.tensor([[1, 2], [1, 2]]), Frontier(torch.zeros(B, 2, dtype=torch.int64), torch.ones(B, 2, 2) > 0)
    )
    below = Frontier(torch.tensor([[1, 2], [1, 2]]), torch.ones(B, 2, 4) > 0)
    logits = steps.extend(torch.tensor([[5, 5], [5, 5]]), below)
    assert not torch.allclose(logits[:, 0], logits[:, 1], atol=1e-6)


def test_without_a_corrector_all_rows_read_the_same_memory() -> None:
    found = marginals()
    steps = MarginalSteps(found, None, torch.tensor([3, 8]))
    frontier = Frontier(torch.zeros(B, 5, dtype=torch.int64), torch.ones(B, 5, 5) > 0)
    logits = steps.extend(torch.zeros(B, 5, dtype=torch.int64), frontier)
    assert logits.stride(1) == 0
    assert steps.entry(torch.zeros(B, 1, dtype=torch.int64)) is None

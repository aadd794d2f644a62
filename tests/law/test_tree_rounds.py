"""Real rounds with trees, one after another: their numbers, too, keep the law of the text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from specflow.law import Dense, PointMass
from specflow.noise import RoundNoise
from specflow.sampling import TargetLaw, draw_tokens
from specflow.tree import from_parents
from specflow.types import PAD, DraftBlock, Topology
from specflow.verify import Rejection

CPU = torch.device("cpu")
P_AFTER = torch.tensor([[0.57, 0.19, 0.24], [0.17, 0.14, 0.69], [0.1, 0.72, 0.18]], dtype=torch.float64)
Q_AFTER = torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.2, 0.1, 0.7]], dtype=torch.float64)
TREE, LEVEL = [-1, -1, 0, 1, 0], [0, 0, 1, 1, 1]


class OneForSiblings(RoundNoise):
    """Accept numbers by depth: all siblings meet the same one."""

    def nodes(self, stream: str, num_nodes: int) -> Tensor:
        return super().nodes(stream, num_nodes)[:, LEVEL]


def grown(before: Tensor, noise: RoundNoise, starts: Sequence[int], greedy: bool) -> DraftBlock:
    """Trees below the last tokens of some texts, drawn with the round's numbers or best first.  # before [R]"""
    tokens, laws = torch.empty(len(before), 0, dtype=torch.int64), list[Tensor]()
    for node, parent in enumerate(TREE):
        above = before if parent < 0 else tokens[:, parent]
        q = Q_AFTER[above]
        earlier = [other for other in range(node) if TREE[other] == parent]
        left = q.scatter(1, tokens[:, earlier], 0.0)
        u = [noise.uniform("draft", row, start + 1 + node) for row, start in enumerate(starts)]
        new = left.argmax(1) if greedy else draw_tokens(left, torch.tensor(u, dtype=torch.float64))
        tokens, laws = torch.cat((tokens, new.unsqueeze(1)), 1), [*laws, q]
    law = PointMass(tokens, 3) if greedy else Dense(tokens, torch.stack(laws, 1))
    shape: Topology = from_parents(torch.tensor([TREE]), max_depth=2, max_siblings=2)
    return DraftBlock(tokens, (len(TREE),) * len(before), shape, law, without_replacement=True)


def chi_square(noise_type: type[RoundNoise], requests: int, greedy: bool = False) -> float:
    """Misfit of the first three tokens that real rounds with trees produce."""
    wanted = 4
    text = torch.full((requests, wanted + 4), PAD)
    text[:, 0] = 0
    sizes = torch.zeros(requests, dtype=torch.int64)
    while int(sizes.min()) < wanted - 1:
        busy = (sizes < wanted - 1).nonzero().squeeze(1)
        starts = sizes[busy].tolist()
        noise = noise_type(busy.tolist(), starts, CPU)
        before = text[busy, sizes[busy]]
        block = grown(before, noise, starts, greedy)
        p = P_AFTER[torch.cat((before.unsqueeze(1), block.tokens), 1)].log()
        verdict = Rejection().verify(block, TargetLaw(p, p, [False] * len(busy)), noise)
        columns = sizes[busy].unsqueeze(1) + 1 + torch.arange(3)
        text[busy.unsqueeze(1), columns] = verdict.tokens
        sizes[busy] += verdict.accepted + 1
    codes = (text[:, 1] * 3 + text[:, 2]) * 3 + text[:, 3]
    observed = torch.bincount(codes, minlength=27).double() / requests
    expected = (P_AFTER[0].view(3, 1, 1) * P_AFTER.unsqueeze(2) * P_AFTER.unsqueeze(0)).flatten()
    return float(((observed - expected) ** 2 / expected).sum()) * requests


@pytest.mark.parametrize("greedy", [False, True])
def test_rounds_with_trees_that_follow_each_other_keep_the_law(greedy: bool) -> None:
    """Chi-square with 26 degrees of freedom: 60 has probability 2e-4, and seeds are fixed."""
    assert chi_square(RoundNoise, 4000, greedy) < 60


@pytest.mark.parametrize("greedy", [False, True])
def test_control_rounds_whose_siblings_share_a_number_are_biased(greedy: bool) -> None:
    assert chi_square(OneForSiblings, 4000, greedy) > 120

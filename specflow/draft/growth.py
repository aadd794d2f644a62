"""Ways to grow a tree on the steps of a network. No way asks the device anything: sizes follow from the limits alone.

Fixed trees (static, sampled) have the same paths every round; a beam's paths follow from the draft's probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from specflow.draft.drawing import draft_probs
from specflow.draft.steps import Frontier
from specflow.sampling import draw_tokens
from specflow.tree import from_parents, from_paths
from specflow.types import PAD

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.draft.shapes import RankPath
    from specflow.draft.steps import Steps
    from specflow.law import DraftVocabulary
    from specflow.types import Sampling, Topology

__all__ = ["Beam", "Candidates", "FixedTree", "Grown", "SiblingDraws", "best_children"]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Children that may follow each of some rows."""

    tokens: Tensor  # [B, R, C] target ids
    scores: Tensor  # [B, R, C] log-probability given the prefix, -inf where there is no such child


@dataclass(frozen=True, slots=True)
class Grown:
    """A tree before it becomes a block."""

    tokens: Tensor  # [B, N]
    topology: Topology


Pick = Callable[["Tensor", int], Candidates]
"""Chooses a number of children for every row from its logits [B, R, Vd]."""


def best_children(logits: Tensor, count: int, vocabulary: DraftVocabulary | None = None) -> Candidates:
    """The likeliest children of each row, best first, scored at temperature 1 whatever the request's is.

    Positions that are blind to each other say the same after every row; that one row is read once.

    Args:
        logits: # [B, R, Vd]
        count: Children of each row, at most Vd.
        vocabulary: What draft ids mean; None where they are the target's.
    """
    width = logits.shape[1]
    alike = width > 1 and logits.stride(1) == 0
    scores = (logits[:, :1] if alike else logits).to(torch.promote_types(logits.dtype, torch.float32))
    best = scores.topk(count, dim=-1)
    # Rounding must not lift a probability above 1: a child never scores above its parent.
    found = (best.values - scores.logsumexp(-1, keepdim=True)).clamp_max_(0.0)
    tokens = best.indices if vocabulary is None else vocabulary.to_target[best.indices]
    return Candidates(tokens.expand(-1, width, -1), found.expand(-1, width, -1))


class SiblingDraws:
    """Draws the children of a sampled tree, siblings one after another from what the earlier ones left.

    Args:
        rows: How each row samples.  # [B]
        numbers: One a node.  # [B, N] float64, in (0, 1)
        vocabulary: As in `best_children`.
    """

    def __init__(self, rows: Sequence[Sampling], numbers: Tensor, vocabulary: DraftVocabulary | None) -> None:
        self._rows, self._numbers, self._vocabulary = rows, numbers, vocabulary
        self._probs: list[Tensor] = []  # [B, R * C, Vd] each
        self._drawn = 0

    @property
    def probs(self) -> Tensor:
        """What each node's parent offered before any sibling was drawn.  # [B, N, Vd]"""
        return torch.cat(self._probs, dim=1)

    def pick(self, logits: Tensor, count: int) -> Candidates:
        """See `Pick`. Where fewer tokens are possible than wanted, the surplus siblings do not exist."""
        probs = draft_probs(logits, self._rows)  # [B, R, Vd]
        width = probs.shape[1] * count
        numbers = self._numbers[:, self._drawn : self._drawn + width].view(len(probs), -1, count)
        self._drawn += width
        self._probs.append(probs.repeat_interleave(count, dim=1))
        left, ids, scores = probs, [], []
        for number in numbers.unbind(-1):
            some = left.amax(-1, keepdim=True) > 0
            drawn = draw_tokens(torch.where(some, left, probs), number).unsqueeze(-1)
            ids.append(drawn)
            scores.append(probs.gather(-1, drawn).log().masked_fill(~some, -torch.inf))
            left = left.scatter(-1, drawn, 0.0)
        found = torch.cat(ids, dim=-1)
        tokens = found if self._vocabulary is None else self._vocabulary.to_target[found]
        return Candidates(tokens, torch.cat(scores, dim=-1))


class _Rows:
    """Which draft rows of a round see which: each sees its ancestors and itself."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self._seen = torch.zeros(batch, 1, 0, dtype=torch.bool, device=device)  # [B, P + 1, P], the anchor's row first

    def hang(self, parents: Tensor) -> Frontier:
        """New rows below the given ones.  # [B, R]"""
        batch, width = parents.shape
        above = self._seen.gather(1, parents.unsqueeze(-1).expand(-1, -1, self._seen.shape[2]))
        own = torch.eye(width, dtype=torch.bool, device=parents.device).expand(batch, -1, -1)
        visible = torch.cat((above, own), dim=-1)
        self._seen = torch.cat((F.pad(self._seen, (0, width)), visible), dim=1)
        return Frontier(parents, visible)


@dataclass(frozen=True, slots=True)
class _FixedLevel:
    """One level of a fixed tree; batch dimensions are 1."""

    num_ranks: int  # children to choose for every row above: the highest rank in use, plus 1
    places: Tensor  # [W] where its nodes stand among the children of those rows
    grown: Tensor  # [R] which of its nodes have children
    frontier: Frontier | None  # of those; None on the last level


@dataclass(frozen=True, slots=True)
class _FixedPlan:
    levels: tuple[_FixedLevel, ...]
    topology: Topology


class FixedTree:
    """A tree whose nodes are the same ranks every round.

    Args:
        paths: Its nodes, level by level.
        device: Where logits live.
    """

    def __init__(self, paths: Sequence[RankPath], device: torch.device) -> None:
        self.paths = tuple(paths)
        self.depth = max(map(len, paths), default=0)
        self.num_rows = len({path[:-1] for path in paths} - {()})
        self._device = device
        self._sizes = [sum(len(path) <= depth for path in paths) for depth in range(self.depth + 1)]
        self._plans: dict[int, _FixedPlan] = {}  # by depth

    def size(self, depth: int) -> int:
        """Nodes down to a depth."""
        return self._sizes[min(depth, self.depth)]

    def grow(self, steps: Steps, limits: Sequence[int], pick: Pick) -> Grown:
        """Grow it to the deepest limit.

        Args:
            steps: The round's network.
            limits: Deepest node of each row, the deepest one at least 1.  # [B]
            pick: Chooses children.
        """
        batch, plan = len(limits), self._plan(min(max(limits), self.depth))
        logits = steps.logits.unsqueeze(1)
        there = torch.ones(batch, 1, dtype=torch.bool, device=self._device)
        levels = []
        for level in plan.levels:
            children = pick(logits, level.num_ranks)
            possible = (children.scores > -torch.inf) & there.unsqueeze(-1)
            tokens = children.tokens.flatten(1).index_select(1, level.places)  # [B, W]
            there = possible.flatten(1).index_select(1, level.places)
            levels.append(tokens.masked_fill(~there, PAD))
            if level.frontier is not None:
                parents, visible = level.frontier.parents, level.frontier.visible
                frontier = Frontier(parents.expand(batch, -1), visible.expand(batch, -1, -1))
                there = there.index_select(1, level.grown)
                logits = steps.extend(tokens.index_select(1, level.grown), frontier)
        nodes, topology = torch.cat(levels, dim=1), plan.topology
        if min(limits) < topology.max_depth:
            reach = torch.tensor(limits, device=self._device).unsqueeze(1)
            nodes = nodes.masked_fill(topology.depth[:, 1:] > reach, PAD)
        return Grown(nodes, topology)

    def _plan(self, depth: int) -> _FixedPlan:
        if depth not in self._plans:
            paths = self.paths[: self.size(depth)]
            self._plans[depth] = _FixedPlan(_fixed_levels(paths, self._device), from_paths(paths, self._device))
        return self._plans[depth]


def _fixed_levels(paths: Sequence[RankPath], device: torch.device) -> tuple[_FixedLevel, ...]:
    """Where the nodes of each level stand among the candidates, and which of them carry on."""
    inner = {path[:-1] for path in paths}
    rows = _Rows(1, device)
    number: dict[RankPath, int] = {(): 0}  # row of every path that has children
    above: dict[RankPath, int] = {(): 0}  # place among the rows grown last
    levels = []
    for depth in range(1, max(map(len, paths)) + 1):
        level = [path for path in paths if len(path) == depth]
        num_ranks = 1 + max(path[-1] for path in level)
        places = [above[path[:-1]] * num_ranks + path[-1] for path in level]
        grown = [index for index, path in enumerate(level) if path in inner]
        frontier = None
        if grown:
            frontier = rows.hang(torch.tensor([[number[level[index][:-1]] for index in grown]], device=device))
        above = {level[index]: place for place, index in enumerate(grown)}
        for path in above:
            number[path] = len(number)
        carried = torch.tensor(grown, dtype=torch.int64, device=device)
        levels.append(_FixedLevel(num_ranks, torch.tensor(places, device=device), carried, frontier))
    return tuple(levels)


@dataclass(frozen=True, slots=True)
class _BeamLevel:
    children: int  # of every row above
    generated: int  # nodes of the level
    frontier: int  # of those, the ones that carry on


class Beam:
    """The likeliest nodes of a beam search (EAGLE-2, 2406.16858), by the probability of their whole path.

    Every node of the beam proposes its `width` likeliest children, the best `width` of a level carry on, and of all
    nodes generated the best `nodes` are kept. A width of `nodes` gives the best nodes of all (DDTree, 2604.12989).

    Nodes are ranked by their score, equals by when they were generated. A child scores no more than its parent and
    comes later, so a kept node's parent is kept. A kept node at depth d has d - 1 ancestors and, if it has a kept
    child, leaves room for nodes - d of its own level: more are neither tried nor carried on.

    Args:
        width: Children tried, and nodes carried on.
        nodes: Most nodes.
        depth: Deepest level.
        vocab_size: Draft ids.  # Vd
    """

    def __init__(self, width: int, nodes: int, depth: int, vocab_size: int) -> None:
        self.depth = min(depth, nodes)
        self._nodes = nodes
        self._levels: list[_BeamLevel] = []
        rows = 1
        for level in range(1, self.depth + 1):
            children = min(width, nodes - level + 1, vocab_size)
            frontier = min(width, nodes - level, rows * children)
            self._levels.append(_BeamLevel(children, rows * children, frontier))
            rows = frontier
        self.num_rows = sum(level.frontier for level in self._levels[:-1])

    def size(self, depth: int) -> int:
        """Nodes of a tree no deeper than that."""
        return min(self._nodes, sum(level.generated for level in self._levels[:depth]))

    def grow(self, steps: Steps, limits: Sequence[int], pick: Pick) -> Grown:
        """Grow a tree to the deepest limit; each row keeps its best nodes within its own. See `FixedTree.grow`."""
        device, depth = steps.logits.device, min(max(limits), self.depth)
        reach = torch.tensor(limits, device=device).unsqueeze(1)
        rows, pool = _Rows(len(limits), device), _Pool(len(limits), device)
        logits = steps.logits.unsqueeze(1)
        first = 0  # number of the first row of the frontier; the anchor's is 0
        for index, level in enumerate(self._levels[:depth], start=1):
            pool.add(pick(logits, level.children), reach < index)
            if index < depth:
                tokens, above = pool.carry_on(level.frontier, level.children)
                logits = steps.extend(tokens, rows.hang(above + first))
                first += level.generated // level.children
        return pool.best(self.size(depth), depth, max(level.children for level in self._levels[:depth]))


class _Pool:
    """All nodes generated in a round."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self._tokens: list[Tensor] = []  # [B, R * C] each, a level
        self._scores: list[Tensor] = []
        self._parents: list[Tensor] = []  # number of the parent among all nodes, -1 is the anchor
        self._size = 0
        self._frontier = torch.full((batch, 1), -1, device=device)  # [B, R] numbers of the nodes that carry on
        self._reached = torch.zeros(batch, 1, 1, device=device)  # [B, R, 1] their scores

    def add(self, children: Candidates, barred: Tensor) -> None:
        """A level below the nodes that carry on.

        Args:
            children: Theirs.
            barred: Rows that must not go so deep.  # [B, 1] bool
        """
        count = children.tokens.shape[2]
        self._tokens.append(children.tokens.flatten(1))
        self._scores.append((self._reached + children.scores).flatten(1).masked_fill(barred, -torch.inf))
        self._parents.append(self._frontier.repeat_interleave(count, dim=1))

    def carry_on(self, count: int, num_children: int) -> tuple[Tensor, Tensor]:
        """Choose the best nodes of the latest level.

        Returns:
            Their tokens, and where their parents stood among those that carried on before.  # [B, count] twice
        """
        scores = self._scores[-1]
        index = _best(scores, count)
        self._frontier, self._reached = index + self._size, scores.gather(1, index).unsqueeze(-1)
        self._size += scores.shape[1]
        return self._tokens[-1].gather(1, index), index // num_children

    def best(self, count: int, depth: int, most_siblings: int) -> Grown:
        """The tree of the best nodes, in the order they were generated; PAD where a row has fewer."""
        scores = torch.cat(self._scores, dim=1)
        kept = _best(scores, count).sort(dim=1).values  # [B, N]
        there = scores.gather(1, kept) > -torch.inf
        above = torch.cat(self._parents, dim=1).gather(1, kept)
        parents = torch.searchsorted(kept, above).masked_fill_(~there | (above < 0), -1)
        tokens = torch.cat(self._tokens, dim=1).gather(1, kept).masked_fill(~there, PAD)
        return Grown(tokens, from_parents(parents, depth, most_siblings))


def _best(scores: Tensor, count: int) -> Tensor:
    """Indices of the highest scores, the first of equals first.  # [B, G] -> [B, count]"""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]

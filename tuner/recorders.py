"""What is noted of a drafter at every position: chains token by token, trees depth by depth, laws along the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from specflow.types import PAD, DraftBudget
from tuner.forcing import Heard, chance_of, listen

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from specflow.draft.base import Drafter
    from specflow.types import DraftBlock, Sampling
    from tuner.shadow import Asked, Place

    Arrays = Mapping[str, NDArray[Any]]

__all__ = ["ChainRecorder", "LawRecorder", "TreeRecorder"]


@dataclass(frozen=True, slots=True)
class _Draft:
    """What a drafter of chains said at one place."""

    tokens: list[int]
    match: int  # tokens of text that the draft continues; 0 where it copies none
    confidence: list[float] | None
    chance: list[float] | None  # that the drafter itself gave each token


class ChainRecorder:
    """Notes chains, with every confidence that a length policy may read.

    Args:
        drafter: Drafts chains.
        k: Deepest position asked for.
        sampling: Of all requests.
    """

    def __init__(self, drafter: Drafter, k: int, sampling: Sampling) -> None:
        self.drafter, self.k, self._sampling = drafter, k, sampling
        self._heard = listen(drafter)
        self._drafts: dict[Place, _Draft] = {}
        self.confidence_from: str | None = None
        self._real: dict[str, Any] = {}  # numpy types of confidences

    def record(self, asked: Asked) -> None:
        most = tuple(min(limit, self.k) for limit in asked.most)
        if self._heard is not None:
            self._heard.begin()
        block = self.drafter.propose(asked.anchors, DraftBudget(most), asked.uniforms) if any(most) else None
        if block is None or not block.num_nodes:
            return
        chance = self._chance(block)
        confidence = None if block.confidence is None else self._kept("confidence", block.confidence)
        chances = None if chance is None else self._kept("chance", chance)
        if block.confidence is not None:
            self.confidence_from = block.confidence_from
        for row, (place, tokens) in enumerate(zip(asked.places, block.tokens.tolist(), strict=True)):
            drafted = tokens[: tokens.index(PAD)] if PAD in tokens else tokens
            if not most[row] or not drafted:
                continue
            n = len(drafted)
            self._drafts[place] = _Draft(
                drafted,
                0 if block.match_lengths is None else block.match_lengths[row],
                None if confidence is None else confidence[row][:n],
                None if chances is None else chances[row][:n],
            )

    def _chance(self, block: DraftBlock) -> Tensor | None:
        """What the threshold policy reads: the drafter's probability of its own choice, also beside a head."""
        if block.confidence is not None and block.confidence_from == "self":
            return block.confidence
        return None if self._heard is None else chance_of(self._heard, block.tokens, self._sampling)

    def _kept(self, name: str, values: Tensor) -> list[list[float]]:
        self._real[name] = values[:0].cpu().numpy().dtype
        rows: list[list[float]] = values.tolist()
        return rows

    def arrays(self, request: int, text: Sequence[int]) -> Arrays:
        """All that was noted of a request, one line a position.  # [P, K] or [P] each

        Args:
            request: Its number.
            text: Its generated tokens.
        """
        found = {place.position: draft for place, draft in self._drafts.items() if place.request == request}
        positions = max(len(text) - 1, 0)
        arrays: dict[str, NDArray[Any]] = {
            "tokens": _padded({at: each.tokens for at, each in found.items()}, positions, self.k, PAD, np.int32),
            "match": _padded({at: [each.match] for at, each in found.items()}, positions, 1, 0, np.int32)[:, 0],
        }
        for name, kind in self._real.items():
            values = {at: getattr(each, name) for at, each in found.items()}
            arrays[name] = _padded(values, positions, self.k, 0.0, kind)
        return arrays

    def forget(self) -> None:
        """Make room for other requests."""
        self._drafts = {}


class TreeRecorder:
    """Notes trees of every depth: how many nodes they have, and how deep the text goes along with them.

    Which nodes a tree has may follow from how deep it may grow, so it is grown once for each depth.

    Args:
        drafter: Drafts trees.
        k: Deepest level asked for.
    """

    confidence_from = None

    def __init__(self, drafter: Drafter, k: int) -> None:
        self.drafter, self.k = drafter, k
        self._trees: dict[tuple[Place, int], tuple[list[int], list[int]]] = {}  # tokens and parents, by depth

    def record(self, asked: Asked) -> None:
        for depth in range(1, self.k + 1):
            most = tuple(depth if limit >= depth else 0 for limit in asked.most)
            block = self.drafter.propose(asked.anchors, DraftBudget(most), asked.uniforms) if any(most) else None
            if block is None or not block.num_nodes:
                continue
            parents = block.topology.parents.expand(len(block.tokens), -1).tolist()
            for row, (place, tokens) in enumerate(zip(asked.places, block.tokens.tolist(), strict=True)):
                if most[row]:
                    self._trees[place, depth] = tokens, parents[row]

    def arrays(self, request: int, text: Sequence[int]) -> Arrays:
        """See `ChainRecorder.arrays`; column d - 1 is of trees d deep."""
        shape = max(len(text) - 1, 0), self.k
        found = {name: np.zeros(shape, np.int32) for name in ("nodes", "depth", "agree")}
        for (place, depth), (tokens, parents) in self._trees.items():
            if place.request == request and place.position < shape[0]:
                told = _walk(tokens, parents, text[place.position + 1 :])
                for name, value in zip(("nodes", "depth", "agree"), told, strict=True):
                    found[name][place.position, depth - 1] = value
        return found

    def forget(self) -> None:
        self._trees = {}


class LawRecorder:
    """Notes how a drafter weighs the text itself: q of each next token, after the ones before, and its confidence.

    Args:
        drafter: Draws chains from a law of its own, on a network that can be heard.
        k: Deepest position asked for.
        sampling: Of all requests.

    Attributes:
        texts: Generated tokens of each request, in the order in which they start.
    """

    confidence_from = None

    def __init__(self, drafter: Drafter, k: int, sampling: Sampling) -> None:
        self.drafter, self.k, self._sampling = drafter, k, sampling
        self.texts: Sequence[Sequence[int]] = ()
        heard = listen(drafter)
        assert heard is not None, "no network to hear"
        self._heard: Heard = heard
        self._laws: dict[Place, tuple[list[float], list[float] | None]] = {}

    def record(self, asked: Asked) -> None:
        ahead = [self._ahead(place, most) for place, most in zip(asked.places, asked.most, strict=True)]
        if not any(ahead):
            return
        self._heard.begin(ahead)
        budget = DraftBudget(tuple(map(len, ahead)))
        block = self.drafter.propose(asked.anchors, budget, asked.uniforms)
        if block is None or not block.num_nodes:
            return
        chances = chance_of(self._heard, block.tokens, self._sampling).tolist()
        said = block.confidence is not None and block.confidence_from != "self"
        sure = block.confidence.tolist() if said and block.confidence is not None else None
        for row, (place, text) in enumerate(zip(asked.places, ahead, strict=True)):
            if text:
                n = min(len(text), block.lengths[row])
                lost = next((i for i in range(n) if block.tokens[row, i] != text[i]), n)  # the network has no such id
                law = [*chances[row][:lost], *[0.0] * (n - lost)]
                self._laws[place] = law, law if sure is None else sure[row][:n]

    def _ahead(self, place: Place, most: int) -> list[int]:
        text = self.texts[place.request]
        return list(text[place.position + 1 : place.position + 1 + min(most, self.k)])

    def arrays(self, request: int, text: Sequence[int]) -> Arrays:
        """See `ChainRecorder.arrays`."""
        found = {place.position: law for place, law in self._laws.items() if place.request == request}
        positions = max(len(text) - 1, 0)
        return {
            name: _padded({at: each[index] for at, each in found.items()}, positions, self.k, 0.0, np.float64)
            for index, name in enumerate(("law", "law_confidence"))
        }

    def forget(self) -> None:
        self._laws = {}


def _padded(rows: Mapping[int, Sequence[Any] | None], count: int, width: int, fill: Any, kind: Any) -> NDArray[Any]:
    """Lines by position; those that nobody wrote are filled.  # [count, width]"""
    found = np.full((count, width), fill, dtype=kind)
    for at, values in rows.items():
        if values is not None and at < count:
            found[at, : len(values)] = values
    return found


def _walk(tokens: Sequence[int], parents: Sequence[int], text: Sequence[int]) -> tuple[int, int, int]:
    """Nodes of a tree, its deepest level, and the deepest one up to which the text goes along with it."""
    depths: list[int] = []
    stands: list[bool] = []
    nodes = deepest = agree = 0
    for token, parent in zip(tokens, parents, strict=True):
        depth = 1 if parent < 0 else depths[parent] + 1
        right = token != PAD and depth <= len(text) and token == text[depth - 1] and (parent < 0 or stands[parent])
        depths.append(depth)
        stands.append(right)
        if token != PAD:
            nodes, deepest = nodes + 1, max(deepest, depth)
        if right:
            agree = max(agree, depth)
    return nodes, deepest, agree

"""Drafters beside plain decoding: at every position they are asked what they would draft, and nobody verifies it.

The engine decodes plainly, since the shadow proposes nothing, and tells it of every commit. So each drafter meets every
position in the state in which a real round would meet it: all committed tokens with their true features. That holds for
every source whose drafts follow from the text; sources that remember earlier requests are refused (`tuner.trace`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from specflow.draft.base import Needs
from specflow.types import Observation
from specflow.verify import Match

if TYPE_CHECKING:
    from specflow.draft.base import Drafter, Uniforms
    from specflow.noise import RoundNoise
    from specflow.sampling import TargetLaw
    from specflow.target.base import Cache
    from specflow.types import DraftBlock, DraftBudget, Sampling, Verdict

__all__ = ["Asked", "Place", "Recorder", "Shadow", "WatchedMatch"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row of the batch is."""

    request: int  # in the order in which they started
    position: int  # of its anchor among its generated tokens, from 0


@dataclass(frozen=True, slots=True)
class Asked:
    """What drafters are asked for in one round."""

    anchors: Sequence[int]  # [B]
    most: tuple[int, ...]  # [B] draft tokens of which each row could still make use
    uniforms: Uniforms
    places: Sequence[Place]  # [B]


class Recorder(Protocol):
    """One drafter, and what it said."""

    drafter: Drafter
    k: int  # deepest position asked for

    def record(self, asked: Asked) -> None:
        """Ask it, and note the answer by place."""


class Shadow:
    """A drafter that asks others and proposes nothing.

    Args:
        recorders: Who is asked.
    """

    branches = False

    def __init__(self, recorders: Sequence[Recorder]) -> None:
        self._recorders = tuple(recorders)
        self._cache: Cache
        self._requests: list[int] = []  # [B] number of each row's request
        self._prompts: list[int] = []  # tokens of each request's prompt, by number

    @property
    def needs(self) -> Needs:
        each = [recorder.drafter.needs for recorder in self._recorders]
        return Needs(
            taps=tuple(sorted({tap for needs in each for tap in needs.taps})),
            hidden_pre=any(needs.hidden_pre for needs in each),
            hidden_post=any(needs.hidden_post for needs in each),
        )

    @property
    def num_nodes(self) -> int:
        """Room that a drafter uses in the target's cache."""
        return max((recorder.drafter.num_nodes for recorder in self._recorders), default=0)

    def reset(self, batch: int, cache: Cache) -> None:
        self._cache, self._requests, self._prompts = cache, [-1] * batch, []
        for recorder in self._recorders:
            recorder.drafter.reset(batch, cache)

    def start(self, row: int, prompt: Sequence[int], sampling: Sampling) -> None:
        self._requests[row] = len(self._prompts)
        self._prompts.append(len(prompt))
        for recorder in self._recorders:
            recorder.drafter.start(row, prompt, sampling)

    def observe(self, observation: Observation, rows: Sequence[int]) -> None:
        for recorder in self._recorders:
            recorder.drafter.observe(observation, rows)

    def propose(self, anchors: Sequence[int], budget: DraftBudget, uniforms: Uniforms) -> DraftBlock | None:
        asked = Asked(anchors, budget.tokens, uniforms, self.places())
        for recorder in self._recorders:
            recorder.record(asked)
        return None

    def select(self, rows: Sequence[int]) -> None:
        self._requests = [self._requests[row] for row in rows]
        for recorder in self._recorders:
            recorder.drafter.select(rows)

    def places(self) -> list[Place]:
        """Where each row is, before what this round commits.  # [B]"""
        each = zip(self._requests, self._cache.lengths, strict=True)
        return [Place(request, length - self._prompts[request]) for request, length in each]


class WatchedMatch:
    """Rule match over blocks without a draft, which notes the probability of every token the target says.

    Args:
        shadow: Knows which row is where.
    """

    name = "match"

    def __init__(self, shadow: Shadow) -> None:
        self._shadow, self._rule = shadow, Match()
        self.chances: dict[Place, float] = {}  # of the token after each anchor, where the target draws it

    def verify(self, block: DraftBlock, law: TargetLaw, noise: RoundNoise) -> Verdict:
        verdict = self._rule.verify(block, law, noise)
        if not law.greedy:
            said = law.probs()[:, 0].gather(1, verdict.tokens[:, :1])
            self.chances.update(zip(self._shadow.places(), said[:, 0].tolist(), strict=True))
        return verdict

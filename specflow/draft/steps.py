"""What every drafting network offers: logits of the next position, after any prefix of the block.

An autoregressive network runs a pass for each step. A parallel one has run its only pass when the steps begin, and a
step reads its row, corrected by the token before where there is a corrector. Chains and trees are grown on top of this
alone, so every shape goes with every network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.draft.base import Needs
    from specflow.law import DraftVocabulary
    from specflow.target.base import Cache
    from specflow.types import Entry, Observation

__all__ = ["Frontier", "StepModel", "Steps"]


@dataclass(frozen=True, slots=True)
class Frontier:
    """Where new draft rows hang in a tree.

    Rows of a round are numbered from 0, the anchor's own, in the order in which they were added.
    """

    parents: Tensor  # [B, R] row whose child each new row is
    visible: Tensor  # [B, R, P + R] bool: which of the P rows 1, 2, ... added so far, and which new ones, each sees


class Steps(Protocol):
    """One round's draft rows. Nothing here is committed."""

    @property
    def logits(self) -> Tensor:
        """Of the token after the anchor.  # [B, Vd]"""

    @property
    def hidden(self) -> Tensor:
        """What the latest logits were made from, for confidence heads.  # [B, H], or [B, R, H] after a frontier"""

    def extend(self, tokens: Tensor, frontier: Frontier | None = None) -> Tensor:
        """Add draft rows, all one level below their parents.

        Args:
            tokens: Target ids.  # [B, R], R = 1 without a frontier
            frontier: None continues the chain.

        Returns:
            Logits of the token after each new row.  # [B, R, Vd]
        """

    def entry(self, last: Tensor) -> Entry | None:
        """States with which verification can enter the target, for a finished chain; None where it runs it all.

        Args:
            last: Last token of the chain, not yet added.  # [B, 1]
        """


class StepModel(Protocol):
    """A drafting network with its state for a batch of requests. The first half of `Drafter`, without the shape."""

    @property
    def needs(self) -> Needs: ...

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        """What its ids mean; None where they are the target's."""

    @property
    def most_positions(self) -> int:
        """Absolute positions it was made for; rows beyond them are not drafted for."""

    @property
    def most_depth(self) -> int:
        """Deepest draft position it can fill."""

    def reset(self, batch: int, num_nodes: int, cache: Cache) -> None:
        """Forget all requests. Own caches need room for `num_nodes` draft rows above `cache.capacity` positions."""

    def start(self, row: int, prompt: Sequence[int]) -> None: ...

    def observe(self, observation: Observation, rows: Sequence[int]) -> None: ...

    def open(self, anchors: Sequence[int], active: Sequence[bool]) -> Steps:
        """Begin a round: catch up with what was committed, and score the token after the anchor.

        Calling it again without an observation in between gives the same logits.

        Args:
            anchors: Last committed token of each row.  # [B]
            active: Rows that will be drafted for; the others may be skipped or ride along.  # [B]
        """

    def select(self, rows: Sequence[int]) -> None: ...

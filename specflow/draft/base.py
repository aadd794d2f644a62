"""What the engine asks of a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from specflow.target.base import Target
    from specflow.types import DraftBlock, DraftBudget, Observation

__all__ = ["Drafter", "Needs", "SourceContext", "Uniforms"]


@dataclass(frozen=True, slots=True)
class SourceContext:
    """What a source may build its drafter from, beside its own options."""

    target: Target
    k: int  # most draft tokens of a block


@dataclass(frozen=True, slots=True)
class Needs:
    """Target features a drafter wants with every observation."""

    taps: tuple[int, ...] = ()
    hidden_pre: bool = False
    hidden_post: bool = False

    @property
    def any(self) -> bool:
        return bool(self.taps or self.hidden_pre or self.hidden_post)


class Uniforms(Protocol):
    """Random numbers of this round, keyed by (request seed, stream, round, absolute position)."""

    def uniform(self, stream: str, row: int, position: int) -> float:
        """A number in [0, 1); the same key always gives the same number."""


class Drafter(Protocol):
    """Proposes blocks. `propose` never changes committed state: what is not observed did not happen."""

    @property
    def needs(self) -> Needs: ...

    def reset(self, batch: int) -> None:
        """Forget all requests; the next ones use rows 0 .. batch - 1."""

    def start(self, row: int, prompt: Sequence[int]) -> None:
        """A new request takes this row. Its prompt features follow in observations, chunk by chunk."""

    def observe(self, observation: Observation, rows: Sequence[int]) -> None:
        """Committed tokens and their true features, for these rows (the observation is in the same order)."""

    def propose(self, anchors: Sequence[int], budget: DraftBudget, uniforms: Uniforms) -> DraftBlock | None:
        """Draft for all rows of the batch; None where no row has anything to propose (the round is a plain step).

        Args:
            anchors: Last committed token of each row.  # [B]
        """

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""

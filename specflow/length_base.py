"""What a length policy is, and those that look at counts alone: always k, or more after success.

All state is host numbers of one row, and a budget depends on earlier rounds only. A cap chosen before drafting never
biases the law of the text (reference: methods 0.2), whatever the verification rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pydantic import BaseModel, ConfigDict, Field

from specflow.types import DraftBlock, DraftBudget

__all__ = ["Additive", "AdditiveConfig", "Fixed", "FixedConfig", "LengthPolicy", "Until", "priced_context", "within"]


_BUCKET = 64
"""Contexts that share their prices."""


def priced_context(context: int) -> int:
    """The context whose measured prices stand for this one and its neighbours."""
    return context // _BUCKET * _BUCKET + _BUCKET // 2


def within(length: int, limit: int) -> int:
    """A length as far as a row can use it."""
    return max(0, min(length, limit))


class LengthPolicy(Protocol):
    """Decides before drafting, may shorten after it, learns from what was accepted."""

    @property
    def k(self) -> int:
        """The most draft tokens a budget will ever hold; the bonus token is not one of them."""

    def reset(self, batch: int) -> None:
        """Forget all requests; the next ones use rows 0 .. batch - 1."""

    def start(self, row: int) -> None:
        """A new request takes this row."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""

    def budget(self, limits: Sequence[int], contexts: Sequence[int] = ()) -> DraftBudget:
        """The coming round's budget.

        Args:
            limits: Most tokens each row can use; 0 or less for a row that must not draft.  # [B]
            contexts: Committed tokens of each row, which make a pass dearer; () counts as none.  # [B]
        """

    def trim(self, block: DraftBlock) -> DraftBlock:
        """The block to verify: the given one, or a shorter one."""

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """What became of the round.

        Args:
            drafted: Draft tokens verified for each row; 0 where it was a plain step.  # [B]
            accepted: Of those, the accepted ones.  # [B]
        """


class FixedConfig(BaseModel):
    """Always k tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Fixed:
    """K tokens, every round; 0 is plain decoding."""

    def __init__(self, k: int) -> None:
        assert k >= 0, f"k is {k}"
        self.k = k

    def reset(self, batch: int) -> None:
        pass

    def start(self, row: int) -> None:
        pass

    def select(self, rows: Sequence[int]) -> None:
        pass

    def budget(self, limits: Sequence[int], contexts: Sequence[int] = ()) -> DraftBudget:
        return DraftBudget(tuple(within(self.k, limit) for limit in limits))

    def trim(self, block: DraftBlock) -> DraftBlock:
        return block

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        pass


class Until:
    """A policy up to a length of context: rows with more committed tokens are decoded plainly.

    Drafters trained on short texts draft for nothing in long ones (speculators PR 684: 2.3 tokens a round at 2k, 1.08
    at 20k). `specflow tune` finds the length; a policy that weighs costs finds it by itself.
    """

    def __init__(self, policy: LengthPolicy, until: int) -> None:
        self._policy, self._until = policy, until

    @property
    def k(self) -> int:
        return self._policy.k

    def reset(self, batch: int) -> None:
        self._policy.reset(batch)

    def start(self, row: int) -> None:
        self._policy.start(row)

    def select(self, rows: Sequence[int]) -> None:
        self._policy.select(rows)

    def budget(self, limits: Sequence[int], contexts: Sequence[int] = ()) -> DraftBudget:
        if contexts:
            each = zip(limits, contexts, strict=True)
            limits = [limit if context < self._until else 0 for limit, context in each]
        return self._policy.budget(limits, contexts)

    def trim(self, block: DraftBlock) -> DraftBlock:
        return self._policy.trim(block)

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        self._policy.observe(drafted, accepted)


class AdditiveConfig(BaseModel):
    """More after a block that was accepted whole, fewer after any other."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    start: int | None = Field(None, ge=1, description="tokens of a request's first block; null starts at k")
    up: int = Field(2, ge=0, description="added after a block that was accepted whole")
    down: int = Field(1, ge=0, description="taken off after any other block")


class Additive:
    """The heuristic schedule of Hugging Face's assisted generation, per row, within 1 .. k."""

    def __init__(self, k: int, start: int | None = None, up: int = 2, down: int = 1) -> None:
        assert k >= 1, f"k is {k}"
        self.k = k
        self.config = AdditiveConfig(start=start, up=up, down=down)
        self._first = min(start or k, k)
        self._lengths: list[int] = []

    def reset(self, batch: int) -> None:
        self._lengths = [self._first] * batch

    def start(self, row: int) -> None:
        self._lengths[row] = self._first

    def select(self, rows: Sequence[int]) -> None:
        self._lengths = [self._lengths[row] for row in rows]

    def budget(self, limits: Sequence[int], contexts: Sequence[int] = ()) -> DraftBudget:
        return DraftBudget(tuple(map(within, self._lengths, limits)))

    def trim(self, block: DraftBlock) -> DraftBlock:
        return block

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """A round that drafted nothing says nothing, and changes nothing."""
        for row, (num_drafted, num_accepted) in enumerate(zip(drafted, accepted, strict=True)):
            if num_drafted:
                change = self.config.up if num_accepted == num_drafted else -self.config.down
                self._lengths[row] = max(1, min(self.k, self._lengths[row] + change))

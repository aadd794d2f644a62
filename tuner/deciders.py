"""What is drafted, verified and accepted at positions of a trace, as a length policy decides it.

Policies are the very objects that the engine uses. Where one keeps no state, all positions go through it as one batch;
where its rows share prices, they are decoded together as the engine would. What lies between is for `tuner.lanes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from specflow.length import Fixed
from specflow.types import DraftBudget
from tuner.walk import Decided

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from specflow.length import LengthPolicy
    from specflow.types import DraftBlock, Law
    from tuner.recorded import Drafts, Trace

    Numbers = NDArray[Any]

__all__ = ["Served", "Setting", "Together", "by_position", "keeps_no_state"]

Kind = Literal["context", "prefix", "self"]
SAFEST_FIRST: tuple[Kind, ...] = ("context", "prefix", "self")


@dataclass(frozen=True)
class Served:
    """A drafter as one configuration uses it."""

    drafts: Drafts
    k: int  # deepest position asked of it
    agree: Numbers  # as in `Drafts`; where acceptance is a matter of chance, as it fell this time
    weighed: bool  # the rule weighs its law, which is not one-hot: drafts are not those along the text

    @cached_property
    def agrees(self) -> list[Any]:
        """`agree` as plain numbers."""
        found: list[Any] = self.agree.tolist()
        return found

    @property
    def tree(self) -> bool:
        return self.drafts.info.tree

    @property
    def kind(self) -> Kind:
        """What its confidence depends on."""
        return self.drafts.info.confidence_from or "context"

    @property
    def copies(self) -> bool:
        """Whether it copies text, and says how long a match its drafts continue."""
        return self.drafts.info.matches and self.drafts.match is not None

    def sure(self, along: bool) -> Numbers | None:
        """How sure it is of its drafts; with `along`, along the text where the rule weighs their law.  # [P, K]"""
        return self.drafts.law_confidence if along and self.weighed else self.drafts.confidence


@dataclass(frozen=True)
class Setting:
    """What deciders need to know."""

    trace: Trace
    served: tuple[Served, ...]  # in the order in which they are asked
    until: int | None = None  # committed tokens from which on nobody is asked, as in `length.Until`

    @cached_property
    def limit(self) -> Numbers:
        """Draft tokens that can be of use at every position.  # [P]"""
        limit = self.trace.limit
        found: Numbers = limit if self.until is None else np.where(self.trace.context < self.until, limit, 0)
        return found

    @cached_property
    def limits(self) -> list[int]:
        found: list[int] = self.limit.tolist()
        return found

    @cached_property
    def contexts(self) -> list[int]:
        found: list[int] = self.trace.context.tolist()
        return found

    @cached_property
    def lefts(self) -> list[int]:
        found: list[int] = self.trace.left.tolist()
        return found


def keeps_no_state(policy: LengthPolicy) -> bool:
    """Whether what it decides in a round follows from that round alone: then it is `Fixed`, or cuts as it does."""
    return isinstance(policy, Fixed)


def by_position(setting: Setting, policy: LengthPolicy) -> dict[str, Numbers]:
    """What a policy without state decides at every position.  # field of `Decided` -> [P]"""
    trace = setting.trace
    at = np.arange(trace.num_positions)
    budget = np.minimum(policy.k, setting.limit)
    found = _first_of(setting, at, [np.minimum(budget, served.k) for served in setting.served])
    if type(policy) is not Fixed:
        for number, served in enumerate(setting.served):
            here = (found["served"] == number) & (found["verified"] > 0)
            if here.any() and not served.tree and served.drafts.confidence is not None:
                _trim(served, at[here], found, here, policy)
    return {**found, "asked": budget > 0}


def _first_of(setting: Setting, at: Numbers, budgets: Sequence[Numbers]) -> dict[str, Numbers]:
    """The draft of the first drafter that has one.

    Args:
        setting: The trace and the drafters.
        at: Positions.  # [B]
        budgets: How deep each drafter may go there.  # of [B]

    Returns:
        # field of `Decided` -> [B]
    """
    names = ("drafted", "verified", "nodes", "accepted", "served")
    found = {name: np.zeros(len(at), np.int64) for name in names}
    free = np.ones(len(at), dtype=bool)
    for number, (served, budget) in enumerate(zip(setting.served, budgets, strict=True)):
        depth, nodes, agree = _alone(served, at, budget)
        here = free & (nodes > 0)
        free &= ~here
        for name, values in zip(names, (depth, depth, nodes, np.minimum(agree, depth)), strict=False):
            found[name][here] = values[here]
        found["served"][here] = number
    return found


def _alone(served: Served, at: Numbers, budget: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Depth, nodes and agreement of one drafter within a budget.  # [B] each"""
    drafts = served.drafts
    if not served.tree:
        length = np.minimum(drafts.length[at], budget)
        return length, length, served.agree[at]
    assert drafts.nodes is not None
    column, some = np.maximum(budget - 1, 0), budget > 0
    depth, nodes, agree = (table[at, column] * some for table in (drafts.length, drafts.nodes, served.agree))
    return depth, nodes, agree


def _trim(served: Served, at: Numbers, found: dict[str, Numbers], here: Numbers, policy: LengthPolicy) -> None:
    """Let a policy cut the chains of one drafter, each on its own: what was drafted, and what went along the text.

    Args:
        served: The drafter.
        at: Positions at which it drafted.  # [n]
        found: What is decided at all positions; changed.
        here: Where those positions are.  # bool, n of them
        policy: It looks at one row at a time.
    """
    lengths, drafts = found["drafted"][here], served.drafts
    assert drafts.confidence is not None
    width = int(lengths.max())
    kept = _kept(policy, block_of(lengths, drafts.confidence[at, :width], served.kind, not served.weighed))
    accepted = found["accepted"][here]
    if served.weighed and drafts.law_confidence is not None:
        along = block_of(lengths, drafts.law_confidence[at, :width], served.kind, is_point=False)
        accepted = np.minimum(accepted, _kept(policy, along))
        kept = np.maximum(kept, accepted)
    found["verified"][here] = found["nodes"][here] = kept
    found["accepted"][here] = np.minimum(accepted, kept)


def _kept(policy: LengthPolicy, block: DraftBlock) -> Numbers:
    """How much of each row a policy lets stand.  # [B]"""
    return np.array(policy.trim(block).lengths, dtype=np.int64)


def block_of(
    lengths: Numbers,
    confidence: Numbers | None,
    confidence_from: Kind,
    is_point: bool,
    match_lengths: tuple[int, ...] | None = None,
) -> DraftBlock:
    """Chains of which nothing matters but how long they are and how sure.  # [B], [B, N]"""
    import torch

    from specflow.law import PointMass
    from specflow.tree import chain
    from specflow.types import PAD, DraftBlock

    width = int(lengths.max())
    reach = torch.from_numpy(lengths).unsqueeze(1)
    tokens = torch.zeros(len(lengths), width, dtype=torch.int64).masked_fill_(torch.arange(width) >= reach, PAD)
    return DraftBlock(
        tokens=tokens,
        lengths=tuple(lengths.tolist()),
        topology=chain(width, tokens.device),
        law=PointMass(tokens, 1) if is_point else cast("Law", _Drawn()),
        confidence=None if confidence is None else torch.from_numpy(np.ascontiguousarray(confidence)),
        confidence_from=confidence_from,
        match_lengths=match_lengths,
    )


@lru_cache(maxsize=4096)
def _unsure_block(lengths: tuple[int, ...], is_point: bool, matches: tuple[int, ...] | None) -> DraftBlock:
    """Chains of drafters without confidence: there are few, and policies change none."""
    return block_of(np.array(lengths, dtype=np.int64), None, "context", is_point, matches)


class _Drawn:
    """A law of which a length policy only asks whether it is one-hot."""

    is_point = False

    def narrow(self, width: int) -> _Drawn:
        return self


class Together:
    """A policy whose rows share prices, driven round by round as the engine drives it.

    Args:
        setting: The trace and the drafters.
        policy: The engine's own, which costs have been given to.
    """

    def __init__(self, setting: Setting, policy: LengthPolicy) -> None:
        self._setting, self._policy = setting, policy
        self.reset, self.start, self.select = policy.reset, policy.start, policy.select

    def decide(self, positions: Sequence[int]) -> list[Decided]:
        """See `Decider.decide`."""
        setting = self._setting
        limits = [setting.limits[at] for at in positions]
        budget = self._policy.budget(limits, [setting.contexts[at] for at in positions])
        found = [self._draft(row, at, budget) for row, at in enumerate(positions)]
        if any(each.drafted for each in found):
            found = self._trimmed(positions, found)
        accepted = [min(each.accepted, setting.lefts[at] - 1) for each, at in zip(found, positions, strict=True)]
        self._policy.observe([each.verified for each in found], accepted)
        return found

    def _draft(self, row: int, at: int, budget: DraftBudget) -> Decided:
        """The first drafter that has something."""
        if not budget.tokens[row]:
            return Decided()
        for number, served in enumerate(self._setting.served):
            depth = _depth(served, row, at, budget)
            if depth > 0:
                return _found(served, number, at, depth)
        return Decided(asked=True)

    def _trimmed(self, positions: Sequence[int], found: Sequence[Decided]) -> list[Decided]:
        """What the policy lets stand of a block."""
        served = [self._setting.served[each.served] if each.drafted else None for each in found]
        if any(by is not None and by.tree for by in served):
            return list(found)
        kept = self._lengths(positions, found, served, along=False)
        if not any(by is not None and by.weighed for by in served):
            return [_cut(each, length, length) for each, length in zip(found, kept, strict=True)]
        reach = self._lengths(positions, found, served, along=True)
        return [_cut(*each) for each in zip(found, kept, reach, strict=True)]

    def _lengths(
        self, positions: Sequence[int], found: Sequence[Decided], served: Sequence[Served | None], along: bool
    ) -> Sequence[int]:
        """How much the policy lets stand of each row's chain.  # [B]"""
        return self._policy.trim(self._block(positions, found, served, along)).lengths

    def _block(
        self, positions: Sequence[int], found: Sequence[Decided], served: Sequence[Served | None], along: bool
    ) -> DraftBlock:
        """The rows' chains; with `along`, as sure as they are along the text where the rule weighs their law."""
        lengths = tuple(each.drafted for each in found)
        confidence: Numbers | None = None
        kinds: list[Kind] = ["context"]
        for row, (at, by) in enumerate(zip(positions, served, strict=True)):
            own = None if by is None else by.sure(along)
            if by is not None and own is not None:
                if confidence is None:
                    confidence = np.ones((len(found), max(lengths)), own.dtype)
                confidence[row, : lengths[row]] = own[at, : lengths[row]]
                kinds.append(by.kind)
        matches = None
        if any(by is not None and by.drafts.info.matches for by in served):
            each = zip(positions, served, strict=True)
            matches = tuple(0 if by is None else _matched(by, at) for at, by in each)
        is_point = not any(by is not None and by.weighed for by in served)
        if confidence is None:
            return _unsure_block(lengths, is_point, matches)
        return block_of(np.array(lengths), confidence, max(kinds, key=SAFEST_FIRST.index), is_point, matches)


def _matched(served: Served, at: int) -> int:
    """Tokens of text that a copy continues; 0 where the drafter copies none."""
    return served.drafts.matches[at] if served.copies else 0


def _depth(served: Served, row: int, at: int, budget: DraftBudget) -> int:
    """How deep a drafter goes within a budget."""
    most = min(budget.tokens[row], served.k)
    if served.tree:
        return most
    most = min(most, int(served.drafts.lengths[at]))
    matched = _matched(served, at)
    return min(most, budget.most(row, matched)) if most and matched else most


def _found(served: Served, number: int, at: int, depth: int) -> Decided:
    """A draft of this depth, all of it verified."""
    drafts = served.drafts
    if not served.tree:
        return Decided(depth, depth, depth, min(served.agrees[at], depth), number, asked=True)
    assert drafts.nodes is not None
    deep, nodes, agree = (int(table[at, depth - 1]) for table in (drafts.length, drafts.nodes, served.agree))
    return Decided(deep, deep, nodes, agree, number, asked=True)


def _cut(decided: Decided, length: int, reach: int) -> Decided:
    """What stands of a draft that is cut, here after `length` tokens and along the text after `reach`."""
    accepted = min(decided.accepted, reach)
    verified = max(length, accepted)
    return decided._replace(verified=verified, nodes=verified, accepted=accepted)

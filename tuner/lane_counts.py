"""Length policies over lanes that look at counts and at the drafter's probabilities: additive and threshold."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tuner.lanes import Drafted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tuner.lanes import Ground

    Numbers = NDArray[Any]

__all__ = ["AdditiveLanes", "StatefulLanes", "ThresholdLanes"]


class StatefulLanes:
    """What lanes of one policy share: numbers of their own, and options by slot."""

    state: tuple[str, ...] = ()
    """Attributes that lanes have by the lane."""

    def __init__(self, ground: Ground, slot: Numbers) -> None:
        self.ground, self._slot = ground, slot

    def option(self, value: Callable[[Any], Any]) -> Numbers:
        """Something of each lane's policy.  # [L]"""
        found: Numbers = np.array([value(policy) for policy in self.ground.policies])[self._slot]
        return found

    def most(self, number: int, at: Numbers, tokens: Numbers) -> Numbers:
        return tokens

    def cut(self, at: Numbers, drafted: Drafted) -> Drafted:
        return drafted

    def select(self, live: Numbers) -> None:
        for name in self.state:
            setattr(self, name, getattr(self, name)[live])


class AdditiveLanes(StatefulLanes):
    """See `specflow.length.Additive`."""

    state = ("_k", "_up", "_down", "_lengths")

    def __init__(self, ground: Ground, slot: Numbers) -> None:
        super().__init__(ground, slot)
        self._k = self.option(lambda policy: policy.k)
        self._up = self.option(lambda policy: policy.config.up)
        self._down = self.option(lambda policy: -policy.config.down)
        self._lengths = self.option(lambda policy: min(policy.config.start or policy.k, policy.k))

    def budget(self, at: Numbers, reach: Numbers) -> Numbers:
        return np.minimum(self._lengths, reach)

    def observe(self, drafted: Drafted) -> None:
        change = np.where(drafted.accepted == drafted.verified, self._up, self._down) * (drafted.verified > 0)
        self._lengths = np.maximum(1, np.minimum(self._k, self._lengths + change))


class ThresholdLanes(StatefulLanes):
    """See `specflow.length.Threshold`."""

    state = ("_target", "_step", "_share", "_bar", "_most")

    def __init__(self, ground: Ground, slot: Numbers) -> None:
        super().__init__(ground, slot)
        self._target = self.option(lambda policy: policy.config.target)
        self._step = self.option(lambda policy: policy.config.step)
        self._share, self._bar = self._target, self.option(lambda policy: policy.config.start)
        self._most = np.zeros_like(slot)
        self._chances = [_closed(part.served.drafts.chance, part.served.tree) for part in ground.parts]
        self._laws = [_closed(part.served.drafts.law, not part.served.weighed) for part in ground.parts]

    def budget(self, at: Numbers, reach: Numbers) -> Numbers:
        self._most = reach
        return reach

    def cut(self, at: Numbers, drafted: Drafted) -> Drafted:
        """End each chain after the first token that its drafter gave less probability than the bar."""
        for part, chance, law in zip(self.ground.parts, self._chances, self._laws, strict=True):
            if chance is None:
                continue
            depth, _, _, accepted, served = drafted
            length = np.minimum(self._up_to(chance, at), depth)
            if law is not None:
                accepted = np.minimum(accepted, self._up_to(law, at))
                length = np.maximum(length, accepted)
            shorter = Drafted(length, length, length, np.minimum(accepted, length), served)
            drafted = shorter if len(self.ground.parts) == 1 else shorter.where(served == part.number, drafted)
        return drafted

    def observe(self, drafted: Drafted) -> None:
        length, some = drafted.verified, drafted.verified > 0
        share = 0.5 * self._share + 0.5 * drafted.accepted / np.maximum(length, 1)
        self._share = np.where(some, share, self._share)
        low = self._share < self._target
        moves = some & (low | (length < self._most))
        moved = 0.9 * self._bar + 0.1 * (self._bar + np.where(low, self._step, -self._step))
        self._bar = np.where(moves, np.minimum(np.maximum(moved, 0.0), 1.0), self._bar)

    def _up_to(self, chance: Numbers, at: Numbers) -> Numbers:
        """Tokens up to the first below the bar, that one included.  # [P, K + 1], [L] -> [L]"""
        found: Numbers = (chance.take(at, axis=0) < self._bar[:, None]).argmax(axis=1) + 1
        return found


def _closed(chance: Numbers | None, unused: bool) -> Numbers | None:
    """A table with one more column, which is below every bar.  # [P, K] -> [P, K + 1]"""
    if chance is None or unused:
        return None
    return np.concatenate((chance, np.full((len(chance), 1), -1.0, chance.dtype)), axis=1)

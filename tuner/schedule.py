"""Which K at which load, with hysteresis, so that a load that swings about a threshold does not switch back and forth.

One engine's schedule without it fell from 232 to 24 tokens a second when the load crossed a threshold (vLLM issue
49548): every switch costs, and a load that stands at a threshold pays it all the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor

from tuner.result import Choice, Level

__all__ = ["Best", "Scheduler", "make_schedule"]

BAND = 0.15
"""Half the width of the band around a threshold in which nothing changes, as a share of it; at least one request."""


@dataclass(frozen=True, slots=True)
class Best:
    """The best choice at one load."""

    concurrency: int
    choice: Choice
    k: int
    speed_up: float
    measured: bool = False
    latency_gain: float | None = None  # where latency has to be beaten


def make_schedule(best: Sequence[Best]) -> list[Level]:
    """Levels by rising load; neighbours with the same choice are one.

    The threshold between two loads is their middle on a scale of ratios.
    """
    levels: list[Level] = []
    before: Best | None = None
    for here in sorted(best, key=lambda each: each.concurrency):
        if before is None or levels[-1].choice != here.choice:
            enter, leave = (1, 0) if before is None else _band(before.concurrency, here.concurrency)
            facts = {name: getattr(here, name) for name in ("k", "speed_up", "measured", "latency_gain")}
            levels.append(Level(enter=enter, leave=leave, choice=here.choice, **facts))
        before = here
    return levels


def _band(below: int, above: int) -> tuple[int, int]:
    """Where a level is entered and left: at the lower load it must be left again."""
    threshold = (below * above) ** 0.5
    reach = max(0.5, BAND * threshold)
    leave = max(below + 1, floor(threshold - reach))
    return max(leave + 1, ceil(threshold + reach)), leave


class Scheduler:
    """Follows a load through a schedule.

    Args:
        levels: As `make_schedule` gives them, at least one.
    """

    def __init__(self, levels: Sequence[Level]) -> None:
        assert levels, "a schedule needs a level"
        self._levels = list(levels)
        self._at = 0
        self.num_switches = 0

    def choose(self, load: int) -> Level:
        """The level for this many requests: the one in use, unless the load has left its band."""
        at = self._at
        while at + 1 < len(self._levels) and load >= self._levels[at + 1].enter:
            at += 1
        while at > 0 and load < self._levels[at].leave:
            at -= 1
        self.num_switches += at != self._at
        self._at = at
        return self._levels[at]

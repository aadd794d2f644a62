"""The time a run may take."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from specflow.errors import DataError

__all__ = ["Budget", "BudgetSpent"]


class BudgetSpent(DataError):
    """No time is left for what comes next."""


class Budget:
    """Seconds from now on; None is as long as it takes.

    Args:
        seconds: How many.
        clock: Reads them.
    """

    def __init__(self, seconds: float | None, clock: Callable[[], float] = monotonic) -> None:
        self.seconds, self.clock = seconds, clock
        self._began = clock()

    @property
    def spent_s(self) -> float:
        return self.clock() - self._began

    @property
    def left_s(self) -> float | None:
        return None if self.seconds is None else self.seconds - self.spent_s

    def share(self, part: float) -> float | None:
        """The reading of the clock at which a share of what is left is spent."""
        return None if self.left_s is None else self.clock() + part * max(0.0, self.left_s)

    def check(self, phase: str) -> None:
        """See that there is time for a phase.

        Raises:
            BudgetSpent: There is none.
        """
        if self.left_s is not None and self.left_s <= 0:
            raise BudgetSpent(
                f"--budget {self.seconds:g} s",
                f"spent before {phase} was done",
                "time to profile, to trace, to try one candidate and to confirm it",
                "profile, trace and trials are kept: the same command goes on from them; or raise the budget",
            )

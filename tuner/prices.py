"""Seconds of many rounds at once, from a cost model that prices one. Contexts are priced as length policies do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specflow.length_base import priced_context

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tuner.replay_types import RoundCosts

    Numbers = NDArray[Any]

__all__ = ["Prices", "priced_width"]


class Prices:
    """Tables of a cost model, filled as they are asked for and kept.

    Args:
        cost: Of all drafters together, or of each by name.
        deepest: Deepest draft position that will be asked for.
    """

    def __init__(self, cost: RoundCosts | Mapping[str, RoundCosts], deepest: int) -> None:
        self._cost, self._deepest = cost, deepest
        self._rows: dict[tuple[str, int, int], Numbers] = {}  # (drafter, batch, context) -> [3, deepest + 1]

    @property
    def names(self) -> tuple[str, ...]:
        """Whom plain rounds are priced with: they cost the same beside any drafter."""
        return tuple(self._cost)[:1] if isinstance(self._cost, Mapping) else ("",)

    def of(self, name: str) -> RoundCosts | None:
        """The model of a drafter, which may be that of all."""
        return self._cost.get(name) if isinstance(self._cost, Mapping) else self._cost

    def seconds(
        self,
        served: tuple[Sequence[str], Numbers],
        drafted: Numbers,
        verified: Numbers,
        batch: Numbers,
        context: Numbers,
    ) -> tuple[Numbers, Numbers, Numbers]:
        """Draft, target pass and the rest of each round.

        Args:
            served: Names of drafters, and the number of the one that served each round.  # [R]
            drafted: Deepest position drafted; 0 is none.  # [R]
            verified: Deepest position verified.  # [R]
            batch: # [R]
            context: Mean committed tokens.  # [R]
        """
        names, numbers = served
        bucket = context.astype(np.int64) // priced_width()
        wide = int(bucket.max(initial=0)) + 1
        most = int(batch.max(initial=0)) + 1
        codes, places = np.unique((numbers * most + batch) * wide + bucket, return_inverse=True)
        tables = np.stack(
            [
                self._row(names[code // wide // most], code // wide % most, code % wide * priced_width())
                for code in codes.tolist()
            ]
        )  # [U, 3, deepest + 1]
        return tables[places, 0, drafted], tables[places, 1, verified], tables[places, 2, verified]

    def _row(self, name: str, batch: int, context: int) -> Numbers:
        key = name, batch, priced_context(context)
        if key not in self._rows:
            cost = self.of(name)
            assert cost is not None, f"no costs of {name}"
            depths = range(self._deepest + 1)
            self._rows[key] = np.array(
                [
                    [cost.draft_s(depth, *key[1:]) for depth in depths],
                    [cost.verify_s(depth, *key[1:]) for depth in depths],
                    [cost.overhead_s(depth, batch) for depth in depths],
                ]
            )
        return self._rows[key]


def priced_width() -> int:
    """Contexts that share their prices stand together: how many they are."""
    return 2 * priced_context(0)

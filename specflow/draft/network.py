"""What drafters on a network share, whatever the shape of their blocks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from specflow.draft.drawing import Chooser

if TYPE_CHECKING:
    from specflow.draft.base import Needs, SourceContext
    from specflow.draft.steps import StepModel
    from specflow.target.base import Cache
    from specflow.types import DraftBudget, Observation, Sampling

__all__ = ["NetworkDrafter"]

log = logging.getLogger(__name__)


class NetworkDrafter:
    """The part of a `Drafter` that follows requests: passed on to the network, and to what chooses its tokens.

    Args:
        model: The network.
        context: Target, depth, and how tokens are chosen.
        num_rows: Most draft rows that the network adds in a round.
    """

    def __init__(self, model: StepModel, context: SourceContext, num_rows: int) -> None:
        info = context.target.info
        self._model, self._num_rows = model, num_rows
        self._device = info.device
        self._chooser = Chooser(context.draw, info.vocab_size, model.vocabulary)
        self._told = False
        self._cache: Cache

    @property
    def needs(self) -> Needs:
        return self._model.needs

    def reset(self, batch: int, cache: Cache) -> None:
        self._cache = cache
        self._model.reset(batch, self._num_rows, cache)
        self._chooser.reset(batch)

    def start(self, row: int, prompt: Sequence[int], sampling: Sampling) -> None:
        self._model.start(row, prompt)
        self._chooser.start(row, sampling)

    def observe(self, observation: Observation, rows: Sequence[int]) -> None:
        self._model.observe(observation, rows)

    def select(self, rows: Sequence[int]) -> None:
        self._model.select(rows)
        self._chooser.select(rows)

    def watch(self, wrap: Callable[[StepModel], StepModel]) -> None:
        """Put something around the network that sees what it says."""
        self._model = wrap(self._model)

    def _limits(self, budget: DraftBudget) -> list[int]:
        """Deepest draft position of each row: its budget, within what the network was made for.  # [B]"""
        model = self._model
        room = [max(0, model.most_positions - 1 - start) for start in self._cache.lengths]
        if not all(room) and not self._told:
            log.warning(
                "beyond %d tokens texts go on undrafted: the drafter was made for so many", model.most_positions
            )
            self._told = True
        return [min(most, model.most_depth, left) for most, left in zip(budget.tokens, room, strict=True)]

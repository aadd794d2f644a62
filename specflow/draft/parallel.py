"""Networks that fill all positions of a block in one pass, and the corrector that makes each follow its predecessor.

The factorisation is DSpark's (2607.05147): p_k(v | x_0, x_<k) = softmax(U_k + B_k(x_<k)), U from one pass over the
block, B a cheap bias from the token before. Without a corrector B is 0 and positions are blind to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.draft.base import Needs
    from specflow.draft.steps import Frontier
    from specflow.law import DraftVocabulary
    from specflow.target.base import Cache
    from specflow.types import Entry, Observation

__all__ = ["Corrector", "MarginalModel", "Marginals", "ParallelModel"]


@dataclass(frozen=True, slots=True)
class Marginals:
    """What one pass says of every position of a block."""

    logits: Tensor  # [B, K, Vd] U of draft positions 1 .. K
    hidden: Tensor  # [B, K, H] what they were made from


class MarginalModel(Protocol):
    """A network that scores all positions of a block at once; the rest is as in `StepModel`."""

    @property
    def needs(self) -> Needs: ...

    @property
    def vocabulary(self) -> DraftVocabulary | None: ...

    @property
    def most_positions(self) -> int: ...

    @property
    def most_depth(self) -> int: ...

    def reset(self, batch: int, num_nodes: int, cache: Cache) -> None: ...

    def start(self, row: int, prompt: Sequence[int]) -> None: ...

    def observe(self, observation: Observation, rows: Sequence[int]) -> None: ...

    def marginals(self, anchors: Sequence[int], active: Sequence[bool]) -> Marginals:
        """Score a whole block of `most_depth` positions; see `StepModel.open`."""

    def select(self, rows: Sequence[int]) -> None: ...


class Corrector(Protocol):
    """A bias on the logits of a position, from the tokens before it."""

    def begin(self, batch: int) -> Tensor:
        """State before the first position.  # [B, X], X may be 0"""

    def correct(self, previous: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Bias of the next position and the state after it.

        Args:
            previous: Target id of the token before the position.  # [B, R]
            hidden: Hidden rows of the position.  # [B, R, H]
            state: State before it.  # [B, R, X]

        Returns:
            Bias [B, R, Vd] and state [B, R, X].
        """


class ParallelModel:
    """Steps over the marginals of a network: the `StepModel` of the parallel dependencies.

    Args:
        network: Scores whole blocks.
        corrector: None leaves positions blind to each other.
    """

    def __init__(self, network: MarginalModel, corrector: Corrector | None = None) -> None:
        self._network, self._corrector = network, corrector
        self.needs, self.vocabulary = network.needs, network.vocabulary
        self.most_positions, self.most_depth = network.most_positions, network.most_depth

    def reset(self, batch: int, num_nodes: int, cache: Cache) -> None:
        self._network.reset(batch, num_nodes, cache)

    def start(self, row: int, prompt: Sequence[int]) -> None:
        self._network.start(row, prompt)

    def observe(self, observation: Observation, rows: Sequence[int]) -> None:
        self._network.observe(observation, rows)

    def select(self, rows: Sequence[int]) -> None:
        self._network.select(rows)

    def open(self, anchors: Sequence[int], active: Sequence[bool]) -> MarginalSteps:
        marginals = self._network.marginals(anchors, active)
        return MarginalSteps(marginals, self._corrector, torch.tensor(anchors, device=marginals.logits.device))


class MarginalSteps:
    """One round's positions, read one level at a time.

    Args:
        marginals: Of the block.
        corrector: Or None.
        anchors: # [B]
    """

    def __init__(self, marginals: Marginals, corrector: Corrector | None, anchors: Tensor) -> None:
        self._marginals, self._corrector = marginals, corrector
        self._level = 0
        self._states: list[Tensor] = []  # [B, R, X] of each level's rows, after the row's own token was seen
        before = None if corrector is None else corrector.begin(len(anchors)).unsqueeze(1)
        self.logits = self._score(anchors.unsqueeze(1), before).squeeze(1)
        self.hidden = marginals.hidden[:, 0]

    def extend(self, tokens: Tensor, frontier: Frontier | None = None) -> Tensor:
        """See `Steps.extend`; new rows are one level below those added last."""
        self._level += 1
        before = None
        if self._states:
            before = self._states[-1] if frontier is None else torch.cat(self._states, dim=1)
            if frontier is not None:
                before = before.gather(1, frontier.parents.unsqueeze(-1).expand(-1, -1, before.shape[-1]))
        hidden = self._marginals.hidden[:, self._level]
        self.hidden = hidden if frontier is None else hidden.unsqueeze(1).expand(-1, tokens.shape[1], -1)
        return self._score(tokens, before)

    def entry(self, last: Tensor) -> Entry | None:
        return None

    def _score(self, tokens: Tensor, before: Tensor | None) -> Tensor:
        """Logits of the next position after each token.  # [B, R], [B, R, X] -> [B, R, Vd]"""
        width = tokens.shape[1]
        logits = self._marginals.logits[:, self._level : self._level + 1].expand(-1, width, -1)
        if self._corrector is None or before is None:
            return logits
        hidden = self._marginals.hidden[:, self._level : self._level + 1].expand(-1, width, -1)
        bias, after = self._corrector.correct(tokens, hidden, before)
        self._states.append(after)
        return logits + bias

"""A part of the target's own layers as a drafting network, over the target's own cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from specflow.draft.base import Needs
from specflow.draft.checkpoint import open_weights
from specflow.draft.lm_steps import DraftRows, ModelPass, PassSteps

if TYPE_CHECKING:
    from specflow.draft.lm_steps import Shortcut
    from specflow.draft.nn.linear import Linear
    from specflow.draft.nn.weights import WeightReader
    from specflow.law import DraftVocabulary
    from specflow.target.base import Cache, Target
    from specflow.types import Observation

__all__ = ["AdaptedExit", "ExitAdapter", "SharedLayers", "open_adapter", "read_adapter"]


class SharedLayers:
    """Drafts with the target, some of it left out.

    There is nothing to catch up with: committed rows of all layers are the target's true ones. Draft rows stand in the
    scratch rows of its cache, where verification overwrites them or, after an early exit, goes on from them.

    Args:
        target: The model.
        shortcut: What drafts leave out of it.
        k: Deepest draft position.
    """

    needs = Needs()
    vocabulary: DraftVocabulary | None = None

    def __init__(self, target: Target, shortcut: Shortcut, k: int) -> None:
        self.most_positions, self.most_depth = target.info.context_length, k
        self._pass = ModelPass(target, shortcut)
        self._cache: Cache

    def reset(self, batch: int, num_nodes: int, cache: Cache) -> None:
        """See `StepModel.reset`; the target's cache has room for the nodes of a block and the anchor."""
        self._cache = cache

    def start(self, row: int, prompt: Sequence[int]) -> None:
        """Nothing to keep."""

    def observe(self, observation: Observation, rows: Sequence[int]) -> None:
        """Nothing to learn: it is all in the cache."""

    def select(self, rows: Sequence[int]) -> None:
        """Nothing to move."""

    def open(self, anchors: Sequence[int], active: Sequence[bool]) -> PassSteps:
        cache, starts = self._cache.fork(), tuple(self._cache.lengths)
        tokens, positions = torch.tensor([anchors, starts], device=self._pass.home).unsqueeze(2)
        first = self._pass.score(DraftRows(tokens, positions), cache)
        cache.keep([1] * len(anchors))
        return PassSteps(self._pass, cache, starts, first)


class ExitAdapter(nn.Module):
    """A residual correction of low rank before the final norm: h + up(down(h)).

    Args:
        down: # H -> rank
        up: # rank -> H
    """

    def __init__(self, down: Linear, up: Linear) -> None:
        super().__init__()
        self.down, self.up = down, up

    def forward(self, hidden: Tensor) -> Tensor:
        """# [B, R, H] -> [B, R, H]"""
        change: Tensor = self.up(self.down(hidden.reshape(-1, hidden.shape[-1])))
        return hidden + change.view(hidden.shape)


class AdaptedExit(nn.Module):
    """An early exit as a function of rows: what the adapter makes of them, through the target's norm and head.

    Args:
        adapter: All that is trained.
        layer: First layer that drafts do not run.
        target: Whose norm and head it borrows.
    """

    def __init__(self, adapter: ExitAdapter, layer: int, target: Target) -> None:
        super().__init__()
        self.adapter, self.layer = adapter, layer
        self._target = target

    def forward(self, left: Tensor) -> Tensor:
        """Logits from the residual stream at the exit.  # [B, R, H] -> [B, R, V]"""
        return self._target.score(self._target.norm(self.adapter(left)))


def read_adapter(reader: WeightReader, rank: int, width: int) -> ExitAdapter:
    """An adapter of tensors `adapter.down.weight` and `adapter.up.weight`.

    Raises:
        CheckpointError: A tensor is missing or has the wrong shape.
    """
    down = reader.linear("adapter.down", rank, width, bias=False)
    return ExitAdapter(down, reader.linear("adapter.up", width, rank, bias=False))


def open_adapter(weights: str | None, seed: int, rank: int, target: Target, packed: bool = True) -> ExitAdapter:
    """The adapter of a checkpoint, or a random one.

    Layers that will be written as graphs must not be packed.

    Raises:
        CheckpointError: A tensor is missing, left over or has the wrong shape.
    """
    reader = open_weights(weights, seed, target, packed=packed)
    adapter = read_adapter(reader, rank, target.info.hidden_size)
    reader.close()
    return adapter

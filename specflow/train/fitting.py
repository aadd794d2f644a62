"""First weights in closed form: least squares to the target's next hidden state, before any step is made.

A drafter scores rows with the target's own head, so a row is good as far as it is near to the state from which the
target will choose. Where a linear layer makes that row, or all of it but what a block adds, the best such layer is the
solution of a linear system.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import singledispatch
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from specflow.draft.nn.block import RMSNorm
from specflow.draft.nn.feature_step import FeatureNetwork, FeatureStep
from specflow.draft.nn.medusa import MedusaHeads, Projection
from specflow.draft.pending import pick_features

if TYPE_CHECKING:
    from specflow.draft.nn.linear import Linear
    from specflow.train.batch import Batch

__all__ = ["Pairing", "fit_start", "pairings_of"]

_LEAST_GAIN = 1e-3
_RIDGE = 1e-3
"""Share of the inputs' mean square that is added to the diagonal: some of a target's states never move."""


@dataclass(frozen=True, slots=True)
class Pairing:
    """Rows that a layer reads, and what it should make of them."""

    layer: Linear
    inputs: Tensor  # [n, I]
    wanted: Tensor  # [n, H]


@torch.no_grad()
def fit_start(network: nn.Module, batches: Iterable[Batch]) -> int:
    """Set the layers of a network that can be fitted; the others stay as they are.

    Args:
        network: Its layers, as they are trained.
        batches: Texts to fit to, each read once.

    Returns:
        How many layers were set.
    """
    sums: dict[int, _Sums] = {}
    for batch in batches:
        for pairing in pairings_of(network, batch):
            sums.setdefault(id(pairing.layer), _Sums(pairing.layer)).add(pairing)
    for each in sums.values():
        each.solve()
    return len(sums)


class _Sums:
    """Sums of products of one layer's rows."""

    def __init__(self, layer: Linear) -> None:
        outputs, inputs = layer.weight.shape
        like = layer.weight.new_zeros(0, dtype=torch.float64)
        self._layer = layer
        self._inner, self._outer = like.new_zeros(inputs, inputs), like.new_zeros(inputs, outputs)

    def add(self, pairing: Pairing) -> None:
        inputs = pairing.inputs.to(torch.float32)
        self._inner += (inputs.t() @ inputs).double()
        self._outer += (inputs.t() @ pairing.wanted.to(torch.float32)).double()

    def solve(self) -> None:
        ridge = _RIDGE * self._inner.diagonal().mean()
        self._inner.diagonal().add_(ridge)
        found = torch.linalg.solve(self._inner, self._outer)
        self._layer.weight.copy_(found.t())


@singledispatch
def pairings_of(network: nn.Module, batch: Batch) -> Iterator[Pairing]:
    """What a batch says of the layers that can be fitted: nothing, unless a family knows better."""
    return iter(())


@pairings_of.register(FeatureNetwork)
def _of_steps(network: FeatureNetwork, batch: Batch) -> Iterator[Pairing]:
    """The pair of an embedding and a state (MTP, EAGLE-1), or several taps (EAGLE-3), to the next state."""
    text, base = batch.begins[:, 1:].nonzero(as_tuple=True)
    module: FeatureStep = network.steps[0]  # type: ignore[assignment]
    wanted = _before(module.norm, batch.hidden[text, base + 1])
    features = pick_features(network.needs, batch.features)[text, base]
    if module.fc is None:
        if network.fusion is not None:
            yield Pairing(network.fusion.fc, network.fusion.read(features), wanted)
        return
    embedded = network.embed(batch.tokens[text, base + 1]).to(features.dtype)
    yield Pairing(module.fc, module.pair(embedded, features), wanted)


@pairings_of.register(MedusaHeads)
def _of_heads(network: MedusaHeads, batch: Batch) -> Iterator[Pairing]:
    """Projections to the state that many positions on."""
    hidden, width = batch.hidden, batch.tokens.shape[1]
    for k, blocks in enumerate(network.blocks, 1):
        last = blocks[-1]  # type: ignore[index]
        if isinstance(last, Projection):
            text, base = batch.begins[:, 1:].nonzero(as_tuple=True)
            inside = (base + k < width) & batch.valid[text, (base + k).clamp_max(width - 1)]
            text, base = text[inside], base[inside]
            rows: Tensor = blocks[:-1](hidden[text, base])  # type: ignore[index]
            yield Pairing(last.linear, rows, hidden[text, base + k])


def _before(norm: nn.Module | None, normed: Tensor) -> Tensor:
    """Rows of which a norm makes the given ones, up to their length.  # [n, H]"""
    if not isinstance(norm, RMSNorm):
        return normed
    weight = norm.weight
    return normed / torch.where(weight.abs() < _LEAST_GAIN, 1.0, weight)

"""MTP and EAGLE over whole texts, all rounds of decoding at once.

A chain begins at a base position i: true features are known up to i, the token after it is the anchor. Draft position s
is made from the token after position i + s - 1 and what the position before passed on.

One module that goes on along its own output is unrolled as at inference (training-time test, EAGLE-3, 2503.01840): its
row stands at position i + s - 1 and sees the first step's rows up to i and its own chain's later rows. Modules that
serve one draft position each, or one that is unrolled as FastMTP trains it, see the rows of their own step up to i
(2412.19437, eq. 21 to 23).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specflow.draft.nn.block import Pass
from specflow.draft.nn.feature_step import FeatureNetwork, Pairs, StepRows
from specflow.draft.nn.rope import RotaryTable
from specflow.draft.pending import pick_features
from specflow.errors import GraphError
from specflow.train.batch import Batch, Drafting, Slot
from specflow.train.drafting.base import DraftingOptions, drafting_of
from specflow.train.drafting.chain_attention import ChainRows, TextRows
from specflow.train.drafting.corrected import Chains

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specflow.draft.trainable import Trainable

__all__ = ["FeatureDrafting"]


@dataclass(frozen=True, slots=True)
class _Rounds:
    """Where rounds of decoding begin."""

    base: Tensor  # [n] position of the newest true feature, the one before the anchor
    flat: Tensor  # [n] the same as a flat position
    chains: Chains

    @classmethod
    def of(cls, batch: Batch, depth: int) -> _Rounds:
        text, base = batch.begins[:, 1:].nonzero(as_tuple=True)
        return cls(base, text * batch.tokens.shape[1] + base, Chains.of(batch, text, base + 1, depth))


class FeatureDrafting(Drafting):
    """A feature network over whole texts.

    Args:
        trainable: Its layers, and the confidence head where there is one.
        options: How deep it drafts.

    Raises:
        GraphError: It has fewer modules than positions to draft.
    """

    def __init__(self, trainable: Trainable, options: DraftingOptions) -> None:
        super().__init__()
        network = trainable.network
        assert isinstance(network, FeatureNetwork)
        if 1 < network.num_steps < options.depth:
            found, expected = f"{options.depth} draft positions to train", f"at most its {network.num_steps} modules"
            raise GraphError("draft", found, expected, "set num_modules or unrolled, or train fewer positions")
        self.network, self.confidence = network, trainable.confidence
        self._depth = options.depth
        dtype = next(network.parameters()).dtype
        self._rotary = RotaryTable.shaped(network.shape, dtype, network.device)
        self._like = torch.empty(0, dtype=dtype, device=network.device)

    def forward(self, batch: Batch) -> Sequence[Slot]:
        """See `Drafting.forward`."""
        self._rotary.grow(batch.tokens.shape[1] + self._depth)
        rounds = _Rounds.of(batch, self._depth)
        hidden = self.network.fuse(pick_features(self.network.needs, batch.features).to(self._like)).flatten(0, 1)
        if self.network.num_steps > 1:
            return self._serial(batch, rounds, hidden)
        return self._recycled(batch, rounds, hidden)

    def _recycled(self, batch: Batch, rounds: _Rounds, hidden: Tensor) -> list[Slot]:
        """One module along its own output.  # [B * T, H]"""
        texts = TextRows(batch.tokens.shape[0], rounds.flat)
        later = ChainRows(texts, rounds.flat)
        pairs = Pairs(batch.tokens.roll(-1, 1).flatten(), hidden, _positions(batch))
        rows = self.network.step(0, pairs, self._pass(pairs.positions, texts), rounds.flat)
        slots = [self._slot(batch, rounds.chains, 1, rows)]
        for step in range(2, self._depth + 1):
            tokens = batch.tokens.flatten()[rounds.chains.at[step - 1]]
            pairs = Pairs(tokens, rows.recycled, rounds.base + step - 1)
            rows = self.network.step(0, pairs, self._pass(pairs.positions, later))
            slots.append(self._slot(batch, rounds.chains, step, rows))
        return slots

    def _serial(self, batch: Batch, rounds: _Rounds, hidden: Tensor) -> list[Slot]:
        """Modules with a causal chain each; all rows of one are what the next one reads.  # [B * T, H]"""
        slots, positions, bases = [], _positions(batch), rounds.flat
        for step in range(1, self._depth + 1):
            needed = bases if step == self._depth else None
            shared = self._pass(positions, TextRows(batch.tokens.shape[0], needed))
            tokens = batch.tokens.roll(-step, 1).flatten()
            rows = self.network.step(step - 1, Pairs(tokens, hidden, positions), shared, needed)
            hidden = rows.recycled
            if needed is None:
                rows = StepRows(rows.recycled[bases], rows.scored[bases])
            slots.append(self._slot(batch, rounds.chains, step, rows))
        return slots

    def _pass(self, positions: Tensor, rows: TextRows | ChainRows) -> Pass:
        shape = self.network.shape
        cos, sin = self._rotary.at(positions, shape.num_heads + shape.num_kv_heads, shape.num_kv_heads)
        return Pass(cos, sin, rows, rows, None, split=False)

    def _slot(self, batch: Batch, chains: Chains, step: int, rows: StepRows) -> Slot:
        at, sure = chains.at[step - 1], None
        if self.confidence is not None:
            sure = self.confidence.logits(rows.scored, batch.tokens.flatten()[at])
        return Slot(self.network.score(rows.scored), at, chains.known[step - 1], rows.recycled, sure)


def _positions(batch: Batch) -> Tensor:
    """# [B * T]"""
    num_texts, width = batch.tokens.shape
    return torch.arange(width, device=batch.tokens.device).repeat(num_texts)


@drafting_of.register(FeatureNetwork)
def _of_feature_network(network: FeatureNetwork, trainable: Trainable, options: DraftingOptions) -> FeatureDrafting:
    return FeatureDrafting(trainable, options)

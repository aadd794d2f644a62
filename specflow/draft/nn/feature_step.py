"""The family of drafters that step with a token and a feature: MTP, EAGLE-1, EAGLE-2 and EAGLE-3.

Row i reads the token after position i and the feature of position i, stands at position i, and scores the token after
next. One module serves all members; a `StepForm` says what tells them apart:

    MTP (2412.19437, eq. 21)  x = fc [enorm(e); hnorm(h)], a whole decoder block, a norm, the target's head
    EAGLE-1 (2401.15077)      x = fc [e; h], a block without input norm, no norm, the target's head
    EAGLE-3 (2503.01840)      g = fc [taps]; the block attends from [norm(e); norm(g)] of width 2H around the residual g
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specflow.draft.nn.attention import KeyRooms, plan_attention
from specflow.draft.nn.block import DecoderBlock, Pass, RMSNorm
from specflow.draft.nn.linear import Linear
from specflow.draft.nn.rope import RotaryTable
from specflow.target.cache import KVCache

if TYPE_CHECKING:
    from specflow.draft.base import Needs
    from specflow.law import DraftVocabulary
    from specflow.target.base import Cache, Target
    from specflow.types import BlockShape

__all__ = ["FeatureNetwork", "FeatureStep", "Fusion", "NetworkParts", "Pairs", "StepForm", "StepParts", "StepRows"]


@dataclass(frozen=True, slots=True)
class StepForm:
    """What tells the members of the family apart."""

    hidden_first: bool = False  # order of the pair; papers write the hidden first, checkpoints hold the embedding first
    norm_residual: bool = False  # without fc: the residual is the normed hidden
    recycle_normed: bool = False  # the next step reads the output after the final norm
    zero_first: bool = False  # the embedding at position 0 is zero


@dataclass(frozen=True, slots=True)
class StepParts:
    """Layers of one step module."""

    block: DecoderBlock
    fc: Linear | None = None  # 2H -> H; None: the block attends from the pair itself
    embedding_norm: RMSNorm | None = None
    hidden_norm: RMSNorm | None = None
    norm: RMSNorm | None = None  # between the block and the head


@dataclass(frozen=True, slots=True)
class Pairs:
    """Rows that a step module reads."""

    tokens: Tensor  # [B, R] token after each position
    hidden: Tensor  # [B, R, H] feature of each position
    positions: Tensor  # [B, R] absolute


@dataclass(frozen=True, slots=True)
class StepRows:
    """What a step module makes of its rows."""

    recycled: Tensor  # [B, R, H] the feature of the next position, as far as the draft can tell
    scored: Tensor  # [B, R, H] what the head reads


class FeatureStep(nn.Module):
    """(embedding, hidden) -> hidden."""

    def __init__(self, parts: StepParts, form: StepForm) -> None:
        super().__init__()
        self.block, self.fc, self.norm = parts.block, parts.fc, parts.norm
        self.embedding_norm, self.hidden_norm = parts.embedding_norm, parts.hidden_norm
        self.form = form

    def forward(self, embedded: Tensor, hidden: Tensor, shared: Pass, needed: Tensor | None = None) -> StepRows:
        """Run rows over those that the pass lets them see.

        Args:
            embedded: # [R, H]
            hidden: # [R, H]
            shared: What tells who sees whom.
            needed: Rows to give, those that the pass attends for; the others are keys and values only.  # [N]

        Returns:
            # [R, H] each, or [N, H]
        """
        pair = self.pair(embedded, hidden)
        if self.fc is None:
            stream = self._normed(hidden) if self.form.norm_residual else hidden
            mixed = self.block.attend_to(pair, 0, shared)
        else:
            stream = shared.apply(self.fc, pair)
            mixed = self.block.attend(stream, 0, shared)
        stream = (stream if needed is None else stream[needed]) + mixed
        stream = stream + self.block.feed(stream, shared)
        normed = stream if self.norm is None else self.norm(stream)
        return StepRows(normed if self.form.recycle_normed else stream, normed)

    def pair(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Both, normed, side by side.  # [R, H] twice -> [R, 2H]"""
        e = embedded if self.embedding_norm is None else self.embedding_norm(embedded)
        h = self._normed(hidden)
        return torch.cat((h, e) if self.form.hidden_first else (e, h), dim=-1)

    def _normed(self, hidden: Tensor) -> Tensor:
        return hidden if self.hidden_norm is None else self.hidden_norm(hidden)


class Fusion(nn.Module):
    """Several taps to one feature: fc [h_1; h_2; ...], normed one by one or together before it.

    Args:
        fc: T H -> H.
        together: Norm of all taps at once.
        apart: A norm for each tap.
    """

    def __init__(self, fc: Linear, together: RMSNorm | None = None, apart: Sequence[RMSNorm] = ()) -> None:
        super().__init__()
        self.fc, self.together, self.apart = fc, together, nn.ModuleList(apart)

    def forward(self, taps: Tensor) -> Tensor:
        """# [R, T H] -> [R, H]"""
        fused: Tensor = self.fc(self.read(taps))
        return fused

    def read(self, taps: Tensor) -> Tensor:
        """What fc reads.  # [R, T H] -> [R, T H]"""
        if len(self.apart):
            parts = taps.chunk(len(self.apart), dim=-1)
            taps = torch.cat([norm(part) for norm, part in zip(self.apart, parts, strict=True)], dim=-1)
        if self.together is not None:
            taps = self.together(taps)
        return taps


@dataclass(frozen=True, slots=True)
class NetworkParts:
    """All that a drafter of the family consists of."""

    steps: Sequence[FeatureStep]  # one, run on its own output, or one a draft position
    shape: BlockShape
    needs: Needs  # taps, or one of the last hidden states
    fusion: Fusion | None = None  # for taps
    embedding: Tensor | None = None  # [V, H]; None: the target's
    head: Linear | None = None  # H -> Vd; None: the target's
    vocabulary: DraftVocabulary | None = None


class FeatureNetwork(nn.Module):
    """Step modules with what stands around them: features in front, the head behind. No state of requests."""

    def __init__(self, parts: NetworkParts, target: Target) -> None:
        super().__init__()
        self.steps = nn.ModuleList(parts.steps)
        self.fusion, self.head = parts.fusion, parts.head
        self.shape, self.needs, self.vocabulary = parts.shape, parts.needs, parts.vocabulary
        self.embedding, self.target = parts.embedding, target
        info = target.info
        self.dtype, self.device = info.dtype, info.device
        self.rotary = RotaryTable.shaped(parts.shape, info.dtype, info.device)

    @property
    def num_steps(self) -> int:
        return len(self.steps)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """A cache for one module, with room for so many positions."""
        self.rotary.grow(capacity)
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        return KVCache(1, batch, self.shape.num_kv_heads, capacity, self.shape.head_width, like)

    def fuse(self, features: Tensor) -> Tensor:
        """Features as the first step reads them; what a step gives the next one is never fused.

        # [B, R, F] -> [B, R, H]
        """
        if self.fusion is None:
            return features
        fused: Tensor = self.fusion(features.flatten(0, 1))
        return fused.view(*features.shape[:2], -1)

    def run(self, index: int, pairs: Pairs, cache: Cache, mask: Tensor | None = None) -> StepRows:
        """One pass of a step module; new rows stand above the committed ones of its cache.

        Args:
            index: Which module.
            pairs: Its rows.
            cache: Its own.
            mask: As in `Target.forward`.
        """
        batch, rows = pairs.tokens.shape
        shape, positions = self.shape, pairs.positions
        cos, sin = self.rotary.at(positions.reshape(-1), shape.num_heads + shape.num_kv_heads, shape.num_kv_heads)
        plan = plan_attention(cache.lengths, positions, mask, None, False, self.dtype)
        shared = Pass(cos, sin, KeyRooms(cache.data, plan), plan, None, split=False)  # type: ignore[attr-defined]
        out = self.step(index, Pairs(pairs.tokens.flatten(), pairs.hidden.flatten(0, 1), positions.flatten()), shared)
        return StepRows(out.recycled.view(batch, rows, -1), out.scored.view(batch, rows, -1))

    def step(self, index: int, pairs: Pairs, shared: Pass, needed: Tensor | None = None) -> StepRows:
        """Flat rows through a step module, seeing what the pass lets them see.

        Args:
            index: Which module.
            pairs: Its rows.  # [R] and [R, H]
            shared: The pass, laid out for these rows.
            needed: As in `FeatureStep.forward`.  # [N]

        Returns:
            # [R, H] each, or [N, H]
        """
        module: FeatureStep = self.steps[index]  # type: ignore[assignment]
        embedded = self.embed(pairs.tokens.unsqueeze(0))[0].to(pairs.hidden.dtype)
        if module.form.zero_first:
            embedded = embedded.masked_fill((pairs.positions == 0).unsqueeze(-1), 0.0)
        rows: StepRows = module(embedded, pairs.hidden, shared, needed)
        return rows

    def score(self, scored: Tensor) -> Tensor:
        """The head.  # [..., H] -> [..., Vd]"""
        if self.head is None:
            return self.target.score(scored)
        logits: Tensor = self.head(scored.flatten(0, -2))
        return logits.view(*scored.shape[:-1], logits.shape[-1])

    def embed(self, tokens: Tensor) -> Tensor:
        """# [...] -> [..., H]"""
        if self.embedding is None:
            return self.target.embed(tokens)
        return F.embedding(tokens.clamp_min(0), self.embedding)

"""Drafting with a causal language model, or with a part of one: a pass a step over scratch rows of a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from specflow.types import Entry

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.draft.steps import Frontier
    from specflow.target.base import Cache, Target
    from specflow.types import Skip, TargetOutput

__all__ = ["DraftRows", "ModelPass", "PassSteps", "Scored", "Shortcut"]


@dataclass(frozen=True, slots=True)
class Shortcut:
    """What a draft pass leaves out of the model."""

    skip: Skip | None = None  # sub-layers
    exit_layer: int | None = None  # layers from this one on
    adapter: Callable[[Tensor], Tensor] | None = None  # between the exit and the final norm  # [B, R, H] -> [B, R, H]


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Rows of one pass."""

    tokens: Tensor  # [B, R]
    positions: Tensor  # [B, R]
    mask: Tensor | None = None  # [B, R, P + R] as in `Target.forward`


@dataclass(frozen=True, slots=True)
class Scored:
    """What a pass says of its rows."""

    logits: Tensor  # [B, R, Vd]
    normed: Tensor  # [B, R, H] what the logits were made from
    left: Tensor  # [B, R, H] the residual stream where the pass left the model

    def last(self, counts: Sequence[int]) -> Scored:
        """The last real row of each batch row; row 0 where it has none.  # [B, 1, ...] each"""
        rows = torch.arange(len(counts), device=self.logits.device)
        index = torch.tensor([max(0, count - 1) for count in counts], device=self.logits.device)
        return Scored(*(part[rows, index].unsqueeze(1) for part in (self.logits, self.normed, self.left)))


class ModelPass:
    """A way to run a language model for drafting.

    Args:
        model: The model.
        shortcut: What is left out of it.
        num_logits: Logits beyond these are cut off: rows of a padded vocabulary.
        home: Device of tokens and results, where it is not the model's.
        ids: The model's id of every token; None: they are the same.  # [V]
    """

    def __init__(
        self,
        model: Target,
        shortcut: Shortcut | None = None,
        num_logits: int | None = None,
        home: torch.device | None = None,
        ids: Tensor | None = None,
    ) -> None:
        self._ids = ids
        self.model, self._shortcut = model, shortcut or Shortcut()
        self._num_logits = num_logits or model.info.vocab_size
        self._home = home or model.info.device
        self._last_position = model.info.context_length - 1
        self._layers = None if self._shortcut.exit_layer is None else (0, self._shortcut.exit_layer)

    @property
    def exit_layer(self) -> int | None:
        """First layer that it does not run; None where it runs up to the last."""
        return self._shortcut.exit_layer

    @property
    def home(self) -> torch.device:
        return self._home

    def score(self, rows: DraftRows, cache: Cache) -> Scored:
        """Run rows above the committed ones of a cache and score the token after each."""
        adapter = self._shortcut.adapter
        out = self._forward(rows, cache, "all" if adapter is None else "none")
        assert out.hidden_pre is not None
        assert out.hidden_post is not None
        logits, normed = out.logits, out.hidden_post
        if adapter is not None:
            normed = self.model.norm(adapter(out.hidden_pre))
            logits = self.model.score(normed)
        logits = logits[..., : self._num_logits]
        return Scored(*(part.to(self._home) for part in (logits, normed, out.hidden_pre)))

    def run(self, rows: DraftRows, cache: Cache) -> Tensor:
        """The same without scores: the residual stream where the pass left the model.  # [B, R, H]"""
        left = self._forward(rows, cache, "none").hidden_pre
        assert left is not None
        return left.to(self._home)

    def prefill(self, rows: DraftRows, cache: Cache) -> None:
        """Write the rows of a prompt."""
        self._forward(rows, cache, "last")

    def _forward(self, rows: DraftRows, cache: Cache, scored: Literal["all", "last", "none"]) -> TargetOutput:
        device = self.model.info.device
        tokens = rows.tokens if self._ids is None else self._ids[rows.tokens]
        return self.model.forward(
            tokens.to(device),
            rows.positions.clamp_max(self._last_position).to(device),  # only of rows that nobody drafts for
            cache,
            mask=None if rows.mask is None else rows.mask.to(device),
            layers=self._layers,
            skip=self._shortcut.skip,
            rows=scored,
        )


class PassSteps:
    """One round's draft rows in a fork of a cache: kept there, so that they see each other, and committed nowhere.

    Args:
        draft_pass: How the model is run.
        cache: A fork of its own, whose boundary lies above the anchors.
        starts: Absolute position of each row's anchor.  # [B]
        first: Scores of the anchors.  # [B, 1, ...]
    """

    def __init__(self, draft_pass: ModelPass, cache: Cache, starts: Sequence[int], first: Scored) -> None:
        self._pass, self._cache = draft_pass, cache
        self._starts = torch.tensor(starts, device=draft_pass.home).unsqueeze(1)  # [B, 1]
        self._depths = torch.zeros_like(self._starts)  # [B, rows so far]
        self._left = [first.left]
        self.logits, self.hidden = first.logits[:, 0], first.normed[:, 0]
        self.num_chained = 0
        """Rows of the chain added so far, the anchor not counted; 0 once the rows have branched."""
        self._branched = False

    def extend(self, tokens: Tensor, frontier: Frontier | None = None) -> Tensor:
        """See `Steps.extend`."""
        rows = self._place(tokens, frontier)
        scored = self._pass.score(rows, self._cache)
        self._cache.keep([tokens.shape[1]] * tokens.shape[0])
        self._left.append(scored.left)
        self._branched = self._branched or frontier is not None
        self.num_chained = 0 if self._branched else self.num_chained + 1
        self.hidden = scored.normed[:, 0] if frontier is None else scored.normed
        return scored.logits

    def entry(self, last: Tensor) -> Entry | None:
        """The states of the anchor and of the whole chain, its last token included, where the pass left the model."""
        if self._pass.exit_layer is None or self._branched:
            return None
        left = self._pass.run(self._place(last, None), self._cache)
        return Entry(self._pass.exit_layer, torch.cat((*self._left, left), dim=1))

    def _place(self, tokens: Tensor, frontier: Frontier | None) -> DraftRows:
        if frontier is None:
            depths, mask = self._depths[:, -1:] + 1, None
        else:
            depths, mask = self._depths.gather(1, frontier.parents) + 1, frontier.visible
        self._depths = torch.cat((self._depths, depths), dim=1)
        return DraftRows(tokens, self._starts + depths, mask)

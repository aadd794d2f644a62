"""The drafter of trees, grown from any network that offers steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from specflow.draft.growth import Beam, FixedTree, SiblingDraws, best_children
from specflow.draft.network import NetworkDrafter
from specflow.types import DraftBlock

if TYPE_CHECKING:
    from specflow.draft.base import SourceContext, Uniforms
    from specflow.draft.shapes import RankPath, ShapeOptions
    from specflow.draft.steps import StepModel
    from specflow.types import DraftBudget

__all__ = ["TreeDrafter"]


class TreeDrafter(NetworkDrafter):
    """Drafts trees. Batch rows grow together; nodes deeper than a row may go are PAD.

    Static, beam and best-first trees follow from the context: their law is a point mass, whatever the request's
    temperature. A sampled tree draws siblings without replacement from the draft's law at the request's temperature and
    truncation; where nothing is drawn it holds the likeliest children. Drawn with the target's own numbers, each first
    child is the token the target would say if both had the same law.

    Args:
        model: The network.
        context: Target, depth, and how tokens are chosen.
        options: The shape.
    """

    branches = True

    def __init__(self, model: StepModel, context: SourceContext, options: ShapeOptions) -> None:
        info, vocabulary = context.target.info, model.vocabulary
        vocab_size = info.vocab_size if vocabulary is None else len(vocabulary.to_target)
        depth = min(context.k, model.most_depth)
        self._drawn: tuple[RankPath, ...] = ()  # nodes of a tree that is drawn at random
        self._tree: Beam | FixedTree
        if options.shape in ("beam", "best_first"):
            width = options.branch if options.shape == "beam" else options.nodes
            self._tree = Beam(width, options.nodes, depth, vocab_size)
        else:
            paths = options.static_paths(depth, vocab_size)
            self._tree = FixedTree(paths, info.device)
            self._drawn = paths if options.shape == "sampled" else ()
        super().__init__(model, context, self._tree.num_rows)
        # A network that shares the target's cache puts there the rows it grows, which may be more than the nodes.
        self.num_nodes = max(self._tree.size(self._tree.depth), self._tree.num_rows)

    @torch.inference_mode()
    def propose(self, anchors: Sequence[int], budget: DraftBudget, uniforms: Uniforms) -> DraftBlock | None:
        limits = [min(limit, self._tree.depth) for limit in self._limits(budget)]
        if max(limits, default=0) <= 0:
            return None
        steps = self._model.open(anchors, [limit > 0 for limit in limits])
        draws = self._open_draws(self._cache.lengths, max(limits), uniforms)
        pick = draws.pick if draws is not None else partial(best_children, vocabulary=self._model.vocabulary)
        grown = self._tree.grow(steps, limits, pick)
        return DraftBlock(
            tokens=grown.tokens,
            lengths=tuple(self._tree.size(limit) for limit in limits),
            topology=grown.topology,
            law=self._chooser.law(grown.tokens, None if draws is None else draws.probs),
            lengths_from="context" if draws is None else "prefix",
            without_replacement=draws is not None and self._chooser.draw == "sampled",
        )

    def _open_draws(self, starts: Sequence[int], depth: int, uniforms: Uniforms) -> SiblingDraws | None:
        """What to draw a sampled tree with; None where children follow from the context."""
        if not self._drawn or self._chooser.greedy:
            return None
        coupled = self._chooser.draw == "coupled"
        table = [
            [
                uniforms.uniform("target", row, start + len(path))
                if coupled and path[-1] == 0
                else uniforms.uniform("draft", row, start + 1 + node)
                for node, path in enumerate(self._drawn[: self._tree.size(depth)])
            ]
            for row, start in enumerate(starts)
        ]
        numbers = torch.tensor(table, dtype=torch.float64, device=self._device)
        return SiblingDraws(self._chooser.rows, numbers, self._model.vocabulary)

"""Medusa (Cai et al. 2401.10774): heads on the target's last hidden row, one a draft position, all in one go.

No cache and no positions: a head reads the newest true row alone, the one from which the target itself chose the
anchor. Heads do not see each other's tokens; a static tree over their best candidates, or a corrector, makes up for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from specflow.draft.base import Needs
from specflow.draft.corrected import ParallelOptions, parallel_drafter, parallel_graphs, parallel_trainable
from specflow.draft.registry import SourceInfo
from specflow.draft.shapes import ShapeOptions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from specflow.draft.base import Drafter, SourceContext
    from specflow.draft.nn.linear import Linear
    from specflow.draft.nn.medusa import MedusaHeads
    from specflow.draft.nn.weights import SeededTensors, WeightReader
    from specflow.draft.onnx_medusa import HeadGraphs
    from specflow.draft.onnx_parallel import ParallelGraphs
    from specflow.draft.parallel import Marginals
    from specflow.draft.trainable import Trainable
    from specflow.onnx.session import Place
    from specflow.target.base import Cache
    from specflow.types import Observation

__all__ = ["SOURCE", "MedusaConfig", "MedusaModel", "build", "graphs", "trainable"]


class MedusaConfig(ParallelOptions):
    """Heads on the target's last hidden row."""

    shape: Literal["chain", "static", "beam", "best_first", "sampled"] = Field(
        "static", description=ShapeOptions.model_fields["shape"].description
    )
    num_heads: int = Field(4, ge=1, le=64, description="draft positions the checkpoint has heads for")
    num_layers: int = Field(1, ge=0, le=16, description="residual blocks of a head")
    own_heads: bool = Field(
        False, description="every head has an output layer of its own; false: the target's head serves all of them"
    )
    projection: bool = Field(
        False, description="every head ends with a linear layer of its own: a shared output layer can take nothing back"
    )
    draft_vocab_size: int | None = Field(
        None, ge=1, description="size of a reduced draft vocabulary, whose ids `d2t` maps; none: the target's"
    )


class MedusaModel:
    """A `MarginalModel` of heads. Of what it observes it keeps the newest row of each request.

    Args:
        config: Which heads there are.
        reader: Their tensors.
        context: The target, and how deep blocks get.
    """

    needs = Needs(hidden_post=True)

    def __init__(self, config: MedusaConfig, reader: WeightReader, context: SourceContext) -> None:
        from specflow.draft.borrowed import borrowed_rows
        from specflow.draft.checkpoint import draft_vocabulary
        from specflow.draft.nn.medusa import MedusaShape, read_medusa

        info = context.target.info
        self.most_positions = info.context_length
        self.most_depth = min(config.num_heads, context.k)
        self.vocabulary = draft_vocabulary(reader, config.draft_vocab_size, context.target)
        self._target = context.target
        shape = MedusaShape(
            num_heads=config.num_heads,
            num_used=self.most_depth,
            num_layers=config.num_layers,
            hidden_size=info.hidden_size,
            draft_vocab_size=info.vocab_size if self.vocabulary is None else len(self.vocabulary.to_target),
            own_outputs=config.own_heads,
            projected=config.projection,
        )
        self._head: Linear | None = None  # rows of the target's head, for a reduced vocabulary
        if self.vocabulary is not None and not config.own_heads:
            self._head = reader.pack(borrowed_rows(context.target, self.vocabulary.to_target))
        self.heads: MedusaHeads = read_medusa(reader, shape, self._score)
        self._run: Callable[[Tensor], tuple[Tensor, Tensor]] = self.heads
        self._newest: list[Tensor] = []  # [H] each

    @property
    def trained(self) -> MedusaHeads:
        """The layers with their weights."""
        return self.heads

    def graphs(self) -> HeadGraphs:
        """The heads as they are written into graphs."""
        from specflow.draft.onnx_medusa import HeadGraphs

        return HeadGraphs(self.heads, self._target, None if self.vocabulary is None else self.vocabulary.to_target)

    def take_graphs(self, folder: Path, place: Place) -> None:
        """Let the graphs of a folder compute them; the layers are dropped."""
        from specflow.draft.onnx_medusa import OnnxHeads

        shared = self.heads.outputs is None and self._head is None
        self._run = OnnxHeads(folder, place, self._score if shared else None)
        del self.heads
        self._head = None

    def reset(self, batch: int, num_nodes: int, cache: Cache) -> None:
        self._newest = [self._nothing()] * batch

    def start(self, row: int, prompt: Sequence[int]) -> None:
        self._newest[row] = self._nothing()

    def observe(self, observation: Observation, rows: Sequence[int]) -> None:
        """Keep the last real row: the one before the anchor."""
        assert observation.features is not None, "heads on features got none"
        hidden = observation.features.hidden_post
        assert hidden is not None, "heads on the last hidden row got none"
        for index, row in enumerate(rows):
            if count := observation.counts[index]:
                self._newest[row] = hidden[index, count - 1].clone()

    def select(self, rows: Sequence[int]) -> None:
        self._newest = [self._newest[row] for row in rows]

    def marginals(self, anchors: Sequence[int], active: Sequence[bool]) -> Marginals:
        import torch

        from specflow.draft.parallel import Marginals

        return Marginals(*self._run(torch.stack(self._newest)))

    def _nothing(self) -> Tensor:
        """The row of a request of which nothing was observed yet.  # [H]"""
        import torch

        info = self._target.info
        return torch.zeros(info.hidden_size, dtype=info.dtype, device=info.device)

    def _score(self, hidden: Tensor) -> Tensor:
        """The target's head, over the ids the heads draft from.  # [..., H] -> [..., Vd]"""
        from specflow.draft.nn.linear import over_rows

        return self._target.score(hidden) if self._head is None else over_rows(self._head, hidden)


def build(config: MedusaConfig, context: SourceContext) -> Drafter:
    """The drafter for a loaded target; see `parallel_drafter`."""
    return parallel_drafter(config, context, MedusaModel)


def graphs(config: MedusaConfig, context: SourceContext) -> ParallelGraphs:
    """The network as something that can be written as ONNX graphs."""
    return parallel_graphs(config, context, MedusaModel)


def trainable(config: MedusaConfig, context: SourceContext, tensors: SeededTensors) -> Trainable:
    """The heads with weights that can be trained."""
    return parallel_trainable(config, context, tensors, MedusaModel)


SOURCE = SourceInfo(
    name="medusa",
    config=MedusaConfig,
    dependency=("parallel", "parallel+corrector"),
    build=build,
    axis="target_features",
    offers=("marginals", "confidence"),
    law="sampled",
    reads=("features",),
    confidence_from="self",
    graphs=graphs,
    trainable=trainable,
)

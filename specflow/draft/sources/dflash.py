"""DFlash (2602.06036): a small decoder that reads target features at several layers and fills a block in one pass.

Every position of the block is predicted at once, from the committed text alone. Weights: the published tensor names
(`fc`, `hidden_norm`, `layers.{i}`, `norm`; `embed_tokens` and `lm_head` where the drafter has its own).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specflow.draft.backbone_options import BackboneOptions
from specflow.draft.corrected import ParallelOptions, parallel_drafter, parallel_graphs, parallel_trainable
from specflow.draft.registry import SourceInfo

if TYPE_CHECKING:
    from specflow.draft.base import Drafter, SourceContext
    from specflow.draft.nn.weights import SeededTensors
    from specflow.draft.onnx_parallel import ParallelGraphs
    from specflow.draft.trainable import Trainable

__all__ = ["SOURCE", "DFlashConfig", "build", "graphs", "trainable"]


class DFlashConfig(BackboneOptions, ParallelOptions):
    """The network, what corrects it, and the shape of its blocks."""


def build(config: DFlashConfig, context: SourceContext) -> Drafter:
    """The drafter for a loaded target; see `parallel_drafter`."""
    from specflow.draft.backbone import ContextBackbone

    return parallel_drafter(config, context, ContextBackbone)


def graphs(config: DFlashConfig, context: SourceContext) -> ParallelGraphs:
    """The network as something that can be written as ONNX graphs."""
    from specflow.draft.backbone import ContextBackbone

    return parallel_graphs(config, context, ContextBackbone)


def trainable(config: DFlashConfig, context: SourceContext, tensors: SeededTensors) -> Trainable:
    """The network with weights that can be trained."""
    from specflow.draft.backbone import ContextBackbone

    return parallel_trainable(config, context, tensors, ContextBackbone)


SOURCE = SourceInfo(
    name="dflash",
    config=DFlashConfig,
    dependency=("parallel", "parallel+corrector"),
    build=build,
    axis="target_features",
    offers=("marginals", "confidence"),
    law="sampled",
    reads=("tokens", "features"),
    confidence_from="self",
    graphs=graphs,
    trainable=trainable,
)

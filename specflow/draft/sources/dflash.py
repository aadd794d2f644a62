"""DFlash (2602.06036): a small decoder that reads target features at several layers and fills a block in one pass.

Every position of the block is predicted at once, from the committed text alone. Weights: the published tensor names
(`fc`, `hidden_norm`, `layers.{i}`, `norm`; `embed_tokens` and `lm_head` where the drafter has its own).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specflow.draft.backbone_options import BackboneOptions
from specflow.draft.corrected import CorrectorOptions
from specflow.draft.registry import SourceInfo
from specflow.draft.shapes import ShapeOptions

if TYPE_CHECKING:
    from specflow.draft.base import Drafter, SourceContext

__all__ = ["SOURCE", "DFlashConfig", "build"]


class DFlashConfig(BackboneOptions, CorrectorOptions, ShapeOptions):
    """The network, what corrects it, and the shape of its blocks."""


def build(config: DFlashConfig, context: SourceContext) -> Drafter:
    """The drafter for a loaded target.

    Raises:
        CheckpointError: The weights do not fit the options or the target.
        GraphError: The options do not fit each other, k or the target.
    """
    from specflow.draft.backbone import ContextBackbone
    from specflow.draft.checkpoint import open_weights, read_options
    from specflow.draft.corrected import assemble
    from specflow.draft.shapes import make_drafter

    options = read_options(config, config.weights)
    reader = open_weights(options.weights, options.seed, context.target)
    network = ContextBackbone(options, reader, context)
    model, head = assemble(network, options, reader, context)
    reader.close()
    return make_drafter(options, model, context, head)


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
)

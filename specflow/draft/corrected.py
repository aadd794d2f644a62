"""Options and assembly of correctors and confidence heads, the same for every source. No torch at module level.

A source mixes the options into its config and hands its network to `parallel_drafter`; "Medusa heads, Markov
corrector, confidence head" is then a matter of three lines of YAML.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specflow.draft.shapes import ShapeOptions, make_drafter
from specflow.draft.weight_options import WeightOptions
from specflow.errors import GraphError

if TYPE_CHECKING:
    from specflow.draft.base import Drafter, SourceContext
    from specflow.draft.nn.confidence import LinearConfidence
    from specflow.draft.nn.corrector import TableCorrector
    from specflow.draft.nn.weights import SeededTensors, WeightReader
    from specflow.draft.onnx_loop import DraftHeads
    from specflow.draft.onnx_parallel import GraphedModel, ParallelGraphs
    from specflow.draft.parallel import Corrector, MarginalModel
    from specflow.draft.trainable import Trainable

__all__ = [
    "ConfidenceOptions",
    "CorrectorOptions",
    "ParallelOptions",
    "confidence_of",
    "parallel_drafter",
    "parallel_graphs",
    "parallel_trainable",
    "read_heads",
]

CORRECTED = "parallel+corrector"
"""The dependency that has a corrector."""


class ConfidenceOptions(BaseModel):
    """A confidence head over any network."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    confidence_head: bool = Field(False, description="says, before a token is chosen, how likely it is to stand")
    confidence_bias: bool = Field(True, description="the confidence head adds a bias")
    temperatures: tuple[Annotated[float, Field(gt=0.0)], ...] = Field(
        (), description="calibration: divisor of the head's log-odds at each draft position; none are 1"
    )

    @model_validator(mode="after")
    def _something_to_calibrate(self) -> ConfidenceOptions:
        if self.temperatures and not self.confidence_head:
            raise ValueError("temperatures calibrate a confidence head; there is none: set confidence_head: true")
        return self


class CorrectorOptions(ConfidenceOptions):
    """A corrector and a confidence head over a network that fills all positions at once."""

    corrector: Literal["markov", "gated", "rnn"] | None = Field(
        None, description="makes each position follow the token before it; goes with dependency parallel+corrector"
    )
    corrector_rank: int = Field(256, ge=1, description="width of the corrector's table of tokens")
    confidence_tokens: bool | None = Field(
        None, description="the confidence head reads the corrector's row of the token before; null: where there is one"
    )

    @model_validator(mode="after")
    def _rows_to_read(self) -> CorrectorOptions:
        if self.confidence_tokens and self.corrector is None:
            raise ValueError("confidence_tokens reads the corrector's table; there is none: set corrector")
        return self


class ParallelOptions(CorrectorOptions, ShapeOptions, WeightOptions):
    """A network that fills all positions at once, what corrects it, and the shape of its blocks."""


P = TypeVar("P", bound=ParallelOptions)


def parallel_drafter(
    config: P, context: SourceContext, make_network: Callable[[P, WeightReader, SourceContext], GraphedModel]
) -> Drafter:
    """A source's drafter: its network, corrected and trusted as the options say, over blocks of the wanted shape.

    Args:
        config: What the recipe set; a checkpoint fills in the rest.
        context: The target, and how deep blocks get.
        make_network: Builds the network from options and tensors.

    Raises:
        CheckpointError: The weights do not fit the options or the target.
        GraphError: The options do not fit each other, k or the target.
        ModelError: ONNX Runtime was asked for and cannot run it.
    """
    from specflow.draft.parallel import ParallelModel

    onnx = context.takes_onnx(config.runtime)
    options, model, heads = _open(config, context, make_network, packed=not onnx)
    corrector: Corrector | None = heads.corrector
    if onnx:
        corrector = _graphs_of(model, heads).run(model, options, context)
    return make_drafter(options, ParallelModel(model, corrector), context, heads.confidence)


def parallel_graphs(
    config: P, context: SourceContext, make_network: Callable[[P, WeightReader, SourceContext], GraphedModel]
) -> ParallelGraphs:
    """A source's network as something that can be written as ONNX graphs; see `parallel_drafter`."""
    _, model, heads = _open(config, context, make_network, packed=False)
    return _graphs_of(model, heads)


def parallel_trainable(
    config: P,
    context: SourceContext,
    tensors: SeededTensors,
    make_network: Callable[[P, WeightReader, SourceContext], GraphedModel],
) -> Trainable:
    """A source's network with weights that can be trained; see `parallel_drafter`."""
    from specflow.draft.checkpoint import trained_reader
    from specflow.draft.trainable import Trainable

    reader = trained_reader(tensors, context.target)
    model = make_network(config, reader, context)
    heads = read_heads(model, config, reader, context)
    reader.close()
    return Trainable(model.trained, config, reader, model.needs, model.vocabulary, heads.corrector, heads.confidence)


def _open(
    config: P,
    context: SourceContext,
    make_network: Callable[[P, WeightReader, SourceContext], GraphedModel],
    packed: bool,
) -> tuple[P, GraphedModel, DraftHeads]:
    """The options with what the checkpoint says filled in, the network, and what stands on it."""
    from specflow.draft.checkpoint import open_weights, read_options

    options = read_options(config, config.weights)
    reader = open_weights(options.weights, options.seed, context.target, packed=packed)
    model = make_network(options, reader, context)
    heads = read_heads(model, options, reader, context)
    reader.close()
    return options, model, heads


def _graphs_of(model: GraphedModel, heads: DraftHeads) -> ParallelGraphs:
    from specflow.draft.onnx_parallel import ParallelGraphs

    return ParallelGraphs(model.graphs(), heads)


def read_heads(
    network: MarginalModel, options: CorrectorOptions, reader: WeightReader, context: SourceContext
) -> DraftHeads:
    """The corrector and the confidence head that the options ask for, over a network's marginals.

    Args:
        network: Its hidden rows are as wide as the target's.
        options: Of the source.
        reader: The drafter's tensors.
        context: Names the dependency.

    Raises:
        GraphError: Corrector and dependency disagree, or there are too few temperatures.
        CheckpointError: A tensor is missing or has another shape.
    """
    from specflow.draft.nn.corrector import CorrectorShape, read_corrector
    from specflow.draft.onnx_loop import DraftHeads

    _check_dependency(options, context)
    info, vocabulary = context.target.info, network.vocabulary
    to_target = None if vocabulary is None else vocabulary.to_target
    corrector = None
    if options.corrector is not None:
        drafted = info.vocab_size if to_target is None else len(to_target)
        shape = CorrectorShape(options.corrector_rank, info.hidden_size, info.vocab_size, drafted)
        corrector = read_corrector(options.corrector, reader, shape)
    depth = min(context.k, network.most_depth)
    reads_tokens = options.confidence_tokens is not False
    head = confidence_of(options, reader, info.hidden_size, depth, corrector if reads_tokens else None)
    return DraftHeads(corrector, head, info.vocab_size, to_target)


def confidence_of(
    options: ConfidenceOptions,
    reader: WeightReader,
    hidden_size: int,
    depth: int,
    corrector: TableCorrector | None = None,
) -> LinearConfidence | None:
    """The confidence head that the options ask for, over any network; None where they ask for none.

    Args:
        options: Of the source.
        reader: The drafter's tensors.
        hidden_size: H of the network.
        depth: Deepest draft position; each needs its temperature where there are any.
        corrector: Whose table the head reads; None: the hidden row alone.

    Raises:
        GraphError: There are too few temperatures.
        CheckpointError: A tensor is missing or has another shape.
    """
    from specflow.draft.nn.confidence import read_confidence
    from specflow.draft.nn.corrector import look_up

    if not options.confidence_head:
        return None
    if options.temperatures and len(options.temperatures) < depth:
        found = f"{len(options.temperatures)} temperatures for {depth} draft positions"
        raise GraphError("draft.temperatures", found, "one for each position", "calibrate at this k, or lower draft.k")
    rows = None if corrector is None else (partial(look_up, corrector.table), int(corrector.table.shape[1]))
    return read_confidence(reader, hidden_size, options.confidence_bias, rows, options.temperatures)


def _check_dependency(options: CorrectorOptions, context: SourceContext) -> None:
    corrected = context.dependency == CORRECTED
    if corrected and options.corrector is None:
        found = f"dependency {CORRECTED} without a corrector"
        raise GraphError("draft.corrector", found, "markov, gated or rnn", "name one, or set dependency: parallel")
    if not corrected and options.corrector is not None:
        found = f"corrector {options.corrector} with dependency {context.dependency or 'parallel'}"
        hint = f"set dependency: {CORRECTED}, or leave the corrector out"
        raise GraphError("draft.dependency", found, CORRECTED, hint)

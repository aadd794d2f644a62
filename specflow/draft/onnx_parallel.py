"""Networks that fill a block at once as ONNX graphs: what all of them share.

Graphs: those of the network itself; `draft`, the whole round with the most likely token at each position, and
`draft_sampled`, the same with tokens drawn by given `uniforms`; `corrector` where there is one. The engine runs the
network's graphs and the corrector, for chains and trees alike; `draft` and `draft_sampled` are for use outside of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from specflow.draft.checkpoint import weights_identity
from specflow.draft.onnx_corrector import OnnxCorrector, compare_corrector, write_corrector
from specflow.draft.onnx_loop import DraftHeads, Emitted, emit_draft
from specflow.draft.onnx_target import engine_graphs
from specflow.draft.parallel import MarginalModel, Marginals
from specflow.draft.shapes import ShapeOptions
from specflow.onnx.graphs import DraftFacts, GraphSet, OutputError
from specflow.onnx.session import OnnxSession, Place

if TYPE_CHECKING:
    from specflow.draft.base import SourceContext
    from specflow.draft.corrected import ParallelOptions
    from specflow.draft.parallel import Corrector
    from specflow.onnx.graphs import Precision
    from specflow.onnx.writer import GraphWriter

__all__ = ["GraphedModel", "MarginalGraphs", "ParallelGraphs", "Trial", "write_marginals"]

_NOT_IN_GRAPHS = frozenset({*ShapeOptions.model_fields, "weights", "seed", "runtime"})
"""Options that change nothing in a graph, or are told by the content of the weights."""
_SEED = 3
_WARMTH = 0.8


@dataclass(frozen=True, slots=True)
class Trial:
    """Inputs of a network's graph, and what torch makes of them."""

    feeds: Mapping[str, Tensor]
    anchors: Tensor  # [B]
    marginals: Marginals
    slots: Tensor | None = None  # [L, 2, B, Hk, S, Dh]


class MarginalGraphs(Protocol):
    """How a network of marginals is written, what a reader of its graphs must know, and what they are tried on."""

    @property
    def name(self) -> str:
        """Of the graph that gives `scored` and `logits`."""

    @property
    def hidden_size(self) -> int:
        """H of its rows."""

    @property
    def facts(self) -> DraftFacts: ...

    @property
    def reads_anchors(self) -> bool:
        """Whether a pass starts from the anchors."""

    def emit(self, writer: GraphWriter, anchors: str = "") -> Emitted:
        """Inputs and operators of a whole pass.

        Args:
            writer: The graph.
            anchors: Its input of anchors [B]; empty where there is none, as the pass alone is wanted.
        """

    def write(self, graphs: GraphSet) -> None:
        """Write the network's own graphs."""

    def compare(self, folder: Path, precision: Precision, place: Place) -> Iterator[OutputError]:
        """Of what goes before a block."""

    def trials(self, folder: Path, precision: Precision, place: Place) -> Iterator[Trial]:
        """Blocks of random rows, the widest one and the narrowest."""


class GraphedModel(MarginalModel, Protocol):
    """A `MarginalModel` whose network can be trained, written as graphs and run from them."""

    @property
    def trained(self) -> nn.Module:
        """Its layers with their weights."""

    def graphs(self) -> MarginalGraphs:
        """Its network as it is written."""

    def take_graphs(self, folder: Path, place: Place) -> None:
        """Let the graphs of a folder compute it; its layers are dropped."""


def write_marginals(graphs: GraphSet, network: MarginalGraphs, count: int | str) -> None:
    """Write the graph that gives `scored` [B, K, H] and `logits` [B, K, Vd]."""
    with graphs.graph(network.name) as writer:
        made = network.emit(writer)
        writer.output(made.scored, "scored", ("batch", made.count, made.hidden_size))
        writer.output(made.logits, "logits", ("batch", made.count, count))


class ParallelGraphs:
    """A `NetworkGraphs` of a network of marginals and what stands on it.

    Args:
        network: Its layers unpacked.
        heads: Corrector and confidence head, unpacked, and what draft ids mean.
    """

    def __init__(self, network: MarginalGraphs, heads: DraftHeads) -> None:
        self._network, self._heads = network, heads

    @property
    def facts(self) -> DraftFacts:
        return self._network.facts

    def write(self, graphs: GraphSet) -> None:
        network, heads = self._network, self._heads
        network.write(graphs)
        if heads.corrector is not None:
            write_corrector(graphs, heads.corrector, network.hidden_size)
        for name, sampled in (("draft", False), ("draft_sampled", True)):
            with graphs.graph(name) as writer:
                anchored = network.reads_anchors or heads.reads_anchors(network.hidden_size)
                anchors = writer.input("anchors", ("batch",), "INT64") if anchored else ""
                emit_draft(writer, network.emit(writer, anchors), heads, sampled)

    @torch.inference_mode()
    def compare(self, folder: Path, precision: Precision, place: Place) -> Iterator[OutputError]:
        network, heads = self._network, self._heads
        if heads.corrector is not None:
            yield from compare_corrector(heads.corrector, network.hidden_size, folder, precision, place)
        yield from network.compare(folder, precision, place)
        passes = [path.stem for path in sorted(folder.glob(f"{network.name}*.onnx"))]  # with the head, and without it
        sessions = {name: OnnxSession(folder / f"{name}.onnx", place) for name in (*passes, *_ROUNDS)}
        for trial in network.trials(folder, precision, place):
            for name in passes:
                yield from _compare_pass(name, sessions[name], trial)
            for name in _ROUNDS:
                yield from self._compare_round(name, sessions[name], trial)

    def _compare_round(self, name: str, session: OnnxSession, trial: Trial) -> Iterator[OutputError]:
        """A whole round, against torch along the tokens that the graph chose."""
        size = trial.marginals.logits.shape
        numbers = torch.rand(size[:2], generator=torch.Generator().manual_seed(_SEED), dtype=torch.float64)
        offered = {**trial.feeds, "anchors": trial.anchors, "uniforms": numbers.to(trial.anchors.device)}
        offered["temperature"] = torch.full((1,), _WARMTH, device=trial.anchors.device)
        feeds = {each: value for each, value in offered.items() if each in session.inputs}
        wanted = {"tokens": tuple(size[:2]), "logits": tuple(size)}
        if "confidence" in session.outputs:
            wanted["confidence"] = tuple(size[:2])
        found = session.run(feeds, wanted, trial.slots)
        logits, confidence = _along(self._heads, trial, found["tokens"])
        yield OutputError.between((name, "logits"), found["logits"], logits)
        if confidence is not None:
            yield OutputError.between((name, "confidence"), found["confidence"], confidence)
        missed = _missed(self._heads, logits, found["tokens"], feeds.get("uniforms"))
        yield OutputError(name, "tokens", missed, missed, "random")

    def run(self, model: GraphedModel, options: ParallelOptions, context: SourceContext) -> Corrector | None:
        """Let graphs compute the model; they are written if they are not there yet.

        Args:
            model: The one this was made of.
            options: Of the source, the checkpoint's filled in.
            context: Says where graphs are kept and run.

        Returns:
            The corrector, likewise computed by a graph.

        Raises:
            ModelError: Graphs are not written in this dtype, there is no place for them, or they cannot be run.
        """
        identity = {
            "network": options.model_dump(exclude=set(_NOT_IN_GRAPHS)),
            "weights": weights_identity(options.weights, options.seed),
            "positions": model.most_positions,
            "depth": model.most_depth,
        }
        folder, place = engine_graphs(context, identity, self.write), Place(context.target.info.device, context.threads)
        model.take_graphs(folder, place)
        return None if self._heads.corrector is None else OnnxCorrector(folder, place)


_ROUNDS = ("draft", "draft_sampled")


def _compare_pass(name: str, session: OnnxSession, trial: Trial) -> Iterator[OutputError]:
    """A pass of the network, against torch."""
    true = {"scored": trial.marginals.hidden, "logits": trial.marginals.logits}
    wanted = {output: tuple(value.shape) for output, value in true.items() if output in session.outputs}
    found = session.run(trial.feeds, wanted, trial.slots)
    for output in wanted:
        yield OutputError.between((name, output), found[output], true[output])


def _along(heads: DraftHeads, trial: Trial, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
    """Corrected logits and confidences of a block's positions, given its tokens.  # [B, K, Vd], [B, K]"""
    before = torch.cat((trial.anchors.unsqueeze(1), tokens[:, :-1]), dim=1)
    hidden, logits = trial.marginals.hidden, trial.marginals.logits
    count = tokens.shape[1]
    if (corrector := heads.corrector) is not None:
        state, biases = corrector.begin(len(tokens)).unsqueeze(1), []
        for step in range(count):
            bias, state = corrector.correct(before[:, step : step + 1], hidden[:, step : step + 1], state)
            biases.append(bias)
        logits = logits + torch.cat(biases, dim=1)
    if heads.confidence is None:
        return logits, None
    return logits, torch.stack([heads.confidence(hidden[:, k], before[:, k], k) for k in range(count)], dim=1)


def _missed(heads: DraftHeads, logits: Tensor, tokens: Tensor, uniforms: Tensor | None) -> float:
    """How far chosen tokens are from being the ones torch would choose; near ties may fall either way.

    Args:
        heads: Say what draft ids mean.
        logits: Of torch.  # [B, K, Vd]
        tokens: Target ids that a graph chose.  # [B, K]
        uniforms: Numbers they were drawn with; None: the most likely ones were taken.  # [B, K]

    Returns:
        Share of the largest logit by which a token was below the best, or probability by which a number missed the
        token's part of the law.
    """
    ids = tokens
    if heads.to_target is not None:
        inverse = torch.full((heads.vocab_size,), -1, device=tokens.device)
        inverse[heads.to_target] = torch.arange(heads.drafted, device=tokens.device)
        ids = inverse[tokens]
    if int(ids.min()) < 0 or int(ids.max()) >= heads.drafted:
        return float("inf")
    wide, index = logits.double(), ids.unsqueeze(-1)
    if uniforms is None:
        short = wide.amax(-1) - wide.gather(-1, index).squeeze(-1)
        return float(short.max() / wide.abs().max())
    probs = (wide / _WARMTH).softmax(-1)
    above = probs.cumsum(-1).gather(-1, index).squeeze(-1)
    under = above - probs.gather(-1, index).squeeze(-1)
    return float(torch.maximum(under - uniforms, uniforms - above).clamp_min(0.0).max())

"""Language models that draft, and parts of the target that do, as ONNX graphs.

All of them are decoders with the inputs and outputs of `onnx.decoder`; they differ in whose rows their cache holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specflow.draft.lm_shared import ExitAdapter
from specflow.draft.lm_steps import DraftRows
from specflow.draft.nn.weights import SeededTensors
from specflow.errors import ModelError
from specflow.onnx.decoder import DecoderPart, write_decoder
from specflow.onnx.graphs import DraftFacts, GraphSet, OutputError, Precision, difference
from specflow.onnx.layers import linear
from specflow.onnx.session import Place
from specflow.target.architecture import NATIVE_FAMILIES, Architecture, native_refusal
from specflow.target.base import TargetOptions
from specflow.target.cache import KVCache
from specflow.target.load import read_config, read_tensors
from specflow.target.onnx import GraphPart, ModelGraphs, OnnxTarget
from specflow.target.transformer import NativeTarget
from specflow.tree import from_parents
from specflow.types import Skip

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

    from specflow.draft.lm_steps import Shortcut
    from specflow.onnx.writer import GraphWriter
    from specflow.target.base import Cache, Target
    from specflow.target.store import ModelFiles

__all__ = [
    "DRAFT_LAYERS",
    "DRAFT_MODEL",
    "REST_LAYERS",
    "LanguageModelGraphs",
    "ModelWeights",
    "SharedLayersGraphs",
    "Way",
    "compare_passes",
    "graph_target",
    "random_rows",
    "read_weights",
]

DRAFT_MODEL, DRAFT_LAYERS, REST_LAYERS = "draft_model", "draft_layers", "rest_layers"
"""Names of graphs: a whole model that drafts, the target's layers that draft, and those above an early exit."""

_BATCH, _WIDTH = 3, 18
_FIRST, _CHAIN, _TREE = ((9, 2, 6), (4, 1, 3), (-1, -1, 0, 0, 1))
"""Of a comparison: rows kept of its first pass, of the chain in the second one, parents of the tree in the third."""


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """A model before anything computes it."""

    config: PretrainedConfig
    tensors: Mapping[str, Tensor] | SeededTensors


def read_weights(files: ModelFiles, trust_remote_code: bool = False) -> ModelWeights:
    """Configuration and tensors of a model's files; tensors are read when they are asked for.

    Raises:
        ModelError: The configuration cannot be read, or graphs do not compute such a model.
        CheckpointError: Weight files are missing or damaged.
    """
    config = read_config(files, trust_remote_code)
    if reason := native_refusal(config):
        raise ModelError(files.name, f"ONNX graphs do not compute {reason}", f"one of {', '.join(NATIVE_FAMILIES)}")
    return ModelWeights(config, read_tensors(files.directory))


@dataclass(frozen=True, slots=True)
class Way:
    """The way of a graph's passes through a model, as `Target.forward` takes it."""

    graph: str
    layers: tuple[int, int] | None = None
    skip: Skip | None = None
    enters: bool = False  # with hidden states
    adapter: Callable[[Tensor], Tensor] | None = None  # before the final norm

    def part(self, num_layers: int) -> DecoderPart:
        """What of the model its graph computes."""
        first, end = self.layers or (0, num_layers)
        return DecoderPart(first, end, self.skip or Skip(), self.enters)


def graph_target(weights: ModelWeights, options: TargetOptions, find: Callable[[GraphPart], Path]) -> OnnxTarget:
    """A model that is run as graphs which lie ready, or are written when they are asked for."""
    tensors = {} if isinstance(weights.tensors, SeededTensors) else weights.tensors
    return OnnxTarget(ModelGraphs(weights.config, tensors, find), options)


class LanguageModelGraphs:
    """A whole model that drafts, with a cache of its own; a `NetworkGraphs`.

    Args:
        weights: The model.
        vocab_size: The target's.  # V
    """

    def __init__(self, weights: ModelWeights, vocab_size: int) -> None:
        self.weights = weights
        arch = Architecture.of(weights.config)
        beyond = "" if arch.vocab_size <= vocab_size else f"; logits from id {vocab_size} on mean nothing"
        self.facts = DraftFacts(
            round=(
                "draft_model has a cache of its own: a slot for every committed token but the anchor, the last one",
                "a round first feeds the committed tokens that the cache lacks, the anchor last; the logits of the "
                f"anchor's row propose draft token 1{beyond}",
                "then it feeds one row a draft token, at the next position; its logits propose the next one",
                "rows of a block see all committed slots and their ancestors in the block: there bias is 0, else -inf",
                "once the target has decided, starts moves behind the accepted rows; slots above it are overwritten",
            ),
            num_layers=arch.num_layers,
            window=arch.window,
        )

    def write(self, graphs: GraphSet) -> None:
        with graphs.graph(DRAFT_MODEL) as writer:
            write_decoder(writer, self.weights.config, self.weights.tensors)

    def compare(self, folder: Path, precision: Precision, place: Place) -> Iterator[OutputError]:
        ours = _open(self.weights, lambda _: folder / f"{DRAFT_MODEL}.onnx", precision, place)
        options = TargetOptions("reference", torch.float32, place.device, row_invariant=False)
        reference = NativeTarget(self.weights.config, self.weights.tensors, options)
        yield from compare_passes(ours, reference, Way(DRAFT_MODEL), random_rows(reference))


class SharedLayersGraphs:
    """The target's layers that draft, and after an early exit the rest of them; a `NetworkGraphs`.

    Args:
        weights: The target.
        shortcut: What drafts leave out of it; the layers of an adapter are unpacked.
        target: The same model, loaded.
    """

    def __init__(self, weights: ModelWeights, shortcut: Shortcut, target: Target) -> None:
        self._weights, self._target, adapter = weights, target, shortcut.adapter
        arch = Architecture.of(weights.config)
        num_layers = arch.num_layers
        end = num_layers if shortcut.exit_layer is None else shortcut.exit_layer
        self._drafts = Way(DRAFT_LAYERS, (0, end), shortcut.skip, adapter=adapter)
        self._rest = None if end == num_layers else Way(REST_LAYERS, (end, num_layers), enters=True)
        self.facts = DraftFacts(
            round=(
                "draft_layers reads and writes slots of the target's own cache: one for every committed token but the "
                "anchor, the last one",
                "a round feeds the anchor, then one row a draft token at the next position; logits of each row propose "
                "the next draft token; rows of a block see all committed slots and their ancestors in the block",
                *self._verification(end),
            ),
            num_layers=end,
            window=arch.window,
            target_cache=True,
        )

    @property
    def target_parts(self) -> dict[DecoderPart, str]:
        """What of the target its graphs compute."""
        num_layers = Architecture.of(self._weights.config).num_layers
        return {way.part(num_layers): way.graph for way in filter(None, (self._drafts, self._rest))}

    def _verification(self, end: int) -> tuple[str, ...]:
        if self._rest is None:
            return ("the target then verifies the block through all layers, over the same committed slots",)
        return (
            f"hidden_pre of all rows of the block, the last draft token's too, goes into rest_layers as hidden_in: "
            f"layers {end} and above over their slots of the same cache; its logits are the target's",
        )

    def write(self, graphs: GraphSet) -> None:
        num_layers = Architecture.of(self._weights.config).num_layers
        for way in filter(None, (self._drafts, self._rest)):
            adapt = partial(_adapt, way.adapter) if isinstance(way.adapter, ExitAdapter) else None
            with graphs.graph(way.graph) as writer:
                write_decoder(writer, self._weights.config, self._weights.tensors, way.part(num_layers), adapt)

    def compare(self, folder: Path, precision: Precision, place: Place) -> Iterator[OutputError]:
        reference = self._target
        for way in filter(None, (self._drafts, self._rest)):
            path = folder / f"{way.graph}.onnx"
            ours = _open(self._weights, lambda _, path=path: path, precision, place)  # type: ignore[misc]
            yield from compare_passes(ours, reference, way, random_rows(reference))


def _adapt(adapter: ExitAdapter, writer: GraphWriter, hidden: str) -> str:
    with writer.scope("adapter"):
        lowered = linear(writer, hidden, adapter.down, "down")
        return writer.op("Add", hidden, linear(writer, lowered, adapter.up, "up"))


def _open(weights: ModelWeights, find: Callable[[GraphPart], Path], precision: Precision, place: Place) -> OnnxTarget:
    options = TargetOptions(
        "graphs", precision.dtype, place.device, row_invariant=False, quantization=precision.quantization
    )
    return graph_target(weights, options, find)


def random_rows(target: Target, seed: int = 0) -> Tensor:
    """Tokens for `compare_passes`, the same ones every time.  # [B, R]"""
    info = target.info
    width = min(_WIDTH, info.context_length)
    numbers = torch.Generator().manual_seed(seed)
    return torch.randint(info.vocab_size, (_BATCH, width), generator=numbers).to(info.device)


def compare_passes(
    ours: Target, reference: Target, way: Way, tokens: Tensor, inputs: str = "random"
) -> Iterator[OutputError]:
    """How far every output of a graph is from torch's: two passes fill the cache, the third one is a tree.

    Args:
        ours: The graphs.
        reference: The same model in torch.
        way: The graph.
        tokens: Rows of requests that keep different numbers of them.  # [B, R]
        inputs: What to call the tokens in the findings.
    """
    found: dict[str, tuple[float, float]] = {}  # output -> largest difference, largest value
    one, two = (target.new_cache(len(tokens), tokens.shape[1] + len(_TREE) + 1) for target in (ours, reference))
    numbers = torch.Generator().manual_seed(1)
    last = reference.info.context_length - 1
    for part, parents, kept in _passes(tokens):
        starts = torch.tensor(two.lengths, device=part.device).unsqueeze(1)
        shape = None if parents is None else from_parents(parents.to(part.device))
        steps = torch.arange(part.shape[1], device=part.device) if shape is None else shape.depth
        rows = DraftRows(part, (starts + steps).clamp_max(last), None if shape is None else shape.ancestors)
        entered = None
        if way.enters:
            entered = torch.randn(*part.shape, reference.info.hidden_size, generator=numbers).to(part.device)
        mine, its = (_run(target, way, rows, cache, entered) for target, cache in ((ours, one), (reference, two)))
        for name, expected in its.items():
            largest, most = found.get(name, (0.0, 0.0))
            found[name] = max(largest, difference(mine[name], expected)), max(most, float(expected.abs().max()))
        one.keep(kept)
        two.keep(kept)
    for name, (largest, most) in found.items():
        yield OutputError.scaled((way.graph, name), largest, most, inputs)


def _passes(tokens: Tensor) -> Iterator[tuple[Tensor, Tensor | None, tuple[int, ...]]]:
    """Rows of each pass, the parents of a tree, and how many rows of each request are kept.  # [B, R]"""
    width, tree = tokens.shape[1], len(_TREE) + 1
    chain = max(1, min(max(_CHAIN), width - tree - 1))
    wide = max(1, width - tree - chain)
    yield tokens[:, :wide], None, tuple(max(1, wide * part // max(_FIRST)) for part in _FIRST)
    yield tokens[:, wide : wide + chain], None, tuple(min(part, chain) for part in _CHAIN)
    yield tokens[:, -tree:], torch.tensor([_TREE]), (0,) * len(tokens)


def _run(target: Target, way: Way, rows: DraftRows, cache: Cache, entered: Tensor | None) -> dict[str, Tensor]:
    """Every output of a pass by its name in the graph."""
    info = target.info
    first, end = way.layers or (0, info.num_layers)
    taps = range(first - 1 if first == 0 else first, end)
    out = target.forward(
        rows.tokens,
        rows.positions,
        cache,
        rows.mask,
        taps,
        way.layers,
        way.skip,
        None if entered is None else entered.to(info.dtype),
    )
    assert out.hidden_pre is not None
    assert out.hidden_post is not None
    normed, logits = out.hidden_post, out.logits
    if way.adapter is not None and info.runtime != "onnx":  # there it is in the graph
        normed = target.norm(way.adapter(out.hidden_pre))
        logits = target.score(normed)
    found = {"logits": logits, "hidden_pre": out.hidden_pre, "hidden_post": normed}
    found |= {f"tap.{layer}": out.taps[layer] for layer in taps}
    assert isinstance(cache, KVCache)
    left_out = frozenset() if way.skip is None else way.skip.attention
    for layer in (layer for layer in range(first, end) if layer not in left_out):
        for kind, slots in zip(("key", "value"), cache.data[layer], strict=True):
            fresh = [slots[b, :, length : length + rows.tokens.shape[1]] for b, length in enumerate(cache.lengths)]
            found[f"present_{kind}.{layer}"] = torch.stack(fresh)
    return found

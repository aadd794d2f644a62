"""MTP and EAGLE as ONNX graphs: written from their torch layers, and run behind the same interface.

Graphs: `fusion` where several taps are read, `features` [B, R, F] to `hidden` [B, R, H]; `step`, or `step_{j}` for
each of several modules, `tokens` [B, R], `hidden` and what `PassGraph` declares to `recycled` and `scored` [B, R, H];
`head`, `scored` to `logits` [B, R, Vd]; `confidence` where there is a confidence head, `scored` to `confidence` [B, R].
A module's only layer is its layer 0, over a cache of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from specflow.draft.borrowed import borrowed_embedding, borrowed_head
from specflow.draft.checkpoint import weights_identity
from specflow.draft.corrected import ConfidenceOptions
from specflow.draft.nn.attention import Sight
from specflow.draft.nn.confidence import LinearConfidence
from specflow.draft.nn.feature_step import FeatureNetwork, FeatureStep, Fusion, Pairs, StepRows
from specflow.draft.onnx_loop import emit_odds
from specflow.draft.onnx_target import engine_graphs
from specflow.draft.shapes import ShapeOptions
from specflow.onnx.above import feeds_above
from specflow.onnx.decoder import write_head
from specflow.onnx.graphs import DraftFacts, OutputError, Precision
from specflow.onnx.layers import PassGraph, Stream, add_norm, linear, norm
from specflow.onnx.session import OnnxSession, Place
from specflow.target.cache import KVCache

if TYPE_CHECKING:
    from specflow.draft.base import Needs, SourceContext
    from specflow.draft.chain import ConfidenceHead
    from specflow.draft.feature_options import FeatureOptions
    from specflow.law import DraftVocabulary
    from specflow.onnx.graphs import GraphSet
    from specflow.onnx.writer import GraphWriter
    from specflow.target.base import Target
    from specflow.types import BlockShape

__all__ = ["FeatureGraphs", "FoundGraphs", "OnnxFeatureNetwork"]

_NOT_IN_GRAPHS = frozenset({*ShapeOptions.model_fields, *ConfidenceOptions.model_fields, "weights", "seed", "runtime"})
"""Options that change nothing in the engine's graphs, or are told by the content of the weights."""
_RECYCLED = (
    "Run `step` over these rows, causal: `tokens` is the token after each position, `starts` the rows that the cache "
    "holds. They are committed.",
    "`head` makes logits of draft position 1 from `scored` of the last committed row.",
    "A draft row stands one position behind its parent; the parent of the first ones is the last committed row. Its "
    "`tokens` is the drafted token, its `hidden` the parent's `recycled`. Run it above the rows there are, with a "
    "`bias` that shows it the committed rows, its ancestors and itself. `head` makes logits of the next draft position "
    "from its `scored`.",
    "After verification forget all draft rows: lower `starts` again, and run accepted positions with true features.",
)
_SERIAL = (
    "Module j, from 0, keeps a cache of its own; `starts` is the rows that it holds. Its committed row at position i "
    "holds the token after position i + j as `tokens` and, for j > 0, as `hidden` what module j - 1 gave as `recycled` "
    "at position i.",
    "Run all modules over the new rows, causal, each as far as its tokens are known: module j stays j positions behind "
    "the first. They are committed.",
    "`head` makes logits of draft position 1 from `scored` of the last committed row of module 0.",
    "For draft position j + 1 run module j over the last j known positions: its `tokens` are the j tokens drafted so "
    "far, its `hidden` the `recycled` of module j - 1, that of its last committed row first. `head` makes the logits "
    "from `scored` of the last row. These rows are not committed.",
)
_SURE = (
    "`confidence` says of the row that logits were made from, by its `scored`, how likely the token is to stand; "
    "where it has the input `depths`, that is the draft position, from 1, of the token."
)


@dataclass(frozen=True, slots=True)
class FoundGraphs:
    """Written graphs of a network, and what else must be known of it to run them."""

    folder: Path
    steps: tuple[str, ...]  # graph of every step; steps that share their layers share it
    needs: Needs
    shape: BlockShape
    vocabulary: DraftVocabulary | None
    fused: bool
    own_head: bool


class FeatureGraphs:
    """A `NetworkGraphs`.

    Args:
        network: Its layers, unpacked.
        num_positions: Positions that blocks may be drafted at.
        confidence: A confidence head to write beside it.
    """

    def __init__(self, network: FeatureNetwork, num_positions: int, confidence: ConfidenceHead | None = None) -> None:
        assert confidence is None or isinstance(confidence, LinearConfidence)
        self._network, self._num_positions, self._confidence = network, num_positions, confidence
        modules = {id(step): step for step in network.steps}
        several = len(modules) > 1
        names = {key: f"step_{index}" if several else "step" for index, key in enumerate(modules)}
        self._modules = {names[key]: step for key, step in modules.items()}
        self._steps = tuple(names[id(step)] for step in network.steps)

    @property
    def facts(self) -> DraftFacts:
        network = self._network
        needs, vocabulary = network.needs, network.vocabulary
        hidden = "hidden_pre" if needs.hidden_pre else "hidden_post"
        return DraftFacts(
            round=self._round(),
            taps=needs.taps,
            hidden=None if needs.taps else hidden,
            num_layers=len(self._steps),
            to_target=None if vocabulary is None else vocabulary.to_target,
        )

    def _round(self) -> tuple[str, ...]:
        needs, steps = self._network.needs, self._steps
        if needs.taps:
            layers = ", ".join(map(str, needs.taps))
            read = f"the outputs of target layers {layers} (-1: the embedding) side by side"
            first = (
                f"After a commit take, for every position that became known, {read}; `fusion` makes `hidden` of them."
            )
        else:
            norm = "before" if needs.hidden_pre else "after"
            read = f"the target's last hidden state {norm} its final norm"
            first = f"After a commit take, for every position that became known, {read}: it is `hidden`."
        sure = () if self._confidence is None else (_SURE,)
        if len(steps) == 1:
            return first, *_RECYCLED, *sure
        return first, f"Graphs of the modules: {', '.join(steps)}.", *_SERIAL, *sure

    def write(self, graphs: GraphSet) -> None:
        network = self._network
        if network.fusion is not None:
            with graphs.graph("fusion") as writer:
                _write_fusion(writer, network.fusion)
        for name, step in self._modules.items():
            with graphs.graph(name) as writer:
                self._write_step(writer, step)  # type: ignore[arg-type]
        with graphs.graph("head") as writer:
            head = borrowed_head(network.target) if network.head is None else network.head
            write_head(writer, head.weight, head.bias)
        if self._confidence is not None:
            with graphs.graph("confidence") as writer:
                _write_confidence(writer, self._confidence)

    def find(self, options: FeatureOptions, context: SourceContext) -> FoundGraphs:
        """The graphs as they are kept for the engine, written where they are not there yet.

        Raises:
            ModelError: Graphs are not written in this dtype, or there is no place for them.
        """
        identity = {
            "network": options.model_dump(exclude=set(_NOT_IN_GRAPHS)),
            "weights": weights_identity(options.weights, options.seed),
            "positions": self._num_positions,
        }
        return self._found(engine_graphs(context, identity, self.write))

    def compare(self, folder: Path, precision: Precision, place: Place) -> Iterator[OutputError]:
        network, width = self._network, self._network.shape.hidden_size
        random = _RandomRows(precision.dtype, network.device)
        graphs = OnnxFeatureNetwork(self._found(folder), network.target, place.threads)
        if network.fusion is not None:
            features = random.rows(5, network.fusion.fc.in_features)
            true = network.fuse(features.to(network.dtype))
            yield OutputError.between(("fusion", "hidden"), graphs.fuse(features), true)
        for name in self._modules:
            yield from _compare_step(name, self._steps.index(name), (graphs, network), random)
        scored = random.rows(5, width)
        vocab_size = len(self.facts.to_target) if self.facts.to_target is not None else network.target.info.vocab_size
        head = OnnxSession(folder / "head.onnx", place)
        logits = head.run({"scored": scored}, {"logits": (*scored.shape[:2], vocab_size)})["logits"]
        yield OutputError.between(("head", "logits"), logits, network.score(scored.to(network.dtype)))
        if self._confidence is not None:
            yield _compare_confidence(self._confidence, OnnxSession(folder / "confidence.onnx", place), scored)

    def _found(self, folder: Path) -> FoundGraphs:
        network = self._network
        fused, own_head = network.fusion is not None, network.head is not None
        return FoundGraphs(folder, self._steps, network.needs, network.shape, network.vocabulary, fused, own_head)

    def _write_step(self, writer: GraphWriter, step: FeatureStep) -> None:
        """The operators of `FeatureStep.forward`, the embedding in front."""
        network, block = self._network, step.block
        size = ("batch", "rows", network.shape.hidden_size)
        tokens, hidden = writer.input("tokens", size[:2], "INT64"), writer.input("hidden", size)
        rows = PassGraph(writer, network.rotary, self._num_positions)
        embedding = borrowed_embedding(network.target) if network.embedding is None else network.embedding
        embedded = writer.op("Gather", writer.weight(embedding, "embedding"), tokens)
        if step.form.zero_first:
            first = writer.op("Unsqueeze", writer.op("Equal", "positions", writer.constant(0)), writer.constant([-1]))
            embedded = writer.op("Where", first, writer.scalar(0.0), embedded)
        e = embedded if step.embedding_norm is None else norm(writer, embedded, step.embedding_norm, "embedding_norm")
        h = hidden if step.hidden_norm is None else norm(writer, hidden, step.hidden_norm, "hidden_norm")
        pair = writer.op("Concat", *((h, e) if step.form.hidden_first else (e, h)), axis=-1)
        if step.fc is None:
            stream = Stream(h if step.form.norm_residual else hidden, rows.attend_to(pair, block, 0))
        else:
            stream = rows.attend(Stream(linear(writer, pair, step.fc, "fc")), block, 0)
        stream = rows.feed(stream, block)
        if step.norm is None:
            stream = rows.settle(stream)
            normed = stream.base
        else:
            normed, stream = add_norm(writer, stream, step.norm, "norm")
        writer.output(normed if step.form.recycle_normed else stream.base, "recycled", size)
        writer.output(normed, "scored", size)


class OnnxFeatureNetwork:
    """Graphs of a network in the place of a `FeatureNetwork`.

    A head that is the target's stays with the target: its weights are in memory there already.

    Args:
        found: The graphs.
        target: The one they were written for.
        threads: Of ONNX Runtime on a CPU; None: its own choice.

    Raises:
        ModelError: ONNX Runtime cannot read or run them.
    """

    def __init__(self, found: FoundGraphs, target: Target, threads: int | None = None) -> None:
        self.needs, self.shape, self.vocabulary = found.needs, found.shape, found.vocabulary
        self.num_steps = len(found.steps)
        self._target, self._place = target, Place(target.info.device, threads)
        sessions = {name: self._open(found.folder, name) for name in dict.fromkeys(found.steps)}
        self._steps = [sessions[name] for name in found.steps]
        self._dtype = self._steps[0].inputs["hidden"].dtype
        self._fusion = self._open(found.folder, "fusion") if found.fused else None
        self._head = self._open(found.folder, "head") if found.own_head else None

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        like = torch.empty(0, dtype=self._dtype, device=self._place.device)
        cache = KVCache(1, batch, self.shape.num_kv_heads, capacity, self.shape.head_width, like)
        cache.trim()  # attention goes over all slots there are
        return cache

    def fuse(self, features: Tensor) -> Tensor:
        """See `FeatureNetwork.fuse`."""
        if self._fusion is None:
            return features
        size = (*features.shape[:2], self.shape.hidden_size)
        return self._fusion.run({"features": features.contiguous()}, {"hidden": size})["hidden"]

    def run(self, index: int, pairs: Pairs, cache: KVCache, mask: Tensor | None = None) -> StepRows:
        """See `FeatureNetwork.run`."""
        batch, rows = pairs.tokens.shape
        feeds = feeds_above(cache, rows, {"bias": Sight(cache.lengths, pairs.positions, mask)})
        feeds["positions"] = pairs.positions.contiguous()
        feeds |= {"tokens": pairs.tokens.contiguous(), "hidden": pairs.hidden.contiguous()}
        size = (batch, rows, self.shape.hidden_size)
        out = self._steps[index].run(feeds, {"recycled": size, "scored": size}, cache.data)
        return StepRows(out["recycled"], out["scored"])

    def score(self, scored: Tensor) -> Tensor:
        """See `FeatureNetwork.score`."""
        if self._head is None:
            return self._target.score(scored)
        size = (*scored.shape[:2], self._num_outputs)
        return self._head.run({"scored": scored.contiguous()}, {"logits": size})["logits"]

    @cached_property
    def _num_outputs(self) -> int:
        return self._target.info.vocab_size if self.vocabulary is None else len(self.vocabulary.to_target)

    def _open(self, folder: Path, name: str) -> OnnxSession:
        return OnnxSession(folder / f"{name}.onnx", self._place)


def _write_fusion(writer: GraphWriter, fusion: Fusion) -> None:
    """The operators of `Fusion.forward`."""
    inputs, width = fusion.fc.in_features, fusion.fc.out_features
    taps = writer.input("features", ("batch", "rows", inputs))
    if len(fusion.apart):
        parts = writer.ops("Split", len(fusion.apart), taps, axis=-1, num_outputs=len(fusion.apart))
        normed = [norm(writer, part, fusion.apart[i], f"norm.{i}") for i, part in enumerate(parts)]  # type: ignore[arg-type]
        taps = writer.op("Concat", *normed, axis=-1)
    if fusion.together is not None:
        taps = norm(writer, taps, fusion.together, "norm")
    writer.output(linear(writer, taps, fusion.fc, "fc"), "hidden", ("batch", "rows", width))


def _write_confidence(writer: GraphWriter, head: LinearConfidence) -> None:
    """The operators of `LinearConfidence.forward`, in float32."""
    size = ("batch", "rows")
    odds = emit_odds(writer, head, writer.input("scored", (*size, head.proj.in_features)))
    if heats := head.temperatures:
        # At both ends 1: draft positions count from 1, and those behind the last temperature have none.
        known = writer.weight(np.array([1.0, *heats, 1.0], np.float32), "temperatures")
        ends = writer.constant(0), writer.constant(len(heats) + 1)
        depths = writer.op("Clip", writer.input("depths", size, "INT64"), *ends)
        odds = writer.op("Div", odds, writer.op("Gather", known, depths))
    writer.output(writer.op("Sigmoid", odds), "confidence", size, "FLOAT")


def _compare_confidence(head: LinearConfidence, session: OnnxSession, scored: Tensor) -> OutputError:
    depths = torch.arange(scored.shape[1], device=scored.device) % (len(head.temperatures) + 1) + 1
    feeds = {"scored": scored, "depths": depths.expand(scored.shape[:2]).contiguous()}
    feeds = {name: feeds[name] for name in session.inputs}
    found = session.run(feeds, {"confidence": tuple(scored.shape[:2])})["confidence"]
    true = [head(scored[:, row], depths, int(depth) - 1) for row, depth in enumerate(depths)]
    return OutputError.between(("confidence", "confidence"), found, torch.stack(true, dim=1))


class _RandomRows:
    """Rows of noise, alike for every run, three batch rows each."""

    batch = 3

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._numbers = torch.Generator().manual_seed(0)

    def rows(self, count: int, width: int) -> Tensor:
        """# [B, count, width]"""
        noise = torch.randn(self.batch, count, width, generator=self._numbers)
        return noise.to(self._device, self._dtype)

    def tokens(self, count: int, vocab_size: int) -> Tensor:
        """# [B, count]"""
        found = torch.randint(0, vocab_size, (self.batch, count), generator=self._numbers)
        return found.to(self._device)

    def tree(self, count: int) -> tuple[Tensor, Tensor]:
        """A random tree for each batch row: the depth of each node, and what each sees.  # [B, N], [B, N, N] bool"""
        depths = torch.zeros(self.batch, count, dtype=torch.int64)
        sees = torch.eye(count, dtype=torch.bool).repeat(self.batch, 1, 1)
        for row in range(self.batch):
            for node in range(1, count):
                parent = int(torch.randint(-1, node, (1,), generator=self._numbers))
                if parent >= 0:
                    depths[row, node] = depths[row, parent] + 1
                    sees[row, node] |= sees[row, parent]
        return depths.to(self._device), sees.to(self._device)


_KEPT = ((7, 1, 4), (3, 0, 2), (0, 0, 0))
"""Rows that each batch row commits after each chain of a comparison; the last one is a draft."""


def _compare_step(
    name: str, index: int, networks: tuple[OnnxFeatureNetwork, FeatureNetwork], random: _RandomRows
) -> Iterator[OutputError]:
    """One module over two fillings of a cache, a chain and a tree."""
    graphs, network = networks
    info, device = network.target.info, network.device
    caches = graphs.new_cache(random.batch, 64), network.new_cache(random.batch, 64)
    pairs: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for kept in (*_KEPT, None):
        count = 9 if kept is None else max(kept) or 5
        ahead, mask = (torch.arange(count, device=device), None) if kept is not None else random.tree(count)
        positions = torch.tensor(caches[0].lengths, device=device).unsqueeze(1) + ahead
        tokens, hidden = random.tokens(count, info.vocab_size), random.rows(count, network.shape.hidden_size)
        found = graphs.run(index, Pairs(tokens, hidden, positions), caches[0], mask)
        true = network.run(index, Pairs(tokens, hidden.to(network.dtype), positions), caches[1], mask)
        pairs.setdefault("recycled", []).append((found.recycled, true.recycled))
        pairs.setdefault("scored", []).append((found.scored, true.scored))
        for kind, one, other in zip(("key", "value"), caches[0].layer(0), caches[1].layer(0), strict=True):
            pairs.setdefault(f"present_{kind}.0", []).append((one.clone(), other.clone()))
        for cache in caches:
            cache.keep(kept or (0,) * random.batch)
    for output, each in pairs.items():
        ours, theirs = (torch.cat([part.flatten() for part in side]) for side in zip(*each, strict=True))
        yield OutputError.between((name, output), ours, theirs)

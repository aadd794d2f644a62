"""Block backbones (DFlash, DSpark) as ONNX graphs.

Graph `context`: `features` [B, R, F] to the context rows of all layers. Graph `block`: `tokens` [B, R], the anchor and
mask tokens, to `scored` [B, K, H] and `logits` [B, K, Vd]; where the head is the target's, `block_scored` is the same
without it, for a runtime that has it already. Both have the inputs and slots of `onnx.layers.PassGraph`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specflow.draft.borrowed import borrowed_embedding, borrowed_head
from specflow.draft.nn.context_block import block_positions, block_sights, scale_logits
from specflow.draft.onnx_loop import Emitted
from specflow.draft.onnx_parallel import Trial, write_marginals
from specflow.draft.parallel import Marginals
from specflow.onnx.above import feeds_above
from specflow.onnx.graphs import DraftFacts, OutputError
from specflow.onnx.layers import PassGraph, Stream, add_norm, linear, norm
from specflow.onnx.session import OnnxSession
from specflow.target.cache import KVCache

if TYPE_CHECKING:
    from specflow.draft.backbone_options import BackboneOptions
    from specflow.draft.nn.context_block import BlockLayers
    from specflow.onnx.graphs import GraphSet, Precision
    from specflow.onnx.session import Place
    from specflow.onnx.writer import GraphWriter

__all__ = ["BlockGraphs", "OnnxBlock"]

_WITHOUT_HEAD = "block_scored"
_BIASES = {False: "bias", True: "bias_windowed"}


@dataclass(frozen=True, slots=True)
class BlockGraphs:
    """A `MarginalGraphs` of a block backbone."""

    layers: BlockLayers
    taps: Sequence[int]
    mask_token: int
    slots: int  # of a block
    num_positions: int  # that tokens may stand at, those of a block included
    name: str = "block"

    @property
    def hidden_size(self) -> int:
        return self.layers.shape.hidden_size

    @property
    def facts(self) -> DraftFacts:
        options, vocabulary = self.layers.options, self.layers.vocabulary
        return DraftFacts(
            round=_round(options),
            taps=tuple(self.taps),
            num_layers=options.num_layers,
            block_size=self.slots,
            mask_token=self.mask_token,
            first_slot=options.first_slot,
            window=options.window,
            window_from_anchor=options.window_from == "anchor",
            causal=options.causal,
            to_target=None if vocabulary is None else vocabulary.to_target,
        )

    @property
    def reads_anchors(self) -> bool:
        return True

    def emit(self, writer: GraphWriter, anchors: str = "") -> Emitted:
        """See `MarginalGraphs.emit`."""
        options = self.layers.options
        scored = self._emit_rows(writer, anchors)
        head = borrowed_head(self.layers.target) if self.layers.head is None else self.layers.head
        logits = linear(writer, scored, head, "head", "head")
        if options.logit_scale != 1.0:
            logits = writer.op("Mul", logits, writer.scalar(options.logit_scale))
        if options.logit_cap is not None:
            cap = writer.scalar(options.logit_cap)
            logits = writer.op("Mul", writer.op("Tanh", writer.op("Div", logits, cap)), cap)
        return Emitted(logits, scored, anchors, self.hidden_size, self._count)

    def write(self, graphs: GraphSet) -> None:
        layers = self.layers
        with graphs.graph("context") as writer:
            features = writer.input("features", ("batch", "rows", layers.fusion.in_features))
            rows = PassGraph(writer, layers.rotary, self.num_positions, windowed=())
            context = norm(writer, linear(writer, features, layers.fusion, "fc"), layers.fusion_norm, "hidden_norm")
            for index, layer in enumerate(layers.layers):
                with writer.scope(f"layers.{index}"):
                    rows.write_context(context, layer, index)
        vocabulary = layers.vocabulary
        write_marginals(
            graphs, self, layers.target.info.vocab_size if vocabulary is None else len(vocabulary.to_target)
        )
        if layers.head is None:
            with graphs.graph(_WITHOUT_HEAD) as writer:
                writer.output(self._emit_rows(writer), "scored", ("batch", self._count, self.hidden_size))

    def compare(self, folder: Path, precision: Precision, place: Place) -> Iterator[OutputError]:
        """The context rows of every layer, written in two passes."""
        ours, theirs = self._filled(folder, precision, place)
        for layer in range(len(self.layers.layers)):
            for part, name in enumerate(("key", "value")):
                found, true = (
                    torch.cat([cache.data[layer, part, b, :, :length] for b, length in enumerate(cache.lengths)], dim=1)
                    for cache in (ours, theirs)
                )
                yield OutputError.between(("context", f"present_{name}.{layer}"), found, true)

    def trials(self, folder: Path, precision: Precision, place: Place) -> Iterator[Trial]:
        """See `MarginalGraphs.trials`."""
        ours, theirs = self._filled(folder, precision, place)
        numbers, info = torch.Generator().manual_seed(6), self.layers.target.info
        for slots in (self.slots, self.layers.options.first_slot + 1):
            tokens = torch.full((len(ours.lengths), slots), self.mask_token)
            tokens[:, 0] = torch.randint(info.vocab_size, (len(tokens),), generator=numbers)
            tokens = tokens.to(info.device)
            marginals = self.layers.fill(tokens, theirs)
            feeds = _block_feeds(self.layers.options, tokens, ours)
            yield Trial(feeds, tokens[:, 0].contiguous(), marginals, ours.data)

    def _filled(self, folder: Path, precision: Precision, place: Place) -> tuple[KVCache, KVCache]:
        """A cache with context rows that graphs wrote, and one with those of torch."""
        numbers, device = torch.Generator().manual_seed(5), place.device
        network = OnnxBlock(folder, place, self.layers)
        caches = network.new_cache(3, 64), self.layers.new_cache(3, 64)
        for counts in ((7, 1, 4), (3, 0, 2)):
            size = 3, max(counts), self.layers.fusion.in_features
            features = torch.randn(size, generator=numbers).to(device, precision.dtype)
            positions = block_positions(caches[0].lengths, size[1], device)
            network.inject(features, positions, caches[0])
            self.layers.inject(features.to(self.layers.target.info.dtype), positions, caches[1])
            for cache in caches:
                cache.keep(counts)
        return caches

    @property
    def _count(self) -> str:
        """Name of K: every row of a pass is a draft position, or all but the anchor's."""
        return "rows" if self.layers.options.first_slot == 0 else "drafted"

    def _emit_rows(self, writer: GraphWriter, anchors: str = "") -> str:
        """Rows that the head reads.  # [B, K, H]"""
        layers, first = self.layers, self.layers.options.first_slot
        tokens = self._block_of(writer, anchors) if anchors else writer.input("tokens", ("batch", "rows"), "INT64")
        embedding = borrowed_embedding(layers.target) if layers.embedding is None else layers.embedding
        stream = Stream(writer.op("Gather", writer.weight(embedding, "embedding"), tokens))
        rows = PassGraph(writer, layers.rotary, self.num_positions, layers.options.windowed)
        for index, layer in enumerate(layers.layers):
            with writer.scope(f"layers.{index}"):
                stream = rows.feed(rows.attend(stream, layer, index), layer)
        scored, _ = add_norm(writer, stream, layers.norm, "norm")
        return _from(writer, scored, first) if first else scored

    def _block_of(self, writer: GraphWriter, anchors: str) -> str:
        """Anchors and mask tokens, as many as there are positions.  # [B] -> [B, R]"""
        masks = writer.op("Expand", writer.constant(self.mask_token), writer.op("Shape", "positions"))
        begin = writer.op("Unsqueeze", anchors, writer.constant([1]))
        return writer.op("Concat", begin, _from(writer, masks, 1), axis=1)


class OnnxBlock:
    """A `BlockNetwork` of graphs.

    A head that is the target's stays with the target: its weights are in memory there already.

    Args:
        folder: Where they are.
        place: Where they run.
        layers: What they were written from; it is not kept.

    Raises:
        ModelError: A graph cannot be read or run.
    """

    def __init__(self, folder: Path, place: Place, layers: BlockLayers) -> None:
        self._options, self._shape = layers.options, layers.shape
        self._target = layers.target if layers.head is None else None
        name = "block" if self._target is None else _WITHOUT_HEAD
        self._context = OnnxSession(folder / "context.onnx", place)
        self._block = OnnxSession(folder / f"{name}.onnx", place)
        dtype = self._context.inputs["features"].dtype
        self._like = torch.empty(0, dtype=dtype, device=place.device)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """See `BlockNetwork.new_cache`."""
        shape = self._shape
        cache = KVCache(self._options.num_layers, batch, shape.num_kv_heads, capacity, shape.head_width, self._like)
        cache.trim()  # attention goes over all slots there are
        return cache

    @torch.inference_mode()
    def inject(self, features: Tensor, positions: Tensor, cache: KVCache) -> None:
        """See `BlockNetwork.inject`."""
        feeds = feeds_above(cache, positions.shape[1], {})
        feeds |= {"features": features.contiguous(), "positions": positions.contiguous()}
        self._context.run(feeds, {}, cache.data)

    @torch.inference_mode()
    def fill(self, tokens: Tensor, cache: KVCache) -> Marginals:
        """See `BlockNetwork.fill`."""
        batch, slots = tokens.shape
        size = batch, slots - self._options.first_slot
        names = ("scored",) if self._target is not None else ("scored", "logits")
        wanted = {name: (*size, int(self._block.outputs[name].shape[-1])) for name in names}
        feeds = _block_feeds(self._options, tokens, cache)
        found = self._block.run(feeds, wanted, cache.data)
        scored = found["scored"]
        if self._target is None:
            return Marginals(found["logits"], scored)
        return Marginals(scale_logits(self._options, self._target.score(scored)), scored)


def _block_feeds(options: BackboneOptions, tokens: Tensor, cache: KVCache) -> Mapping[str, Tensor]:
    """Inputs of a block above the committed rows of a cache, but its slots."""
    lengths, slots, device = cache.lengths, tokens.shape[1], tokens.device
    sights = block_sights(options, lengths, slots, device)
    feeds = feeds_above(cache, slots, {_BIASES[windowed]: sight for windowed, sight in sights.items()})
    return feeds | {"tokens": tokens.contiguous(), "positions": block_positions(lengths, slots, device)}


def _from(writer: GraphWriter, rows: str, first: int) -> str:
    """All but the first ones.  # [B, R, ...]"""
    ends = writer.constant([first]), writer.constant([2**62]), writer.constant([1])
    return writer.op("Slice", rows, *ends)


def _round(options: BackboneOptions) -> tuple[str, ...]:
    """See `DraftFacts.round`."""
    seen = [f"`bias` ({_sight(options, windowed=False)})"] if not all(options.windowed) else []
    seen += [f"`bias_windowed` ({_sight(options, windowed=True)})"] if options.window is not None else []
    return (
        "features [B, R, F] are the outputs of the target layers in `taps` (-1: the embedding) side by side, at the "
        "tokens verified last. Run `context` with them, their positions and `starts` [B], the context rows that each "
        "batch row has: it writes one row a token into the slots; past_key.0 and so on become present_key.0 and so on. "
        "Then raise `starts` by the tokens. The anchor, the last token of the text, has no features yet: it is never "
        "context.",
        "tokens [B, R] of a block are the anchor, then `mask_token` in every other of `block_size` slots; positions "
        f"count on from `starts`. What is added to the scores of all slots: {' and '.join(seen)}; 0 where a slot of "
        "the block sees a column, -inf where not. Columns below `starts` are context, those from there on the block.",
        f"Run `block`: logits[:, k - 1] are those of draft position k, from slot {options.first_slot} of the block on. "
        "Or run `draft` (the most likely tokens) or `draft_sampled` (tokens drawn with `uniforms`, numbers in [0, 1), "
        "at `temperature`, above 0): they read `anchors` [B] and fill in the masks; tokens [B, K] are target "
        "ids, logits are corrected.",
        "Nothing of a block is kept: the next context rows go over it, from the same `starts` on.",
    )


def _sight(options: BackboneOptions, windowed: bool) -> str:
    causal = windowed if options.causal is None else options.causal
    inside = "slots of the block up to its own" if causal else "all slots of the block"
    if not windowed:
        return f"all context and {inside}"
    if options.window_from == "anchor":
        return f"the last {options.window} context rows and {inside}"
    return f"of context and {inside} what is less than {options.window} positions away"

"""Drafting with (token, feature) step modules: committed rows read true features, draft rows what was drafted.

Between rounds the caches hold one row for every position whose true feature is known, and none that was drafted: a row
that stood on a drafted feature is run again once its position is committed ("stable" rows of EAGLE).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

from specflow.draft.checkpoint import open_weights, read_options, trained_reader
from specflow.draft.corrected import confidence_of
from specflow.draft.feature_options import FeatureOptions
from specflow.draft.nn.feature_step import FeatureNetwork, NetworkParts, Pairs, StepRows
from specflow.draft.pending import TOGETHER, Pending, pick_features
from specflow.draft.shapes import make_drafter

if TYPE_CHECKING:
    from specflow.draft.base import Drafter, Needs, SourceContext
    from specflow.draft.chain import ConfidenceHead
    from specflow.draft.nn.weights import SeededTensors, WeightReader
    from specflow.draft.onnx_feature import FeatureGraphs
    from specflow.draft.steps import Frontier, Steps
    from specflow.draft.trainable import Trainable
    from specflow.law import DraftVocabulary
    from specflow.target.base import Cache, Target
    from specflow.target.cache import KVCache
    from specflow.types import BlockShape, Entry, Observation

__all__ = ["FeatureModel", "StepNetwork", "complete", "feature_drafter", "feature_graphs", "feature_trainable"]

F = TypeVar("F", bound=FeatureOptions)

CHUNK = 512
"""Most positions of a prompt that run in one pass."""


class StepNetwork(Protocol):
    """Step modules with what stands around them, whatever computes them. No state of requests."""

    @property
    def needs(self) -> Needs: ...

    @property
    def vocabulary(self) -> DraftVocabulary | None: ...

    @property
    def shape(self) -> BlockShape: ...

    @property
    def num_steps(self) -> int:
        """1: one module, run on its own output; more: one a draft position."""

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """A cache for one module, with room for so many positions."""

    def fuse(self, features: Tensor) -> Tensor:
        """Features as the first step reads them.  # [B, R, F] -> [B, R, H]"""

    def run(self, index: int, pairs: Pairs, cache: KVCache, mask: Tensor | None = None) -> StepRows:
        """One pass of a step module; new rows stand above the committed ones of its cache."""

    def score(self, scored: Tensor) -> Tensor:
        """The head.  # [B, R, H] -> [B, R, Vd]"""


class FeatureModel:
    """A feature network with its caches for a batch of requests; a `StepModel`.

    One module runs again and again on its own output. Of several, module j serves draft position j + 1 alone, and its
    committed row at position i holds the token after i + j and what module j - 1 made of position i (2412.19437,
    eq. 21 to 23): it can be run as soon as that token is known, which is j positions behind the first module.

    Args:
        network: Its layers.
        target: Gives embedding, head and sizes.
        max_positions: Positions it was trained for; None: the target's.
    """

    def __init__(self, network: StepNetwork, target: Target, max_positions: int | None = None) -> None:
        self.network = network
        self._info = target.info
        self.most_positions = _positions(max_positions, target)
        self._pending = Pending(partial(pick_features, network.needs))
        self._num_modules = network.num_steps
        self.caches: list[KVCache] = []  # one a module
        self._newest: Tensor  # [J, B, H] what each module passes on from its last committed row
        self._scored: Tensor  # [B, H] what the head reads for the token after the anchor

    @property
    def needs(self) -> Needs:
        return self.network.needs

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        return self.network.vocabulary

    @property
    def most_depth(self) -> int:
        return self._info.context_length if self._num_modules == 1 else self._num_modules

    def reset(self, batch: int, num_nodes: int, cache: Cache) -> None:
        depth = self._num_modules
        like = torch.empty(0, dtype=self._info.dtype, device=self._info.device)
        capacity = cache.capacity + max(num_nodes * depth, TOGETHER)
        self.caches = [self.network.new_cache(batch, capacity) for _ in range(depth)]
        self._newest = like.new_zeros(depth, batch, self.network.shape.hidden_size)
        self._scored = like.new_zeros(batch, self.network.shape.hidden_size)
        self._pending.reset(batch)

    def start(self, row: int, prompt: Sequence[int]) -> None:
        for cache in self.caches:
            cache.clear(row)
        self._pending.start(row)

    def observe(self, observation: Observation, rows: Sequence[int]) -> None:
        self._pending.add(observation, rows)

    def select(self, rows: Sequence[int]) -> None:
        kept = list(rows)
        for cache in self.caches:
            cache.select(kept)
        self._newest, self._scored = self._newest[:, kept], self._scored[kept]
        self._pending.select(kept)

    @torch.inference_mode()
    def open(self, anchors: Sequence[int], active: Sequence[bool]) -> Steps:
        self._catch_up()
        return _Recycled(self) if self._num_modules == 1 else _Serial(self)

    def _catch_up(self) -> None:
        """Run everything observed since the last round, with true features."""
        for rows in self._pending.take():
            for begin in range(0, rows.tokens.shape[1], CHUNK):
                part = slice(begin, begin + CHUNK)
                hidden = self.network.fuse(rows.features[:, part])
                counts = [min(max(count - begin, 0), CHUNK) for count in rows.counts]
                self._commit(rows.row, Pairs(rows.tokens[:, part], hidden, rows.positions[:, part]), counts)

    def _commit(self, row: int | None, pairs: Pairs, counts: Sequence[int]) -> None:
        """Run rows through all modules, each as far as its tokens are known, and keep them.

        Args:
            row: The one batch row they belong to; None: the batch.
            pairs: Rows of the first module, padded.  # [B or 1, R]
            counts: Real rows of each.  # [B or 1]
        """
        for index, whole in enumerate(self.caches):
            cache = whole if row is None else whole.row(row)
            fresh = [length == 0 for length in cache.lengths]
            out = self.network.run(index, pairs, cache)
            cache.keep(counts)
            owners = [b if row is None else row for b, count in enumerate(counts) if count]
            own = [b for b, count in enumerate(counts) if count]
            last = [counts[b] - 1 for b in own]
            before = self._newest[index, [row]] if row is not None else self._newest[index]
            shifted = torch.cat((before.unsqueeze(1), out.recycled[:, :-1]), dim=1)
            self._newest[index, owners] = out.recycled[own, last]
            if index == 0:
                self._scored[owners] = out.scored[own, last]
            if index + 1 < len(self.caches):
                counts = [max(count - first, 0) for count, first in zip(counts, fresh, strict=True)]
                if not any(counts):
                    return
                pairs = _moved(Pairs(pairs.tokens, shifted, (pairs.positions - 1).clamp_min(0)), fresh)


def feature_drafter(
    config: F, context: SourceContext, read_network: Callable[[F, WeightReader, Target], NetworkParts]
) -> Drafter:
    """A source's drafter from its layers: embedding, confidence head and the shape of blocks are added.

    Args:
        config: What the recipe set; a checkpoint fills in the rest.
        context: The target, and how deep blocks get.
        read_network: Makes the layers from options and tensors.

    Raises:
        CheckpointError: The weights do not fit the options or the target.
        GraphError: The options do not fit k, each other or the target.
    """
    onnx = context.takes_onnx(config.runtime)
    options, network, head = _open(config, context, read_network, packed=not onnx)
    runs: StepNetwork = network
    if onnx:
        from specflow.draft.onnx_feature import FeatureGraphs, OnnxFeatureNetwork

        found = FeatureGraphs(network, _positions(options.max_positions, context.target)).find(options, context)
        del runs, network  # the layers have been written; ONNX Runtime maps them from there
        runs = OnnxFeatureNetwork(found, context.target, context.threads)
    return make_drafter(options, FeatureModel(runs, context.target, options.max_positions), context, head)


def feature_graphs(
    config: F, context: SourceContext, read_network: Callable[[F, WeightReader, Target], NetworkParts]
) -> FeatureGraphs:
    """A source's network as something that can be written as ONNX graphs; see `feature_drafter`."""
    from specflow.draft.onnx_feature import FeatureGraphs

    options, network, head = _open(config, context, read_network, packed=False)
    return FeatureGraphs(network, _positions(options.max_positions, context.target), head)


def feature_trainable(
    config: F,
    context: SourceContext,
    tensors: SeededTensors,
    read_network: Callable[[F, WeightReader, Target], NetworkParts],
) -> Trainable:
    """A source's network with weights that can be trained; see `feature_drafter`."""
    from specflow.draft.trainable import Trainable

    target = context.target
    reader = trained_reader(tensors, target)
    network = complete(read_network(config, reader, target), reader, target)
    head = confidence_of(config, reader, network.shape.hidden_size, context.k)
    reader.close()
    return Trainable(network, config, reader, network.needs, network.vocabulary, confidence=head)


def _open(
    config: F,
    context: SourceContext,
    read_network: Callable[[F, WeightReader, Target], NetworkParts],
    packed: bool,
) -> tuple[F, FeatureNetwork, ConfidenceHead | None]:
    """The options with what the checkpoint says filled in, the layers, and the confidence head."""
    target, options = context.target, read_options(config, config.weights)
    reader = open_weights(options.weights, options.seed, target, options.offset_norms, packed)
    network = complete(read_network(options, reader, target), reader, target)
    deepest = network.num_steps if network.num_steps > 1 else context.k
    head = confidence_of(options, reader, network.shape.hidden_size, min(context.k, deepest))
    reader.close()
    return options, network, head


def _positions(most: int | None, target: Target) -> int:
    """Positions that may be drafted at, with a network trained for so many; None: for the target's."""
    return min(most or target.info.context_length, target.info.context_length)


def complete(parts: NetworkParts, reader: WeightReader, target: Target) -> FeatureNetwork:
    """The network from its layers and, where the checkpoint has one, its own embedding."""
    if reader.has("embed_tokens.weight"):
        size = (target.info.vocab_size, parts.shape.hidden_size)
        parts = replace(parts, embedding=reader.take("embed_tokens.weight", size))
    return FeatureNetwork(parts, target)


def _moved(pairs: Pairs, fresh: Sequence[bool]) -> Pairs:
    """Drop the first row where there was none before it to read from."""
    if not any(fresh):
        return pairs
    width = pairs.tokens.shape[1]
    steps = torch.tensor([[min(i + first, width - 1) for i in range(width)] for first in fresh])
    index = steps.to(pairs.tokens.device)
    hidden = pairs.hidden.gather(1, index.unsqueeze(-1).expand_as(pairs.hidden))
    return Pairs(pairs.tokens.gather(1, index), hidden, pairs.positions.gather(1, index))


class _Recycled:
    """Draft rows of one module: each stands on what its parent's row passed on."""

    def __init__(self, model: FeatureModel) -> None:
        self._network = model.network
        self._cache = model.caches[0].fork()
        ends = torch.tensor(self._cache.lengths, device=model._scored.device)
        self._positions = (ends - 1).unsqueeze(1)  # [B, P + 1]
        self._rows = model._newest[0].unsqueeze(1)  # [B, P + 1, H]
        self.hidden = model._scored  # [B, H], then [B, R, H] after a frontier
        self.logits = self._network.score(self.hidden.unsqueeze(1)).squeeze(1)

    @torch.inference_mode()
    def extend(self, tokens: Tensor, frontier: Frontier | None = None) -> Tensor:
        if frontier is None:
            parents, mask = torch.full_like(tokens, self._rows.shape[1] - 1), None
        else:
            parents, mask = frontier.parents, frontier.visible
        hidden = self._rows.gather(1, parents.unsqueeze(-1).expand(-1, -1, self._rows.shape[-1]))
        positions = self._positions.gather(1, parents) + 1
        out = self._network.run(0, Pairs(tokens, hidden, positions), self._cache, mask)
        self._cache.keep([tokens.shape[1]] * tokens.shape[0])
        self._rows = torch.cat((self._rows, out.recycled), dim=1)
        self._positions = torch.cat((self._positions, positions), dim=1)
        self.hidden = out.scored if frontier is not None else out.scored.squeeze(1)
        return self._network.score(out.scored)

    def entry(self, last: Tensor) -> Entry | None:
        return None


class _Serial:
    """Draft rows of several modules.

    Module j reads the whole path to a node, j tokens, at the last j committed positions, and the output of module
    j - 1 there. Rows of one path see each other and what is committed; no row outlives its level.
    """

    def __init__(self, model: FeatureModel) -> None:
        self._network, self._caches, self._newest = model.network, model.caches, model._newest
        batch, width = model._scored.shape
        self._ends = torch.tensor(model.caches[0].lengths, device=model._scored.device)  # [B]
        self._level = 0
        self._first = 0  # number of the level's first row
        self._path = self._ends.new_zeros(batch, 1, 0)  # [B, R, j] tokens drafted to each row of the level
        self._below = model._scored.new_zeros(batch, 1, 0, width)  # [B, R, j, H] what the level's module passes on
        self.hidden = model._scored
        self.logits = self._network.score(self.hidden.unsqueeze(1)).squeeze(1)

    @torch.inference_mode()
    def extend(self, tokens: Tensor, frontier: Frontier | None = None) -> Tensor:
        batch, rows = tokens.shape
        parents = torch.zeros_like(tokens) if frontier is None else frontier.parents - self._first
        each = torch.arange(batch, device=tokens.device).unsqueeze(1)
        self._first += self._path.shape[1]
        self._path = torch.cat((self._path[each, parents], tokens.unsqueeze(-1)), dim=-1)
        known = self._newest[self._level][:, None, None].expand(-1, rows, -1, -1)
        hidden = torch.cat((known, self._below[each, parents]), dim=2)
        self._level += 1
        out = self._network.run(self._level, *self._rows(hidden))
        depth = self._level
        self._below = out.recycled.view(batch, rows, depth, -1)
        scored = out.scored.view(batch, rows, depth, -1)[:, :, -1]
        self.hidden = scored if frontier is not None else scored.squeeze(1)
        return self._network.score(scored)

    def _rows(self, hidden: Tensor) -> tuple[Pairs, KVCache, Tensor]:
        """The level's rows, path by path, their cache, and which of them see each other.  # [B, R, j, H]"""
        _, rows, depth, _ = hidden.shape
        device = hidden.device
        reach = torch.arange(-depth, 0, device=device) + self._ends.unsqueeze(1)  # [B, j] below 0: no such position
        positions = reach.repeat(1, rows)  # [B, R * j]
        paths = torch.arange(rows, device=device).repeat_interleave(depth)
        order = torch.arange(depth, device=device).repeat(rows)
        mask = (paths.unsqueeze(1) == paths) & (order.unsqueeze(1) >= order)
        itself = torch.eye(rows * depth, dtype=torch.bool, device=device)
        mask = mask & (positions >= 0).unsqueeze(1) | itself
        pairs = Pairs(self._path.flatten(1), hidden.flatten(1, 2), positions.clamp_min(0))
        return pairs, self._caches[self._level], mask

    def entry(self, last: Tensor) -> Entry | None:
        return None

"""A target run as ONNX graphs, by ONNX Runtime or OpenVINO."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from specflow.draft.nn.attention import Sight
from specflow.draft.nn.block import RMSNorm
from specflow.errors import ModelError
from specflow.onnx.above import feeds_above
from specflow.onnx.decoder import DecoderPart, head_weight, write_decoder, write_head
from specflow.onnx.graphs import GraphSet, Precision
from specflow.onnx.openvino import OpenVinoSession
from specflow.onnx.screen import screen_refusal, write_screen
from specflow.onnx.screened import SATURATES, ScreenedHead
from specflow.onnx.session import OnnxSession, Place
from specflow.target.architecture import Architecture, info_of
from specflow.target.base import Cache, TargetOptions
from specflow.target.cache import KVCache
from specflow.target.invariance import passes_agree
from specflow.types import Skip, TargetOutput

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from specflow.onnx.graphs import GraphFinder

__all__ = ["ONNX_RUNTIME", "OPENVINO", "GraphPart", "GraphRuntime", "ModelGraphs", "OnnxTarget", "model_graphs"]

_NOTHING = Skip()
_MOST_PARTS = 3
"""Parts of the model that are open at once beside the whole: each holds its weights again."""
_TIES = "rows that change their bits with their number"

GraphPart = DecoderPart | Literal["head", "screen"]
"""What of a model a graph computes."""


@dataclass(frozen=True, slots=True)
class GraphRuntime:
    """What computes graphs."""

    name: str  # of `TargetInfo.runtime`
    title: str
    open: Callable[[Path, Place], OnnxSession | OpenVinoSession]
    plain: bool = False  # it reads graphs that were written so; see `GraphWriter`


ONNX_RUNTIME = GraphRuntime("onnx", "ONNX Runtime", OnnxSession)
OPENVINO = GraphRuntime("openvino", "OpenVINO", OpenVinoSession, plain=True)


@dataclass(frozen=True, slots=True)
class ModelGraphs:
    """A model as graphs, each written when it is first asked for."""

    config: PretrainedConfig
    tensors: Mapping[str, Tensor]
    find: Callable[[GraphPart], Path]  # the `.onnx` file of a part
    runtime: GraphRuntime = ONNX_RUNTIME
    screens: bool = False  # whether the layers, the head and its screen can be had apart


def model_graphs(
    config: PretrainedConfig,
    tensors: Mapping[str, Tensor],
    finder: GraphFinder,
    identity: Mapping[str, object],
    options: TargetOptions,
    runtime: GraphRuntime = ONNX_RUNTIME,
) -> ModelGraphs:
    """Graphs of a model that are kept where a finder keeps them.

    Args:
        config: Of a family that the native target computes.
        tensors: Its weights.
        finder: Where graphs are.
        identity: Of the weights.
        options: Their dtype and quantisation.
        runtime: What they are written for.

    Raises:
        ModelError: There are no graphs in this dtype.
    """
    precision = Precision.named(options.weights)

    def write(part: GraphPart, graphs: GraphSet) -> None:
        with graphs.graph("target", runtime.plain) as writer:
            if part == "head":
                write_head(writer, head_weight(config, tensors))
            elif part == "screen":
                write_screen(writer, head_weight(config, tensors))
            else:
                write_decoder(writer, config, tensors, part)

    def find(part: GraphPart) -> Path:
        named = {**identity, "part": part if isinstance(part, str) else part.label}
        named |= {"operators": "plain"} if runtime.plain else {}
        return finder(named, precision, partial(write, part)) / "target.onnx"

    return ModelGraphs(config, tensors, find, runtime, screens=runtime is ONNX_RUNTIME)


class OnnxTarget:
    """Graphs of a model behind the `Target` protocol.

    The whole model is opened at once; parts of it (skipped layers, early exits) and the head alone when a drafter
    first asks for them. Each is a session with weights of its own. Where a screen of the head pays, the whole model is
    three: its layers, the head, and the screen, which a greedy step reads in place of the head.
    """

    def __init__(self, graphs: ModelGraphs, options: TargetOptions) -> None:
        """Open the whole model.

        Raises:
            CheckpointError: A tensor is missing or has the wrong shape.
            MissingExtra: The runtime is not installed.
            ModelError: The runtime cannot run it, or row invariance was asked for and does not hold.
        """
        self.architecture = arch = Architecture.of(graphs.config)
        self._graphs, self._place = graphs, Place(options.device, torch.get_num_threads())
        self._sessions: dict[GraphPart, OnnxSession | OpenVinoSession] = {}
        self._embedding: Tensor | None = None
        self._norm: RMSNorm | None = None
        self._screened: ScreenedHead | None = None
        unpicked = _screen_refusal(graphs, options) if graphs.screens else ""
        self._divided = graphs.screens and not unpicked
        self.info = replace(info_of(arch, options, graphs.runtime.name), unpicked=unpicked)
        if options.row_invariant is not False and passes_agree(self):
            self.info = replace(self.info, exactness="bit-exact")
        elif options.row_invariant:
            raise ModelError(
                "target.row_invariant",
                f"passes of {options.weights} in {graphs.runtime.title} change their bits with the number of rows",
                "a runtime and dtype where they do not, or row_invariant: auto",
            )
        if self._divided:
            exact = self.info.exactness == "bit-exact"
            self._screened = self._open_screen() if exact else None
            unpicked = "" if self._screened is not None else SATURATES if exact else _TIES
            self.info = replace(self.info, picks=self._screened is not None, unpicked=unpicked)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        shape, like = self.architecture.shape, torch.empty(0, dtype=self.info.dtype, device=self.info.device)
        cache = KVCache(self.info.num_layers, batch, shape.num_kv_heads, capacity, shape.head_width, like=like)
        cache.trim()  # attention goes over all slots there are
        return cache

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: Cache,
        mask: Tensor | None = None,
        taps: Sequence[int] = (),
        layers: tuple[int, int] | None = None,
        skip: Skip | None = None,
        hidden_in: Tensor | None = None,
        rows: Literal["all", "last", "none"] = "all",
    ) -> TargetOutput:
        """See `Target.forward`."""
        assert isinstance(cache, KVCache)
        batch, width = tokens.shape
        first, end = layers or (0, self.info.num_layers)
        part = DecoderPart(first, end, _within(skip or _NOTHING, first, end), hidden_in is not None)
        part = replace(part, headless=self._divided and part == DecoderPart(0, self.info.num_layers))
        session = self._session(part)
        windows = {"bias": None, "bias_windowed": self.architecture.window}
        sights = {
            name: Sight(cache.lengths, positions, mask, window)
            for name, window in windows.items()
            if name in session.inputs
        }
        scored = torch.arange({"all": 0, "last": width - 1, "none": width}[rows], width, device=self.info.device)
        feeds = feeds_above(cache, width, sights) | {"positions": positions.contiguous()}
        feeds |= {} if part.headless else {"scored": scored}
        entry = ("tokens", tokens) if hidden_in is None else ("hidden_in", hidden_in)
        feeds[entry[0]] = entry[1].contiguous()
        states = (batch, width, self.info.hidden_size)
        wanted = {"hidden_pre": states, "hidden_post": states, **{f"tap.{tap}": states for tap in taps}}
        if len(scored) and not part.headless:
            wanted["logits"] = (batch, len(scored), self.info.vocab_size)
        found = session.run(feeds, wanted, cache.data)
        return TargetOutput(
            logits=self._logits(found, scored),
            taps={tap: found[f"tap.{tap}"] for tap in taps},
            hidden_pre=found["hidden_pre"],
            hidden_post=found["hidden_post"],
        )

    def _logits(self, found: Mapping[str, Tensor], scored: Tensor) -> Tensor:
        """What the head says of these rows of a pass, where the pass did not say it itself.  # [X] -> [B, X, V]"""
        if "logits" in found:
            return found["logits"]
        normed = found["hidden_post"]
        return self.score(normed[:, scored]) if len(scored) else normed.new_empty(len(normed), 0, self.info.vocab_size)

    def embed(self, tokens: Tensor) -> Tensor:
        if self._embedding is None:
            self._embedding = self._graphs.tensors["model.embed_tokens.weight"].to(self.info.device)
        return F.embedding(tokens.clamp_min(0), self._embedding).to(self.info.dtype)

    def norm(self, hidden: Tensor) -> Tensor:
        if self._norm is None:
            weight = self._graphs.tensors["model.norm.weight"].to(self.info.device, self.info.dtype)
            self._norm = RMSNorm(weight, self.architecture.shape.eps)
        normed: Tensor = self._norm(hidden)
        return normed

    @torch.inference_mode()
    def score(self, normed: Tensor) -> Tensor:
        rows = normed.reshape(1, -1, normed.shape[-1]).contiguous()
        shape = (1, rows.shape[1], self.info.vocab_size)
        logits = self._session("head").run({"scored": rows}, {"logits": shape})["logits"]
        return logits.view(*normed.shape[:-1], shape[-1])

    @torch.inference_mode()
    def pick(self, normed: Tensor) -> Tensor:
        """See `PickingTarget.pick`."""
        assert self._screened is not None, "there is no screen: info.picks says so"
        rows = normed.reshape(-1, normed.shape[-1]).contiguous()
        return self._screened.pick(rows).view(normed.shape[:-1])

    def _open_screen(self) -> ScreenedHead | None:
        """None where its bounds do not hold: there the full head does it all."""
        session = OnnxSession(self._graphs.find("screen"), self._place)
        head = ScreenedHead(session, head_weight(self._graphs.config, self._graphs.tensors), self.score)
        return head if head.holds() else None

    def _session(self, part: GraphPart) -> OnnxSession | OpenVinoSession:
        whole = DecoderPart(0, self.info.num_layers, headless=self._divided)
        key = whole if part == DecoderPart() else part
        if key not in self._sessions:
            parts = [each for each in self._sessions if each not in (whole, "head")]
            if len(parts) >= _MOST_PARTS:
                del self._sessions[parts[0]]
            self._sessions[key] = self._graphs.runtime.open(self._graphs.find(key), self._place)
        return self._sessions[key]


def _screen_refusal(graphs: ModelGraphs, options: TargetOptions) -> str:
    """Why a screen of the head would not pay; empty where it may: of a large one, in float32, on a CPU."""
    if options.weights != "float32":
        return f"{options.weights} weights"
    if options.device.type != "cpu":
        return f"device {options.device.type}"
    if options.row_invariant is False:
        return "row_invariant: false"
    return screen_refusal(head_weight(graphs.config, graphs.tensors))


def _within(skip: Skip, first: int, end: int) -> Skip:
    """The part of a skip set that lies in a range of layers."""
    kept = range(first, end)
    return Skip(*(frozenset(layer for layer in part if layer in kept) for part in (skip.attention, skip.mlp)))

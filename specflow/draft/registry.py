"""Finds draft sources: one file each in `draft/sources/`, or an entry point of an outside package. No torch.

A source file keeps a pydantic config and a constant `SOURCE = SourceInfo(...)` at module level and imports torch only
inside functions or under TYPE_CHECKING, so recipes are checked without it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel

from specflow.errors import RecipeError

if TYPE_CHECKING:
    from specflow.draft.base import Drafter, SourceContext
    from specflow.draft.nn.weights import SeededTensors
    from specflow.draft.trainable import Trainable
    from specflow.onnx.graphs import NetworkGraphs

__all__ = ["ENTRY_POINTS", "Axis", "SourceInfo", "SourceRegistry", "discover"]

ENTRY_POINTS = "specflow.sources"

Axis = Literal["history", "small_model", "skipped_layers", "target_features"]
"""Where a draft gets its information: earlier text, another model, part of the target, or its hidden states."""


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """What a source says about itself before anything is loaded.

    Args:
        name: Its name in recipes (`draft.source`).
        config: Model of its options; they stand beside `draft.k` in a recipe.
        dependency: Dependencies it works with; the first is the default.
        build: Makes the drafter from its options and what is loaded. Heavy imports belong inside it.
        axis: Where the draft gets its information.
        offers: What a dependency may read from it: "tokens" (a continuation to copy), "logits" (of the next position,
            one step at a time), "marginals" (of all positions of the block at once), "match_lengths" (how much text a
            continuation rests on).
        law: "point" where tokens follow from their prefix, so that their law is one-hot; "sampled" where blocks carry
            the law their tokens were sampled from; "unknown" where they cannot.
        reads: What it learns from a commit: "tokens", and "features" where it drafts from target features
            (a config field `taps` then names the layers).
        confidence_from: The most that the confidence of a node depends on with any options, as in `DraftBlock`; None
            where it has none.
        remembers: Name of a yes-or-no option with which drafts depend on earlier requests; None where none has that.
        graphs: Makes the network that can be written as ONNX graphs, from the arguments of `build`; None where there is
            no network.
        trainable: Makes the network with weights that can be trained, from the arguments of `build` and the tensors
            that training begins with; None where there is nothing to train.
        untrained: Methods of it that have no weights.
        checkpoint: Option that names trained weights.
        of_new: Options that shape new weights alone: where a checkpoint is named they are not set.
        methods: Preset name (`draft.method`) -> options it stands for; without any, the source's name is the preset.
    """

    name: str
    config: type[BaseModel]
    dependency: tuple[str, ...]
    build: Callable[[Any, SourceContext], Drafter]
    axis: Axis
    offers: tuple[str, ...] = ("tokens",)
    law: Literal["point", "sampled", "unknown"] = "point"
    reads: tuple[Literal["tokens", "features"], ...] = ("tokens",)
    confidence_from: Literal["context", "prefix", "self"] | None = None
    remembers: str | None = None
    graphs: Callable[[Any, SourceContext], NetworkGraphs] | None = None
    trainable: Callable[[Any, SourceContext, SeededTensors], Trainable] | None = None
    untrained: tuple[str, ...] = ()
    checkpoint: str = "weights"
    of_new: tuple[str, ...] = ()
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def presets(self) -> dict[str, dict[str, Any]]:
        """Method name -> options it fixes."""
        return {name: dict(options) for name, options in self.methods.items()} or {self.name: {}}


class SourceRegistry(Mapping[str, SourceInfo]):
    """Sources by name. Two sources of one name are refused: neither may win silently."""

    def __init__(self) -> None:
        self._sources: dict[str, SourceInfo] = {}

    def add(self, info: object, origin: str) -> None:
        """Register a source; `origin` names the module in errors."""
        if not isinstance(info, SourceInfo):
            raise RecipeError(origin, f"a {type(info).__name__}", "a SourceInfo", "a source file needs SOURCE")
        if info.name in self._sources:
            raise RecipeError(origin, f"a second source named {info.name!r}", "one source of each name")
        self._sources[info.name] = info

    def __getitem__(self, name: str) -> SourceInfo:
        return self._sources[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


@cache
def discover() -> SourceRegistry:
    """All sources: the files of `draft/sources/` in alphabetical order, then installed entry points."""
    from specflow.draft import sources

    registry = SourceRegistry()
    for module in sorted(pkgutil.iter_modules(sources.__path__), key=lambda found: found.name):
        if not module.name.startswith("_"):
            path = f"{sources.__name__}.{module.name}"
            registry.add(getattr(importlib.import_module(path), "SOURCE", None), path)
    for point in entry_points(group=ENTRY_POINTS):
        registry.add(point.load(), f"entry point {point.name} ({point.value})")
    return registry

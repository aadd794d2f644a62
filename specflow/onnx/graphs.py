"""A folder of graphs over one file of weights, in one precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, get_args

import torch

from specflow.errors import ModelError
from specflow.onnx.writer import FloatName, GraphWriter, WeightFile

if TYPE_CHECKING:
    from types import TracebackType

    from torch import Tensor

    from specflow.onnx.quantize import QuantForm
    from specflow.onnx.session import Place

__all__ = ["DraftFacts", "GraphFinder", "GraphSet", "NetworkGraphs", "OutputError", "Precision", "difference"]

WEIGHTS = "weights.bin"
"""File of a folder's weights."""


@dataclass(frozen=True, slots=True)
class Precision:
    """Types of a graph's numbers."""

    name: str  # float32, float16, bfloat16, int8 or int4
    floats: FloatName = "float32"  # activations, caches and all that is not quantised
    forms: Mapping[str, QuantForm] = field(default_factory=dict)  # of linear layers, by kind

    @classmethod
    def named(cls, name: str) -> Precision:
        """The precision of a dtype's name.

        Raises:
            ModelError: ONNX graphs are not written in it.
        """
        if name in get_args(FloatName):
            return cls(name, name)  # type: ignore[arg-type]
        from specflow.onnx.quantize import FORMS

        if name not in FORMS:
            expected = f"one of {', '.join((*get_args(FloatName), *FORMS))}"
            raise ModelError("dtype", f"ONNX graphs are not written in {name}", expected)
        return cls(name, forms=FORMS[name])

    @property
    def quantization(self) -> str | None:
        """Its name, where weights are quantised."""
        return self.name if self.forms else None

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and caches."""
        found: torch.dtype = getattr(torch, self.floats)
        return found


class GraphSet:
    """Graphs written side by side into one folder; a context manager that closes their weights.

    Args:
        folder: An existing one.
        precision: Of all of them.
    """

    def __init__(self, folder: Path, precision: Precision) -> None:
        self.folder, self.precision = folder, precision
        self.names: list[str] = []
        self._weights = WeightFile(folder / WEIGHTS)

    @contextmanager
    def graph(self, name: str, plain: bool = False) -> Iterator[GraphWriter]:
        """A graph, saved as `<name>.onnx` when the block ends; see `GraphWriter` for `plain`."""
        writer = GraphWriter(name, self._weights, self.precision.floats, self.precision.forms, plain)
        yield writer
        writer.save(self.folder / f"{name}.onnx")
        self.names.append(name)

    def __enter__(self) -> GraphSet:
        self._weights.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._weights.__exit__(kind, error, trace)


GraphFinder = Callable[[Mapping[str, object], Precision, Callable[[GraphSet], None]], Path]
"""From what identifies some graphs (weights by content, options), a precision, and how they are written, to the folder
that holds them: written now, or once before. See `onnx.store`."""


@dataclass(frozen=True, slots=True)
class OutputError:
    """How far a graph's output is from torch's."""

    graph: str
    output: str
    largest: float  # largest absolute difference
    relative: float  # that, over the largest absolute value of torch's output
    inputs: str  # "random" or "real"

    @classmethod
    def between(cls, output: tuple[str, str], found: Tensor, true: Tensor, inputs: str = "random") -> OutputError:
        """The error of one output of one graph (their names), given what torch makes of the same inputs."""
        return cls.scaled(output, difference(found, true), float(true.abs().max()), inputs)

    @classmethod
    def scaled(cls, output: tuple[str, str], largest: float, most: float, inputs: str = "random") -> OutputError:
        """The same from the largest absolute difference and the largest absolute value of torch's output."""
        return cls(*output, largest, largest / most if 0 < most < inf else largest, inputs)


def difference(found: Tensor, true: Tensor) -> float:
    """The largest absolute difference; infinite where either is not finite.

    What is not a number would be lost among numbers: it is larger than none of them.
    """
    largest = float((found.double() - true.double()).abs().max())
    return largest if isfinite(largest) else inf


@dataclass(frozen=True, slots=True)
class DraftFacts:
    """What a reader of a drafter's graphs must know; goes into the manifest."""

    round: tuple[str, ...]  # how a round feeds the graphs, step by step, in plain words
    taps: tuple[int, ...] = ()  # target layers whose outputs are read (-1: embedding)
    hidden: str | None = None  # "hidden_pre" or "hidden_post", where one of the target's last states is read
    num_layers: int = 0  # with a cache
    block_size: int | None = None  # slots of a block that is filled at once
    mask_token: int | None = None
    first_slot: int = 0  # of a block, whose logits belong to draft position 1
    window: int | None = None  # positions that layers with a sliding window see
    window_from_anchor: bool = False  # of a block: the window ends before the anchor for all slots
    causal: bool | None = None  # whether a slot of a block sees none that follow; None: where there is a window
    target_cache: bool = False  # past rows are the target's own, and stand in its slots
    to_target: Tensor | None = None  # [Vd] target id of every draft id; None: they are the same


class NetworkGraphs(Protocol):
    """A drafting network that can be written as graphs; a source makes it from its options (`SourceInfo.graphs`)."""

    @property
    def facts(self) -> DraftFacts: ...

    def write(self, graphs: GraphSet) -> None:
        """Write all graphs. Those that score tokens include the head, the target's where it has none of its own."""

    def compare(self, folder: Path, precision: Precision, place: Place) -> Iterator[OutputError]:
        """Run the graphs of a folder against the torch network they were written from.

        Random rows over a cache that is filled in two passes, several batch rows of different lengths, a chain and a
        tree; every output.
        """

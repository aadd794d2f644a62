"""Correctors as ONNX: operators for graphs that contain one, and the graph `corrector` behind the same protocol.

Graph `corrector`: `tokens` [B, R] int64, the token before each row's position; `scored` [B, R, H] where the corrector
reads hidden rows; `state` [B, R, X] where it has one; to `bias` [B, R, Vd] and `next_state` [B, R, X].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specflow.draft.nn.corrector import GatedCorrector, MarkovCorrector, RNNCorrector
from specflow.onnx.graphs import OutputError
from specflow.onnx.layers import linear
from specflow.onnx.session import OnnxSession

if TYPE_CHECKING:
    from pathlib import Path

    from specflow.draft.nn.corrector import TableCorrector
    from specflow.onnx.graphs import GraphSet, Precision
    from specflow.onnx.session import Place
    from specflow.onnx.writer import GraphWriter

__all__ = [
    "OnnxCorrector",
    "compare_corrector",
    "emit_correction",
    "reads_hidden",
    "state_width",
    "token_rows",
    "write_corrector",
]


def reads_hidden(corrector: TableCorrector) -> bool:
    """Whether the bias depends on the position's hidden row."""
    return not isinstance(corrector, MarkovCorrector)


def state_width(corrector: TableCorrector) -> int:
    """X."""
    return int(corrector.begin(1).shape[-1])


def token_rows(writer: GraphWriter, corrector: TableCorrector, tokens: str) -> str:
    """W1 of target ids.  # [...] -> [..., r]"""
    return writer.op("Gather", writer.weight(corrector.table, "corrector.table", scoped=False), tokens)


def emit_correction(
    writer: GraphWriter, corrector: TableCorrector, tokens: str, hidden: str, state: str
) -> tuple[str, str]:
    """The operators of `Corrector.correct`, over any leading dimensions.

    Args:
        writer: The graph.
        corrector: One of `nn.corrector`, unpacked.
        tokens: Target ids before each position.  # [...]
        hidden: Rows of the position; empty where they are not read.  # [..., H]
        state: Before the position; empty where there is none.  # [..., X]

    Returns:
        Bias [..., Vd], and the state after the position.
    """
    with writer.scope("corrector"):
        row = token_rows(writer, corrector, tokens)
        if isinstance(corrector, RNNCorrector):
            row, state = _step_state(writer, corrector, row, hidden, state)
        elif isinstance(corrector, GatedCorrector):
            gate = linear(writer, writer.op("Concat", hidden, row, axis=-1), corrector.gate, "gate")
            row = writer.op("Mul", writer.op("Sigmoid", gate), row)
        return linear(writer, row, corrector.out, "out", "head"), state


def _step_state(writer: GraphWriter, corrector: RNNCorrector, row: str, hidden: str, state: str) -> tuple[str, str]:
    """What the output layer reads, and the state after the position.  # [..., r] each"""
    joint = linear(writer, writer.op("Concat", state, row, hidden, axis=-1), corrector.joint, "joint")
    gate, candidate, output = writer.ops("Split", 3, joint, axis=-1, num_outputs=3)
    kept, fresh = writer.op("Sigmoid", gate), writer.op("Tanh", candidate)
    change = writer.op("Mul", kept, writer.op("Sub", state, fresh))
    return writer.op("Tanh", output), writer.op("Add", fresh, change)


def write_corrector(graphs: GraphSet, corrector: TableCorrector, hidden_size: int) -> None:
    """Write the graph `corrector`."""
    drafted, width = corrector.out.out_features, state_width(corrector)
    with graphs.graph("corrector") as writer:
        tokens = writer.input("tokens", ("batch", "rows"), "INT64")
        hidden = writer.input("scored", ("batch", "rows", hidden_size)) if reads_hidden(corrector) else ""
        state = writer.input("state", ("batch", "rows", width)) if width else ""
        bias, after = emit_correction(writer, corrector, tokens, hidden, state)
        writer.output(bias, "bias", ("batch", "rows", drafted))
        if width:
            writer.output(after, "next_state", ("batch", "rows", width))


class OnnxCorrector:
    """A `Corrector` that ONNX Runtime computes.

    Args:
        folder: With the graph `corrector`.
        place: Where it runs.

    Raises:
        ModelError: The graph cannot be read or run.
    """

    def __init__(self, folder: Path, place: Place) -> None:
        self._session = session = OnnxSession(folder / "corrector.onnx", place)
        bias, state = session.outputs["bias"], session.outputs.get("next_state")
        self._drafted = int(bias.shape[-1])
        self._width = 0 if state is None else int(state.shape[-1])
        self._like = torch.empty(0, dtype=bias.dtype, device=place.device)

    def begin(self, batch: int) -> Tensor:
        """See `Corrector.begin`.  # [B, X]"""
        return self._like.new_zeros(batch, self._width)

    def correct(self, previous: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """See `Corrector.correct`."""
        offered = {"tokens": previous, "scored": hidden, "state": state}
        feeds = {name: tensor.contiguous() for name, tensor in offered.items() if name in self._session.inputs}
        wanted = {"bias": (*previous.shape, self._drafted)}
        if self._width:
            wanted["next_state"] = (*previous.shape, self._width)
        found = self._session.run(feeds, wanted)
        return found["bias"], found.get("next_state", state)


@torch.inference_mode()
def compare_corrector(
    corrector: TableCorrector, hidden_size: int, folder: Path, precision: Precision, place: Place
) -> Iterator[OutputError]:
    """The graph against the corrector it was written from, on random rows of a small tree."""
    numbers, batch, rows = torch.Generator().manual_seed(2), 3, 4
    table, graph = corrector.table, OnnxCorrector(folder, place)
    tokens = torch.randint(len(table), (batch, rows), generator=numbers).to(table.device)
    hidden = torch.randn(batch, rows, hidden_size, generator=numbers).to(table.device, precision.dtype)
    state = torch.rand(batch, rows, state_width(corrector), generator=numbers).to(table.device, precision.dtype)
    expected = corrector.correct(tokens, hidden.to(table.dtype), state.to(table.dtype))
    found = graph.correct(tokens, hidden, state)
    yield OutputError.between(("corrector", "bias"), found[0], expected[0])
    if expected[1].numel():
        yield OutputError.between(("corrector", "next_state"), found[1], expected[1])

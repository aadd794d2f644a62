"""Medusa heads as ONNX graphs.

Graph `heads`: `hidden` [B, H] to `scored` [B, K, H] and `logits` [B, K, Vd]. Where the target's whole head serves them
all, `heads_scored` is the same without it, for a runtime that has it already.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specflow.draft.borrowed import borrowed_head, borrowed_rows
from specflow.draft.nn.medusa import Projection
from specflow.draft.onnx_loop import Emitted
from specflow.draft.onnx_parallel import Trial, write_marginals
from specflow.draft.parallel import Marginals
from specflow.onnx.graphs import DraftFacts
from specflow.onnx.layers import linear
from specflow.onnx.session import OnnxSession

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specflow.draft.nn.linear import Linear
    from specflow.draft.nn.medusa import MedusaHeads, ResidualBlock
    from specflow.onnx.graphs import GraphSet, OutputError, Precision
    from specflow.onnx.session import Place
    from specflow.onnx.writer import GraphWriter
    from specflow.target.base import Target

__all__ = ["HeadGraphs", "OnnxHeads"]

_WITHOUT_HEAD = "heads_scored"
_ROUND = (
    "hidden [B, H] is hidden_post, the target's last state after its final norm, at the newest verified position: the "
    "one before the anchor, from which the target chose the anchor.",
    "Run `heads`: logits[:, k - 1] are those of draft position k, the k-th token after the anchor.",
    "Or run `draft` (the most likely tokens) or `draft_sampled` (tokens drawn with `uniforms`, numbers in [0, 1), at "
    "`temperature`, above 0): tokens [B, K] are target ids, logits are corrected. `anchors` [B], where it is an input, "
    "is the last committed token of each row.",
)


@dataclass(frozen=True, slots=True)
class HeadGraphs:
    """A `MarginalGraphs` of Medusa heads."""

    heads: MedusaHeads
    target: Target
    to_target: Tensor | None = None  # [Vd]
    name: str = "heads"

    @property
    def hidden_size(self) -> int:
        return self.target.info.hidden_size

    @property
    def facts(self) -> DraftFacts:
        return DraftFacts(round=_ROUND, hidden="hidden_post", to_target=self.to_target)

    @property
    def reads_anchors(self) -> bool:
        return False

    def emit(self, writer: GraphWriter, anchors: str = "") -> Emitted:
        """See `MarginalGraphs.emit`."""
        scored, rows = self._emit_rows(writer)
        if self.heads.outputs is None:
            logits = linear(writer, scored, self._shared_head(), "head", "head")
        else:
            each = [
                linear(writer, row, output, f"heads.{k}.output", "head")  # type: ignore[arg-type]
                for k, (row, output) in enumerate(zip(rows, self.heads.outputs, strict=True))
            ]
            logits = _stack(writer, each)
        return Emitted(logits, scored, anchors, self.hidden_size, len(rows))

    def write(self, graphs: GraphSet) -> None:
        write_marginals(graphs, self, self._num_outputs)
        if self.heads.outputs is None and self.to_target is None:
            with graphs.graph(_WITHOUT_HEAD) as writer:
                scored, rows = self._emit_rows(writer)
                writer.output(scored, "scored", ("batch", len(rows), self.hidden_size))

    def compare(self, folder: Path, precision: Precision, place: Place) -> Iterator[OutputError]:
        """Nothing goes before a block."""
        return iter(())

    def trials(self, folder: Path, precision: Precision, place: Place) -> Iterator[Trial]:
        """See `MarginalGraphs.trials`: the heads are as many as they are."""
        info, numbers = self.target.info, torch.Generator().manual_seed(1)
        hidden = torch.randn(3, info.hidden_size, generator=numbers).to(info.device, precision.dtype)
        anchors = torch.randint(info.vocab_size, (3,), generator=numbers).to(info.device)
        yield Trial({"hidden": hidden}, anchors, Marginals(*self.heads(hidden.to(info.dtype))))

    @property
    def _num_outputs(self) -> int:
        return self.target.info.vocab_size if self.to_target is None else len(self.to_target)

    def _emit_rows(self, writer: GraphWriter) -> tuple[str, list[str]]:
        """Rows that output layers read, together and one by one.  # [B, K, H], K of [B, H]"""
        hidden = writer.input("hidden", ("batch", self.hidden_size))
        rows = []
        for k, blocks in enumerate(self.heads.blocks):
            row = hidden
            layers: Sequence[ResidualBlock | Projection] = blocks  # type: ignore[assignment]
            for j, block in enumerate(layers):
                with writer.scope(f"heads.{k}.{j}"):
                    made = linear(writer, row, block.linear, "linear")
                    if isinstance(block, Projection):
                        row = made
                    else:
                        row = writer.op("Add", row, writer.op("Mul", made, writer.op("Sigmoid", made)))
            rows.append(row)
        return _stack(writer, rows), rows

    def _shared_head(self) -> Linear:
        """The target's head, over the ids that are drafted."""
        return borrowed_head(self.target) if self.to_target is None else borrowed_rows(self.target, self.to_target)


class OnnxHeads:
    """Graphs in the place of `MedusaHeads`, for one row each request.

    Args:
        folder: Where they are.
        place: Where they run.
        score: The target's head, where it serves as it is; None: the graph holds what makes logits.

    Raises:
        ModelError: The graph cannot be read or run.
    """

    def __init__(self, folder: Path, place: Place, score: Callable[[Tensor], Tensor] | None) -> None:
        name = "heads" if score is None else _WITHOUT_HEAD
        self._session, self._score = OnnxSession(folder / f"{name}.onnx", place), score

    def __call__(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and hidden rows of every head.  # [B, H] -> [B, K, Vd], [B, K, H]"""
        outputs = self._session.outputs
        wanted = {name: (len(features), *map(int, value.shape[1:])) for name, value in outputs.items()}
        found = self._session.run({"hidden": features.contiguous()}, wanted)
        hidden = found["scored"]
        return found["logits"] if self._score is None else self._score(hidden), hidden


def _stack(writer: GraphWriter, rows: list[str]) -> str:
    """# K of [B, X] -> [B, K, X]"""
    axis = writer.constant([1])
    return writer.op("Concat", *(writer.op("Unsqueeze", row, axis) for row in rows), axis=1)

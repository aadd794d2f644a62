"""The whole round of a parallel source as operators: marginals, then tokens one by one where a corrector ties them.

Greedy: the arg-max of each position, the lowest id of equals. Sampled: the first id at which the running sum of
softmax(logits / temperature) exceeds a given number times the whole, as `sampling.draw_tokens` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from specflow.draft.onnx_corrector import emit_correction, reads_hidden, state_width, token_rows

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.draft.nn.confidence import LinearConfidence
    from specflow.draft.nn.corrector import TableCorrector
    from specflow.onnx.writer import GraphWriter

__all__ = ["DraftHeads", "Emitted", "emit_draft", "emit_odds"]


@dataclass(frozen=True, slots=True)
class DraftHeads:
    """What stands on a network's marginals; layers unpacked."""

    corrector: TableCorrector | None
    confidence: LinearConfidence | None
    vocab_size: int  # V
    to_target: Tensor | None = None  # [Vd] target id of every draft id; None: they are the same

    @property
    def drafted(self) -> int:
        """Vd."""
        return self.vocab_size if self.to_target is None else len(self.to_target)

    def sure_of_tokens(self, hidden_size: int) -> bool:
        """Whether the confidence head reads the token before."""
        return self.confidence is not None and self.confidence.proj.in_features > hidden_size

    def reads_anchors(self, hidden_size: int) -> bool:
        """Whether anything reads the token before the first position."""
        return self.corrector is not None or self.sure_of_tokens(hidden_size)


@dataclass(frozen=True, slots=True)
class Emitted:
    """Marginals of a graph in the making."""

    logits: str  # [B, K, Vd]
    scored: str  # [B, K, H]
    anchors: str  # [B] int64; empty where nothing reads them
    hidden_size: int  # H
    count: int | str  # K, or its dimension's name


@dataclass(frozen=True, slots=True)
class _Numbers:
    """What sampled choices are made with."""

    uniforms: str  # [B, K] or [B] float64
    temperature: str  # [1] float32


def emit_draft(writer: GraphWriter, marginals: Emitted, heads: DraftHeads, sampled: bool) -> None:
    """From marginals to the outputs `tokens` [B, K], `logits` [B, K, Vd] and, with a head, `confidence` [B, K].

    Args:
        writer: The graph that has the marginals.
        marginals: Of the block.
        heads: What stands on them.
        sampled: Draw with inputs `uniforms` [B, K] and `temperature` [1]; false takes the most likely token.
    """
    numbers = None
    size = ("batch", marginals.count)
    if sampled:
        numbers = _Numbers(writer.input("uniforms", size, "DOUBLE"), writer.input("temperature", (1,), "FLOAT"))
    if heads.corrector is None:
        tokens, logits = _choose(writer, marginals.logits, heads, numbers), marginals.logits
    else:
        tokens, logits = _emit_scan(writer, marginals, heads, numbers)
    writer.output(tokens, "tokens", size, "INT64")
    writer.output(logits, "logits", (*size, heads.drafted))
    if heads.confidence is not None:
        writer.output(_emit_confidence(writer, marginals, heads, tokens), "confidence", size, "FLOAT")


def _emit_scan(writer: GraphWriter, marginals: Emitted, heads: DraftHeads, numbers: _Numbers | None) -> tuple[str, str]:
    """Position by position, each corrected by the token before it.  # [B, K], [B, K, Vd]"""
    corrector = heads.corrector
    assert corrector is not None
    width = state_width(corrector)
    state = [_zeros(writer, marginals.anchors, width)] if width else []
    scanned = {"logits": marginals.logits}
    if reads_hidden(corrector):
        scanned["scored"] = marginals.scored
    if numbers is not None:
        scanned["uniforms"] = numbers.uniforms
    with writer.body("positions") as body:
        before = writer.input("before", ("batch",), "INT64")
        state_in = writer.input("state_before", ("batch", width)) if width else ""
        logits = writer.input("marginal", ("batch", heads.drafted))
        row = writer.input("scored_row", ("batch", marginals.hidden_size)) if "scored" in scanned else ""
        drawn = None
        if numbers is not None:
            drawn = _Numbers(writer.input("uniform", ("batch",), "DOUBLE"), numbers.temperature)
        bias, after = emit_correction(writer, corrector, before, row, state_in)
        corrected = writer.op("Add", logits, bias)
        token = _choose(writer, corrected, heads, drawn)
        writer.output(token, "token", ("batch",), "INT64")
        if width:
            writer.output(after, "state_after", ("batch", width))
        writer.output(token, "token_row", ("batch",), "INT64")
        writer.output(corrected, "corrected", ("batch", heads.drafted))
    axes = [1] * len(scanned)
    results = writer.ops(
        "Scan",
        len(state) + 3,
        marginals.anchors,
        *state,
        *scanned.values(),
        body=body,
        num_scan_inputs=len(scanned),
        scan_input_axes=axes,
        scan_output_axes=[1, 1],
    )
    return results[-2], results[-1]


def _choose(writer: GraphWriter, logits: str, heads: DraftHeads, numbers: _Numbers | None) -> str:
    """Target ids.  # [..., Vd] -> [...] int64"""
    ids = writer.op("ArgMax", logits, axis=-1, keepdims=0) if numbers is None else _draw(writer, logits, numbers)
    if heads.to_target is None:
        return ids
    table = writer.weight(heads.to_target.cpu().numpy().astype(np.int64), "to_target", scoped=False)
    return writer.op("Gather", table, ids)


def _draw(writer: GraphWriter, logits: str, numbers: _Numbers) -> str:
    """Draft ids by inverse cumulative sums: how many ids lie wholly below the mass, those of no weight among them.

    # [..., Vd] -> [...] int64
    """
    last = writer.constant(np.array(-1))
    axis = writer.constant([-1])
    scaled = writer.op("Div", _cast(writer, logits, "FLOAT"), numbers.temperature)
    probs = _cast(writer, writer.op("Softmax", scaled, axis=-1), "DOUBLE")
    sums = writer.op("CumSum", probs, last)
    whole = writer.op("ReduceMax", sums, axis, keepdims=1)
    mass = writer.op("Mul", writer.op("Unsqueeze", numbers.uniforms, axis), whole)
    # A mass that rounding took to the whole must not lead past the last id of any weight.
    below = writer.op("And", writer.op("LessOrEqual", sums, mass), writer.op("Less", sums, whole))
    return writer.op("ReduceSum", _cast(writer, below, "INT64"), axis, keepdims=0)


def _emit_confidence(writer: GraphWriter, marginals: Emitted, heads: DraftHeads, tokens: str) -> str:
    """Probability that each token stands, as its prefix tells it.  # [B, K] float32"""
    head = heads.confidence
    assert head is not None
    one, zero = writer.constant([1]), writer.constant([0])
    with writer.scope("confidence"):
        seen = marginals.scored
        if heads.sure_of_tokens(marginals.hidden_size):
            assert heads.corrector is not None
            earlier = writer.op("Slice", tokens, zero, writer.constant([-1]), one)
            before = writer.op("Concat", writer.op("Unsqueeze", marginals.anchors, one), earlier, axis=1)
            seen = writer.op("Concat", seen, token_rows(writer, heads.corrector, before), axis=-1)
        odds = emit_odds(writer, head, seen)
        if head.temperatures:
            count = writer.op("Shape", tokens, start=1, end=2)
            known = writer.weight(np.array(head.temperatures, np.float32), "temperatures")
            # A block may be wider than what is drafted of it: positions behind the last temperature have none.
            ones = writer.op("Expand", writer.constant(np.ones(1, np.float32)), count)
            heats = writer.op("Slice", writer.op("Concat", known, ones, axis=0), zero, count, zero)
            odds = writer.op("Div", odds, heats)
        return writer.op("Sigmoid", odds)


def emit_odds(writer: GraphWriter, head: LinearConfidence, seen: str) -> str:
    """The operators of `LinearConfidence.logits`, in float32.  # [B, R, H] or [B, R, H + r] -> [B, R]"""
    weight = head.proj.weight.detach().float().cpu().numpy()
    odds = writer.op("MatMul", _cast(writer, seen, "FLOAT"), writer.weight(weight.T, "weight"))
    if head.proj.bias is not None:
        odds = writer.op("Add", odds, writer.weight(head.proj.bias.detach().float().cpu().numpy(), "bias"))
    return writer.op("Squeeze", odds, writer.constant([-1]))


def _zeros(writer: GraphWriter, anchors: str, width: int) -> str:
    """# [B, width]"""
    size = writer.op("Concat", writer.op("Shape", anchors), writer.constant([width]), axis=0)
    return writer.op("Expand", writer.scalar(0.0), size)


def _cast(writer: GraphWriter, value: str, kind: str) -> str:
    from onnx import TensorProto

    return writer.op("Cast", value, to=int(getattr(TensorProto, kind)))

"""What an export must show before it is let out: sound graphs, the numbers of torch, the rounds of torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specflow.draft.onnx_lm import compare_passes, random_rows
from specflow.errors import ModelError
from specflow.export.manifest import QualityEntry
from specflow.export.quality import Threshold, load_quality_text, measure_quality

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.draft.onnx_lm import Way
    from specflow.export.parts import Models
    from specflow.export.quality import Predict
    from specflow.export.rounds import Comparison
    from specflow.onnx.graphs import OutputError
    from specflow.target.base import Target

__all__ = [
    "TOLERANCES",
    "check_errors",
    "check_graphs",
    "check_rounds",
    "compare_target",
    "real_prompts",
    "text_quality",
]

TOLERANCES: Mapping[str, float] = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.1, "int8": 0.5, "int4": 1.0}
"""Most relative error of an output, of its largest value. What is not float32 is judged by its quality: its tolerance
tells rounding from a wrong graph, no more."""

_REAL_ROWS = 3
_REAL_WIDTH = 160
"""Tokens of each text that the target is compared on."""
_QUALITY_TOKENS = 256
"""Most tokens of a piece of text that quality is measured on."""
_SHOWN = 3


def check_graphs(folder: Path) -> None:
    """Every graph of a folder passes ONNX's checker and its shape inference.

    Raises:
        ModelError: One does not.
    """
    import onnx

    for path in sorted(folder.glob("*.onnx")):
        try:
            onnx.checker.check_model(str(path), full_check=True)
            onnx.shape_inference.infer_shapes(onnx.load(path, load_external_data=False), strict_mode=True)
        except Exception as error:  # classes of its own for every kind of fault
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise _failure(path.name, f"the checker of ONNX refuses it: {reason}", "a sound graph") from error


def compare_target(
    graphs: Target, reference: Target, way: Way, texts: Sequence[Sequence[int]]
) -> Iterator[OutputError]:
    """Errors of a target's graph on random tokens and on real text.

    Args:
        graphs: The target over its graph.
        reference: The same in torch.
        way: The graph.
        texts: Token ids of real texts.
    """
    random = compare_passes(graphs, reference, way, random_rows(reference))
    rows = _text_rows(texts, reference)
    return chain(random, () if rows is None else compare_passes(graphs, reference, way, rows, "real"))


def _text_rows(texts: Sequence[Sequence[int]], target: Target) -> Tensor | None:
    """Beginnings of the texts, as long as the shortest of them; None where there is none.  # [B, R]"""
    info = target.info
    width = min([_REAL_WIDTH, info.context_length, *map(len, texts[:_REAL_ROWS])])
    rows = [list(text[:width]) for text in texts[:_REAL_ROWS]]
    if not rows:
        return None
    return torch.tensor((rows * _REAL_ROWS)[:_REAL_ROWS], device=info.device)


def check_errors(errors: Iterable[OutputError], tolerance: float) -> list[OutputError]:
    """All errors, when none is above the tolerance.

    Raises:
        ModelError: One is.
    """
    found = list(errors)
    worst = max(found, key=lambda error: error.relative, default=None)
    if worst is not None and not worst.relative <= tolerance:
        where = f"{worst.graph}: output {worst.output}"
        text = f"{worst.relative:.1e} of its largest value from torch's on {worst.inputs} inputs"
        raise _failure(where, text, f"at most {tolerance:g}")
    return found


def check_rounds(found: Comparison, precise: bool) -> None:
    """Rounds in float32 are those of torch, but for near-ties, and so are the logits on the way.

    Args:
        found: What was compared.
        precise: Whether the graphs are in float32; others are judged by their quality.

    Raises:
        ModelError: A difference is more than rounding, or nothing was compared.
    """
    if not found.rounds:
        raise _failure("rounds", "no round was compared", "prompts that fit the target's context")
    if precise and found.differences:
        shown = "; ".join(found.differences[:_SHOWN])
        raise _failure("rounds", f"{len(found.differences)} differences from torch: {shown}", "the same tokens")
    if precise:
        check_errors(found.errors(), TOLERANCES["float32"])


def text_quality(models: Models, target: Target) -> QualityEntry:
    """How well a target over graphs predicts real text, against torch in float32."""
    codec, info = models.loaded.codec, models.loaded.target.info
    most = min(_QUALITY_TOKENS, info.context_length)
    sequences = [piece for text in load_quality_text() for piece in real_prompts([codec.encode(text)], most)]
    found = measure_quality(_predictor(models.loaded.target), _predictor(target), sequences)
    limits = Threshold()
    return QualityEntry(
        **asdict(found),
        perplexity_change=found.perplexity_change,
        least_agreement=limits.agreement,
        most_perplexity_change=limits.perplexity,
        refusal=limits.refusal(found),
    )


def _predictor(target: Target) -> Predict:
    def predict(tokens: list[int]) -> Tensor:
        device = target.info.device
        positions = torch.arange(len(tokens), device=device).unsqueeze(0)
        rows = torch.tensor([tokens], device=device)
        return target.forward(rows, positions, target.new_cache(1, len(tokens))).logits[0]

    return predict


def real_prompts(texts: Sequence[Sequence[int]], most: int) -> list[list[int]]:
    """Prompts of at most so many tokens; longer texts become several."""
    return [
        list(text[begin : begin + most])
        for text in texts
        for begin in range(0, len(text), most)
        if begin == 0 or len(text) - begin >= most // 2
    ]


def _failure(where: str, found: str, expected: str) -> ModelError:
    hint = "the export was refused and nothing was written; a driver, a damaged weight file or a bug can be the reason"
    return ModelError(where, found, expected, hint)

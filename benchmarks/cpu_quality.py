"""How much of a model its numbers keep: next-token choices and perplexity against float32, on given text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp
from pathlib import Path
from typing import Any

from specflow.errors import SpecFlowError
from specflow.export.quality import Threshold
from specflow.files import append_jsonl

__all__ = ["MAX_PERPLEXITY_CHANGE", "MIN_AGREEMENT", "TEXT_TOKENS", "Quality", "compare", "measure_quality"]

MIN_AGREEMENT, MAX_PERPLEXITY_CHANGE = Threshold().agreement, Threshold().perplexity
TEXT_TOKENS = 384  # of the end of prompt and answer: what is scored of each prompt
Scores = Callable[[Sequence[int]], Mapping[str, Sequence[Any]]]


@dataclass(frozen=True, slots=True)
class Quality:
    """One model against the reference, given the same text before every position."""

    model: str  # "system dtype"
    positions: int
    agreement: float  # share of positions with the reference's likeliest token
    perplexity_change: float  # relative

    @property
    def passes(self) -> bool:
        """Whether its speed counts among the best."""
        return self.agreement >= MIN_AGREEMENT and self.perplexity_change <= MAX_PERPLEXITY_CHANGE


def measure_quality(
    texts: Sequence[Sequence[int]], scores: Mapping[str, Scores], reference: str, path: Path
) -> tuple[dict[str, Quality], dict[str, str]]:
    """Score every model that the file does not have yet.

    Args:
        texts: Token ids; see TEXT_TOKENS.
        scores: Of every model, by name.
        reference: Name of the model that is right by definition.
        path: JSON lines, one a model, kept as they come.

    Returns:
        What is known, and why the others could not be scored.
    """
    known = _read(path)
    failed: dict[str, str] = {}
    truth: list[Mapping[str, Sequence[Any]]] | None = None
    for name in (name for name in scores if name not in known):
        try:
            truth = truth or [scores[reference](text) for text in texts]
            found = compare(name, truth, [scores[name](text) for text in texts])
        except SpecFlowError as error:
            failed[name] = " ".join(str(error).split())
            continue
        append_jsonl(path, asdict(found))
        known[name] = found
    return known, failed


def compare(
    name: str, truth: Sequence[Mapping[str, Sequence[Any]]], mine: Sequence[Mapping[str, Sequence[Any]]]
) -> Quality:
    """Pool the positions of all texts."""
    pairs = [pair for a, b in zip(truth, mine, strict=True) for pair in zip(a["best"], b["best"], strict=True)]
    gaps = [b - a for x, y in zip(truth, mine, strict=True) for a, b in zip(x["surprise"], y["surprise"], strict=True)]
    return Quality(name, len(pairs), sum(a == b for a, b in pairs) / len(pairs), exp(sum(gaps) / len(gaps)) - 1.0)


def _read(path: Path) -> dict[str, Quality]:
    content = path.read_text(encoding="utf-8") if path.exists() else ""
    whole = content[: content.rfind("\n") + 1]  # what follows the last newline was torn by an interruption
    if whole != content:
        path.write_text(whole, encoding="utf-8")
    rows = [Quality(**json.loads(line)) for line in whole.splitlines()]
    return {row.model: row for row in rows}

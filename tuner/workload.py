"""The prompts of a tuning run: encoded, and what could not be used with the reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specflow.bench import load_prompts
from specflow.errors import DataError, SpecFlowError
from specflow.files import file_sha256
from tuner.result import Workload
from tuner.trace import TracedPrompt, workload

if TYPE_CHECKING:
    from specflow.bench import PromptRow
    from specflow.text import TextCodec

__all__ = ["Asked", "Rows", "encoded", "read_rows"]

Rows = tuple[Sequence["PromptRow"], Sequence[str]]
"""Rows that can be used, and the reasons against the others."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user said of the workload."""

    files: tuple[Path, ...]
    limit: int | None
    max_new_tokens: int
    seed: int


def read_rows(asked: Asked) -> Rows:
    """Usable rows, and the others with file, line and reason.

    Raises:
        DataError: A file cannot be read or is empty, or no row of any can be used.
    """
    rows, bad = load_prompts(asked.files, asked.limit)
    reasons = [f"{row.key}: {row.reason}" for row in bad]
    if not rows:
        found = f"no usable row; {reasons[0]}" if reasons else "no usable row"
        raise DataError("--data", found, "prompts to tune on")
    return rows, reasons


def encoded(rows: Rows, codec: TextCodec, asked: Asked, room: int) -> tuple[list[TracedPrompt], Workload]:
    """Prompts as token ids, and the workload as a result tells it.

    Args:
        rows: As read.
        codec: The target's.
        asked: What the user said.
        room: Most tokens of a request, prompt and answer.

    Raises:
        DataError: No prompt fits.
    """
    prompts: list[TracedPrompt] = []
    usable, reasons = rows[0], list(rows[1])
    for row in usable:
        try:
            (prompt,) = workload([row], codec)
        except SpecFlowError as error:
            reasons.append(f"{row.key}: {error}")
            continue
        if len(prompt.tokens) + asked.max_new_tokens > room:
            reasons.append(f"{row.key}: {len(prompt.tokens)} tokens and an answer do not fit into {room}")
            continue
        prompts.append(prompt)
    if not prompts:
        raise DataError("--data", f"no usable row; {reasons[0]}", "prompts to tune on")
    facts = Workload(
        files={str(path): file_sha256(path) for path in asked.files},
        prompts=len(prompts),
        categories=dict(Counter(prompt.category for prompt in prompts)),
        bad_rows=reasons,
        max_new_tokens=asked.max_new_tokens,
        limit=asked.limit,
        seed=asked.seed,
    )
    return prompts, facts

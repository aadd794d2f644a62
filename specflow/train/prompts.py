"""Prompts to train on: read as everywhere else, balanced over their domains, and never an evaluation set's.

A drafter that has seen the answers to a benchmark's questions reports acceptance it will not have elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

from specflow.bench.data import BadRow, PromptRow, load_prompts
from specflow.errors import DataError

__all__ = [
    "EVALUATION_FOLDERS",
    "EVALUATION_SETS",
    "balance",
    "load_training_prompts",
    "refuse_evaluation_file",
    "refuse_evaluation_id",
]

EVALUATION_SETS = (
    "aime",
    "aime_24",
    "aime_25",
    "alpaca_eval",
    "arena_hard",
    "bbh",
    "big_bench_hard",
    "bigcodebench",
    "cnn_dailymail",
    "evalplus",
    "gpqa",
    "gsm8k",
    "hellaswag",
    "human_eval",
    "human_eval_plus",
    "if_eval",
    "lbpp",
    "livebench",
    "livecodebench",
    "math500",
    "mbpp",
    "mbpp_plus",
    "mgsm",
    "mmlu",
    "mmlu_pro",
    "mt_bench",
    "multipl_e",
    "self_instruct_user",
    "spec_bench",
    "summarization_books",
    "swe_bench",
    "translation_pud",
    "truthfulqa",
    "user_oriented_instructions",
    "vicuna_bench",
    "vicuna_eval",
    "wild_bench",
    "wmt14",
    "wmt23",
    "xsum",
)
"""Well-known benchmarks. Case and the marks between words do not matter: MT-Bench is mt_bench."""

EVALUATION_FOLDERS = ("benchmark", "benchmarks", "eval", "evals", "evaluation", "held", "held_out", "smoke")
"""What files and folders of measuring prompts are called, whatever they hold."""

_SETS = frozenset(name.replace("_", "") for name in EVALUATION_SETS)
_FOLDERS = frozenset(name.replace("_", "") for name in EVALUATION_FOLDERS)
_DEPTH = 2  # folders above a file that name what it holds
_EXPECTED = "prompts that nothing is measured on"
_HINT = "train on other prompts; the split of a benchmark that is made for training needs 'train' in its file's name"


def load_training_prompts(paths: Sequence[Path], limit: int | None = None) -> tuple[list[PromptRow], list[BadRow]]:
    """Usable and unusable rows of several files, in order. A prompt that comes twice is taken once.

    Args:
        paths: Prompt files.
        limit: Most rows to take from each file, usable or not.

    Raises:
        DataError: A file or a row belongs to an evaluation set, or a file cannot be read.
    """
    for path in paths:
        refuse_evaluation_file(path)
    found, bad = load_prompts(paths, limit)
    rows: dict[str, PromptRow] = {}
    for row in found:
        refuse_evaluation_id(row.id, row.key)
        row = row if row.named else replace(row, id=_content_id(row))
        first = rows.setdefault(row.id, row)
        if (first.opening, first.turns) != (row.opening, row.turns):
            bad.append(BadRow(row.file, row.line, f"its id {row.id!r} is that of another prompt, {first.key}"))
    return list(rows.values()), bad


def refuse_evaluation_file(path: Path) -> None:
    """Refuse a file with the name of an evaluation set in its own, or in that of a folder it lies in.

    Raises:
        DataError: It is.
    """
    for place in (path.absolute(), path.resolve()):
        pieces = [place.name, *(folder.name for folder in place.parents[:_DEPTH])]
        for piece in () if _says_train(place.name) else pieces:
            name = _set_of(piece, anywhere=True) or ("".join(_words(piece.split(".")[0])) in _FOLDERS and piece)
            if name and not _says_train(piece):
                raise DataError(str(path), f"named as an evaluation set, {name}", _EXPECTED, _HINT)


def refuse_evaluation_id(name: str, where: str) -> None:
    """Refuse a row whose id begins with the name of an evaluation set.

    Args:
        name: The row's id.
        where: File and line, for the error.

    Raises:
        DataError: It does.
    """
    if (found := _set_of(name)) and not _says_train(name):
        raise DataError(where, f"id {name!r} is that of an evaluation set, {found}", _EXPECTED, _HINT)


def balance(rows: Sequence[PromptRow], most: float = 0.3) -> list[PromptRow]:
    """Rows of all categories in turns, so that any prefix is a fair mix.

    Args:
        rows: In the order in which each category gives its rows.
        most: Share of a prefix that one category may take; what is above it is left out once the others are spent.
    """
    waiting: dict[str, list[PromptRow]] = {}
    for row in reversed(rows):
        waiting.setdefault(row.category, []).append(row)
    order = list(dict.fromkeys(row.category for row in rows))
    taken = dict.fromkeys(order, 0)
    mixed: list[PromptRow] = []
    while True:
        before = len(mixed)
        for category in order:
            fits = taken[category] < max(1.0, most * (len(mixed) + 1)) or len(order) * most <= 1.0
            if waiting[category] and fits:
                mixed.append(waiting[category].pop())
                taken[category] += 1
        if len(mixed) == before:
            return mixed


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]


def _says_train(name: str) -> bool:
    return not {"train", "training"}.isdisjoint(_words(name))


def _set_of(name: str, anywhere: bool = False) -> str:
    """The evaluation set whose name a name begins with, or has `anywhere` in it; empty where it is none's."""
    words = _words(name)
    begins = range(len(words) if anywhere else min(len(words), 1))
    runs = (words[begin:end] for begin in begins for end in range(begin + 1, len(words) + 1))
    return next(("_".join(run) for run in runs if "".join(run) in _SETS), "")


def _content_id(row: PromptRow) -> str:
    """An id of what is asked, for rows that have none: files may be joined, moved and sorted."""
    talk = repr([*((turn["role"], turn["content"]) for turn in row.opening), *row.turns])
    return f"prompt/{blake2b(talk.encode(), digest_size=8).hexdigest()}"

"""Prompt files: JSONL rows with `prompt`, `messages` or `turns`.

A row that cannot be used is named by file and line and carried along as a failure; the other rows run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specflow.errors import DataError

__all__ = ["BadRow", "PromptRow", "load_prompts", "read_prompts"]

SHAPES = "an object with one of: prompt (text), messages (role and content), turns (texts)"
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One request of a prompt file: fixed opening messages, then the user's turns."""

    file: str
    line: int  # from 1
    id: str
    category: str
    opening: tuple[dict[str, str], ...]  # messages before the first turn
    turns: tuple[str, ...]  # what the user says, in order; an answer goes between two of them
    named: bool = True  # false where the row has no id, and is called after its file and line

    @property
    def key(self) -> str:
        """Names the row within a run, whatever its id."""
        return f"{self.file}:{self.line}"

    def messages(self, turn: int, answers: Sequence[str]) -> list[dict[str, str]]:
        """The conversation up to and with one turn.

        Args:
            turn: Number of the turn, from 0.
            answers: What the model answered to the turns before it.
        """
        talk = list(self.opening)
        for index in range(turn):
            talk.append({"role": "user", "content": self.turns[index]})
            talk.append({"role": "assistant", "content": answers[index]})
        return [*talk, {"role": "user", "content": self.turns[turn]}]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used, and why."""

    file: str
    line: int
    reason: str

    @property
    def key(self) -> str:
        return f"{self.file}:{self.line}"


def load_prompts(paths: Sequence[Path], limit: int | None = None) -> tuple[list[PromptRow], list[BadRow]]:
    """Usable and unusable rows of several files, in order.

    Args:
        paths: Prompt files.
        limit: Most rows to take from each file, usable or not.
    """
    good: list[PromptRow] = []
    bad: list[BadRow] = []
    for path in dict.fromkeys(paths):
        for row in read_prompts(path)[:limit]:
            if isinstance(row, PromptRow):
                good.append(row)
            else:
                bad.append(row)
    return good, bad


def read_prompts(path: Path) -> list[PromptRow | BadRow]:
    """Every row of one file. Blank lines are skipped; a file without rows is an error."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(str(path), f"cannot read: {error.strerror or error}", "a JSONL file of prompts") from error
    lines = [(number, line) for number, line in enumerate(content.split(b"\n"), 1) if line.strip()]
    if not lines:
        raise DataError(str(path), "no rows", f"one JSON object a line: {SHAPES}")
    return [_read_row(path, number, line) for number, line in lines]


def _read_row(path: Path, number: int, line: bytes) -> PromptRow | BadRow:
    try:
        value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        opening, turns = _conversation(value)
        name = _label(value, ("id", "question_id"))
        category = _label(value, ("category", "domain")) or path.stem
    except UnicodeDecodeError as error:
        return BadRow(str(path), number, f"not UTF-8: {error.reason} at byte {error.start}")
    except json.JSONDecodeError as error:
        return BadRow(str(path), number, f"not JSON: {error.msg} at column {error.colno}")
    except RecursionError:
        return BadRow(str(path), number, f"nested too deeply; expected {SHAPES}")
    except ValueError as error:
        return BadRow(str(path), number, str(error))
    shown = name or f"{path.stem}-{number}"
    return PromptRow(str(path), number, shown, category, tuple(opening), tuple(turns), bool(name))


def _label(value: dict[str, Any], keys: Sequence[str]) -> str:
    """The first of some keys as text; empty where the row has none of them, or null."""
    key = next((key for key in keys if value.get(key) is not None), None)
    return "" if key is None else _encodable(str(value[key]), key)


def _conversation(value: Any) -> tuple[list[dict[str, str]], list[str]]:
    if not isinstance(value, dict):
        raise ValueError(f"found {type(value).__name__}; expected {SHAPES}")
    named = [key for key in ("prompt", "messages", "turns") if key in value]
    if len(named) != 1:
        raise ValueError(f"found {' and '.join(named) or 'none of the keys'}; expected {SHAPES}")
    if named == ["prompt"]:
        return [], [_text(value["prompt"], "prompt")]
    if named == ["turns"]:
        if not isinstance(value["turns"], list) or not value["turns"]:
            raise ValueError("turns: expected a list of texts, at least one")
        return [], [_text(turn, f"turns[{index}]") for index, turn in enumerate(value["turns"])]
    messages = _messages(value["messages"])
    return messages[:-1], [messages[-1]["content"]]


def _messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise ValueError("messages: expected a list of role and content, at least one")
    messages = []
    for index, message in enumerate(value):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ValueError(f"messages[{index}]: expected role ({', '.join(ROLES)}) and content")
        content = _text(message.get("content"), f"messages[{index}].content")
        messages.append({"role": message["role"], "content": content})
    if messages[-1]["role"] != "user":
        raise ValueError(f"messages: the last one is from {messages[-1]['role']}; expected the user's, to be answered")
    return messages


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: found {type(value).__name__}; expected text")
    if not value.strip():
        raise ValueError(f"{where}: empty; a model needs at least one token to continue")
    return _encodable(value, where)


def _encodable(text: str, where: str) -> str:
    """JSON can escape half of a surrogate pair, which neither a tokenizer nor a results file can hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: half of a surrogate pair at character {error.start}; expected text") from error
    return text

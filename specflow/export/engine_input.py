"""Reading what engines are configured with: words of a command, shell scripts, JSON and YAML. No torch.

What comes from outside may be anything: it is understood, or a `RecipeError` says where it is not.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specflow.errors import RecipeError
from specflow.recipe_yaml import read_yaml

__all__ = ["Fields", "Flags", "as_mapping", "find_command", "read_file", "read_flags"]

LARGEST = 4 << 20  # bytes of a file that is read
DEEPEST = 30  # brackets inside brackets

ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
NUMBER = re.compile(r"-\.?\d")


@dataclass(frozen=True, slots=True)
class Flags:
    """A command line taken apart.

    Attributes:
        words: What stands before and between the flags: program, verb, model.
        values: Flag, with dashes for underscores, -> its value; None where none follows. The last one counts.
        environment: Variables set on the line itself.
    """

    words: tuple[str, ...]
    values: Mapping[str, str | None]
    environment: Mapping[str, str] = field(default_factory=dict)

    def nested(self, flag: str) -> dict[str, Any]:
        """Keys given one by one: `--flag.key value` -> {"key": value}, numbers and words as YAML has them."""
        prefix = f"{flag}."
        found: dict[str, Any] = {}
        for name, value in self.values.items():
            if name.startswith(prefix):
                key = name.removeprefix(prefix).replace("-", "_")
                found[key] = True if value is None else as_mapping(f"{json.dumps(key)}: {value}", name)[key]
        return found


def read_flags(argv: Sequence[str], switches: Collection[str] = (), aliases: Mapping[str, str] | None = None) -> Flags:
    """Take a command line apart.

    Args:
        argv: Its words.
        switches: Flags that take no value.
        aliases: Short or other names -> the flag.
    """
    words: list[str] = []
    values: dict[str, str | None] = {}
    rest = list(argv)
    environment = _environment(rest)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "-" or NUMBER.match(word):
            words.append(word)
            continue
        name, equals, value = word.partition("=")
        flag = _flag(name, aliases or {})
        if equals:
            values[flag] = value
        elif flag not in switches and rest and not _is_flag(rest[0]):
            values[flag] = rest.pop(0)
        else:
            values[flag] = None
    return Flags(tuple(words), values, environment)


def _environment(rest: list[str]) -> dict[str, str]:
    """Take `env A=1 B=2` off the front."""
    if rest[:1] == ["env"]:
        rest.pop(0)
    found: dict[str, str] = {}
    while rest and ASSIGNMENT.match(rest[0]):
        name, _, value = rest.pop(0).partition("=")
        found[name] = value
    return found


def _flag(name: str, aliases: Mapping[str, str]) -> str:
    if name in aliases:
        return aliases[name]
    head, dot, tail = name.partition(".")
    plain = head.replace("_", "-") if head.startswith("--") else head
    return aliases.get(plain, plain) + dot + tail


def _is_flag(word: str) -> bool:
    return word.startswith("-") and word != "-" and not NUMBER.match(word)


def find_command(text: str, programs: Collection[str]) -> tuple[str, ...] | None:
    """The first command of a shell script that runs one of some programs, or None.

    Args:
        text: The script; lines that end with a backslash go on.
        programs: Words that mark the command, such as `vllm` or `sglang.launch_server`.
    """
    for line in re.sub(r"\\\r?\n", " ", text).splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue
        for number, word in enumerate(words):
            if Path(word).name in programs if "\0" not in word else False:
                return tuple(_with_environment(words[:number], words[number:]))
    return None


def _with_environment(before: Sequence[str], command: Sequence[str]) -> list[str]:
    return [word for word in before if ASSIGNMENT.match(word)] + list(command)


def as_mapping(text: str, name: str) -> dict[str, Any]:
    """A mapping from JSON or YAML; keys are text, lists are tuples.

    Raises:
        RecipeError: It is neither, or no mapping, or nested without end.
    """
    if len(text) > LARGEST:
        raise RecipeError(name, f"{len(text)} characters", f"a configuration of at most {LARGEST}")
    if _depth(text) > DEEPEST:
        raise RecipeError(name, "brackets nested too deep", f"at most {DEEPEST} levels")
    try:
        data: dict[str, Any] = _with_text_keys(read_yaml(text, name).data)
    except (ValueError, OverflowError, RecursionError) as error:
        raise RecipeError(name, f"cannot be read: {error}", "JSON or YAML") from error
    return data


def _depth(text: str) -> int:
    """Most brackets open at once; those inside texts count too, which errs on the safe side."""
    depth = deepest = 0
    for character in text:
        if character in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "]}":
            depth -= 1
    return deepest


def _with_text_keys(data: Any) -> Any:
    if isinstance(data, dict):
        return {str(key): _with_text_keys(value) for key, value in data.items()}
    return tuple(_with_text_keys(each) for each in data) if isinstance(data, tuple) else data


def read_file(path: str | Path) -> str:
    """Text of a configuration file.

    Raises:
        RecipeError: It cannot be read, or is too large to be one.
    """
    try:
        file = Path(path)
        if file.stat().st_size > LARGEST:
            raise RecipeError(str(path), f"{file.stat().st_size} bytes", f"a configuration of at most {LARGEST}")
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise RecipeError(str(path), f"cannot be read: {error}", "a text file in UTF-8") from error


class Fields:
    """Values by name, read with the type they must have. Remembers which were asked for.

    Args:
        data: Name -> value: as in JSON, or the text of a flag.
        where: What to call the place in errors.
    """

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self.where = where
        self._asked: set[str] = set()

    def __contains__(self, name: str) -> bool:
        self._asked.add(name)
        return self.data.get(name) is not None

    def left(self) -> tuple[str, ...]:
        """Names that were given and never asked for."""
        return tuple(name for name in self.data if name not in self._asked)

    def raw(self, name: str) -> Any:
        """The value as it was given, or None where the name is missing."""
        self._asked.add(name)
        return self.data.get(name)

    def whole(self, name: str, low: int = 0) -> int | None:
        """A whole number, or None where the name is missing.

        Raises:
            RecipeError: It is something else, or below `low`.
        """
        value = self.raw(name)
        if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,12}", value.strip()):
            value = int(value)
        if value is None:
            return None
        if type(value) is not int or not low <= value < 1 << 40:
            raise self._error(name, value, f"a whole number of at least {low}")
        return value

    def number(self, name: str, low: float = 0.0, high: float = float("inf")) -> float | None:
        """A number within bounds, or None where the name is missing.

        Raises:
            RecipeError: It is something else.
        """
        value = self.raw(name)
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError as error:
                raise self._error(name, value, "a number") from error
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self._error(name, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def text(self, name: str) -> str | None:
        """Text that is not empty, or None where the name is missing.

        Raises:
            RecipeError: It is something else.
        """
        value = self.raw(name)
        if value is not None and (not isinstance(value, str) or not value):
            raise self._error(name, value, "text")
        return value

    def truth(self, name: str) -> bool | None:
        """True or false, or None where the name is missing. A flag without a value is true.

        Raises:
            RecipeError: It is something else.
        """
        value = self.raw(name)
        if isinstance(value, str) and value.lower() in ("true", "false", "1", "0"):
            value = value.lower() in ("true", "1")
        if value is not None and not isinstance(value, bool):
            raise self._error(name, value, "true or false")
        return value

    def _error(self, name: str, value: Any, expected: str) -> RecipeError:
        return RecipeError(f"{self.where}: {name}", repr(value)[:80], expected)

"""Reads the keys of a published config.json: each of the type it must have, or an error that names it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any

from specflow.errors import CheckpointError

__all__ = ["Keys"]

_MOST = 1 << 31


class Keys:
    """An object of a configuration. A key that is null counts as absent.

    Args:
        values: What it holds.
        where: The file, for errors.
        prefix: Dotted name of the object in the file; "" for the whole of it.
    """

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.values, self.where = values, where
        self._prefix = f"{prefix}." if prefix else ""

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def wrong(self, name: str, expected: str, hint: str = "") -> CheckpointError:
        """The error of a key whose value will not do."""
        return CheckpointError(self.where, f"{self._prefix}{name} is {_short(self.values.get(name))}", expected, hint)

    def lacking(self, name: str, expected: str) -> CheckpointError:
        """The error of a key that is not there."""
        return CheckpointError(self.where, f"no {self._prefix}{name}", expected)

    def whole(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A whole number.

        Raises:
            CheckpointError: It is something else, or absent without a default.
        """
        found = self.maybe_whole(name, least)
        if found is not None:
            return found
        if default is None:
            raise self.lacking(name, "a whole number")
        return default

    def maybe_whole(self, name: str, least: int = 1) -> int | None:
        """A whole number, or nothing."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < _MOST:
            raise self.wrong(name, f"a whole number, {least} or more")
        return value

    def real(self, name: str, default: float | None = None) -> float | None:
        """A positive number, or the default."""
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(name, "a number above 0")
        try:
            number = float(value)
        except OverflowError:
            raise self.wrong(name, "a number above 0") from None
        if not (math.isfinite(number) and number > 0.0):
            raise self.wrong(name, "a number above 0")
        return number

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.maybe_flag(name)
        return default if value is None else value

    def maybe_flag(self, name: str) -> bool | None:
        """True, false or nothing."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str) -> str | None:
        """A text, or nothing."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "a text")
        return value

    def wholes(self, name: str, least: int = 0) -> tuple[int, ...] | None:
        """A list of whole numbers, or nothing."""
        value = self.values.get(name)
        if value is None:
            return None
        numbers = isinstance(value, list) and all(
            isinstance(each, int) and not isinstance(each, bool) for each in value
        )
        if not numbers or not all(least <= each < _MOST for each in value):
            raise self.wrong(name, f"a list of whole numbers, {least} or more")
        return tuple(value)

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts; empty where there is none."""
        value = self.values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.wrong(name, "a list of texts")
        return tuple(value)

    def part(self, name: str) -> Keys:
        """An object in the object; empty where there is none."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Keys(value or {}, self.where, f"{self._prefix}{name}")

    def parts(self, name: str) -> tuple[Keys, ...]:
        """A list of objects."""
        value = self.values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
            raise self.wrong(name, "a list of objects")
        return tuple(Keys(each, self.where, f"{self._prefix}{name}.{index}") for index, each in enumerate(value))

    def allow(self, known: Iterable[str]) -> None:
        """Refuse keys that are not known: what they ask for would be left out without a word.

        Raises:
            CheckpointError: Naming the first, and what comes nearest.
        """
        names = sorted(known)
        for name in sorted(self.values):
            if name not in names and self.values[name] is not None:
                near = difflib.get_close_matches(name, names, n=1)
                hint = f"did you mean {near[0]}?" if near else "a newer layout than this version knows"
                found = f"unknown key {(self._prefix + name)!r}"
                raise CheckpointError(self.where, found, f"one of {', '.join(names)}", hint)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."

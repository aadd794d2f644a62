"""Errors that users see: where it happened, what was found, what was expected, what to do."""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "DataError",
    "GraphError",
    "MissingExtra",
    "ModelError",
    "RecipeError",
    "RequestError",
    "SpecFlowError",
    "TrainingError",
]


class SpecFlowError(Exception):
    """Base of every error a user can cause and mend.

    Args:
        where: File, line, key, row or component the error belongs to.
        found: What was there.
        expected: What would have been right.
        hint: What to do about it; may be empty.
    """

    def __init__(self, where: str, found: str, expected: str = "", hint: str = "") -> None:
        self.where = where
        self.found = found
        self.expected = expected
        self.hint = hint
        super().__init__(str(self))

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.found}"]
        if self.expected:
            lines.append(f"  expected: {self.expected}")
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return "\n".join(lines)


class RecipeError(SpecFlowError):
    """A recipe cannot be read or says something that does not exist."""


class GraphError(SpecFlowError):
    """The parts of a decode graph do not fit together."""


class ModelError(SpecFlowError):
    """A model cannot be found, fetched, verified or run."""


class CheckpointError(SpecFlowError):
    """A weight file does not hold what its reader needs."""


class RequestError(SpecFlowError):
    """A prompt or its sampling options cannot be served."""


class DataError(SpecFlowError):
    """A data file or one of its rows cannot be used."""


class MissingExtra(SpecFlowError):
    """An optional package is needed and not installed."""


class TrainingError(SpecFlowError):
    """A run of training cannot go on."""

"""Drafters in our own layout: the source whose options they hold, and whether those are what the source knows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from specflow.errors import CheckpointError

__all__ = ["checked_options"]


def checked_options(source: str, options: Mapping[str, Any], directory: Path | str) -> BaseModel:
    """The options of a checkpoint as its source has them.

    Args:
        source: Name of the source.
        options: As config.json says.
        directory: Of the checkpoint, for errors.

    Raises:
        CheckpointError: Naming the first key that the source does not know or whose value will not do.
    """
    from specflow.draft.registry import discover

    try:
        return discover()[source].config.model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "its options"
        found = f"{key}: {first['msg']}"
        raise CheckpointError(f"{directory}/config.json", found, f"options of source {source}") from error

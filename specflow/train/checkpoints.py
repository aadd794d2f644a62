"""Where a run stands, kept so that it goes on exactly: weights, the optimiser's state, and what watches the loss."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from specflow.errors import DataError
from specflow.files import replacing

__all__ = ["load_state", "save_state"]

_FILE = "state.pt"


def save_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Keep a state: the new one stands whole, or the one before it still does.

    Args:
        folder: Where; it is made.
        state: Tensors, numbers and words, in mappings and lists.

    Raises:
        DataError: The disk has no room.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / _FILE) as stream:
            torch.save(dict(state), stream)
    except (OSError, RuntimeError) as error:  # torch's writer has an error of its own
        hint = "the checkpoint before it is intact; make room and call the command again"
        raise DataError(str(folder), f"cannot keep a checkpoint: {error}", "a disk with room", hint) from error


def load_state(folder: Path) -> dict[str, Any] | None:
    """The state that was kept; None where there is none.

    Raises:
        DataError: It cannot be read.
    """
    file = folder / _FILE
    if not file.exists():
        return None
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        assert isinstance(state, dict)
    except Exception as error:  # a damaged file can break its reader in any way
        found = f"torn or damaged, {file.stat().st_size} bytes that are no checkpoint"
        hint = f"remove {folder} to begin again from the first step"
        raise DataError(str(file), found, "a whole checkpoint", hint) from error
    return state

"""Where a published figure comes from, without the folders of the machine that measured it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["without_folders"]


def without_folders(provenance: dict[str, Any]) -> dict[str, Any]:
    """Where a figure comes from, without the folders of the machine."""
    argv = [Path(word).name if word.startswith(("/", ".")) else word for word in provenance["argv"]]
    files = {Path(path).name: digest for path, digest in provenance["files"].items()}
    return {**provenance, "argv": argv, "files": files}

"""The trained drafters that come with SpecFlow, by name: `smollm2-135m/eagle3`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

__all__ = ["drafter_path", "shipped_drafters"]


def shipped_drafters() -> dict[str, Path]:
    """TARGET/NAME -> directory, in alphabetical order."""
    folder = _folder()
    found = sorted(file.parent for file in folder.glob("*/*/model.safetensors"))
    return {path.relative_to(folder).as_posix(): path for path in found}


def drafter_path(name: str) -> Path:
    """The directory that a recipe names: of that path, else of the shipped drafter of that name."""
    path = Path(name)
    with suppress(RuntimeError):  # ~ of somebody who is not here
        path = path.expanduser()
    return path if path.is_dir() else shipped_drafters().get(name, path)


def _folder() -> Path:
    """Beside the modules in an installed package, one level up in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "drafters"
    return inside if inside.is_dir() else package.parent / "drafters"

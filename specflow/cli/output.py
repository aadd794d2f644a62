"""Where a verb's text goes: stdout, or a file the user named."""

from __future__ import annotations

from pathlib import Path

import typer

from specflow.errors import DataError

__all__ = ["deliver"]


def deliver(text: str, output: Path | None) -> None:
    """Print to stdout, or write to a file and say so on stderr."""
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(f"--output {output}", f"cannot be written: {error.strerror}", "a writable path") from error
    typer.echo(f"wrote {output}", err=True)

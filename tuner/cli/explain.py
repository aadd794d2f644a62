"""`specflow explain`: what a tuning run found, in words."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["explain"]


def explain(
    run: Annotated[Path, typer.Argument(help="directory of a tuning run, or its tuned.json")],
    html: Annotated[Path | None, typer.Option("--html", help="write the report page here again")] = None,
) -> None:
    """Say in words what `specflow tune` found, and why."""
    from tuner.explain import explain as in_words
    from tuner.result import read_result

    result = read_result(run)
    if html is not None:
        from specflow.files import write_text_atomic
        from tuner.report import report

        write_text_atomic(html, report(result))
        typer.echo(f"wrote {html}", err=True)
    typer.echo(in_words(result), nl=False)

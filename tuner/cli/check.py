"""`specflow check`: whether a tuned recipe still does what it did, for CI."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["check"]

DRIFTED = 1


def check(
    baseline: Annotated[Path, typer.Argument(help="tuned.json of a tuning run, or its directory")],
    tolerance: Annotated[float, typer.Option(min=0.0, help="how far the speed-up may move, as a share")] = 0.1,
    acceptance_tolerance: Annotated[float, typer.Option(min=0.0, help="the same of acceptance length")] = 0.05,
    passes: Annotated[int, typer.Option(min=1, help="most times that all prompts are run")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="figures as JSON on stdout")] = False,
) -> None:
    """Measure the answer of a tuning run again, in turns with plain decoding.

    Exit code 1 where acceptance or the speed-up has drifted beyond tolerance, and where it cannot be measured.
    """
    from tuner.check import Tolerance
    from tuner.result import read_result
    from tuner.session import again
    from tuner.words import between

    result = read_result(baseline)
    found = again(result, Tolerance(tolerance, acceptance_tolerance), passes, lambda what: None)
    if found is None:
        typer.echo("the baseline's answer is plain decoding: there is nothing that could drift")
        return
    if as_json:
        speed_up = found.speed_up.model_dump()
        typer.echo(json.dumps({**asdict(found), "speed_up": speed_up, "sound": found.sound}, ensure_ascii=False))
    else:
        length = "-" if found.acceptance is None else f"{found.acceptance:.3f}"
        then = "-" if found.acceptance_then is None else f"{found.acceptance_then:.3f}"
        typer.echo(f"{found.label}: speed-up {found.speed_up.value:.2f} ({between(found.speed_up)})", nl=False)
        typer.echo(f", {found.speed_up_then:.2f} in the baseline; acceptance length {length}, {then} in the baseline")
    for drift in found.drifts:
        typer.echo(f"drifted: {drift}", err=True)
    if not found.sound:
        raise typer.Exit(DRIFTED)

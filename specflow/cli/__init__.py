"""The command line: one file a verb. Machine output on stdout, everything else on stderr."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Entry point of the `specflow` command. Errors of the user's end with exit code 1 and no traceback."""
    import sys

    from specflow.cli.app import app
    from specflow.errors import SpecFlowError

    try:
        app()
    except SpecFlowError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)

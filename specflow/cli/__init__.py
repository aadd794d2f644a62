"""The command line: one file a verb. Machine output on stdout, everything else on stderr."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Entry point of the `specflow` command. Errors of the user's end with exit code 1 and no traceback."""
    import sys

    from specflow.cli.app import app
    from specflow.errors import SpecFlowError

    try:
        try:
            app()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, because at exit Python can only complain
    except SpecFlowError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        _silence_stdout()
        if not isinstance(error, BrokenPipeError):
            where = "cannot write to stdout" if error.filename is None else error.filename
            print(f"error: {where}: {error.strerror or error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _silence_stdout() -> None:
    """What is left in its buffer goes nowhere, so that Python does not try to write it again at exit."""
    import os
    import sys
    from contextlib import suppress

    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)

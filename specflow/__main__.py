"""`python -m specflow`."""

from __future__ import annotations

from specflow.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()

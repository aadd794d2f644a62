"""Verbs that the tuner adds to the command line: one file a verb, found through entry points. Light to import."""

from __future__ import annotations

__all__: list[str] = []

"""Losses of draft positions, one file each, in the notation of the papers: p is the target's law, q the draft's."""

from __future__ import annotations

__all__: list[str] = []

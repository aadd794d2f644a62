"""Measures the hardware and the workload, and chooses how to decode. Uses public names of specflow only."""

from __future__ import annotations

__all__: list[str] = []

"""Serving engines, one file each: a recipe as the engine's own configuration, and back. No torch."""

__all__: list[str] = []

"""Drafters behind one protocol."""

__all__: list[str] = []

"""Sources of drafts, one file a method."""

__all__: list[str] = []

"""Published layouts of drafters: read, recognised, described and written."""

__all__: list[str] = []

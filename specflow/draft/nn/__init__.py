"""Network parts shared by the native decoder and by draft heads."""

__all__: list[str] = []

"""What of a decode graph leaves this package: files that run elsewhere."""

__all__: list[str] = []

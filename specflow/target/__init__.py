"""Target models behind one protocol, and where their files come from."""

__all__: list[str] = []

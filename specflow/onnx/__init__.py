"""ONNX graphs: how they are written, kept and run."""

__all__: list[str] = []

"""ONNX graphs: how they are written, kept and run."""

import os

__all__: list[str] = []

# ONNX Runtime reports to its makers as soon as it is loaded, unless told not to before; who wants it sets 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

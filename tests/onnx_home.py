"""Where tests keep ONNX graphs."""

from __future__ import annotations

from pathlib import Path

from specflow.onnx.graphs import GraphFinder
from specflow.onnx.store import GraphStore


def graph_home(tmp_path: Path) -> GraphFinder:
    """A finder over a cache of this test alone."""
    return GraphStore(tmp_path / "graphs").find

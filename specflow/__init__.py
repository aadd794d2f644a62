"""SpecFlow: speculative decoding of language models from parts.

Light to import: torch and transformers load when an engine is built.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specflow.build import build_engine, load_target
    from specflow.engine import Engine
    from specflow.errors import SpecFlowError
    from specflow.graph import DecodeGraph
    from specflow.recipe import Recipe, load_recipe
    from specflow.types import Generation, Sampling

__all__ = [
    "DecodeGraph",
    "Engine",
    "Generation",
    "Recipe",
    "Sampling",
    "SpecFlowError",
    "build_engine",
    "load_recipe",
    "load_target",
]

_HOMES = {
    "DecodeGraph": "graph",
    "Engine": "engine",
    "Generation": "types",
    "Recipe": "recipe",
    "Sampling": "types",
    "SpecFlowError": "errors",
    "build_engine": "build",
    "load_recipe": "recipe",
    "load_target": "build",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'specflow' has no attribute {name!r}")
    return getattr(import_module(f"specflow.{_HOMES[name]}"), name)

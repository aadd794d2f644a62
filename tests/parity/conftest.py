"""Other people's implementations of the same networks, for comparison. Tests skip where they are not installed.

`speculators` imports packages of its training loop (a client, a data library) on the way to its model files. The
models themselves need torch and transformers only, so what is absent of those packages is stood in for.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from unittest.mock import MagicMock

import pytest

TRAINING_ONLY = ("openai", "datasets")


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds training-only packages where nobody else does; any name of theirs is an empty object."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in TRAINING_ONLY:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        self.made.append(spec.name)
        module = ModuleType(spec.name)
        module.__dict__["__getattr__"] = self._name
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""

    @staticmethod
    def _name(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


def load(name: str) -> ModuleType:
    """A module of another implementation; skips the test where its package is not installed."""
    package = name.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install --no-deps {package}, see the parity extra")
    finder = StandIns()
    sys.meta_path.append(finder)
    try:
        return importlib.import_module(name)
    finally:
        sys.meta_path.remove(finder)
        for stood_in in finder.made:
            sys.modules.pop(stood_in, None)


@pytest.fixture
def foreign() -> Callable[[str], ModuleType]:
    return load

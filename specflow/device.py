"""Devices by name, and what the host may ask of one in the middle of a round."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from specflow.errors import ModelError

if TYPE_CHECKING:
    import torch

__all__ = ["asking_is_free", "find_device", "torch_threads", "with_threads"]

T = TypeVar("T")


def find_device(name: str, where: str) -> torch.device:
    """A device of this machine; `auto` is the fastest kind there is.

    Args:
        name: As recipes spell it: auto, cpu, cuda, cuda:0, mps.
        where: Key of the recipe, for the error.

    Raises:
        ModelError: It is not available here.
    """
    import torch

    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        name = next((kind for kind, found in there.items() if found), "cpu")
    device = torch.device(name)
    there["cuda"] = there["cuda"] and (device.index or 0) < torch.cuda.device_count()
    if not there.get(device.type, True):
        raise ModelError(where, f"{name} is not available here", "cpu", "run `specflow doctor` to see the devices")
    return device


def asking_is_free(device: torch.device) -> bool:
    """Whether reading a tensor's value makes nobody wait.

    On a CPU values are simply there, so a draft may end early and a block may lose its empty columns. On an accelerator
    the answer would cost a synchronisation: nodes are masked there, and shapes stay as they are.
    """
    return device.type == "cpu"


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """So many CPU threads of torch for a while; None changes nothing.

    A thread of torch that waits for work keeps a core busy for a while, at the cost of whatever computes next.
    """
    import torch

    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def with_threads(count: int | None, steps: Iterator[T]) -> Iterator[T]:
    """Take steps of a loop with so many threads, and leave as many as there were to what lies between them."""
    while True:
        with torch_threads(count):
            try:
                step = next(steps)
            except StopIteration:
                return
        yield step

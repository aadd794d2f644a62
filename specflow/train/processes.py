"""The processes of a training run: one, or those that `torchrun` started. Everything they do together is here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from specflow.errors import MissingExtra

__all__ = ["Processes"]

_PATIENCE = timedelta(hours=12)
"""How long processes wait for the first one, which may be making a store of features."""


class Processes:
    """Shares the batches of a step; gradients, sums and the word to stop become the same in all.

    Args:
        on_cpu: The models run on CPUs.

    Raises:
        MissingExtra: `accelerate` is not installed.
    """

    def __init__(self, on_cpu: bool) -> None:
        try:
            from accelerate.accelerator import Accelerator
            from accelerate.utils.dataclasses import DistributedDataParallelKwargs, InitProcessGroupKwargs
        except ImportError as error:
            hint = "pip install 'specflow-toolkit[train]'"
            raise MissingExtra("train", f"accelerate cannot be imported: {error}", "accelerate", hint) from error
        settings = [
            DistributedDataParallelKwargs(find_unused_parameters=True),
            InitProcessGroupKwargs(timeout=_PATIENCE),
        ]
        self._accelerator: Any = Accelerator(cpu=on_cpu, mixed_precision="no", kwargs_handlers=settings)
        self.count, self.rank = int(self._accelerator.num_processes), int(self._accelerator.process_index)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Part together: a process that leaves while another still listens to it takes that one down."""
        if kind is None and self.count > 1:
            self.wait()
            self._accelerator.end_training()

    @property
    def is_first(self) -> bool:
        """Whether this one writes the files and speaks to the user."""
        return self.rank == 0

    def prepare(self, module: nn.Module) -> nn.Module:
        """A module whose gradients become the mean over all processes."""
        prepared: nn.Module = self._accelerator.prepare_model(module, device_placement=False)
        return prepared

    @contextmanager
    def apart(self, module: nn.Module, alone: bool) -> Iterator[None]:
        """Where `alone`, gradients of a backward pass stay with this process for now."""
        if not alone:
            yield
            return
        with self._accelerator.no_sync(module):
            yield

    def total(self, values: Tensor) -> Tensor:
        """The sum over all processes."""
        summed: Tensor = self._accelerator.reduce(values, reduction="sum")
        return summed

    def wait(self) -> None:
        """Go on when all have come here."""
        self._accelerator.wait_for_everyone()

    def share(self, things: int) -> range:
        """Which of so many things are this process's."""
        return range(self.rank, things, self.count)

    def device(self, named: torch.device) -> torch.device:
        """This process's own device, where the recipe names a kind of which there are several."""
        own: torch.device = self._accelerator.device
        return own if named.type == own.type and named.index is None else named

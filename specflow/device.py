"""What the host may ask of a device in the middle of a round."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["asking_is_free"]


def asking_is_free(device: torch.device) -> bool:
    """Whether reading a tensor's value makes nobody wait.

    On a CPU values are simply there, so a draft may end early and a block may lose its empty columns. On an accelerator
    the answer would cost a synchronisation: nodes are masked there, and shapes stay as they are.
    """
    return device.type == "cpu"

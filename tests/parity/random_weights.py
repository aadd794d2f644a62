"""Random tensors for other people's models: gains about 1, matrices that keep the size of what passes."""

from __future__ import annotations

import torch
from torch import nn


def randomise(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = noise * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1.0 + noise * 0.1

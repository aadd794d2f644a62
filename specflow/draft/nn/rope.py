"""Rotary position embedding: tables once, one gather a pass, one rotation a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specflow.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from specflow.types import BlockShape

__all__ = ["ROPE_KINDS", "RotaryTable", "rope_kind", "rotate"]

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
"""Variants whose frequencies do not depend on the length of what is being decoded."""


def rope_kind(config: PretrainedConfig) -> str:
    """The variant of rotary positions that a configuration names."""
    return str(config.rope_parameters.get("rope_type", "default"))


class RotaryTable:
    """Cosines and sines of every position, grown on demand. Source: RoFormer (2104.09864), eq. 34.

    Scaling variants (linear, llama3, yarn) take their frequencies from transformers. Variants whose frequencies depend
    on the current length are refused: cached keys would have to be rotated again.
    """

    def __init__(self, frequencies: Tensor, gain: float, dtype: torch.dtype, device: torch.device) -> None:
        """Take the frequencies of half a head (# [Dh / 2]) and a factor of cosines and sines."""
        self._frequencies, self._gain = frequencies, gain
        self._dtype, self._device = dtype, device
        self._cos = self._sin = torch.empty(0)
        self.grow(256)

    @classmethod
    def plain(cls, theta: float, width: int, dtype: torch.dtype, device: torch.device) -> RotaryTable:
        """Unscaled positions: theta is the base, width the size of a head."""
        return cls(1.0 / theta ** (torch.arange(0, width, 2).float() / width), 1.0, dtype, device)

    @classmethod
    def shaped(cls, shape: BlockShape, dtype: torch.dtype, device: torch.device) -> RotaryTable:
        """The table of a drafter's decoder blocks.

        Raises:
            ModelError: `transformers` refuses the scaling.
        """
        if shape.rope_scaling is None:
            return cls.plain(shape.rope_theta, shape.head_width, dtype, device)
        from transformers import LlamaConfig

        parameters: dict[str, Any] = {"rope_theta": shape.rope_theta, **dict(shape.rope_scaling)}
        try:
            config = LlamaConfig(
                hidden_size=shape.hidden_size,
                num_attention_heads=shape.num_heads,
                head_dim=shape.head_width,
                rope_parameters=parameters,
            )
            return cls.of(config, dtype, device)
        except (KeyError, TypeError, ValueError) as error:
            found = f"{parameters} is no scaling ({error})"
            raise ModelError("draft.rope_scaling", found, "all parameters of its rope_type") from error

    @classmethod
    def of(cls, config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> RotaryTable:
        """The table of a Hugging Face configuration.

        Raises:
            ModelError: A variant whose frequencies depend on the current length.
        """
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        parameters = dict(config.rope_parameters)
        kind = rope_kind(config)
        if kind == "default":
            width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            return cls.plain(parameters["rope_theta"], width, dtype, device)
        if kind in ROPE_KINDS:
            frequencies, gain = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
            return cls(frequencies, gain, dtype, device)
        hint = "set target.implementation: transformers"
        raise ModelError("target.model", f"rope_type {kind!r}", f"one of {', '.join(ROPE_KINDS)}", hint)

    def grow(self, positions: int) -> None:
        """Make room for this many positions."""
        if positions <= self._cos.shape[0]:
            return
        with torch.inference_mode(False):  # tables made in inference mode would serve no later training step
            wide = torch.float64 if self._dtype == torch.float64 else torch.float32
            angles = torch.outer(torch.arange(positions, dtype=torch.float32), self._frequencies.float())
            angles = torch.cat((angles, angles), dim=-1).to(wide)
            self._cos = (angles.cos() * self._gain).to(self._device, self._dtype)
            sines = angles.sin() * self._gain
            sines[:, : sines.shape[1] // 2].neg_()
            self._sin = sines.to(self._device, self._dtype)

    def halves(self, positions: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the first positions, one for each pair of a head's values.  # [positions, Dh / 2]"""
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), self._frequencies.float().cpu())
        return angles.cos() * self._gain, angles.sin() * self._gain

    def at(self, positions: Tensor, rotated: int, kept: int) -> tuple[Tensor, Tensor]:
        """Factors for `rotate` on heads of which the first are rotated and the others kept as they are.

        Args:
            positions: Absolute positions.  # [R]

        Returns:
            Cosines, and sines with the sign of the first half turned.  # [R, rotated + kept, Dh] each
        """
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        return (
            torch.cat((cos.expand(-1, rotated, -1), torch.ones_like(cos).expand(-1, kept, -1)), dim=1),
            torch.cat((sin.expand(-1, rotated, -1), torch.zeros_like(sin).expand(-1, kept, -1)), dim=1),
        )


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of every head; the sign of the rotation is in the sines.  # [R, heads, Dh] each"""
    halves = heads.view(*heads.shape[:-1], 2, heads.shape[-1] // 2)
    return torch.addcmul(heads * cos, halves.flip(-2).view(heads.shape), sin)

"""Named tensors on their way into layers: every one taken once, with the shape it must have, and none left over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

import torch
from torch import Tensor

from specflow.draft.nn.block import BlockWeights, DecoderBlock, RMSNorm
from specflow.draft.nn.linear import Linear
from specflow.errors import CheckpointError
from specflow.types import BlockShape

__all__ = ["BlockForm", "SeededTensors", "WeightReader"]


class SeededTensors:
    """Small random tensors, made when they are asked for; each a function of the seed and its own name.

    They prove shapes, caches, positions and laws. A network of them predicts nothing.

    Args:
        seed: Of all of them.
        given: Tensors that are not drawn.
    """

    def __init__(self, seed: int, given: Mapping[str, Tensor] | None = None) -> None:
        self._seed, self.given = seed, dict(given or {})

    def __contains__(self, name: str) -> bool:
        return name in self.given

    def holding(self, more: Mapping[str, Tensor]) -> SeededTensors:
        """The same, with some more that are not drawn, where they are not given already."""
        return type(self)(self._seed, {**more, **self.given})

    def draw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Gains about 1, biases about 0, matrices that keep the size of what passes through.  # float32"""
        key = int.from_bytes(blake2b(f"{self._seed} {name}".encode(), digest_size=7).digest(), "little")
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(key))
        if len(shape) == 1:
            return noise * 0.1 if name.endswith("bias") else 1.0 + noise * 0.1
        scaled: Tensor = noise * shape[-1] ** -0.5
        return scaled


@dataclass(frozen=True, slots=True)
class BlockForm:
    """What a decoder block has and how it attends."""

    rotary: bool = True
    windowed: bool = False
    input_norm: bool = True  # false: the block's input is already normed, or is to be taken as it is
    input_width: int | None = None  # of what queries, keys and values are made from; None: H
    head_norms: bool | None = None  # norms of queries and keys; None: where the checkpoint has them


class WeightReader:
    """Moves named tensors into layers.

    Args:
        tensors: A checkpoint, or a maker of random ones.
        where: Its name, for errors.
        like: Whose dtype and device the layers get.
        packed: Repack linear layers for inference where that pays; false keeps weights that can be read.
        tracked: Remember where every tensor went, for `state`; the layers will be trained.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor] | SeededTensors,
        where: str,
        like: Tensor,
        packed: bool = True,
        tracked: bool = False,
    ) -> None:
        assert not (packed and tracked), "packed weights cannot be trained"
        self.where, self.is_random = where, isinstance(tensors, SeededTensors)
        self._tensors, self._where, self._like = tensors, where, like
        self._packed, self._tracked = packed, tracked
        self._left = set(tensors.given) if isinstance(tensors, SeededTensors) else set(tensors)
        self._placed: dict[str, Callable[[], Tensor]] = {}

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds this tensor; of random ones only those that were given count."""
        return name in self._tensors

    def state(self) -> dict[str, Tensor]:
        """What the layers made of these tensors hold now, under the same names; of a reader that tracks them."""
        assert self._tracked, "nobody remembered where the tensors went"
        return {name: read().detach() for name, read in self._placed.items()}

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor.

        Raises:
            CheckpointError: It is missing, or has another shape.
        """
        tensor = self._find(name, shape)
        self._left.discard(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(self._where, f"{name} has shape {tuple(tensor.shape)}", f"{shape}")
        if tensor.is_floating_point() and not bool(tensor.sum(dtype=torch.float64).isfinite()):
            raise CheckpointError(
                self.where, f"{name} holds values that are not finite", "numbers", "the file is damaged"
            )
        dtype = self._like.dtype if tensor.is_floating_point() else tensor.dtype
        # What is trained changes in place, and what it began as may be the target's own.
        taken = tensor.to(self._like.device, dtype, copy=self._tracked)
        self._place(name, lambda: taken)
        return taken

    def skip(self, name: str) -> None:
        """Account for a tensor that is known and not needed."""
        self._left.discard(name)

    def norm(self, name: str, width: int, eps: float) -> RMSNorm:
        norm = RMSNorm(self.take(name, (width,)), eps)
        self._place(name, lambda: norm.weight)
        return norm

    def linear(self, name: str, outputs: int, inputs: int, bias: bool | None = None) -> Linear:
        """`name.weight` and, where there is one or it must be there, `name.bias`."""
        biased = self.has(f"{name}.bias") if bias is None else bias
        return self.pack(
            Linear(
                self.take(f"{name}.weight", (outputs, inputs)),
                self.take(f"{name}.bias", (outputs,)) if biased else None,
            )
        )

    def fused(self, prefix: str, parts: Mapping[str, int], width: int) -> Linear:
        """One linear from several, stacked in the order of `parts` (name -> output rows)."""
        weight = torch.cat([self.take(f"{prefix}.{part}.weight", (rows, width)) for part, rows in parts.items()])
        bias = None
        if any(self.has(f"{prefix}.{part}.bias") for part in parts):
            bias = torch.cat([self.take(f"{prefix}.{part}.bias", (rows,)) for part, rows in parts.items()])
        linear, begin = Linear(weight, bias), 0
        for part, rows in parts.items():
            span = slice(begin, begin := begin + rows)
            self._place(f"{prefix}.{part}.weight", partial(_rows, linear, "weight", span))
            if bias is not None:
                self._place(f"{prefix}.{part}.bias", partial(_rows, linear, "bias", span))
        return self.pack(linear)

    def block(self, prefix: str, shape: BlockShape, form: BlockForm = BlockForm()) -> DecoderBlock:
        """A decoder block under the names of the Llama family."""
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        inner, outer = shape.num_heads * shape.head_width, shape.num_kv_heads * shape.head_width
        width, wide = shape.hidden_size, shape.mlp_size
        normed = self.has(f"{attention}.q_norm.weight") if form.head_norms is None else form.head_norms
        parts = {"q_proj": inner, "k_proj": outer, "v_proj": outer}
        name = f"{prefix}.input_layernorm.weight"
        return DecoderBlock(
            BlockWeights(
                qkv=self.fused(attention, parts, form.input_width or width),
                out=self.fused(attention, {"o_proj": width}, inner),
                gate_up=self.fused(mlp, {"gate_proj": wide, "up_proj": wide}, width),
                down=self.fused(mlp, {"down_proj": width}, wide),
                attention_norm=self.norm(name, width, shape.eps) if form.input_norm else None,
                mlp_norm=self.norm(f"{prefix}.post_attention_layernorm.weight", width, shape.eps),
                query_norm=self.norm(f"{attention}.q_norm.weight", shape.head_width, shape.eps) if normed else None,
                key_norm=self.norm(f"{attention}.k_norm.weight", shape.head_width, shape.eps) if normed else None,
                num_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
                head_width=shape.head_width,
                scale=shape.head_width**-0.5,
                rotary=form.rotary,
                windowed=form.windowed,
            )
        )

    def _place(self, name: str, read: Callable[[], Tensor]) -> None:
        if self._tracked:
            self._placed[name] = read

    def _find(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name in self._tensors:
            return self._tensors.given[name] if isinstance(self._tensors, SeededTensors) else self._tensors[name]
        if isinstance(self._tensors, SeededTensors):
            return self._tensors.draw(name, shape)
        near = f"there are {', '.join(sorted(self._tensors)[:3])}, ..."
        raise CheckpointError(self._where, f"tensor {name!r} is missing", f"shape {shape}", near)

    def pack(self, linear: Linear) -> Linear:
        if self._packed:
            linear.pack()
        return linear

    def close(self, ignored: Sequence[str] = ()) -> None:
        """Refuse tensors that nobody took, but those whose names end like one of `ignored`.

        Raises:
            CheckpointError: Naming them.
        """
        left = sorted(name for name in self._left if not name.endswith(tuple(ignored)))
        if left:
            found = f"{len(left)} tensors are not part of this architecture: {', '.join(left[:4])}"
            raise CheckpointError(self._where, found)


def _rows(linear: Linear, kind: str, span: slice) -> Tensor:
    """Some rows of a layer's weight or bias as it is now."""
    tensor: Tensor = getattr(linear, kind)
    return tensor[span]

"""What the engine asks of a target model and of its cache, whatever runtime computes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from specflow.types import BlockShape, Skip, TargetOutput

__all__ = ["Cache", "Exactness", "PickingTarget", "Target", "TargetInfo", "TargetOptions"]

Exactness = Literal["bit-exact", "tie-exact"]


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """Facts about a loaded target."""

    name: str
    vocab_size: int  # V
    hidden_size: int  # H
    num_layers: int  # L
    context_length: int  # most positions of a request
    stop_ids: tuple[int, ...]
    dtype: torch.dtype  # of hidden states and cache rows
    weights: str  # type of the weights: that dtype, or "int8", "int4"
    device: torch.device
    runtime: str  # "native", "transformers", "onnx", "openvino", ...
    exactness: Exactness  # "bit-exact": a row of a chain pass has the same bits for any number of rows
    shape: BlockShape  # of its decoder blocks; drafters made for the target start from it
    picks: bool = False  # whether it is a `PickingTarget` here
    unpicked: str = ""  # why it is none, where others of its runtime are

    @property
    def in_torch(self) -> bool:
        """Whether torch computes it; ONNX graphs are computed by others."""
        return self.runtime not in ("onnx", "openvino")

    @property
    def greedy_head(self) -> str:
        """What of the head greedy steps read, in a few words."""
        if self.picks:
            return "screened"
        return f"whole: {self.unpicked}" if self.unpicked else "whole"


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """How to run a model that is already known."""

    name: str
    dtype: torch.dtype
    device: torch.device
    stop_ids: tuple[int, ...] = ()
    row_invariant: bool | None = None
    """None: where a probe of these weights finds it to hold. True: refuse where it does not."""
    quantization: str | None = None  # "int8" or "int4": weights in blocks of so many bits, where the runtime has them

    @property
    def weights(self) -> str:
        """Type of the weights."""
        return self.quantization or str(self.dtype).removeprefix("torch.")


class Cache(Protocol):
    """Committed key/value rows of a batch of requests, plus the scratch rows of the latest pass.

    A pass reads rows below `lengths` and writes its new rows above them; only `keep` moves the boundary. A rejected
    row therefore never counts, and nothing is ever rolled back.
    """

    @property
    def lengths(self) -> Sequence[int]:
        """Committed rows of each batch row, on the host.  # [B]"""

    @property
    def capacity(self) -> int:
        """Slots of each row, committed and scratch together."""

    def keep(self, counts: Sequence[int], path: Tensor | None = None) -> None:
        """Commit the first `counts[b]` scratch rows of each row, in order of `path` where it is not a chain.

        Args:
            counts: Rows to commit.  # [B]
            path: Rows of the latest pass to commit, PAD padded; None commits rows 0, 1, ...  # [B, D + 1]
        """

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these batch rows, in this order (finished requests leave the batch)."""

    def clear(self, row: int) -> None:
        """Empty one batch row for another request."""

    def row(self, row: int) -> Cache:
        """A view of one batch row as a batch of one, for its prefill; it shares memory and length."""

    def fork(self) -> Cache:
        """The same memory with a boundary of its own: what the fork keeps, the original still holds as scratch."""


class Target(Protocol):
    """A causal language model that scores several rows in one pass."""

    @property
    def info(self) -> TargetInfo: ...

    def new_cache(self, batch: int, capacity: int) -> Cache: ...

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: Cache,
        mask: Tensor | None = None,
        taps: Sequence[int] = (),
        layers: tuple[int, int] | None = None,
        skip: Skip | None = None,
        hidden_in: Tensor | None = None,
        rows: Literal["all", "last", "none"] = "all",
    ) -> TargetOutput:
        """Score rows that follow each request's committed rows.

        Args:
            tokens: Token ids; PAD rows are computed and mean nothing.  # [B, M] int64
            positions: Absolute positions.  # [B, M] int64
            cache: Read below its lengths; new rows are written above them.
            mask: Which rows a new row sees; None is causal. The last M columns are the new rows, columns before
                them the latest committed slots; older ones are always seen (within the sliding window, by
                position).  # [B or 1, M, P + M] bool
            taps: Layers whose output to return; -1 is the embedding output.
            layers: Half-open range of layers to run; None runs all. A range that ends before the last layer still
                applies the final norm and the head (early exit).
            skip: Sub-layers to leave out.
            hidden_in: Hidden states to enter the range with, in place of the embedding of `tokens`.  # [B, M, H]
            rows: Whether the head scores all rows, only the last one (prefill) or none.
        """

    def embed(self, tokens: Tensor) -> Tensor:
        """Embedding as the first layer takes it, less what learnt positions add; PAD gives any row.

        # [B, R] -> [B, R, H]
        """

    def norm(self, hidden: Tensor) -> Tensor:
        """The final norm.  # [B, R, H] -> [B, R, H]"""

    def score(self, normed: Tensor) -> Tensor:
        """The head.  # [B, R, H] -> [B, R, V]"""


class PickingTarget(Target, Protocol):
    """A target that finds likeliest tokens for less than scoring all; `info.picks` says whether one does."""

    def pick(self, normed: Tensor) -> Tensor:
        """The token with the head's largest logit in every row, the lowest id of equals.  # [B, R, H] -> [B, R]"""

"""Reduced draft vocabularies: `d2t` as offsets, which is what most write, or as ids, and `t2d` that tells which."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from specflow.checkpoint.layout import Wanted
from specflow.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.checkpoint.files import Stored

__all__ = ["map_of", "reduced_size", "token_map"]


def reduced_size(stored: Stored, stated: int | None, full: int | None) -> int | None:
    """Size of the draft vocabulary; None where it is the target's.

    Args:
        stored: The checkpoint.
        stated: What its configuration says.
        full: Size of the target's, as far as it is known.
    """
    if "d2t" in stored.names:
        return stated or (*stored.shape("d2t"), 1)[0]
    return None if stated == full or stated is None else stated


def map_of(stored: Stored, size: int | None) -> list[Wanted]:
    """Our `d2t`, where the vocabulary is reduced."""
    if size is None:
        return []
    return [Wanted("d2t", ("d2t", "t2d"), (size,), partial(_offsets, where=str(stored.path)))]


def token_map(stored: Stored, size: int) -> Wanted:
    """Our `d2t` from `token_map`, the target id of every draft id (vLLM's Medusa)."""
    return Wanted("d2t", ("token_map",), (size,), partial(_from_ids, where=str(stored.path)))


def _offsets(tensors: Sequence[Tensor], where: str) -> Tensor:
    """Offsets, whatever was written: `t2d` marks the target ids that have a draft id, and so tells."""
    import torch

    written = _whole(tensors[0], "d2t", where)
    if len(tensors) == 1:
        return written
    counted = torch.arange(len(written))
    marked = tensors[1].reshape(-1).nonzero().flatten()
    for offsets in (written, written - counted):
        if torch.equal((offsets + counted).sort().values, marked):
            return offsets
    found = "d2t leads, as offsets or as ids, to other tokens than t2d marks"
    raise CheckpointError(where, found, "two maps of the same vocabulary", "one of them is of another drafter")


def _from_ids(tensors: Sequence[Tensor], where: str) -> Tensor:
    import torch

    ids = _whole(tensors[0], "token_map", where)
    return ids - torch.arange(len(ids))


def _whole(tensor: Tensor, name: str, where: str) -> Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        raise CheckpointError(where, f"{name} holds numbers of type {tensor.dtype}", "whole numbers")
    return tensor.long()

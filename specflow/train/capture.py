"""Target features of texts, made by passes of the target when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from specflow.draft.base import Needs
from specflow.train.sequences import padded
from specflow.types import Features

if TYPE_CHECKING:
    from specflow.target.base import Target
    from specflow.train.sequences import Text

__all__ = ["FeatureSource", "KeptFeatures", "OnlineFeatures", "features_of", "names_of", "pass_groups", "united"]

_POSITIONS = 1024
"""Most positions of a pass: as fast as wider ones, with smaller caches."""


class FeatureSource(Protocol):
    """Where the features of texts come from."""

    def read(self, texts: Sequence[Text]) -> Features:
        """Features of all positions in float32 or wider; those of padding mean nothing.  # [B, T, H] each"""


class OnlineFeatures:
    """Features that a target's passes make anew each time.

    Args:
        target: The model.
        needs: What is wanted; the last state after the final norm always comes with it.
    """

    def __init__(self, target: Target, needs: Needs) -> None:
        self._target, self._needs = target, needs

    def read(self, texts: Sequence[Text]) -> Features:
        """See `FeatureSource`."""
        found: dict[str, Tensor] = {}
        width, begin = max(map(len, texts)), 0
        for group in pass_groups(texts):
            for name, part in self.tensors(group).items():
                if name not in found:
                    wide = torch.promote_types(part.dtype, torch.float32)
                    found[name] = torch.zeros(len(texts), width, part.shape[2], dtype=wide, device=part.device)
                found[name][begin : begin + len(group), : part.shape[1]] = part
            begin += len(group)
        return features_of(found)

    def tensors(self, texts: Sequence[Text]) -> dict[str, Tensor]:
        """Features by name, as one cache of the target makes them.  # [B, T, H] each"""
        tokens = padded(texts).to(self._target.info.device)
        batch, width = tokens.shape
        cache = self._target.new_cache(batch, width)
        parts: dict[str, list[Tensor]] = {name: [] for name in names_of(self._needs)}
        for begin in range(0, width, _POSITIONS):
            chunk = tokens[:, begin : begin + _POSITIONS]
            positions = torch.arange(begin, begin + chunk.shape[1], device=tokens.device).expand(batch, -1)
            out = self._target.forward(chunk, positions, cache, taps=self._needs.taps, rows="none")
            cache.keep([chunk.shape[1]] * batch)
            for name, pieces in parts.items():
                tensor = out.taps[int(name[4:])] if name.startswith("tap.") else getattr(out, name)
                pieces.append(tensor)
        return {name: torch.cat(pieces, dim=1) for name, pieces in parts.items()}


class KeptFeatures:
    """Features that are made once and then kept in memory as float16, for texts that are read again and again.

    Args:
        source: Makes them.
    """

    def __init__(self, source: FeatureSource) -> None:
        self._source = source
        self._kept: dict[tuple[str, ...], Features] = {}

    def read(self, texts: Sequence[Text]) -> Features:
        """See `FeatureSource`."""
        key = tuple(text.id for text in texts)
        if key not in self._kept:
            self._kept[key] = _each(self._source.read(texts), torch.Tensor.half)
        return _each(self._kept[key], torch.Tensor.float)


def names_of(needs: Needs) -> tuple[str, ...]:
    """Names of the tensors that features hold: those that are needed, and the last state always."""
    return (*(f"tap.{layer}" for layer in sorted(set(needs.taps))), *(["hidden_pre"] * needs.hidden_pre), "hidden_post")


def features_of(tensors: dict[str, Tensor]) -> Features:
    """Features from their tensors by name."""
    taps = {int(name[4:]): tensor for name, tensor in tensors.items() if name.startswith("tap.")}
    return Features(taps, tensors.get("hidden_pre"), tensors.get("hidden_post"))


def pass_groups(texts: Sequence[Text]) -> Iterator[list[Text]]:
    """Neighbours that make up one pass of the target; a text that is longer than a pass has several for itself."""
    group: list[Text] = []
    for text in texts:
        if group and (len(group) + 1) * max(len(text), *map(len, group)) > _POSITIONS:
            yield group
            group = []
        group.append(text)
    if group:
        yield group


def united(needs: Sequence[Needs]) -> Needs:
    """What several drafters need together."""
    taps = tuple(sorted({layer for each in needs for layer in each.taps}))
    return Needs(taps, any(each.hidden_pre for each in needs), True)


def _each(features: Features, change: Callable[[Tensor], Tensor]) -> Features:
    """The same change to all tensors."""
    pre, post = features.hidden_pre, features.hidden_post
    return Features(
        {layer: change(tensor) for layer, tensor in features.taps.items()},
        None if pre is None else change(pre),
        None if post is None else change(post),
    )

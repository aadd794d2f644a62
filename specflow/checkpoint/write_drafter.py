"""A drafter as it lies in a directory, under our own tensor names: what the writers of layouts begin with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from specflow.draft.shapes import ShapeOptions
from specflow.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["StoredDrafter", "Supply", "changed_options", "refuse_unsaid", "whole_norms"]

O = TypeVar("O", bound=BaseModel)  # noqa: E741

_OF_RUNNING = ("weights", "seed", "runtime", *ShapeOptions.model_fields)
"""Options that say how a drafter is run, not what it is: every layout leaves them to the engine."""

_LATER = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Options of EAGLE-3 that came after its authors' own code."""


@dataclass(frozen=True, slots=True)
class StoredDrafter:
    """A drafter's options and tensors.

    Args:
        source: Name of its source.
        options: Of the source; what nobody set is the source's default, or left to the target.
        tensors: Under our own names.
        where: Its directory, for errors.
        k: Draft tokens of a round that its recipe asks for; None: nobody says.
    """

    source: str
    options: BaseModel
    tensors: Mapping[str, Tensor]
    where: str
    k: int | None = None

    def option(self, name: str) -> Any:
        """The value of an option, None where the source has no such option."""
        return getattr(self.options, name, None)

    def with_whole_norms(self) -> StoredDrafter:
        """The same with gains as they are, where they are stored as their distance from 1."""
        if not self.option("offset_norms"):
            return self
        options = changed_options(self.options, offset_norms=False)
        return replace(self, options=options, tensors=whole_norms(self.tensors))

    def without_confidence(self) -> StoredDrafter:
        """The same without its confidence head: the drafts stay what they are, and nothing foretells which stand."""
        if not self.option("confidence_head"):
            return self
        fields = type(self.options).model_fields
        names = [name for name in ("confidence_bias", "confidence_tokens", "temperatures") if name in fields]
        plain = {name: fields[name].default for name in names}
        kept = {name: tensor for name, tensor in self.tensors.items() if not name.startswith("confidence_head.")}
        return replace(self, options=changed_options(self.options, confidence_head=False, **plain), tensors=kept)


class Supply:
    """Named tensors that a writer takes one by one, so that none is forgotten.

    Args:
        tensors: All of them.
        where: Their directory, for errors.
    """

    def __init__(self, tensors: Mapping[str, Tensor], where: str) -> None:
        self._tensors, self.where, self._left = tensors, where, set(tensors)

    def has(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor.

        Raises:
            CheckpointError: It is missing, or has another shape.
        """
        if name not in self._tensors:
            raise CheckpointError(self.where, f"tensor {name!r} is missing", f"shape {shape}")
        tensor = self._tensors[name]
        if tuple(tensor.shape) != shape:
            hint = "is this the target the drafter was trained for?"
            raise CheckpointError(self.where, f"{name} has shape {tuple(tensor.shape)}", f"{shape}", hint)
        self._left.discard(name)
        return tensor

    def skip(self, name: str) -> None:
        """Account for a tensor that follows from others."""
        self._left.discard(name)

    def rows(self, name: str) -> int | None:
        """First size of a tensor; None where there is none."""
        return int(self._tensors[name].shape[0]) if name in self._tensors else None

    def close(self, layout: str) -> None:
        """Refuse tensors that the layout has no place for.

        Raises:
            CheckpointError: Naming them.
        """
        if self._left:
            names = ", ".join(sorted(self._left)[:4])
            found = f"{len(self._left)} tensors that the {layout} layout has no place for: {names}"
            raise CheckpointError(self.where, found)


def refuse_unsaid(stored: StoredDrafter, said: frozenset[str], layout: str) -> None:
    """Refuse options that a layout has no word for: its readers would draft with another network than was trained.

    Args:
        stored: The drafter.
        said: Options that the layout says, or that its writer checks.
        layout: Its name, for the error.

    Raises:
        CheckpointError: Naming the option.
    """
    for name, field in type(stored.options).model_fields.items():
        value = getattr(stored.options, name)
        if name in said or name in _OF_RUNNING or value == field.get_default(call_default_factory=True):
            continue
        hint = "--drop-confidence writes the drafter without it" if name == "confidence_head" else ""
        if layout == "official" and name in _LATER:
            hint = "--to speculators has a word for it"
        expected = f"{field.default!r}: the {layout} layout has no word for it"
        raise CheckpointError(stored.where, f"{name} is {value!r}", expected, hint)


def changed_options(options: O, **values: Any) -> O:
    """The options with some of them set anew.

    Raises:
        CheckpointError: They do not go together.
    """
    explicit = {name: getattr(options, name) for name in options.model_fields_set}
    try:
        return type(options).model_validate({**explicit, **values})
    except ValidationError as error:
        raise CheckpointError("its options", error.errors()[0]["msg"], "options that go together") from error


def whole_norms(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with 1 added to the gains of norms."""
    return {
        name: (tensor.float() + 1.0).to(tensor.dtype) if tensor.ndim == 1 and "norm" in name else tensor
        for name, tensor in tensors.items()
    }

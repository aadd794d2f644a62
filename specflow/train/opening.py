"""From a recipe to the layers that are trained: which drafter, its options, and the tensors it begins with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from specflow.checkpoint.layout import read
from specflow.draft.base import SourceContext
from specflow.draft.borrowed import TargetTables
from specflow.draft.checkpoint import read_options
from specflow.errors import CheckpointError, GraphError, RecipeError
from specflow.target.load import read_tensors
from specflow.train.objective_options import OBJECTIVES, LossName, ObjectiveOptions, block_gamma
from specflow.train.output import method_of_run
from specflow.train.start import StartTensors, vocabulary_offsets

if TYPE_CHECKING:
    from pathlib import Path

    from specflow.build import LoadedTarget
    from specflow.draft.trainable import Trainable
    from specflow.recipe import Recipe
    from specflow.recipe_draft import SourceSection
    from specflow.train.options import TrainOptions

__all__ = ["Beginning", "Trainee", "published_objective", "trained_part"]

C = TypeVar("C", bound=BaseModel)

_BLOCK = ("input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.", "mlp.")
"""Tensors of a decoder block that mean nothing without each other."""
_OUT = ("o_proj.weight", "down_proj.weight")
_LOUD = 0.03
"""A drafter's stream begins at unit size; that of the target's last layers is thirty times as large, and so is what
they add to it."""
_NORM = re.compile(r"(.+\.)?norm\.weight")
_HEAD = "lm_head.weight"


def trained_part(recipe: Recipe) -> tuple[int, SourceSection]:
    """The source of a recipe that can be trained, and its place among the draft's parts.

    Raises:
        RecipeError: There is none, or more than one.
    """
    if recipe.draft is None or recipe.draft.k == 0:
        raise RecipeError("draft", "a recipe that decodes plainly", "a drafter with weights", "for example eagle3")
    found = [
        (place, part)
        for place, part in enumerate(recipe.draft.parts)
        if part.info.trainable is not None and part.method not in part.info.untrained
    ]
    if not found:
        names = ", ".join(part.source for part in recipe.draft.parts)
        raise RecipeError("draft.source", f"{names}: nothing to train, it has no weights", "a drafter with weights")
    if len(found) > 1:
        names = ", ".join(part.source for _, part in found)
        raise RecipeError(
            "draft", f"several drafters with weights: {names}", "one", "train each with a recipe of its own"
        )
    return found[0]


@dataclass(frozen=True, slots=True)
class Trainee:
    """The drafter that is trained, with what it takes from its target."""

    trainable: Trainable
    tables: TargetTables
    depth: int  # K
    coverage: float | None  # share of the answers' tokens in its reduced vocabulary; None: it has all


def published_objective(section: SourceSection, trainee: Trainee) -> ObjectiveOptions:
    """What the drafter is trained by where nobody says: as published for its method, else for its source.

    A confidence head learns wherever there is one.
    """
    names = (section.method or "", section.source, "distillation")
    found = OBJECTIVES[next(name for name in names if name in OBJECTIVES)]
    losses: dict[LossName, float] = {name: each for name, each in found.losses.items() if name != "confidence"}
    if trainee.trainable.confidence is not None:
        losses["confidence"] = found.losses.get("confidence", 1.0)
    rate = block_gamma(trainee.depth) if found.decay == "exponential" else found.rate
    return found.model_copy(update={"losses": losses, "rate": rate})


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a drafter's first weights are made from.

    Args:
        section: Its part of the recipe.
        loaded: The target.
        options: Of the run.
        counts: How often each token occurs in the answers.  # [V]
        checkpoint: Directory whose tensors it goes on from; None: new ones.
    """

    section: SourceSection
    loaded: LoadedTarget
    options: TrainOptions
    counts: Tensor
    checkpoint: Path | None = None

    @property
    def depth(self) -> int:
        """Draft positions that are trained."""
        return self.options.depth or self.section.k

    def make(self) -> Trainee:
        """The drafter with its first weights.

        Raises:
            GraphError: Its options fit neither each other nor the target.
            CheckpointError: The checkpoint does not hold what the drafter needs.
            RecipeError: The recipe names weights, and nobody said to go on from them.
        """
        tables = TargetTables(self.loaded.target)
        if self.checkpoint is not None:
            trainable = self._continued(self.checkpoint, tables)
        else:
            options = self._sized(self._new())
            given = self._map_of(options)
            if self.options.start != "random":
                given |= self._copies(self._build(options, given, tables), tables)
            trainable = self._build(options, given, tables)
        return Trainee(trainable, tables, self.depth, self._coverage(trainable))

    def _new(self) -> BaseModel:
        """Options of a drafter that begins with new weights."""
        options, name = self.section.options, self.section.info.checkpoint
        if (weights := getattr(options, name, None)) is not None:
            hint = f"leave draft.{name} out; --from {weights} goes on from them"
            raise RecipeError(f"draft.{name}", f"{weights}, weights that are there already", "new ones", hint)
        return options

    def _continued(self, checkpoint: Path, tables: TargetTables) -> Trainable:
        """The drafter with a checkpoint's weights."""
        try:
            return self._build(*self._opened(checkpoint), tables)
        except (CheckpointError, GraphError) as error:
            theirs, ours = method_of_run(checkpoint), self.section.method or self.section.source
            if theirs in (None, ours):
                raise
            hint = f"--from a run of {ours}, or train with the recipe of {theirs}"
            raise CheckpointError("--from", f"{checkpoint}, a run of {theirs}", f"weights of {ours}", hint) from error

    def _opened(self, checkpoint: Path) -> tuple[BaseModel, dict[str, Tensor]]:
        """Options and tensors of a checkpoint."""
        options = self.section.options
        if "weights" in type(options).model_fields:
            options, given = read_options(options, str(checkpoint)), dict(read(checkpoint).tensors)
        else:
            given = dict(read_tensors(checkpoint))
            if "d2t" in given:  # a whole model: config.json is its own
                options = _with(options, draft_vocab_size=len(given["d2t"]))
        if getattr(options, "offset_norms", False):
            found = "gains that are stored as their distance from 1"
            raise GraphError("--from", f"{checkpoint} has {found}", "gains as they are", "train from other weights")
        if getattr(options, "temperatures", ()) and "temperatures" not in self.section.options.model_fields_set:
            options = _with(options, temperatures=())  # they were fitted to the head as it was
        return options, given

    def _build(self, options: BaseModel, given: Mapping[str, Tensor], tables: TargetTables) -> Trainable:
        make = self.section.info.trainable
        assert make is not None, "a part that cannot be trained was chosen"
        context = SourceContext(
            target=tables,
            k=self.depth,
            dependency=self.section.dependency,
            codec=self.loaded.codec,
            identify=self.loaded.identity,
        )
        return make(options, context, StartTensors(self.options.seed, given))

    def _sized(self, options: C) -> C:
        """The options with what training decides: the block it is trained for, and a reduced vocabulary."""
        slots = getattr(options, "slots", None)
        if slots is not None and getattr(options, "block_size", 0) is None:
            options = _with(options, block_size=slots(self.depth))
        size, full = self.options.draft_vocab, self.loaded.target.info.vocab_size
        if size == 0 or size >= full or getattr(options, "draft_vocab_size", 0) is not None:
            return options
        try:
            return _with(options, draft_vocab_size=size)
        except ValidationError as error:
            if "draft_vocab" in self.options.model_fields_set:
                reason = error.errors()[0]["msg"]
                raise GraphError("--draft-vocab", reason, "a source whose vocabulary can be reduced") from error
            return options

    def _map_of(self, options: BaseModel) -> dict[str, Tensor]:
        """The map of a reduced vocabulary: the stop ids, and what the answers use most."""
        size = getattr(options, "draft_vocab_size", None)
        if size is None:
            return {}
        return {"d2t": vocabulary_offsets(self.counts, size, self.loaded.codec.stop_ids)}

    def _copies(self, trainable: Trainable, tables: TargetTables) -> dict[str, Tensor]:
        """What the drafter can begin with: whole blocks, norm and head of the target, and layers that let through."""
        state = trainable.state()
        files = self.loaded.files
        theirs: Mapping[str, Tensor] = {} if files is None else read_tensors(files.directory)
        copies: dict[str, Tensor] = {}
        prefixes = sorted({name.partition("self_attn.")[0] for name in state if "self_attn." in name}, key=_natural)
        for place, prefix in enumerate(prefixes):
            layer = self.loaded.target.info.num_layers - len(prefixes) + place
            copies |= _block(state, prefix, theirs, f"model.layers.{max(layer, 0)}.")
        copies |= _passing(state)
        if self.options.start == "fitted":  # a block adds nothing to the fitted rows before it has learnt something
            copies |= {name: torch.zeros_like(tensor) for name, tensor in state.items() if name.endswith(_OUT)}
        for name, tensor in state.items():
            if _NORM.fullmatch(name) and _fits(theirs, "model.norm.weight", tensor):
                copies[name] = theirs["model.norm.weight"].float()
        if _HEAD in state and state[_HEAD].shape[1] == tables.head.shape[1]:
            vocabulary = trainable.vocabulary
            copies[_HEAD] = tables.head.float() if vocabulary is None else tables.head[vocabulary.to_target].float()
        return copies

    def _coverage(self, trainable: Trainable) -> float | None:
        vocabulary = trainable.vocabulary
        if vocabulary is None:
            return None
        return float(self.counts[vocabulary.to_target.cpu()].sum() / self.counts.sum().clamp_min(1))


def _block(state: Mapping[str, Tensor], prefix: str, theirs: Mapping[str, Tensor], layer: str) -> dict[str, Tensor]:
    """The target's tensors for a block, if all of the drafter's have their counterpart there."""
    wanted = {
        name: f"{layer}{name.removeprefix(prefix)}"
        for name in state
        if name.startswith(prefix) and name.removeprefix(prefix).startswith(_BLOCK)
    }
    if not all(_fits(theirs, source, state[name]) for name, source in wanted.items()):
        return {}
    return {name: theirs[source].float() * (_LOUD if name.endswith(_OUT) else 1.0) for name, source in wanted.items()}


def _passing(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Layers that begin by letting through: a projection all that comes; a fusing layer what is nearest to the next
    token, the last of several layers of the target, or both of an embedding and a state.
    """
    copies = {}
    for name, tensor in state.items():
        if name.endswith(".projection.weight"):
            copies[name] = torch.eye(tensor.shape[0])
        if re.fullmatch(r"(.+\.)?fc\.weight", name) and tensor.shape[1] % tensor.shape[0] == 0:
            parts = tensor.shape[1] // tensor.shape[0]
            one = torch.eye(tensor.shape[0])
            kept = (one, one) if parts == 2 else (*[torch.zeros_like(one)] * (parts - 1), one)
            copies[name] = torch.cat(kept, 1)
    return copies


def _fits(theirs: Mapping[str, Tensor], name: str, tensor: Tensor) -> bool:
    return name in theirs and theirs[name].shape == tensor.shape


def _natural(name: str) -> list[Any]:
    return [int(piece) if piece.isdigit() else piece for piece in re.split(r"(\d+)", name)]


def _with(options: C, **values: Any) -> C:
    """The options with some more of them set."""
    explicit = {name: getattr(options, name) for name in options.model_fields_set}
    return type(options).model_validate({**explicit, **values})

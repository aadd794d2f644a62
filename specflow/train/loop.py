"""The optimiser's loop: AdamW with a warm-up and a cosine, over batches whose loss is pooled by weight.

A step's loss is the sum over all its batches, in all processes, over the sum of their weights: neither the number of
processes nor the way in which texts fell into batches changes what is minimised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import cos, isfinite, pi
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from specflow.draft.nn.block import RMSNorm
from specflow.errors import TrainingError
from specflow.train.batch import Drafting

if TYPE_CHECKING:
    from specflow.draft.trainable import Trainable
    from specflow.train.batch import Batch, Slot
    from specflow.train.options import TrainOptions
    from specflow.train.processes import Processes

__all__ = ["Loop", "Narrowed", "Pulse", "StepReport", "rate_at"]

_BETAS = (0.9, 0.95)
_SUMS = ("loss", "weight", "positions", "asked")
"""What is added up beside the parts of the loss."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step saw, in all processes together."""

    step: int  # steps that are done, this one included
    loss: float
    terms: Mapping[str, float]  # its parts, pooled as it is
    rate: float
    norm: float  # of the gradient, before clipping
    positions: int  # without padding
    asked: bool  # a process was asked to stop


def rate_at(step: int, steps: int, options: TrainOptions) -> float:
    """The learning rate of a step, counted from 0: a straight rise, then a cosine down to 0."""
    rise = round(options.warmup * steps)
    if step < rise:
        return options.lr * (step + 1) / rise
    return options.lr * 0.5 * (1.0 + cos(pi * (step - rise) / max(steps - rise, 1)))


class Narrowed(Drafting):
    """Drafts whose products are made in another type; their logits, and what judges them, stay as they are.

    Args:
        drafting: Makes the drafts.
        dtype: Of products.
    """

    def __init__(self, drafting: Drafting, dtype: torch.dtype) -> None:
        super().__init__()
        self._drafting, self._dtype = drafting, dtype

    def forward(self, batch: Batch) -> Sequence[Slot]:
        """See `Drafting.forward`."""
        with torch.autocast(batch.tokens.device.type, dtype=self._dtype):
            slots: Sequence[Slot] = self._drafting(batch)
        return slots


@dataclass(slots=True)
class Pulse:
    """Watches the loss: a run that has lost its way is not worth its hours."""

    smoothed: float = 0.0
    first: float = 0.0
    best: float = float("inf")
    steps: int = 0
    bad: int = 0

    FACTOR, PATIENCE, MEMORY, FLOOR = 3.0, 100, 0.95, 0.02

    def feel(self, loss: float, step: int) -> None:
        """Take note of the loss of a step.

        Raises:
            TrainingError: It is no number, or has long been far above its best.
        """
        if not isfinite(loss):
            raise _diverged(f"the loss of step {step} is {loss}")
        self.steps += 1
        memory = min(self.MEMORY, 1.0 - 1.0 / self.steps)
        self.smoothed = memory * self.smoothed + (1.0 - memory) * loss
        self.first = self.first or self.smoothed
        self.best = min(self.best, self.smoothed)
        # A loss that has all but gone may treble without harm.
        limit = self.FACTOR * max(self.best, self.FLOOR * abs(self.first))
        self.bad = self.bad + 1 if self.smoothed > limit else 0
        if self.bad > self.PATIENCE:
            found = f"the loss has been above {limit:.3g} for {self.bad} steps, {self.FACTOR:g} times its best"
            raise _diverged(f"step {step}: {found}")


def _diverged(found: str) -> TrainingError:
    hint = "begin again in a new directory with a lower --lr, a longer --warmup or a lower --clip"
    return TrainingError("train", f"the run diverged: {found}", "a loss that falls", hint)


class Loop:
    """Steps of one run.

    Args:
        objective: From a batch to its loss.
        trainable: Whose parameters are trained.
        options: Of the run.
        steps: Of the whole run, which the learning rate follows.
        processes: That share its batches.
    """

    def __init__(
        self, objective: nn.Module, trainable: Trainable, options: TrainOptions, steps: int, processes: Processes
    ) -> None:
        self._options, self._steps, self._processes = options, steps, processes
        self.parameters = list(trainable.parameters())
        for parameter in self.parameters:
            parameter.requires_grad_(True)
        trained = {id(parameter) for parameter in objective.parameters() if parameter.requires_grad}
        assert trained == {id(each) for each in self.parameters}, "what is drafted with is not what is trained"
        self._optimiser = torch.optim.AdamW(_groups(trainable, options), lr=options.lr, betas=_BETAS)
        self._objective = processes.prepare(objective)
        self.pulse = Pulse()
        self.done = 0

    def step(self, batches: Sequence[Callable[[], Batch]], asked: bool = False) -> StepReport:
        """One step of the optimiser.

        Args:
            batches: This process's share of the step, each made when its turn comes.
            asked: This process was asked to stop; all of them then say so.

        Raises:
            TrainingError: The loss has left the numbers, or its way.
        """
        rate = rate_at(self.done, self._steps, self._options)
        for group in self._optimiser.param_groups:
            group["lr"] = rate * group["scale"]
        self._optimiser.zero_grad()
        sums = self._gradients(batches, asked)
        weight = max(float(sums["weight"]), 1e-12)
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(self._processes.count / weight)
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self._options.clip))
        loss = sums["loss"] / weight
        self.pulse.feel(loss if isfinite(norm) else norm, self.done + 1)
        self._optimiser.step()
        self.done += 1
        terms = {name: value / weight for name, value in sums.items() if name not in _SUMS}
        return StepReport(self.done, loss, terms, rate, norm, int(sums["positions"]), sums["asked"] > 0)

    def state(self) -> dict[str, Any]:
        """All that the next step follows from."""
        return {
            "step": self.done,
            "parameters": [parameter.detach() for parameter in self.parameters],
            "optimiser": self._optimiser.state_dict(),
            "pulse": asdict(self.pulse),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the same run."""
        with torch.no_grad():
            for parameter, kept in zip(self.parameters, state["parameters"], strict=True):
                parameter.copy_(kept)
        self._optimiser.load_state_dict(state["optimiser"])
        self.pulse = Pulse(**{field.name: state["pulse"][field.name] for field in fields(Pulse)})
        self.done = int(state["step"])

    def _gradients(self, batches: Sequence[Callable[[], Batch]], asked: bool) -> dict[str, float]:
        """Gradients of the summed loss, a mean over processes; and the sums that pool it, over all of them."""
        sums: dict[str, Tensor] = {}
        for number, make in enumerate(batches):
            batch = make()
            with self._processes.apart(self._objective, alone=number + 1 < len(batches)):
                loss = self._objective(batch)
                loss.sum.backward()
            found = {"loss": loss.sum, "weight": loss.weight, "positions": batch.valid.sum(), **loss.terms}
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + torch.as_tensor(value).detach().double()
        sums["asked"] = torch.tensor(float(asked), dtype=torch.float64)
        device = self.parameters[0].device
        pooled = self._processes.total(torch.stack([value.to(device) for value in sums.values()]))
        return dict(zip(sums, pooled.tolist(), strict=True))


def _groups(trainable: Trainable, options: TrainOptions) -> list[dict[str, Any]]:
    """Parameters by how far a step takes them, and whether they decay.

    A norm keeps its gain times sqrt(H), so a step of the gain itself is that much longer.
    """
    scales = {
        id(module.gain): float(module.gain.shape[0]) ** 0.5
        for module in trainable.modules().modules()
        if isinstance(module, RMSNorm)
    }
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for parameter in trainable.parameters():
        groups.setdefault((scales.get(id(parameter), 1.0), parameter.ndim > 1), []).append(parameter)
    return [
        {"params": parameters, "scale": scale, "weight_decay": options.weight_decay if decays else 0.0}
        for (scale, decays), parameters in groups.items()
    ]

"""The optimiser's loop: rates by hand, pooled gradients, norms that learn, and runs that lose their way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import cos, nan, pi
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from specflow.draft.nn.block import RMSNorm
from specflow.errors import DataError, TrainingError
from specflow.train.batch import Batch, Drafting, Slot
from specflow.train.checkpoints import load_state, save_state
from specflow.train.loop import Loop, Narrowed, Pulse, rate_at
from specflow.train.objective import Loss
from specflow.train.options import TrainOptions
from specflow.train.processes import Processes
from specflow.types import Features

OPTIONS = TrainOptions(lr=0.1, warmup=0.0, clip=1e9, weight_decay=0.5)


@dataclass
class Toy:
    """Parameters of a drafter that is none."""

    parts: nn.ModuleList

    def modules(self) -> nn.ModuleList:
        return self.parts

    def parameters(self) -> list[nn.Parameter]:
        return list(self.parts.parameters())


class Square(nn.Module):
    """Loss (w . x)^2 summed over the tokens of a batch, a weight of one each."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1, bias=True)
        with torch.no_grad():
            self.line.weight.fill_(1.0)
            self.line.bias.fill_(0.0)

    def forward(self, batch: Batch) -> Loss:
        total = self.line(batch.tokens.float().unsqueeze(-1)).square().sum()
        return Loss(total, torch.tensor(float(batch.tokens.numel())), {"square": total.detach()})


def batch_of(*tokens: int) -> Callable[[], Batch]:
    rows = torch.tensor([tokens])
    valid = torch.ones_like(rows, dtype=torch.bool)
    return lambda: Batch(rows, valid, valid, Features({}, None, torch.zeros(1, len(tokens), 2)), 0)


def loop_of(objective: nn.Module, options: TrainOptions = OPTIONS, steps: int = 10) -> Loop:
    return Loop(objective, Toy(nn.ModuleList([objective])), options, steps, Processes(on_cpu=True))  # type: ignore[arg-type]


def test_the_rate_rises_and_falls_as_a_cosine() -> None:
    options = TrainOptions(lr=2.0, warmup=0.2)
    assert [rate_at(step, 10, options) for step in (0, 1, 2)] == pytest.approx([1.0, 2.0, 2.0])
    assert rate_at(6, 10, options) == pytest.approx(1.0)
    assert rate_at(9, 10, options) == pytest.approx(1.0 + cos(pi * 7 / 8))
    assert rate_at(0, 1, TrainOptions(lr=2.0, warmup=0.04)) == 2.0


def test_loss_and_gradient_are_pooled_over_tokens() -> None:
    objective = Square()
    report = loop_of(objective).step([batch_of(1, 2, 3), batch_of(4)])
    # d/dw of sum (w x)^2 / 4 at w = 1 is 2 * 30 / 4, d/db is 2 * 10 / 4.
    assert report.loss == pytest.approx(30 / 4)
    assert report.terms == pytest.approx({"square": 30 / 4})
    assert report.norm == pytest.approx((15.0**2 + 5.0**2) ** 0.5)
    assert report.positions == 4


def test_how_texts_fall_into_batches_changes_nothing() -> None:
    one, other = Square(), Square()
    loop_of(one).step([batch_of(1, 2, 3, 4)])
    loop_of(other).step([batch_of(1, 2), batch_of(3), batch_of(4)])
    assert torch.allclose(one.line.weight, other.line.weight, atol=1e-7)


def test_the_first_step_of_adam_goes_by_the_rate_and_matrices_decay() -> None:
    objective = Square()
    loop_of(objective).step([batch_of(1, 2)])
    # Adam's first step is lr * sign of the gradient; decay takes lr * 0.5 of the weight before it.
    assert objective.line.weight.item() == pytest.approx(1.0 - 0.1 * 0.5 - 0.1, abs=1e-5)
    assert objective.line.bias.item() == pytest.approx(-0.1, abs=1e-5)


def test_gradients_are_clipped() -> None:
    objective = Square()
    loop = loop_of(objective, TrainOptions(lr=0.1, clip=0.5))
    assert loop.step([batch_of(5)]).norm > 0.5
    norm = torch.stack([each.grad.square().sum() for each in loop.parameters if each.grad is not None]).sum().sqrt()
    assert float(norm) == pytest.approx(0.5, rel=1e-4)


def test_norms_learn_at_the_rate_of_their_weight() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = RMSNorm(torch.ones(16), 1e-6)

        def forward(self, batch: Batch) -> Loss:
            total: Tensor = self.norm(torch.ones(1, 16)).sum()
            return Loss(total, torch.tensor(1.0), {})

    objective = Normed()
    loop_of(objective, TrainOptions(lr=0.1, warmup=0.0)).step([batch_of(1)])
    assert torch.allclose(objective.norm.weight, torch.full((16,), 0.9), atol=1e-5)


def test_what_is_not_drafted_with_cannot_be_trained() -> None:
    objective = Square()
    with pytest.raises(AssertionError, match="not what is trained"):
        Loop(objective, Toy(nn.ModuleList([objective, nn.Linear(1, 1)])), OPTIONS, 3, Processes(on_cpu=True))  # type: ignore[arg-type]


def test_a_loss_that_is_no_number_ends_the_run() -> None:
    class Broken(Square):
        def forward(self, batch: Batch) -> Loss:
            loss = super().forward(batch)
            return Loss(loss.sum * nan, loss.weight, loss.terms)

    objective = Broken()
    with pytest.raises(TrainingError, match="loss of step 1 is nan") as found:
        loop_of(objective).step([batch_of(1)])
    assert "--lr" in found.value.hint
    assert objective.line.weight.item() == 1.0


def test_a_loss_far_above_its_best_ends_the_run_after_a_while() -> None:
    pulse = Pulse()
    for step in range(200):
        pulse.feel(1.0 - step / 400, step)
    pulse.feel(40.0, 200)  # one bad batch is none
    for step in range(201, 280):
        pulse.feel(0.5, step)
    with pytest.raises(TrainingError, match="times its best"):
        list(map(pulse.feel, [5.0] * 200, range(280, 480)))


def test_small_losses_may_shiver() -> None:
    pulse = Pulse()
    for step in range(100):
        pulse.feel(10.0 * 0.8**step, step)
    for step in range(100, 400):
        pulse.feel(1e-3, step)


def test_a_state_is_kept_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_state(tmp_path) is None
    save_state(tmp_path / "state", {"step": 1, "parameters": [torch.ones(2)]})
    monkeypatch.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(OSError("no room")))
    with pytest.raises(DataError, match="no room"):
        save_state(tmp_path / "state", {"step": 2})
    state = load_state(tmp_path / "state")
    assert state is not None
    assert state["step"] == 1
    assert [file.name for file in (tmp_path / "state").iterdir()] == ["state.pt"]
    (tmp_path / "state" / "state.pt").write_bytes(b"half")
    with pytest.raises(DataError, match="torn or damaged, 4 bytes"):
        load_state(tmp_path / "state")


def test_a_loop_goes_on_from_its_state_bit_for_bit() -> None:
    whole, first, second = (loop_of(Square()) for _ in range(3))
    for number in range(4):
        whole.step([batch_of(number + 1, 3)])
    for number in range(2):
        first.step([batch_of(number + 1, 3)])
    second.restore(first.state())
    for number in range(2, 4):
        second.step([batch_of(number + 1, 3)])
    assert second.done == 4
    assert all(torch.equal(one, other) for one, other in zip(whole.parameters, second.parameters, strict=True))
    assert whole.pulse == second.pulse


def test_products_can_be_made_in_bfloat16() -> None:
    class Wide(Drafting):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 4)

        def forward(self, batch: Batch) -> list[Slot]:
            logits = self.line(torch.ones(1, 4))
            return [Slot(logits, torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.bool))]

    drafting = Narrowed(Wide(), torch.bfloat16)
    assert drafting(batch_of(1)())[0].logits.dtype == torch.bfloat16


def test_options_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="set one of them"):
        TrainOptions(steps=3, epochs=1.0)
    with pytest.raises(ValueError, match="lower max_length"):
        TrainOptions(batch_tokens=100)
    assert all(field.description for field in TrainOptions.model_fields.values())


def test_shares_are_even() -> None:
    processes = Processes(on_cpu=True)
    processes.count, processes.rank = 2, 1
    assert list(processes.share(4)) == [1, 3]
    assert not processes.is_first
    assert processes.device(torch.device("cpu")) == torch.device("cpu")

"""A screen of the head leads to the full head's arg-max, whatever the weights; without its bound it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from specflow.onnx import screen, screened
from specflow.onnx.decoder import write_head
from specflow.onnx.graphs import GraphSet, Precision
from specflow.onnx.screen import MOST_CANDIDATES, screen_refusal, write_screen
from specflow.onnx.screened import ScreenedHead, screens_hold
from specflow.onnx.session import OnnxSession, Place

PLACE = Place(torch.device("cpu"), 1)


class Full:
    """The full head as a graph; counts the rows that it was asked for."""

    def __init__(self, session: OnnxSession, outputs: int) -> None:
        self.session, self.outputs, self.rows = session, outputs, 0

    def __call__(self, rows: Tensor) -> Tensor:
        self.rows += len(rows)
        return self.session.run({"scored": rows[None]}, {"logits": (1, len(rows), self.outputs)})["logits"][0]


def write(folder: Path, weight: Tensor) -> None:
    with GraphSet(folder, Precision.named("float32")) as graphs:
        with graphs.graph("screen") as writer:
            write_screen(writer, weight)
        with graphs.graph("head") as writer:
            write_head(writer, weight)


def heads(folder: Path, weight: Tensor) -> tuple[ScreenedHead, Full]:
    write(folder, weight)
    full = Full(OnnxSession(folder / "head.onnx", PLACE), len(weight))
    return ScreenedHead(OnnxSession(folder / "screen.onnx", PLACE), weight, full), full


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def hostile_weight(outputs: int, inputs: int) -> Tensor:
    """Outliers that spoil the step of a token, norms from tiny to large, weights that lie between two levels."""
    weight = torch.randn(outputs, inputs, generator=generator(inputs))
    weight[: outputs // 4, 0] = 60.0
    weight[outputs // 4 : outputs // 2] *= torch.logspace(-6, 3, outputs // 2 - outputs // 4).unsqueeze(1)
    between = weight[outputs // 2 : -2]
    between[:] = (between * 10).round() + 0.5
    between[:, 0] = 127.0
    weight[-2], weight[-1] = 0.0, torch.eye(inputs)[0]
    return weight


def hostile_rows(weight: Tensor) -> Tensor:
    """Rows that meet what the whole numbers lose of a token, rows along a token, rows with one large entry."""
    steps = weight.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
    lost = weight - (weight / steps).round() * steps
    spiked = torch.randn(4, weight.shape[1], generator=generator(1))
    spiked[:, 0] = 300.0
    flat = torch.ones(2, weight.shape[1]) * torch.tensor([[1.0], [-1.0]])
    return torch.cat((lost[:-2] * 50, -lost[:-2], weight[:-2].sign(), spiked, spiked * 1e-6, spiked * 1e6, flat))


def tight_weight(outputs: int = 300, inputs: int = 64) -> Tensor:
    """Every token has a rival whose logits are closer than 8 bits can tell, and some have a twin."""
    base = torch.randn(outputs // 3, inputs, generator=generator(3))
    rival = base + 2e-3 * torch.randn(base.shape, generator=generator(4))
    twin = base.clone()
    twin[::2] += 2e-6 * torch.randn(twin[::2].shape, generator=generator(5))
    return torch.cat((base, rival, twin))


@pytest.mark.parametrize("inputs", [1, 7, 64, 577])
def test_no_logit_is_above_its_bound(tmp_path: Path, inputs: int) -> None:
    weight = hostile_weight(MOST_CANDIDATES, inputs)  # as many tokens as the screen shows
    head, full = heads(tmp_path, weight)
    rows = hostile_rows(weight)
    rows = rows[rows.abs().amax(1) > 0]
    tokens, bounds = head._screen(rows)
    assert (np.sort(tokens, axis=1) == np.arange(len(weight))).all()
    for logits in (full(rows), (rows.unsqueeze(1) * weight).flip(-1).cumsum(-1)[..., -1]):  # two orders of the sum
        assert (np.take_along_axis(logits.double().numpy(), tokens, axis=1) <= bounds).all()


def test_a_bound_is_not_far_above_its_logit(tmp_path: Path) -> None:
    weight = torch.randn(MOST_CANDIDATES, 576, generator=generator(0))
    head, _ = heads(tmp_path, weight)
    rows = torch.randn(50, 576, generator=generator(1))
    tokens, bounds = head._screen(rows)
    exact = np.take_along_axis((rows.double() @ weight.double().T).numpy(), tokens, axis=1)
    share = (bounds - exact) / (rows.norm(dim=1).numpy()[:, None] * weight.norm(dim=1).numpy()[tokens])
    assert 0 < share.max() < 0.025


@pytest.mark.parametrize("weight", [tight_weight(), hostile_weight(200, 33)], ids=["tight", "hostile"])
def test_it_picks_what_the_full_head_picks(tmp_path: Path, weight: Tensor) -> None:
    head, full = heads(tmp_path, weight)
    rows = torch.cat((weight[::3], torch.randn(100, weight.shape[1], generator=generator(8))))
    rows = rows[torch.randperm(len(rows), generator=generator(9))].contiguous()
    expected = full(rows).numpy().argmax(axis=1)
    found = [int(head.pick(row[None])) for row in rows]
    assert found == expected.tolist()
    for width in (2, 5, 16):
        parts = [head.pick(rows[begin : begin + width]) for begin in range(0, len(rows), width)]
        assert torch.cat(parts).tolist() == found


def test_without_the_bound_it_picks_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the test above."""
    monkeypatch.setattr(screen, "_errors", lambda exact, taken, steps: np.full(len(steps), 1e-20))
    weight = tight_weight()
    head, full = heads(tmp_path, weight)
    rows = weight[:100].contiguous()
    assert head.pick(rows).tolist() != full(rows).numpy().argmax(axis=1).tolist()


def test_rows_that_stay_open_go_to_the_full_head_and_no_others(tmp_path: Path) -> None:
    weight = torch.randn(100, 64, generator=generator(0))
    weight[70] = weight[7]
    head, full = heads(tmp_path, weight)
    assert head.pick(weight[[3, 4, 5]]).tolist() == [3, 4, 5]
    assert full.rows == 0
    assert head.pick(weight[[3, 70, 5]]).tolist() == [3, 7, 5]  # the lowest id of equals
    assert full.rows == 1


def test_more_candidates_than_the_screen_shows_go_to_the_full_head(tmp_path: Path) -> None:
    weight = torch.randn(1, 64, generator=generator(0)) + 1e-3 * torch.randn(200, 64, generator=generator(1))
    head, full = heads(tmp_path, weight)
    rows = weight[:10].contiguous()
    expected = full(rows).numpy().argmax(axis=1)
    assert (head.pick(rows).numpy() == expected).all()
    assert full.rows == 20


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30, torch.inf, torch.nan])
def test_rows_out_of_range_go_to_the_full_head(tmp_path: Path, scale: float) -> None:
    weight = torch.randn(100, 64, generator=generator(0))
    head, full = heads(tmp_path, weight)
    rows = weight[[20, 30]] * torch.tensor([[1.0], [scale]])
    found = head.pick(rows)
    assert full.rows == 1
    assert found.tolist() == full(rows).numpy().argmax(axis=1).tolist()


class Emulated:
    """A screen on a processor that multiplies bytes with x86's vpmaddubsw: sums of two neighbours stay in 16 bits."""

    def __init__(self, path: Path, saturates: bool) -> None:
        self.outputs, self._saturates = OnnxSession(path, PLACE).outputs, saturates
        model: Any = onnx.load(path)
        product = next(node for node in model.graph.node if node.op_type == "MatMulIntegerToFloat")
        values: Any = {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}
        self._levels, self._steps = values[product.input[1]].astype(np.int64), values[product.input[3]]
        model.graph.output.append(onnx.helper.make_tensor_value_info(product.input[0], onnx.TensorProto.UINT8, None))
        self._wanted = [product.input[0], "unit"]
        self._session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])

    def run(self, feeds: dict[str, Tensor], wanted: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
        found: Any = self._session.run(self._wanted, {"rows": feeds["rows"].numpy()})
        halves, unit = found
        high, low = np.split(np.stack([self._product(row) for row in halves.astype(np.int64)]), 2)
        bounds, tokens = torch.from_numpy((256.0 * high + low) * self._steps).topk(wanted["tokens"][1])
        return {"bounds": bounds, "tokens": tokens, "unit": torch.from_numpy(unit)}

    def _product(self, row: NDArray[np.int64]) -> NDArray[np.int64]:
        products = row[:, None] * self._levels  # [H + 1, V]
        sums = np.add.reduceat(products, np.arange(0, len(row), 2))
        sums = sums.clip(-(2**15), 2**15 - 1) if self._saturates else sums
        found: NDArray[np.int64] = sums.sum(axis=0) - 128 * self._levels.sum(axis=0)
        return found


def paired_weight() -> Tensor:
    """Only one token has two neighbouring weights whose products leave 16 bits; no dense row's likeliest."""
    weight = 2e-3 * torch.randn(2000, 64, generator=generator(0))
    weight[torch.arange(2000), torch.arange(2000) % 64] = 1.0
    weight[1001] = 0.0
    weight[1001, 4:6] = 0.55
    return weight


@pytest.mark.parametrize("weight", [torch.randn(2000, 64, generator=generator(0)), paired_weight()])
def test_it_knows_where_its_bounds_do_not_hold(tmp_path: Path, weight: Tensor) -> None:
    head, full = heads(tmp_path, weight)
    assert head.holds()
    emulated: list[Any] = [Emulated(tmp_path / "screen.onnx", saturates) for saturates in (False, True)]
    assert [ScreenedHead(session, weight, full).holds() for session in emulated] == [True, False]


def test_it_is_said_of_a_cpu_whether_bounds_hold_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert screens_hold()
    monkeypatch.setattr(screened, "OnnxSession", lambda path, place: Emulated(path, saturates=True))
    assert not screens_hold()


@pytest.mark.parametrize("ulps", range(-3, 1))
@pytest.mark.parametrize("factor", [1, 2, 3, 50, 198, 199])
def test_the_largest_bound_stays_within_a_byte(factor: int, ulps: int) -> None:
    """Of errors that fill it to the last bit; the product of some is rounded to above 127."""
    largest = 127 / (factor * (1 + 1e-9))
    for _ in range(-ulps):
        largest = np.nextafter(largest, 0.0)
    errors = np.array([0.0, largest / 3, largest])
    found, bounds = screen._bounds(errors)
    assert found == factor
    assert (found * errors <= bounds).all()


@pytest.mark.parametrize("unused", [[0], list(range(50, 100))])
def test_tokens_that_nobody_uses_do_not_put_the_bounds_in_doubt(unused: list[int], tmp_path: Path) -> None:
    weight = torch.randn(100, 33, generator=generator(3))
    weight[unused] = 0.0
    screened, full = heads(tmp_path, weight)
    assert screened.holds()
    rows = torch.cat((torch.randn(5, 33, generator=generator(4)), torch.zeros(1, 33)))
    assert screened.pick(rows).equal(full(rows).argmax(-1))


def test_a_head_of_one_entry_can_be_probed(tmp_path: Path) -> None:
    assert heads(tmp_path, torch.randn(100, 1, generator=generator(0)))[0].holds()


def test_the_graph_is_valid_and_the_same_every_time(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, hostile_weight(100, 33))
    assert len({(tmp_path / name / "screen.onnx").read_bytes() for name in ("one", "two")}) == 1
    onnx.checker.check_model(str(tmp_path / "one" / "screen.onnx"))
    graph = onnx.load(tmp_path / "one" / "screen.onnx").graph
    assert [value.name for value in graph.output] == ["bounds", "tokens", "unit"]


def test_only_large_and_finite_heads_have_one() -> None:
    assert screen_refusal(torch.zeros(49152, 576)) == ""
    assert "512 x 576" in screen_refusal(torch.zeros(512, 576))
    assert screen_refusal(torch.zeros(MOST_CANDIDATES, 2**18))
    assert "32768 inputs" in screen_refusal(torch.zeros(300, 2**15))
    assert "not finite" in screen_refusal(torch.full((49152, 576), torch.inf))

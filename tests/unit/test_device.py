"""Devices by name, and threads of torch while another runtime has the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from families import make_onnx
from tiny import NumberText, tiny_model, tiny_target

from specflow.build import LoadedTarget, build_engine
from specflow.device import find_device, with_threads
from specflow.errors import ModelError
from specflow.recipe import load_recipe
from specflow.target.base import Target
from specflow.types import Sampling


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert find_device("auto", "target.device") == torch.device("cuda")
    assert find_device("cuda:1", "target.device") == torch.device("cuda:1")
    with pytest.raises(ModelError, match=r"target\.device: cuda:2 is not available here"):
        find_device("cuda:2", "target.device")


def counted() -> Iterator[int]:
    for _ in range(3):
        yield torch.get_num_threads()


@pytest.mark.usefixtures("two_threads")
class TestWithThreads:
    def test_only_the_steps_have_them(self) -> None:
        steps = with_threads(1, counted())
        assert next(steps) == 1
        assert torch.get_num_threads() == 2
        torch.set_num_threads(3)
        assert list(steps) == [1, 1]
        assert torch.get_num_threads() == 3

    def test_none_changes_nothing(self) -> None:
        assert list(with_threads(None, counted())) == [2, 2, 2]

    def test_a_failing_step_gives_them_back(self) -> None:
        def failing() -> Iterator[int]:
            yield 0
            raise ValueError

        steps = with_threads(1, failing())
        next(steps)
        with pytest.raises(ValueError, match=r"^$"):
            next(steps)
        assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("runtime", "settings", "expected"),
    [("onnx", [], 1), ("onnx", ["draft.runtime=torch"], 2), ("native", [], 2)],
)
def test_an_engine_leaves_the_cpu_to_onnx_runtime(
    runtime: str, settings: list[str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target: Target = make_onnx(tiny_model()) if runtime == "onnx" else tiny_target(torch.float32)
    recipe = load_recipe("medusa", settings) if settings else load_recipe("ngram")
    engine = build_engine(recipe, LoadedTarget(target, NumberText()))  # type: ignore[arg-type]
    seen: set[int] = set()
    forward = target.forward

    def watched(*args: object, **options: object) -> object:
        seen.add(torch.get_num_threads())
        return forward(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(target, "forward", watched)
    engine.generate([[5, 9, 33]], Sampling(max_new_tokens=4))
    assert seen == {expected}
    assert torch.get_num_threads() == 2

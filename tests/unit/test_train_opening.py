"""First weights of a drafter: what it copies of its target, and what lets through."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import tiny_model
from torch import Tensor
from toy_training import toy_recipe, toy_records, toy_run, toy_target, write_corpus

from specflow.build import LoadedTarget
from specflow.target.store import ModelFiles
from specflow.train.run import TrainingRun


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedTarget:
    """A target whose files can be read again."""
    path = tmp_path_factory.mktemp("model")
    tiny_model(layers=3).save_pretrained(path)
    return replace(toy_target(layers=3), files=ModelFiles("tiny", path, None, ""))


@pytest.fixture(scope="module")
def corpus(loaded: LoadedTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("toy") / "corpus", loaded, toy_records(loaded, 24))


def begun(
    loaded: LoadedTarget, corpus: Path, path: Path, draft: dict[str, object], start: str = "target"
) -> TrainingRun:
    return toy_run(corpus, path, toy_recipe(**draft), loaded, {"steps": 1, "start": start, "draft_vocab": 0})


def state_of(run: TrainingRun) -> dict[str, Tensor]:
    return run._trainee.trainable.state()


@pytest.mark.parametrize(
    ("draft", "halves"),
    [
        ({"method": "eagle3", "taps": [0, 1, 2], "k": 2}, [0, 0, 1]),
        ({"method": "mtp", "k": 2}, [1, 1]),
        ({"method": "dflash", "num_layers": 3, "taps": [0, 1, 2], "k": 2}, [0, 0, 1]),
    ],
    ids=["eagle3", "mtp", "dflash"],
)
def test_fusing_layers_begin_by_letting_through(
    loaded: LoadedTarget, corpus: Path, tmp_path: Path, draft: dict[str, object], halves: list[int]
) -> None:
    state = state_of(begun(loaded, corpus, tmp_path / "run", draft))
    fusing = next(tensor for name, tensor in state.items() if name.endswith("fc.weight"))
    one = torch.eye(len(fusing))
    assert torch.equal(fusing, torch.cat([one * half for half in halves], 1))
    drawn = state_of(begun(loaded, corpus, tmp_path / "random", draft, "random"))
    assert not torch.equal(next(tensor for name, tensor in drawn.items() if name.endswith("fc.weight")), fusing)


def test_a_block_is_copied_whole_and_adds_less(loaded: LoadedTarget, corpus: Path, tmp_path: Path) -> None:
    state = state_of(begun(loaded, corpus, tmp_path / "run", {"method": "mtp", "k": 2}))
    theirs = tiny_model(layers=3).state_dict()
    for name in ("input_layernorm", "self_attn.q_proj", "mlp.up_proj"):
        assert torch.equal(state[f"mtp.layers.0.{name}.weight"], theirs[f"model.layers.2.{name}.weight"])
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        found, copied = state[f"mtp.layers.0.{name}.weight"], theirs[f"model.layers.2.{name}.weight"]
        assert torch.allclose(found, 0.03 * copied)


def test_of_a_block_of_other_sizes_nothing_is_copied(loaded: LoadedTarget, corpus: Path, tmp_path: Path) -> None:
    """An MLP that follows another attention than it was made for is worse than a random one."""
    state = state_of(begun(loaded, corpus, tmp_path / "run", {"method": "eagle3", "k": 2}))
    theirs = tiny_model(layers=3).state_dict()
    assert state["midlayer.mlp.up_proj.weight"].shape == theirs["model.layers.2.mlp.up_proj.weight"].shape
    assert not torch.equal(state["midlayer.mlp.up_proj.weight"], theirs["model.layers.2.mlp.up_proj.weight"])

"""Layers fitted in closed form: the normal equations hold, and what cannot be fitted stays as it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from toy_training import toy_recipe, toy_records, toy_run, toy_target, write_corpus

from specflow.build import LoadedTarget
from specflow.train.batch import Batch
from specflow.train.fitting import fit_start, pairings_of
from specflow.train.run import TrainingRun
from specflow.types import Features

FAMILIES = {
    "mtp": {"method": "mtp", "k": 2},
    "mtp_hidden_first": {"method": "mtp", "k": 2, "order": "hidden_first", "recycle": "pre_norm"},
    "eagle": {"method": "eagle", "k": 2},
    "eagle3": {"method": "eagle3", "k": 2, "mlp_size": 32, "taps": [0, 1], "fc_norm": True},
    "medusa": {"method": "medusa", "k": 2, "num_heads": 2, "projection": True, "shape": "chain"},
}


@pytest.fixture(scope="module")
def loaded() -> LoadedTarget:
    return toy_target()


@pytest.fixture(scope="module")
def corpus(loaded: LoadedTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("toy") / "corpus", loaded, toy_records(loaded, 40))


def begun(loaded: LoadedTarget, corpus: Path, path: Path, draft: dict[str, object], start: str) -> TrainingRun:
    return toy_run(corpus, path, toy_recipe(**draft), loaded, {"steps": 3, "start": start, "lr": 1e-5})


def batches(run: TrainingRun) -> list[Batch]:
    return [run._batch(number) for number in range(3)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layer_solves_the_normal_equations(family: str, loaded: LoadedTarget, corpus: Path, tmp_path: Path) -> None:
    run = begun(loaded, corpus, tmp_path / "run", FAMILIES[family], "target")
    network = run._trainee.trainable.network
    assert fit_start(network, batches(run)) == (2 if family == "medusa" else 1)
    found = [pairing for batch in batches(run) for pairing in pairings_of(network, batch)]
    for layer in {id(each.layer): each.layer for each in found}.values():
        mine = [each for each in found if each.layer is layer]
        inputs = torch.cat([each.inputs for each in mine]).double()
        wanted = torch.cat([each.wanted for each in mine]).double()
        weight = layer.weight.detach().double().t()
        ridge = 1e-3 * inputs.square().sum(0).mean()
        slope = inputs.t() @ (inputs @ weight - wanted) + ridge * weight
        assert slope.abs().max() < 1e-3 * (inputs.t() @ wanted).abs().max()


def turning(batch: Batch) -> Batch:
    """The batch with states that turn by one and the same rotation from position to position."""
    numbers = torch.Generator().manual_seed(3)
    width = batch.hidden.shape[2]
    turn = torch.linalg.qr(torch.randn(width, width, generator=numbers)).Q
    rows = [torch.randn(len(batch.tokens), width, generator=numbers)]
    rows[0] *= width**0.5 / rows[0].norm(dim=1, keepdim=True)
    while len(rows) < batch.tokens.shape[1]:
        rows.append(rows[-1] @ turn)
    return replace(batch, features=Features({}, hidden_post=torch.stack(rows, 1)))


def test_pairs_are_those_of_inference(loaded: LoadedTarget, corpus: Path, tmp_path: Path) -> None:
    """States that follow each other linearly are foretold exactly: head k the one k on, a step the next one."""
    heads = begun(loaded, corpus, tmp_path / "medusa", FAMILIES["medusa"], "target")
    steps = begun(loaded, corpus, tmp_path / "mtp", FAMILIES["mtp"], "target")
    made = [turning(batch) for batch in batches(heads)]
    network, module = heads._trainee.trainable.network, steps._trainee.trainable.network
    fit_start(network, made)
    fit_start(module, made)
    hidden = made[0].hidden
    for k, blocks in enumerate(network.blocks, 1):  # type: ignore[arg-type, var-annotated]
        assert torch.allclose(blocks(hidden[0, 2]), hidden[0, 2 + k], atol=0.05)
        assert not torch.allclose(blocks(hidden[0, 2]), hidden[0, 3 + k], atol=0.5)
    step = module.steps[0]  # type: ignore[index]
    embedded = module.embed(made[0].tokens[:1, 3])  # type: ignore[operator]
    found = step.norm(step.fc(step.pair(embedded, hidden[:1, 2])))
    assert torch.allclose(found[0], hidden[0, 3], atol=0.05)


def test_a_drafter_without_such_a_layer_says_so(
    loaded: LoadedTarget, corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draft: dict[str, object] = {"method": "dflash", "k": 2, "num_layers": 1, "mlp_size": 16}
    run = begun(loaded, corpus, tmp_path / "run", draft, "fitted")
    before = [each.detach().clone() for each in run._trainee.trainable.parameters()]
    run._fit()
    assert all(torch.equal(one, other) for one, other in zip(before, run._trainee.trainable.parameters(), strict=True))
    assert "nothing of this drafter can be fitted" in caplog.text

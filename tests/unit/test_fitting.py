"""Layers fitted in closed form: the normal equations hold, and what cannot be fitted stays as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from toy_training import toy_recipe, toy_records, toy_run, toy_target, write_corpus

from specflow.build import LoadedTarget
from specflow.train.batch import Batch
from specflow.train.fitting import fit_start, pairings_of
from specflow.train.run import Session, TrainingRun

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


@pytest.mark.parametrize("family", ["mtp", "medusa"])
def test_what_is_fitted_foretells_more(family: str, loaded: LoadedTarget, corpus: Path, tmp_path: Path) -> None:
    """Pairs are those of inference: an off-by-one in them would leave the figure where it was."""
    lengths = {}
    for start in ("target", "fitted"):
        run = begun(loaded, corpus, tmp_path / start, FAMILIES[family], start)
        for _ in run.go(Session(100, 100)):
            pass
        lengths[start] = run.finish()["accept_rate"][0]
    assert lengths["fitted"] > 2 * lengths["target"]


def test_a_drafter_without_such_a_layer_says_so(
    loaded: LoadedTarget, corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draft: dict[str, object] = {"method": "dflash", "k": 2, "num_layers": 1, "mlp_size": 16}
    run = begun(loaded, corpus, tmp_path / "run", draft, "fitted")
    before = [each.detach().clone() for each in run._trainee.trainable.parameters()]
    run._fit()
    assert all(torch.equal(one, other) for one, other in zip(before, run._trainee.trainable.parameters(), strict=True))
    assert "nothing of this drafter can be fitted" in caplog.text

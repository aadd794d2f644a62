"""Calibration of a trained confidence head: what is counted, what is fitted, and what a run writes of it."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import Oracle, tiny_engine
from toy_training import toy_recipe, toy_records, toy_run, toy_target, train, write_corpus

from specflow.build import LoadedTarget, build_drafter
from specflow.draft.base import Uniforms
from specflow.draft.checkpoint import read_options
from specflow.engine import Engine, EngineParts, EngineSettings
from specflow.recipe import Recipe, load_recipe
from specflow.train.calibrate import (
    CalibrationPlan,
    Rounds,
    _decode,
    _Watch,
    calibrate_drafter,
    fit_and_check,
    write_temperatures,
)
from specflow.types import DraftBlock, DraftBudget, Sampling
from specflow.verify import Match

K = 3
DRAFT = {"method": "medusa", "shape": "chain", "k": K, "num_heads": K, "confidence_head": True}
STEPS = {"steps": 4, "lr": 3e-3, "held_out": 0.4, "calibration_rounds": 60}


def good_of(done: int) -> int:
    """Right tokens of the block after so many."""
    return random.Random(done).randrange(K + 1)


class Sure(Oracle):
    """Right up to a place that is told from the text; says how sure it is."""

    def tokens_for(self, row: int, most: int) -> list[int]:
        right = super().tokens_for(row, most)
        good = good_of(self._done[row])
        return [token if place < good else (token + 1) % 61 for place, token in enumerate(right)]

    def propose(self, anchors: list[int], budget: DraftBudget, uniforms: Uniforms) -> DraftBlock | None:  # type: ignore[override]
        block = super().propose(anchors, budget, uniforms)
        assert block is not None
        chance = torch.tensor([[0.5 + 0.1 * good_of(done)] for done in self._done[: len(anchors)]])
        return replace(block, confidence=chance.expand(block.tokens.shape))


def watched(prompts: list[list[int]], length: int, batch: int = 2, most: int = 1000) -> Rounds | None:
    asks = [Sampling(max_new_tokens=length, ignore_eos=True)] * len(prompts)
    plain = tiny_engine(k=0)
    futures = [made.tokens for made in plain.generate(prompts, asks)]
    watch = _Watch(K)
    parts = EngineParts(plain.target, plain.codec, Match(), watch, Sure(futures))
    return _decode(Engine(parts, EngineSettings(batch, prefill_chunk=8)), watch, prompts, asks, most)


def test_rounds_are_seen_as_they_were() -> None:
    found = watched([[5, 9], [7, 3, 4], [8]], 40)
    assert found is not None
    assert len(found.odds) > 30
    promised = ((found.odds.sigmoid()[:, 0] - 0.5) / 0.1).round()
    assert torch.equal(found.survived.nan_to_num(9.0) == 1.0, torch.arange(K) < promised.unsqueeze(1))
    assert set(promised.tolist()) == {0.0, 1.0, 2.0, 3.0}


def test_the_last_round_of_a_text_is_left_out() -> None:
    """It kept one token, for there was no room for more: the next ones stood, and were not counted."""
    prompts = [[5, 9], [7, 3, 4]]
    alone = [watched([prompt], 12, batch=1) for prompt in prompts]
    together = watched(prompts, 12)
    assert together is not None
    counts = [0 if each is None else len(each.odds) for each in alone]
    assert len(together.odds) == sum(counts) > 4


def test_enough_is_enough() -> None:
    found = watched([[5, 9], [7, 3, 4], [8]], 25, most=5)
    assert found is not None
    assert 5 <= len(found.odds) <= 6
    assert watched([], 25) is None


def test_fitting_is_checked_on_other_rounds() -> None:
    generator = torch.Generator().manual_seed(0)

    def rounds() -> Rounds:
        odds = torch.randn(6000, 2, generator=generator, dtype=torch.float64) * 3
        stood = torch.rand(6000, 2, generator=generator, dtype=torch.float64) < (odds / 2.5).sigmoid()
        return Rounds(odds, stood.double().cumprod(1))

    fit, check = rounds(), rounds()
    found = fit_and_check(fit, check)
    assert found.temperatures == pytest.approx((2.5, 2.5), rel=0.25)
    assert found.error < 0.03 < found.error_before
    assert [each.error for each in found.before] > [each.error for each in found.after]
    assert (found.fitted_on, found.checked_on) == (6000, 6000)
    facts = json.loads(json.dumps(found.facts()))
    assert facts["after"][1]["position"] == 2
    assert facts["temperatures"] == [round(each, 5) for each in found.temperatures]


@pytest.fixture(scope="module")
def loaded() -> LoadedTarget:
    return toy_target()


@pytest.fixture(scope="module")
def trained(loaded: LoadedTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibrated")
    corpus = write_corpus(path / "corpus", loaded, toy_records(loaded, 24))
    train(toy_run(corpus, path / "run", toy_recipe(**DRAFT), loaded, STEPS))
    return path / "run"


def test_a_run_ends_with_temperatures(trained: Path, loaded: LoadedTarget) -> None:
    header = json.loads((trained / "training.json").read_text())
    found = header["result"]["calibration"]
    assert found["for"] == {"temperature": 0.0, "rule": "match"}
    assert found["fitted_on"] >= 30
    config = json.loads((trained / "config.json").read_text())
    assert config["temperatures"] == pytest.approx(found["temperatures"], abs=1e-5)
    assert len(config["temperatures"]) == K
    recipe = load_recipe(trained / "recipe.yaml")
    assert build_drafter(recipe, loaded) is not None


def test_temperatures_that_are_there_are_taken_out_first(trained: Path, loaded: LoadedTarget, tmp_path: Path) -> None:
    """Calibrating a calibrated checkpoint finds what calibrating a fresh one finds."""
    prompts = [[3 + number, 9, 5] for number in range(8)]
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("model.safetensors", "config.json"):
        (copy / name).write_bytes((trained / name).read_bytes())
    write_temperatures(copy, (0.5, 2.0, 3.0))
    plan = CalibrationPlan(rounds=40, tokens=24)
    found = [calibrate_drafter(recipe_of(each), 0, loaded, prompts, plan) for each in (trained, copy)]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].error_before == pytest.approx(found[1].error_before, abs=1e-5)
    assert found[0].temperatures == found[1].temperatures


def test_trees_are_not_calibrated(trained: Path, loaded: LoadedTarget, caplog: pytest.LogCaptureFixture) -> None:
    recipe = recipe_of(trained, shape="static")
    assert calibrate_drafter(recipe, 0, loaded, [[5], [6]], CalibrationPlan(8)) is None
    assert "trees carry no confidence" in caplog.text


def test_no_prompts_are_said_so(trained: Path, loaded: LoadedTarget, caplog: pytest.LogCaptureFixture) -> None:
    assert calibrate_drafter(recipe_of(trained), 0, loaded, [[5]], CalibrationPlan(8)) is None
    assert "too few held-out prompts" in caplog.text


def recipe_of(path: Path, **draft: object) -> Recipe:
    return toy_recipe(method="medusa", k=K, weights=str(path), **{"shape": "chain", **draft})


def test_temperatures_are_read_back(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"confidence_head": true}')
    write_temperatures(tmp_path, (1.5, 1 / 3))
    options = toy_recipe(**DRAFT, weights=str(tmp_path)).draft.parts[0].options  # type: ignore[union-attr]
    assert read_options(options, str(tmp_path)).temperatures == (1.5, 0.333333)  # type: ignore[attr-defined]

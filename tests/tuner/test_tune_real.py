"""Whole runs on a real, tiny target: everything is loaded, timed, traced, decoded and written for real."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from tiny import NumberText, tiny_target

from specflow.build import LoadedTarget, build_engine
from specflow.cost_table import carried_costs
from specflow.errors import DataError
from specflow.recipe import load_recipe, parse_recipe
from specflow.types import Sampling
from tuner import laboratory, session
from tuner.check import Tolerance
from tuner.recipes import Chosen
from tuner.result import TuneResult, read_result
from tuner.session import Order, again, carry_out, claim
from tuner.workload import Asked, read_rows


class ChatText(NumberText):
    """A codec whose prompts are words: each is its length."""

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return [1, *(3 + len(word) for word in messages[-1]["content"].split())]


LOADED = LoadedTarget(tiny_target(), ChatText())  # type: ignore[arg-type]


def data(folder: Path, rows: int = 4) -> Path:
    file = folder / "prompts.jsonl"
    texts = [f"a bb ccc dddd a bb ccc dddd {'e' * (n + 1)}" for n in range(rows)]
    lines = [json.dumps({"prompt": text, "category": "ab"[n % 2]}) for n, text in enumerate(texts)]
    file.write_text("\n".join([*lines, '{"nothing": 1}']), encoding="utf-8")
    return file


def chosen() -> Chosen:
    tune = {"draft.k": {"choices": [1, 3]}, "length.policy": {"choices": ["fixed"]}}
    ngram = parse_recipe({"name": "ngram", "draft": {"method": "ngram", "k": 3}, "tune": tune})
    eagle = parse_recipe({"name": "eagle", "draft": {"method": "eagle", "k": 3}})
    return Chosen(load_recipe("vanilla"), {"ngram": ngram, "eagle": eagle}, [])


def order(folder: Path, **changes: object) -> Order:
    asked = Asked((data(folder),), None, 12, 0)
    facts: dict[str, object] = {"asked": asked, "directory": folder / "run", "passes": 1, "trust_noise": True}
    return Order(**{**facts, **changes})  # type: ignore[arg-type]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECFLOW_CACHE", str(tmp_path / "cache"))
    patient = {"target_s": 1e6, "drafter_s": 1e6}  # a machine that stands still for a while must not end a test
    monkeypatch.setattr(session, "_shares", lambda budget_s, num_recipes: patient)


def run(folder: Path, resume: bool = False) -> TuneResult:
    wanted = order(folder)
    claim(wanted.directory, wanted, resume)
    return carry_out(wanted, chosen(), read_rows(wanted.asked), lambda: LOADED, lambda what: None)


@pytest.mark.usefixtures("cache")
def test_from_prompts_to_a_recipe_that_runs(tmp_path: Path) -> None:
    found = run(tmp_path)
    folder = tmp_path / "run"
    assert {"tuned.yaml", "tuned.json", "report.html", "study.journal", "run.json", "trace"} <= {
        path.name for path in folder.iterdir()
    }
    assert [each.recipe for each in found.refused] == ["eagle"]
    assert "at random" in found.refused[0].reason
    assert found.workload.bad_rows
    assert {each.choice.recipe for each in found.confirmed} >= {"vanilla", "ngram"}
    assert all(each.predicted_speed_up for each in found.confirmed)
    assert not [each for each in found.warnings if "texts are not" in each]
    recipe = load_recipe(folder / "tuned.yaml")
    engine = build_engine(recipe, LOADED)
    assert engine.generate([[1, 5, 6, 5, 6]], Sampling(max_new_tokens=4))
    assert read_result(folder).model_dump(mode="json") == found.model_dump(mode="json")


@pytest.mark.usefixtures("cache")
def test_a_second_run_measures_no_profile_and_traces_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path)
    traced = {path.name for path in (tmp_path / "run" / "trace").rglob("*")}
    monkeypatch.setattr(laboratory, "Profiler", lambda *given: pytest.fail("there is a profile of this machine"))
    run(tmp_path, resume=True)
    assert {path.name for path in (tmp_path / "run" / "trace").rglob("*")} == traced


@pytest.mark.usefixtures("cache")
def test_another_workload_does_not_continue_a_run(tmp_path: Path) -> None:
    run(tmp_path)
    other = order(tmp_path, asked=Asked((data(tmp_path),), 2, 12, 0))
    with pytest.raises(DataError, match="limit differ"):
        claim(other.directory, other, resume=True)
    with pytest.raises(DataError, match="holds files already"):
        claim(other.directory, other, resume=False)


@pytest.mark.usefixtures("cache")
def test_the_tuned_recipe_carries_its_costs(tmp_path: Path) -> None:
    from tuner.laboratory import Laboratory, LabPlan
    from tuner.trace import TracedPrompt

    recipe = chosen().recipes["ngram"]
    lab = Laboratory(
        LOADED, chosen().plain, [TracedPrompt("a", "x", (1, 5, 6))], LabPlan(tmp_path, 8, trust_noise=True)
    )
    model = lab.profile(recipe, lab.profile(chosen().plain, None, lambda what: None).model, lambda what: None).model
    tuned = lab.with_costs(recipe, model)
    assert carried_costs(tuned, LOADED) is not None


@pytest.mark.usefixtures("cache")
def test_checking_measures_the_answer_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(tmp_path)
    monkeypatch.setattr(session, "load_target", lambda section: LOADED)
    if not found.answer.speculate:
        drafting = next(each for each in found.confirmed if each.choice.settings)
        answer = found.answer.model_copy(update={"speculate": True, "choice": drafting.choice})
        recipe = {"name": "x-tuned", "draft": {"method": "ngram", "k": drafting.choice.candidate.k}}
        found = found.model_copy(update={"answer": answer, "recipe": recipe})
    wide = again(found, Tolerance(speed_up=1e6, acceptance=0.01), 1, lambda what: None)
    assert wide is not None
    assert wide.sound
    assert wide.acceptance == wide.acceptance_then
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "other"}', encoding="utf-8")
    with pytest.raises(DataError, match="content has changed"):
        again(found, Tolerance(), 1, lambda what: None)

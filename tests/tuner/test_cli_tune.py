"""The verbs tune, explain and check: options, files, exit codes; and errors of the user's in words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from fakes import FakeLab, tuned
from typer.testing import CliRunner

from specflow.errors import DataError
from tuner import session
from tuner.check import Check
from tuner.cli.check import check
from tuner.cli.explain import explain
from tuner.cli.tune import seconds_of, tune
from tuner.result import Interval, TuneResult, write_result

RUN = CliRunner()


def app(verb: Callable[..., None]) -> typer.Typer:
    found = typer.Typer()
    found.command()(verb)
    return found


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> TuneResult:
    return tuned(tmp_path_factory.mktemp("run"), FakeLab({"good": 0.9}), "good")


@pytest.fixture
def ordered(result: TuneResult, monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """What the verb asks for, in place of carrying it out."""
    seen: list[SimpleNamespace] = []

    def carry_out(order: object, chosen: object, rows: object, loading: object, advance: object) -> TuneResult:
        seen.append(SimpleNamespace(order=order, chosen=chosen, rows=rows))
        return result

    monkeypatch.setattr(session, "carry_out", carry_out)
    return seen


def prompts(folder: Path, text: str = '{"prompt": "hello there"}\n') -> str:
    file = folder / "prompts.jsonl"
    file.write_text(text, encoding="utf-8")
    return str(file)


class TestTune:
    def test_options_reach_the_run(self, tmp_path: Path, ordered: list[SimpleNamespace]) -> None:
        options = ["--target", "m", "--recipes", "ngram", "--objective", "throughput,latency", "--concurrency", "1,4"]
        more = ["--budget", "20m", "--storage", f"sqlite:///{tmp_path}/x.db", "-o", str(tmp_path / "run"), "suffix"]
        done = RUN.invoke(app(tune), ["--data", prompts(tmp_path), *options, *more])
        assert done.exit_code == 0, done.output
        order, chosen = ordered[0].order, ordered[0].chosen
        assert order.objectives == ("throughput", "latency")
        assert (order.concurrency, order.budget_s, order.where) == ((1, 4), 1200.0, f"sqlite:///{tmp_path}/x.db")
        assert list(chosen.recipes) == ["ngram", "suffix"]  # a pattern expanded by the shell ends up in both places
        assert chosen.plain.target.model == "m"
        assert "times the throughput" in done.stdout
        assert (tmp_path / "run" / "run.json").is_file()

    def test_json_is_one_document(self, tmp_path: Path, ordered: list[SimpleNamespace]) -> None:
        done = RUN.invoke(app(tune), ["--data", prompts(tmp_path), "-o", str(tmp_path / "run"), "--json"])
        assert json.loads(done.stdout)["format"] == "specflow-tuned-1"

    @pytest.mark.parametrize(
        ("text", "words"),
        [("", "no rows"), ('{"question": 1}\nnonsense\n', "no usable row; .*none of the keys")],
    )
    def test_data_without_prompts_is_an_error_and_leaves_nothing(
        self, tmp_path: Path, ordered: list[SimpleNamespace], text: str, words: str
    ) -> None:
        done = RUN.invoke(app(tune), ["--data", prompts(tmp_path, text), "-o", str(tmp_path / "run")])
        assert isinstance(done.exception, DataError)
        assert re.search(words, str(done.exception), re.DOTALL)
        assert not (tmp_path / "run").exists()
        assert not ordered

    @pytest.mark.parametrize(
        "wrong",
        [["--concurrency", "0"], ["--concurrency", "a"], ["--budget", "soon"], ["--budget", "0"], ["--resume"], []],
    )
    def test_a_wrong_option_is_named(self, tmp_path: Path, ordered: list[SimpleNamespace], wrong: list[str]) -> None:
        data = ["--data", prompts(tmp_path)] if wrong else []
        done = RUN.invoke(app(tune), [*data, *wrong])
        assert done.exit_code == 2
        assert not ordered

    def test_an_unknown_objective_is_an_error_and_leaves_nothing(
        self, tmp_path: Path, ordered: list[SimpleNamespace]
    ) -> None:
        arguments = ["--data", prompts(tmp_path), "-o", str(tmp_path / "run"), "--objective", "speed"]
        assert "speed" in str(RUN.invoke(app(tune), arguments).exception)
        assert not (tmp_path / "run").exists()

    def test_a_storage_that_cannot_be_reached_is_an_error_before_anything_is_loaded(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def load(target: object) -> None:
            raise AssertionError("loaded")

        monkeypatch.setattr("specflow.build.load_target", load)
        nowhere = ["--storage", f"sqlite:///{tmp_path}/none/x.db", "--recipes", "ngram"]
        done = RUN.invoke(app(tune), ["--data", prompts(tmp_path), "-o", str(tmp_path / "run"), *nowhere])
        assert isinstance(done.exception, DataError)
        assert "--storage" in str(done.exception)
        assert not (tmp_path / "run").exists()

    def test_an_error_before_anything_was_measured_leaves_the_directory_free(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        arguments = ["--data", prompts(tmp_path), "-o", str(tmp_path / "run")]
        self.fail(monkeypatch, tmp_path, measured=False)
        assert "went away" in str(RUN.invoke(app(tune), arguments).exception)
        assert not (tmp_path / "run").exists()

    def test_the_same_command_goes_on_after_an_error_and_another_one_does_not(
        self, tmp_path: Path, ordered: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        arguments = ["--data", prompts(tmp_path), "-o", str(tmp_path / "run")]
        with monkeypatch.context() as patch:
            self.fail(patch, tmp_path, measured=True)
            assert "went away" in str(RUN.invoke(app(tune), arguments).exception)
        assert (tmp_path / "run" / "trace").is_dir()
        other = RUN.invoke(app(tune), [*arguments, "--limit", "3"])
        assert "holds files already" in str(other.exception)
        assert RUN.invoke(app(tune), arguments).exit_code == 0
        assert len(ordered) == 1
        assert isinstance(RUN.invoke(app(tune), arguments).exception, DataError)  # that run has its answer

    def fail(self, patch: pytest.MonkeyPatch, folder: Path, measured: bool) -> None:
        def carry_out(*given: object) -> None:
            if measured:
                (folder / "run" / "trace").mkdir()
            raise DataError("--storage x", "went away", "a database that answers")

        patch.setattr(session, "carry_out", carry_out)

    def test_a_directory_in_use_is_not_taken(self, tmp_path: Path, ordered: list[SimpleNamespace]) -> None:
        arguments = ["--data", prompts(tmp_path), "-o", str(tmp_path / "run")]
        assert RUN.invoke(app(tune), arguments).exit_code == 0
        assert isinstance(RUN.invoke(app(tune), arguments).exception, DataError)
        assert RUN.invoke(app(tune), [*arguments, "--resume"]).exit_code == 0

    @pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("1.5m", 90), ("2h", 7200)])
    def test_lengths_of_time(self, text: str, seconds: float) -> None:
        assert seconds_of(text) == seconds


def test_explain_says_it_in_words_and_writes_the_page_again(result: TuneResult, tmp_path: Path) -> None:
    write_result(tmp_path / "tuned.json", result)
    done = RUN.invoke(app(explain), [str(tmp_path), "--html", str(tmp_path / "again.html")])
    assert done.exit_code == 0, done.output
    assert "a round of K =" in done.stdout
    assert (tmp_path / "again.html").read_text(encoding="utf-8").startswith("<!doctype html>")


class TestCheck:
    def checked(self, tmp_path: Path, result: TuneResult, monkeypatch: pytest.MonkeyPatch, *drifts: str) -> object:
        write_result(tmp_path / "tuned.json", result)
        found = Check("x-tuned", Interval(value=2.0, low=1.9, high=2.1), 2.0, 2.5, 2.5, drifts)
        monkeypatch.setattr(session, "again", lambda *given: found)
        return RUN.invoke(app(check), [str(tmp_path / "tuned.json"), "--json"])

    def test_no_drift_is_exit_code_0(self, tmp_path: Path, result: TuneResult, monkeypatch: pytest.MonkeyPatch) -> None:
        done = self.checked(tmp_path, result, monkeypatch)
        assert done.exit_code == 0  # type: ignore[attr-defined]
        assert json.loads(done.stdout)["sound"] is True  # type: ignore[attr-defined]

    def test_drift_is_not(self, tmp_path: Path, result: TuneResult, monkeypatch: pytest.MonkeyPatch) -> None:
        done = self.checked(tmp_path, result, monkeypatch, "speed-up 1.2, 2.0 in the baseline")
        assert done.exit_code == 1  # type: ignore[attr-defined]
        assert "drifted: speed-up" in done.stderr  # type: ignore[attr-defined]

    def test_plain_decoding_cannot_drift(self, tmp_path: Path) -> None:
        folder = tmp_path / "wrong"
        folder.mkdir()
        write_result(folder / "tuned.json", tuned(folder, FakeLab({"wrong": 0.0}), "wrong"))
        done = RUN.invoke(app(check), [str(folder)])
        assert done.exit_code == 0
        assert "nothing that could drift" in done.stdout

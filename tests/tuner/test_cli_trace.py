"""The verbs trace and replay on a tiny target: files, streams, exit codes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from tiny import NumberText
from tracing import TARGET, SteepCosts
from typer.testing import CliRunner, Result

from specflow.build import LoadedTarget
from specflow.cli.app import app
from specflow.errors import DataError


class ChatText(NumberText):
    """A codec whose template is the numbers in the messages."""

    def encode_chat(self, messages: Sequence[dict[str, str]], options: object = None) -> list[int]:
        return [int(word) for message in messages for word in message["content"].split()]


@pytest.fixture(autouse=True)
def tiny_target(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = LoadedTarget(TARGET.target, ChatText())  # type: ignore[arg-type]
    monkeypatch.setattr("specflow.build.load_target", lambda section: loaded)


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [{"prompt": "5 9 33 17 " * 4, "category": "häufig"}, {"prompt": "7 8"}]
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def test_trace_then_replay(data: Path, tmp_path: Path) -> None:
    asked = ("--data", data, "-o", tmp_path / "t", "--max-new-tokens", 20, "--k", 6)
    done = call("trace", "ngram", "vanilla", *asked)
    assert done.exit_code == 0, done.output
    assert "2 requests" in done.output
    told = {}
    for setting in ("length.k=6", "draft.k=1", "length.policy=additive"):
        shown = call("replay", tmp_path / "t", "--set", setting, "--json")
        assert shown.exit_code == 0, shown.output
        told[setting] = json.loads(shown.stdout.splitlines()[-1])
    assert told["length.k=6"]["config"]["k"] == 6
    assert told["length.k=6"]["num_rounds"] <= told["draft.k=1"]["num_rounds"]
    assert told["length.policy=additive"]["config"]["policy"] == "additive"
    only = call("replay", tmp_path / "t", "--category", "häufig", "--set", "length.policy=fixed")
    assert only.exit_code == 0
    assert "ngram" in only.output


def test_a_cascade_is_replayed_in_another_order(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "both.yaml"
    parts = "[{method: suffix, min_match: 3}, {method: ngram}]"
    file.write_text(f"name: both\ndraft: {{k: 4, first_of: {parts}}}\n", encoding="utf-8")
    assert call("trace", file, "--data", data, "-o", tmp_path / "t", "--max-new-tokens", 20).exit_code == 0
    told = {}
    for order in ("suffix,ngram", "ngram, suffix"):
        shown = call("replay", tmp_path / "t", "--set", f"draft.first_of={order}", "--json")
        assert shown.exit_code == 0, shown.output
        told[order] = json.loads(shown.stdout.splitlines()[-1])
    assert told["suffix,ngram"]["config"]["drafters"] == ["both.0", "both.1"]
    assert told["ngram, suffix"]["config"]["drafters"] == ["both.1", "both.0"]
    assert told["ngram, suffix"]["num_spec_steps"] >= told["suffix,ngram"]["num_spec_steps"] > 0
    wrong = call("replay", tmp_path / "t", "--set", "draft.first_of=ngram,eagle")
    assert wrong.exit_code != 0
    assert "suffix, ngram" in wrong.output + str(wrong.exception)


def test_bad_rows_are_named_and_the_others_traced(data: Path, tmp_path: Path) -> None:
    data.write_text(data.read_text(encoding="utf-8") + "no json\n", encoding="utf-8")
    done = call("trace", "ngram", "--data", data, "-o", tmp_path / "t", "--max-new-tokens", 8)
    assert done.exit_code == 1
    assert "data.jsonl:3" in done.output
    assert "2 requests" in done.output


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("replay", "nowhere"), "specflow trace"),
        (("replay", "T", "--recipe", "dspark"), "does not have"),
        (("replay", "T", "--set", "draft.k=9"), "recorded at 4"),
        (("replay", "T", "--profile", "nowhere.json"), "nowhere.json"),
        (("replay", "T", "--category", "poems"), "poems"),
    ],
)
def test_bad_input_ends_without_a_traceback(words: tuple[str, ...], reason: str, data: Path, tmp_path: Path) -> None:
    call("trace", "ngram", "--data", data, "-o", tmp_path / "t", "--max-new-tokens", 8, "--k", 4)
    done = call(*(tmp_path / "t" if word == "T" else word for word in words))
    assert isinstance(done.exception, DataError)
    assert reason in str(done.exception)


def test_ranges_are_checked(tmp_path: Path) -> None:
    for text in ("5", "a,b", "9,3"):
        assert call("replay", tmp_path, "--context", text).exit_code != 0


def test_seconds_with_a_profile(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call("trace", "ngram", "--data", data, "-o", tmp_path / "t", "--max-new-tokens", 20)
    monkeypatch.setattr("specflow.cost.load_profile", lambda path: SteepCosts())
    shown = call("replay", tmp_path / "t", "--profile", "p.json", "--json")
    told = json.loads(shown.stdout.splitlines()[-1])
    assert told["seconds"] == pytest.approx(told["draft_s"] + told["target_s"] + told["other_s"])
    assert told["tokens_per_s"] > 0
    assert 0 < told["p50_latency_s"] <= told["p95_latency_s"]

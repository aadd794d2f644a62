"""The verbs run, bench and demo, with an engine that needs no model: streams, figures, exit codes, files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from specflow import build
from specflow.bench.divergence import DivergenceJudge
from specflow.bench.methods import Ask
from specflow.cli.app import app
from specflow.errors import DataError, RecipeError, RequestError
from specflow.recipe import Recipe
from specflow.request import Event
from specflow.types import Counts, Generation, Sampling, Timings

PLAIN = "name: vanilla\n"
UNLUCKY = 77  # a word of this length makes the engine refuse its prompt
DRAFTING = "name: ngram\ndraft: {method: ngram, k: 4}\n"


class Codec:
    """One token a word."""

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return [0, *self.encode(messages[-1]["content"])]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


class Engine:
    """Answers every prompt with its own tokens, and the length cap; drafting halves the time."""

    codec = Codec()
    target = SimpleNamespace(
        info=SimpleNamespace(
            device="cpu",
            dtype=torch.float32,
            weights="float32",
            stop_ids=(2,),
            runtime="native",
            exactness="tie-exact",
            vocab_size=1000,
            greedy_head="whole",
        )
    )
    context_length = 8
    exactness = "tie-exact"
    interrupt_at: int | None = None
    calls = 0
    wrong_draft = False  # drafting ends every text with another token

    def __init__(self, recipe: Recipe) -> None:
        self.drafts = recipe.draft is not None

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        on_text: Callable[[int, str], None] | None = None,
    ) -> list[Generation]:
        Engine.calls += 1
        if Engine.calls == Engine.interrupt_at:
            raise KeyboardInterrupt
        return [self.answer(index, prompt, sampling, on_text) for index, prompt in enumerate(prompts)]

    def events(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Iterator[Event]:
        """The last prompt finishes first; an interruption comes before the one of that number in this order."""
        Engine.calls += 1
        for number, index in enumerate(reversed(range(len(prompts)))):
            if number == Engine.interrupt_at:
                raise KeyboardInterrupt
            yield Event(index, "", self.answer(index, prompts[index], sampling, None))

    def answer(
        self, index: int, prompt: Sequence[int], sampling: Sampling, on_text: Callable[[int, str], None] | None
    ) -> Generation:
        if UNLUCKY in prompt:
            raise RequestError(f"prompt {index}", "it holds an unlucky word")
        tokens = (*prompt, sampling.max_new_tokens + (self.drafts and self.wrong_draft))
        for token in tokens if on_text else ():
            on_text(index, f"{token} ")  # type: ignore[misc]
        rounds = len(tokens) - 1
        counts = Counts(rounds, 0, 0, 0, 0, len(tokens))
        timings = Timings(ttft_s=0.1, decode_s=rounds / (20.0 if self.drafts else 10.0))
        text = self.codec.decode(tokens)
        return Generation(tuple(prompt), tokens, text, "length", None, sampling.seed or 0, counts, timings)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(build, "load_target", lambda section: SimpleNamespace(target=Engine.target, codec=Codec()))
    monkeypatch.setattr(build, "build_engine", lambda recipe, target=None: Engine(recipe))
    monkeypatch.setattr(Engine, "calls", 0)
    monkeypatch.setattr(Engine, "interrupt_at", None)
    (tmp_path / "plain.yaml").write_text(PLAIN, encoding="utf-8")
    (tmp_path / "fast.yaml").write_text(DRAFTING, encoding="utf-8")
    rows = [
        '{"prompt": "a bb ccc", "category": "x"}',
        '{"prompt": 5}',
        '{"prompt": "dddd eeeee"}',
        json.dumps({"prompt": "u" * UNLUCKY}),
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (tmp_path / "good.jsonl").write_text(rows[0] + "\n", encoding="utf-8")
    return tmp_path


def call(*words: str, stdin: str | None = None) -> Any:
    result = CliRunner().invoke(app, list(words), input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_run_streams_text_to_stdout_and_figures_to_stderr(here: Path) -> None:
    result = call("run", "plain.yaml", "a bb", "--set", "sampling.max_new_tokens=9", "--seed", "4")
    assert result.exit_code == 0
    assert result.stdout == "0 1 2 9 \n"
    assert "3 + 4 tokens · finish length · 10.0 tokens/s · first token 100 ms" in result.stderr
    assert result.stderr.endswith("tie-exact in float32\n")
    assert result.stderr.startswith("loading smollm2-135m ...\n")
    sampled = call("run", "plain.yaml", "a bb", "--set", "sampling.temperature=0.5", "--seed", "4")
    assert "tie-exact in float32 · seed 4" in sampled.stderr
    assert "lossy" not in result.stderr


def test_run_reads_stdin_and_can_continue_raw_text_at_once(here: Path) -> None:
    result = call("run", "plain.yaml", "-", "--raw", "--no-stream", stdin="a bb")
    assert result.stdout == "1 2 128\n"


def test_run_answers_the_usable_rows_of_a_file_and_fails_for_the_others(here: Path) -> None:
    result = call("run", "plain.yaml", "--data", "prompts.jsonl", "--json", "--output-dir", "out")
    assert result.exit_code == 1
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row.get("text") for row in rows] == ["0 1 2 3 128", None, "0 4 5 128", None]
    assert rows[1]["id"] == "prompts.jsonl:2"
    assert rows[3]["error"] == "prompts.jsonl:4: it holds an unlucky word"
    assert "prompts.jsonl:2" in result.stderr
    assert (here / "out" / "generations.jsonl").read_text(encoding="utf-8") == result.stdout
    assert json.loads((here / "out" / "manifest.json").read_text(encoding="utf-8"))["files"]


def test_run_decodes_the_rows_of_a_file_together_where_the_recipe_says_so(here: Path) -> None:
    rows = [{"prompt": "a bb"}, {"prompt": "x " * 9, "id": "long"}, {"prompt": "dddd"}]
    (here / "three.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    words = ("run", "plain.yaml", "--data", "three.jsonl", "--set", "runtime.batch=4")
    result = call(*words, "--output-dir", "out")
    assert (result.exit_code, Engine.calls) == (1, 1)
    assert result.stdout == "0 4 128\n0 1 2 128\n"
    assert result.stderr.index("--- three-3") < result.stderr.index("--- three-1")
    assert "error: three.jsonl:2: it has 10 tokens and the context holds 8" in result.stderr
    kept = [json.loads(line) for line in (here / "out" / "generations.jsonl").read_text("utf-8").splitlines()]
    assert [("error" in row, row["id"]) for row in kept] == [(True, "long"), (False, "three-3"), (False, "three-1")]
    assert json.loads((here / "out" / "manifest.json").read_text("utf-8"))["target"]["exactness"] == "tie-exact"


def test_run_together_keeps_an_error_row_for_every_prompt_of_a_call_that_fails(here: Path) -> None:
    result = call("run", "plain.yaml", "--data", "prompts.jsonl", "--json", "--set", "runtime.batch=2")
    errors = {row["row"]: row["error"] for row in map(json.loads, result.stdout.splitlines())}
    assert [("unlucky" in errors[f"prompts.jsonl:{line}"]) for line in (1, 2, 3, 4)] == [True, False, True, True]


def test_an_interrupted_run_keeps_every_text_that_was_finished(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "three.jsonl").write_text('{"prompt": "a"}\n{"prompt": "bb"}\n{"prompt": "ccc"}\n', encoding="utf-8")
    monkeypatch.setattr(Engine, "interrupt_at", 2)
    result = call(
        "run", "plain.yaml", "--data", "three.jsonl", "--set", "runtime.batch=3", "--output-dir", "out", "--json"
    )
    assert result.exit_code == 130
    assert [json.loads(line)["row"] for line in result.stdout.splitlines()] == ["three.jsonl:3", "three.jsonl:2"]
    assert (here / "out" / "generations.jsonl").read_text(encoding="utf-8") == result.stdout


def test_a_row_that_cannot_be_encoded_is_named_by_file_and_line(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Codec, messages: Sequence[dict[str, str]]) -> list[int]:
        raise DataError("chat template", "it has no place for this")

    monkeypatch.setattr(Codec, "encode_chat", refuse)
    result = call("run", "plain.yaml", "--data", "good.jsonl")
    assert "error: good.jsonl:1: chat template: it has no place for this" in result.stderr


def test_results_of_a_lossy_rule_carry_the_word(here: Path) -> None:
    lossy = "name: bold\ndraft: {method: ngram, k: 4}\nverify: {rule: typical, lossless: false}\n"
    (here / "bold.yaml").write_text(lossy, encoding="utf-8")
    assert " · lossy\n" in call("run", "bold.yaml", "a bb").stderr
    assert json.loads(call("run", "bold.yaml", "a bb", "--json").stdout)["lossy"] is True
    result = call("bench", "bold.yaml", "--data", "good.jsonl", "-o", "out")
    assert "bold (lossy)" in result.stdout
    assert "vanilla (lossy)" not in result.stdout
    assert "tie-exact" in result.stdout


@pytest.mark.parametrize("words", [("",), (), ("x", "--data", "prompts.jsonl")])
def test_run_needs_one_prompt(here: Path, words: tuple[str, ...]) -> None:
    assert call("run", "plain.yaml", *words).exit_code != 0


def test_bench_adds_plain_decoding_keeps_failures_and_writes_all_files(here: Path) -> None:
    result = call("bench", "fast.yaml", "--data", "prompts.jsonl", "-o", "out", "--json")
    assert result.exit_code == 1
    assert "prompts.jsonl:2" in result.stderr
    report = json.loads(result.stdout)
    overall = {row["strategy"]: row for row in report["summary"] if row["subset"] == "overall"}
    assert list(overall) == ["vanilla", "ngram"]
    assert overall["ngram"]["ratio"] == pytest.approx(2.0)
    assert overall["ngram"]["equal_texts"] == 6
    assert [row["line"] for row in report["failures"]] == [2] + [4] * 6
    assert {path.name for path in (here / "out").iterdir()} == {
        "results.jsonl",
        "summary.csv",
        "acceptance.csv",
        "context.csv",
        "manifest.json",
    }
    manifest = json.loads((here / "out" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["state"] == "complete"
    assert list(manifest["settings"]["recipes"]) == ["vanilla", "ngram"]
    assert manifest["settings"]["target"] == {
        "exactness": "tie-exact",
        "runtime": "native",
        "dtype": "float32",
        "device": "cpu",
    }


def test_bench_without_failures_prints_a_table_and_succeeds(here: Path) -> None:
    result = call("bench", "fast.yaml", "plain.yaml", "--data", "good.jsonl", "--set", "draft.k=2", "-o", "out")
    assert result.exit_code == 0
    assert "overall" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100
    assert "6/6 good-1 · ngram" in result.stderr
    assert "2.00" in result.stdout
    settings = json.loads((here / "out" / "manifest.json").read_text(encoding="utf-8"))["settings"]
    assert settings["recipes"]["ngram"]["draft"]["k"] == 2


def test_an_interrupted_bench_keeps_what_it_has_and_resumes(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "interrupt_at", 6)
    words = ("bench", "fast.yaml", "--data", "good.jsonl", "-o", "out")
    result = call(*words)
    assert result.exit_code == 130
    assert "--resume" in result.stderr
    kept = (here / "out" / "results.jsonl").read_text(encoding="utf-8")
    assert len(kept.splitlines()) == 3
    assert (here / "out" / "summary.csv").read_text(encoding="utf-8").count("\n") == 5
    monkeypatch.setattr(Engine, "interrupt_at", None)
    assert call(*words, "--resume").exit_code == 0
    assert (here / "out" / "results.jsonl").read_text(encoding="utf-8").startswith(kept)
    assert len((here / "out" / "results.jsonl").read_text(encoding="utf-8").splitlines()) == 6


def test_bench_refuses_what_cannot_be_compared(here: Path) -> None:
    (here / "other.yaml").write_text("name: other\nsampling: {temperature: 0.5}\n", encoding="utf-8")
    with pytest.raises(RecipeError, match="one target and one sampling"):
        call("bench", "fast.yaml", "other.yaml", "--data", "good.jsonl")
    with pytest.raises(RecipeError, match="one at a time"):
        call("bench", "fast.yaml", "--data", "good.jsonl", "--set", "runtime.batch=2")
    with pytest.raises(RecipeError, match="second recipe named 'ngram'"):
        call("bench", "fast.yaml", "fast.yaml", "--data", "good.jsonl")
    with pytest.raises(RecipeError, match=r"--set draft\.kkk: no recipe of this run drafts"):
        call("bench", "plain.yaml", "--data", "good.jsonl", "--set", "draft.kkk=5")
    with pytest.raises(RecipeError, match=r"draft\.kkk: unknown key"):
        call("bench", "plain.yaml", "fast.yaml", "--data", "good.jsonl", "--set", "draft.kkk=5")
    assert Engine.calls == 0


def test_bench_says_aloud_that_a_divergence_is_no_tie(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def explain(self: DivergenceJudge, ask: Ask, tokens: Sequence[int], reference: Sequence[int]) -> dict[str, Any]:
        assert (tokens[-1], reference[-1]) == (129, 128)
        reason = {"divergence": "bug", "divergence_margin": 2.5, "divergence_tolerance": 1e-3}
        return {**reason, "control_agrees": 5, "control_scored": 5, "control_first_mismatch": None}

    monkeypatch.setattr(DivergenceJudge, "explain", explain)
    monkeypatch.setattr(Engine, "wrong_draft", True)
    result = call("bench", "fast.yaml", "--data", "good.jsonl", "-o", "out", "--repeat", "1")
    assert "0/1, 1 bug" in result.stdout
    assert "not a near-tie: good.jsonl:1 ngram differs at token 4: logit gap 2.5, tolerance 0.001" in result.stderr
    assert "5 of 5 tokens of plain decoding hold" in result.stderr


def test_bench_options_that_make_no_sense_are_refused_before_anything_runs(here: Path) -> None:
    assert call("bench", "fast.yaml", "--data", "good.jsonl", "--turns", "some").exit_code == 2
    assert call("bench", "fast.yaml", "--data", "good.jsonl", "--resume").exit_code == 2
    assert call("bench", "fast.yaml", "--data", "good.jsonl", "--repeat", "0").exit_code == 2
    assert Engine.calls == 0


def test_demo_streams_both_texts_and_ends_with_the_comparison(here: Path) -> None:
    result = call("demo")
    assert result.exit_code == 0
    for heading in ("code edit · vanilla", "code edit · ngram", "extraction · ngram", "open · vanilla"):
        assert heading in result.stdout
    assert "acceptance length" in result.stdout
    assert "3 of 3" in result.stdout
    assert result.stdout.count("(cut at") == 6
    assert result.stderr == "loading smollm2-135m ...\nwarming up ...\n"
    assert "tie-exact" in result.stdout


def test_demo_as_json_leaves_stdout_to_the_figures(here: Path) -> None:
    rows = json.loads(call("demo", "--json").stdout)
    assert [row["method"] for row in rows] == ["vanilla", "ngram"] * 3
    assert [row["speedup"] for row in rows] == pytest.approx([1.0, 2.0] * 3)
    assert all(row["same_text"] for row in rows)
    assert {(row["exactness"], row["dtype"]) for row in rows} == {("tie-exact", "float32")}

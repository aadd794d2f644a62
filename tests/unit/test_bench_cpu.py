"""The benchmark against other engines: its pipe to them, its arithmetic, its tables. No engine but ours is needed."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from specflow.bench import Ask, Method, Outcome
from specflow.errors import ModelError

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"

FAKE = """
import json, sys
mode = sys.argv[1]
if mode == "broken":
    print(json.dumps({"error": "ImportError: no such engine"}), flush=True)
    sys.exit()
if mode == "dies at once":
    sys.exit("it fell over")
print(json.dumps({"ready": True, "versions": {"engine": "1.2"}}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if "score" in request:
        answer = {"best": request["score"], "surprise": [0.5]}
    elif request["prompt"] == [13]:
        answer = {"error": "ValueError: unlucky"}
    elif request["prompt"] == [99]:
        sys.exit("out of memory")
    else:
        n, k = request["max_new_tokens"], request["lookup"] or 1
        short = request["prompt"] == [7]
        sizes = [1] + [k] * ((n - 1) // k)
        answer = {"tokens": list(range(n - short)), "times": [0.5 + 0.1 * i for i in range(len(sizes))], "sizes": sizes}
    print(json.dumps(answer), flush=True)
"""


def load(name: str) -> ModuleType:
    """A script of the benchmarks folder, which is no package."""
    folders = [str(BENCHMARKS), str(BENCHMARKS / "cpu_peers")]
    sys.path[:0] = folders
    try:
        return importlib.import_module(name)
    finally:
        for folder in folders:
            sys.path.remove(folder)


cpu, figures, methods, quality, worker = (
    load(name) for name in ("cpu", "cpu_figures", "cpu_methods", "cpu_quality", "cpu_worker")
)
serve, installer = load("serve"), load("install")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Any]]:
    script = tmp_path / "fake.py"
    script.write_text(FAKE, encoding="utf-8")
    with ExitStack() as stack:

        def start(mode: str = "works") -> Any:
            made = worker.WorkerProcess("engine", [sys.executable, str(script), mode], tmp_path / "logs" / "log")
            stack.callback(made.close)
            return made

        yield start


def ask(prompt: int = 1, length: int = 9) -> Ask:
    return Ask((prompt,), length, True, 0)


def lookup_method(process: Any, lookup: int | None) -> Any:
    return worker.WorkerMethod("engine", "int8", process, lookup, lambda tokens: f"{len(tokens)} tokens")


def test_a_worker_measures_itself_and_its_rate_counts_what_follows_the_first_delivery(start: Any) -> None:
    process = start()
    assert process.versions == {"engine": "1.2"}
    plain, drafting = (lookup_method(process, lookup) for lookup in (None, 4))
    assert (plain.name, plain.kind, plain.facts["drafts"]) == ("engine int8", "peer plain", False)
    assert (drafting.name, drafting.kind) == ("engine int8 lookup K=4", "peer speculative")
    outcome = drafting.generate(ask())
    assert (outcome.tokens, outcome.text, outcome.first_tokens) == (tuple(range(9)), "9 tokens", 1)
    assert outcome.ttft_s == 0.5
    assert outcome.output_tps == pytest.approx(8 / 0.2)
    assert plain.generate(ask()).output_tps == pytest.approx(8 / 0.8)
    assert process.ask({"score": [4, 5]}) == {"best": [4, 5], "surprise": [0.5]}


def test_a_worker_that_waits_takes_no_cpu(start: Any) -> None:
    process = start()
    process.ask({"score": [1]})
    pid, status = os.waitpid(process._process.pid, os.WUNTRACED)  # returns once it has stopped
    assert pid == process._process.pid
    assert os.WIFSTOPPED(status)
    assert process.ask({"score": [2]})["best"] == [2]


def test_a_failed_request_says_why_and_the_next_one_works(start: Any) -> None:
    method = lookup_method(start(), None)
    with pytest.raises(ModelError, match="unlucky"):
        method.generate(ask(13))
    assert len(method.generate(ask()).tokens) == 9


def test_a_short_answer_is_no_measurement(start: Any) -> None:
    with pytest.raises(ModelError, match="8 tokens in 9"):
        lookup_method(start(), None).generate(ask(7))


def test_a_worker_that_ends_leaves_its_last_words(start: Any) -> None:
    method = lookup_method(start(), None)
    for _ in range(2):
        with pytest.raises(ModelError, match=r"code 1: out of memory"):
            method.generate(ask(99))


@pytest.mark.parametrize(("mode", "reason"), [("broken", "no such engine"), ("dies at once", "it fell over")])
def test_a_worker_that_cannot_load_says_why(start: Any, mode: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        start(mode)


class Engine:
    """A peer behind `serve`: delivers in pairs, and its logits are given."""

    def generate(self, prompt: list[int], max_new_tokens: int, lookup: int | None, seen: Any) -> None:
        for first in range(0, max_new_tokens, 2):
            seen.add([first, first + 1])

    def logits(self, tokens: list[int]) -> Any:
        if tokens == [0]:
            raise RuntimeError("no logits")
        return [[0.0, 1.0, 0.0], [2.0, 0.0, 0.0], [0.0, 0.0, 3.0]]


def test_the_serving_side_answers_with_deliveries_scores_and_failures() -> None:
    made = serve.answer(Engine(), {"prompt": [1], "max_new_tokens": 4, "lookup": None})
    assert (made["tokens"], made["sizes"]) == ([0, 1, 2, 3], [2, 2])
    assert 0 <= made["times"][0] <= made["times"][1]
    scored = serve.answer(Engine(), {"score": [2, 1, 0]})
    assert scored["best"] == [1, 0, 2]
    expected = [math.log(2 + math.e) - 1, math.log(2 + math.exp(2)) - 2]  # of tokens 1 and 0
    assert scored["surprise"] == pytest.approx(expected)
    assert serve.answer(Engine(), {"score": [0]}) == {"error": "RuntimeError: no logits"}


def scores_of(best: Sequence[int], surprise: float) -> Callable[[Sequence[int]], dict[str, Any]]:
    return lambda tokens: {"best": list(best), "surprise": [surprise] * (len(best) - 1)}


def test_quality_is_measured_once_a_model_and_decides_what_counts(tmp_path: Path) -> None:
    path = tmp_path / "quality.jsonl"
    right = [1] * 20
    calls: list[str] = []

    def noted(name: str, best: Sequence[int], surprise: float) -> Callable[[Sequence[int]], dict[str, Any]]:
        def score(tokens: Sequence[int]) -> dict[str, Any]:
            calls.append(name)
            return scores_of(best, surprise)(tokens)

        return score

    def broken(tokens: Sequence[int]) -> dict[str, Any]:
        raise ModelError("broken", "fell over")

    scores = {
        "exact": noted("exact", right, 1.0),
        "good": noted("good", [2, *right[1:]], 1.019),
        "coarse": noted("coarse", [2, 2, *right[2:]], 1.0),
        "surprised": noted("surprised", right, 1.021),
        "broken": broken,
    }
    texts = [[0] * 20, [0] * 20]
    known, failed = quality.measure_quality(texts, scores, "exact", path)
    assert {name: item.passes for name, item in known.items()} == {
        "exact": True,
        "good": True,
        "coarse": False,
        "surprised": False,
    }
    assert known["good"].agreement == 0.95
    assert known["good"].perplexity_change == pytest.approx(math.exp(0.019) - 1)
    assert known["good"].positions == 40
    assert "fell over" in failed["broken"]

    path.write_text(path.read_text().rstrip("\n").rsplit("\n", 1)[0] + '\n{"model": "surpr', encoding="utf-8")
    calls.clear()
    again, _ = quality.measure_quality(texts, scores, "exact", path)
    assert again == known
    assert set(calls) == {"exact", "surprised"}


def row(system: str, dtype: str, line: int, rate: float, lookup: int | None = None, subset: str = "open") -> dict:  # type: ignore[type-arg]
    drafts = lookup is not None
    return {
        "file": "a.jsonl",
        "line": line,
        "turn": 0,
        "category": subset,
        "method": f"{system} {dtype}" + (f" lookup K={lookup}" if drafts else ""),
        "system": system,
        "dtype": dtype,
        "drafts": drafts,
        "output_tps": rate,
        "equals_baseline": line == 1,
        "repetition": 0,
    }


ROWS = [
    *(row("specflow", "float32", line, rate) for line, rate in ((1, 40.0), (2, 60.0))),
    *(row("specflow", "float32", line, rate, 16) for line, rate in ((1, 80.0), (2, 180.0))),
    *(row("specflow", "int8", line, rate) for line, rate in ((1, 100.0), (2, 120.0))),
    *(row("llama.cpp", "F32", line, rate) for line, rate in ((1, 50.0), (2, 50.0))),
    *(row("llama.cpp", "F32", line, rate, 3) for line, rate in ((1, 40.0), (2, 60.0))),
    *(row("llama.cpp", "F32", line, rate, 10) for line, rate in ((1, 30.0), (2, 50.0))),
    *(row("llama.cpp", "Q4_1", line, rate) for line, rate in ((1, 500.0), (2, 500.0))),
    {"file": "a.jsonl", "line": 3, "category": "open", "method": "llama.cpp F32", "error": "no"},
]


def test_the_best_of_each_is_compared_prompt_by_prompt_and_only_where_quality_passes() -> None:
    passing = ["specflow float32", "specflow int8", "llama.cpp F32"]
    found = {(item.comparison, item.system): item for item in figures.compare_systems(ROWS, passing)}
    plain = found[figures.PLAIN, "llama.cpp"]
    assert (plain.method, plain.output_tps, plain.ratio) == ("llama.cpp F32", 50.0, pytest.approx(1.0))
    drafting = found[figures.DRAFTING, "llama.cpp"]
    assert (drafting.method, drafting.ratio) == ("llama.cpp F32 lookup K=3", pytest.approx(2.5))  # of 2 and 3
    assert found[figures.ANY, "specflow"].method == "specflow float32 lookup K=16"
    assert found[figures.ANY_PLAIN, "specflow"].method == "specflow int8"
    assert found[figures.ANY, "llama.cpp"].method == "llama.cpp F32"  # Q4_1 is faster, and did not pass
    assert ("plain, float32", "openvino-genai") not in found
    (mine, theirs) = figures.gains(ROWS)
    assert (mine.comparison, mine.ratio) == ("drafting over plain, float32", pytest.approx(2.5))  # of 2 and 3
    assert theirs.ratio == pytest.approx(1.0)  # of 0.8 and 1.2


def write_figures(folder: Path) -> None:
    known = [quality.Quality("specflow float32", 40, 1.0, 0.0), quality.Quality("llama.cpp Q4_1", 40, 0.91, 0.031)]
    best = [*figures.compare_systems(ROWS, ["specflow float32", "llama.cpp F32"]), *figures.gains(ROWS)]
    (folder / "comparison.csv").write_text(figures.rows_csv(best), encoding="utf-8")
    (folder / "quality.csv").write_text(figures.quality_csv(known, ROWS), encoding="utf-8")
    session = {"cpu_model": "A CPU", "git_sha": "0123456789abc", "git_dirty": False, "started_at": "2026-01-02T03:04"}
    manifest = {
        "sessions": [{**session, "versions": {"torch": "2.0", "python": "3.12"}}],
        "settings": {
            "threads": 2,
            "versions": {"llama-cpp-python": "0.3"},
            "plan": {"max_new_tokens": 128, "repeat": 1},
            "rows": ["a", "b"],
            "missing": {"openvino-genai int8": "not installed: no wheel for this machine"},
        },
    }
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def test_the_table_says_who_was_fastest_what_passed_and_who_is_missing(tmp_path: Path) -> None:
    write_figures(tmp_path)
    readme = tmp_path / "README.md"
    readme.write_text(f"Before.\n{cpu.BEGIN}\nold\n{cpu.END}\nAfter.\n", encoding="utf-8")
    cpu.publish(readme, tmp_path)
    cpu.publish(readme, tmp_path)
    text = readme.read_text(encoding="utf-8")
    assert text.startswith(f"Before.\n{cpu.BEGIN}\n| prompts |")
    assert text.endswith(f"{cpu.END}\nAfter.\n")
    drafting = "| open | drafting, float32 | 130.0 (float32 lookup K=16) | - | 50.0 (F32 lookup K=3) | - | - | 2.50 |"
    assert drafting in text
    assert "| drafting over plain, float32 | 2.50 |" in text
    assert "| llama.cpp Q4_1 | 0.910 | +3.1% | no | 1 of 2 |" in text
    assert "- A CPU, 2 threads, 128 new tokens, 2 prompts, 1 repetition, commit 0123456789, 2026-01-02" in text
    assert "- torch 2.0, llama-cpp-python 0.3" in text
    assert "- openvino-genai int8: not installed: no wheel for this machine" in text


def test_the_readme_shows_the_figures_of_the_last_run() -> None:
    shown = (ROOT / "README.md").read_text(encoding="utf-8").split(cpu.BEGIN)[1].split(cpu.END)[0].strip()
    assert shown == figures.table(cpu.FIGURES)


def test_a_peer_that_is_not_there_is_named_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "_add_ours", lambda found: str)
    with ExitStack() as stack:
        found = methods.load_field(tmp_path / "none" / "bin" / "python", tmp_path, stack)
        assert not found.methods
        assert len(found.missing) == sum(len(dtypes) for _, dtypes, _ in methods.PEERS)
        assert "make bench-cpu" in found.missing["llama.cpp F32"]
        notes = {"llama.cpp": "ERROR: no compiler", "transformers": None}
        python = tmp_path / "bin" / "python"
        (tmp_path / "installed.json").write_text(json.dumps(notes), encoding="utf-8")
        found = methods.load_field(python, tmp_path, stack, ["llama.cpp", "transformers"])
    assert found.missing["llama.cpp Q4_1"] == "not installed: ERROR: no compiler"
    assert "there is no" in found.missing["transformers float32"]
    assert "openvino-genai int8" not in found.missing


def test_the_installer_keeps_the_last_error_of_pip() -> None:
    said = "Collecting x\nERROR: Failed building wheel for x\nerror: subprocess-exited-with-error\nhint: see above\n"
    assert installer.install(["x"], lambda arguments: (1, said)) == "ERROR: Failed building wheel for x"
    assert installer.install(["x"], lambda arguments: (0, said)) is None
    assert installer.install(["x"], lambda arguments: (1, "")) == "pip said nothing"
    assert set(installer.PACKAGES) == {system for system, _, _ in methods.PEERS} == set(serve.PEERS)


class Steady:
    """A method whose every token takes the same time; its n-th call may be interrupted."""

    kind = "recipe"

    def __init__(self, name: str, system: str, drafts: bool, interrupt: int | None = None) -> None:
        self.name, self._interrupt, self.calls = name, interrupt, 0
        facts = {"exactness": None, "runtime": system, "dtype": "float32", "device": "cpu", "lossy": False}
        self.facts = {**facts, "system": system, "drafts": drafts}

    def generate(self, ask: Ask) -> Outcome:
        self.calls += 1
        if self.calls == self._interrupt:
            raise KeyboardInterrupt
        tokens = tuple(range(ask.max_new_tokens))
        return Outcome(tokens, "text", "length", 1, 0.1, 0.1 * (len(tokens) - 1), None)


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    options = argparse.Namespace(
        peers=Path("python"), runs=tmp_path, name="run", kind=None, limit=2, max_new_tokens=5, repeat=1, only=[]
    )

    def field(interrupt: int | None) -> Any:
        made: list[Method] = [
            Steady(methods.BASELINE, "specflow", False),  # type: ignore[list-item]
            Steady("llama.cpp F32 lookup K=3", "llama.cpp", True, interrupt),  # type: ignore[list-item]
        ]
        scores = {"specflow float32": scores_of([1, 2], 1.0), "llama.cpp F32": scores_of([1, 2], 1.0)}
        return methods.Field(made, scores, {"engine": "1"}, {"gone": "why"}, lambda messages: [1, 2, 3])

    first = field(interrupt=4)  # a warm-up, two prompts, then this
    monkeypatch.setattr(cpu, "load_field", lambda *arguments: first)
    with pytest.raises(KeyboardInterrupt):
        cpu.measure(options)
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["state"] == "interrupted"
    second = replace(field(None))
    monkeypatch.setattr(cpu, "load_field", lambda *arguments: second)
    folder = cpu.measure(options)
    assert [method.calls for method in second.methods] == [1 + 3, 1 + 4]  # warm-up, and what was missing of 6
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["state"], len(manifest["sessions"]), manifest["settings"]["missing"]) == (
        "complete",
        2,
        {"gone": "why"},
    )
    assert all((folder / name).exists() for name in cpu.FILES)
    assert "| llama.cpp F32 | 1.000 | +0.0% | yes |" in figures.table(folder)

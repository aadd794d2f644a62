"""The interleaved run with methods that need no model: order, rows, resume, interruption, summary."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from specflow.bench import (
    Ask,
    BadRow,
    Bench,
    EngineMethod,
    Method,
    Outcome,
    Plan,
    PromptRow,
    RunDirectory,
    acceptance_rows,
    summarise,
)
from specflow.bench.methods import Kind, first_divergence
from specflow.bench.runner import Explain, rotated
from specflow.bench.summary import acceptance_csv, summary_csv
from specflow.bench.table import summary_table
from specflow.errors import DataError, RequestError
from specflow.provenance import Provenance
from specflow.types import Counts, Generation, Sampling, Timings

SETTINGS = {"recipes": {"vanilla": {}, "fast": {}}}


@dataclass
class Fake:
    """Continues prompt p with p, p + 1, ...; `wrong_from` makes its text differ from there on."""

    name: str
    tps: float = 10.0
    kind: Kind = "recipe"
    wrong_from: int | None = None
    fails_on: int | None = None
    interrupts_at: int | None = None
    fails_at: int | None = None
    lossy: bool = False
    calls: list[Ask] = field(default_factory=list)

    @property
    def facts(self) -> dict[str, Any]:
        exactness = "tie-exact" if self.kind == "recipe" else None
        return {"exactness": exactness, "runtime": "native", "dtype": "float32", "device": "cpu", "lossy": self.lossy}

    def generate(self, ask: Ask) -> Outcome:
        self.calls.append(ask)
        if len(self.calls) == self.fails_at:
            raise RequestError("prompt", "not now")
        if len(self.calls) == self.interrupts_at:
            raise KeyboardInterrupt
        if ask.prompt[0] == self.fails_on:
            raise RequestError("prompt", "too long")
        tokens = list(range(ask.prompt[0], ask.prompt[0] + ask.max_new_tokens))
        if self.wrong_from is not None:
            tokens[self.wrong_from :] = [-token for token in tokens[self.wrong_from :]]
        later = len(tokens) - 1
        counts = Counts(later, 2, 2, 4, 1, len(tokens), [2, 2], [2, 1], [1, 0]) if self.kind == "recipe" else None
        spans = Timings(draft_s=0.1 * later / self.tps, target_s=0.8 * later / self.tps, decode_s=later / self.tps)
        timings = spans if self.kind == "recipe" else None
        text = " ".join(map(str, tokens))
        came = (0.5, 0.6, 0.8, 1.2)
        return Outcome(tuple(tokens), text, "length", 1, 0.5, later / self.tps, later, counts, timings, came)


def prompt(line: int, *turns: str, category: str = "talk") -> PromptRow:
    return PromptRow("some.jsonl", line, f"p{line}", category, (), turns or (str(line),))


def encode(messages: Sequence[dict[str, str]]) -> list[int]:
    content = messages[-1]["content"]
    if content == "unreadable":
        raise RequestError("prompt", "cannot be encoded")
    return [int(content), *range(len(messages) - 1)]


def open_run(path: Path, resume: bool = False, settings: dict[str, Any] = SETTINGS) -> RunDirectory:
    return RunDirectory(path, settings, Provenance.collect("cpu"), resume)


def measure(
    store: RunDirectory, methods: Sequence[Method], prompts: Sequence[PromptRow], plan: Plan | None = None
) -> list[str]:
    done: list[str] = []
    plan = plan or Plan(max_new_tokens=5, repeat=3, warmup=0)
    Bench(methods, "vanilla", encode, plan, store).run(prompts, [], done.append)
    return done


def written(store: RunDirectory) -> list[dict[str, Any]]:
    return [json.loads(line) for line in store.results.read_text(encoding="utf-8").splitlines()]


def test_every_prompt_method_and_repetition_is_measured_once_and_in_turns(tmp_path: Path) -> None:
    store = open_run(tmp_path / "run")
    done = measure(store, [Fake("vanilla"), Fake("fast"), Fake("slow")], [prompt(1), prompt(2)])
    rows = written(store)
    assert len(done) == len(rows) == 2 * 3 * 3
    assert len({(row["line"], row["method"], row["repetition"]) for row in rows}) == len(rows)
    assert [row["line"] for row in rows] == [1] * 9 + [2] * 9
    orders = [[row["method"] for row in rows[start : start + 3]] for start in range(0, len(rows), 3)]
    assert orders[0][0] == orders[3][0] == "vanilla"
    assert {order[0] for order in orders} == {"vanilla", "fast", "slow"}
    assert rows == store.rows


def test_order_rotates_so_that_each_method_takes_each_place() -> None:
    methods = [Fake("vanilla"), Fake("a"), Fake("b")]
    places = [[method.name for method in rotated(methods, "vanilla", 0, repetition)] for repetition in (1, 2, 3)]
    assert all({order[place] for order in places} == {"vanilla", "a", "b"} for place in range(3))
    first = [[method.name for method in rotated(methods, "vanilla", index, 0)] for index in (0, 1)]
    assert first == [["vanilla", "a", "b"], ["vanilla", "b", "a"]]


def test_warm_up_is_not_recorded(tmp_path: Path) -> None:
    store, fake = open_run(tmp_path / "run"), Fake("vanilla")
    measure(store, [fake], [prompt(1)], Plan(max_new_tokens=100, repeat=1, warmup=2))
    assert [call.max_new_tokens for call in fake.calls] == [32, 32, 100]
    assert len(written(store)) == 1


def test_rows_say_whether_the_text_equals_plain_decoding_and_where_not(tmp_path: Path) -> None:
    store = open_run(tmp_path / "run")
    measure(store, [Fake("vanilla"), Fake("wrong", wrong_from=3), Fake("right")], [prompt(1)])
    verdicts = {row["method"]: (row["equals_baseline"], row["first_divergence"]) for row in written(store)[3:]}
    assert verdicts == {"vanilla": (True, None), "wrong": (False, 3), "right": (True, None)}


@pytest.mark.parametrize(
    ("tokens", "expected"), [([1, 2, 3], None), ([1, 9, 3], 1), ([1, 2], 2), ([1, 2, 3, 4], 3), ([], 0)]
)
def test_first_divergence(tokens: list[int], expected: int | None) -> None:
    assert first_divergence(tokens, [1, 2, 3]) == expected


def test_only_a_lossless_recipe_must_explain_itself_and_the_row_keeps_the_reason(tmp_path: Path) -> None:
    asked: list[tuple[Ask, list[int], list[int]]] = []

    def explain(ask: Ask, tokens: Sequence[int], reference: Sequence[int]) -> dict[str, Any]:
        asked.append((ask, list(tokens), list(reference)))
        return {"divergence": "tie", "divergence_margin": 0.1}

    store = open_run(tmp_path / "run")
    methods: list[Method] = [
        Fake("vanilla"),
        Fake("wrong", wrong_from=2),
        Fake("typical", wrong_from=0, lossy=True),
        Fake("peer", kind="peer plain", wrong_from=1),
    ]
    plan = Plan(max_new_tokens=4, repeat=1, warmup=0, seed=3)
    checked: Explain = explain
    Bench(methods, "vanilla", encode, plan, store, checked).run([prompt(5)], [], lambda _: None)
    assert asked == [(Ask((5,), 4, False, 3), [5, 6, -7, -8], [5, 6, 7, 8])]
    rows = {row["method"]: row for row in written(store)}
    assert {name: row["divergence"] for name, row in rows.items()} == {
        "vanilla": None,
        "wrong": "tie",
        "typical": None,
        "peer": None,
    }
    assert rows["wrong"]["divergence_margin"] == 0.1
    overall = {row.strategy: row for row in summarise(store.rows, "vanilla") if row.subset == "overall"}
    assert (overall["wrong"].ties, overall["wrong"].bugs) == (1, 0)


def test_every_row_says_how_exact_it_is_and_the_table_says_so_too(tmp_path: Path) -> None:
    store = open_run(tmp_path / "run")
    methods: list[Method] = [Fake("vanilla"), Fake("typical", fails_on=2, lossy=True), Fake("peer", kind="peer plain")]
    measure(store, methods, [prompt(1), prompt(2)])
    assert {(row["method"], row["exactness"], row["lossy"]) for row in written(store)} == {
        ("vanilla", "tie-exact", False),
        ("typical", "tie-exact", True),
        ("peer", None, False),
    }
    summary = summarise(store.rows, "vanilla")
    assert {(row.strategy, row.dtype, row.lossy) for row in summary} >= {("typical", "float32", True)}
    table = summary_table(summary, "vanilla")
    assert str(table.caption).startswith("tie-exact")
    assert "native runtime, float32" in str(table.caption)
    names = [str(cell).strip() for cell in table.columns[0].cells]
    assert "typical (lossy)" in names
    assert "typical" not in names


def test_latency_between_deliveries_is_told_apart_from_time_per_token(tmp_path: Path) -> None:
    store = open_run(tmp_path / "run")
    measure(store, [Fake("vanilla")], [prompt(1)], Plan(max_new_tokens=9, repeat=1, warmup=0))
    (row,) = written(store)
    assert row["tpot_s"] == pytest.approx(0.1)
    assert row["itl_median_s"] == pytest.approx(0.2)  # of 0.1, 0.2, 0.4
    assert row["itl_p95_s"] == pytest.approx(0.38)
    assert row["num_deliveries"] == 4
    (_, overall) = summarise(store.rows, "vanilla")
    assert (overall.itl_median_ms, overall.itl_p95_ms) == (pytest.approx(200), pytest.approx(380))


def test_one_method_that_fails_leaves_no_other_cold(tmp_path: Path) -> None:
    store, broken, other = open_run(tmp_path / "run"), Fake("vanilla", fails_at=1), Fake("other")
    measure(store, [broken, other], [prompt(1)], Plan(max_new_tokens=5, repeat=1, warmup=2))
    assert (len(broken.calls), len(other.calls)) == (2, 3)


def test_warm_up_takes_the_first_prompt_that_works(tmp_path: Path) -> None:
    store, picky, other = open_run(tmp_path / "run"), Fake("vanilla", fails_on=2), Fake("other")
    prompts = [prompt(1, "unreadable"), prompt(2), prompt(3)]
    measure(store, [picky, other], prompts, Plan(max_new_tokens=5, repeat=1, warmup=2))
    assert [call.prompt[0] for call in picky.calls] == [2, 3, 3, 2, 3]
    assert [call.prompt[0] for call in other.calls] == [2, 2, 2, 3]


def test_rates_count_tokens_after_the_first_delivery() -> None:
    outcome = Outcome((1, 2, 3, 4, 5), "", "length", 2, 9.0, 1.5, 2)
    assert outcome.output_tps == 2.0
    assert outcome.tokens_per_round == 1.5
    assert Outcome((1,), "", "stop", 1, 9.0, 0.0, 0).output_tps is None


def test_a_failing_prompt_is_kept_as_a_failure_and_the_rest_runs(tmp_path: Path) -> None:
    store = open_run(tmp_path / "run")
    bad = BadRow("some.jsonl", 4, "not JSON")
    methods = [Fake("vanilla"), Fake("fast", fails_on=2)]
    plan = Plan(max_new_tokens=5, repeat=1, warmup=0)
    prompts = [prompt(1), prompt(2), prompt(3, "unreadable")]
    Bench(methods, "vanilla", encode, plan, store).run(prompts, [bad], lambda _: None)
    failures = {(row["line"], row.get("method")): row["error"] for row in written(store) if "error" in row}
    assert set(failures) == {(4, None), (2, "fast"), (3, None)}
    assert failures[4, None] == "not JSON"
    overall = {row.strategy: row for row in summarise(store.rows, "vanilla") if row.subset == "overall"}
    assert (overall["fast"].prompts, overall["fast"].failures, overall["vanilla"].prompts) == (1, 1, 2)


def test_later_turns_follow_the_answer_of_plain_decoding(tmp_path: Path) -> None:
    store = open_run(tmp_path / "run")
    talks: list[list[dict[str, str]]] = []

    def listen(messages: Sequence[dict[str, str]]) -> list[int]:
        talks.append(list(messages))
        return encode(messages)

    methods = [Fake("vanilla"), Fake("wrong", wrong_from=0)]
    plan = Plan(max_new_tokens=3, repeat=1, warmup=0, all_turns=True)
    Bench(methods, "vanilla", listen, plan, store).run([prompt(1, "5", "8")], [], lambda _: None)
    assert [message["content"] for message in talks[-1]] == ["5", "5 6 7", "8"]
    assert [row["turn"] for row in written(store)] == [0, 0, 1, 1]
    assert plan.num_measurements([prompt(1, "5", "8")], 2) == 4


def test_an_interrupted_run_resumes_where_it_was_and_drops_a_torn_line(tmp_path: Path) -> None:
    store = open_run(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        measure(store, [Fake("vanilla"), Fake("fast", interrupts_at=2)], [prompt(1), prompt(2)])
    store.close("interrupted")
    kept = written(store)
    assert len(kept) == 2
    with store.results.open("a", encoding="utf-8") as stream:
        stream.write('{"file": "some.jsonl", "li')
    again = open_run(tmp_path / "run", resume=True)
    vanilla, fast = Fake("vanilla"), Fake("fast")
    measure(again, [vanilla, fast], [prompt(1), prompt(2)])
    rows = written(again)
    assert rows[:2] == kept
    assert len(rows) == 12
    assert len(vanilla.calls) + len(fast.calls) == 10
    assert all(row["equals_baseline"] for row in rows[1:] if row["repetition"])
    assert len(json.loads((tmp_path / "run" / "manifest.json").read_text(encoding="utf-8"))["sessions"]) == 2


def test_failures_are_tried_again_on_resume_and_replaced(tmp_path: Path) -> None:
    plan = Plan(max_new_tokens=5, repeat=1, warmup=0)
    measure(open_run(tmp_path / "run"), [Fake("vanilla", fails_on=1)], [prompt(1)], plan)
    again = open_run(tmp_path / "run", resume=True)
    measure(again, [Fake("vanilla")], [prompt(1)], plan)
    assert len(written(again)) == 2
    assert ["error" in row for row in again.rows] == [False]


def test_bad_rows_are_written_once_however_often_a_run_resumes(tmp_path: Path) -> None:
    bad, plan = [BadRow("some.jsonl", 4, "not JSON")], Plan(max_new_tokens=5, repeat=1, warmup=0)
    for resume in (False, True, True):
        store = open_run(tmp_path / "run", resume)
        Bench([Fake("vanilla")], "vanilla", encode, plan, store).run([prompt(1)], bad, lambda _: None)
    assert [row["line"] for row in written(store)] == [4, 1]


def test_a_run_resumes_only_with_the_same_code(tmp_path: Path) -> None:
    open_run(tmp_path / "run")
    edited = dataclasses.replace(Provenance.collect("cpu"), source_sha256="0")
    with pytest.raises(DataError, match="source_sha256 differ"):
        RunDirectory(tmp_path / "run", SETTINGS, edited, resume=True)
    committed = dataclasses.replace(Provenance.collect("cpu"), git_sha="0")
    RunDirectory(tmp_path / "run", SETTINGS, committed, resume=True)


def test_a_run_directory_is_never_overwritten(tmp_path: Path) -> None:
    open_run(tmp_path / "run")
    with pytest.raises(DataError, match="never overwritten"):
        open_run(tmp_path / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").touch()
    with pytest.raises(DataError, match=r"no manifest\.json"):
        open_run(tmp_path / "other", resume=True)
    (tmp_path / "empty").mkdir()
    open_run(tmp_path / "empty")


def test_a_run_resumes_only_with_the_same_settings(tmp_path: Path) -> None:
    open_run(tmp_path / "run")
    with pytest.raises(DataError, match="cannot resume: plan, recipes differ"):
        open_run(tmp_path / "run", True, {"recipes": {}, "plan": {}})
    open_run(tmp_path / "run", True)


def test_summary_compares_prompt_by_prompt_and_names_the_best_peer(tmp_path: Path) -> None:
    store = open_run(tmp_path / "run")
    methods: list[Method] = [
        Fake("vanilla", 10.0),
        Fake("fast", 25.0, wrong_from=4),
        Fake("peer", 5.0, "peer plain"),
        Fake("peer lookup 3", 8.0, "peer speculative"),
        Fake("peer lookup 5", 12.5, "peer speculative"),
    ]
    measure(store, methods, [prompt(1), prompt(2, category="code"), prompt(3)])
    summary = summarise(store.rows, "vanilla")
    assert list(dict.fromkeys(row.subset for row in summary)) == ["talk", "code", "overall"]
    fast = next(row for row in summary if row.subset == "overall" and row.strategy == "fast")
    assert fast.prompts == 3
    assert fast.output_tps_median == pytest.approx(25.0)
    assert fast.ratio == pytest.approx(2.5)
    assert fast.ratio_total == pytest.approx(2.5)
    assert fast.ratio_to_peer_plain == pytest.approx(5.0)
    assert fast.ratio_to_peer_speculative == pytest.approx(2.0)
    assert fast.acceptance_length == pytest.approx(1 + 3 / 12)
    assert fast.draft_acceptance_rate == pytest.approx(3 / 12)
    assert (fast.equal_texts, fast.compared_texts) == (0, 9)
    assert fast.ttft_median_ms == pytest.approx(500.0)
    assert (fast.draft_share, fast.target_share) == (pytest.approx(0.1), pytest.approx(0.8))
    assert fast.other_share == pytest.approx(0.1)
    assert [row.strategy for row in summary if row.best_peer] == ["peer lookup 5"] * 3
    reader = list(csv.DictReader(io.StringIO(summary_csv(summary))))
    assert reader[-1]["strategy"] == "peer lookup 5"
    assert float(reader[-1]["ratio"]) == pytest.approx(1.25)
    assert reader[-1]["draft_acceptance_rate"] == ""
    table = summary_table(summary, "vanilla")
    assert table.row_count == len(summary) + 3
    console = Console(width=100, file=io.StringIO())
    assert console.measure(table).maximum <= 100
    alone = summary_table(summarise([row for row in store.rows if row["category"] == "code"], "vanilla"), "vanilla")
    assert alone.row_count == 1 + len(methods)


def test_a_table_shows_a_dash_where_nothing_was_compared_and_failures_where_some_are(tmp_path: Path) -> None:
    store = open_run(tmp_path / "run")
    measure(store, [Fake("vanilla", fails_on=1), Fake("fast")], [prompt(1)], Plan(5, 1, 0))
    table = summary_table(summarise(store.rows, "vanilla"), "vanilla")
    cells = {str(column.header): list(column.cells) for column in table.columns}
    assert cells["equal"] == ["", "-", "-"]
    assert cells["failed"] == ["", "1", ""]


def test_acceptance_by_position_is_summed_over_first_repetitions(tmp_path: Path) -> None:
    store = open_run(tmp_path / "run")
    measure(store, [Fake("vanilla")], [prompt(1), prompt(2)])
    first, second = [rate for subset, _, rate in acceptance_rows(store.rows) if subset == "overall"]
    assert (first.drafted, first.reached, first.accepted, first.conditional) == (4, 4, 2, 0.5)
    assert (second.reached, second.accepted, second.conditional, second.unconditional) == (2, 0, 0.0, 0.0)
    assert acceptance_csv([("overall", "fast", first)]).splitlines()[1] == "overall,fast,1,4,4,2,0.5,0.5"


def test_summary_of_nothing_is_nothing() -> None:
    assert summarise([], "vanilla") == []
    assert summarise([{"file": "x", "line": 1, "error": "not JSON"}], "vanilla") == []


def test_an_engine_is_asked_with_the_recipes_sampling_and_the_runs_limits() -> None:
    asked: list[tuple[Sequence[Sequence[int]], Sampling | Sequence[Sampling]]] = []

    class Engine:
        def generate(
            self,
            prompts: Sequence[Sequence[int]],
            sampling: Sampling | Sequence[Sampling],
            on_text: Callable[[int, str], None] | None = None,
        ) -> list[Generation]:
            asked.append((prompts, sampling))
            assert on_text is not None
            for piece in ("x", "y", "z"):
                on_text(0, piece)
            counts, timings = Counts(num_rounds=2), Timings(ttft_s=0.1, decode_s=0.5)
            return [Generation((1,), (2, 3, 4), "x", "length", None, 5, counts, timings)]

    method = EngineMethod("fast", Engine(), Sampling(temperature=0.5, max_new_tokens=7), {"lossy": False})
    outcome = method.generate(Ask((1,), 3, True, 5))
    assert asked == [([(1,)], Sampling(temperature=0.5, max_new_tokens=3, ignore_eos=True, seed=5))]
    assert (outcome.output_tps, outcome.ttft_s, outcome.rounds) == (4.0, 0.1, 2)
    assert (len(outcome.deliveries), len(outcome.waits)) == (3, 2)
    assert min(outcome.waits) >= 0

"""Prompts to train on: the shapes they come in, the mix they are taken in, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specflow.bench.data import PromptRow
from specflow.errors import DataError
from specflow.train.prompts import EVALUATION_SETS, balance, load_training_prompts, refuse_evaluation_file


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_prompt_messages_and_turns_are_read_with_their_domain(tmp_path: Path) -> None:
    user = {"role": "user", "content": "Hi."}
    path = write(
        tmp_path / "some.jsonl",
        {"id": "train/1", "domain": "chat", "prompt": "Hi."},
        {"id": "train/2", "category": "code", "domain": "chat", "messages": [user]},
        {"turns": ["One?", "Two?"]},
        {"prompt": 5},
    )
    rows, bad = load_training_prompts([path])
    assert [row.category for row in rows] == ["chat", "code", "some"]
    assert [row.turns for row in rows] == [("Hi.",), ("Hi.",), ("One?", "Two?")]
    assert [row.line for row in bad] == [4]
    assert [row.id for row in load_training_prompts([path], limit=1)[0]] == ["train/1"]


def test_a_row_without_an_id_is_named_by_what_it_asks(tmp_path: Path) -> None:
    one = write(tmp_path / "a.jsonl", {"prompt": "x"}, {"prompt": "y"})
    other = write(tmp_path / "b.jsonl", {"prompt": "y"}, {"turns": ["x"]}, {"turns": ["x", "y"]})
    ids = [row.id for row in load_training_prompts([one])[0]]
    assert len(set(ids)) == 2
    rows, bad = load_training_prompts([other, one])
    assert [row.id for row in rows][:2] == [ids[1], ids[0]]
    assert len(rows) == 3
    assert not bad


def test_two_prompts_of_one_id_are_told_apart(tmp_path: Path) -> None:
    one = write(tmp_path / "a.jsonl", {"id": 1, "prompt": "x"})
    other = write(tmp_path / "b.jsonl", {"id": 1, "prompt": "x"}, {"id": 1, "prompt": "y"})
    rows, (bad,) = load_training_prompts([one, other])
    assert [row.turns for row in rows] == [("x",)]
    assert bad.key == f"{other}:2"
    assert "'1'" in bad.reason
    assert str(one) in bad.reason


@pytest.mark.parametrize(
    "name",
    [
        "mt_bench.jsonl",
        "MT-Bench_dev.jsonl",
        "mtbench.questions.jsonl",
        "HumanEval.jsonl",
        "human-eval/data/problems.jsonl",
        "gsm8k/dev.jsonl",
        "gsm8k_test.jsonl",
        "mbpp/held.jsonl",
        "arena-hard-v2.jsonl",
        "spec_bench/question.jsonl",
        "vicuna_bench/x.jsonl",
        "self_instruct_user/x.jsonl",
        "summarization_books/x.jsonl",
        "translation_pud/x.jsonl",
        "smoke/dev.jsonl",
        "benchmarks/open.jsonl",
        "eval.jsonl",
        "openai_humaneval.jsonl",
        "data.gsm8k.jsonl",
        "google--mbpp/x.jsonl",
    ],
)
def test_evaluation_sets_are_refused_by_name(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, {"prompt": "x"})
    with pytest.raises(DataError, match="evaluation set") as caught:
        load_training_prompts([path])
    assert str(path) in str(caught.value)
    assert "train" in caught.value.hint


@pytest.mark.parametrize(
    "name",
    [
        "prompts.jsonl",
        "gsm8k_train.jsonl",
        "gsm8k/train.jsonl",
        "smokers.jsonl",
        "mathematics/evaluate_this.jsonl",
        "gsm8k/rows.train.jsonl",
    ],
)
def test_other_files_are_taken(tmp_path: Path, name: str) -> None:
    assert load_training_prompts([write(tmp_path / name, {"prompt": "x"})])[0]


def test_a_link_does_not_hide_what_a_file_is(tmp_path: Path) -> None:
    link = tmp_path / "prompts.jsonl"
    link.symlink_to(write(tmp_path / "gsm8k" / "dev.jsonl", {"prompt": "x"}))
    with pytest.raises(DataError, match="gsm8k"):
        refuse_evaluation_file(link)


@pytest.mark.parametrize(
    "name", ["arena_hard/1f07cf6d146d", "gsm8k/test-0", "HumanEval/0", "mt_bench/81", "mt-bench-81", "mbpp", "xsum:7"]
)
def test_rows_are_refused_by_id(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "prompts.jsonl", {"id": "train/1", "prompt": "x"}, {"id": name, "prompt": "y"})
    with pytest.raises(DataError, match="evaluation set") as caught:
        load_training_prompts([path])
    assert caught.value.where == f"{path}:2"
    assert name in caught.value.found


@pytest.mark.parametrize("name", ["train/60dcd1251f01", "gsm8k/train-5", "gsm8kish", "81", "smoke-signals"])
def test_other_ids_are_taken(tmp_path: Path, name: str) -> None:
    assert load_training_prompts([write(tmp_path / "prompts.jsonl", {"id": name, "prompt": "x"})])[0]


def test_the_list_is_sorted_data() -> None:
    assert list(EVALUATION_SETS) == sorted(set(EVALUATION_SETS))


def rows_of(**counts: int) -> list[PromptRow]:
    return [PromptRow("f", n, f"{name}{n}", name, (), ("x",)) for name, count in counts.items() for n in range(count)]


def test_categories_take_turns_until_one_would_have_too_much() -> None:
    mixed = balance(rows_of(math=50, chat=3, code=6, qa=4), most=0.3)
    assert [row.id for row in mixed[:5]] == ["math0", "chat0", "code0", "qa0", "math1"]
    found = [row.category for row in mixed]
    assert (found.count("chat"), found.count("qa")) == (3, 4)
    assert found.count("code") > 3
    for end in range(8, len(found) + 1):
        assert found[:end].count("math") <= 0.3 * end + 1
    assert found.count("math") < 10


def test_few_categories_cannot_be_kept_below_their_share() -> None:
    assert len(balance(rows_of(math=5, chat=2), most=0.3)) == 7
    assert balance([]) == []

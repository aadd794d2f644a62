"""Prompt files: what is read, and how a bad row is named."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from specflow.bench.data import BadRow, PromptRow, load_prompts, read_prompts
from specflow.errors import DataError

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = [*sorted((ROOT / "benchmarks").glob("*.jsonl")), ROOT / "specflow" / "data" / "demo.jsonl"]


def read(tmp_path: Path, *lines: str) -> list[PromptRow | BadRow]:
    path = tmp_path / "some.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return read_prompts(path)


def test_prompt_messages_and_turns_all_become_conversations(tmp_path: Path) -> None:
    system, user = {"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi."}
    rows = read(
        tmp_path,
        json.dumps({"prompt": "Hi.", "id": 7, "category": "x"}),
        json.dumps({"messages": [system, user]}),
        json.dumps({"turns": ["One?", "Two?"], "question_id": 81}),
    )
    prompt, messages, turns = rows
    assert isinstance(prompt, PromptRow)
    assert isinstance(messages, PromptRow)
    assert isinstance(turns, PromptRow)
    assert (prompt.id, prompt.category, prompt.messages(0, ())) == ("7", "x", [user])
    assert (messages.id, messages.category, messages.messages(0, ())) == ("some-2", "some", [system, user])
    assert turns.id == "81"
    assert turns.messages(0, ()) == [{"role": "user", "content": "One?"}]
    assert turns.messages(1, ["Answer."]) == [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Answer."},
        {"role": "user", "content": "Two?"},
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "x"', "not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"prompt": "x", "id": ' + "[" * 100_000, "nested too deeply"),
        (r'{"prompt": "x", "id": "\ud800"}', "id: half of a surrogate pair"),
        (r'{"prompt": "x", "category": "a\udc00"}', "category: half of a surrogate pair at character 1"),
        (r'{"turns": ["x", "\ud83d"]}', r"turns\[1\]: half of a surrogate pair"),
        ("[1]", "found list"),
        ('{"text": "x"}', "none of the keys"),
        ('{"prompt": "x", "turns": ["y"]}', "prompt and turns"),
        ('{"prompt": ""}', "prompt: empty"),
        ('{"prompt": "  "}', "prompt: empty"),
        ('{"prompt": 5}', "found int"),
        ('{"turns": []}', "at least one"),
        ('{"turns": ["x", null]}', r"turns\[1\]"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', r"messages\[0\]"),
        ('{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}', "from assistant"),
    ],
)
def test_a_bad_row_is_named_by_line_and_the_rest_is_kept(tmp_path: Path, line: str, reason: str) -> None:
    first, bad, last = read(tmp_path, '{"prompt": "a"}', "", line, '{"prompt": "b"}')
    assert isinstance(first, PromptRow)
    assert isinstance(last, PromptRow)
    assert isinstance(bad, BadRow)
    assert (bad.line, bad.key) == (3, f"{tmp_path / 'some.jsonl'}:3")
    assert re.search(reason, bad.reason)


def test_bytes_that_are_not_utf8_spoil_only_their_row(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "\xff"}\n{"prompt": "b"}')
    first, bad, last = read_prompts(path)
    assert isinstance(first, PromptRow)
    assert isinstance(last, PromptRow)
    assert isinstance(bad, BadRow)
    assert "UTF-8" in bad.reason


def test_a_line_separator_inside_a_text_does_not_end_the_row(tmp_path: Path) -> None:
    (row,) = read(tmp_path, '{"prompt": "a\u2028b"}')
    assert isinstance(row, PromptRow)
    assert row.turns == ("a\u2028b",)


def test_files_that_hold_nothing_or_do_not_exist_are_errors(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n  \n", encoding="utf-8")
    with pytest.raises(DataError, match="no rows"):
        read_prompts(tmp_path / "empty.jsonl")
    with pytest.raises(DataError, match=r"absent\.jsonl: cannot read"):
        read_prompts(tmp_path / "absent.jsonl")


def test_limit_takes_rows_of_each_file(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"prompt": "1"}\n{"prompt": ""}\n{"prompt": "3"}\n', encoding="utf-8")
    good, bad = load_prompts([tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "a.jsonl"], limit=2)
    assert [row.category for row in good] == ["a", "b"]
    assert [row.file for row in bad] == [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_prompts_are_usable_and_say_where_they_come_from(path: Path) -> None:
    rows = read_prompts(path)
    assert rows
    assert all(isinstance(row, PromptRow) for row in rows)
    assert len({row.id for row in rows if isinstance(row, PromptRow)}) == len(rows)
    for line in path.read_text(encoding="utf-8").splitlines():
        value = json.loads(line)
        assert value["source"]
        assert value["license"] in ("PSF-2.0", "Apache-2.0")


def test_code_edits_hold_real_functions_that_use_the_name_to_change() -> None:
    for row in read_prompts(ROOT / "benchmarks" / "code_edits.jsonl"):
        assert isinstance(row, PromptRow)
        request, code = row.turns[0].split("```python\n")
        assert 40 <= len(code.splitlines()) <= 91
        names = re.findall(r"`(\w+)`", request)
        if "rename" in request.lower():
            old, new = names
            assert len(re.findall(rf"\b{old}\b", code)) >= 3
            assert not re.search(rf"\b{new}\b", code)


def test_the_demo_has_one_row_of_each_kind() -> None:
    rows = read_prompts(ROOT / "specflow" / "data" / "demo.jsonl")
    assert [row.category for row in rows if isinstance(row, PromptRow)] == ["code_edit", "extraction", "open"]

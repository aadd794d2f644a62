"""Writing that survives interruptions."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from specflow import files
from specflow.errors import DataError


def test_appended_rows_are_complete_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    files.append_jsonl(path, {"text": "zwei\nZeilen ü"})
    files.append_jsonl(path, {"n": 2})
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert rows == [{"text": "zwei\nZeilen ü"}, {"n": 2}]


def test_a_full_disk_is_a_clear_error_and_earlier_rows_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    files.append_jsonl(path, {"n": 1})
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"No space left.*\n.*\n.*resume"):
        files.append_jsonl(path, {"n": 2})
    assert path.read_bytes() == before
    with pytest.raises(DataError, match="No space left"):
        files.write_json_atomic(tmp_path / "manifest.json", {})
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.jsonl"]


def test_json_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    files.write_json_atomic(path, {"state": "running"})
    with pytest.raises(TypeError):
        files.write_json_atomic(path, {"state": object()})
    assert json.loads(path.read_text(encoding="utf-8")) == {"state": "running"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["manifest.json"]


def test_a_directory_with_files_is_never_taken(tmp_path: Path) -> None:
    files.claim_directory(tmp_path / "new" / "run")
    files.claim_directory(tmp_path / "new" / "run")
    (tmp_path / "new" / "run" / "thesis.txt").touch()
    for path in (tmp_path / "new" / "run", tmp_path / "new" / "run" / "thesis.txt"):
        with pytest.raises(DataError, match=r"never overwritten(.|\n)*choose another"):
            files.claim_directory(path)
    with pytest.raises(DataError, match="cannot create"):
        files.claim_directory(tmp_path / "new" / "run" / "thesis.txt" / "below")

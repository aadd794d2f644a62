"""What the command line does where stdout cannot be written, and what it says while nothing else is to be seen."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from specflow.cli import progress

PROGRAM = [sys.executable, "-m", "specflow"]


@pytest.mark.parametrize("words", [["schema"], ["recipes", "--json"], ["--help"]])
def test_a_stdout_that_takes_nothing_is_one_line_and_exit_code_1(words: list[str]) -> None:
    with open(os.devnull, encoding="utf-8") as closed:
        done = subprocess.run([*PROGRAM, *words], stdout=closed, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "error: cannot write to stdout: Bad file descriptor\n")


def test_a_reader_that_went_away_is_no_error_to_talk_about() -> None:
    with subprocess.Popen([*PROGRAM, "schema"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == 1


def test_counting_without_a_terminal_says_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = iter([0.0, 4.0, 11.0, 12.0, 22.0, 22.1])
    monkeypatch.setattr(progress, "monotonic", lambda: next(times))
    with progress.counted(5) as advance:
        for name in "abcde":
            advance(name)
    assert capsys.readouterr().err == "2/5 b\n4/5 d\n5/5 e\n"

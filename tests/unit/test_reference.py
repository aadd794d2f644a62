"""The agreement that is kept beside weights, and what counts as fallen (user report 66)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specflow.errors import CheckpointError
from specflow.train.reference import FILE, Reference
from specflow.train.selftest import Found, SelfTest

PROMPTS = [[1, 2, 3], [4]]


def reference(agreement: float, positions: int = 200) -> Reference:
    found = SelfTest("eagle", "here", positions, (Found("as declared", agreement, ""),))
    return Reference.of(found, PROMPTS, 200)


def test_it_comes_back_as_it_was_kept(tmp_path: Path) -> None:
    assert Reference.read(tmp_path) is None
    reference(0.42).write(tmp_path)
    assert Reference.read(tmp_path) == reference(0.42)


def test_a_clear_fall_is_told_and_chance_is_not() -> None:
    before = reference(0.62)
    assert before.fallen(reference(0.15))
    assert not before.fallen(reference(0.55))
    assert not before.fallen(reference(0.70))
    assert not reference(0.62, 20).fallen(reference(0.45, 20)), "20 positions say nothing of 17 points"


def test_figures_of_other_prompts_are_not_compared() -> None:
    before = reference(0.62)
    assert not before.fallen(replace(reference(0.15), prompts="others"))
    assert not before.fallen(replace(reference(0.15), tokens=100))


@pytest.mark.parametrize("content", ["{", "[]", '{"prompts": "x", "tokens": 1, "positions": 1}', "null"])
def test_a_damaged_file_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(content)
    with pytest.raises(CheckpointError, match="self-test"):
        Reference.read(tmp_path)

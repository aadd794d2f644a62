"""Huge pages: asked for where they may be, for what is new and stays; nothing happens elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specflow import allocator
from specflow.allocator import huge_pages

HUGE = 2**21
MAPS = """\
00400000-00900000 r-xp 00000000 08:01 42                         /usr/bin/python3
00a00000-01200000 rw-p 00000000 00:00 0                          [heap]
10100000-10700000 rw-p 00000000 00:00 0
20000000-20400000 rw-p 00000000 00:00 0                          [stack]
30000000-30400000 rw-p 00000000 08:01 42                         /data/weights file
40000000-40100000 rw-p 00000000 00:00 0
"""


@pytest.fixture
def advised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """A system that gives huge pages to those that ask; what was asked for is listed as (first, end, advice)."""
    asked: list[tuple[int, int, int]] = []
    for name, text in (("_HUGE_PAGES", "always [madvise] never\n"), ("_MAPPINGS", "")):
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(allocator, name, tmp_path / name)
    monkeypatch.setattr(allocator, "_advise", lambda *given: asked.append(given))
    return asked


def test_whole_blocks_of_new_private_memory_are_moved(advised: list[tuple[int, int, int]]) -> None:
    """The heap had been there but for its last block; what is mapped from files, or too small, is left alone."""
    allocator._MAPPINGS.write_text(MAPS.replace("01200000", "01000000").replace("10100000", "10600000"))
    with huge_pages():
        allocator._MAPPINGS.write_text(MAPS)
    spans = [(0x01000000, 0x01200000), (0x10200000, 0x10600000)]
    assert advised == [(*span, advice) for span in spans for advice in (14, 25)]


@pytest.mark.parametrize("setting", ["[always] madvise never", "always madvise [never]", None])
def test_nothing_is_asked_where_the_system_has_decided(
    setting: str | None, advised: list[tuple[int, int, int]]
) -> None:
    if setting is None:
        allocator._HUGE_PAGES.unlink()
    else:
        allocator._HUGE_PAGES.write_text(setting)
    with huge_pages():
        allocator._MAPPINGS.write_text(MAPS)
    assert advised == []


def test_memory_keeps_its_content() -> None:
    with huge_pages():
        numbers = torch.arange(4 * HUGE)
    assert torch.equal(numbers, torch.arange(4 * HUGE))


def test_own_mappings_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "_huge_pages_are_asked_for", lambda: True)
    large = torch.ones(8 * HUGE, dtype=torch.uint8)
    middle = (large.data_ptr() + 4 * HUGE) // HUGE * HUGE
    assert middle in allocator._whole_blocks()

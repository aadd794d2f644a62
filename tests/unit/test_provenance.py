"""Provenance of figures, and peak memory."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from specflow import provenance


def test_peak_memory_sees_an_allocation() -> None:
    memory = provenance.PeakMemory()
    memory.reset()
    before = memory.read()["peak_rss_bytes"]
    with mmap.mmap(-1, 64 << 20) as block:  # fresh pages: the heap may hold freed ones that are resident already
        for page in range(0, len(block), 4096):
            block[page] = 1
        after = memory.read()
    assert after["peak_rss_bytes"] >= before + (48 << 20) or after["peak_rss_scope"] == "process"
    assert after["peak_device_bytes"] is None


def test_provenance_names_code_machine_and_inputs(tmp_path: Path) -> None:
    source = tmp_path / "prompts.jsonl"
    source.write_bytes(b"abc")
    found = provenance.Provenance.collect("cpu", seeds=[7], files=[source])
    assert found.files == {str(source): "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"}
    assert found.seeds == (7,)
    assert found.versions["torch"]
    assert found.num_cpus >= 1
    assert found.cpu_model
    assert found.git_sha is None or len(found.git_sha) == 40
    assert found.source_sha256 == provenance.Provenance.collect("cpu").source_sha256


def test_an_edited_source_is_another_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "provenance.py"))
    (tmp_path / "draft").mkdir()
    part = tmp_path / "draft" / "a.py"
    hashes = set()
    for text in ("x = 1\n", "x = 2\n"):
        part.write_text(text, encoding="utf-8")
        hashes.add(provenance.Provenance.collect("cpu").source_sha256)
    part.rename(tmp_path / "draft" / "b.py")
    hashes.add(provenance.Provenance.collect("cpu").source_sha256)
    assert len(hashes) == 3


def test_a_package_that_is_not_installed_has_no_version() -> None:
    assert provenance.package_version("torch")
    assert provenance.package_version("absent-package") is None

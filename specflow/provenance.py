"""Where a figure comes from: code, machine, versions, inputs, and the memory it took."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from specflow.files import file_sha256

__all__ = ["PeakMemory", "Provenance", "cpu_model", "package_version", "usable_cpus"]

PACKAGES = (
    "specflow-toolkit",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "onnxruntime",
    "onnxruntime-gpu",
)


class PeakMemory:
    """Peak memory of this process since `reset`, in bytes.

    Host: the resident set, which all models loaded in the process share. Where the system cannot reset its high-water
    mark the figure is that of the whole process so far, and `scope` says so. Device: the peak of CUDA's allocator.
    """

    def __init__(self) -> None:
        self.scope = "process"

    def reset(self) -> None:
        """Begin a new peak."""
        self.scope = "process"
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            self.scope = "measurement"
        if (torch := _cuda()) is not None:
            torch.cuda.reset_peak_memory_stats()

    def read(self) -> dict[str, Any]:
        """Peaks since the reset, ready for a results row."""
        device = torch.cuda.max_memory_allocated() if (torch := _cuda()) is not None else None
        return {"peak_rss_bytes": _peak_rss(), "peak_rss_scope": self.scope, "peak_device_bytes": device}


def _cuda() -> Any:
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


def _peak_rss() -> int:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource  # here, because Windows has no such module

    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a figure comes from: enough to repeat the run, and to see why it differs when it does."""

    started_at: str  # UTC, ISO 8601
    argv: tuple[str, ...]
    git_sha: str | None  # of the source tree specflow runs from, if that is a repository
    git_dirty: bool | None
    source_sha256: str  # of all Python files of the package, committed or not
    versions: Mapping[str, str]
    platform: str
    cpu_model: str
    num_cpus: int  # usable by this process
    threads: int | None  # torch's, if torch is loaded
    device: str
    environment: Mapping[str, str]  # variables that change speed or visibility of devices
    seeds: tuple[int, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)  # path -> sha256

    @classmethod
    def collect(cls, device: str, seeds: Sequence[int] = (), files: Sequence[Path] = ()) -> Provenance:
        """Read everything from the running process.

        Args:
            device: Where the models run, as the user would name it.
            seeds: Seeds in use.
            files: Inputs whose content the figures depend on.
        """
        sha, dirty = _git_state()
        torch = sys.modules.get("torch")
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "ONEDNN_MAX_CPU_ISA")
        return cls(
            started_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            argv=tuple(sys.argv),
            git_sha=sha,
            git_dirty=dirty,
            source_sha256=_source_sha256(),
            versions={"python": platform.python_version(), **_versions()},
            platform=platform.platform(),
            cpu_model=cpu_model(),
            num_cpus=usable_cpus(),
            threads=torch.get_num_threads() if torch is not None else None,
            device=device,
            environment={name: os.environ[name] for name in names if name in os.environ},
            seeds=tuple(seeds),
            files={str(path): file_sha256(path) for path in files},
        )


def package_version(name: str) -> str | None:
    """Version of an installed distribution; None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions() -> dict[str, str]:
    return {name: version for name in PACKAGES if (version := package_version(name)) is not None}


def _source_sha256() -> str:
    package = Path(__file__).resolve().parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package).as_posix()} {file_sha256(path)}\n".encode())
    return digest.hexdigest()


def _git_state() -> tuple[str | None, bool | None]:
    here = str(Path(__file__).resolve().parent)

    def git(*args: str) -> str:
        run = subprocess.run(["git", "-C", here, *args], capture_output=True, text=True, timeout=10, check=True)
        return run.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # an installed copy may lie in another repository
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None, None


def usable_cpus() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model() -> str:
    """The processor as it names itself."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()

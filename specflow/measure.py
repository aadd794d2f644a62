"""Clocks, acceptance figures, provenance, and files that survive an interruption.

Every figure that the toolkit prints comes from here, with its formula beside it, so that two verbs cannot disagree.
K excludes the bonus token throughout; position 1 is the first draft token of a block.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from specflow.errors import DataError
from specflow.types import Counts, Timings

__all__ = [
    "Clock",
    "PeakMemory",
    "PositionRate",
    "Provenance",
    "Spread",
    "acceptance_by_position",
    "acceptance_length",
    "append_jsonl",
    "check_counts",
    "file_sha256",
    "merge_counts",
    "metrics",
    "spread",
    "write_json_atomic",
    "write_text_atomic",
]

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


class Clock:
    """Splits a request's time into the fields of `Timings`, one reading of the counter a lap.

    A lap charges all time since the previous reading to one field, so spans never overlap and nothing between them is
    lost. It reads the host's counter and waits for no device: on an accelerator, work is charged to the lap in which
    the host waits for its result.
    """

    __slots__ = ("_last", "_timings")

    def __init__(self, timings: Timings) -> None:
        self._timings = timings
        self._last = perf_counter()

    def mark(self) -> float:
        """Begin a lap here; the time since the last reading is charged to nobody. Returns the reading."""
        self._last = now = perf_counter()
        return now

    def lap(self, span: str) -> float:
        """Add the seconds since the last reading to `span`, a field of `Timings`. Returns the reading."""
        now = perf_counter()
        timings = self._timings
        setattr(timings, span, getattr(timings, span) + now - self._last)
        self._last = now
        return now


@dataclass(frozen=True, slots=True)
class PositionRate:
    """Acceptance at one draft position, with the counts it stands on.

    conditional = accepted / reached: how often the token held, given that all tokens before it held.
    unconditional = accepted / spec_steps: how often a round that drafted anything got this far; it also falls where the
    position was not drafted. Both are None ("unobserved", never "rejected") where their denominator is empty.
    """

    position: int  # from 1
    drafted: int
    reached: int
    accepted: int
    conditional: float | None
    unconditional: float | None


def check_counts(counts: Counts) -> None:
    """Assert what every count must satisfy, so that no rate leaves [0, 1].

    accepted_at <= reached_at <= drafted_at <= num_spec_steps <= num_rounds, and a position is reached at most as often
    as the one before it was accepted.
    """
    assert 0 <= counts.num_accepted_draft_tokens <= counts.num_draft_tokens, counts
    assert 0 <= counts.num_spec_steps <= counts.num_rounds, counts
    assert len(counts.drafted_at) == len(counts.reached_at) == len(counts.accepted_at), counts
    assert sum(counts.accepted_at) == counts.num_accepted_draft_tokens, counts
    before = counts.num_spec_steps
    for drafted, reached, accepted in zip(counts.drafted_at, counts.reached_at, counts.accepted_at, strict=True):
        assert 0 <= accepted <= reached <= drafted <= counts.num_spec_steps, counts
        assert reached <= before, counts
        before = accepted


def acceptance_by_position(counts: Counts) -> list[PositionRate]:
    """Conditional and unconditional acceptance of every position that was ever drafted."""
    check_counts(counts)
    rates = []
    rows = zip(counts.drafted_at, counts.reached_at, counts.accepted_at, strict=True)
    for index, (drafted, reached, accepted) in enumerate(rows):
        conditional = accepted / reached if reached else None
        unconditional = accepted / counts.num_spec_steps if drafted else None
        rates.append(PositionRate(index + 1, drafted, reached, accepted, conditional, unconditional))
    return rates


def acceptance_length(counts: Counts) -> float | None:
    """tau = 1 + accepted / rounds, the bonus token included; 1.0 is plain decoding, None without a decode round."""
    return 1.0 + counts.num_accepted_draft_tokens / counts.num_rounds if counts.num_rounds else None


def metrics(counts: Counts) -> dict[str, Any]:
    """Per-request figures under vLLM's names, and the counts behind them.

    mean_acceptance_length             1 + accepted / rounds, over all decode rounds (a round without a draft gives 1)
    mean_acceptance_length_when_drafted  1 + accepted / spec_steps: vLLM's denominator, rounds that verified a draft
    draft_acceptance_rate              accepted / drafted
    acceptance_histogram               {j: rounds with a draft that accepted exactly j tokens}
    num_spec_tokens                    deepest position drafted
    acceptance_by_position             see PositionRate

    Rates are None where nothing was drafted: unobserved, not zero.
    """
    check_counts(counts)
    reached = [counts.num_spec_steps, *counts.accepted_at, 0]
    steps = counts.num_spec_steps
    accepted = counts.num_accepted_draft_tokens
    return {
        "mean_acceptance_length": acceptance_length(counts),
        "mean_acceptance_length_when_drafted": 1.0 + accepted / steps if steps else None,
        "draft_acceptance_rate": accepted / counts.num_draft_tokens if counts.num_draft_tokens else None,
        "acceptance_histogram": {
            str(j): reached[j] - reached[j + 1] for j in range(len(reached) - 1) if reached[j] > reached[j + 1]
        },
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": counts.num_draft_tokens,
        "num_spec_tokens": len(counts.drafted_at),
        "num_rounds": counts.num_rounds,
        "num_draft_calls": counts.num_draft_calls,
        "num_generated_tokens": counts.num_generated_tokens,
        "acceptance_by_position": [dataclasses.asdict(rate) for rate in acceptance_by_position(counts)],
    }


def merge_counts(many: Iterable[Counts]) -> Counts:
    """Counts of several requests as one; positions are added where both have them."""
    total = Counts()
    for counts in many:
        for item in dataclasses.fields(Counts):
            mine, theirs = getattr(total, item.name), getattr(counts, item.name)
            if isinstance(mine, list):
                width = max(len(mine), len(theirs))
                padded = (values + [0] * (width - len(values)) for values in (mine, list(theirs)))
                setattr(total, item.name, [a + b for a, b in zip(*padded, strict=True)])
            else:
                setattr(total, item.name, mine + theirs)
    return total


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of a sample."""

    median: float
    p25: float
    p75: float
    count: int


def spread(values: Sequence[float]) -> Spread | None:
    """Median with p25 and p75 (linear interpolation between order statistics); None of nothing."""
    if not values:
        return None
    ordered = sorted(values)

    def quantile(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    return Spread(float(median(ordered)), quantile(0.25), quantile(0.75), len(ordered))


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
            versions={"python": platform.python_version(), **_versions()},
            platform=platform.platform(),
            cpu_model=_cpu_model(),
            num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            threads=torch.get_num_threads() if torch is not None else None,
            device=device,
            environment={name: os.environ[name] for name in names if name in os.environ},
            seeds=tuple(seeds),
            files={str(path): file_sha256(path) for path in files},
        )


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _git_state() -> tuple[str | None, bool | None]:
    here = str(Path(__file__).resolve().parent)

    def git(*args: str) -> str:
        run = subprocess.run(["git", "-C", here, *args], capture_output=True, text=True, timeout=10, check=True)
        return run.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # an installed copy may lie in another repository
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None, None


def _cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def write_json_atomic(path: Path, value: Any) -> None:
    """Write a value as JSON; see `write_text_atomic`."""
    write_text_atomic(path, json.dumps(value, ensure_ascii=False, indent=2) + "\n")


def write_text_atomic(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old content or the new, never half of it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise _cannot_write(path, error) from error


def append_jsonl(path: Path, row: Mapping[str, Any]) -> None:
    """Append one row and wait until it is on disk. A row that does not fit leaves the earlier rows as they were."""
    line = (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8")
    before = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab", buffering=0) as stream:
            written = 0
            while written < len(line):
                written += stream.write(line[written:])
            os.fsync(stream.fileno())
    except OSError as error:
        with suppress(OSError):
            os.truncate(path, before)
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: OSError) -> DataError:
    return DataError(
        where=str(path),
        found=f"cannot write: {error.strerror or error}",
        expected="a writable file on a disk with room",
        hint="what was written before is intact; make room or choose another directory, and resume",
    )

"""What a tuning run found: the content of tuned.json, from which every report is made. No torch.

Seconds are seconds, throughput is decode tokens a second over all requests decoded together, and acceptance lengths
count the bonus token. Speed-ups are to plain decoding in the same run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specflow.errors import DataError
from specflow.files import write_json_atomic
from tuner.space import Candidate, Value

__all__ = [
    "FORMAT",
    "Acceptance",
    "Answer",
    "BreakEven",
    "CategoryAnswer",
    "Choice",
    "Confirmed",
    "ContextLength",
    "Importance",
    "Interval",
    "Level",
    "Position",
    "Predicted",
    "Refused",
    "Split",
    "TuneResult",
    "Workload",
    "read_result",
    "write_result",
]

FORMAT = "specflow-tuned-1"


class _Fact(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Choice(_Fact):
    """A recipe with some keys set, as data."""

    recipe: str
    settings: dict[str, Value] = Field(default_factory=dict)
    label: str = ""

    @classmethod
    def of(cls, candidate: Candidate) -> Choice:
        return cls(recipe=candidate.recipe, settings=candidate.values, label=candidate.label)

    @property
    def candidate(self) -> Candidate:
        return Candidate.of(self.recipe, self.settings)


class Interval(_Fact):
    """A figure, and where it lies with 95 % confidence."""

    value: float
    low: float
    high: float


class Split(_Fact):
    """Seconds of the mean round. `other` is the host's work between passes; `unexplained` is what no span claims."""

    draft_s: float = 0.0
    target_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0
    unexplained_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.draft_s + self.target_s + self.verify_s + self.other_s + self.unexplained_s


class Predicted(_Fact):
    """What replay and the cost model say of a candidate."""

    choice: Choice
    concurrency: int = Field(ge=1)
    throughput: float
    speed_up: float
    acceptance_length: float
    latency_p95_s: float | None = None  # of a request, first token to last
    memory_bytes: int | None = None  # beyond what plain decoding takes
    pareto: bool = False


class Confirmed(_Fact):
    """What a candidate did for real, and what was predicted of it."""

    choice: Choice
    concurrency: int = Field(ge=1)
    throughput: float
    speed_up: Interval
    acceptance_length: float | None
    rounds: int
    runs: int
    split: Split
    predicted_speed_up: float | None = None
    predicted_throughput: float | None = None
    predicted_split: Split | None = None
    latency_p95_s: float | None = None  # of a request, first token to last
    latency_gain: Interval | None = None  # how many times shorter that is than plain decoding's
    predicted_latency_p95_s: float | None = None
    memory_bytes: int | None = None  # beyond what plain decoding takes; estimated
    pareto: bool = False  # no other contestant is as good in every objective and better in one

    @property
    def error(self) -> float | None:
        """Predicted over measured speed-up, less one."""
        return None if self.predicted_speed_up is None else self.predicted_speed_up / self.speed_up.value - 1.0


class Refused(_Fact):
    """A recipe that takes no part, and why."""

    recipe: str
    phase: str
    reason: str


class Position(_Fact):
    """Acceptance at one draft position, from 1; see `specflow.measure.PositionRate`."""

    position: int
    drafted: int
    reached: int
    accepted: int
    conditional: float | None
    unconditional: float | None


class ContextLength(_Fact):
    """Acceptance length of rounds that began within a range of contexts."""

    context_from: int
    context_to: int
    rounds: int
    acceptance_length: float


class Acceptance(_Fact):
    """How far drafts stand, measured in the confirming runs, and what their shape hints at."""

    choice: Choice
    positions: list[Position] = Field(default_factory=list)
    contexts: list[ContextLength] = Field(default_factory=list)
    drafting_rounds: int = 0
    rounds: int = 0
    hints: list[str] = Field(default_factory=list)


class BreakEven(_Fact):
    """From which acceptance on a depth pays."""

    recipe: str
    k: int
    plain_steps: float  # price of its round in plain steps: the acceptance length above which it pays
    chance: float | None  # of each token, given the ones before; None: not even full acceptance pays
    acceptance_length: float | None = None
    speed_up: float | None = None
    measured: bool = False  # the last two come from real runs, not from replay
    latency_gain: float | None = None  # how many times shorter the latency is, where latency has to be beaten


class Importance(_Fact):
    """Share of the variance of the first predicted objective that one choice explains by itself."""

    scope: str  # "method", or the name of the recipe whose knob it is
    key: str
    share: float


class Level(_Fact):
    """What to run from one load on. Entered at `enter` requests, left below `leave`: between them nothing changes."""

    enter: int
    leave: int
    choice: Choice
    k: int
    speed_up: float
    measured: bool = False
    latency_gain: float | None = None  # where latency has to be beaten


class CategoryAnswer(_Fact):
    """The answer for one class of requests."""

    category: str
    prompts: int
    choice: Choice
    speed_up: Interval
    acceptance_length: float | None
    differs: bool
    latency_gain: Interval | None = None  # where latency has to be beaten


class Answer(_Fact):
    """What to run."""

    speculate: bool
    choice: Choice
    speed_up: Interval
    reason: str
    objective: str = "throughput"  # in which drafting had to beat plain decoding: throughput or latency
    gain: Interval | None = None  # by how much it did; None in files of before: the speed-up
    decided_by: str = "throughput"  # the objective that told it from the others that did, or simplicity
    ties: list[str] = Field(default_factory=list)  # labels that could not be told from it


class Workload(_Fact):
    """What was tuned on, and through which path."""

    files: dict[str, str]  # path -> sha256
    prompts: int
    categories: dict[str, int]
    bad_rows: list[str] = Field(default_factory=list)
    max_new_tokens: int
    limit: int | None = None
    seed: int = 0
    ignore_eos: bool = False
    path: str = "specflow engine, in process"


class TuneResult(_Fact):
    """One tuning run."""

    format: Literal["specflow-tuned-1"] = "specflow-tuned-1"
    answer: Answer
    recipe: dict[str, Any]  # tuned.yaml as data
    target: dict[str, Any]
    machine: dict[str, Any]
    workload: Workload
    objectives: list[str]
    concurrency: list[int]
    refused: list[Refused] = Field(default_factory=list)
    warnings: list[str] = Field(default_factory=list)
    predictions: list[Predicted] = Field(default_factory=list)
    confirmed: list[Confirmed] = Field(default_factory=list)
    acceptance: list[Acceptance] = Field(default_factory=list)
    break_even: list[BreakEven] = Field(default_factory=list)
    importance: list[Importance] = Field(default_factory=list)
    schedule: list[Level] = Field(default_factory=list)
    categories: list[CategoryAnswer] = Field(default_factory=list)
    drafters: dict[str, str] = Field(default_factory=dict)  # recipe -> where its drafters compute, and in what
    hopeless: int = 0  # candidates that the cost model ruled out before they were tried
    trials: int = 0
    seconds: dict[str, float] = Field(default_factory=dict)  # phase -> what it took
    profile_seconds: dict[str, float] = Field(default_factory=dict)  # recipe -> what its profile took; 0 where kept
    costs: dict[str, Any] = Field(default_factory=dict)  # recipe -> its cost model
    provenance: dict[str, Any] = Field(default_factory=dict)

    @property
    def errors(self) -> list[float]:
        """Absolute prediction errors of the speed-up, of every confirmed candidate that drafts."""
        found = (each.error for each in self.confirmed if each.choice.settings)
        return sorted(abs(error) for error in found if error is not None)


def write_result(path: Path, result: TuneResult) -> None:
    """Write it, whole or not at all.

    Raises:
        DataError: It cannot be written.
    """
    write_json_atomic(path, result.model_dump(mode="json"))


def read_result(path: Path) -> TuneResult:
    """Read tuned.json, or the one in a directory of a run.

    Raises:
        DataError: There is none, or it is no such file.
    """
    file = path / "tuned.json" if path.is_dir() else path
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(str(file), f"cannot be read: {reason}", "the tuned.json of `specflow tune`") from error
    return _checked(data, file)


def _checked(data: Any, file: Path) -> TuneResult:
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, Mapping) else type(data).__name__
        raise DataError(str(file), f"format {found!r}", f"{FORMAT}, as `specflow tune` writes it")
    try:
        return TuneResult.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise DataError(f"{file}: {place}", first["msg"], f"what `specflow tune` writes as {FORMAT}") from error

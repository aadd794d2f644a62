"""`specflow check`: measures the answer of an earlier run again and says what has drifted. No torch.

Acceptance at temperature 0 is a matter of texts and weights, so it may hardly move; a throughput ratio is measured anew
with its interval, and has drifted where the whole interval lies outside the tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specflow.errors import DataError
from specflow.files import file_sha256
from specflow.measure import acceptance_length
from tuner.confirm import Race
from tuner.interval import ratio_of_rates
from tuner.result import Confirmed, Interval, TuneResult
from tuner.space import Candidate

__all__ = ["Check", "Tolerance", "baseline_of", "changed_files", "compare"]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far figures may move, as shares of what they were."""

    speed_up: float = 0.1
    acceptance: float = 0.05


@dataclass(frozen=True, slots=True)
class Check:
    """What was measured again."""

    label: str
    speed_up: Interval
    speed_up_then: float
    acceptance: float | None
    acceptance_then: float | None
    drifts: tuple[str, ...]  # in words; () is as it was

    @property
    def sound(self) -> bool:
        return not self.drifts


def baseline_of(result: TuneResult) -> Confirmed | None:
    """The measurement of the answer, or None where the answer is not to speculate.

    Raises:
        DataError: The answer was never measured.
    """
    if not result.answer.speculate:
        return None
    first = result.concurrency[0]
    found = [each for each in result.confirmed if each.choice == result.answer.choice and each.concurrency == first]
    if not found:
        raise DataError("baseline", "no measurement of its answer", "a tuned.json of a whole run")
    return found[0]


def changed_files(result: TuneResult) -> list[str]:
    """Prompt files that are not what the baseline was measured on, each with the reason."""
    found = []
    for name, digest in result.workload.files.items():
        path = Path(name)
        if not path.is_file():
            found.append(f"{name}: not there" if path.is_absolute() else f"{name}: not in {Path.cwd()}")
        elif file_sha256(path) != digest:
            found.append(f"{name}: its content has changed")
    return found


def compare(then: Confirmed, race: Race, answer: Candidate, tolerance: Tolerance) -> Check:
    """What has drifted.

    Args:
        then: The baseline's measurement.
        race: The answer and plain decoding, measured now.
        answer: Which contestant is the answer.
        tolerance: How far figures may move.

    Raises:
        DataError: The answer failed now.
    """
    if answer in race.failures:
        raise DataError(answer.label, f"failed: {race.failures[answer]}", "the recipe of the baseline runs")
    measured = race.measured()
    up = ratio_of_rates(measured.get(answer, {}), measured[race.plain])
    if up is None:
        raise DataError(answer.label, "no tokens to compare", "prompts with longer answers")
    length = acceptance_length(race.counts(answer))
    before = then.speed_up.value
    drifts = []
    if up.high < before * (1.0 - tolerance.speed_up) or up.low > before * (1.0 + tolerance.speed_up):
        found = f"speed-up {up.value:.2f} ({up.low:.2f} to {up.high:.2f}), {before:.2f} in the baseline"
        drifts.append(f"{found}: more than {tolerance.speed_up:.0%} {'less' if up.value < before else 'more'}")
    if length is not None and then.acceptance_length is not None:
        moved = length / then.acceptance_length - 1.0
        if abs(moved) > tolerance.acceptance:
            found = f"acceptance length {length:.3f}, {then.acceptance_length:.3f} in the baseline"
            drifts.append(f"{found}: {moved:+.1%}, tolerance {tolerance.acceptance:.0%}")
    return Check(answer.label, up, before, length, then.acceptance_length, tuple(drifts))

"""The cost model: measured seconds of a round, and the profiles that keep it. No torch.

    t(round) = t_draft(depth, batch, context) + t_verify(rows, batch, context) + overhead(depth, batch)

Each term is measured (`specflow profile`), none assumed. A profile belongs to one target, one draft section and one
machine; on another machine it is refused.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specflow.curves import Surface
from specflow.errors import DataError
from specflow.files import write_json_atomic
from specflow.measure import Spread
from specflow.provenance import cpu_model, package_version
from specflow.target.store import cache_dir

if TYPE_CHECKING:
    from specflow.build import LoadedTarget
    from specflow.recipe import Recipe
    from specflow.target.base import TargetInfo

__all__ = [
    "FEWEST",
    "TOO_WIDE",
    "CostModel",
    "ProfileKey",
    "Timing",
    "find_profile",
    "load_profile",
    "profile_data",
    "profiles_dir",
    "save_profile",
]

log = logging.getLogger(__name__)

TOO_WIDE = 0.3
"""A timing whose middle half spreads over more than this share of its median is not trusted."""
FEWEST = 3
"""Of fewer repeats nobody can say how wide they spread."""

FORMAT = "specflow-profile-1"
SIZES = {"target": "rows", "draft": "depth", "own_blocks": "depth", "overhead": "depth"}
"""Tables of a model, and what their sizes are called."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One measured point."""

    size: int  # rows of a target pass, or deepest position of a draft
    batch: int  # B
    context: int  # committed tokens of each row
    seconds: Spread

    @property
    def trusted(self) -> bool:
        """Whether enough repeats agree."""
        spread = self.seconds
        return spread.count >= FEWEST and spread.p75 - spread.p25 <= TOO_WIDE * spread.median


@dataclass(frozen=True)
class CostModel:
    """Seconds of rounds of any depth, batch and context, from measured points.

    Rows and depth: monotone (isotonic regression), linear between measured sizes, beyond the largest on with the mean
    slope of the upper half. Context: a line; below the shortest measured one its value. Batch: linear between measured
    sizes, below the smallest its value; above the largest the target counts `B x rows` tokens as that many rows at the
    largest, and the draft and the overhead cost what they cost there.

    Attributes:
        target: Target passes over a chain, by rows.
        draft: Drafts, by deepest position.
        own_blocks: Target passes over the drafter's own blocks, by deepest position, where these are trees or the
            draft has run part of the target; () where blocks are chains.
        overhead: Rounds outside drafts and target passes, by deepest draft position; 0 is a plain step.
        nodes: Deepest position -> nodes of a block, where blocks branch.
    """

    target: tuple[Timing, ...]
    draft: tuple[Timing, ...] = ()
    own_blocks: tuple[Timing, ...] = ()
    overhead: tuple[Timing, ...] = ()
    nodes: Mapping[int, int] = field(default_factory=dict)

    def target_s(self, rows: float, batch: int, context: int) -> float:
        """Seconds of a target pass over this many rows of each request; 1 is a plain step."""
        largest = self._target.largest_batch
        if batch > largest:
            rows, batch = rows * batch / largest, largest
        return self._target.at(rows, batch, context)

    def draft_s(self, depth: int, batch: int, context: int) -> float:
        """Seconds of drafting to this depth; 0 where nothing is drafted."""
        return 0.0 if depth <= 0 or self._draft is None else self._draft.at(depth, batch, context)

    def verify_s(self, depth: int, batch: int, context: int) -> float:
        """Seconds of the target pass over the anchor and a block of this depth."""
        if depth <= 0 or self._own is None:
            return self.target_s(self.rows(depth), batch, context)
        largest = self._own.largest_batch
        seconds = self._own.at(depth, batch, context)
        if batch <= largest:
            return seconds
        rows = self.rows(depth)
        return seconds * self.target_s(rows, batch, context) / self.target_s(rows, largest, context)

    def overhead_s(self, depth: int = 0, batch: int = 1) -> float:
        """Seconds a round spends outside its draft and its target pass."""
        return 0.0 if self._overhead is None else self._overhead.at(max(0, depth), batch, 0)

    def round_s(self, depth: int, batch: int, context: int) -> float:
        """Seconds of a whole round that drafts to `depth`; 0 is a plain step."""
        spent = self.draft_s(depth, batch, context) + self.verify_s(depth, batch, context)
        return spent + self.overhead_s(depth, batch)

    def rows(self, depth: int) -> int:
        """Rows of the target pass of a round: the anchor and the nodes of the block."""
        if depth <= 0:
            return 1
        measured = [self.nodes[known] for known in sorted(self.nodes) if known >= depth]
        return 1 + (measured[0] if measured else max(depth, *self.nodes.values()) if self.nodes else depth)

    def plain_steps(self, depth: int, batch: int, context: int) -> float:
        """What a round costs in plain steps: the acceptance length (bonus included) above which it pays."""
        return self.round_s(depth, batch, context) / self.round_s(0, batch, context)

    def break_even(self, depth: int, batch: int, context: int) -> float | None:
        """The smallest chance of each token, given the ones before, at which drafting to `depth` pays.

        Solves 1 + a + ... + a^depth = plain_steps(depth), the expected tokens of a round with equal chances
        (Leviathan et al. 2211.17192, eq. 1). None where not even full acceptance pays.
        """
        price = self.plain_steps(depth, batch, context)
        if price <= 1.0:
            return 0.0
        if price > depth + 1:
            return None
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (low, middle) if _expected(middle, depth) >= price else (middle, high)
        return high

    @property
    def trusted(self) -> bool:
        """Whether every timing is."""
        return not any(True for _ in self.doubts())

    def doubts(self) -> Iterator[str]:
        """Timings that are not to be trusted, in words."""
        for table, size in SIZES.items():
            for timing in getattr(self, table):
                if not timing.trusted:
                    spread = timing.seconds
                    place = f"{table} {size} {timing.size}, batch {timing.batch}, context {timing.context}"
                    quarters = f"{1e3 * spread.p25:.2f}-{1e3 * spread.p75:.2f} ms"
                    yield f"{place}: {1e3 * spread.median:.2f} ms, middle half {quarters}, {spread.count} repeats"

    @cached_property
    def _target(self) -> Surface:
        return _surface(self.target)

    @cached_property
    def _draft(self) -> Surface | None:
        return _surface(self.draft) if self.draft else None

    @cached_property
    def _own(self) -> Surface | None:
        return _surface(self.own_blocks) if self.own_blocks else None

    @cached_property
    def _overhead(self) -> Surface | None:
        return _surface(self.overhead) if self.overhead else None

    def to_data(self) -> dict[str, Any]:
        """Plain data that `from_data` reads."""
        tables = {
            table: [_timing_data(timing, size) for timing in getattr(self, table)] for table, size in SIZES.items()
        }
        return {**tables, "nodes": {str(depth): count for depth, count in self.nodes.items()}}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> CostModel:
        """The model that `to_data` described.

        Raises:
            ValueError: It is none; also KeyError, TypeError and AttributeError.
        """
        tables = {table: tuple(_timing(row, size) for row in data[table]) for table, size in SIZES.items()}
        if not tables["target"]:
            raise ValueError("no timing of the target")
        return cls(**tables, nodes={int(depth): int(count) for depth, count in data["nodes"].items()})


def _surface(timings: Sequence[Timing]) -> Surface:
    return Surface([(timing.size, timing.batch, timing.context, timing.seconds.median) for timing in timings])


def _expected(chance: float, depth: int) -> float:
    return sum(chance**position for position in range(depth + 1))


def _timing_data(timing: Timing, size: str) -> dict[str, Any]:
    spread = {f"{name}_s": getattr(timing.seconds, name) for name in ("median", "p25", "p75")}
    place = {size: timing.size, "batch": timing.batch, "context": timing.context}
    return {**place, **spread, "count": timing.seconds.count, "trusted": timing.trusted}


def _timing(row: Mapping[str, Any], size: str) -> Timing:
    median, p25, p75 = (float(row[f"{name}_s"]) for name in ("median", "p25", "p75"))
    timing = Timing(int(row[size]), int(row["batch"]), int(row["context"]), Spread(median, p25, p75, int(row["count"])))
    sound = timing.size >= 0 and timing.batch >= 1 and timing.context >= 0 and 0 <= median < float("inf")
    sound = sound and (median > 0 or size != "rows")  # a pass takes time; an overhead may be too small to see
    if not sound:
        raise ValueError(f"no timing: {dict(row)}")
    return timing


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """What a profile belongs to. Everything is as JSON gives it back."""

    target: Mapping[str, Any]
    draft: Mapping[str, Any] | None  # the draft section without any k; None for plain decoding
    machine: Mapping[str, Any]  # facts that decide speed

    @classmethod
    def of(cls, recipe: Recipe, info: TargetInfo) -> ProfileKey:
        """The key of a recipe with its target loaded, on this machine as it is set up now."""
        from specflow.handover import asks_for_likeliest

        target = {"name": info.name, "dtype": info.weights, "device": str(info.device), "runtime": info.runtime}
        if info.picks:  # a pass that needs no logits is a cheaper one
            target["head"] = "picked" if asks_for_likeliest(info, recipe.sampling) else "scored"
        draft = None if recipe.draft is None else _without_k(recipe.draft.model_dump(mode="json"))
        return cls(target, draft, _machine(info))

    @property
    def stem(self) -> str:
        """Name of the target and digest of the draft: how the profile's file name begins."""
        name = re.sub(r"[^\w.]+", "-", "-".join(map(str, self.target.values()))).strip("-")
        drafts = "plain" if self.draft is None else f"{self.draft.get('source', 'combined')}.{_digest(self.draft)}"
        return f"{name}-{drafts}"

    @property
    def file_name(self) -> str:
        return f"{self.stem}-{_digest([self.target, self.draft, self.machine])}.json"

    def differences(self, other: ProfileKey) -> list[str]:
        """Facts in which another key differs, each with its value there and here."""
        found = []
        for part in ("target", "draft", "machine"):
            here, there = getattr(self, part) or {}, getattr(other, part) or {}
            for name in dict.fromkeys((*here, *there)):
                if here.get(name) != there.get(name):
                    found.append(f"{part} {name}: {there.get(name)!r} there, {here.get(name)!r} here")
        return found


def _without_k(section: dict[str, Any]) -> dict[str, Any]:
    """A draft section of any length; where it combines sources, each of them."""
    parts = {key: [_without_k(part) for part in value] for key, value in section.items() if _are_sections(value)}
    return {key: parts.get(key, value) for key, value in section.items() if key != "k"}


def _are_sections(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(part, dict) for part in value)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:10]


def _machine(info: TargetInfo) -> dict[str, Any]:
    """Facts that decide speed. Weights do not, so a model is known by its architecture."""
    import torch

    architecture = [info.num_layers, info.hidden_size, info.vocab_size, *asdict(info.shape).values()]
    facts = {
        "cpu_model": cpu_model(),
        "threads": torch.get_num_threads(),
        "torch": package_version("torch"),
        "model": _digest(architecture),
    }
    if info.device.type == "cuda":
        facts |= {"gpu": torch.cuda.get_device_name(info.device), "cuda": torch.version.cuda, "driver": None}
        with suppress(OSError):
            first = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace").splitlines()[0]
            facts["driver"] = first.strip()
    return facts


def profiles_dir() -> Path:
    """Where profiles are kept, beside the models."""
    return cache_dir() / "profiles"


def profile_data(key: ProfileKey, model: CostModel, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """A profile as it is written."""
    doubts = list(model.doubts())
    facts = {"target": key.target, "draft": key.draft, "machine": key.machine}
    return {"format": FORMAT, **facts, "not_trusted": doubts, "seconds": model.to_data(), "provenance": provenance}


def save_profile(path: Path, data: Mapping[str, Any]) -> None:
    """Write a profile, whole or not at all.

    Raises:
        DataError: It cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(str(path), f"cannot be made: {error.strerror or error}", "a writable directory") from error
    write_json_atomic(path, data)


def load_profile(path: Path, key: ProfileKey | None = None) -> CostModel:
    """Read a profile.

    Args:
        path: Its file.
        key: What it must belong to; None takes any.

    Raises:
        DataError: It cannot be read, or was measured for another target or draft or on another machine; the facts
            that differ are named.
    """
    there, model = _read(path)
    if key is not None and (facts := key.differences(there)):
        hint = "measure again here: specflow profile RECIPE"
        raise DataError(str(path), f"measured for something else: {'; '.join(facts)}", "the same facts", hint)
    return model


def find_profile(recipe: Recipe, loaded: LoadedTarget) -> CostModel | None:
    """The kept profile of a recipe on this machine, or None. Says in the log what was refused, and what not to trust.

    The draft's k is not part of the key: one profile serves every length.
    """
    key, directory = ProfileKey.of(recipe, loaded.target.info), profiles_dir()
    path = directory / key.file_name
    if not path.is_file():
        for other in sorted(directory.glob(f"{key.stem}-*.json")):
            with suppress(DataError):
                log.warning("%s is not used: %s", other, "; ".join(key.differences(_read(other)[0])))
        return None
    try:
        model = load_profile(path, key)
    except DataError as error:
        log.warning("%s", error)
        return None
    if doubts := list(model.doubts()):
        log.warning("%s: %d timings spread too wide to be trusted, such as %s", path, len(doubts), doubts[0])
    return model


def _read(path: Path) -> tuple[ProfileKey, CostModel]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']!r}")
        key = ProfileKey(dict(data["target"]), data["draft"], dict(data["machine"]))
        return key, CostModel.from_data(data["seconds"])
    except (OSError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        found = f"cannot be read: {type(error).__name__}: {error}"
        raise DataError(str(path), found, f"a profile of format {FORMAT}", "measure again: specflow profile") from error

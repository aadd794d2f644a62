"""What a run leaves: a checkpoint in the published layout, a recipe that runs it, and how it was made.

model.safetensors, config.json  the drafter, in float16
recipe.yaml                     the recipe with these weights
training.json                   settings, sessions with their provenance, and the last figures
log.jsonl, curve.svg            how the run went
state/                          where it stands; see `specflow.train.checkpoints`
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specflow.draft.shapes import ShapeOptions
from specflow.errors import DataError, TrainingError
from specflow.files import append_jsonl, replacing, write_json_atomic, write_text_atomic
from specflow.plot import draw_lines
from specflow.recipe import dump_recipe, parse_recipe, recipe_data
from specflow.recipe_draft import COMBINED
from specflow.train.options import TrainOptions

if TYPE_CHECKING:
    from specflow.draft.trainable import Trainable
    from specflow.provenance import Provenance
    from specflow.recipe import Recipe

__all__ = ["RunFolder", "draw_curve", "earlier_runs", "method_of_run", "save_drafter", "with_weights"]

FORMAT = 1
_HEADER, _LOG = "training.json", "log.jsonl"
CORPUS, STATE = "corpus", "state"
"""Folders of a run's own: answers drawn for it, and where it stands."""
_OF_RUNNING = ("dtype", "runtime", "device")
"""Options of a whole draft model that its weights do not decide."""


class RunFolder:
    """The directory of a run, new or begun.

    Args:
        path: A run, or absent, or empty but for a corpus.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.state = path, path / STATE
        self._header: dict[str, Any] = {}

    @property
    def settings(self) -> Mapping[str, Any]:
        """What the run began with; empty for a new one."""
        found: Mapping[str, Any] = self._header.get("settings", {})
        return found

    def read(self) -> None:
        """Take in what is there.

        Raises:
            DataError: It is the directory of something else.
        """
        file = self.path / _HEADER
        if not file.exists():
            others = (
                sorted(each.name for each in self.path.iterdir() if each.name != CORPUS) if self.path.is_dir() else []
            )
            if others or (self.path.exists() and not self.path.is_dir()):
                found = f"holds {', '.join(others[:3]) or 'a file'}, and no {_HEADER}: it is no run to go on with"
                raise DataError(str(self.path), found, "a new or empty directory, or a run")
            return
        try:
            header = json.loads(file.read_text(encoding="utf-8"))
            sound = header["format"] == FORMAT and isinstance(header["settings"]["options"], dict)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(str(file), f"cannot be read: {error!r}", "the header of a run") from error
        if not sound:
            raise DataError(str(file), "another kind of file", f"the header of a run, format {FORMAT}")
        # A run begun before an option was known was begun with its default.
        header["settings"]["options"] = {**TrainOptions().model_dump(mode="json"), **header["settings"]["options"]}
        self._header = header

    def open(self, settings: Mapping[str, Any], provenance: Provenance, earlier: Sequence[Any] = ()) -> None:
        """Begin, or go on with what was begun.

        Args:
            settings: All that decides what comes out.
            provenance: Of this session.
            earlier: Runs whose weights it begins with; see `earlier_runs`.

        Raises:
            DataError: It was begun with other settings, which are named.
        """
        settings = json.loads(json.dumps(settings))
        if self._header and (changed := list(_changes(self.settings, settings))):
            found = f"cannot go on: {'; '.join(changed)}"
            raise DataError(str(self.path), found, "the settings that the run began with", "choose another directory")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(str(self.path), f"cannot create: {error.strerror}", "a writable directory") from error
        fresh: dict[str, Any] = {"format": FORMAT, "settings": settings, "earlier": list(earlier)}
        self._header = self._header or {**fresh, "sessions": [], "result": None}
        self._header["sessions"].append(asdict(provenance))
        self._write()

    def note(self, **facts: Any) -> None:
        """Keep facts about the run."""
        self._header |= facts
        self._write()

    def log(self, line: Mapping[str, Any]) -> None:
        """One line of the log."""
        append_jsonl(self.path / _LOG, line)

    def lines(self) -> Iterator[dict[str, Any]]:
        """What was logged."""
        file = self.path / _LOG
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            yield json.loads(line)

    def rewind(self, step: int) -> None:
        """Forget what was logged after a step: it comes again."""
        file, kept = self.path / _LOG, 0
        for line in file.read_bytes().splitlines(keepends=True) if file.exists() else ():
            try:
                if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                    raise ValueError("not of what is kept")
            except (ValueError, KeyError):
                os.truncate(file, kept)
                return
            kept += len(line)

    def _write(self) -> None:
        write_json_atomic(self.path / _HEADER, self._header)


def earlier_runs(checkpoint: Path | None) -> list[dict[str, Any]]:
    """Settings and results of the runs that made some weights, the first one first; [] where nothing tells."""
    file = None if checkpoint is None else checkpoint / _HEADER
    if file is None or not file.is_file():
        return []
    try:
        header = json.loads(file.read_text(encoding="utf-8"))
        told = {name: header["settings"][name] for name in ("options", "objective")}
        return [*header.get("earlier", []), {**told, "result": header["result"]}]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(str(file), f"cannot be read: {error!r}", "the header of a run") from error


def method_of_run(checkpoint: Path) -> str | None:
    """The method, or else the source, that the run which left some weights was of; None where nothing tells."""
    try:
        draft = json.loads((checkpoint / _HEADER).read_text(encoding="utf-8"))["settings"]["draft"]
        return str(draft.get("method") or draft["source"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _changes(before: Any, now: Any, name: str = "") -> Iterator[str]:
    """What differs between two settings, by its dotted name."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        if before != now:
            yield f"{name} was {json.dumps(before)} and is {json.dumps(now)}"
        return
    for key in dict.fromkeys((*before, *now)):
        yield from _changes(before.get(key), now.get(key), f"{name}.{key}" if name else key)


def save_drafter(path: Path, trainable: Trainable) -> None:
    """Write the checkpoint as its source opens it, numbers with a fraction in float16.

    Raises:
        TrainingError: A weight is beyond float16.
        DataError: The disk has no room.
    """
    from safetensors.torch import save

    content = save({name: _stored(name, tensor) for name, tensor in trainable.state().items()}, {"format": "pt"})
    try:
        with replacing(path / "model.safetensors") as stream:
            stream.write(content)
    except OSError as error:
        found = f"cannot write the drafter: {error.strerror or error}"
        raise DataError(str(path), found, "a writable disk with room") from error
    write_json_atomic(path / "config.json", dict(trainable.config()))
    if trainable.accompany is not None:
        trainable.accompany(path)


def _stored(name: str, tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor.clone().contiguous()
    half = tensor.to(torch.float16, copy=True).contiguous()
    if not bool(half.isfinite().all()):
        raise TrainingError(name, f"values up to {float(tensor.abs().max()):.3g}", "values below 65504, for float16")
    return half


def with_weights(recipe: Recipe, place: int, weights: Path) -> Recipe:
    """The recipe with a checkpoint in one part of its draft.

    A source that has no `weights` drafts with a whole model, whose own configuration then says its sizes.
    """
    data = recipe_data(recipe)
    draft = data["draft"]
    combined = next((draft[key] for key in COMBINED if key in draft), None)
    part = draft if combined is None else combined[place]
    config = recipe.draft.parts[place].info.config if recipe.draft is not None else None
    assert config is not None, "a recipe that decodes plainly was trained"
    if "weights" in config.model_fields:
        part["weights"] = str(weights)
    else:
        for name in {*config.model_fields} - {*ShapeOptions.model_fields, *_OF_RUNNING}:
            part.pop(name, None)
        part["model"] = str(weights)
    return parse_recipe(data, "the recipe of the run")


def write_recipe(path: Path, recipe: Recipe) -> None:
    """Write recipe.yaml."""
    write_text_atomic(path / "recipe.yaml", dump_recipe(recipe))


def draw_curve(folder: RunFolder, title: str) -> None:
    """Draw what the log says: acceptance on held-out texts, and the loss."""
    accepted: dict[str, list[tuple[int, float]]] = {}
    lengths: list[tuple[int, float]] = []
    losses: list[tuple[int, float]] = []
    for line in folder.lines():
        if "loss" in line:
            losses.append((line["step"], max(line["loss"], 0.0)))
        if (found := line.get("held_out")) is not None:
            for number, rate in enumerate(found["accept_rate"], 1):
                if rate is not None:
                    accepted.setdefault(f"@{number}", []).append((line["step"], rate))
            if found["length"] is not None:
                lengths.append((line["step"], found["length"]))
    panels = {
        "accept rate at position k, held-out": accepted,
        "expected acceptance length": {"length": lengths} if lengths else {},
        "training loss": {"loss": losses} if losses else {},
    }
    drawn = {name: lines for name, lines in panels.items() if lines}
    if drawn:
        write_text_atomic(folder.path / "curve.svg", draw_lines(drawn, "steps", title))

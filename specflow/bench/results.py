"""The directory of one benchmark run: rows as they come, never overwritten, resumable.

results.jsonl   one row a measurement, or an error, in the order they happened
manifest.json   settings and provenance, of every session that wrote to it
summary.csv     medians, spreads and ratios, by category and overall
acceptance.csv  acceptance by draft position
context.csv     acceptance by context length
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specflow.errors import DataError
from specflow.files import append_jsonl, claim_directory, write_json_atomic, write_text_atomic
from specflow.provenance import Provenance

__all__ = ["RunDirectory", "measurement_key"]

Row = dict[str, Any]
FACTS = ("source_sha256", "versions", "cpu_model", "device", "threads")


def measurement_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a row is a measurement of. A second row of the same key replaces the first."""
    return tuple(row.get(name) for name in ("file", "line", "turn", "method", "repetition"))


class RunDirectory:
    """Holds the rows of a run in memory and on disk.

    Args:
        path: The directory; must be absent or empty unless `resume`.
        settings: Everything that decides what a row measures. A resumed run must have the same.
        provenance: Of this session.
        resume: Continue what is there.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], provenance: Provenance, resume: bool = False) -> None:
        self.path = path
        self.results = path / "results.jsonl"
        self._manifest: Row = {"settings": dict(settings), "sessions": [asdict(provenance)], "state": "running"}
        self._rows: dict[tuple[Any, ...], Row] = {}
        if resume and (path / "manifest.json").exists():
            self._continue(provenance)
        else:
            no_run = "it has no manifest.json, so there is no run to resume"
            claim_directory(path, no_run if resume else "choose another with -o")
        self._write_manifest()

    @property
    def rows(self) -> list[Row]:
        """Latest row of every measurement, oldest first."""
        return list(self._rows.values())

    def measured(self, row: Mapping[str, Any]) -> Row | None:
        """The finished measurement with the key of `row`, if there is one; failures are tried again."""
        found = self._rows.get(measurement_key(row))
        return found if found is not None and "error" not in found else None

    def append(self, row: Row) -> None:
        """Keep a row, on disk before anything else happens. A failure that is there already is not written again."""
        if self._rows.get(measurement_key(row)) == row:
            return
        append_jsonl(self.results, row)
        self._rows[measurement_key(row)] = row

    def write_text(self, name: str, text: str) -> None:
        """Write a derived file, replacing the one of an earlier session."""
        write_text_atomic(self.path / name, text)

    def close(self, state: str) -> None:
        """Write how the run ended: "complete" or "interrupted"."""
        self._manifest["state"] = state
        self._write_manifest()

    def _write_manifest(self) -> None:
        write_json_atomic(self.path / "manifest.json", self._manifest)

    def _continue(self, provenance: Provenance) -> None:
        source = self.path / "manifest.json"
        try:
            before = json.loads(source.read_text(encoding="utf-8"))
            settings, sessions = before["settings"], before["sessions"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(str(source), f"cannot be read: {error}", "the manifest of a run") from error
        wanted = json.loads(json.dumps(self._manifest["settings"]))
        machine = json.loads(json.dumps({name: getattr(provenance, name) for name in FACTS}))
        changed = [name for name in sorted({*settings, *wanted}) if settings.get(name) != wanted.get(name)]
        changed += [name for name in FACTS if sessions[0].get(name) != machine[name]]
        if changed:
            raise DataError(
                str(self.path),
                f"cannot resume: {', '.join(changed)} differ from the run's",
                "the same recipes, data, options, code and machine, or figures of two runs would mix",
                "start a new run in another directory",
            )
        self._manifest["sessions"] = [*sessions, *self._manifest["sessions"]]
        self._read_rows()

    def _read_rows(self) -> None:
        content = self.results.read_bytes() if self.results.exists() else b""
        whole = content.rfind(b"\n") + 1  # what follows the last newline was torn by the interruption
        if whole < len(content):
            os.truncate(self.results, whole)
        for number, line in enumerate(content[:whole].split(b"\n"), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{self.results}:{number}", f"not a results row: {error}", "one JSON object") from error
            self._rows[measurement_key(row)] = row

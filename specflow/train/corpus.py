"""The corpus: answers of one target as token ids, one JSON object a line, only ever appended to.

corpus.jsonl  `{id, temperature, top_p, prompt_ids, response_ids, finish}`, a record as its request finishes
corpus.json   what made them: the target, its chat template, the sampling mix, what was imported, every session

Several drafters are trained on one corpus, so that they differ in nothing else.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from specflow.errors import DataError
from specflow.files import append_jsonl, claim_directory, file_sha256, lock_for_adding, write_json_atomic
from specflow.provenance import Provenance
from specflow.train.prompts import refuse_evaluation_file, refuse_evaluation_id

__all__ = [
    "Corpus",
    "CorpusRecord",
    "CorpusTarget",
    "SamplingMix",
    "check_target",
    "is_held_out",
    "read_corpus",
    "share_of",
]

log = logging.getLogger(__name__)

FORMAT = 1
KEYS = ("id", "temperature", "top_p", "prompt_ids", "response_ids", "finish")
FINISHES = ("stop", "length", "context")
EXPECTED = f"one JSON object a line: {', '.join(KEYS)}"
_RECORDS, _HEADER = "corpus.jsonl", "corpus.json"


@dataclass(frozen=True, slots=True)
class CorpusRecord:
    """One answer of the target, with the prompt it answers and how it was drawn."""

    id: str
    temperature: float  # 0 is greedy
    top_p: float
    prompt_ids: tuple[int, ...]  # chat template and generation prompt included
    response_ids: tuple[int, ...]  # the stop token included, if one ended it
    finish: str  # stop, length or context

    @property
    def tokens(self) -> tuple[int, ...]:
        """The whole text, prompt first."""
        return self.prompt_ids + self.response_ids

    @classmethod
    def read(cls, line: bytes, vocab_size: int) -> CorpusRecord:
        """One line of a corpus.

        Raises:
            ValueError: It is no record; the message says why.
        """
        try:
            value = json.loads(line)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        if not isinstance(value, dict) or set(value) != set(KEYS):
            raise ValueError(f"found no object with just {', '.join(KEYS)}")
        temperature, top_p = (_number(value[name], name) for name in ("temperature", "top_p"))
        prompt, response = (_ids(value[name], name, vocab_size) for name in ("prompt_ids", "response_ids"))
        if not isinstance(value["id"], str) or value["finish"] not in FINISHES:
            raise ValueError(f"id: expected text; finish: expected {', '.join(FINISHES)}")
        return cls(value["id"], temperature, top_p, prompt, response, value["finish"])


@dataclass(frozen=True, slots=True)
class CorpusTarget:
    """Whose answers a corpus holds. Another runtime computes the same law; another type of weights does not."""

    model: str
    identity: str  # hash of what decides its numbers
    weights: str  # type of the weights
    vocab_size: int
    template: str  # how its chat template shows a question; some show the day as well, so this is a note


@dataclass(frozen=True, slots=True)
class SamplingMix:
    """How answers are drawn: some greedily, the others sampled. A record's id decides which, and seeds it."""

    greedy_share: float = 0.33
    temperature: float = 0.7
    top_p: float = 0.9
    max_new_tokens: int = 256
    seed: int = 0


class Corpus:
    """A directory of records that grows; one process at a time adds to it.

    Opening one that is there reads every record. What follows the last good one before a torn or damaged line is cut
    off with a warning, and can be generated again, to the same tokens.

    Args:
        path: The directory: a corpus, or absent or empty.
        target: Whose answers it holds.
        mix: How they are drawn.
        provenance: Of this session.

    Raises:
        DataError: It holds another target's answers or another mix, is being written to, or cannot be written.
    """

    def __init__(self, path: Path, target: CorpusTarget, mix: SamplingMix, provenance: Provenance) -> None:
        self.path = path
        self.num_tokens = 0  # of all responses
        self.ids: set[str] = set()
        self._vocab_size = target.vocab_size
        if (path / _HEADER).exists():
            self._header = _read_header(path)
            self._check(target, mix)
        else:
            claim_directory(path, f"it has no {_HEADER}, so there is no corpus to go on with")
            self._header = {
                "format": FORMAT,
                "target": asdict(target),
                "sampling": asdict(mix),
                "imports": [],
                "sessions": [],
            }
        self._lock = lock_for_adding(path / _RECORDS, path / _RECORDS)
        self._recover()
        self._header["sessions"].append(asdict(provenance))
        self._write_header()

    def append(self, record: CorpusRecord) -> None:
        """Keep a record, on disk before anything else happens; one whose id is there already is not kept twice."""
        if record.id not in self.ids:
            append_jsonl(self.path / _RECORDS, asdict(record))
            self._count(record)

    def include(self, file: Path) -> int:
        """Import the records of a `.jsonl` or `.jsonl.gz` file that are not there yet.

        They keep their own sampling. That they are this target's answers is the word of who includes them.

        Returns:
            How many records were new.

        Raises:
            DataError: The file cannot be read, a line is no record, or it belongs to an evaluation set.
        """
        refuse_evaluation_file(file)
        found = list(_records_of(file, self._vocab_size))
        for number, record in enumerate(found, 1):
            refuse_evaluation_id(record.id, f"{file}:{number}")
        known = {"file": file.name, "sha256": file_sha256(file), "records": len(found)}
        if known not in self._header["imports"]:
            self._header["imports"].append(known)
            self._write_header()
        before = len(self.ids)
        for record in found:
            self.append(record)
        return len(self.ids) - before

    def records(self) -> Iterator[CorpusRecord]:
        """Every record, oldest first."""
        return read_corpus(self.path)

    def close(self) -> None:
        """Let another process add to it."""
        os.close(self._lock)

    def _count(self, record: CorpusRecord) -> None:
        self.ids.add(record.id)
        self.num_tokens += len(record.response_ids)

    def _write_header(self) -> None:
        write_json_atomic(self.path / _HEADER, self._header)

    def _check(self, target: CorpusTarget, mix: SamplingMix) -> None:
        """Answers of two targets, or drawn in two ways, never share a corpus."""
        same = {"identity": target.identity, "weights": target.weights, "vocab_size": target.vocab_size}
        changed = [
            f"{part}.{name} was {self._header[part].get(name)!r} and is {value!r}"
            for part, values in (("target", same), ("sampling", asdict(mix)))
            for name, value in values.items()
            if self._header[part].get(name) != value
        ]
        if changed:
            expected = "the target and sampling that the corpus was begun with"
            raise DataError(str(self.path), f"cannot go on: {'; '.join(changed)}", expected, "choose another directory")
        if self._header["target"].get("template") != target.template:
            log.warning(
                "%s: the chat template shows a question in another way than when the corpus was begun", self.path
            )

    def _recover(self) -> None:
        """Count the good records, and cut the file back to them."""
        file, good = self.path / _RECORDS, 0
        with file.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                try:
                    self._count(self._next_record(line))
                except ValueError as error:
                    lost = file.stat().st_size - good
                    log.warning("%s:%d: %s; the corpus goes on from here, %d bytes dropped", file, number, error, lost)
                    break
                good += len(line)
        if good < file.stat().st_size:
            os.truncate(file, good)

    def _next_record(self, line: bytes) -> CorpusRecord:
        """A line as the next record of this corpus; ValueError where it cannot be."""
        if not line.endswith(b"\n"):
            raise ValueError("a torn line")
        record = CorpusRecord.read(line, self._vocab_size)
        if record.id in self.ids:
            raise ValueError(f"a second record {record.id!r}")
        return record


def check_target(path: Path, model: str, identity: str) -> None:
    """Answers of another model would teach the drafter what its target does not say.

    Args:
        path: Directory of a corpus.
        model: The target's name.
        identity: What tells it from all others.

    Raises:
        DataError: It is another target's, or no corpus.
    """
    try:
        whose = _read_header(path)["target"]
    except DataError as error:
        hint = "specflow corpus makes one"
        raise DataError(str(path), f"no corpus: {error.found}", f"a directory with {_HEADER}", hint) from error
    if whose.get("identity") != identity:
        found = f"answers of {whose.get('model')}, {str(whose.get('identity'))[:12]}"
        raise DataError(str(path), found, f"those of {model}, {identity[:12]}")


def read_corpus(path: Path, held_out: bool | None = None, fraction: float = 0.0) -> Iterator[CorpusRecord]:
    """Records of a corpus, for training; it may grow meanwhile.

    Args:
        path: Its directory.
        held_out: Only those that are held out, or only the others; None gives all.
        fraction: How much is held out; see `is_held_out`.

    Raises:
        DataError: There is no corpus, or a line is no record.
    """
    vocab_size = _read_header(path)["target"]["vocab_size"]
    for record in _records_of(path / _RECORDS, vocab_size, growing=True):
        if held_out is None or is_held_out(record.id, fraction) == held_out:
            yield record


def is_held_out(name: str, fraction: float) -> bool:
    """Whether a record is kept for measuring: by its id alone, so no other record changes that.

    Later turns of a conversation (`id#2`) go with the first.
    """
    return share_of(name.partition("#")[0], "held out") < fraction


def share_of(name: str, purpose: str) -> float:
    """A number in [0, 1) that a name always has, another one for every purpose."""
    digest = blake2b(f"{purpose}:{name}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _number(value: Any, where: str) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"{where}: expected a number")
    return float(value)


def _ids(value: Any, where: str, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or any(type(token) is not int for token in value):
        raise ValueError(f"{where}: expected token ids")
    if min(value) < 0 or max(value) >= vocab_size:
        raise ValueError(f"{where}: a token id is outside the vocabulary of {vocab_size}")
    return tuple(value)


def _records_of(file: Path, vocab_size: int, growing: bool = False) -> Iterator[CorpusRecord]:
    """Records of a file, line by line; the last line of one that grows may be half written, and is left out then."""
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if growing and not line.endswith(b"\n"):
                    return
                try:
                    yield CorpusRecord.read(line, vocab_size)
                except ValueError as error:
                    hint = "specflow corpus cuts it back to its last good record" if growing else ""
                    raise DataError(f"{file}:{number}", f"not a record: {error}", EXPECTED, hint) from error
    except (OSError, EOFError) as error:
        raise DataError(str(file), f"cannot be read: {error}", EXPECTED) from error


def _read_header(path: Path) -> dict[str, Any]:
    file = path / _HEADER
    kinds = {"format": int, "target": dict, "sampling": dict, "imports": list, "sessions": list}
    try:
        header: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        sound = all(isinstance(header[name], kind) for name, kind in kinds.items())
        sound = sound and isinstance(header["target"]["vocab_size"], int) and header["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(str(file), f"cannot be read: {error!r}", "the header of a corpus") from error
    if not sound:
        raise DataError(str(file), "parts are missing or of another kind", f"the header of a corpus, format {FORMAT}")
    return header

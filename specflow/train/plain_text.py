"""Plain text to train on beside the answers: read, encoded without a chat template, and cut into pieces."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specflow.errors import DataError, RequestError
from specflow.train.prompts import refuse_evaluation_file, refuse_evaluation_id
from specflow.train.sequences import Text, digest_of

if TYPE_CHECKING:
    from specflow.text import TextCodec

__all__ = ["Pieces", "check_text_files"]

_SUFFIXES = (".txt", ".txt.gz", ".jsonl")
_EXPECTED = f"UTF-8 text in {', '.join(_SUFFIXES)}; of .jsonl one object a line with `text`"


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of text: the first token of each is read, and all others are trained on.

    None are held out: held-out figures say how the drafter does on what its target says, which plain text is not.
    """

    texts: tuple[Text, ...] = ()
    num_documents: int = 0

    @classmethod
    def read(cls, files: Sequence[Path], codec: TextCodec, max_length: int) -> Pieces:
        """Pieces of all documents; one that comes twice is taken once. A .txt file is one document, a .jsonl row too.

        Args:
            files: .txt, .txt.gz or .jsonl.
            codec: Of the target.
            max_length: Longest piece in tokens; pieces of a document are of nearly the same length.

        Raises:
            DataError: A file cannot be read, holds no text or is an evaluation set's.
        """
        check_text_files(files)
        documents: dict[str, list[Text]] = {}
        for file in files:
            for where, document in _documents(file):
                name = f"text/{blake2b(document.encode('utf-8', 'surrogatepass'), digest_size=8).hexdigest()}"
                if name not in documents:
                    documents[name] = list(_cut(name, _encoded(codec, document, where), max_length))
        pieces = tuple(chain.from_iterable(documents.values()))
        if files and not pieces:
            raise DataError("--text", "no document of two tokens", "text to train on")
        return cls(pieces, len(documents))

    def facts(self) -> dict[str, Any]:
        """How much there is, and what tells it from other text."""
        return {
            "documents": self.num_documents,
            "texts": len(self.texts),
            "tokens": sum(map(len, self.texts)),
            "digest": digest_of(self.texts),
        }


def check_text_files(files: Sequence[Path]) -> None:
    """Refuse what is no text to train on before a model is loaded.

    Raises:
        DataError: A file is of another kind or an evaluation set's, or is not there.
    """
    for file in files:
        if not file.name.endswith(_SUFFIXES):
            raise DataError(str(file), "a file of another kind", f"a name that ends in {', '.join(_SUFFIXES)}")
        refuse_evaluation_file(file)
        if not file.is_file():
            raise DataError(str(file), "cannot be read: no such file", _EXPECTED)


def _documents(file: Path) -> Iterator[tuple[str, str]]:
    """Where each document stands, and its text."""
    try:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte {error.start} is not UTF-8"
        raise DataError(str(file), found, _EXPECTED, f"iconv -t utf-8 {file.name}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(str(file), f"cannot be read: {error}", _EXPECTED) from error
    if not text.strip():
        raise DataError(str(file), "an empty file", _EXPECTED, f"leave --text {file} out")
    if file.suffix != ".jsonl":
        yield str(file), text
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"{file}:{number}", _row(line, f"{file}:{number}")


def _row(line: str, where: str) -> str:
    """The text of a row."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(where, f"not JSON: {error}", _EXPECTED) from error
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise DataError(where, "a row without `text`", _EXPECTED)
    if isinstance(row.get("id"), str):
        refuse_evaluation_id(row["id"], where)
    return text


def _encoded(codec: TextCodec, document: str, where: str) -> list[int]:
    try:
        return codec.encode(document)
    except RequestError as error:
        raise DataError(where, error.found, error.expected) from error


def _cut(name: str, ids: Sequence[int], max_length: int) -> Iterator[Text]:
    """Nearly even pieces, so that none at the end is too short to learn from; one of one token is left out."""
    count = -(-len(ids) // max_length)
    for number, piece in enumerate(torch.tensor(ids, dtype=torch.int64).tensor_split(count)):
        if len(piece) > 1:
            yield Text(f"{name}/{number}", piece.clone(), 1)

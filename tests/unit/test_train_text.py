"""Plain text beside the answers: cut without loss, trained on, and part of what a run is."""

from __future__ import annotations

import gzip
import json
from itertools import chain
from pathlib import Path

import pytest
from toy_training import ChattyText, toy_recipe, toy_records, toy_run, toy_target, train, write_corpus

from specflow.build import LoadedTarget
from specflow.errors import DataError, RequestError
from specflow.train.plain_text import Pieces

MEDUSA = toy_recipe(method="medusa", k=2)
IDS = [5 + number * 7 % 50 for number in range(103)]


@pytest.fixture(scope="module")
def loaded() -> LoadedTarget:
    return toy_target()


@pytest.fixture(scope="module")
def corpus(loaded: LoadedTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("toy") / "corpus", loaded, toy_records(loaded, 24))


def text_of(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def read(*files: Path, max_length: int = 10) -> Pieces:
    return Pieces.read(files, ChattyText(), max_length)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl"])
@pytest.mark.parametrize("max_length", [3, 10, 103, 500])
def test_pieces_are_the_text(name: str, max_length: int, tmp_path: Path) -> None:
    content = (json.dumps({"text": text_of(IDS)}) if name.endswith("l") else text_of(IDS)).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    texts = read(tmp_path / name, max_length=max_length).texts
    assert list(chain.from_iterable(text.tokens.tolist() for text in texts)) == IDS
    assert all(2 <= len(text) <= max_length and text.num_prompt == 1 for text in texts)
    assert len({text.id for text in texts}) == len(texts)


def test_a_document_is_taken_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(text_of(IDS))
    (tmp_path / "b.txt").write_text(text_of(IDS))
    once, twice = read(tmp_path / "a.txt"), read(tmp_path / "a.txt", tmp_path / "b.txt")
    assert twice.num_documents == 1
    assert [text.id for text in twice.texts] == [text.id for text in once.texts]
    (tmp_path / "c.txt").write_text("5")
    with pytest.raises(DataError, match="no document of two tokens"):
        read(tmp_path / "c.txt")


def test_text_that_cannot_be_encoded_is_named_by_its_row(tmp_path: Path) -> None:
    class Strict(ChattyText):
        def encode(self, prompt: str) -> list[int]:
            if not prompt.isascii():
                raise RequestError("prompt", "a lone surrogate", "valid text")
            return [5, 6]

    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "plain"}\n{"text": "half \\ud800"}')
    with pytest.raises(DataError, match="surrogate") as found:
        Pieces.read([file], Strict(), 10)  # type: ignore[arg-type]
    assert found.value.where.endswith("a.jsonl:2")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.md", b"5 6 7", "another kind"),
        ("a.txt", b"", "empty file"),
        ("a.txt", b"5 6 \xff", "byte 4 is not UTF-8"),
        ("a.txt.gz", b"5 6 7", "cannot be read"),
        ("a.txt.gz", gzip.compress(b"5 6 7" * 40)[:-9], "cannot be read"),
        ("a.jsonl", b'{"text": "5 6 7"}\n{"words": 1}', r"a\.jsonl:2: a row without"),
        ("a.jsonl", b"{", r"a\.jsonl:1: not JSON"),
        ("a.jsonl", b'{"id": "gsm8k/test-0", "text": "5 6 7"}', "evaluation set"),
        ("gsm8k.txt", b"5 6 7", "evaluation set"),
    ],
)
def test_what_is_no_text_to_train_on_is_refused(name: str, content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=reason) as found:
        read(tmp_path / name)
    assert found.value.expected
    assert name in found.value.where


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read(tmp_path / "a.txt")


@pytest.mark.parametrize("features", ["online", "stored"])
def test_a_run_sees_its_text_and_goes_on_with_the_same_alone(
    features: str, corpus: Path, loaded: LoadedTarget, tmp_path: Path
) -> None:
    one, other = tmp_path / "one.txt", tmp_path / "other.txt"
    one.write_text(text_of(IDS))
    other.write_text(text_of(IDS[:-1]))
    plan = {"features": tmp_path / "features"} if features == "stored" else {}
    options: dict[str, object] = {"epochs": 1.0, "held_out": 0.2}
    run = train(toy_run(corpus, tmp_path / "run", MEDUSA, loaded, options, text=(one,), **plan))
    header = json.loads((tmp_path / "run" / "training.json").read_text())
    tokens = sum(map(len, run.pieces.texts))
    assert header["result"]["positions"] == sum(map(len, run.texts.training)) + tokens
    told = header["settings"]["corpus"]["text"]
    assert (told["documents"], told["texts"], told["tokens"]) == (1, len(run.pieces.texts), tokens)
    assert toy_run(corpus, tmp_path / "run", MEDUSA, loaded, options, text=(one,), **plan).done
    with pytest.raises(DataError, match=r"corpus\.text\.digest was"):
        toy_run(corpus, tmp_path / "run", MEDUSA, loaded, options, text=(other,))
    with pytest.raises(DataError, match=r"corpus\.text was"):
        toy_run(corpus, tmp_path / "run", MEDUSA, loaded, options)

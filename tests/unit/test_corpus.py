"""The corpus of a target's answers: nothing is lost, nothing is drawn twice, nothing of another target gets in."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tiny import NumberText, tiny_target
from typer.testing import CliRunner

from specflow import build
from specflow.bench.data import PromptRow
from specflow.build import LoadedTarget, build_engine
from specflow.cli.app import app
from specflow.errors import DataError, RecipeError, RequestError
from specflow.provenance import Provenance
from specflow.recipe import load_recipe
from specflow.train.answers import Answering, sampling_of, target_of
from specflow.train.corpus import Corpus, CorpusRecord, SamplingMix, is_held_out, read_corpus

MIX = SamplingMix(greedy_share=0.4, temperature=1.5, top_p=0.95, max_new_tokens=12)
HERE = Provenance.collect("cpu")


class Chat(NumberText):
    """One token a character; every turn is closed by token 1."""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        if any("#" in message["content"] for message in messages):
            raise RequestError("messages", "a mark that the template refuses")
        return [token for m in messages for token in (*(3 + ord(c) % 50 for c in m["content"]), 1)]

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return f"<{messages[0]['content']}>"


@cache
def loaded() -> LoadedTarget:
    return LoadedTarget(tiny_target(context=160), Chat())  # type: ignore[arg-type]


def prompts(count: int) -> list[PromptRow]:
    return [
        PromptRow("f", n + 1, f"train/{n}", "chat", (), ("abcdefgh"[: 1 + n % 8] * (1 + n % 3),)) for n in range(count)
    ]


def record(name: str, *response: int, prompt: Sequence[int] = (1, 5)) -> CorpusRecord:
    return CorpusRecord(name, 0.0, 1.0, tuple(prompt), response or (7, 2), "stop")


def opened(path: Path, mix: SamplingMix = MIX, **target: Any) -> Corpus:
    return Corpus(path, replace(target_of(loaded()), **target), mix, HERE)


def answering(corpus: Corpus, batch: int = 3, mix: SamplingMix = MIX) -> Answering:
    return Answering(build_engine(load_recipe("vanilla", [f"runtime.batch={batch}"]), loaded()), corpus, mix)


def draw(
    path: Path, rows: Sequence[PromptRow], tokens: int | None = None, most: int | None = None
) -> list[CorpusRecord]:
    """One session; `most` kills it after so many records."""
    corpus, made = opened(path), []
    for each in answering(corpus).run(rows, tokens):
        made.append(each)
        if len(made) == most:
            break
    corpus.close()
    return made


def lines(path: Path) -> list[bytes]:
    return (path / "corpus.jsonl").read_bytes().splitlines(keepends=True)


def test_answers_are_what_the_target_says_and_are_kept_as_they_finish(tmp_path: Path) -> None:
    rows = prompts(20)
    corpus = opened(tmp_path / "c")
    for number, each in enumerate(answering(corpus).run(rows), 1):
        assert len(lines(tmp_path / "c")) == number
        assert json.loads(lines(tmp_path / "c")[-1]) == json.loads(json.dumps(asdict(each)))
    found = {each.id: each for each in read_corpus(tmp_path / "c")}
    assert set(found) == {row.id for row in rows} == corpus.ids
    assert corpus.num_tokens == sum(len(each.response_ids) for each in found.values())
    engine = build_engine(load_recipe("vanilla"), loaded())
    for row in rows:
        prompt = Chat().encode_chat(row.messages(0, ()))
        (made,) = engine.generate([prompt], sampling_of(row.id, MIX))
        assert (found[row.id].prompt_ids, found[row.id].response_ids) == (tuple(prompt), made.tokens)
        assert found[row.id].finish == made.finish
        assert found[row.id].tokens == (*prompt, *made.tokens)


def test_the_id_of_a_row_decides_how_it_is_drawn() -> None:
    drawn = [sampling_of(f"train/{n}", MIX) for n in range(1000)]
    greedy = [each for each in drawn if each.temperature == 0.0]
    assert 340 < len(greedy) < 460
    assert {(each.temperature, each.top_p) for each in drawn} == {(0.0, 1.0), (1.5, 0.95)}
    assert len({each.seed for each in drawn}) == 1000
    assert drawn[5] == sampling_of("train/5", MIX)
    assert sampling_of("train/5", replace(MIX, seed=1)).seed != drawn[5].seed
    assert all(sampling_of(f"{n}", replace(MIX, greedy_share=1.0)).temperature == 0 for n in range(50))
    assert all(sampling_of(f"{n}", replace(MIX, greedy_share=0.0)).temperature == 1.5 for n in range(50))


def test_a_run_that_is_killed_goes_on_to_the_same_records(tmp_path: Path) -> None:
    rows = prompts(30)
    whole = {each.id: each for each in draw(tmp_path / "whole", rows)}
    before = draw(tmp_path / "c", rows, most=7)
    with (tmp_path / "c" / "corpus.jsonl").open("ab") as stream:
        stream.write(b'{"id": "train/29", "temp')
    after = draw(tmp_path / "c", rows)
    assert len(before) == 7
    assert len(after) == 23
    assert {each.id: each for each in read_corpus(tmp_path / "c")} == whole
    assert not draw(tmp_path / "c", rows)
    assert len(json.loads((tmp_path / "c" / "corpus.json").read_text())["sessions"]) == 3


def test_it_stops_at_the_tokens_asked_for(tmp_path: Path) -> None:
    made = draw(tmp_path / "c", prompts(30), tokens=50)
    assert 50 <= sum(len(each.response_ids) for each in made) < 50 + MIX.max_new_tokens
    assert sum(len(each.response_ids) for each in made[:-1]) < 50


def test_later_turns_follow_the_targets_own_answers(tmp_path: Path) -> None:
    rows = [PromptRow("f", 1, "train/a", "x", (), ("ab", "cd", "e")), *prompts(2)]
    draw(tmp_path / "c", rows, most=3)
    draw(tmp_path / "c", rows)
    found = {each.id: each for each in read_corpus(tmp_path / "c")}
    assert set(found) == {"train/a", "train/a#2", "train/a#3", "train/0", "train/1"}
    said = [Chat().decode(found[name].response_ids) for name in ("train/a", "train/a#2")]
    assert list(found["train/a#3"].prompt_ids) == Chat().encode_chat(rows[0].messages(2, said))


def test_prompts_that_cannot_be_asked_are_named_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        PromptRow("f", 8, "train/long", "x", (), ("a" * 170,)),
        PromptRow("f", 9, "t", "x", (), ("#",)),
        *prompts(2),
    ]
    with caplog.at_level(logging.WARNING):
        assert {each.id for each in draw(tmp_path / "c", rows)} == {"train/0", "train/1"}
    assert "f:8: 171 tokens do not fit the context" in caplog.text
    assert "f:9: a mark that the template refuses" in caplog.text


Damage = Callable[[list[bytes]], list[bytes]]


@pytest.mark.parametrize(
    ("damage", "kept", "reason"),
    [
        (lambda rows: [*rows[:-1], rows[-1][:-1]], 5, "6: a torn line"),
        (lambda rows: [*rows[:-1], rows[-1][:20]], 5, "6: a torn line"),
        (lambda rows: [*rows[:2], b"\x00" * 30 + b"\n", *rows[3:]], 2, "3: "),
        (
            lambda rows: [*rows[:2], rows[2].replace(b"[1, 5]", b"[1, 61]"), *rows[3:]],
            2,
            "outside the vocabulary of 61",
        ),
        (lambda rows: [*rows[:2], rows[2].replace(b"[1, 5]", b"[1, 5.5]"), *rows[3:]], 2, "prompt_ids: expected token"),
        (lambda rows: [*rows[:2], rows[2].replace(b"[7, 2]", b"[]"), *rows[3:]], 2, "response_ids: expected token"),
        (lambda rows: [*rows[:2], rows[2].replace(b"0.0", b"null"), *rows[3:]], 2, "temperature: expected a number"),
        (lambda rows: [*rows[:2], rows[2].replace(b"stop", b"halt"), *rows[3:]], 2, "finish: expected stop"),
        (lambda rows: [*rows[:2], rows[2].replace(b"top_p", b"top_k"), *rows[3:]], 2, "no object with just id"),
        (lambda rows: [*rows[:2], b"[" * 100_000 + b"\n", *rows[3:]], 2, "nested too deeply"),
        (lambda rows: [*rows[:2], b"\n", *rows[3:]], 2, "3: "),
        (lambda rows: [*rows[:3], rows[1], *rows[4:]], 3, "a second record 'r1'"),
    ],
)
def test_a_damaged_file_goes_on_from_its_last_good_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Damage, kept: int, reason: str
) -> None:
    corpus = opened(tmp_path / "c")
    for n in range(6):
        corpus.append(record(f"r{n}"))
    corpus.close()
    good = lines(tmp_path / "c")
    (tmp_path / "c" / "corpus.jsonl").write_bytes(b"".join(damage(list(good))))
    with caplog.at_level(logging.WARNING):
        corpus = opened(tmp_path / "c")
    assert lines(tmp_path / "c") == good[:kept]
    assert corpus.ids == {f"r{n}" for n in range(kept)}
    assert corpus.num_tokens == 2 * kept
    (said,) = [each.getMessage() for each in caplog.records]
    assert reason in said
    assert "bytes dropped" in said
    corpus.append(record("new"))
    assert [each.id for each in corpus.records()] == [*(f"r{n}" for n in range(kept)), "new"]


def test_readers_leave_out_a_line_that_is_being_written_and_refuse_a_damaged_one(tmp_path: Path) -> None:
    corpus = opened(tmp_path / "c")
    corpus.append(record("a"))
    file = tmp_path / "c" / "corpus.jsonl"
    with file.open("ab") as stream:
        stream.write(b'{"id": ')
    assert [each.id for each in read_corpus(tmp_path / "c")] == ["a"]
    with file.open("ab") as stream:
        stream.write(b"\n")
    with pytest.raises(DataError, match=r"corpus\.jsonl:2: not a record") as caught:
        list(read_corpus(tmp_path / "c"))
    assert "specflow corpus" in caught.value.hint


def test_records_are_imported_once_and_keep_their_sampling(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl.gz"
    rows = [record("train/0", 4, 2), replace(record("train/x"), temperature=0.3), record("train/x", 9)]
    file.write_bytes(gzip.compress("\n".join(json.dumps(asdict(row)) for row in rows).encode()))
    corpus = opened(tmp_path / "c")
    assert (corpus.include(file), corpus.include(file)) == (2, 0)
    assert list(corpus.records()) == rows[:2]
    made = [each.id for each in answering(corpus).run(prompts(3))]
    assert sorted(made) == ["train/1", "train/2"]
    (known,) = json.loads((tmp_path / "c" / "corpus.json").read_text())["imports"]
    assert (known["file"], known["records"]) == ("answers.jsonl.gz", 3)


def test_imports_are_checked_before_any_is_kept(tmp_path: Path) -> None:
    corpus = opened(tmp_path / "c")
    (tmp_path / "gsm8k").mkdir()
    for name, text, reason in (
        ("gsm8k/dev.jsonl", json.dumps(asdict(record("x"))), "evaluation set"),
        (
            "a.jsonl",
            f"{json.dumps(asdict(record('x')))}\n{json.dumps(asdict(record('mbpp/12')))}",
            r"a\.jsonl:2: .*mbpp",
        ),
        ("b.jsonl", f"{json.dumps(asdict(record('x')))}\n{{}}", r"b\.jsonl:2: not a record"),
        ("c.jsonl.gz", "not packed", "cannot be read"),
    ):
        (tmp_path / name).write_text(text, encoding="utf-8")
        with pytest.raises(DataError, match=reason):
            corpus.include(tmp_path / name)
    with pytest.raises(DataError, match="cannot be read"):
        corpus.include(tmp_path / "absent.jsonl")
    assert not corpus.ids
    assert not json.loads((tmp_path / "c" / "corpus.json").read_text())["imports"]


@pytest.mark.parametrize(
    ("target", "mix", "reason"),
    [
        ({"identity": "other"}, MIX, "target.identity was .* and is 'other'"),
        ({"weights": "int8"}, MIX, "target.weights was 'float64' and is 'int8'"),
        ({}, replace(MIX, greedy_share=0.5), "sampling.greedy_share was 0.4 and is 0.5"),
        ({}, replace(MIX, temperature=1.0), "sampling.temperature was 1.5 and is 1.0"),
        ({}, replace(MIX, max_new_tokens=13), "sampling.max_new_tokens"),
        ({}, replace(MIX, seed=1), "sampling.seed"),
    ],
)
def test_another_target_or_mix_is_refused(
    tmp_path: Path, target: dict[str, Any], mix: SamplingMix, reason: str
) -> None:
    opened(tmp_path / "c").close()
    before = (tmp_path / "c" / "corpus.json").read_bytes()
    with pytest.raises(DataError, match=reason):
        opened(tmp_path / "c", mix, **target)
    assert (tmp_path / "c" / "corpus.json").read_bytes() == before


def test_another_name_or_template_is_the_same_target(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened(tmp_path / "c").close()
    opened(tmp_path / "c", model="here/tiny", template="today: <QUESTION>").close()
    assert "the chat template shows a question in another way" in caplog.text


def test_one_process_at_a_time_adds_to_a_corpus(tmp_path: Path) -> None:
    corpus = opened(tmp_path / "c")
    with pytest.raises(DataError, match="another process is adding to it"):
        opened(tmp_path / "c")
    corpus.close()
    opened(tmp_path / "c").close()


def test_directories_that_are_no_corpus_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(DataError, match="holds files already"):
        opened(tmp_path)
    with pytest.raises(DataError, match="cannot be read"):
        list(read_corpus(tmp_path))
    (tmp_path / "corpus.json").write_text('{"format": 1, "target": {"vocab_size": "many"}}', encoding="utf-8")
    with pytest.raises(DataError, match="the header of a corpus"):
        opened(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.json", "notes.txt"]


def test_what_is_held_out_depends_on_the_id_alone(tmp_path: Path) -> None:
    corpus = opened(tmp_path / "c")
    for n in range(400):
        corpus.append(record(f"train/{n // 2}" + "#2" * (n % 2)))
    held = [each.id for each in read_corpus(tmp_path / "c", held_out=True, fraction=0.1)]
    rest = [each.id for each in read_corpus(tmp_path / "c", held_out=False, fraction=0.1)]
    assert 20 < len(held) < 60
    assert sorted([*held, *rest]) == sorted(corpus.ids)
    assert {name.partition("#")[0] for name in held}.isdisjoint(name.partition("#")[0] for name in rest)
    assert all(is_held_out(name, 0.2) for name in held)
    assert [is_held_out(f"train/{n}", 0.5) for n in range(8)] == FIXED
    assert not any(is_held_out(f"{n}", 0.0) for n in range(100))
    assert all(is_held_out(f"{n}", 1.0) for n in range(100))


FIXED = [False, True, True, True, False, False, False, False]
"""Which of eight ids are held out at one half: a corpus keeps its split from version to version."""


class TestTheVerb:
    @pytest.fixture(autouse=True)
    def tiny(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(build, "load_target", lambda section: loaded())
        rows = [{"id": f"train/{n}", "domain": f"d{n % 4}", "prompt": "abcdef"[: 1 + n % 6]} for n in range(12)]
        text = "".join(json.dumps(row) + "\n" for row in (*rows, {"prompt": 5}))
        (tmp_path / "prompts.jsonl").write_text(text, encoding="utf-8")

    def call(self, *words: str) -> Any:
        said = ("corpus", "--target", "tiny", "--data", "prompts.jsonl", "-o", "c", "--max-new-tokens", "8", *words)
        result = CliRunner().invoke(app, said)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    def test_it_draws_says_how_far_it_is_and_goes_on(self) -> None:
        Path("more.jsonl").write_text(json.dumps(asdict(record("train/0", 8, 9, 2))) + "\n", encoding="utf-8")
        first = self.call("--include", "more.jsonl", "--tokens", "20", "--batch", "2")
        assert first.exit_code == 0
        assert "prompts.jsonl:13: prompt: found int" in first.stderr
        assert "more.jsonl: 1 new records" in first.stderr
        assert "tokens/s" in first.stderr
        begun = list(read_corpus(Path("c")))
        assert 1 < len(begun) < 12
        assert first.stdout == f"{len(begun)} records, {sum(len(r.response_ids) for r in begun)} response tokens in c\n"
        second = self.call("--batch", "3")
        done = list(read_corpus(Path("c")))
        assert done[: len(begun)] == begun
        assert len(done) == 12
        assert second.stdout.startswith("12 records, ")
        header = json.loads(Path("c/corpus.json").read_text(encoding="utf-8"))
        assert header["target"]["template"] == "<QUESTION>"
        assert header["sampling"] == asdict(SamplingMix(max_new_tokens=8))
        assert "torch" in header["sessions"][0]["versions"]
        assert "prompts.jsonl" in header["sessions"][1]["files"]

    def test_an_interruption_keeps_what_there_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run = Answering.run

        def interrupted(self: Answering, *words: Any) -> Iterator[CorpusRecord]:
            for number, each in enumerate(run(self, *words)):
                if number == 3:
                    raise KeyboardInterrupt
                yield each

        monkeypatch.setattr(Answering, "run", interrupted)
        result = self.call("--batch", "2")
        assert result.exit_code == 130
        assert "call it again" in result.stderr
        assert len(list(read_corpus(Path("c")))) == 4

    def test_bad_options_are_refused_before_anything_is_written(self) -> None:
        with pytest.raises(RecipeError, match="top_p"):
            self.call("--top-p", "0")
        with pytest.raises(RecipeError, match="law of the answers"):
            self.call("--set", "draft.method=ngram", "--set", "verify={rule: typical, lossless: false}")
        with pytest.raises(DataError, match="evaluation set"):
            self.call("--include", "gsm8k/dev.jsonl")
        assert not Path("c").exists()

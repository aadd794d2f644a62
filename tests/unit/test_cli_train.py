"""`specflow train` and `specflow features` as a user calls them."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
from toy_training import toy_records, toy_target, write_corpus
from typer.testing import CliRunner

from specflow.build import LoadedTarget
from specflow.cli.app import app
from specflow.cli.convert import LayoutChoice
from specflow.cli.train import _asked
from specflow.errors import DataError, RecipeError
from specflow.train.options import TrainOptions

SMALL = [
    "--batch-tokens",
    "128",
    "--max-length",
    "64",
    "--steps",
    "3",
    "--set",
    "draft.k=2",
    "--set",
    "draft.mlp_size=16",
]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> LoadedTarget:
    made = toy_target()
    monkeypatch.setattr("specflow.build.load_target", lambda section: made)
    return made


@pytest.fixture
def corpus(loaded: LoadedTarget, tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus", loaded, toy_records(loaded, 24))


def call(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, list(words))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def test_a_run_from_the_command_line(corpus: Path, tmp_path: Path) -> None:
    words = ["train", "eagle3", "--corpus", str(corpus), "-o", str(tmp_path / "run"), "--held-out", "0.2", *SMALL]
    code, out, err = call(*words)
    assert code == 0
    assert re.search(r"accept@k \d\.\d\d \d\.\d\d, tau 1\.\d\d", out)
    assert "step 3 of 3" in err
    assert "tokens/s" in err
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names >= {
        "model.safetensors",
        "config.json",
        "recipe.yaml",
        "training.json",
        "log.jsonl",
        "curve.svg",
        "state",
    }
    code, _, err = call(*words)
    assert code == 0
    assert "step 3 of 3" in err
    with pytest.raises(DataError, match=r"options\.lr was 0\.001 and is 0\.1"):
        call(*words, "--lr", "0.1")


def test_time_that_is_over_ends_a_session(corpus: Path, tmp_path: Path) -> None:
    words = ["train", "eagle3", "--corpus", str(corpus), "-o", str(tmp_path / "run"), *SMALL]
    code, _, err = call(*words, "--minutes", "0")
    assert code == 130
    assert "call it again" in err
    assert json.loads((tmp_path / "run" / "training.json").read_text())["result"]["steps"] == 1
    assert (tmp_path / "run" / "model.safetensors").exists()
    assert call(*words)[0] == 0


def test_features_of_several_recipes_are_kept_together(corpus: Path, tmp_path: Path) -> None:
    path = tmp_path / "features"
    code, out, err = call(
        "features", "eagle3", "medusa", "--corpus", str(corpus), "-o", str(path), "--max-length", "64"
    )
    assert code == 0
    assert "24 texts" in out
    assert "GB in" in err
    words = ["train", "medusa", "--corpus", str(corpus), "-o", str(tmp_path / "run"), "--features", str(path)]
    code, _, err = call(*words, *SMALL[:-2])
    assert code == 0
    assert "GB" not in err
    assert json.loads((tmp_path / "run" / "training.json").read_text())["settings"]["features"] == "stored"


def test_an_objective_is_a_published_one_changed(corpus: Path, tmp_path: Path) -> None:
    words = ["train", "eagle3", "--corpus", str(corpus), "-o", str(tmp_path / "run"), *SMALL]
    call(*words, "--objective", "lk", "--objective", "rate=0.7", "--objective", "losses.cross_entropy=0.5")
    chosen = json.loads((tmp_path / "run" / "training.json").read_text())["settings"]["options"]["objective"]
    assert chosen["losses"] == {"lk_hybrid": 1.0, "cross_entropy": 0.5}
    assert chosen["rate"] == 0.7
    with pytest.raises(DataError, match="'lkk'"):
        call(*words, "--objective", "lkk")
    with pytest.raises(DataError, match="no losses") as found:
        call(*words, "--objective", "rate=0.7")
    assert "--objective eagle3 --objective rate=0.7" in found.value.hint


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("rate=5", "--objective: rate of a power decay is at most 1, not 5"),
        ("foo=1", r"--objective: unknown key 'foo'\n  expected: one of losses, decay, rate"),
        ("losses.foo=1", r"--objective: losses.foo is 'foo'\n  expected: 'cross_entropy'"),
        ("eta=-1", r"--objective: eta is -1\n  expected: greater than or equal to 0"),
    ],
)
def test_a_setting_of_an_objective_that_is_wrong_is_named(
    setting: str, reason: str, corpus: Path, tmp_path: Path
) -> None:
    words = ["train", "eagle3", "--corpus", str(corpus), "-o", str(tmp_path / "run"), *SMALL]
    with pytest.raises(DataError, match=reason) as found:
        call(*words, "--objective", "eagle3", "--objective", setting)
    assert "Value error" not in str(found.value)
    assert "soft_cross_entropy': 1.0" not in str(found.value)
    assert found.value.hint


def test_text_is_given_by_its_files(corpus: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(str(5 + number % 20) for number in range(200)))
    words = ["train", "eagle3", "--corpus", str(corpus), "-o", str(tmp_path / "run"), *SMALL, "--text"]
    assert call(*words, str(text))[0] == 0
    told = json.loads((tmp_path / "run" / "training.json").read_text())["settings"]["corpus"]["text"]
    assert (told["documents"], told["texts"] > 0, 150 < told["tokens"] <= 200) == (1, True, True)
    with pytest.raises(DataError, match="evaluation set"):
        call(*words, str(tmp_path / "gsm8k.txt"))


@pytest.mark.parametrize(("recipe", "reason"), [("ngram", "nothing to train"), ("vanilla", "decodes plainly")])
def test_recipes_without_weights_are_refused_before_a_model_is_loaded(
    recipe: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specflow.build.load_target", lambda section: pytest.fail("a model was loaded"))
    with pytest.raises(RecipeError, match=reason):
        call("train", recipe, "--corpus", str(tmp_path), "-o", str(tmp_path / "run"))


def test_options_out_of_range_are_named(corpus: Path, tmp_path: Path) -> None:
    words = ["train", "eagle3", "--corpus", str(corpus), "-o", str(tmp_path / "run")]
    with pytest.raises(DataError, match=r"(?s)--warmup: 2.0.*expected: less than 1"):
        call(*words, "--warmup", "2")
    with pytest.raises(DataError, match="set one of them"):
        call(*words, "--steps", "2", "--epochs", "1")
    assert call(*words, "--data", "x.jsonl")[0] == 2
    assert call("train", "eagle3", "-o", str(tmp_path / "run"))[0] == 2


def test_answers_are_drawn_first_where_there_are_prompts_alone(
    loaded: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn(target: str, data: list[Path], output_dir: Path, **options: object) -> None:
        assert (target, [path.name for path in data]) == ("smollm2-135m", ["train.jsonl"])
        assert options == {"tokens": 500, "overrides": ["target.threads=1"]}
        write_corpus(output_dir, loaded, toy_records(loaded, 24))

    monkeypatch.setattr("specflow.cli.corpus.corpus", drawn)
    words = ["train", "eagle3", "--data", "train.jsonl", "--tokens", "500", "-o", str(tmp_path / "run"), *SMALL]
    assert call(*words, "--set", "target.threads=1")[0] == 0
    assert (tmp_path / "run" / "corpus" / "corpus.jsonl").exists()


def test_a_finished_run_is_written_for_others_once(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[str, str, Path]] = []

    def write(path: str, to: LayoutChoice, output_dir: Path) -> None:
        written.append((path, to.value, output_dir))
        output_dir.mkdir()
        (output_dir / "config.json").write_text("{}")

    monkeypatch.setattr("specflow.cli.convert.convert", write)
    run = tmp_path / "run"
    words = ["train", "eagle3", "--corpus", str(corpus), "-o", str(run), *SMALL, "--layout", "speculators"]
    assert call(*words)[0] == 0
    assert call(*words)[0] == 0
    assert written == [(str(run), "speculators", run / "speculators")]


def test_the_first_interrupt_lets_a_step_end_and_the_second_does_not() -> None:
    before = signal.getsignal(signal.SIGINT)
    with _asked() as asked:
        assert not asked()
        signal.raise_signal(signal.SIGTERM)
        assert asked()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_every_option_of_a_run_can_be_said() -> None:
    code, out, _ = call("train", "--help")
    assert code == 0
    missing = [name for name in TrainOptions.model_fields if "--" + name.replace("_", "-") not in out]
    assert not missing

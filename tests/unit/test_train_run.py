"""A training run from corpus to checkpoint: resume, kills, processes, stores, refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_training import toy_recipe, toy_records, toy_run, toy_target, train, write_corpus

from specflow.build import LoadedTarget, build_drafter
from specflow.cli.train import _figures
from specflow.draft.checkpoint import read_options
from specflow.errors import CheckpointError, DataError, GraphError, RecipeError
from specflow.recipe import load_recipe, parse_recipe
from specflow.target.load import read_tensors
from specflow.train.batch import Batch
from specflow.train.calibrate import write_temperatures
from specflow.train.output import earlier_runs
from specflow.train.run import Session, TrainingRun
from specflow.train.sequences import Text
from specflow.train.start import vocabulary_offsets

EAGLE = toy_recipe(method="eagle3", k=3, mlp_size=32)
STEPS = {"steps": 8, "lr": 3e-3}


@pytest.fixture(scope="module")
def loaded() -> LoadedTarget:
    return toy_target()


@pytest.fixture(scope="module")
def corpus(loaded: LoadedTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("toy") / "corpus", loaded, toy_records(loaded, 48))


@pytest.fixture(scope="module")
def whole(loaded: LoadedTarget, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    train(toy_run(corpus, path, EAGLE, loaded, STEPS), Session(4, 100))
    return path


def same_tensors(one: Path, other: Path) -> bool:
    ours, theirs = read_tensors(one), read_tensors(other)
    return set(ours) == set(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


def weights_of(run: TrainingRun) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in run._loop.parameters]


def test_a_run_leaves_a_checkpoint_that_its_source_opens(whole: Path, loaded: LoadedTarget) -> None:
    recipe = load_recipe(whole / "recipe.yaml")
    assert recipe.draft is not None
    assert recipe.draft.parts[0].options.weights == str(whole)
    assert build_drafter(recipe, loaded) is not None
    assert read_options(recipe.draft.parts[0].options, str(whole)).mlp_size == 32
    floats = {tensor.dtype for tensor in map(read_tensors(whole).__getitem__, read_tensors(whole)) if tensor.ndim > 1}
    assert floats == {torch.float16}


def test_a_run_says_how_it_went(whole: Path) -> None:
    lines = [json.loads(line) for line in (whole / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "held_out" in line] == [0, 4, 8]
    assert [line["step"] for line in lines if "loss" in line] == [8]
    header = json.loads((whole / "training.json").read_text())
    assert header["settings"]["options"]["steps"] == 8
    assert header["result"]["steps"] == 8
    assert header["result"]["held_out"]["length"] > 1.0
    assert header["result"]["trained_on"]["counts"] != header["result"]["held_out"]["counts"]
    assert sum(header["result"]["trained_on"]["counts"]) > 0
    assert header["sessions"][0]["source_sha256"]
    assert "accept rate" in (whole / "curve.svg").read_text()


def test_a_stopped_run_goes_on_bit_for_bit(whole: Path, corpus: Path, loaded: LoadedTarget, tmp_path: Path) -> None:
    run = toy_run(corpus, tmp_path / "run", EAGLE, loaded, STEPS)
    made = [progress.step for progress in run.go(Session(4, 100), lambda: run.step == 2)]
    assert made == [1, 2, 3]
    again = toy_run(corpus, tmp_path / "run", EAGLE, loaded, STEPS)
    assert again.step == 3
    train(again, Session(4, 100))
    assert same_tensors(tmp_path / "run", whole)
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)


def test_a_killed_run_goes_on_bit_for_bit(whole: Path, corpus: Path, loaded: LoadedTarget, tmp_path: Path) -> None:
    program = (
        "import sys, time; from toy_training import *; from test_train_run import *\n"
        "torch.set_num_threads(1)\n"
        "run = toy_run(Path(sys.argv[1]), Path(sys.argv[2]), EAGLE, toy_target(), STEPS)\n"
        "for progress in run.go(Session(4, 2)):\n"
        "    print(progress.step, flush=True)\n"
        "    if progress.step == 5: time.sleep(60)\n"
    )
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    words = [sys.executable, "-c", program, str(corpus), str(tmp_path / "run")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        while process.stdout.readline().strip() != "5":
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    again = toy_run(corpus, tmp_path / "run", EAGLE, loaded, STEPS)
    assert again.step == 4
    train(again, Session(4, 100))
    assert same_tensors(tmp_path / "run", whole)


def test_a_run_goes_on_with_its_own_settings_alone(whole: Path, corpus: Path, loaded: LoadedTarget) -> None:
    with pytest.raises(DataError, match=r"options\.lr was 0.003 and is 0.001") as found:
        toy_run(corpus, whole, EAGLE, loaded, {**STEPS, "lr": 1e-3, "clip": 2.0})
    assert "options.clip was 1.0 and is 2.0" in str(found.value)
    with pytest.raises(DataError, match=r"draft\.mlp_size"):
        toy_run(corpus, whole, toy_recipe(method="eagle3", k=3, mlp_size=16), loaded, STEPS)


def test_a_corpus_that_grew_does_not_change_a_run(
    whole: Path, corpus: Path, loaded: LoadedTarget, tmp_path: Path
) -> None:
    records = toy_records(loaded, 48)
    grown = write_corpus(tmp_path / "corpus", loaded, records[:40])
    run = toy_run(grown, tmp_path / "run", EAGLE, loaded, STEPS)
    with (grown / "corpus.jsonl").open("a") as stream:
        stream.write((corpus / "corpus.jsonl").read_text().splitlines(keepends=True)[45])
    again = toy_run(grown, tmp_path / "run", EAGLE, loaded, STEPS)
    assert again.texts.digest() == run.texts.digest()


def test_answers_of_another_target_are_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="answers of tiny"):
        toy_run(corpus, tmp_path / "run", EAGLE, toy_target(layers=3), STEPS)


def test_a_directory_of_something_else_is_refused(corpus: Path, loaded: LoadedTarget, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match=r"notes\.txt"):
        toy_run(corpus, tmp_path, EAGLE, loaded, STEPS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt"]


@pytest.mark.parametrize(
    ("draft", "reason"),
    [
        ({"method": "ngram"}, "nothing to train"),
        ({"first_of": [{"method": "eagle3"}, {"method": "medusa"}]}, "several drafters"),
    ],
)
def test_recipes_without_one_thing_to_train_are_refused(
    draft: dict[str, object], reason: str, corpus: Path, loaded: LoadedTarget, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=reason):
        toy_run(corpus, tmp_path / "run", parse_recipe({"draft": draft}), loaded, STEPS)
    with pytest.raises(RecipeError, match="decodes plainly"):
        toy_run(corpus, tmp_path / "run", parse_recipe({}), loaded, STEPS)


def test_the_part_of_a_combination_that_has_weights_is_trained(
    corpus: Path, loaded: LoadedTarget, tmp_path: Path
) -> None:
    recipe = parse_recipe({"draft": {"first_of": [{"method": "ngram"}, {"method": "eagle3"}], "k": 3}})
    train(toy_run(corpus, tmp_path / "run", recipe, loaded, {**STEPS, "steps": 1}))
    made = load_recipe(tmp_path / "run" / "recipe.yaml")
    assert made.draft is not None
    assert [getattr(part.options, "weights", None) for part in made.draft.parts] == [None, str(tmp_path / "run")]


def test_training_goes_on_from_other_weights(whole: Path, corpus: Path, loaded: LoadedTarget, tmp_path: Path) -> None:
    run = toy_run(corpus, tmp_path / "run", EAGLE, loaded, STEPS, checkpoint=whole)
    kept = read_tensors(whole)
    state = run._trainee.trainable.state()
    assert all(torch.allclose(state[name].float(), kept[name].float(), atol=1e-6) for name in kept)
    before, now = (json.loads((path / "training.json").read_text()) for path in (whole, tmp_path / "run"))
    assert [each["result"] for each in now["earlier"]] == [before["result"]]
    assert (before["earlier"], len(earlier_runs(tmp_path / "run"))) == ([], 2)


def test_weights_of_the_recipe_are_not_passed_over(
    whole: Path, corpus: Path, loaded: LoadedTarget, tmp_path: Path
) -> None:
    recipe = load_recipe(whole / "recipe.yaml")
    with pytest.raises(RecipeError, match="weights that are there already") as found:
        toy_run(corpus, tmp_path / "run", recipe, loaded, STEPS)
    assert f"--from {whole}" in found.value.hint
    assert toy_run(corpus, tmp_path / "run", recipe, loaded, STEPS, checkpoint=whole).step == 0


def test_temperatures_of_other_weights_are_not_kept(
    whole: Path, corpus: Path, loaded: LoadedTarget, tmp_path: Path
) -> None:
    trusted = toy_recipe(method="eagle3", k=3, mlp_size=32, confidence_head=True)
    train(toy_run(corpus, tmp_path / "first", trusted, loaded, {**STEPS, "calibration_rounds": 0}))
    write_temperatures(tmp_path / "first", (2.0, 2.0, 2.0))
    run = toy_run(corpus, tmp_path / "run", trusted, loaded, STEPS, checkpoint=tmp_path / "first")
    assert run._trainee.trainable.options.temperatures == ()  # type: ignore[attr-defined]


def test_gains_that_are_stored_less_one_are_refused(
    whole: Path, corpus: Path, loaded: LoadedTarget, tmp_path: Path
) -> None:
    recipe = toy_recipe(method="eagle3", k=3, mlp_size=32, offset_norms=True)
    with pytest.raises(GraphError, match="distance from 1"):
        toy_run(corpus, tmp_path / "run", recipe, loaded, STEPS, checkpoint=whole)


def test_the_head_of_the_target_stays_while_a_copy_learns(corpus: Path, loaded: LoadedTarget, tmp_path: Path) -> None:
    recipe = toy_recipe(method="eagle3", k=3, mlp_size=32, own_head=True)
    run = toy_run(corpus, tmp_path / "run", recipe, loaded, {**STEPS, "draft_vocab": 0})
    head, began = run._trainee.tables.head.clone(), run._trainee.trainable.state()["lm_head.weight"].clone()
    assert torch.equal(began, head)
    for _ in run.go(Session(100, 100)):
        pass
    assert torch.equal(run._trainee.tables.head, head)
    assert not torch.equal(run._trainee.trainable.state()["lm_head.weight"], began)


def test_of_a_wider_block_what_is_drafted_is_measured(corpus: Path, loaded: LoadedTarget, tmp_path: Path) -> None:
    recipe = toy_recipe(method="dflash", k=2, block_size=5, num_layers=1, mlp_size=16)
    train(toy_run(corpus, tmp_path / "run", recipe, loaded, {**STEPS, "steps": 1}))
    result = json.loads((tmp_path / "run" / "training.json").read_text())["result"]
    assert len(result["held_out"]["accept_rate"]) == 2


def test_positions_that_no_answer_reaches_have_no_figure(loaded: LoadedTarget, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", loaded, toy_records(loaded, 24, answer=6))
    train(toy_run(corpus, tmp_path / "run", toy_recipe(method="eagle3", k=8, mlp_size=16), loaded, STEPS))
    held_out = json.loads((tmp_path / "run" / "training.json").read_text())["result"]["held_out"]
    assert held_out["accept_rate"][0] is not None
    assert held_out["accept_rate"][7] is None
    assert "tau -" in _figures(held_out)
    assert (tmp_path / "run" / "curve.svg").exists()


def test_equally_frequent_tokens_are_taken_in_order() -> None:
    counts = torch.zeros(5000, dtype=torch.int64)
    counts[[4000, 3000]] = 3
    ids = vocabulary_offsets(counts, 100, (4999,)) + torch.arange(100)
    assert ids.tolist() == [*range(97), 3000, 4000, 4999]


def test_a_reduced_vocabulary_is_what_answers_use(corpus: Path, loaded: LoadedTarget, tmp_path: Path) -> None:
    run = toy_run(corpus, tmp_path / "run", EAGLE, loaded, {**STEPS, "draft_vocab": 20})
    vocabulary = run._trainee.trainable.vocabulary
    assert vocabulary is not None
    counts = run.texts.counts(loaded.target.info.vocab_size)
    ids = vocabulary.to_target.tolist()
    assert set(loaded.codec.stop_ids) <= set(ids)
    others = sorted(set(range(len(counts))) - set(ids))
    assert min(int(counts[each]) for each in ids if each not in loaded.codec.stop_ids) >= int(counts[others].max())
    assert run._trainee.coverage == pytest.approx(float(counts[ids].sum() / counts.sum()))


def test_features_from_disk_train_as_features_from_passes(
    whole: Path, corpus: Path, loaded: LoadedTarget, tmp_path: Path
) -> None:
    stored = train(toy_run(corpus, tmp_path / "run", EAGLE, loaded, STEPS, features=tmp_path / "features"))
    assert not stored.lacking
    ours, theirs = read_tensors(tmp_path / "run"), read_tensors(whole)
    assert all(torch.allclose(ours[name].float(), theirs[name].float(), atol=2e-2) for name in theirs)


def test_two_processes_see_the_losses_of_one(corpus: Path, tmp_path: Path) -> None:
    program, text = tmp_path / "program.py", tmp_path / "text.txt"
    text.write_text(" ".join(str(5 + number % 20) for number in range(600)))
    program.write_text(
        "import sys; from toy_training import *; from test_train_run import *\n"
        "torch.set_num_threads(1)\n"
        "options = TrainOptions.model_validate({**TOY, **STEPS, 'accumulate': 2})\n"
        "text = (Path(sys.argv[3]),)\n"
        "plan = RunPlan(EAGLE, Path(sys.argv[1]), Path(sys.argv[2]), options, text=text)\n"
        "with Processes(on_cpu=True) as processes:\n"
        "    run = TrainingRun(plan, toy_target(), processes)\n"
        "    losses = [progress.loss for progress in run.go(Session(4, 100))]\n"
        "    run.finish()\n"
        "    if processes.is_first: print(json.dumps(losses))\n"
    )
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    found = []
    for count in (1, 2):
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        words += [str(program), str(corpus), str(tmp_path / str(count)), str(text)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        result = json.loads((tmp_path / str(count) / "training.json").read_text())["result"]
        assert result["processes"] == count
        found.append([*json.loads(done.stdout), result["held_out"]["length"]])
    assert len(found[0]) == STEPS["steps"] + 1
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_of_texts_trained_on_those_are_measured_that_a_batch_has_used(
    corpus: Path, loaded: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = toy_run(corpus, tmp_path / "run", EAGLE, loaded, {**STEPS, "steps": 2, "held_out": 0.4})
    batches: list[tuple[int, ...]] = []
    measured: list[set[str]] = []
    made, figures = run._batch, run._figures

    def make(number: int) -> Batch:
        batches.append(run._order[number])
        return made(number)

    def measure(texts: Sequence[Text]) -> Mapping[str, Any]:
        measured.append({each.id for each in texts})
        return figures(texts)

    monkeypatch.setattr(run, "_batch", make)
    monkeypatch.setattr(run, "_figures", measure)
    train(run)
    used = {run.texts.training[place].id for batch in batches for place in batch}
    assert len(used) < len(run.texts.training)
    assert measured[1]
    assert measured[1] <= used


def test_a_torn_state_is_named_without_the_words_of_its_reader(
    corpus: Path, loaded: LoadedTarget, tmp_path: Path
) -> None:
    train(toy_run(corpus, tmp_path / "run", EAGLE, loaded, {**STEPS, "steps": 1}))
    file = tmp_path / "run" / "state" / "state.pt"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(DataError, match="torn or damaged, 1000 bytes") as found:
        toy_run(corpus, tmp_path / "run", EAGLE, loaded, {**STEPS, "steps": 1})
    assert found.value.where == str(file)
    assert "remove" in found.value.hint
    assert "torch" not in str(found.value).lower()


def test_weights_of_a_run_of_another_method_are_refused_as_such(
    whole: Path, corpus: Path, loaded: LoadedTarget, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="a run of eagle3") as found:
        toy_run(corpus, tmp_path / "run", toy_recipe(method="medusa", k=3), loaded, STEPS, checkpoint=whole)
    assert found.value.where == "--from"
    assert found.value.expected == "weights of medusa"
    assert "recipe of eagle3" in found.value.hint


def test_shares_must_be_even(corpus: Path, loaded: LoadedTarget, tmp_path: Path) -> None:
    from specflow.train.options import TrainOptions
    from specflow.train.processes import Processes
    from specflow.train.run import RunPlan

    processes = Processes(on_cpu=True)
    processes.count = 2
    plan = RunPlan(EAGLE, corpus, tmp_path / "run", TrainOptions(steps=1))
    with pytest.raises(DataError, match="--accumulate 2"):
        TrainingRun(plan, loaded, processes)

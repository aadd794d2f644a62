"""Exports of every recipe that has a network: what lies in them, what their script drafts, and when there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from made_gguf import made_store

from specflow.errors import DataError, ModelError, SpecFlowError
from specflow.export import onnx as exporting
from specflow.export import proof
from specflow.export.manifest import MANIFEST, Manifest, Part, read_manifest
from specflow.export.onnx import Exported, ExportPlan, export_onnx
from specflow.export.quality import Threshold
from specflow.files import file_sha256
from specflow.onnx.writer import OPSET
from specflow.recipe import load_recipe
from specflow.target.wheel import WheelModel

ROOT = Path(__file__).resolve().parents[2]
BOTH = frozenset({"drafter", "target"})
SETTINGS = {"layer_skip": ["draft.skip_attention=[1]", "draft.skip_mlp=[0]"]}
"""Layers that the tiny target has."""


def _has_network(path: Path) -> bool:
    draft = load_recipe(path).draft
    return draft is not None and any(part.info.graphs is not None for part in draft.parts)


NETWORKS = [path.stem for path in sorted((ROOT / "recipes").glob("*.yaml")) if _has_network(path)]
VARIANTS = {
    "mtp_serial": ("mtp", ["draft.num_modules=3"]),
    "mtp_unrolled": ("mtp", ["draft.unrolled=2"]),
    "eagle3_reduced": ("eagle3", ["draft.draft_vocab_size=99", "draft.norm_output=true"]),
    "dflash_window": ("dflash", ["draft.window=9"]),
    "dspark_anchor": ("dspark", ["draft.window=7", "draft.window_from=anchor", "draft.draft_vocab_size=50"]),
    "early_exit_adapter": ("early_exit", ["draft.adapter_rank=4", "draft.exit_layer=1"]),
    "two_networks": ("history_then_dspark", ["draft.first_of=[{method: mtp}, {method: medusa, shape: chain}]"]),
}
CASES = {**{name: (name, SETTINGS.get(name, [])) for name in NETWORKS}, **VARIANTS}


@pytest.fixture(scope="module")
def tiny(made_wheel: tuple[WheelModel, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of a tiny Llama, with a cache of this module alone."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECFLOW_CACHE", str(cache))
        patch.setenv("HF_HOME", str(cache / "hub"))
        yield made_store(made_wheel, cache).ensure("tiny").directory


def plan(tiny: Path, recipe: str, dtype: str = "float32", what: frozenset[str] = BOTH, **options: Any) -> ExportPlan:
    name, settings = CASES.get(recipe, (recipe, []))
    loaded = load_recipe(ROOT / "recipes" / f"{name}.yaml", [f"target.model={tiny}", *settings])
    return ExportPlan(loaded, what, dtype, **{"rounds": 6, **options})


def quiet(what: str) -> nullcontext[None]:
    return nullcontext()


def files_of(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): file_sha256(path) for path in folder.rglob("*") if path.is_file()}


def script(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a drafter's script in a Python that cannot import torch or SpecFlow."""
    program = (
        "import sys, runpy\n"
        "for name in ('torch', 'specflow', 'onnx', 'transformers'): sys.modules[name] = None\n"
        f"sys.argv = ['run_drafter.py', *{words!r}]\n"
        f"runpy.run_path({str(folder / 'run_drafter.py')!r}, run_name='__main__')\n"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=folder, timeout=60)


def run_script(folder: Path, part: Part) -> list[int]:
    """What the script drafts from its example."""
    done = script(folder / part.folder, str(folder / str(part.example)))
    assert (done.returncode, done.stderr) == (0, "")
    return [int(word) for word in done.stdout.split()]


@pytest.mark.parametrize("case", CASES)
def test_an_export_is_whole_and_its_script_drafts_what_the_engine_drafts(case: str, tiny: Path, tmp_path: Path) -> None:
    wanted = plan(tiny, case)
    done = export_onnx(wanted, tmp_path / "out", quiet)
    folder, manifest = tmp_path / "out", read_manifest(tmp_path / "out")
    assert manifest == done.manifest
    assert not list(tmp_path.glob(".*"))
    networks = [each for each in wanted.recipe.draft.parts if each.info.graphs is not None]  # type: ignore[union-attr]
    names = [f"drafter-{i + 1}" for i in range(len(networks))] if len(networks) > 1 else ["drafter"]
    assert [part.folder for part in manifest.parts] == ["target", *names]
    for part in manifest.parts:
        check_files(folder, part)
    check_proof(manifest)
    for part, section in zip(manifest.parts[1:], networks, strict=True):
        assert (part.source, part.k) == (section.source, section.k)
        lines = (folder / part.folder / "run_drafter.py").read_text().splitlines()
        assert len(lines) < 80
        assert max(map(len, lines)) <= 120
        assert part.drafted
        assert run_script(folder, part) == list(part.drafted)


def check_files(folder: Path, part: Part) -> None:
    """Files are those that the manifest lists, and graphs have the inputs and outputs it lists."""
    there = {path.name: file_sha256(path) for path in (folder / part.folder).iterdir()}
    assert {name: entry.sha256 for name, entry in part.files.items()} == there
    assert part.round
    for graph in part.graphs.values():
        assert graph.sha256 == file_sha256(folder / graph.file)
        session = onnxruntime.InferenceSession(str(folder / graph.file), providers=["CPUExecutionProvider"])
        for told, found in ((graph.inputs, session.get_inputs()), (graph.outputs, session.get_outputs())):
            assert [each.name for each in told] == [each.name for each in found]
            assert [list(each.shape) for each in told] == [each.shape for each in found]
            types = {"tensor(float)": "float32", "tensor(double)": "float64", "tensor(int64)": "int64"}
            assert [each.dtype for each in told] == [types[each.type] for each in found]
            assert all(word.isidentifier() for each in told for word in each.shape if isinstance(word, str))
    if part.to_target is not None:
        ids = np.load(folder / part.to_target)
        assert len(ids) == part.vocab_size == len(set(ids.tolist()))


def check_proof(manifest: Manifest) -> None:
    assert manifest.proof.tolerance == 1e-4
    assert max(error.relative for error in manifest.proof.errors) <= 1e-4
    assert {error.inputs for error in manifest.proof.errors if error.folder == "target"} == {"random", "real"}
    rounds = manifest.proof.rounds
    assert rounds is not None
    assert rounds.rounds == 6
    assert rounds.same_blocks + len(rounds.near_ties) >= rounds.blocks > 0
    assert rounds.same_choices == rounds.choices >= 6


def test_the_manifest_says_who_wrote_it_and_for_whom(tiny: Path, tmp_path: Path) -> None:
    manifest = export_onnx(plan(tiny, "eagle3"), tmp_path / "out", quiet).manifest
    target, drafter = manifest.parts
    assert manifest.recipe["name"] == "eagle3"
    assert (manifest.target.vocab_size, manifest.target.num_layers, manifest.target.hidden_size) == (265, 2, 64)
    assert len(manifest.target.identity) == 64
    assert (drafter.taps, drafter.hidden, drafter.num_layers, drafter.vocab_size) == ((1, 0, 0), None, 1, 265)
    assert {"torch", "onnx"} <= set(manifest.versions)
    assert target.graphs["target"].opset == OPSET
    assert (manifest.quality, manifest.forced, manifest.precision.name) == (None, False, "float32")
    assert "$defs" in Manifest.model_json_schema()


@pytest.mark.parametrize("case", ["eagle3", "early_exit", "small_model"])
def test_two_exports_of_the_same_weights_have_the_same_bytes(case: str, tiny: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        export_onnx(plan(tiny, case), tmp_path / name, quiet)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


def test_a_source_without_a_network_leaves_the_target(tiny: Path, tmp_path: Path) -> None:
    manifest = export_onnx(plan(tiny, "ngram"), tmp_path / "out", quiet).manifest
    assert [part.folder for part in manifest.parts] == ["target"]
    assert manifest.proof.rounds is not None
    assert (manifest.proof.rounds.rounds, manifest.proof.rounds.blocks) == (6, 0)


@pytest.mark.parametrize(
    ("dtype", "case"),
    [
        ("float16", "dspark"),
        ("float16", "small_model"),
        ("int8", "eagle3"),
        ("int8", "early_exit"),
        ("int4", "small_model"),
        ("int4", "dspark"),
    ],
)
def test_other_precisions_are_judged_by_their_quality(dtype: str, case: str, tiny: Path, tmp_path: Path) -> None:
    manifest = export_onnx(plan(tiny, case, dtype, force=True), tmp_path / "out", quiet).manifest
    assert manifest.precision.name == dtype
    assert (set(manifest.precision.forms) == {"body", "head"}) == (dtype != "float16")
    quality = manifest.quality
    assert quality is not None
    assert quality.positions > 1000
    assert bool(quality.refusal) == manifest.forced
    assert dtype != "float16" or (quality.agreement > 0.98 and not manifest.forced)
    assert manifest.proof.tolerance == proof.TOLERANCES[dtype]
    part = manifest.parts[-1]
    same = [mine == its for mine, its in zip(run_script(tmp_path / "out", part), part.drafted, strict=True)]
    assert dtype != "float16" or all(same)


def test_poor_quality_is_refused_unless_it_is_forced(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "Threshold", lambda: Threshold(agreement=1.01))
    with pytest.raises(ModelError, match=r"quality of int8: .* of next tokens agree.*101\.00%") as caught:
        export_onnx(plan(tiny, "vanilla", "int8"), tmp_path / "out", quiet)
    assert "--force" in caught.value.hint
    assert not list(tmp_path.iterdir())
    assert export_onnx(plan(tiny, "vanilla", "int8", force=True), tmp_path / "out", quiet).manifest.forced


@pytest.mark.parametrize(
    "case", ["eagle3", "dspark", "medusa", "mtp_serial", "small_model", "early_exit", "two_networks"]
)
def test_the_target_alone_is_proven_without_drafts(case: str, tiny: Path, tmp_path: Path) -> None:
    manifest = export_onnx(plan(tiny, case, what=frozenset({"target"})), tmp_path / "out", quiet).manifest
    assert [part.folder for part in manifest.parts] == ["target"]
    rounds = manifest.proof.rounds
    assert rounds is not None
    assert (rounds.rounds, rounds.same_choices, rounds.blocks) == (6, 6, 0)


def test_drafts_in_another_precision_need_no_quality(tiny: Path, tmp_path: Path) -> None:
    done = export_onnx(plan(tiny, "eagle3", "int8", frozenset({"drafter"})), tmp_path / "out", quiet)
    assert [part.folder for part in done.manifest.parts] == ["drafter"]
    assert done.manifest.quality is None


def test_bfloat16_is_refused_on_a_cpu_before_anything_is_loaded(tiny: Path, tmp_path: Path) -> None:
    wanted = plan(tiny, "vanilla", "bfloat16")
    with pytest.raises(ModelError, match="no bfloat16 on CPUs"):
        export_onnx(wanted, tmp_path / "out", quiet)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("case", "folder", "named"),
    [
        ("vanilla", "target", r"target: output "),
        ("eagle3", "drafter", r"(step|head|fusion): output "),
        ("dspark", "drafter", r"(block|context|draft|corrector|draft_sampled): output "),
        ("layer_skip", "drafter", r"draft_layers: output "),
    ],
)
def test_damaged_weights_fail_the_proof_and_nothing_is_left(
    case: str, folder: str, named: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = exporting.check_graphs

    def damage(where: Path) -> None:
        sound(where)
        if where.name == folder:
            weights = np.fromfile(where / "weights.bin", dtype=np.float32)
            (weights * 1.5).tofile(where / "weights.bin")

    monkeypatch.setattr(exporting, "check_graphs", damage)
    with pytest.raises(
        ModelError, match=rf"{named}.*of its largest value from torch's on (random|real) inputs\n.*0\.0001"
    ):
        export_onnx(plan(tiny, case), tmp_path / "out", quiet)
    assert not list(tmp_path.iterdir())


def test_a_graph_that_onnx_refuses_fails_the_proof(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = exporting.check_graphs

    def damage(where: Path) -> None:
        (where / "target.onnx").write_bytes((where / "target.onnx").read_bytes()[:-40])
        sound(where)

    monkeypatch.setattr(exporting, "check_graphs", damage)
    with pytest.raises(ModelError, match=r"target\.onnx: the checker of ONNX refuses it"):
        export_onnx(plan(tiny, "vanilla"), tmp_path / "out", quiet)
    assert not list(tmp_path.iterdir())


def test_a_taken_folder_is_refused_and_an_empty_one_is_filled(tiny: Path, tmp_path: Path) -> None:
    taken, empty = tmp_path / "taken", tmp_path / "empty"
    for folder in (taken, empty):
        folder.mkdir()
    (taken / "note.txt").write_text("mine")
    with pytest.raises(DataError, match="never overwritten"):
        export_onnx(plan(tiny, "vanilla"), taken, quiet)
    assert files_of(taken).keys() == {"note.txt"}
    export_onnx(plan(tiny, "vanilla"), empty, quiet)
    assert (empty / MANIFEST).is_file()


def test_a_failure_leaves_an_empty_folder_of_the_users_as_it_was(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError):
        export_onnx(plan(tiny, "vanilla", "bfloat16"), tmp_path / "out", quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_of_two_exports_at_once_the_slower_one_says_so(tiny: Path, tmp_path: Path) -> None:
    finished: list[Exported] = []

    @contextmanager
    def race(what: str) -> Iterator[None]:
        """In the middle of the first export, a second one runs from beginning to end."""
        if what == "comparing the target" and not finished:
            finished.append(export_onnx(plan(tiny, "vanilla"), tmp_path / "out", quiet))
        yield

    with pytest.raises(DataError, match="another export finished here first"):
        export_onnx(plan(tiny, "ngram"), tmp_path / "out", race)
    assert json.loads((tmp_path / "out" / MANIFEST).read_text())["recipe"]["name"] == "vanilla"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_interruption_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    def stop(what: str) -> nullcontext[None]:
        if what == "writing the target":
            raise KeyboardInterrupt
        return nullcontext()

    with pytest.raises(KeyboardInterrupt):
        export_onnx(plan(tiny, "vanilla"), tmp_path / "out", stop)
    assert not list(tmp_path.iterdir())


def test_what_a_killed_export_left_is_removed_a_day_later(tiny: Path, tmp_path: Path) -> None:
    old, young, others = (tmp_path / f".{name}" for name in (f"out.{'a' * 32}", f"out.{'b' * 32}", f"outer.{'a' * 32}"))
    for folder in (old, young, others):
        folder.mkdir()
        (folder / "weights.bin").write_bytes(b"half")
    for folder in (old, others):
        os.utime(folder, (0, 0))
    export_onnx(plan(tiny, "vanilla"), tmp_path / "out", quiet)
    assert {path.name for path in tmp_path.iterdir()} == {"out", young.name, others.name}


@pytest.mark.parametrize("case", ["eagle3", "dspark", "medusa", "layer_skip"])
def test_the_script_says_what_is_wrong_with_its_input(case: str, tiny: Path, tmp_path: Path) -> None:
    part = export_onnx(plan(tiny, case, what=frozenset({"drafter"})), tmp_path / "out", quiet).manifest.parts[0]
    good = dict(np.load(tmp_path / "out" / str(part.example)))
    name = next(reversed(good))
    narrow = {**good, name: good[name][..., :-1]}
    missing = {each: rows for each, rows in good.items() if each != name}
    other = {**good, name: good[name].astype(np.float64 if good[name].dtype.kind == "i" else np.int64)}
    for bad in (narrow, missing, other):
        np.savez(tmp_path / "bad.npz", **bad)
        done = script(tmp_path / "out" / part.folder, str(tmp_path / "bad.npz"))
        assert (done.returncode, done.stdout) == (1, "")
        assert f"expected {name} {good[name].shape} {good[name].dtype}, found" in done.stderr
        assert "Traceback" not in done.stderr
    as_int32 = {each: rows.astype(np.int32) if rows.dtype.kind == "i" else rows for each, rows in good.items()}
    np.savez(tmp_path / "int32.npz", **as_int32)
    whole = script(tmp_path / "out" / part.folder, str(tmp_path / "out" / str(part.example)))
    assert script(tmp_path / "out" / part.folder, str(tmp_path / "int32.npz")).stdout == whole.stdout
    assert "python run_drafter.py example.npz" in script(tmp_path / "out" / part.folder).stderr


def test_a_target_that_graphs_do_not_compute_is_refused_with_the_reason(tiny: Path, tmp_path: Path) -> None:
    recipe = load_recipe(
        ROOT / "recipes" / "eagle3.yaml", [f"target.model={tiny}", "target.implementation=transformers"]
    )
    with pytest.raises(ModelError, match="implementation: transformers"):
        export_onnx(ExportPlan(recipe, BOTH, "float32", 4), tmp_path / "out", quiet)
    done = export_onnx(ExportPlan(recipe, frozenset({"drafter"}), "float32", 4), tmp_path / "out", quiet)
    assert [part.folder for part in done.manifest.parts] == ["drafter"]


def test_a_damaged_manifest_is_told(tmp_path: Path) -> None:
    for text in ("", "{}", '{"version": 2}'):
        (tmp_path / MANIFEST).write_text(text)
        with pytest.raises(SpecFlowError, match=r"manifest\.json: cannot be read"):
            read_manifest(tmp_path)

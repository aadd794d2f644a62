"""The verb profile, end to end on a tiny model: tables, files, the plot, refusals."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from tiny import NumberText, tiny_target
from typer.testing import CliRunner

from specflow import build
from specflow.build import LoadedTarget, build_engine
from specflow.cli import profile as profile_module
from specflow.cost import CostModel, Timing, find_profile, load_profile
from specflow.errors import DataError, GraphError, RecipeError
from specflow.measure import Spread
from specflow.plot import draw_profile
from specflow.recipe import load_recipe
from specflow.types import Sampling

LOADED = LoadedTarget(tiny_target(), NumberText())  # type: ignore[arg-type]
QUICK = ("--contexts", "10,40", "--rows", "1,2,8", "--repeat", "3")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def here(model_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(build, "load_target", lambda section: LOADED)
    return model_cache / "profiles"


def call(*words: str) -> Any:
    app = typer.Typer()
    app.command()(profile_module.profile)
    result = CliRunner().invoke(app, list(words))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_profile_is_measured_shown_kept_and_found_again(here: Path) -> None:
    result = call("ngram", *QUICK, "--batches", "1,2", "--set", "draft.k=3", "-o", "mine.json", "--plot", "mine.svg")
    assert result.exit_code == 0
    (kept,) = here.iterdir()
    assert f"wrote {kept}" in result.stderr.replace("\n", "")
    assert kept.read_text() == Path("mine.json").read_text()
    recipe = load_recipe("ngram")
    found = find_profile(recipe, LOADED)
    assert found is not None
    assert found == load_profile(kept)
    assert {timing.size for timing in found.draft} == {1, 2, 3}
    assert {timing.batch for timing in found.target} == {1, 2}
    for text in ("ngram on tiny", "target pass, batch 2", "rounds, batch 1", "verifying 8 rows costs", "pays"):
        assert text in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100
    for row in (1, 2, 8):
        assert re.search(rf"^ +{row} +\d+\.\d\d~? +\d+\.\d\d", result.stdout, re.MULTILINE)
    ElementTree.fromstring(Path("mine.svg").read_text())
    assert result.stderr.count("not trusted: ") == min(len(list(found.doubts())), 6)


def test_json_leaves_stdout_to_the_profile(here: Path) -> None:
    data = json.loads(call("ngram", *QUICK, "--set", "draft.k=2", "--json").stdout)
    assert data == json.loads(next(here.iterdir()).read_text())
    assert data["target"] == {"name": "tiny", "dtype": "float64", "device": "cpu", "runtime": "native"}
    assert data["provenance"]["plan"]["rows"] == [1, 2, 8]
    assert data["provenance"]["verify"] == "match"
    assert [row["rows"] for row in data["seconds"]["target"] if row["context"] == 40] == [1, 2, 8]


def test_plain_decoding_has_a_profile_of_the_target_alone(here: Path) -> None:
    result = call("vanilla", *QUICK)
    assert "rounds, batch" not in result.stdout
    assert "pays" not in result.stdout
    found = find_profile(load_recipe("vanilla"), LOADED)
    assert found is not None
    assert found.draft == ()
    assert found.round_s(0, 1, 10) > found.target_s(1, 1, 10)


def test_few_repeats_are_marked_wherever_they_show(here: Path) -> None:
    result = call("vanilla", "--contexts", "10", "--rows", "2", "--repeat", "1")
    assert "not trusted: target rows 1, batch 1, context 10" in result.stderr
    assert re.search(r"^ +2 +\d+\.\d\d~", result.stdout, re.MULTILINE)
    assert "spread too wide, or too few repeats" in result.stdout


def test_many_doubts_are_counted_not_listed(here: Path) -> None:
    result = call("vanilla", "--contexts", "10", "--rows", "1,2,3,4,5,6,7,8", "--repeat", "1")
    assert result.stderr.count("not trusted: ") == 6
    assert "not trusted: 4 more of 9; the profile names them all" in result.stderr
    assert len(json.loads(next(here.iterdir()).read_text())["not_trusted"]) == 9


def test_the_policy_that_needs_a_profile_does_not_keep_it_from_being_measured(here: Path) -> None:
    assert call("ngram", *QUICK, "--set", "draft.k=2", "--set", "length={policy: expected_gain}").exit_code == 0


def test_a_profile_lets_expected_gain_run_at_any_k(here: Path) -> None:
    recipe = load_recipe("ngram", ["draft.k=2", "length={policy: expected_gain}"])
    with pytest.raises(RecipeError, match="specflow profile RECIPE"):
        build_engine(recipe, LOADED)
    call("ngram", *QUICK, "--set", "draft.k=3")
    assert build_engine(recipe, LOADED).generate([[5, 6, 5, 6, 5]], Sampling(max_new_tokens=4))


def test_what_was_measured_is_shown_even_where_it_cannot_be_kept(here: Path) -> None:
    here.parent.mkdir(parents=True)
    here.write_text("a file in the way")
    app = typer.Typer()
    app.command()(profile_module.profile)
    result = CliRunner().invoke(app, ["vanilla", *QUICK, "-o", "mine.json"])
    assert isinstance(result.exception, DataError)
    assert "target pass, batch 1" in result.stdout
    assert load_profile(Path("mine.json")).target


def test_what_makes_no_sense_is_refused_before_anything_is_measured(here: Path) -> None:
    assert call("ngram", "--rows", "1,two").exit_code == 2
    assert call("ngram", "--batches", "0").exit_code == 2
    assert call("ngram", "--repeat", "0").exit_code == 2
    with pytest.raises(DataError, match="--contexts: context 400"):
        call("ngram", "--contexts", "400")
    with pytest.raises(DataError, match="a profile in 0 s"):
        call("ngram", *QUICK, "--budget", "0")
    with pytest.raises(GraphError):
        call("ngram", "--set", "draft.share=true", "--set", "verify.rule=rejection")
    assert not here.exists()


def timing(size: int, seconds: float, batch: int = 1, context: int = 64, wide: float = 0.0) -> Timing:
    return Timing(size, batch, context, Spread(seconds, seconds * (1 - wide), seconds * (1 + wide), 5))


def picture(model: CostModel) -> ElementTree.Element:
    return ElementTree.fromstring(draw_profile(model, "<a & b>", "tiny"))


def test_the_plot_shows_every_timing_and_which_are_not_trusted() -> None:
    model = CostModel(
        target=tuple(timing(rows, 0.01 + rows / 1e3, b, c) for b in (1, 4) for c in (64, 512) for rows in (1, 8, 64)),
        draft=(timing(1, 0.001), timing(4, 0.004, wide=0.5)),
        overhead=(timing(0, 0.001),),
    )
    root = picture(model)
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {"<a & b>", "target pass, ms, batch 1", "target pass, ms, batch 4", "context 512", "draft"} <= {*texts}
    circles, squares = list(root.iter(f"{SVG}circle")), list(root.iter(f"{SVG}rect"))
    assert len(circles) == 2 * (1 + 3)  # context 64 of both batches: in the legend and at three sizes
    assert len(squares) == 1 + 2 * (1 + 3)  # context 512, and the page
    hollow = [element for element in root.iter(f"{SVG}path") if element.get("fill") == "#ffffff"]
    assert len(hollow) == 1
    lines = [element.get("stroke") for element in root.iter(f"{SVG}path") if element.get("fill") == "none"]
    assert len(lines) == 2 * 2 + 5
    width, height = float(root.get("width", "0")), float(root.get("height", "0"))
    for circle in circles:
        assert 0 < float(circle.get("cx", "-1")) < width
        assert 0 < float(circle.get("cy", "-1")) < height


def test_the_plot_of_a_single_point_is_sound() -> None:
    alone = CostModel(target=(timing(1, 0.5),))
    assert [element.text for element in picture(alone).iter(f"{SVG}text")].count("0") == 2
    picture(replace(alone, draft=(timing(1, 0.0),)))

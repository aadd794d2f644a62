"""Recipes: every mistake is named with file, line and key; what is dumped loads to the same recipe."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from typer.testing import CliRunner

from specflow.cli.app import app
from specflow.draft.checkpoint import read_options
from specflow.draft.registry import SourceInfo, SourceRegistry, discover
from specflow.errors import RecipeError
from specflow.length import POLICIES
from specflow.recipe import (
    Recipe,
    dump_recipe,
    find_recipe,
    load_recipe,
    parse_recipe,
    recipe_data,
    recipe_schema,
    shipped_recipes,
    trained_recipes,
)
from specflow.recipe_draft import FirstOfSection, MergeSection
from specflow.recipe_yaml import read_yaml, write_yaml
from specflow.rules import RULE_INFOS


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refused(folder: Path, text: str, *overrides: str) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(folder, text), overrides)
    return caught.value


TWO = "draft:\n  first_of:\n    - method: suffix\n    - source: history\n"


@pytest.mark.parametrize(
    ("text", "line", "key", "found", "expected", "hint"),
    [
        ("name: a\nlenght: {}\n", 2, "lenght", "unknown key", "length", "length"),
        ("draft:\n  method: ngrm\n", 2, "draft.method", "ngrm", "ngram", "ngram"),
        ("draft:\n  source: histroy\n", 2, "draft.source", "histroy", "history", "history"),
        ("draft:\n  method: ngram\n  min_mach: 2\n", 3, "draft.min_mach", "unknown key", "min_match", "min_match"),
        ("draft:\n  method: ngram\n\n  k: many\n", 4, "draft.k", "many", "whole number", ""),
        ("draft:\n  method: ngram\n  k: true\n", 3, "draft.k", "true", "whole number", ""),
        ("draft:\n  method: ngram\n  k: 9000\n", 3, "draft.k", "9000", "256", ""),
        ("draft:\n  method: ngram\n  index: suffix\n", 3, "draft.index", "suffix", "ngram", ""),
        ("draft:\n  k: 3\n", 1, "draft", "neither method nor source", "one of them", ""),
        ("draft:\n  method: ngram\n  min_match: 5\n  max_match: 3\n", 1, "draft", "max_match is 3", "", ""),
        ("draft: 7\n", 1, "draft", "7", "mapping", ""),
        ("draft:\n  first_of:\n    - method: ngram\n", 2, "draft.first_of", "a list of 1", "at least 2", ""),
        (f"{TWO}      min_mach: 2\n", 5, "draft.first_of.1.min_mach", "unknown key", "min_match", "min_match"),
        (f"{TWO}      k: 9\n", 5, "draft.first_of.1.k", "9, and the block's k is 8", "1 to 8", ""),
        (f"{TWO}      index: suffix\n      k: 0\n", 6, "draft.first_of.1.k", "0, and", "1 to 8", ""),
        (f"{TWO}    - method: sufix\n", 5, "draft.first_of.2.method", "sufix", "ngram", "suffix"),
        (f"{TWO}    - k: 3\n", 5, "draft.first_of.2", "neither method nor source", "", ""),
        (f"{TWO}    - source: histroy\n", 5, "draft.first_of.2.source", "histroy", "history", "history"),
        (f"{TWO}    - 7\n", 5, "draft.first_of.2", "7", "mapping", ""),
        (f"{TWO}  nodes: 4\n", 5, "draft.nodes", "unknown key", "first_of, k", ""),
        (f"{TWO}  method: ngram\n", 5, "draft.method", "unknown key", "first_of, k", ""),
        (f"{TWO}  k: many\n", 5, "draft.k", "many", "whole number", ""),
        ("draft:\n  merge: ngram\n", 2, "draft.merge", "ngram", "a list", ""),
        ("draft:\n  method: [a]\n", 2, "draft.method", "unknown method", "ngram", ""),
        ("draft:\n  method: {a: 1}\n", 2, "draft.method", "unknown method", "ngram", ""),
        ("target:\n  dtype: float31\n", 2, "target.dtype", "float31", "bfloat16", "float32"),
        ("target:\n  device: gpu\n", 2, "target.device", "gpu", "cuda:0", ""),
        ("target:\n  row_invariant: maybe\n", 2, "target.row_invariant", "maybe", "auto, true, false", ""),
        ("verify:\n  rule: mach\n", 2, "verify.rule", "mach", "match", "match"),
        ("verify:\n  rule: typical\n", 1, "verify.lossless", "true", "lossless: false", ""),
        ("verify:\n  rule: match\n  delta: 0.1\n", 3, "verify.delta", "unknown key", "lossless, rule", ""),
        ("length:\n  policy: aditive\n", 2, "length.policy", "aditive", "additive", "additive"),
        ("length:\n  policy: additive\n", 1, "length", "without a draft", "draft section", ""),
        ("length:\n  policy: {a: 1}\n", 2, "length.policy", "a", "fixed", ""),
        ("sampling:\n  temperature: -1\n", 2, "sampling.temperature", "-1", "0", ""),
        ("sampling:\n  temperatur: 1\n", 2, "sampling.temperatur", "unknown key", "temperature", "temperature"),
        ("runtime:\n  batch: 0\n", 2, "runtime.batch", "0", "1", ""),
        ("tune:\n  draft.k: {choices: [1, 2]}\n", 2, "tune.draft.k", "neither method nor source", "", ""),
        ("draft: {method: ngram}\ntune:\n  draft.kk: {low: 1, high: 2}\n", 3, "tune.draft.kk", "unknown key", "k", ""),
        ("draft: {method: ngram}\ntune:\n  draft.k: {low: 3, high: 2}\n", 3, "tune.draft.k.low", "above", "", ""),
        (
            "draft: {method: ngram}\ntune:\n  draft.k: {chices: [1]}\n",
            3,
            "tune.draft.k.chices",
            "unknown",
            "",
            "choices",
        ),
    ],
)
def test_errors_name_file_line_key_and_the_nearest_name(
    tmp_path: Path, text: str, line: int, key: str, found: str, expected: str, hint: str
) -> None:
    error = refused(tmp_path, text)
    assert error.where == f"{tmp_path / 'mine.yaml'}:{line}: {key}"
    assert found in error.found
    assert expected in error.expected
    assert (f"did you mean {hint}?" in error.hint) if hint else "did you mean" not in error.hint


def test_all_mistakes_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    text = str(refused(tmp_path, "target:\n  dtype: float31\n  threads: 0\nruntime:\n  batch: 0\n"))
    for place in ("mine.yaml:2: target.dtype", "mine.yaml:3: target.threads", "mine.yaml:5: runtime.batch"):
        assert place in text


@pytest.mark.parametrize(
    ("text", "where", "found"),
    [
        ("name: a\ntarget: {}\nname: b\n", ":3: name", "a second time"),
        ("target:\n  dtype: auto\n  dtype: float32\n", ":3: target.dtype", "a second time"),
        ("name: [1\n", ":2", "expected"),
        ("name: !odd a\n", ":1", "!odd"),
        ("name: &a\n  b: *a\n", ":1", "alias"),
        ("? [a]\n: 1\n", ":1", "list or mapping"),
        ("tune: {draft.k: !!int many}\n", ":1", "many"),
        ("", "mine.yaml", "an empty file"),
        ("- a\n", "mine.yaml", "a list"),
    ],
)
def test_yaml_mistakes(tmp_path: Path, text: str, where: str, found: str) -> None:
    error = refused(tmp_path, text)
    assert error.where.endswith(where)
    assert found in error.found


def test_scalars_follow_yaml_1_2() -> None:
    data = read_yaml(
        "a: 1e-3\nb: off\nc: 010\nd: 0x1F\ne: ~\nf: yes\ng: '5'\nh: 12:30\ni: .inf\nj: 2024-01-01\n", "x"
    ).data
    expected = {"a": 1e-3, "b": "off", "c": 10, "d": 31, "e": None, "f": "yes"}
    assert data == {**expected, "g": "5", "h": "12:30", "i": float("inf"), "j": "2024-01-01"}


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20)


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8), SCALARS | st.dictionaries(st.text(min_size=1), SCALARS), max_size=4
    )
)
def test_yaml_round_trip(data: dict[str, object]) -> None:
    if data:
        assert read_yaml(write_yaml(data), "x").data == data


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(tmp_path / "latin.yaml")
    with pytest.raises(RecipeError, match="a folder"):
        load_recipe(tmp_path)
    with pytest.raises(RecipeError, match="did you mean ngram"):
        load_recipe("ngramm")


def test_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, "draft:\n  method: ngram\n  k: 3\n")
    settings = [
        "draft.k=5",
        "draft.method=suffix",
        "target.threads=2",
        "sampling.logit_bias.7=-1.5",
        "sampling.stop_ids=[3]",
    ]
    recipe = load_recipe(path, settings)
    assert recipe.draft is not None
    assert (recipe.draft.k, recipe.draft.method, recipe.target.threads) == (5, "suffix", 2)
    assert recipe.sampling.logit_bias == {7: -1.5}
    assert recipe.sampling.stop_ids == (3,)
    assert load_recipe(path, ["draft=null"]).draft is None
    tuned = load_recipe(path, ["tune.draft.k={low: 1, high: 8}"])
    assert tuned.tune["draft.k"].ends == (1, 8)


@pytest.mark.parametrize(
    ("setting", "where", "hint"),
    [
        ("draft.kk=5", "--set draft.kk", "did you mean k?"),
        ("darft.k=5", "--set darft.k: darft", "did you mean draft?"),
        ("draft.k", "--set draft.k", "draft.k=5"),
        ("draft.k.j=5", "--set draft.k.j", ""),
        ("draft.k=[1", "--set draft.k=[1:1", ""),
    ],
)
def test_wrong_overrides_name_themselves(tmp_path: Path, setting: str, where: str, hint: str) -> None:
    error = refused(tmp_path, "draft:\n  method: ngram\n  k: 3\n", setting)
    assert error.where == where
    assert hint in str(error)


def test_overrides_reach_the_parts_of_a_combination(tmp_path: Path) -> None:
    path = write(tmp_path, f"{TWO}  k: 6\n")
    recipe = load_recipe(path, ["draft.first_of.1.min_match=3", "draft.first_of.0.k=4", "draft.k=5"])
    assert isinstance(recipe.draft, FirstOfSection)
    first, second = recipe.draft.parts
    assert (first.method, first.k, second.method, second.k) == ("suffix", 4, "ngram", 5)
    assert second.options.min_match == 3
    assert load_recipe(path, ["draft.k=0"]).draft.k == 0
    for setting, key in (("draft.first_of.2.k=3", "draft.first_of.2.k"), ("draft.first_of.k=3", "draft.first_of.k")):
        error = refused(tmp_path, TWO, setting)
        assert (error.where, error.found) == (f"--set {key}", "first_of is a list of 2")
    assert refused(tmp_path, TWO, "draft.first_of.1.kk=3").where == "--set draft.first_of.1.kk"


def test_a_faulty_part_is_the_only_thing_wrong(tmp_path: Path) -> None:
    error = refused(tmp_path, TWO, "draft.first_of.0.min_match=0")
    assert error.where == "--set draft.first_of.0.min_match"
    assert "also" not in str(error)


def test_combinations_do_not_nest() -> None:
    inner = {"first_of": [{"method": "ngram"}, {"method": "suffix"}]}
    with pytest.raises(RecipeError, match="a combination inside a combination"):
        parse_recipe({"draft": {"merge": [inner, {"method": "ngram"}], "k": 4}})


def test_lists_made_in_python_are_lists() -> None:
    recipe = parse_recipe(
        {"draft": {"method": "layer_skip", "skip_mlp": [0, 2], "k": 3}, "sampling": {"stop_ids": [5]}}
    )
    assert recipe.draft.parts[0].options.skip_mlp == (0, 2)
    assert recipe.sampling.stop_ids == (5,)


def test_parts_follow_the_k_of_the_block() -> None:
    merged = parse_recipe({"draft": {"merge": ({"method": "ngram"}, {"method": "suffix", "k": 3}), "k": 5, "nodes": 9}})
    assert isinstance(merged.draft, MergeSection)
    assert [part.k for part in merged.draft.parts] == [5, 3]
    data = recipe_data(merged)
    assert data["draft"] == {"merge": ({"method": "ngram"}, {"method": "suffix", "k": 3}), "k": 5, "nodes": 9}
    data["draft"]["k"] = 4
    again = parse_recipe(data).draft
    assert [part.k for part in again.parts] == [4, 3]
    assert recipe_data(merged, full=True)["draft"]["merge"][0].keys().isdisjoint({"k", "index"})


def test_a_method_is_a_preset_of_the_axes() -> None:
    short = parse_recipe({"draft": {"method": "suffix", "k": 4}})
    long = parse_recipe({"draft": {"source": "history", "dependency": "copy", "index": "suffix", "k": 4}})
    assert short == long
    assert short.draft is not None
    assert short.draft.method == "suffix"
    assert type(short.draft.options) is discover()["history"].config


def recipes() -> st.SearchStrategy[Recipe]:
    """Recipes over all methods, rules and policies that are installed."""
    methods = [name for info in discover().values() for name in info.presets()]
    single = st.fixed_dictionaries({"method": st.sampled_from(methods), "k": st.integers(1, 256)})
    part = st.fixed_dictionaries({"method": st.sampled_from(methods)}, optional={"k": st.integers(1, 9)})
    parts = st.lists(part, min_size=2, max_size=3).map(tuple)
    drafts = st.one_of(
        single,
        st.fixed_dictionaries({"first_of": parts, "k": st.integers(9, 256)}),
        st.fixed_dictionaries({"merge": parts, "k": st.integers(9, 256), "nodes": st.integers(1, 64)}),
    )
    verifies = st.sampled_from([{"rule": rule, "lossless": not info.lossy} for rule, info in RULE_INFOS.items()])
    samplings = st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.7, 1e-3]),
            "stop_strings": st.lists(st.text(min_size=1, max_size=5), max_size=2).map(tuple),
            "logit_bias": st.dictionaries(st.integers(0, 99), st.floats(-5, 5), max_size=2),
        }
    )
    with_draft = st.fixed_dictionaries(
        {
            "draft": drafts,
            "length": st.sampled_from([{"policy": name} for name in POLICIES]),
            "tune": st.sampled_from([{}, {"draft.k": {"choices": (9, 12)}}, {"runtime.batch": {"low": 1, "high": 4}}]),
        }
    )
    shared = {"name": st.text(max_size=8), "verify": verifies, "sampling": samplings}
    shared["runtime"] = st.fixed_dictionaries({"batch": st.integers(1, 9)})
    return st.builds(lambda a, b: parse_recipe({**a, **b}), st.fixed_dictionaries(shared), with_draft | st.just({}))


@settings(deadline=None, max_examples=50)
@given(recipes(), st.booleans())
def test_dump_loads_to_the_same_recipe(recipe: Recipe, full: bool) -> None:
    text = dump_recipe(recipe, full)
    assert parse_recipe(read_yaml(text, "dump").data) == recipe if text.strip() != "{}" else recipe == Recipe()


def test_a_full_dump_leaves_nothing_to_defaults() -> None:
    data = recipe_data(parse_recipe({"draft": {"method": "ngram"}}), full=True)
    assert set(data) == set(Recipe.model_fields)
    assert data["draft"]["k"] == 8
    assert data["target"]["dtype"] == "auto"


@pytest.mark.parametrize("full", [False, True])
def test_a_dump_leaves_to_a_checkpoint_what_the_recipe_left_to_it(tmp_path: Path, full: bool) -> None:
    """And keeps what the recipe insists on, be it a default."""
    (tmp_path / "config.json").write_text(json.dumps({"num_layers": 2, "block_size": 5}))
    weights = str(tmp_path)
    alone = {"method": "dspark", "k": 4, "layout": "shifted", "weights": weights}
    for draft in (alone, {"first_of": ({"method": "suffix"}, alone), "k": 4}):
        recipe = parse_recipe({"draft": draft})
        again = parse_recipe(recipe_data(recipe, full))
        assert again == recipe
        assert again.draft is not None
        options = again.draft.parts[-1].options
        assert options.model_fields_set == {"layout", "weights"}
        assert getattr(read_options(options, weights), "num_layers") == 2  # noqa: B009 - of a source's own config


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_are_short_and_read_aloud(name: str) -> None:
    lines = shipped_recipes()[name].read_text(encoding="utf-8").splitlines()
    recipe = load_recipe(name)
    assert lines[0] == "# yaml-language-server: $schema=schema.json"
    assert lines[1].startswith(f"# specflow run {name} ")
    assert len(lines) <= 40
    assert recipe.name == name
    assert recipe.description


def test_the_shipped_schema_is_the_generated_one() -> None:
    stored = json.loads((find_recipe("ngram").parent / "schema.json").read_text(encoding="utf-8"))
    assert stored == recipe_schema(), "run: specflow schema -o recipes/schema.json"
    draft = stored["$defs"]["HistoryDraft"]
    assert draft["additionalProperties"] is False
    assert {"method", "source", "k", "min_match"} <= set(draft["properties"])
    assert draft["properties"]["method"]["enum"] == ["ngram", "suffix"]
    parts = stored["$defs"]["FirstOfSection"]["properties"]["first_of"]
    assert {"$ref": "#/$defs/HistoryDraft"} in parts["items"]["anyOf"]
    assert {"$ref": "#/$defs/FirstOfSection"} in stored["properties"]["draft"]["anyOf"]


class Options(BaseModel):
    width: int = 3


def source(name: str) -> SourceInfo:
    return SourceInfo(
        name, Options, ("copy",), axis="history", build=lambda config, context: pytest.fail("not built here")
    )


def test_sources_are_refused_rather_than_replaced() -> None:
    registry = SourceRegistry()
    registry.add(source("mine"), "one.py")
    with pytest.raises(RecipeError, match="a second source named 'mine'"):
        registry.add(source("mine"), "two.py")
    with pytest.raises(RecipeError, match="a SourceInfo"):
        registry.add(None, "three.py")
    assert registry["mine"].presets() == {"mine": {}}


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, Exception) and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_validate_reports_every_failing_file(tmp_path: Path) -> None:
    bad, worse, good = (tmp_path / f"{name}.yaml" for name in ("bad", "worse", "good"))
    bad.write_text("lenght: {}\n")
    worse.write_text("verify:\n  rule: nothing\n")
    good.write_text("name: good\n")
    code, out, err = run("validate", str(bad), str(good), str(worse))
    assert code == 1
    assert out == f"{good}: valid\n"
    assert f"{bad}:1: lenght" in err
    assert f"{worse}:2: verify.rule" in err
    code, out, err = run("validate", "--json", str(bad), str(good))
    rows = [json.loads(line) for line in out.splitlines()]
    assert (code, err) == (1, "")
    assert [row["valid"] for row in rows] == [False, True]
    assert rows[0]["where"] == f"{bad}:1: lenght"
    assert run("validate", *shipped_recipes())[0] == 0


def test_recipes_and_schema_verbs(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in run("recipes", "--json")[1].splitlines()]
    assert [row["name"] for row in rows] == [*shipped_recipes(), *trained_recipes()]
    assert all(row["description"] and Path(row["path"]).is_file() for row in rows)
    assert "Plain decoding" in run("recipes")[1]
    code, out, err = run("schema", "--output", str(tmp_path / "schema.json"))
    assert (code, out) == (0, "")
    assert "wrote" in err
    assert json.loads((tmp_path / "schema.json").read_text()) == json.loads(run("schema")[1])


def test_checking_recipes_loads_no_torch() -> None:
    code = (
        "import sys, specflow.cli.validate as v\n"
        "v.validate(sys.argv[1:])\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'safetensors'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    files = [str(path) for path in shipped_recipes().values()]
    result = subprocess.run([sys.executable, "-c", code, *files], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("valid") == len(files)


@pytest.mark.parametrize("setting", ["name=" + "[" * 5000, "sampling.logit_bias.²=3", "draft.k=!!int x"])
def test_odd_settings_are_refused_by_name(setting: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("ngram", [setting])
    assert setting.partition("=")[0] in str(caught.value)

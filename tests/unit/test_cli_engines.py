"""`specflow export engine` and `specflow import`: what they print, write and refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from engine_meaning import made_costs
from typer.testing import CliRunner

from specflow.cli.app import app
from specflow.cost import ProfileKey, profile_data, save_profile
from specflow.errors import DataError, RecipeError
from specflow.recipe import load_recipe

GAIN = ("--set", "length.policy=expected_gain")
DSPARK = ("dspark", "--set", "draft.k=3", "--set", "draft.weights=w")


def call(*words: str) -> Result:
    result = CliRunner().invoke(app, list(words))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def profile(tmp_path: Path) -> str:
    key = ProfileKey({"name": "t"}, None, {"cpu_model": "c"})
    save_profile(tmp_path / "p.json", profile_data(key, made_costs(3), {}))
    return str(tmp_path / "p.json")


def test_an_export_is_a_command_its_files_and_what_got_lost() -> None:
    done = call("export", "engine", "vllm", "eagle2")
    assert "vllm serve" in done.stdout
    assert "# vllm.yaml" in done.stdout
    assert "not expressible: draft.shape" in done.stderr


def test_everything_is_one_json_object(profile: str) -> None:
    done = json.loads(call("export", "engine", "sglang", *DSPARK, *GAIN, "--profile", profile, "--json").stdout)
    assert done["engine"] == "sglang"
    assert {"sps_table.json", "sps_table_flat.json"} <= set(done["files"])
    assert any("--acceptance" in note for note in done["notes"])


def test_a_profile_becomes_a_batch_schedule(profile: str) -> None:
    words = ("export", "engine", "vllm", "eagle3", "--set", "draft.k=3", *GAIN, "--profile", profile, "--json")
    done = json.loads(call(*words).stdout)
    assert "num_speculative_tokens_per_batch_size" in " ".join(done["command"])
    never = json.loads(call(*words, "--acceptance", "0").stdout)
    assert "[[1, 16, 0]]" in " ".join(never["command"])


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt_llm", "llama_cpp"])
def test_a_profile_overrules_no_fixed_length(profile: str, engine: str) -> None:
    words = ("export", "engine", engine, "eagle3", "--set", "draft.k=3", "--set", "length.policy=fixed", "--json")
    plain = json.loads(call(*words).stdout)
    done = json.loads(call(*words, "--profile", profile, "--acceptance", "0").stdout)
    assert (done["command"], done["files"]) == (plain["command"], plain["files"])
    assert [note for note in done["notes"] if note not in plain["notes"]] == [
        "length.policy fixed: draft lengths do not follow the profile; --set length.policy=expected_gain does"
    ]


def test_files_are_written_with_a_script_that_starts_them(profile: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    call("export", "engine", "sglang", *DSPARK, *GAIN, "--profile", profile, "-o", str(out))
    names = {"request.json", "sps_table.json", "sps_table_flat.json", "launch.sh", "export.json"}
    assert {file.name for file in out.iterdir()} == names
    script = (out / "launch.sh").read_text()
    assert "exec env SGLANG_RAGGED_VERIFY_MODE=compact python -m sglang.launch_server" in script
    assert json.loads((out / "export.json").read_text())["versions"] == "0.5.23"
    with pytest.raises(DataError):
        call("export", "engine", "sglang", "ngram", "-o", str(out))


def test_what_was_written_is_imported_again(tmp_path: Path) -> None:
    for engine, file in (("vllm", "launch.sh"), ("sglang", "launch.sh"), ("tensorrt_llm", "trtllm.yaml")):
        out = tmp_path / engine
        call("export", "engine", engine, "eagle3", "--set", "draft.weights=some/drafter", "-o", str(out))
        call("import", engine, str(out / file), "-o", str(tmp_path / "back.yaml"))
        back = load_recipe(tmp_path / "back.yaml").draft
        assert back is not None
        assert (back.k, back.parts[0].options.weights) == (5, "some/drafter")  # type: ignore[attr-defined]


def test_an_import_prints_the_recipe_and_what_is_wrong() -> None:
    done = call("import", "vllm", "--", "vllm", "serve", "t", "-sc", '{"method": "ngram", "num_speculative_tokens": 4}')
    assert "min_match: 5" in done.stdout
    assert "warning: prompt_lookup_min: none" in done.stderr
    row = json.loads(call("import", "--json", "vllm", "vllm serve t --spec-method ngram --spec-tokens 4").stdout)
    assert row["recipe"]["draft"]["k"] == 4
    assert row["findings"]


def test_an_imported_recipe_says_that_it_needs_a_profile() -> None:
    line = '{"method": "ngram", "num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": [[1, 8, 4]]}'
    assert "specflow profile" in call("import", "vllm", "--", "vllm", "serve", "t", "-sc", line).stdout
    line = '{"method": "ngram", "num_speculative_tokens": 4}'
    assert "specflow profile" not in call("import", "vllm", "--", "vllm", "serve", "t", "-sc", line).stdout


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("export", "engine", "vlm", "ngram"), "did you mean vllm"),
        (("export", "engine", "vllm", "ngram", "--engine-version", "0.1"), "older than every known"),
        (("import", "sglan", "x"), "did you mean sglang"),
        (("import", "vllm", "no-such-file.yaml"), "cannot be read"),
        (("import", "tensorrt_llm", "trtllm-serve t --spec-x y"), None),
    ],
)
def test_mistakes_are_our_errors(words: tuple[str, ...], hint: str | None) -> None:
    if hint is None:
        assert "vanilla" in call(*words).stdout
        return
    with pytest.raises(RecipeError, match=hint):
        call(*words)


def test_a_version_newer_than_any_checked_is_said() -> None:
    assert "newer than 0.33.0" in call("export", "engine", "vllm", "ngram", "--engine-version", "0.40.0").stderr


def test_carried_costs_are_a_profile(tmp_path: Path) -> None:
    from specflow.cost_table import costs_section
    from specflow.recipe import dump_recipe, parse_recipe, recipe_data

    recipe = load_recipe("eagle3", ["draft.k=3", "draft.weights=w", "length.policy=expected_gain"])
    carried: dict[str, Any] = recipe_data(recipe)
    section = costs_section(ProfileKey({"name": "t"}, None, {"cpu_model": "c"}), made_costs(3))
    carried["runtime"] = {"costs": section.model_dump(exclude_defaults=True)}
    file = tmp_path / "tuned.yaml"
    file.write_text(dump_recipe(parse_recipe(carried)))
    done = json.loads(call("export", "engine", "vllm", str(file), "--json").stdout)
    assert "num_speculative_tokens_per_batch_size" in " ".join(done["command"])

"""The README says what the results files say, and its code runs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from specflow.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def benchmark(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_the_one_made_from_the_results_files() -> None:
    made = benchmark("spine")
    shown = README.split(made.BEGIN)[1].split(made.END)[0].strip()
    assert shown == made.table().strip()
    assert "| vanilla |" in shown


def test_the_tables_of_drafters_are_made_from_their_files() -> None:
    made, folder = benchmark("drafter_tables"), ROOT / "drafters"
    drafters = made.shipped(folder / "smollm2-135m", ROOT / "docs" / "figures" / "drafters")
    shown = README.split(made.BEGIN)[1].split(made.END)[0].strip()
    assert shown == "\n".join(made.accepted_table(drafters))
    assert "| eagle3 |" in shown
    assert (folder / "README.md").read_text(encoding="utf-8") == made.page(drafters)


def test_the_recipe_that_is_read_aloud_is_a_recipe(tmp_path: Path) -> None:
    block = re.search(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert block is not None
    path = tmp_path / "readme.yaml"
    path.write_text(block.group(1), encoding="utf-8")
    assert load_recipe(str(path)).draft is not None


def test_the_graph_in_python_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    block = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert block is not None
    code = block.group(1)
    assert len([line for line in code.splitlines() if line.startswith("g.")]) < 15
    exec(code.split("engine = ")[0] + "recipe = g.check().to_recipe()", names := {})  # type: ignore[var-annotated]
    assert names["recipe"].draft.index == "suffix"

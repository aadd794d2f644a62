"""The house rules that a machine can check: import arrows, sizes, names, and what stays light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("specflow", "tuner")

DECLARATIVE = (
    "recipe",
    "recipe_draft",
    "recipe_sections",
    "recipe_yaml",
    "graph",
    "graph_parts",
    "graph_checks",
    "draw",
    "svg",
)
"""What a user writes and sees: recipes, graphs and their pictures."""

VERIFY = ("verify", "verify_rows", "verify_tree")
LENGTH = ("length", "length_base", "length_match", "length_confidence", "length_gain")

LEVELS: tuple[tuple[str, ...], ...] = (
    ("errors", "allocator"),
    ("types",),
    ("calibration", "device", "tree", "law", "noise", "rules", "sampling", "measure", "files", "provenance", "sealed"),
    ("target", "checkpoint", "draft", "onnx", *VERIFY, *LENGTH, "text", "request", "handover"),
    ("engine", *DECLARATIVE),
    ("cost", "cost_table", "curves", "plot"),
    ("build",),
    ("bench", "profiling", "export"),
    ("search", "train"),
    ("cli", "__main__"),
)
"""Parts of specflow by level: a part imports parts of its own level and below, never above."""

FORBIDDEN = {
    "engine": (*DECLARATIVE, "build", "cli"),
    "draft": (*VERIFY, *LENGTH, "engine", "build", "cli"),
    "target": (*VERIFY, *LENGTH, "sampling", "engine", "build", "cli"),
    "onnx": (*VERIFY, *LENGTH, "sampling", "engine", "build", "cli"),
    **dict.fromkeys(VERIFY, ("target", "draft", *LENGTH)),
    **dict.fromkeys(LENGTH, ("target", "draft", *VERIFY)),
}
"""Arrows that levels alone do not forbid."""

TORCH_FREE = (*DECLARATIVE, "rules", "draft.registry", "draft.shapes")
"""Modules that validate recipes and draw graphs: no torch at module level, and nothing that brings it."""

HEAVY = ("torch", "transformers", "onnxruntime", "optuna")
VAGUE = {"utils", "util", "helpers", "helper", "manager", "common", "misc"}
MAX_FILE, MAX_ENGINE, MAX_FUNCTION, MAX_ARGUMENTS = 400, 250, 40, 6
LONG_SIGNATURES = {"forward": "the arguments of `Target.forward` are a protocol that DESIGN.md section 4 fixes"}


@dataclass(frozen=True)
class Import:
    """One import of a module of ours or of others, by its full name."""

    module: str
    line: int
    at_run_time: bool  # false under `if TYPE_CHECKING`
    at_module_level: bool


@dataclass(frozen=True)
class Source:
    """A parsed source file."""

    path: Path
    name: str  # dotted, from the package
    tree: ast.Module

    @property
    def part(self) -> str:
        """The part of the package it belongs to; "" for the package itself."""
        return self.name.split(".")[1] if "." in self.name else ""

    @property
    def where(self) -> str:
        return str(self.path.relative_to(ROOT))

    def imports(self) -> Iterator[Import]:
        yield from _imports(self.tree, self.name if self.path.stem == "__init__" else self.name.rpartition(".")[0])


def _imports(node: ast.AST, package: str, typing: bool = False, nested: bool = False) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, not typing, not nested)
        elif isinstance(child, ast.ImportFrom):
            base = child.module or ""
            if child.level:
                above = package.split(".")[: len(package.split(".")) - child.level + 1]
                base = ".".join([*above, *([child.module] if child.module else [])])
            for alias in child.names:
                yield Import(f"{base}.{alias.name}", child.lineno, not typing, not nested)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from _imports(ast.Module(child.body, []), package, True, nested)
            yield from _imports(ast.Module(child.orelse, []), package, typing, nested)
        else:
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from _imports(child, package, typing, nested or inside)


@cache
def sources() -> tuple[Source, ...]:
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found.append(Source(path, name, ast.parse(path.read_text(encoding="utf-8"))))
    return tuple(found)


def part_of(module: str) -> str:
    pieces = module.split(".")
    return pieces[1] if pieces[0] == "specflow" and len(pieces) > 1 else ""


def module_named(name: str) -> Source | None:
    """The module a dotted name belongs to: itself, or the one it names something of."""
    by_name = {source.name: source for source in sources()}
    return by_name.get(name) or by_name.get(name.rpartition(".")[0])


def test_there_is_something_to_check() -> None:
    names = {source.name for source in sources()}
    assert {"specflow.engine", "specflow.target.base", "specflow.draft.base", "specflow.cli"} <= names
    found = [each.module for source in sources() if source.name == "specflow.engine" for each in source.imports()]
    assert any(module.startswith("specflow.types.") for module in found)


def test_every_part_has_its_level() -> None:
    placed = {part for parts in LEVELS for part in parts}
    found = {source.part for source in sources() if source.name.startswith("specflow.")}
    assert found <= placed, f"say in LEVELS where {sorted(found - placed)} belong"


def test_imports_point_down() -> None:
    level = {part: index for index, parts in enumerate(LEVELS) for part in parts}
    wrong = [
        f"{source.where}:{each.line} imports {each.module}"
        for source in sources()
        for each in source.imports()
        if source.part in level and level.get(part_of(each.module), -1) > level[source.part] and each.at_run_time
    ]
    assert not wrong, "\n".join(wrong)


def test_parts_that_do_not_know_each_other() -> None:
    wrong = [
        f"{source.where}:{each.line} imports {each.module}"
        for source in sources()
        for each in source.imports()
        if source.part in FORBIDDEN and part_of(each.module) in FORBIDDEN[source.part] and each.at_run_time
    ]
    assert not wrong, "\n".join(wrong)


def test_the_engine_does_not_know_graphs() -> None:
    engine = module_named("specflow.engine")
    assert engine is not None
    assert not [each.module for each in engine.imports() if each.module.split(".")[0] == "networkx"]


def test_specflow_never_imports_the_tuner() -> None:
    wrong = [
        f"{source.where}:{each.line}"
        for source in sources()
        for each in source.imports()
        if source.name.startswith("specflow") and each.module.split(".")[0] == "tuner"
    ]
    assert not wrong, "\n".join(wrong)


def test_specflow_does_not_name_the_tuner_either() -> None:
    """Its verbs are found through entry points: nothing in specflow spells a module of it, to import it by name."""
    wrong = [
        f"{source.where}:{node.lineno} {node.value!r}"
        for source in sources()
        for node in ast.walk(source.tree)
        if source.name.startswith("specflow")
        and isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"tuner([.:]\w+)*", node.value)
    ]
    assert not wrong, "\n".join(wrong)


def exported(source: Source) -> set[str]:
    """What a module lists in `__all__`."""
    for node in source.tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and "__all__" in ast.unparse(node).split("=")[0]:
            return set(ast.literal_eval(node.value)) if node.value is not None else set()
    return set()


def test_the_tuner_uses_public_names_only() -> None:
    """A module of specflow, or a name that its module lists in `__all__`."""
    by_name = {source.name: source for source in sources()}
    wrong = []
    for source in sources():
        for each in source.imports():
            if not source.name.startswith("tuner") or not each.module.startswith("specflow"):
                continue
            module, _, name = each.module.rpartition(".")
            public = each.module in by_name or (module in by_name and name in exported(by_name[module]))
            if not public or any(piece.startswith("_") for piece in each.module.split(".")):
                wrong.append(f"{source.where}:{each.line} imports {each.module}")
    assert not wrong, "\n".join(wrong)


def brings(source: Source, heavy: str, trail: tuple[str, ...] = (), seen: set[str] | None = None) -> str:
    """How importing a module reaches a heavy package at module level; empty where it does not.

    A module that was `seen` is not followed again: the ways through the imports are too many to walk them all.
    """
    seen = set() if seen is None else seen
    if source.name in seen:
        return ""
    seen.add(source.name)
    trail = (*trail, source.name)
    for each in source.imports():
        if not (each.at_run_time and each.at_module_level):
            continue
        if each.module.split(".")[0] == heavy:
            return " -> ".join((*trail, f"{each.module} (line {each.line})"))
        if each.module.split(".")[0] in PACKAGES:
            inner = module_named(each.module)
            if inner is not None and (way := brings(inner, heavy, trail, seen)):
                return way
    return ""


@pytest.mark.parametrize("heavy", ["torch", "transformers"])
def test_recipes_and_graphs_are_light(heavy: str) -> None:
    checked = [source for source in sources() if source.name.removeprefix("specflow.") in TORCH_FREE]
    assert {"specflow.recipe", "specflow.graph"} <= {source.name for source in checked}
    ways = [way for source in checked if (way := brings(source, heavy))]
    assert not ways, "\n".join(ways)


def test_light_modules_are_all_named() -> None:
    """A new file beside recipe.py or graph.py is held to the same rule."""
    found = {
        source.name.removeprefix("specflow.")
        for source in sources()
        if source.name.startswith(("specflow.recipe", "specflow.graph"))
    }
    assert found <= set(TORCH_FREE), f"add {sorted(found - set(TORCH_FREE))} to TORCH_FREE"


@pytest.mark.parametrize("command", ["import specflow", "from specflow.cli import main; main()"])
def test_import_and_help_stay_light(command: str) -> None:
    program = (
        "import sys, atexit\n"
        f"atexit.register(lambda: print('HEAVY', *[name for name in {HEAVY!r} if name in sys.modules]))\n"
        "sys.argv = ['specflow', '--help']\n"
        f"{command}\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split() == ["HEAVY"], done.stdout
    assert "main" not in command or "Usage" in done.stdout


def test_files_fit_their_size() -> None:
    wrong = []
    for source in sources():
        limit = MAX_ENGINE if source.name == "specflow.engine" else MAX_FILE
        lines = len(source.path.read_text(encoding="utf-8").splitlines())
        if lines > limit:
            wrong.append(f"{source.where}: {lines} lines, at most {limit}")
    assert not wrong, "\n".join(wrong)


def functions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def length_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of code: the docstring explains and is not counted."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def test_functions_fit_a_screen() -> None:
    wrong = [
        f"{source.where}:{function.lineno} {function.name}: {length_of(function)} lines, at most {MAX_FUNCTION}"
        for source in sources()
        for function in functions(source)
        if length_of(function) > MAX_FUNCTION
    ]
    assert not wrong, "\n".join(wrong)


def is_verb(source: Source, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A typer command, named as its file: its parameters are the command line's options and cannot be fewer."""
    return source.part == "cli" and function.name == source.path.stem


def count_arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    spec = function.args
    names = [each.arg for each in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)]
    return len(names) - (bool(names) and names[0] in ("self", "cls"))


def test_signatures_are_short() -> None:
    wrong = [
        f"{source.where}:{function.lineno} {function.name}: {count_arguments(function)} of at most {MAX_ARGUMENTS}"
        for source in sources()
        for function in functions(source)
        if count_arguments(function) > MAX_ARGUMENTS
        and not (source.part == "target" and function.name in LONG_SIGNATURES)
        and not is_verb(source, function)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_module_says_what_it_offers() -> None:
    wrong = []
    for source in sources():
        assigned = [node for node in source.tree.body if isinstance(node, (ast.Assign, ast.AnnAssign))]
        names = {
            ast.unparse(target)
            for node in assigned
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        }
        if "__all__" not in names:
            wrong.append(source.where)
    assert not wrong, "no __all__ in:\n" + "\n".join(wrong)


def test_every_module_has_a_docstring() -> None:
    wrong = [source.where for source in sources() if not ast.get_docstring(source.tree)]
    assert not wrong, "no docstring in:\n" + "\n".join(wrong)


def test_no_vague_names() -> None:
    wrong = []
    for source in sources():
        words = set(source.name.split(".")) | {word for piece in source.name.split(".") for word in piece.split("_")}
        if words & VAGUE:
            wrong.append(f"{source.where}: {', '.join(sorted(words & VAGUE))}")
    assert not wrong, "\n".join(wrong)


def test_nothing_is_seeded_globally() -> None:
    """All randomness is keyed by (seed, row, position)."""
    calls = ("torch.manual_seed", "random.seed", "np.random.seed", "numpy.random.seed", "transformers.set_seed")
    wrong = [
        f"{source.where}:{node.lineno} {ast.unparse(node.func)}"
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in calls
    ]
    assert not wrong, "\n".join(wrong)


class TestTheChecksThemselves:
    """Each check above can fail."""

    def parse(self, text: str, name: str = "specflow.engine") -> Source:
        return Source(ROOT / f"{name.replace('.', '/')}.py", name, ast.parse(text))

    def test_imports_are_found_wherever_they_stand(self) -> None:
        text = (
            "from typing import TYPE_CHECKING\nimport a.b\nfrom . import tree\nfrom .target import cache\n"
            "if TYPE_CHECKING:\n    from x import y\nelse:\n    import z\n"
            "def f():\n    import torch\nclass C:\n    from q import r\n"
        )
        found = {each.module: (each.at_run_time, each.at_module_level) for each in self.parse(text).imports()}
        assert found["specflow.tree"] == (True, True)
        assert found["specflow.target.cache"] == (True, True)
        assert found["x.y"] == (False, True)
        assert found["z"] == (True, True)
        assert found["torch"] == (True, False)
        assert found["q.r"] == (True, True)

    def test_heavy_imports_are_found_through_others(self) -> None:
        way = brings(self.parse("from specflow.target import transformer", "specflow.recipe"), "torch")
        assert "specflow.recipe -> specflow.target.transformer -> " in way

    def test_lines_and_arguments_are_counted(self) -> None:
        text = "def f(self, a, *, b, **c):\n    '''One\n    two.'''\n    x = 1\n    return x\n"
        function = next(functions(self.parse(text)))
        assert (length_of(function), count_arguments(function)) == (3, 2)

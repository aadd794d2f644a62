"""YAML with line numbers: what a recipe file says, and where each key was written. No torch.

Scalars follow YAML 1.2 (`1e-3` is a number, `on`, `off` and `no` are words), because PyYAML's own 1.1 rules surprise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from specflow.errors import RecipeError

__all__ = ["Document", "read_yaml", "split_key", "write_yaml"]

Path = tuple[Any, ...]

NULL = re.compile(r"~|null|Null|NULL|")
BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
SCALARS = (("null", NULL), ("bool", BOOL), ("int", INT), ("float", FLOAT))
TAG = "tag:yaml.org,2002:"


READERS: dict[str, Callable[[str], Any]] = {
    "str": str,
    "null": lambda _: None,
    "bool": lambda text: text.lower() == "true",
    "int": lambda text: int(text, 0) if text[:2] in ("0o", "0x") else int(text),
    "float": lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012  (PyYAML's own class attribute)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """In double quotes, with escapes, where plain style would lose a character such as U+0085."""
    return dumper.represent_scalar(TAG + "str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _represent_text)
for _class in (_Loader, _Dumper):
    for _name, _pattern in SCALARS:
        _class.add_implicit_resolver(TAG + _name, re.compile(rf"^(?:{_pattern.pattern})$"), None)


@dataclass
class Document:
    """Data of a recipe and the origin of each key.

    Attributes:
        name: File name, for errors.
        data: Mappings, tuples and scalars.
        origins: Path of keys -> "FILE:LINE", or the --set that wrote it.
    """

    name: str
    data: dict[Any, Any]
    origins: dict[Path, str] = field(default_factory=dict)

    def origin(self, path: Path) -> str:
        """Where the key, or else the nearest section around it, was written."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return self.name

    def override(self, setting: str) -> None:
        """Apply one `key.key=value`; the value is read as YAML."""
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise RecipeError(f"--set {setting}", "no key=value", "for example draft.k=5")
        self.set(key.strip(), _parse(text, f"--set {setting}", Document(f"--set {setting}", {})), "--set")

    def set(self, key: str, value: Any, reason: str) -> None:
        """Write one dotted key; sections on the way are made where missing, items of a list go by their number."""
        path = split_key(key)
        self.data = self._written(self.data, path, (), value, f"{reason} {key}")
        for known in [known for known in self.origins if known[: len(path)] == path]:
            del self.origins[known]
        self.origins[path] = f"{reason} {key}"

    def _written(self, section: Any, path: Path, above: Path, value: Any, where: str) -> Any:
        """The section with a value at a path in it; `above` leads to the section."""
        if not path:
            return value
        part, rest, here = path[0], path[1:], (*above, path[0])
        if section is None:
            section = {}
            self.origins.setdefault(above, where)
        if isinstance(section, dict):
            section[part] = self._written(section.get(part), rest, here, value, where)
            return section
        if not isinstance(section, list | tuple):
            raise RecipeError(where, f"{above[-1]} is not a section", "a key of a section")
        if not isinstance(part, int) or part >= len(section):
            raise RecipeError(
                where, f"{above[-1]} is a list of {len(section)}", f"a number from 0 to {len(section) - 1}"
            )
        items = list(section)
        items[part] = self._written(items[part], rest, here, value, where)
        return tuple(items)


def split_key(key: str) -> Path:
    """Path of a dotted key. Keys of `tune` are dotted themselves; keys made of digits are numbers (token ids)."""
    parts = key.split(".", 1 if key.startswith("tune.") else -1) if key else []
    return tuple(int(part) if part.isascii() and part.isdigit() else part for part in parts)


def read_yaml(text: str, name: str) -> Document:
    """Read a mapping. Duplicate keys, odd tags and endless aliases are errors with a line number."""
    document = Document(name, {})
    data = _parse(text, name, document)
    if not isinstance(data, dict):
        found = "an empty file" if data is None else f"a {_kind(data)}"
        raise RecipeError(name, found, "a mapping with keys such as target and draft")
    document.data = data
    return document


def write_yaml(data: Mapping[str, Any]) -> str:
    """Block style, keys in the given order; `read_yaml` gives the same data back."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def _parse(text: str, name: str, document: Document) -> Any:
    try:
        node = yaml.compose(text, Loader=_Loader)
    except RecursionError as error:
        raise RecipeError(name, "lists or mappings nested too deep", "a recipe of a few levels") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = name if mark is None else f"{name}:{mark.line + 1}"
        raise RecipeError(where, getattr(error, "problem", None) or str(error), "valid YAML") from error
    return None if node is None else _convert(node, document, (), ())


def _convert(node: yaml.Node, document: Document, path: Path, above: tuple[yaml.Node, ...]) -> Any:
    where = f"{document.name}:{node.start_mark.line + 1}"
    if any(node is other for other in above):
        raise RecipeError(where, "an alias of something it is part of", "data without loops")
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, document, path, (*above, node))
    if isinstance(node, yaml.SequenceNode):
        return tuple(_item(item, document, (*path, i), (*above, node)) for i, item in enumerate(node.value))
    return _scalar(node, where)


def _item(node: yaml.Node, document: Document, path: Path, above: tuple[yaml.Node, ...]) -> Any:
    document.origins[path] = f"{document.name}:{node.start_mark.line + 1}"
    return _convert(node, document, path, above)


def _mapping(node: yaml.MappingNode, document: Document, path: Path, above: tuple[yaml.Node, ...]) -> dict[Any, Any]:
    data: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        where = f"{document.name}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise RecipeError(where, "a key that is itself a list or mapping", "a word")
        key = _scalar(key_node, where)
        here = (*path, key)
        if key in data:
            dotted = ".".join(map(str, here))
            raise RecipeError(f"{where}: {dotted}", "the key a second time", f"once; first at {document.origins[here]}")
        document.origins[here] = where
        data[key] = _convert(value_node, document, here, above)
    return data


def _scalar(node: yaml.Node, where: str) -> Any:
    tag, text = node.tag.removeprefix(TAG), str(node.value)
    if tag not in READERS:
        raise RecipeError(where, f"tag {node.tag}", "plain YAML without tags")
    try:
        return READERS[tag](text)
    except ValueError as error:
        raise RecipeError(where, f"{text!r}", f"a value of type {tag}") from error


def _kind(data: Any) -> str:
    return "list" if isinstance(data, Sequence) and not isinstance(data, str) else f"value ({data!r})"

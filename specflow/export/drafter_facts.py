"""What a drafter's own config.json, or its published name, says about the blocks it was trained for. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["DrafterFacts", "facts_of"]

LARGEST = 4 << 20  # bytes of a config.json that are read


@dataclass(frozen=True, slots=True)
class DrafterFacts:
    """What is known of a drafter without loading it; None is unknown.

    Attributes:
        trained_k: Draft tokens of a block it was trained for, the bonus token excluded.
        modules: Draft tokens of one pass, of which a block must be a multiple (MTP modules: `n_predict`).
        max_positions: Positions it was trained for.
        temperatures: Of its confidence head, one a draft position.
        source: Where this was read: "config.json" or "name"; "" where nothing is known.
        own_ids: A language model over a part of the target's vocabulary, as `specflow train` writes it.
    """

    trained_k: int | None = None
    modules: int | None = None
    max_positions: int | None = None
    temperatures: tuple[float, ...] = ()
    source: str = ""
    own_ids: bool = False


def facts_of(path: str | None, family: str) -> DrafterFacts:
    """What is known of a drafter.

    Args:
        path: Local folder or hub id; None where there is none.
        family: Method it belongs to: whether the anchor's slot predicts a token depends on it.
    """
    if not path:
        return DrafterFacts()
    config = _config(Path(path))
    return _from_config(config, family) if config is not None else _from_name(path)


def _config(folder: Path) -> Mapping[str, Any] | None:
    """config.json of a local folder, or None. What is no JSON object is the engine's to refuse."""
    file = folder / "config.json"
    try:
        if not file.is_file() or file.stat().st_size > LARGEST:
            return None
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _from_config(config: Mapping[str, Any], family: str) -> DrafterFacts:
    inner = config.get("dflash_config")
    nested = inner if isinstance(inner, Mapping) else {}
    block = next((size for place in (config, nested) if (size := _whole(place.get("block_size")))), None)
    block = block or _whole(config.get("dspark_block_size"))
    shifted = config["layout"] == "shifted" if "layout" in config else family == "dspark"
    trained = next(_published_lengths(config), None) or (block if shifted or block is None else max(1, block - 1))
    modules = _whole(config.get("n_predict")) or _whole(config.get("num_nextn_predict_layers"))
    positions = _whole(config.get("max_positions")) or _whole(config.get("max_position_embeddings"))
    given = config.get("temperatures")
    numbers = given if isinstance(given, list) and all(_is_temperature(each) for each in given) else ()
    return DrafterFacts(trained, modules, positions, tuple(map(float, numbers)), "config.json", _has_own_ids(config))


def _has_own_ids(config: Mapping[str, Any]) -> bool:
    return str(config.get("model_type")).startswith("specflow_")


def _published_lengths(config: Mapping[str, Any]) -> Iterator[int]:
    """`speculators_config.proposal_methods[*].speculative_tokens`."""
    section = config.get("speculators_config")
    methods = section.get("proposal_methods") if isinstance(section, Mapping) else None
    for method in methods if isinstance(methods, list) else ():
        if isinstance(method, Mapping) and (tokens := _whole(method.get("speculative_tokens"))):
            yield tokens


def _from_name(path: str) -> DrafterFacts:
    """`-b16` is a block of 16 slots of which the anchor's predicts nothing; `_block7` drafts 7 tokens."""
    if match := re.search(r"[-_]b(\d{1,3})$", path):
        return DrafterFacts(trained_k=max(1, int(match[1]) - 1), source="name")
    if match := re.search(r"[-_]block(\d{1,3})$", path):
        return DrafterFacts(trained_k=max(1, int(match[1])), source="name")
    return DrafterFacts()


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 40 else None


def _is_temperature(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 < value < float("inf")

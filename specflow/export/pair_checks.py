"""What is known to go wrong between a target, its drafter and a draft length, found without loading them. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specflow.export.drafter_facts import LARGEST, facts_of
from specflow.export.engines.base import Finding

__all__ = ["RARE_MATCH", "check_block", "check_match", "check_pair"]

RARE_MATCH = 8
"""Shortest match, in tokens, from which on a lookup fires in copies of the text and hardly anywhere else."""

BLOCK_FAMILIES = ("dflash", "dspark")
MODULE_FAMILIES = ("mtp",)


def check_block(k: int, path: str | None, family: str, where: str) -> Iterator[Finding]:
    """Draft length against what the drafter was trained for.

    Args:
        k: Draft tokens of a round, the bonus token excluded.
        path: Folder or hub id of the drafter.
        family: Its method.
        where: Flag or key that says k.
    """
    facts = facts_of(path, family)
    trained, modules = facts.trained_k, facts.modules
    if family in BLOCK_FAMILIES and trained is not None and k > trained:
        meaning = f"above the {trained} tokens of the drafter's trained block ({facts.source}): the rest is untrained"
        yield Finding("warning", where, f"{k} draft tokens", meaning, f"{trained} draft tokens")
    elif family in BLOCK_FAMILIES and trained is not None and k < trained:
        meaning = f"below the {trained} of the trained block ({facts.source}): reports differ on what that costs"
        yield Finding("note", where, f"{k} draft tokens", meaning, "measure both")
    if family in MODULE_FAMILIES and modules is not None and k > modules and k % modules:
        fix = f"{k // modules * modules} or {(k // modules + 1) * modules}"
        yield Finding("error", where, f"{k} draft tokens", f"not divisible by the drafter's {modules} modules", fix)


def check_match(shortest: int, where: str) -> Iterator[Finding]:
    """The shortest match of a lookup in earlier text."""
    if shortest >= RARE_MATCH:
        meaning = "matches this long are rare outside copies of the prompt: many texts are never drafted for"
        yield Finding("warning", where, f"a shortest match of {shortest} tokens", meaning, "1 to 4, and look at hits")


def check_pair(target: str, drafter: str | None, family: str, context: int | None) -> Iterator[Finding]:
    """A drafter against its target, where both are local folders.

    Args:
        target: Folder of the target; a hub id says nothing.
        drafter: Folder of the drafter.
        family: Its method.
        context: Most positions of a request; None is the target's own limit.
    """
    here, there = _config(target), _config(drafter or "")
    if family == "small_model":
        yield from _check_text(target, str(drafter), here, there)
    limit = context or here.get("max_position_embeddings")
    reach = facts_of(drafter, family).max_positions
    if reach is not None and type(limit) is int and reach < limit:
        meaning = "beyond them its drafts are poor, and some versions crash"
        found = f"trained for {reach} positions, requests may have {limit}"
        yield Finding("warning", str(drafter), found, meaning, f"a context of at most {reach}, or a longer drafter")
    kinds = there.get("layer_types")
    if family in BLOCK_FAMILIES and isinstance(kinds, list) and "sliding_attention" in kinds:
        meaning = "run with full attention, acceptance falls to nothing after a few positions"
        fix = "after the launch, look at acceptance by position"
        yield Finding("note", str(drafter), f"{kinds.count('sliding_attention')} layers with a window", meaning, fix)


def _check_text(target: str, drafter: str, here: dict[str, Any], there: dict[str, Any]) -> Iterator[Finding]:
    """Whether two language models read the same ids and the same template."""
    size, other = here.get("vocab_size"), there.get("vocab_size")
    if type(size) is int and type(other) is int and size != other:
        meaning = "the same ids may mean different tokens; where only padding differs, all shared ids must agree"
        fix = (
            "compare the tokenizers id by id; pad the smaller embedding, or take a drafter of the same family. Other "
            "tokenizers work with vLLM's use_heterogeneous_vocab and transformers' assistant_tokenizer"
        )
        yield Finding("error", drafter, f"vocabulary of {other}, the target's has {size}", meaning, fix)
    first, second = (_config(folder, "tokenizer_config.json") for folder in (target, drafter))
    for key, name in (("bos_token", "first token"), ("chat_template", "chat template")):
        if key in first and key in second and first[key] != second[key]:
            meaning = "engines give both models the target's ids: a drafter used to others agrees less"
            yield Finding(
                "warning", drafter, f"another {name} than the target's", meaning, "a drafter of the same kind"
            )


def _config(folder: str, name: str = "config.json") -> dict[str, Any]:
    try:
        file = Path(folder) / name
        if not folder or not file.is_file() or file.stat().st_size > LARGEST:
            return {}
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}

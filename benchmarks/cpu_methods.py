"""What is measured: our recipes and the peers, as data, and how each becomes a method.

What cannot be had (a package that did not install, a type this version does not know) is left out with its reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpu_models import SCRIPTS, peer_model
from cpu_worker import WorkerMethod, WorkerProcess

from specflow.bench import EngineMethod, Method
from specflow.bench.methods import engine_facts
from specflow.errors import ModelError, SpecFlowError

if TYPE_CHECKING:
    from specflow.build import LoadedTarget
    from specflow.target.base import Target

__all__ = ["BASELINE", "OURS", "PEERS", "RECIPES", "SYSTEM", "THREADS", "Field", "Scores", "load_field"]

THREADS = 2
SYSTEM = "specflow"
RECIPES = ("vanilla", "ngram", "suffix")
OURS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("float32", ("target.dtype=float32",)),
    ("bfloat16", ("target.dtype=bfloat16",)),
    ("int8", ("target.dtype=int8", "target.runtime=onnx")),
    ("int8-openvino", ("target.dtype=int8", "target.runtime=openvino")),
    ("int4", ("target.dtype=int4",)),
)
"""Type of the weights -> settings of all recipes. The first one's plain decoding is what texts are compared with."""

PEERS: tuple[tuple[str, tuple[str, ...], tuple[int, ...]], ...] = (
    ("openvino-genai", ("float32", "bfloat16", "int8", "int8-float32"), (3, 5, 10)),
    ("llama.cpp", ("F32", "BF16", "Q8_0", "Q4_1"), (3, 10)),
    ("onnxruntime-genai", ("float32", "int8", "int4"), (3, 10)),
    ("transformers", ("float32", "bfloat16"), (3, 10)),
)
"""Peer, types in its own words, draft tokens a round of its prompt lookup."""

BASELINE = f"{SYSTEM} {OURS[0][0]} vanilla"
SCORED_ROWS = 32  # as wide as passes that verify

Scores = Callable[[Sequence[int]], dict[str, list[Any]]]
"""Tokens -> best (likeliest next token after each) and surprise (nats of each next one, the last has none)."""


@dataclass(slots=True)
class Field:
    """Everybody who takes part, and why others do not."""

    methods: list[Method] = field(default_factory=list)
    scores: dict[str, Scores] = field(default_factory=dict)  # by "system dtype"
    versions: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)  # "system dtype" -> reason
    encode: Callable[[Sequence[dict[str, str]]], Sequence[int]] | None = None


def load_field(python: Path, root: Path, stack: ExitStack, only: Sequence[str] = ()) -> Field:
    """Load our models and start the peers.

    Args:
        python: Interpreter of the peers' environment.
        root: Holds converted models and logs.
        stack: Ends the workers.
        only: Systems to measure beside the baseline's; all by default.
    """
    found = Field()
    decode = _add_ours(found)
    for system, dtypes, lookups in PEERS:
        for dtype in dtypes if not only or system in only else ():
            name = f"{system} {dtype}"
            try:
                worker = _start(system, dtype, python, root)
            except SpecFlowError as error:
                found.missing[name] = _why(system, python, error)
                continue
            stack.callback(worker.close)
            found.versions |= worker.versions
            found.scores[name] = partial(_peer_scores, worker)
            found.methods += [WorkerMethod(system, dtype, worker, k, decode) for k in (None, *lookups)]
    return found


def _start(system: str, dtype: str, python: Path, root: Path) -> WorkerProcess:
    if not python.exists():
        raise ModelError(system, f"there is no {python}", "the peers' environment", "make bench-cpu")
    model = peer_model(system, dtype, python, root / "models")
    command = [str(python), str(SCRIPTS / "serve.py"), system, str(model), dtype, str(THREADS)]
    return WorkerProcess(f"{system} {dtype}", command, root / "logs" / f"{system}-{dtype}.log")


def _why(system: str, python: Path, error: SpecFlowError) -> str:
    """The installer's reason where it has one, else what went wrong just now."""
    notes = python.parent.parent / "installed.json"
    if notes.exists():
        reason = json.loads(notes.read_text(encoding="utf-8")).get(system)
        if reason:
            return f"not installed: {reason}"
    return " ".join(str(error).split())


def _add_ours(found: Field) -> Callable[[Sequence[int]], str]:
    from specflow.build import load_target
    from specflow.recipe import load_recipe

    decode: Callable[[Sequence[int]], str] | None = None
    for dtype, settings in OURS:
        name = f"{SYSTEM} {dtype}"
        try:
            section = load_recipe("vanilla", [*settings, f"target.threads={THREADS}"]).target
            loaded = load_target(section)
            methods = [_our_method(recipe, dtype, settings, loaded) for recipe in RECIPES]
        except SpecFlowError as error:
            if decode is None:
                raise  # nothing can be compared without the baseline
            found.missing[name] = " ".join(str(error).split())
            continue
        if decode is None:
            decode, found.encode = loaded.codec.decode, loaded.codec.encode_chat
        found.methods += methods
        found.scores[name] = partial(_our_scores, loaded.target)
    assert decode is not None
    return decode


def _our_method(name: str, dtype: str, settings: Sequence[str], loaded: LoadedTarget) -> EngineMethod:
    from specflow.build import build_engine
    from specflow.recipe import load_recipe

    recipe = load_recipe(name, [*settings, f"target.threads={THREADS}"])
    engine = build_engine(recipe, loaded)
    facts = engine_facts(engine, recipe.verify.lossy)
    facts |= {"dtype": dtype, "system": SYSTEM, "drafts": recipe.draft is not None}
    return EngineMethod(f"{SYSTEM} {dtype} {name}", engine, recipe.sampling, facts)


def _peer_scores(worker: WorkerProcess, tokens: Sequence[int]) -> dict[str, list[Any]]:
    return worker.ask({"score": list(tokens)})


def _our_scores(target: Target, tokens: Sequence[int]) -> dict[str, list[Any]]:
    import torch

    cache = target.new_cache(1, len(tokens))
    parts = []
    for begin in range(0, len(tokens), SCORED_ROWS):
        rows = torch.tensor([tokens[begin : begin + SCORED_ROWS]])  # [1, M]
        positions = torch.arange(begin, begin + rows.shape[1]).unsqueeze(0)
        parts.append(target.forward(rows, positions, cache).logits[0].double())  # [M, V]
        cache.keep([rows.shape[1]])
    logits = torch.cat(parts)
    laws = logits.log_softmax(-1)
    said = laws[:-1].gather(-1, torch.tensor(tokens[1:]).unsqueeze(-1)).squeeze(-1)
    return {"best": logits.argmax(-1).tolist(), "surprise": (-said).tolist()}

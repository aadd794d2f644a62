"""Opens a target in the runtime that suits model, dtype and device; `auto` measures once and remembers.

torch: the native decoder, or transformers for any other model. onnx: graphs of the native families in ONNX Runtime.
openvino: the same in OpenVINO, where it is installed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Literal

import torch

from specflow.errors import ModelError, SpecFlowError
from specflow.files import replace_text
from specflow.onnx.store import GraphStore
from specflow.onnx.writer import WRITER_VERSION
from specflow.provenance import cpu_model, package_version
from specflow.target.architecture import NATIVE_FAMILIES, native_refusal
from specflow.target.base import TargetOptions
from specflow.target.huggingface import load_huggingface
from specflow.target.load import read_tensors
from specflow.target.onnx import ONNX_RUNTIME, OPENVINO, GraphRuntime, OnnxTarget, model_graphs
from specflow.target.store import ModelFiles, cache_dir, model_identity
from specflow.target.transformer import NativeTarget

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from specflow.target.base import Target

__all__ = ["Opening", "Runtime", "open_target"]

log = logging.getLogger(__name__)

Runtime = Literal["auto", "torch", "onnx", "openvino"]
Implementation = Literal["auto", "native", "transformers"]

_PROBED_ROWS = (1, 8)
"""Rows of the passes that decide: a plain step, and the verification of a short block."""
_PROBED_CONTEXT = 256
_PROBES = 7
_CLEARLY = 0.9
"""Share of the ordinary runtime's time in which another one must be ready."""
_OPENVINO_WEIGHTS = ("float32", "int8")
"""Other types of weights are slower there than in other runtimes, or are not read."""


@dataclass(frozen=True, slots=True)
class Opening:
    """Everything that decides how a model is opened."""

    files: ModelFiles
    config: PretrainedConfig
    options: TargetOptions
    runtime: Runtime = "auto"
    implementation: Implementation = "auto"
    trust_remote_code: bool = False


def open_target(opening: Opening) -> Target:
    """The target.

    Raises:
        ModelError: It cannot run as asked; the reason is named.
        MissingExtra: The runtime asked for is not installed.
        CheckpointError: Its weights are not those of its configuration.
    """
    refusal = _openvino_refusal(opening) if opening.runtime == "openvino" else _onnx_refusal(opening)
    if opening.runtime in ("onnx", "openvino"):
        if refusal:
            found, hint = f"{opening.runtime}, and {refusal}", _HINT if opening.runtime == "onnx" else _OTHER
            raise ModelError("target.runtime", found, "a model, dtype and device that it runs", hint)
        return _open_onnx(opening) if opening.runtime == "onnx" else _open_openvino(opening)
    if opening.options.quantization is not None and (refusal or opening.runtime == "torch"):
        found = f"{opening.options.quantization} weights, and {refusal or 'runtime torch'}"
        raise ModelError("target.dtype", found, "runtime onnx or auto, for quantised weights", _HINT)
    if choices := {} if refusal or opening.runtime == "torch" else _choices(opening):
        return _open_fastest(opening, choices)
    return _open_torch(opening) if opening.options.quantization is None else _open_onnx(opening)


_HINT = "set target.runtime: torch with float32 or bfloat16"
_OTHER = "set target.runtime: auto"
_Openers = Mapping[str, Callable[[Opening], "Target"]]


def _choices(opening: Opening) -> _Openers:
    """Runtimes to time, the ordinary one first; none where there is nothing to choose."""
    if opening.options.device.type != "cpu" or opening.options.dtype != torch.float32:
        return {}
    if opening.options.quantization is None:
        return {"torch": _open_torch, "onnx": _open_onnx}
    if _openvino_refusal(opening) or find_spec("openvino") is None:
        return {}
    return {"onnx": _open_onnx, "openvino": _open_openvino}


def _onnx_refusal(opening: Opening) -> str:
    """Why ONNX Runtime does not run this; empty where it does."""
    if opening.implementation == "transformers":
        return "implementation: transformers"
    if reason := native_refusal(opening.config):
        return f"graphs do not compute {reason}"
    if opening.options.dtype == torch.float64:
        return "there are no float64 graphs"
    if opening.options.device.type not in ("cpu", "cuda"):
        return f"ONNX Runtime does not run on {opening.options.device.type}"
    if opening.options.dtype == torch.bfloat16 and opening.options.device.type == "cpu":
        return "ONNX Runtime has no bfloat16 on CPUs"
    return ""


def _openvino_refusal(opening: Opening) -> str:
    """Why OpenVINO does not run this; empty where it does."""
    if opening.options.device.type != "cpu":
        return f"OpenVINO runs on CPUs here, not on {opening.options.device.type}"
    if opening.options.weights not in _OPENVINO_WEIGHTS:
        return f"OpenVINO runs {' and '.join(_OPENVINO_WEIGHTS)} weights here, not {opening.options.weights}"
    return _onnx_refusal(opening)


def _open_torch(opening: Opening) -> Target:
    if _takes_native(opening):
        return NativeTarget(opening.config, read_tensors(opening.files.directory), opening.options)
    return load_huggingface(opening.files.directory, opening.options, opening.trust_remote_code)


def _takes_native(opening: Opening) -> bool:
    if opening.implementation != "auto" or opening.config.model_type not in NATIVE_FAMILIES:
        return opening.implementation == "native"
    if reason := native_refusal(opening.config):
        log.warning("%s: the native decoder does not compute %s; transformers runs it", opening.files.name, reason)
    return not reason


def _open_onnx(opening: Opening) -> OnnxTarget:
    return _open_graphs(opening, ONNX_RUNTIME)


def _open_openvino(opening: Opening) -> OnnxTarget:
    return _open_graphs(opening, OPENVINO)


def _open_graphs(opening: Opening, runtime: GraphRuntime) -> OnnxTarget:
    tensors = read_tensors(opening.files.directory)
    identity = {"model": model_identity(opening.files)}
    graphs = model_graphs(opening.config, tensors, GraphStore().find, identity, opening.options, runtime)
    return OnnxTarget(graphs, opening.options)


def _open_fastest(opening: Opening, open_as: _Openers) -> Target:
    """The fastest of some runtimes, as measured here once; row invariance is never given up for speed."""
    path = _verdict_path(opening, open_as)
    ordinary = next(iter(open_as))
    if (known := _read_verdict(path)) in open_as:
        return open_as[known](opening)
    seconds, exact = {}, {}
    target: Target | None = None
    for runtime, opener in open_as.items():
        target = None  # two of them at once would take twice the memory
        try:
            target = opener(opening)
        except SpecFlowError as error:
            if runtime == ordinary and not opening.options.row_invariant:
                raise
            log.warning("runtime auto: %s is no choice here: %s", runtime, error.found)
            continue
        seconds[runtime], exact[runtime] = _time(target), target.info.exactness == "bit-exact"
    if not seconds:
        return open_as[ordinary](opening)  # for its reason
    best = _best(seconds, exact)
    if len(seconds) == len(open_as):
        _keep_verdict(path, {"runtime": best, "seconds": seconds, "exact": exact})
    if target is None or list(seconds)[-1] != best:
        target = None  # as above
        target = open_as[best](opening)
    return target


def _keep_verdict(path: Path, verdict: Mapping[str, object]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(verdict, indent=2) + "\n")
    except OSError as error:
        log.warning("runtime auto: %s cannot be written (%s): both are timed every time", path, error.strerror)


def _best(seconds: Mapping[str, float], exact: Mapping[str, bool]) -> str:
    """The fastest runtime of those that keep their rows' bits, where there is one; of all otherwise.

    The first one, which is the ordinary one, stays where no other is clearly faster.
    """
    held = [runtime for runtime in seconds if exact[runtime]] or list(seconds)
    best, fastest = (min(each, key=seconds.__getitem__) for each in (held, seconds))
    if seconds[best] > _CLEARLY * seconds[held[0]]:
        best = held[0]
    if best != fastest and not exact[fastest]:
        ratio = seconds[best] / seconds[fastest]
        log.warning("%s is %.2f times as fast and changes bits with the rows: %s runs it", fastest, ratio, best)
    return best


def _time(target: Target) -> float:
    """Seconds of a plain pass and of one that verifies a block, the best of a few each, added up."""
    info = target.info
    widths = [min(rows, info.context_length) for rows in _PROBED_ROWS]
    context = min(_PROBED_CONTEXT, info.context_length - max(widths))
    cache = target.new_cache(1, context + max(widths))
    cache.keep([context])
    total = 0.0
    for rows in widths:
        tokens = torch.zeros(1, rows, dtype=torch.int64, device=info.device)
        positions = torch.arange(context, context + rows, device=info.device).unsqueeze(0)
        times = []
        for _ in range(_PROBES):
            began = perf_counter()
            target.forward(tokens, positions, cache)
            times.append(perf_counter() - began)
        total += min(times)
    return total


def _verdict_path(opening: Opening, choices: _Openers) -> Path:
    packages = ("torch", "onnxruntime-gpu", "onnxruntime", *(["openvino"] if "openvino" in choices else []))
    facts = {
        "model": model_identity(opening.files),
        "options": str(replace(opening.options, name="")),
        "threads": torch.get_num_threads(),
        "cpu": cpu_model(),
        "versions": [package_version(name) for name in packages],
        "graphs": WRITER_VERSION,
    }
    digest = sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]
    return cache_dir() / "runtimes" / f"{digest}.json"


def _read_verdict(path: Path) -> str:
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["runtime"])
    except (OSError, ValueError, TypeError, KeyError):
        return ""

"""One peer with one model behind a pipe: requests and answers are JSON lines.

    python serve.py PEER MODEL DTYPE THREADS

First line out: {"ready": true, "versions": {...}} or {"error": ...}. Then, a line in and a line out each:

    {"prompt": [ids], "max_new_tokens": n, "lookup": K or null}
        -> {"tokens": [ids], "times": [seconds since the request, of every delivery], "sizes": [tokens of each]}
    {"score": [ids]}
        -> {"best": [likeliest next token after each], "surprise": [nats of the token that follows, but for the last]}

Runs in the peers' own environment, so it imports nothing of specflow.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import json
import os
import signal
import sys
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO

import numpy as np

__all__ = ["Deliveries", "answer", "main"]

PEERS = {
    "openvino-genai": ("peer_openvino", ("openvino-genai", "openvino", "nncf")),
    "llama.cpp": ("peer_llama", ("llama-cpp-python",)),
    "onnxruntime-genai": ("peer_onnxruntime", ("onnxruntime-genai", "onnxruntime")),
    "transformers": ("peer_transformers", ("transformers", "torch")),
}
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class Deliveries:
    """When tokens came, and how many at a time."""

    def __init__(self) -> None:
        self.started = perf_counter()
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.sizes: list[int] = []

    def add(self, tokens: list[int]) -> None:
        """Note tokens that came together, now."""
        self.times.append(perf_counter() - self.started)
        self.sizes.append(len(tokens))
        self.tokens.extend(tokens)


def answer(peer: Any, request: dict[str, Any]) -> dict[str, Any]:
    """What goes back for one request; a failure is an answer too."""
    try:
        if "score" in request:
            return _scores(peer.logits(request["score"]), request["score"])
        seen = Deliveries()
        peer.generate(request["prompt"], request["max_new_tokens"], request["lookup"], seen)
        return {"tokens": seen.tokens, "times": seen.times, "sizes": seen.sizes}
    except Exception as error:  # a peer may fail in any way; the run goes on without it
        return {"error": f"{type(error).__name__}: {error}"}


def _scores(logits: Any, tokens: list[int]) -> dict[str, Any]:
    rows = np.asarray(logits, np.float64)  # [tokens, V]
    top = rows.max(-1)
    total = np.log(np.exp(rows - top[:, None]).sum(-1)) + top
    said = rows[np.arange(len(tokens) - 1), tokens[1:]]
    return {"best": rows.argmax(-1).tolist(), "surprise": (total[:-1] - said).tolist()}


def main() -> None:
    """Load the peer, then answer until the pipe closes."""
    name, model, dtype, threads = sys.argv[1:]
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print; the pipe is for answers alone
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    module, packages = PEERS[name]
    try:
        peer = importlib.import_module(module).Peer(Path(model), dtype, int(threads))
        versions = {package: importlib.metadata.version(package) for package in packages}
    except Exception as error:
        _write(out, {"error": f"{type(error).__name__}: {error}"})
        return
    _write(out, {"ready": True, "versions": versions})
    for line in sys.stdin:
        _write(out, answer(peer, json.loads(line)))


def _write(out: TextIO, value: dict[str, Any]) -> None:
    out.write(json.dumps(value) + "\n")
    out.flush()


if __name__ == "__main__":
    main()

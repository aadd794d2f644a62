"""A script beside a drafter's graphs that drafts with numpy and ONNX Runtime alone, and an example for it to read.

The script is chosen by what graphs there are. It drafts one greedy chain from what a target left behind for a text:
its tokens, the last of them the anchor, and the features or cache rows that the manifest names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from specflow.draft.onnx_lm import DRAFT_LAYERS, DRAFT_MODEL
from specflow.target.cache import KVCache

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from specflow.onnx.graphs import DraftFacts
    from specflow.target.base import Target

__all__ = ["EXAMPLE", "SCRIPT", "script_for", "write_example"]

SCRIPT, EXAMPLE = "run_drafter.py", "example.npz"

_HEAD = '''"""Drafts a block from a text's {reads}, as a target left them: python run_drafter.py example.npz
What every input is, and how a round feeds the graphs, stands in manifest.json one folder up. """

import sys
from pathlib import Path

import numpy as np
import onnxruntime

HERE = Path(__file__).resolve().parent
K = {k}  # draft tokens of a block
FLOATS = np.{floats}
{constants}onnxruntime.set_default_logger_severity(3)


def load(name):
    return onnxruntime.InferenceSession(str(HERE / f"{{name}}.onnx"), providers=["CPUExecutionProvider"])


def read(path):
    """Of another text what example.npz holds; there are rows for all its tokens but the anchor, the last one."""
    data, example = dict(np.load(path)), np.load(HERE / "example.npz")
    rows = max(1, np.size(data.get("tokens", ())) - 1)
    for name, like in example.items():
        shape = (rows + 1,) if name == "tokens" else (*like.shape[:-2], rows, like.shape[-1])
        if ((its := np.asarray(data.get(name))).shape, its.dtype.kind) != (shape, like.dtype.kind):
            sys.exit(f"{{path}}: expected {{name}} {{shape}} {{like.dtype}}, found {{its.shape}} {{its.dtype}}")
    return {{name: data[name].astype(like.dtype) for name, like in example.items()}}

'''

_PASSES = '''
def empty_slots(session, count):
    past = [value for value in session.get_inputs() if value.name.startswith("past_")]
    return {value.name: np.zeros((1, value.shape[1], count, value.shape[3]), FLOATS) for value in past}


def chain_bias(start, rows, count, window=None):
    """What is added to attention scores: 0 for a row itself and what is before it, -inf elsewhere."""
    held, at = np.arange(count), start + np.arange(rows)[:, None]
    return np.where((held <= at) & (held > at - (window or count + 1)), 0, -np.inf).astype(FLOATS)[None]


def run(session, slots, start, rows, **feeds):
    """One pass over rows above the committed ones; the slots are updated."""
    count = next(iter(slots.values())).shape[2]
    usual = {"bias": chain_bias(start, rows, count), "bias_windowed": chain_bias(start, rows, count, WINDOW)}
    usual |= {"positions": start + np.arange(rows)[None], "starts": np.array([start]), "scored": np.array([rows - 1])}
    wanted = [value.name for value in session.get_outputs() if not value.name.startswith("tap.")]
    taken = {value.name: (slots | usual | feeds)[value.name] for value in session.get_inputs()}
    found = dict(zip(wanted, session.run(wanted, taken), strict=True))
    slots.update({f"past_{name[8:]}": found[name] for name in found if name.startswith("present_")})
    return found

'''

_TAIL = """

if __name__ == "__main__":
    print(*draft(read(sys.argv[1]))) if len(sys.argv) == 2 else sys.exit(__doc__)
"""

_MODEL = """
def draft(data):
    tokens, model = data["tokens"].tolist(), load("draft_model")
    slots = empty_slots(model, len(tokens) + K)
    out, drafted = run(model, slots, 0, len(tokens), tokens=np.array([tokens])), []
    for step in range(K):
        drafted.append(int(out["logits"][0, -1, :VOCAB_SIZE].argmax()))
        out = run(model, slots, len(tokens) + step, 1, tokens=np.array([drafted[-1:]]))
    return drafted
"""

_LAYERS = """
def draft(data):
    committed, layers = len(data["tokens"]) - 1, load("draft_layers")
    slots = empty_slots(layers, committed + K + 1)
    for name, rows in slots.items():
        rows[:, :, :committed] = data[name]
    token, drafted = int(data["tokens"][-1]), []
    for step in range(K):
        out = run(layers, slots, committed + step, 1, tokens=np.array([[token]]))
        token = int(out["logits"][0, -1].argmax())
        drafted.append(token)
    return drafted
"""

_STEP = """
def draft(data):
    tokens, hidden = data["tokens"], data["features"].astype(FLOATS)[None]
    if (HERE / "fusion.onnx").exists():
        hidden = load("fusion").run(["hidden"], {"features": hidden})[0]
    step, head, committed = load("step"), load("head"), len(tokens) - 1
    slots = empty_slots(step, committed + K)
    out, drafted = run(step, slots, 0, committed, tokens=tokens[None, 1:], hidden=hidden), []
    for depth in range(K):
        logits = head.run(["logits"], {"scored": out["scored"][:, -1:]})[0]
        drafted.append(int(TO_TARGET[logits[0, 0].argmax()]))
        row = {"tokens": np.array([drafted[-1:]]), "hidden": out["recycled"][:, -1:]}
        out = run(step, slots, committed + depth, 1, **row)
    return drafted
"""

_SERIAL = """
def draft(data):
    tokens, hidden = data["tokens"], data["features"].astype(FLOATS)[None]
    head, committed, depth = load("head"), len(tokens) - 1, min(K, NUM_MODULES, len(data["tokens"]) - 1)
    modules = [load(f"step_{j}" if (HERE / f"step_{j}.onnx").exists() else "step") for j in range(depth)]
    slots, known, scored = [empty_slots(module, committed + 1) for module in modules], [], None
    for j in range(depth):  # module j is j positions behind the first one
        pair = {"tokens": tokens[None, 1 + j :], "hidden": hidden[:, : committed - j]}
        out = run(modules[j], slots[j], 0, committed - j, **pair)
        hidden, scored = out["recycled"], out["scored"][:, -1:] if j == 0 else scored
        known.append(hidden[:, -1:])
    drafted, below = [], hidden[:, :0]
    for j in range(1, depth + 1):
        logits = head.run(["logits"], {"scored": scored})[0]
        drafted.append(int(TO_TARGET[logits[0, 0].argmax()]))
        if j < depth:
            rows = {"tokens": np.array([drafted]), "hidden": np.concatenate((known[j - 1], below), axis=1)}
            out = run(modules[j], slots[j], committed - j, j, **rows)
            below, scored = out["recycled"], out["scored"][:, -1:]
    return drafted
"""

_BLOCK = '''
def block_bias(start, count, windowed):
    """Slots of the block see the context within their window, and slots of the block up to so many ahead."""
    held, order = np.arange(count), np.arange(BLOCK_SIZE)[:, None]
    most = 0 if (windowed if CAUSAL is None else CAUSAL) else WINDOW - 1 if windowed and not FROM_ANCHOR else count
    seen = (held < start) | (held - start - order <= most)
    if windowed:
        seen &= (held >= start) | (held >= start - WINDOW) if FROM_ANCHOR else held > start + order - WINDOW
    return np.where(seen, 0, -np.inf).astype(FLOATS)[None]


def draft(data):
    tokens, features = data["tokens"], data["features"].astype(FLOATS)[None]
    context, block, committed = load("context"), load("draft"), len(tokens) - 1
    slots = empty_slots(context, count := committed + BLOCK_SIZE)
    run(context, slots, 0, committed, features=features)
    bias, windowed = (block_bias(committed, count, each) for each in (False, WINDOW is not None))
    feeds = {"anchors": tokens[-1:], "bias": bias, "bias_windowed": windowed}
    return run(block, slots, committed, BLOCK_SIZE, **feeds)["tokens"][0, :K].tolist()
'''

_HEADS = """
def draft(data):
    heads = load("draft")
    feeds = {"hidden": data["features"][-1:].astype(FLOATS), "anchors": data["tokens"][-1:]}
    taken = {value.name: feeds[value.name] for value in heads.get_inputs()}
    return heads.run(["tokens"], taken)[0][0, :K].tolist()
"""


def script_for(graphs: Sequence[str], facts: DraftFacts, floats: str, k: int, vocab_size: int) -> str:
    """The script of a drafter.

    Args:
        graphs: Names of its graphs.
        facts: What is known of them.
        floats: Type of their activations.
        k: Draft tokens of a block.
        vocab_size: The target's.
    """
    reads = "tokens and key and value rows" if facts.target_cache else "tokens and features"
    table = f"np.load(HERE / {'to_target.npy'!r})" if facts.to_target is not None else f"np.arange({vocab_size})"
    own: dict[str, object] = {}
    if DRAFT_MODEL in graphs:
        reads, body, own = "tokens", _MODEL, {"VOCAB_SIZE": vocab_size}
    elif DRAFT_LAYERS in graphs:
        body = _LAYERS
    elif "context" in graphs:
        body = _BLOCK
        own = {"BLOCK_SIZE": facts.block_size, "CAUSAL, FROM_ANCHOR": f"{facts.causal}, {facts.window_from_anchor}"}
    elif "draft" in graphs:
        body = _HEADS
    else:
        body, own = _STEP, {"TO_TARGET": table}
        if facts.num_layers > 1:
            body, own = _SERIAL, {"NUM_MODULES": facts.num_layers, **own}
    passes = ""
    if body != _HEADS:
        passes, own = _PASSES, {"WINDOW": f"{facts.window}  # positions that layers with a sliding window see", **own}
    constants = "".join(f"{name} = {value}\n" for name, value in own.items())
    return _HEAD.format(reads=reads, k=k, floats=floats, constants=constants) + passes + body + _TAIL


@torch.inference_mode()
def write_example(folder: Path, target: Target, facts: DraftFacts, tokens: Sequence[int]) -> None:
    """Save what the target knows of a text, for the script.

    Args:
        folder: Of the drafter.
        target: In torch.
        facts: What the drafter reads.
        tokens: The text; the last token is the anchor, which has no features yet.
    """
    device, committed = target.info.device, list(tokens[:-1])
    cache = target.new_cache(1, len(committed))
    rows = torch.tensor([committed], device=device)
    positions = torch.arange(len(committed), device=device).unsqueeze(0)
    out = target.forward(rows, positions, cache, taps=facts.taps, rows="last")
    saved: dict[str, NDArray[Any]] = {"tokens": np.array(tokens, dtype=np.int64)}
    states: Mapping[str, torch.Tensor | None] = {"hidden_pre": out.hidden_pre, "hidden_post": out.hidden_post}
    if facts.taps:
        saved["features"] = torch.cat([out.taps[tap] for tap in facts.taps], dim=-1)[0].float().cpu().numpy()
    elif facts.hidden is not None and (state := states[facts.hidden]) is not None:
        saved["features"] = state[0].float().cpu().numpy()
    elif facts.target_cache:
        assert isinstance(cache, KVCache)
        for layer in range(facts.num_layers):
            for kind, slots in zip(("key", "value"), cache.data[layer], strict=True):
                saved[f"past_{kind}.{layer}"] = slots[:, :, : len(committed)].float().cpu().numpy()
    np.savez(folder / EXAMPLE, **saved)  # type: ignore[arg-type]

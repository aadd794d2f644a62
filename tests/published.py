"""Drafters as others publish them: configurations with their keys, tensors with their names, and the same in our words.

Weights are random; every layout is written from the tensors of our own one, renamed and with what it stores besides.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from outgoing import TARGET, WIDTH, stored
from safetensors.torch import save_file
from tiny import VOCAB
from torch import Tensor

from specflow.draft.base import SourceContext
from specflow.draft.registry import discover
from specflow.types import DraftBlock, DraftBudget, Features, Observation, Sampling

RANK, BLOCK, MASK = 6, 5, VOCAB - 3
POSITIONS = 128
OURS = {"num_heads": 2, "num_kv_heads": 1, "head_width": 12, "mlp_size": 40, "eps": 1e-5, "rope_theta": 5000.0}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": 40,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": POSITIONS,
    "vocab_size": VOCAB,
    "num_hidden_layers": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "use_cache": True,
    "transformers_version": "4.51.0",
    "torch_dtype": "bfloat16",
}
QWEN: dict[str, Any] = {
    **LLAMA,
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "layer_types": ["full_attention"] * 2,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 2,
    "rope_scaling": None,
}
SHAPED = {**OURS, "max_positions": POSITIONS}


def drawn(*shape: int, seed: int = 11) -> Tensor:
    noise = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return noise * torch.tensor(shape[-1] ** -0.5)


def same(name: str) -> str:
    return name


@dataclass(frozen=True)
class Published:
    """One layout.

    Args:
        layout: Its name.
        source: Of ours.
        options: Of the source: exactly what its configuration says.
        config: Its config.json.
        rename: From our name of a tensor to theirs.
        tensors: What is stored besides.
        given: Of our tensors, those that are not random.
        file: Name of the weight file.
        change: Makes the stored tensors from the renamed ones.
        exact: Our tensors are those that are read, bit for bit.
    """

    layout: str
    source: str
    options: Mapping[str, Any]
    config: Mapping[str, Any]
    rename: Callable[[str], str] = same
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    given: Mapping[str, Tensor] = field(default_factory=dict)
    file: str = "model.safetensors"
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict
    exact: bool = True
    native: Mapping[str, Any] = field(default_factory=dict)  # options of ours that are said in other words

    def ours(self) -> dict[str, Tensor]:
        """Our tensors."""
        embedding = {name: tensor for name, tensor in self.tensors.items() if name == "embed_tokens.weight"}
        return {**self._trained(), **embedding}

    def theirs(self) -> dict[str, Tensor]:
        """Their tensors."""
        return self.change({**{self.rename(name): tensor for name, tensor in self._trained().items()}, **self.tensors})

    def _trained(self) -> dict[str, Tensor]:
        options = {name: value for name, value in {**self.options, **self.native}.items() if value is not None}
        return dict(stored(self.source, self.given, **options).tensors)

    def write(self, path: Path, tensors: Mapping[str, Tensor] | None = None, **keys: Any) -> str:
        """Lay it into a directory.

        Args:
            path: The directory.
            tensors: Others than its own.
            keys: Of the configuration, to be changed; None takes one out.
        """
        path.mkdir(parents=True, exist_ok=True)
        config = {name: value for name, value in {**self.config, **keys}.items() if keys.get(name, "") is not None}
        (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        save(self.theirs() if tensors is None else tensors, path / self.file)
        return str(path)

    def write_ours(self, path: Path) -> str:
        """Lay the same drafter into a directory in our own words."""
        path.mkdir(parents=True, exist_ok=True)
        options = {**self.options, **self.native}
        (path / "config.json").write_text(json.dumps(options), encoding="utf-8")
        save(self.ours(), path / "model.safetensors")
        return str(path)


def save(tensors: Mapping[str, Tensor], file: Path) -> None:
    whole = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    if file.suffix == ".safetensors":
        save_file(whole, file)
    else:
        torch.save(whole, file)


class Fixed:
    def uniform(self, stream: str, row: int, position: int) -> float:
        return 0.37


def drafted(source: str, weights: str, **options: object) -> DraftBlock:
    """What a drafter of these weights says behind a few positions, with features that depend on layer and kind."""
    info = discover()[source]
    config = info.config.model_validate({"weights": weights, "shape": "chain", **options})
    corrected = "parallel+corrector" in info.dependency and source == "dspark"
    dependency = "parallel+corrector" if corrected else "parallel" if "parallel" in info.dependency else "ar"
    drafter = info.build(config, SourceContext(TARGET, 3, dependency, "sampled", confidence=True))
    cache, count = TARGET.new_cache(1, 64), 9
    drafter.reset(1, cache)
    drafter.start(0, [5, 9, 33], Sampling(temperature=0.8))
    needs = drafter.needs
    taps = {layer: drawn(1, count, WIDTH, seed=100 + layer) for layer in needs.taps}
    states = ((7, needs.hidden_pre), (8, needs.hidden_post))
    hidden = [drawn(1, count, WIDTH, seed=seed) if wanted else None for seed, wanted in states]
    tokens = tuple(3 + step % 50 for step in range(count))
    drafter.observe(Observation((tokens,), (0,), (count,), Features(taps, *hidden)), [0])
    cache.keep([count])
    block = drafter.propose([tokens[-1]], DraftBudget((3,)), Fixed())
    assert block is not None
    return block


def law_of(block: DraftBlock) -> Tensor:
    """What its tokens were drawn from.  # [B, N, Vd]"""
    law: Any = block.law
    probs: Tensor = law.probs
    return probs

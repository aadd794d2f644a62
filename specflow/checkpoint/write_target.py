"""The target a drafter was trained for, as far as a layout must know it: its sizes, its name, rows of its tables.

Nothing of it is run: its configuration and, where a layout stores what our drafters borrow, two of its tensors are
read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specflow.errors import CheckpointError
from specflow.target.huggingface import block_shape
from specflow.target.load import read_config, read_json, read_tensors, resolve_model
from specflow.target.store import HUB_IDS

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.types import BlockShape

__all__ = ["Verifier", "open_verifier"]

_BENT = ("logit_scale", "final_logit_softcapping", "logits_scaling", "lm_head_multiplier", "embedding_multiplier")
"""Settings of models whose logits or embeddings are more than rows of a table."""
_SCALED = "gemma"
"""Families that multiply their embeddings by the root of the width."""


@dataclass(frozen=True, slots=True)
class Verifier:
    """A target model's facts.

    Args:
        reference: What a layout calls it: a hub id, or a directory.
        architectures: Of its config.json.
        shape: Of its decoder blocks.
        vocab_size: V.
        num_layers: L.
        context_length: Most positions.
        tied: Whether the embedding is the head too.
        bent: Why its tables are not its head and embedding alone; empty where they are.
        tensors: All of its tensors, read when they are asked for.
    """

    reference: str
    architectures: tuple[str, ...]
    shape: BlockShape
    vocab_size: int
    num_layers: int
    context_length: int
    tied: bool
    bent: str
    tensors: Mapping[str, Tensor]

    def head(self) -> Tensor:
        """Rows of the output head.  # [V, H]

        Raises:
            CheckpointError: There is no such tensor, or the head is more than its rows.
        """
        if self._named("lm_head.bias"):
            raise CheckpointError(self.reference, "its head adds a bias", "rows alone: drafter layouts store no bias")
        return self._table("embed_tokens.weight" if self.tied else "lm_head.weight")

    def embedding(self) -> Tensor:
        """Rows of all tokens.  # [V, H]

        Raises:
            CheckpointError: There is no such tensor, or an embedding is more than its row.
        """
        return self._table("embed_tokens.weight")

    def _table(self, ending: str) -> Tensor:
        if self.bent:
            expected = "a plain table: a layout that stores its rows would lose that"
            raise CheckpointError(self.reference, f"its configuration has {self.bent}", expected)
        name = self._named(ending)
        if name is None:
            raise CheckpointError(self.reference, f"no tensor named *{ending}", "the target's table")
        tensor = self.tensors[name]
        size = (self.vocab_size, self.shape.hidden_size)
        if tuple(tensor.shape) != size:
            raise CheckpointError(self.reference, f"{name} has shape {tuple(tensor.shape)}", f"{size}")
        return tensor

    def _named(self, ending: str) -> str | None:
        """The shortest name with this ending: what is nested deeper belongs to another part of the model."""
        found = sorted((name for name in self.tensors if f".{name}".endswith(f".{ending}")), key=len)
        return found[0] if found else None


def open_verifier(name: str) -> Verifier:
    """A target's facts.

    Args:
        name: As `--target` and recipes spell it.

    Raises:
        ModelError: There is no such model, or its configuration cannot be read.
        CheckpointError: Its directory does not hold what it should, or its configuration has no sizes.
    """
    files = resolve_model(name)
    config: Any = read_config(files)
    text = config.get_text_config()
    is_hub_id = files.revision is not None
    found = [key for key in _BENT if getattr(text, key, None) not in (None, 1, 1.0, False)]
    bent = ", ".join([*found, *([text.model_type] if text.model_type.startswith(_SCALED) else [])])
    raw = read_json(files.directory / "config.json")
    sizes = ("hidden_size", "num_attention_heads", "vocab_size", "num_hidden_layers", "max_position_embeddings")
    lacking = [key for key in sizes if not isinstance(getattr(text, key, None), int)]
    if lacking:
        raise CheckpointError(name, f"its configuration lacks {', '.join(lacking)}", "a causal language model's sizes")
    ours = HUB_IDS.get(name)
    return Verifier(
        reference=ours
        or (name if is_hub_id else str(Path(name).resolve() if Path(name).is_dir() else files.directory)),
        architectures=tuple(raw.get("architectures") or ()),
        shape=block_shape(text),
        vocab_size=text.vocab_size,
        num_layers=text.num_hidden_layers,
        context_length=text.max_position_embeddings,
        tied=bool(getattr(text, "tie_word_embeddings", False)),
        bent=bent,
        tensors=read_tensors(files.directory),
    )

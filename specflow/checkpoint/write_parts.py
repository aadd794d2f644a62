"""What the published layouts share: decoder blocks, vocabularies, heads, and the keys that describe them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from specflow.errors import CheckpointError
from specflow.types import BlockShape

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.checkpoint.write_drafter import StoredDrafter, Supply
    from specflow.checkpoint.write_target import Verifier

__all__ = [
    "BLOCK_OPTIONS",
    "SPECULATORS_VERSION",
    "Block",
    "Scene",
    "Written",
    "reduced_ids",
    "speculators_keys",
    "take_block",
    "take_vocabulary",
    "transformer_keys",
]

SPECULATORS_VERSION = "0.9.0"
"""The release of `speculators` whose layout is written."""

_SIZES = ("num_heads", "num_kv_heads", "head_width", "mlp_size", "eps", "rope_theta")
BLOCK_OPTIONS = frozenset((*_SIZES, "rope_scaling", "max_positions", "offset_norms"))
"""Options of blocks that every transformer configuration says."""

_HINT = "name the model it was trained for with --target"


@dataclass(frozen=True, slots=True)
class Written:
    """A checkpoint as a layout has it.

    Args:
        config: Its config.json.
        tensors: Under the layout's names.
        file: Of the tensors.
        notes: What a user should know of it.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    file: str = "model.safetensors"
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Scene:
    """What a writer works with.

    Args:
        stored: The drafter.
        supply: Its tensors, taken one by one.
        verifier: Its target; None: nobody named it.
        layout: Name of the layout, for errors.
    """

    stored: StoredDrafter
    supply: Supply
    verifier: Verifier | None
    layout: str

    def option(self, name: str) -> Any:
        return self.stored.option(name)

    def need(self, what: str) -> Verifier:
        """The target, which the layout must know for something.

        Raises:
            CheckpointError: Nobody named it.
        """
        if self.verifier is None:
            raise CheckpointError(self.stored.where, f"{what}, and no target is named", "its target", _HINT)
        return self.verifier

    def refuse(self, found: str, expected: str, hint: str = "") -> CheckpointError:
        """An error about this drafter in this layout."""
        return CheckpointError(self.stored.where, found, f"{expected} in the {self.layout} layout", hint)

    def shape(self) -> BlockShape:
        """Sizes of the drafter's blocks: its own, and the target's where it has none.

        Raises:
            CheckpointError: Neither says some of them.
        """
        own = {name: value for name in _SIZES if (value := self.option(name)) is not None}
        lacking = [name for name in _SIZES if name not in own]
        if not lacking and self.verifier is None:
            width = self.supply.rows("norm.weight") or self.supply.rows("fc.weight")
            if width is not None:
                return BlockShape(hidden_size=width, **own)
        left = f"config.json leaves {', '.join(lacking) or 'the width'} to the target"
        return replace(self.need(left).shape, **own)

    def vocab_size(self) -> int:
        """V of the target.

        Raises:
            CheckpointError: Nobody says.
        """
        if self.verifier is not None:
            return self.verifier.vocab_size
        for name in ("embed_tokens.weight", "markov_head.markov_w1.weight", "t2d"):
            if (rows := self.supply.rows(name)) is not None:
                return rows
        return self.need("the size of its vocabulary is not known").vocab_size

    def checked_taps(self, taps: Sequence[int]) -> tuple[int, ...]:
        """Target layers, each of which the target has.

        Raises:
            CheckpointError: It lacks one.
        """
        most = None if self.verifier is None else self.verifier.num_layers - 1
        if most is not None and not all(-1 <= tap <= most for tap in taps):
            hint = "is this the target the drafter was trained for?"
            raise CheckpointError(self.stored.where, f"taps {list(taps)}", f"layers from -1 to {most}", hint)
        return tuple(taps)

    def dtype(self) -> torch.dtype:
        """Of the drafter's tensors that have fractions."""
        types = [tensor.dtype for tensor in self.stored.tensors.values() if tensor.is_floating_point()]
        return types[0] if types else torch.float32

    def like_ours(self, name: str, rows: Tensor) -> Tensor:
        """Rows of the target in the type of the drafter's tensors.

        Raises:
            CheckpointError: They are beyond it.
        """
        converted = rows.to(self.dtype()).contiguous().clone()
        if not bool(converted.isfinite().all()):
            raise CheckpointError(self.stored.where, f"the target's {name} is beyond {self.dtype()}", "smaller values")
        return converted

    def refuse_unlike(self, name: str, theirs: str) -> None:
        """Leave out a table that the layout's readers take from the target, if it is the target's indeed.

        Raises:
            CheckpointError: It is a table of the drafter's own, or nobody named the target to compare it with.
        """
        if not self.supply.has(name):
            return
        verifier = self.need(f"a {name} of its own, where the {self.layout} layout takes the target's")
        rows = getattr(verifier, theirs)()
        if not torch.equal(self.supply.take(name, tuple(rows.shape)), self.like_ours(name, rows)):
            raise self.refuse(f"a {name} that is not the target's", "the target's own, which is not stored")


@dataclass(frozen=True, slots=True)
class Block:
    """A decoder block's tensors and what they say of it."""

    tensors: Mapping[str, Tensor]  # by their names within the block
    head_norms: bool
    attention_bias: bool
    mlp_bias: bool

    def under(self, prefix: str) -> dict[str, Tensor]:
        """The tensors by their whole names."""
        return {f"{prefix}.{name}": tensor for name, tensor in self.tensors.items()}


def take_block(scene: Scene, prefix: str, shape: BlockShape, input_width: int | None = None) -> Block:
    """A decoder block. Norms before the attention are taken by who knows what they are.

    Args:
        scene: Gives the tensors.
        prefix: Of their names.
        shape: Sizes.
        input_width: Of what queries, keys and values are made from; None: H.

    Raises:
        CheckpointError: A tensor is missing or has another shape, or some of its layers have a bias and others none.
    """
    width, wide = shape.hidden_size, shape.mlp_size
    inner, outer = shape.num_heads * shape.head_width, shape.num_kv_heads * shape.head_width
    seen = input_width or width
    attention = {"q_proj": (inner, seen), "k_proj": (outer, seen), "v_proj": (outer, seen), "o_proj": (width, inner)}
    mlp = {"gate_proj": (wide, width), "up_proj": (wide, width), "down_proj": (width, wide)}
    supply, taken, biased = scene.supply, {}, {}
    for part, linears in (("self_attn", attention), ("mlp", mlp)):
        for name, size in linears.items():
            taken[f"{part}.{name}.weight"] = supply.take(f"{prefix}.{part}.{name}.weight", size)
        biases = [name for name in linears if supply.has(f"{prefix}.{part}.{name}.bias")]
        if biases and len(biases) < len(linears):
            raise scene.refuse(f"{prefix}.{part} with a bias in {', '.join(biases)} alone", "a bias in all or none")
        biased[part] = bool(biases)
        for name in biases:
            taken[f"{part}.{name}.bias"] = supply.take(f"{prefix}.{part}.{name}.bias", linears[name][:1])
    normed = supply.has(f"{prefix}.self_attn.q_norm.weight")
    for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight") if normed else ():
        taken[name] = supply.take(f"{prefix}.{name}", (shape.head_width,))
    last = "post_attention_layernorm.weight"
    taken[last] = supply.take(f"{prefix}.{last}", (width,))
    return Block(taken, normed, biased["self_attn"], biased["mlp"])


def reduced_ids(scene: Scene) -> Tensor | None:
    """Target ids of a reduced draft vocabulary; None where it is the target's.  # [Vd]

    Raises:
        CheckpointError: `d2t` leads out of the vocabulary or back, so that readers would pair rows with other tokens.
    """
    size, supply, full = scene.option("draft_vocab_size"), scene.supply, scene.vocab_size()
    supply.skip("t2d")  # it follows from d2t
    if size is None or (size == full and not supply.has("d2t")):
        return None
    ids = torch.arange(size) + supply.take("d2t", (size,))
    if ids.is_floating_point() or not 0 <= int(ids.min()) <= int(ids.max()) < full or bool((ids.diff() <= 0).any()):
        expected = f"offsets to ids that rise from 0 to {full - 1}: readers pair rows with tokens in that order"
        raise CheckpointError(scene.stored.where, "d2t does not lead to rising ids of the target", expected)
    return ids


def take_vocabulary(scene: Scene, ids: Tensor | None, always_head: bool) -> dict[str, Tensor]:
    """The draft's head and the maps of its vocabulary.

    Args:
        scene: Gives the tensors.
        ids: As `reduced_ids` gives them.  # [Vd]
        always_head: Whether the layout stores a head of the target's vocabulary too.

    Raises:
        CheckpointError: A head must be written that is borrowed from a target which nobody named.
    """
    supply, full = scene.supply, scene.vocab_size()
    width = scene.shape().hidden_size
    tensors: dict[str, Tensor] = {}
    own = scene.option("own_head")
    if own is None:
        own = ids is not None or supply.has("lm_head.weight")
    if own and (ids is not None or always_head):
        tensors["lm_head.weight"] = supply.take("lm_head.weight", (full if ids is None else len(ids), width))
    elif own:
        scene.refuse_unlike("lm_head.weight", "head")
    elif ids is not None or always_head:
        rows = scene.need("it borrows the target's head, whose rows are stored").head()
        tensors["lm_head.weight"] = scene.like_ours("head", rows if ids is None else rows[ids])
    if ids is not None:
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(full, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def transformer_keys(scene: Scene, family: str, blocks: Sequence[Block]) -> dict[str, Any]:
    """Keys of a transformer configuration that describe the drafter's blocks.

    Args:
        scene: The drafter.
        family: `model_type` of the blocks: llama or qwen3.
        blocks: As they were taken; all alike.

    Raises:
        CheckpointError: The blocks are not alike, or of another family.
    """
    shape, first, scaling = scene.shape(), blocks[0], scene.option("rope_scaling")
    kinds = {(block.head_norms, block.attention_bias, block.mlp_bias) for block in blocks}
    if len(kinds) > 1:
        raise scene.refuse(
            "blocks some of which have biases or norms of heads that others lack", "blocks that are alike"
        )
    if first.head_norms != (family == "qwen3"):
        found = "norms of queries and keys" if first.head_norms else "no norms of queries and keys"
        raise scene.refuse(f"blocks with {found}", f"blocks of the {family} family")
    if first.mlp_bias and family == "qwen3":
        raise scene.refuse("an MLP with biases", "an MLP without")
    keys: dict[str, Any] = {
        "model_type": family,
        "vocab_size": scene.vocab_size(),
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.mlp_size,
        "num_hidden_layers": len(blocks),
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_width,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None if scaling is None else scaling.model_dump(exclude_none=True),
        "attention_bias": first.attention_bias,
        "tie_word_embeddings": False,
        "torch_dtype": str(scene.dtype()).removeprefix("torch."),
    }
    if family == "llama":
        keys["mlp_bias"] = first.mlp_bias
    if (most := _positions(scene)) is not None:
        keys["max_position_embeddings"] = most
    return keys


def _positions(scene: Scene) -> int | None:
    own: int | None = scene.option("max_positions")
    theirs = None if scene.verifier is None else scene.verifier.context_length
    return own or theirs


def speculators_keys(scene: Scene, kind: str, tokens: int) -> dict[str, Any]:
    """Keys that every checkpoint of the speculators layout has.

    Args:
        scene: The drafter.
        kind: `speculators_model_type`.
        tokens: Draft tokens of a round, which engines take for their default.
    """
    verifier = scene.verifier
    return {
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": None if verifier is None else verifier.reference,
                "architectures": [] if verifier is None else list(verifier.architectures),
            },
        },
        "tie_word_embeddings": False,
    }

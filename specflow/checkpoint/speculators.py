"""What all checkpoints of speculators share: keys, the model they draft for, and how many tokens they propose."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specflow.checkpoint.keys import Keys

__all__ = ["SHARED_KEYS", "proposed_tokens", "verifier_of"]

SHARED_KEYS = (
    "_name_or_path",
    "add_cross_attention",
    "architectures",
    "auto_map",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "has_no_defaults_at_init",
    "hidden_size",
    "id2label",
    "is_decoder",
    "is_encoder_decoder",
    "label2id",
    "model_type",
    "num_hidden_layers",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "speculators_config",
    "speculators_model_type",
    "speculators_version",
    "tie_word_embeddings",
    "torch_dtype",
    "transformer_layer_config",
    "transformers_version",
    "vocab_size",
)
"""Keys that say nothing of the network, or that are read for every kind."""


def verifier_of(config: Keys) -> str | None:
    """The model it drafts for."""
    return config.part("speculators_config").part("verifier").text("name_or_path")


def proposed_tokens(config: Keys) -> int | None:
    """Tokens that its first way of proposing drafts."""
    ways = config.part("speculators_config").parts("proposal_methods")
    return ways[0].maybe_whole("speculative_tokens") if ways else None

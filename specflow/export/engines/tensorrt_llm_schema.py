"""Names of TensorRT-LLM's speculative configuration: those of 1.4.0rc4, and those that older files still carry."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["BASE", "CLASSES", "FAMILY_OF", "RENAMED", "type_name"]

BASE = (
    "acceptance_rate_threshold", "acceptance_rate_window_size", "advanced_sampling_mode", "allow_advanced_sampling",
    "decoding_type", "draft_len_schedule", "enable_penalty", "load_format", "max_concurrency", "max_draft_len",
    "max_total_draft_tokens", "moe_backend", "moe_tactic", "spec_dec_variant", "speculative_model",
    "speculative_model_dir", "use_rejection_sampling",
)  # fmt: skip
"""Keys of every class."""

_TREE = ("use_dynamic_tree", "dynamic_tree_max_topK")
_EAGLE = (
    *_TREE, "max_non_leaves_per_layer", "eagle3_layers_to_capture", "eagle3_model_arch", "sa_config", "eagle_choices",
    "eagle3_one_model", "num_eagle_layers", "greedy_sampling", "posterior_threshold",
)  # fmt: skip
_BLOCK = ("mask_token_id", "target_layer_ids", "attention_backend", "context_recompute_tail")

CLASSES: Mapping[str, tuple[str, ...]] = {
    "Eagle3": _EAGLE,
    "Eagle": _EAGLE,
    "MTP": (
        *_TREE, "use_relaxed_acceptance_for_thinking", "relaxed_topk", "relaxed_delta", "use_mtp_vanilla",
        "mtp_eagle_one_model", "begin_thinking_phase_token", "end_thinking_phase_token", "sa_config",
        "num_nextn_predict_layers",
    ),
    "NGram": ("max_matching_ngram_size", "is_keep_all", "is_use_oldest", "is_public_pool"),
    "SA": ("max_matching_ngram_size", "enable_global_pool", "global_pool_size"),
    "Draft_Target": (),
    "DraftTarget": (),
    "PARD": ("mask_token_id", "sa_config"),
    "DFlash": _BLOCK,
    "DSpark": (*_BLOCK, "block_size", "markov_rank", "markov_head_type"),
    "AUTO": (),
    "User_Provided": ("drafter", "resource_manager"),
    "SaveState": ("output_directory", "write_interval", "file_prefix", "eagle3_layers_to_capture"),
    "Medusa": ("medusa_choices", "num_medusa_heads"),
    "Lookahead": ("max_window_size", "max_ngram_size", "max_verification_set_size"),
}  # fmt: skip
"""Decoding type -> its own keys."""

FAMILY_OF = {
    "Eagle3": "eagle3",
    "Eagle": "eagle3",
    "MTP": "mtp",
    "NGram": "ngram",
    "SA": "suffix",
    "Draft_Target": "small_model",
    "DraftTarget": "small_model",
    "DFlash": "dflash",
    "DSpark": "dspark",
}

RENAMED = {
    "acceptance_window": "acceptance_rate_window_size",
    "acceptance_length_threshold": "acceptance_rate_threshold, which is a share of draft tokens",
    "use_sa_spec": "sa_config: {threshold: 4}",
    "sa_spec_threshold": "sa_config: {threshold: N}",
    "prompt_lookup_num_tokens": "max_draft_len",
    "pytorch_weights_path": "speculative_model",
}
"""Older key -> what to write."""


def type_name(family: str, dialect: str) -> str | None:
    """Decoding type of a family of recipes, or None where these versions have none."""
    if dialect == "starts":
        old = {"eagle3": "Eagle", "mtp": "MTP", "ngram": "NGram", "suffix": "NGram", "small_model": "DraftTarget"}
        return old.get(family)
    names = {known: name for name, known in reversed(FAMILY_OF.items())}
    return names.get(family)

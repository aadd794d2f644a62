"""Names of vLLM's speculative configuration: those of 0.33.0, and those that older command lines still carry."""

from __future__ import annotations

__all__ = ["FIELDS", "GONE", "MTP_NAMES", "NEVER", "RENAMED"]

FIELDS = (
    "attention_backend", "code_revision", "disable_eagle_block_drop", "disable_lookahead_block_hashes",
    "disable_padded_drafter_batch", "draft_lm_head_quantization", "draft_load_config", "draft_sample_method",
    "draft_tensor_parallel_size", "dspark_draft_topk", "enable_adaptive_verification", "enforce_eager",
    "fly_entropy_threshold", "fly_entropy_top_k", "fly_window_size", "index_share_for_mtp_iteration",
    "kv_cache_dtype", "max_model_len", "method", "model", "moe_backend", "num_speculative_tokens",
    "num_speculative_tokens_per_batch_size", "parallel_drafting", "prompt_lookup_max", "prompt_lookup_min",
    "quantization", "rejection_sample_method", "revision", "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor", "suffix_decoding_max_tree_depth", "suffix_decoding_min_token_prob",
    "synthetic_acceptance_length", "synthetic_acceptance_rates", "use_heterogeneous_vocab",
    "use_local_argmax_reduction", "xpress_topc",
)  # fmt: skip
"""Keys of `--speculative-config` that a user sets."""

NEVER = ("draft_model_config", "draft_parallel_config", "target_model_config", "target_parallel_config")

RENAMED = {
    "tensor_parallel_size": "draft_tensor_parallel_size",
    "adaptive_verification": "enable_adaptive_verification",
    "disable_by_batch_size": "num_speculative_tokens_per_batch_size, with 0 draft tokens from that size on",
    "synthetic_acceptance_rate": "synthetic_acceptance_length or synthetic_acceptance_rates",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
    "acceptance_method": "rejection_sample_method",
    "speculative_token_tree": "nothing: vLLM verifies chains",
    "posterior_threshold": "nothing: typical acceptance is gone",
    "posterior_alpha": "nothing: typical acceptance is gone",
    "disable_mqa_scorer": "nothing",
    "disable_logprobs": "nothing",
}
"""Older key -> what to write."""

GONE = {
    "--speculative-model": "model",
    "--num-speculative-tokens": "num_speculative_tokens",
    "--ngram-prompt-lookup-max": "prompt_lookup_max",
    "--ngram-prompt-lookup-min": "prompt_lookup_min",
    "--speculative-draft-tensor-parallel-size": "draft_tensor_parallel_size",
    "--speculative-max-model-len": "max_model_len",
    "--speculative-disable-by-batch-size": "",
    "--spec-decoding-acceptance-method": "",
}
"""Flag of older versions -> key of `--speculative-config`, "" for none."""

MTP_NAMES = (
    "deepseek_mtp", "dots3_note_mtp", "mimo_mtp", "mimo_v2_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "glm_ocr_mtp",
    "ernie_mtp", "nemotron_h_mtp", "exaone_moe_mtp", "exaone4_5_mtp", "qwen3_next_mtp", "qwen4_exp_mtp",
    "qwen3_5_mtp", "longcat_flash_mtp", "bailing_hybrid_v3_mtp", "minimax_m3_mtp", "bailing_hybrid_mtp",
    "kimi_k3_mtp", "pangu_ultra_moe_mtp", "step3p5_mtp", "step5_mtp", "hy_v3_mtp", "hy_v4_mtp", "gemma4_mtp",
    "inkling_mtp", "glm5_next_mtp",
)  # fmt: skip
"""Family names of MTP that vLLM reads as `mtp`."""

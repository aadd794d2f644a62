"""Names of SGLang's speculative flags: those of 0.5.23, and those that older command lines still carry."""

from __future__ import annotations

__all__ = ["ALGORITHMS", "FLAGS", "METHOD_OF", "OLDER", "RENAMED", "SWITCHES"]

METHOD_OF = {
    "ngram": "NGRAM",
    "suffix": "NGRAM",
    "small_model": "STANDALONE",
    "mtp": "NEXTN",
    "eagle": "EAGLE",
    "eagle2": "EAGLE",
    "eagle3": "EAGLE3",
    "dflash": "DFLASH",
    "dspark": "DSPARK",
}
"""Family of a recipe -> algorithm."""

ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "DFLASH", "DSPARK", "UNO")

FLAGS = tuple(
    f"--speculative-{name}"
    for name in (
        "accept-threshold-acc", "accept-threshold-single", "adaptive", "adaptive-config", "algorithm",
        "attention-mode", "dflash-block-size", "domino-candidate-pool-size", "draft-attention-backend",
        "draft-kv-cache-dtype", "draft-load-format", "draft-model-path", "draft-model-quantization",
        "draft-model-revision", "draft-sink-size", "draft-window-size", "dsa-topk-backend",
        "dspark-align-verify-tokens-to-graph-tier", "dspark-block-size", "dspark-confidence-sts-path",
        "dspark-sps-table-path", "eagle-topk", "enable-w4a4-mxfp4-megamoe", "moe-a2a-backend", "moe-runner-backend",
        "ngram-capacity", "ngram-external-corpus-max-tokens", "ngram-external-corpus-path",
        "ngram-external-sam-budget", "ngram-match-type", "ngram-max-bfs-breadth", "ngram-max-trie-depth",
        "ngram-min-bfs-breadth", "num-draft-tokens", "num-steps", "token-map", "use-block-verification",
        "use-rejection-sampling",
    )
)  # fmt: skip

WINDOWS = ("--speculative-ngram-min-match-window-size", "--speculative-ngram-max-match-window-size")
OLDER = {
    "gamma": (),
    "anchor": ("--speculative-dspark-confidence-threshold", "--speculative-dflash-draft-window-size"),
    "windows": (*WINDOWS, "--speculative-ngram-branch-length", "--speculative-dflash-draft-window-size"),
}
"""Dialect -> flags that it has and 0.5.23 has not."""

RENAMED = {
    "--speculative-dflash-draft-window-size": "--speculative-draft-window-size",
    "--speculative-draft-model": "--speculative-draft-model-path",
    "--speculative-draft": "--speculative-draft-model-path",
    "--speculative-ngram-branch-length": "--speculative-ngram-max-trie-depth",
    "--speculative-ngram-min-match-window-size": "nothing: a match of any length drafts",
    "--speculative-ngram-max-match-window-size": "--speculative-ngram-max-trie-depth, for match and draft together",
    "--speculative-dspark-confidence-threshold": "--speculative-dspark-sps-table-path",
}
"""Older flag -> what to write."""

SWITCHES = (
    "--speculative-adaptive", "--speculative-dspark-align-verify-tokens-to-graph-tier",
    "--speculative-use-block-verification", "--speculative-use-rejection-sampling", "--trust-remote-code",
    "--enable-multi-layer-eagle", "--enable-dp-attention", "--enable-dp-lm-head", "--disable-cuda-graph",
    "--disable-radix-cache", "--disable-overlap-schedule", "--enable-torch-compile", "--enable-metrics",
)  # fmt: skip
"""Flags without a value."""

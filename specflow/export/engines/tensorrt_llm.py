"""TensorRT-LLM: `trtllm-serve MODEL --config FILE`, with `speculative_config:` in the file.

Checked against the source of 1.4.0rc4 (`llmapi/llm_args.py`). Keys of `draft_len_schedule` changed their meaning in
March 2026, among the release candidates of 1.3.0: first they were the lower ends of ranges of batch sizes, since then
they are the upper ends. A wrong guess turns the policy upside down, so for those candidates no schedule is written.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from specflow.export.draft_choice import choose_draft, launched_plainly, notes_on
from specflow.export.engines.base import Dialect, Exported, Given, Imported
from specflow.export.engines.tensorrt_llm_reader import read_tensorrt_llm
from specflow.export.engines.tensorrt_llm_schema import type_name
from specflow.export.recipe_view import DraftView, Ledger, RecipeView
from specflow.export.sampling_request import request_file
from specflow.recipe_yaml import write_yaml

__all__ = ["ENGINE", "TensorRTLLM"]

FAMILIES = ("eagle3", "mtp", "ngram", "suffix", "small_model", "dflash", "dspark")
ONE_MODEL = ("eagle3", "mtp", "suffix", "small_model", "dflash")
"""Families whose draft length follows the batch since the keys are upper ends."""

TWO_MODELS = ("ngram", "suffix", "small_model")
"""Those it followed before."""

DTYPES = ("float32", "float16", "bfloat16")
HEADS = {"markov": "vanilla", "gated": "gated", "rnn": "rnn"}

Settings = dict[str, Any]


class TensorRTLLM:
    """Writes and reads TensorRT-LLM's configuration."""

    name = "tensorrt_llm"
    dialects = (
        Dialect("1.3.0", "1.4.0rc4", "ends"),
        Dialect("1.3.0rc0", "1.3.0rc99", "unsure"),
        Dialect("1.0.0", "1.2.99", "starts"),
    )

    def export(self, view: RecipeView, dialect: Dialect) -> Exported:
        """A launch command, its YAML file, and a request that samples as the recipe does."""
        ledger = Ledger(view)
        helper, draft = _chosen(view, ledger, dialect)
        gains = view.policy == "expected_gain" and bool(view.schedule)
        if draft is not None and gains and view.schedule[0].k == 0:
            launched_plainly(ledger, "launched without speculation: by the profile plain decoding is fastest")
            draft = None
        settings = _server(view, ledger)
        notes = [*notes_on(view, draft)]
        if draft is not None:
            settings["speculative_config"] = _speculative(view, draft, helper, ledger, dialect)
            if dialect.name == "starts" and draft.family in TWO_MODELS:
                settings["disable_overlap_scheduler"] = True
            notes += _notes(settings["speculative_config"], dialect)
        option = "--config" if dialect.name == "ends" else "--extra_llm_api_options"
        command = ["trtllm-serve", view.target, option, "trtllm.yaml"]
        if "target.trust_remote_code" in view.said:
            command.append("--trust_remote_code")
            ledger.says("target.trust_remote_code")
        head = f"# {shlex.join(command)}\n# TensorRT-LLM {dialect.versions}\n"
        head += "".join(f"# {line}\n" for line in _meaning(settings, dialect))
        return Exported(
            engine=self.name,
            versions=dialect.versions,
            command=tuple(command),
            files={
                "trtllm.yaml": head + (write_yaml(settings) if settings else "{}\n"),
                "request.json": request_file(view, ledger, ("logit_bias",)),
            },
            notes=(*notes, "sampling is a request's own: request.json is for /v1/completions"),
            not_expressible=ledger.gaps(),
        )

    def read(self, given: Given, dialect: Dialect) -> Imported:
        """A command line, a script with one, or the YAML file."""
        return read_tensorrt_llm(given, dialect)


def _chosen(view: RecipeView, ledger: Ledger, dialect: Dialect) -> tuple[DraftView | None, DraftView | None]:
    """What drafts, after the suffix automaton that may stand in front of it."""
    parts = view.drafts
    pair = len(parts) == 2 and view.combined == "first_of" and dialect.name == "ends"
    if pair and "index" in parts[0].options and parts[1].family in ("eagle3", "mtp"):
        helper, draft = parts
        for part in parts:
            ledger.says(*(part.key(name) for name in ("k", "method", "source", "weights")))
        ledger.says("draft.k", helper.key("min_match"), helper.key("share"))
        if helper.family != "suffix":
            ledger.lacks(helper.key("method"), "a suffix automaton, in which the longest match counts", helper.family)
        return helper, draft
    families = {family for family in FAMILIES if type_name(family, dialect.name) is not None}
    return None, choose_draft(view, ledger, families, "TensorRT-LLM")


def _server(view: RecipeView, ledger: Ledger) -> Settings:
    found: Settings = {}
    ledger.says("target.model")
    if view.recipe.target.dtype in DTYPES:
        found["dtype"] = view.recipe.target.dtype
        ledger.says("target.dtype")
    names = {"target.revision": "revision", "runtime.batch": "max_batch_size", "runtime.context": "max_seq_len"}
    for key, name in names.items():
        if key in view.said:
            found[name] = view.said[key]
            ledger.says(key)
    return found


def _speculative(
    view: RecipeView, draft: DraftView, helper: DraftView | None, ledger: Ledger, dialect: Dialect
) -> Settings:
    """The mapping `speculative_config`."""
    schedule = _schedule(view, draft, ledger, dialect)
    k = view.schedule[0].k if "draft_len_schedule" in schedule else draft.k
    if k != draft.k:
        ledger.lacks("draft.k", f"{k}: by the profile longer drafts never pay", draft.k)
    length = "num_nextn_predict_layers" if draft.family == "mtp" and dialect.name == "starts" else "max_draft_len"
    found: Settings = {"decoding_type": type_name(draft.family, dialect.name), length: k}
    if "index" not in draft.options and (draft.path is not None or draft.family != "mtp"):
        found["speculative_model_dir" if dialect.name == "starts" else "speculative_model"] = draft.place
    found |= _history(draft, ledger, dialect) if "index" in draft.options else _network(draft, ledger, dialect)
    if helper is not None:
        threshold = helper.match[0]
        found["sa_config"] = {"threshold": threshold, "enable_global_pool": bool(helper.options["share"])}
    found |= _verify(view, draft, helper, ledger, dialect)
    return found | schedule


def _history(draft: DraftView, ledger: Ledger, dialect: Dialect) -> Settings:
    """Lookups in earlier text."""
    shortest, longest = draft.match
    share = bool(draft.options["share"])
    ledger.says(draft.key("share"))
    if shortest > 1:
        ledger.lacks(draft.key("min_match"), "a match of one token drafts")
    if draft.family == "suffix" and dialect.name != "starts":
        return {"max_matching_ngram_size": -1, "enable_global_pool": share}
    if draft.family == "suffix":
        ledger.lacks(draft.key("method"), f"n-grams of up to {longest} tokens", "suffix")
    ledger.says(draft.key("max_match"))
    pool = {"is_keep_all": True, "is_use_oldest": False, "is_public_pool": share}
    return {"max_matching_ngram_size": longest, **pool}


def _network(draft: DraftView, ledger: Ledger, dialect: Dialect) -> Settings:
    """Options of drafters with weights: the tree, and what overrides their config.json."""
    found: Settings = {}
    ledger.says(draft.key("shape"))
    trees = draft.family == "eagle3" or (draft.family == "mtp" and dialect.name == "ends")
    if not draft.is_chain and not trees:
        ledger.lacks(draft.key("shape"), f"a chain of {draft.k}", draft.shape)
    elif not draft.is_chain:
        branch = int(draft.options["branch"])
        nodes = min(max(draft.nodes, draft.k), branch * draft.k)
        if draft.shape != "beam":
            ledger.lacks(draft.key("shape"), f"beam: the best {nodes} nodes of a beam search", draft.shape)
        if nodes != draft.nodes:
            ledger.lacks(draft.key("nodes"), f"{nodes}: from k to branch * k is allowed", draft.nodes)
        ledger.says(*(draft.key(name) for name in ("shape", "nodes", "branch")))
        found |= {"use_dynamic_tree": True, "dynamic_tree_max_topK": branch, "max_total_draft_tokens": nodes}
    taps = draft.options.get("taps", ())
    if taps and min(taps) >= 0:
        found["eagle3_layers_to_capture" if draft.family == "eagle3" else "target_layer_ids"] = tuple(taps)
        ledger.says(draft.key("taps"))
    if draft.options.get("mask_token") is not None:
        found["mask_token_id"] = draft.options["mask_token"]
        ledger.says(draft.key("mask_token"))
    if draft.family == "dspark":
        found["block_size"] = draft.k
        for option, name in (("corrector", "markov_head_type"), ("corrector_rank", "markov_rank")):
            if draft.key(option) in ledger.view.said and (value := draft.options[option]) is not None:
                found[name] = HEADS.get(value, value)
                ledger.says(draft.key(option))
    return found


def _verify(view: RecipeView, draft: DraftView, helper: DraftView | None, ledger: Ledger, dialect: Dialect) -> Settings:
    """Exact match unless rejection sampling is asked for."""
    found: Settings = {"allow_advanced_sampling": True} if dialect.name != "ends" else {}
    ledger.says("verify.rule")
    if view.rule == "match" or ("index" in draft.options and view.rule == "rejection"):
        return found
    if (
        view.rule in ("rejection", "block")
        and dialect.name == "ends"
        and helper is None
        and "index" not in draft.options
    ):
        if view.rule == "block":
            ledger.lacks("verify.rule", "rejection sampling token by token: the same law, shorter accepted blocks")
        return {**found, "use_rejection_sampling": True}
    ledger.lacks("verify.rule", "a draft token is kept where it equals the token that the target draws: the same law")
    return found


def _schedule(view: RecipeView, draft: DraftView, ledger: Ledger, dialect: Dialect) -> Settings:
    """Draft tokens by batch size."""
    if view.policy == "fixed":
        ledger.says("length.policy")
    if view.policy != "expected_gain":
        return {}
    able = draft.family in (ONE_MODEL if dialect.name == "ends" else TWO_MODELS) and draft.is_chain
    if not view.schedule or not able:
        known = "its length follows no batch size here" if view.schedule or not able else "--profile adds a schedule"
        ledger.lacks("length.policy", f"every round drafts {draft.k} tokens; {known}")
        return {}
    paying = [step for step in view.schedule if step.k > 0]
    if dialect.name == "unsure":
        instead = f"k tokens up to batch {paying[-1].high}, none above: what keys of a schedule mean changed here"
        ledger.lacks("length.policy", instead)
        return {"max_concurrency": paying[-1].high}
    ledger.says("length.policy")
    if dialect.name == "ends":
        return {"draft_len_schedule": {step.high: step.k for step in paying}}
    return {"draft_len_schedule": {step.low: step.k for step in view.schedule}}


def _meaning(settings: Settings, dialect: Dialect) -> Iterator[str]:
    """What the schedule says, in words: its keys say different things in different versions."""
    schedule = settings.get("speculative_config", {}).get("draft_len_schedule")
    if schedule is None:
        return
    keys = list(schedule)
    if dialect.name == "ends":
        lows = [1, *(key + 1 for key in keys)]
        parts = [f"{schedule[key]} at {low} to {key}" for low, key in zip(lows, keys, strict=False)]
        said = f"{', '.join(parts)}; 0 above {keys[-1]}"
        yield f"draft_len_schedule by batch size: {said} (a key is the last of its range)"
    else:
        parts = [f"{schedule[key]} from {key} on" for key in keys]
        yield f"draft_len_schedule by batch size: {', '.join(parts)} (a key is the first of its range)"


def _notes(spec: Settings, dialect: Dialect) -> Iterator[str]:
    if "draft_len_schedule" in spec and dialect.name == "ends":
        yield "above the last key of draft_len_schedule nothing is drafted: nothing was measured there"
    if spec.get("use_rejection_sampling"):
        yield "rejection sampling needs FlashInfer; without it set use_rejection_sampling: false (the same law)"
    if "block_size" in spec:
        yield "block_size has to be the block of the checkpoint"


ENGINE = TensorRTLLM()

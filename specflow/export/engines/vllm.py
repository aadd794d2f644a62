"""vLLM: `vllm serve MODEL --speculative-config JSON`, or the same keys in a YAML file.

Checked against the sources of 0.33.0 (`vllm/config/speculative.py`, `vllm/v1/spec_decode/dynamic/utils.py`), in which
`medusa` is gone. K counts draft tokens without the bonus token, as recipes do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specflow.export.draft_choice import choose_draft, notes_on
from specflow.export.engines.base import Dialect, Exported, Given, Imported, flag_words
from specflow.export.engines.vllm_reader import (
    BY_NAME,
    METHOD_OF,
    METHODS,
    V2_SCHEDULES,
    named_like,
    read_vllm,
)
from specflow.export.recipe_view import DraftView, Ledger, RecipeView
from specflow.export.sampling_request import request_file, server_defaults
from specflow.recipe_yaml import write_yaml

__all__ = ["ENGINE", "VLLM"]

OWN_WEIGHTS = ("small_model", "medusa", "eagle", "eagle2", "eagle3", "dflash", "dspark")
"""Families whose drafter is a model of its own; MTP modules are part of the target where nothing else is said."""

DTYPES = ("float32", "float16", "bfloat16")


class VLLM:
    """Writes and reads vLLM's configuration."""

    name = "vllm"
    dialects = (Dialect("0.33.0", "0.33.0", "current"), Dialect("0.26.0", "0.32", "with medusa"))

    def export(self, view: RecipeView, dialect: Dialect) -> Exported:
        """A launch command, the same as a YAML file, and a request that samples as the recipe does."""
        ledger = Ledger(view)
        draft = choose_draft(view, ledger, _families(dialect), "vLLM")
        settings = _settings(view, ledger)
        notes = [*notes_on(view, draft), *_notes(view, draft)]
        if draft is not None:
            settings["speculative-config"] = _speculative(view, draft, ledger)
        request = request_file(view, ledger)
        file = f"# vLLM {dialect.versions}: vllm serve --config vllm.yaml\n"
        file += write_yaml({"model": view.target, **settings})
        return Exported(
            engine=self.name,
            versions=dialect.versions,
            command=("vllm", "serve", view.target, *flag_words(settings)),
            files={"vllm.yaml": file, "request.json": request},
            notes=(*notes, "vllm.yaml says the same as the command; request.json is for /v1/completions"),
            not_expressible=ledger.gaps(),
        )

    def read(self, given: Given, dialect: Dialect) -> Imported:
        """A command line, a script with one, a file for `--config`, or the JSON of `--speculative-config` alone."""
        return read_vllm(given, dialect)


def _families(dialect: Dialect) -> set[str]:
    """Families of recipes that these versions can draft with."""
    return {family for family, method in METHOD_OF.items() if method in METHODS[dialect.name]}


def _settings(view: RecipeView, ledger: Ledger) -> dict[str, Any]:
    """Flags of the server without their dashes."""
    recipe, found = view.recipe, dict[str, Any]()
    ledger.says("target.model")
    if recipe.target.dtype in DTYPES:
        found["dtype"] = recipe.target.dtype
        ledger.says("target.dtype")
    for key, name in (("target.revision", "revision"), ("target.trust_remote_code", "trust-remote-code")):
        if key in view.said:
            found[name] = view.said[key]
            ledger.says(key)
    for key, name in (("runtime.batch", "max-num-seqs"), ("runtime.context", "max-model-len")):
        if key in view.said:
            found[name] = view.said[key]
            ledger.says(key)
    found["override-generation-config"] = server_defaults(view, ledger, "max_new_tokens")
    return found


def _speculative(view: RecipeView, draft: DraftView, ledger: Ledger) -> dict[str, Any]:
    """The JSON of `--speculative-config`."""
    found: dict[str, Any] = {"method": METHOD_OF[draft.family], "num_speculative_tokens": draft.k}
    if draft.family in OWN_WEIGHTS or draft.path is not None:
        found["model"] = draft.place
    if draft.family == "ngram":
        found["prompt_lookup_min"], found["prompt_lookup_max"] = draft.match
        ledger.says(draft.key("min_match"), draft.key("max_match"))
    if draft.family == "suffix":
        found.update(_suffix(view, draft, ledger))
    ledger.says(draft.key("shape"))
    if not draft.is_chain:
        ledger.lacks(draft.key("shape"), f"a chain of {draft.k}: vLLM verifies no trees", draft.shape)
    if draft.family == "medusa" and draft.options["corrector"] is not None:
        ledger.lacks(draft.key("corrector"), "heads that know nothing of each other", draft.options["corrector"])
        ledger.says(draft.key("dependency"), draft.key("corrector_rank"))
    found.update(_verify(view, draft, ledger))
    found.update(_length(view, draft, ledger))
    return found


def _suffix(view: RecipeView, draft: DraftView, ledger: Ledger) -> dict[str, Any]:
    """Options of suffix decoding; its tree is as deep as the match and the draft together."""
    shortest, longest = draft.match
    if shortest > 1:
        ledger.lacks(draft.key("min_match"), "a match of one token drafts")
    ledger.says(draft.key("max_match"), draft.key("share"))
    per_match = min(float(draft.k), view.recipe.length.options.get("per_match", float(draft.k)))
    return {
        "suffix_decoding_max_tree_depth": longest + draft.k,
        "suffix_decoding_max_cached_requests": 10_000 if draft.options["share"] else 0,
        "suffix_decoding_max_spec_factor": per_match,
        "suffix_decoding_min_token_prob": 0.0,
    }


def _verify(view: RecipeView, draft: DraftView, ledger: Ledger) -> dict[str, Any]:
    """The rule. Drafts from text are certain of their tokens, so there is no law to sample from."""
    ledger.says("verify.rule")
    if view.rule == "typical":
        ledger.lacks("verify.rule", "rejection sampling, which keeps the law of the text")
    elif view.rule == "match" and not view.greedy:
        instead = "the same law from other random numbers: with a seed the text is not plain decoding's"
        ledger.lacks("verify.rule", instead)
    certain = "index" in draft.options or view.rule == "match"
    method = "block" if view.rule == "block" else "standard"
    return {"rejection_sample_method": method, "draft_sample_method": "greedy" if certain else "probabilistic"}


def _length(view: RecipeView, draft: DraftView, ledger: Ledger) -> dict[str, Any]:
    """What decides how many tokens are drafted or verified."""
    policy, options = view.policy, view.recipe.length.options
    if policy == "fixed":
        ledger.says("length.policy")
    if policy == "match" and draft.family == "suffix":
        ledger.lacks("length.policy", f"up to {options['per_match']:g} tokens per matched token; costs are not weighed")
        ledger.says("length.per_match")
    if policy != "expected_gain":
        return {}
    if draft.family == "dspark" and draft.options["confidence_head"] and options["trim"]:
        ledger.says("length.policy")
        return {"enable_adaptive_verification": True}
    if not view.schedule:
        ledger.lacks("length.policy", f"every round drafts {draft.k} tokens; --profile adds a batch schedule")
        return {}
    ledger.says("length.policy")
    return {"num_speculative_tokens_per_batch_size": [[step.low, step.high, step.k] for step in view.schedule]}


def _notes(view: RecipeView, draft: DraftView | None) -> Iterator[str]:
    yield "max_new_tokens among the defaults of the server also caps every request"
    if draft is None:
        return
    if draft.family == "suffix":
        yield "suffix decoding needs arctic-inference==0.1.1"
    if draft.family == "mtp" and draft.path is None:
        yield "the MTP modules are the target's own"
    model = draft.path or (view.target if draft.family == "mtp" else "")
    if METHOD_OF[draft.family] in BY_NAME and (other := named_like(model)) is not None:
        yield f"vLLM reads {other} in the name {model}, whatever method says: give it a name without it"
    if draft.family == "dspark" and view.policy == "expected_gain":
        yield "adaptive verification needs full CUDA graphs, no LoRA and no pipeline parallelism"
    elif view.schedule and view.policy == "expected_gain":
        last = view.schedule[-1]
        yield f"batches above {last.high}, where nothing was measured, keep {last.k} draft tokens"
        yield "vLLM ignores the batch schedule with data parallelism"
        if draft.family in V2_SCHEDULES:
            yield f"and its Model Runner V1 ignores it for {draft.family}"


ENGINE = VLLM()

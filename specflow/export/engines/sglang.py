"""SGLang: `python -m sglang.launch_server` with flags, and JSON files beside them.

Checked against the sources of 0.5.23 (`srt/arg_groups/fields/spec.py`, `srt/arg_groups/speculative_hook.py`).
`num-draft-tokens` counts the anchor, so a chain of K has K steps and K + 1 tokens; `dspark-block-size` does not in
0.5.23, and did before.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from specflow.export.draft_choice import choose_draft, launched_plainly, notes_on
from specflow.export.engines.base import Dialect, Exported, Given, Imported, flag_words
from specflow.export.engines.sglang_reader import read_sglang
from specflow.export.engines.sglang_schema import METHOD_OF
from specflow.export.engines.sglang_tables import additive_table, flat_table, temperature_file
from specflow.export.recipe_view import DraftView, Ledger, RecipeView
from specflow.export.sampling_request import request_file, server_defaults

__all__ = ["ENGINE", "SGLang"]

EAGLES = ("eagle", "eagle2", "eagle3", "mtp")
STEPPING = (*EAGLES, "small_model")
DTYPES = ("float32", "float16", "bfloat16")

Settings = dict[str, Any]


class SGLang:
    """Writes and reads SGLang's configuration."""

    name = "sglang"
    dialects = (
        Dialect("0.5.23", "0.5.23", "gamma"),
        Dialect("0.5.17", "0.5.22", "anchor"),
        Dialect("0.5.4", "0.5.16", "windows"),
    )

    def export(self, view: RecipeView, dialect: Dialect) -> Exported:
        """A launch command, the JSON files it names, and a request that samples as the recipe does."""
        ledger, files = Ledger(view), dict[str, str]()
        families = set(METHOD_OF) - ({"dspark"} if dialect.name == "windows" else set())
        draft = choose_draft(view, ledger, families, "SGLang")
        if draft is not None and _never_pays(view, draft):
            launched_plainly(ledger, "launched without speculation: by the profile plain decoding is fastest")
            draft = None
        settings = _server(view, ledger)
        notes = [*notes_on(view, draft)]
        if draft is not None:
            settings |= _speculative(view, draft, ledger, dialect)
            written, more = _tables(view, draft, ledger, dialect)
            settings |= more
            files |= written
            notes += _notes(view, draft, files)
        files["request.json"] = request_file(view, ledger)
        environment = ("env", "SGLANG_RAGGED_VERIFY_MODE=compact") if "sps_table.json" in files else ()
        return Exported(
            engine=self.name,
            versions=dialect.versions,
            command=(*environment, "python", "-m", "sglang.launch_server", *flag_words(settings)),
            files=files,
            notes=(*notes, "request.json is for /v1/completions, whose own defaults go before the server's"),
            not_expressible=ledger.gaps(),
        )

    def read(self, given: Given, dialect: Dialect) -> Imported:
        """A command line, a script with one, or a YAML file for `--config`."""
        return read_sglang(given, dialect)


def _never_pays(view: RecipeView, draft: DraftView) -> bool:
    return (
        bool(view.schedule) and view.policy == "expected_gain" and view.schedule[0].k == 0 and draft.family != "dspark"
    )


def _server(view: RecipeView, ledger: Ledger) -> Settings:
    found: Settings = {"model-path": view.target}
    ledger.says("target.model")
    if view.recipe.target.dtype in DTYPES:
        found["dtype"] = view.recipe.target.dtype
        ledger.says("target.dtype")
    names = {
        "target.revision": "revision",
        "target.trust_remote_code": "trust-remote-code",
        "runtime.batch": "max-running-requests",
        "runtime.context": "context-length",
        "runtime.prefill_chunk": "chunked-prefill-size",
    }
    for key, name in names.items():
        if key in view.said:
            found[name] = view.said[key]
            ledger.says(key)
    found["preferred-sampling-params"] = server_defaults(view, ledger, "max_new_tokens")
    return found


def _speculative(view: RecipeView, draft: DraftView, ledger: Ledger, dialect: Dialect) -> Settings:
    found: Settings = {"speculative-algorithm": METHOD_OF[draft.family]}
    if draft.path is not None or draft.family not in ("ngram", "suffix", "mtp"):
        found["speculative-draft-model-path"] = draft.place
    if draft.family in STEPPING:
        found |= _steps(view, draft, ledger)
    elif draft.family in ("dflash", "dspark"):
        ledger.says(draft.key("shape"))
        if not draft.is_chain:
            ledger.lacks(draft.key("shape"), f"a chain of {draft.k}: blocks are no trees there", draft.shape)
        if draft.family == "dspark" and dialect.name == "gamma":
            found["speculative-dspark-block-size"] = draft.k
        found["speculative-num-draft-tokens"] = draft.k + 1
    else:
        found |= _history(draft, ledger, dialect)
    found |= _verify(view, draft, ledger)
    found |= _length(view, draft, ledger, dialect)
    return found


def _steps(view: RecipeView, draft: DraftView, ledger: Ledger) -> Settings:
    """All three of steps, topk and tokens: with some of them missing SGLang fails or guesses."""
    tree, steps = not draft.is_chain and int(draft.options["branch"]) > 1, draft.k
    if not draft.is_chain and not tree:
        steps = min(steps, draft.nodes)
        ledger.lacks(draft.key("shape"), f"a chain of {steps}, which a tree with one child a node is", draft.shape)
    elif tree and draft.shape != "beam":
        ledger.lacks(draft.key("shape"), f"beam: the best {draft.nodes} nodes of a beam search", draft.shape)
    ledger.says(draft.key("shape"), draft.key("nodes"), draft.key("branch"))
    if _scheduled(view, draft):
        steps = view.schedule[0].k
    if steps != draft.k:
        ledger.lacks("draft.k", f"{steps}: longer drafts are never made, or by the profile never pay", draft.k)
    return {
        "speculative-num-steps": steps,
        "speculative-eagle-topk": int(draft.options["branch"]) if tree else 1,
        "speculative-num-draft-tokens": draft.nodes + 1 if tree else steps + 1,
    }


def _history(draft: DraftView, ledger: Ledger, dialect: Dialect) -> Settings:
    """The trie of n-grams that all requests share."""
    shortest, longest = draft.match
    found: Settings = {
        "speculative-num-draft-tokens": draft.k + 1,
        "speculative-ngram-min-bfs-breadth": 1,
        "speculative-ngram-max-bfs-breadth": 1,
    }
    if draft.family == "ngram":
        ledger.lacks(draft.key("method"), "a trie of n-grams, in which the longest match counts", "ngram")
    if not draft.options["share"]:
        ledger.lacks(draft.key("share"), "all requests share the trie", False)
    ledger.says(draft.key("share"), draft.key("max_match"))
    if dialect.name == "windows":
        found["speculative-ngram-min-match-window-size"] = shortest
        found["speculative-ngram-max-match-window-size"] = longest
        found["speculative-ngram-branch-length"] = longest + draft.k
        ledger.says(draft.key("min_match"))
    else:
        found["speculative-ngram-max-trie-depth"] = longest + draft.k
        if shortest > 1:
            ledger.lacks(draft.key("min_match"), "a match of any length drafts")
    return found


def _verify(view: RecipeView, draft: DraftView, ledger: Ledger) -> Settings:
    rule, block_drafts = view.rule, draft.family in ("dflash", "dspark")
    able = block_drafts or (draft.family in EAGLES and draft.is_chain)
    ledger.says("verify.rule")
    if rule == "typical":
        ledger.lacks("verify.rule", "tokens are kept by the target's law; SGLang's accept thresholds are another rule")
    elif rule == "block" and able:
        return {"speculative-use-block-verification": True}
    elif rule == "rejection" and able:
        return {} if block_drafts else {"speculative-use-rejection-sampling": True}
    elif rule == "match" and block_drafts:
        ledger.lacks("verify.rule", "rejection sampling: greedy texts are the same, sampled ones keep the law")
    elif rule in ("block", "rejection") and not (rule == "rejection" and "index" in draft.options):
        ledger.lacks("verify.rule", "a draft token is kept with the target's own probability: the same law")
    elif rule == "match" and not view.greedy:
        ledger.lacks("verify.rule", "the same law from other random numbers: the text is not plain decoding's")
    return {}


def _scheduled(view: RecipeView, draft: DraftView) -> bool:
    """Whether the draft length follows the batch: with chains of the EAGLE family only."""
    gains = view.policy == "expected_gain" and bool(view.schedule)
    return gains and draft.family in EAGLES and draft.is_chain


def _length(view: RecipeView, draft: DraftView, ledger: Ledger, dialect: Dialect) -> Settings:
    policy, options = view.policy, view.recipe.length.options
    if policy == "fixed":
        ledger.says("length.policy")
    if policy == "confidence" and draft.family == "dspark" and dialect.name == "anchor" and not options["cumulative"]:
        ledger.says("length.policy", "length.threshold")
        return {"speculative-dspark-confidence-threshold": options["threshold"]}
    filled = draft.family == "dspark" and dialect.name == "gamma" and view.costs is not None
    if policy != "expected_gain" or filled:
        return {}
    if not _scheduled(view, draft):
        known = "with --profile a batch schedule is written" if draft.family in EAGLES else "no schedule by batch there"
        known = "with --profile its scheduler is filled" if draft.family == "dspark" else known
        ledger.lacks("length.policy", f"every round drafts {draft.k} tokens; {known}")
        return {}
    ledger.says("length.policy")
    if dialect.name != "gamma" and any(step.k == 0 for step in view.schedule):
        ledger.lacks("length.policy", "one token where plain decoding would be faster: 0 steps came later")
    return {"speculative-adaptive": True, "speculative-adaptive-config": "adaptive.json"}


def _tables(view: RecipeView, draft: DraftView, ledger: Ledger, dialect: Dialect) -> tuple[dict[str, str], Settings]:
    """Files that a measured profile fills, and the flags that name them."""
    files, settings = dict[str, str](), Settings()
    if _scheduled(view, draft):
        least = 0 if dialect.name == "gamma" else 1
        rows = {str(step.low): {"candidate_steps": [max(least, step.k)]} for step in view.schedule}
        files["adaptive.json"] = _json(rows)
    if draft.family != "dspark" or dialect.name != "gamma":
        return files, settings
    if view.costs is not None and view.policy == "expected_gain":
        files["sps_table_flat.json"] = _json(flat_table(view.costs, draft.k, view.context))
        files["sps_table.json"] = _json(additive_table(view.costs, draft.k, view.context))
        settings["speculative-dspark-sps-table-path"] = "sps_table.json"
        ledger.says("length")
    temperatures = draft.options["temperatures"] or draft.facts.temperatures
    if (table := temperature_file(temperatures, draft.k)) is not None:
        files["temperatures.json"] = _json(table)
        settings["speculative-dspark-confidence-sts-path"] = "temperatures.json"
        ledger.says(draft.key("temperatures"))
    return files, settings


def _notes(view: RecipeView, draft: DraftView, files: Mapping[str, str]) -> Iterator[str]:
    if view.recipe.runtime.batch == 1:
        yield "with speculation SGLang serves at most 48 requests at once unless --max-running-requests says more"
    if draft.family in ("ngram", "suffix"):
        yield "NGRAM needs CUDA and no attention by data parallelism"
    if "sps_table.json" in files:
        yield "sps_table_flat.json says the same by tokens alone; the scheduler works in compact mode, see the command"
    if "adaptive.json" in files:
        yield "keys of adaptive.json are lower ends of batch sizes; the last holds for all larger ones"


def _json(data: Any) -> str:
    return json.dumps(data, indent=2) + "\n"


ENGINE = SGLang()

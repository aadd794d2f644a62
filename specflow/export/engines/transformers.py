"""transformers: a GenerationConfig, and a script that runs `generate` with it. No torch.

Read in 5.24.0 (`generation/candidate_generator.py`). Two things surprise there. How far an assistant drafts is read
from the assistant's own generation config: the same names among the arguments of `generate` have no effect. And an
assistant stops at tokens below a confidence of 0.4 unless it is told not to.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specflow.export.declared_batch import lacks_schedule, length_at_batch
from specflow.export.draft_choice import OF_TREES, choose_draft, launched_plainly, notes_on
from specflow.export.engines.base import Dialect, Exported, Given, Imported
from specflow.export.engines.transformers_read import read_transformers
from specflow.export.engines.transformers_script import SCRIPT
from specflow.export.recipe_view import Ledger

if TYPE_CHECKING:
    from specflow.export.recipe_view import DraftView, RecipeView

__all__ = ["ENGINE", "Transformers"]

_ALWAYS = ("ngram", "suffix", "small_model", "early_exit")
_FAMILIES = {"mtp and dflash": (*_ALWAYS, "mtp", "dflash"), "assistants": _ALWAYS}
_HISTORY = ("ngram", "suffix")
_WITHIN = ("early_exit", "mtp")  # draft with parts of the target: there is nothing to name


@dataclass
class _Plan:
    """What goes into the script."""

    target: str
    loading: dict[str, Any] = field(default_factory=dict)
    device: str = "auto"
    assistant: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    drafting: dict[str, Any] = field(default_factory=dict)
    stop_ids: tuple[int, ...] = ()
    seed: int | None = None
    notes: list[str] = field(default_factory=list)


class Transformers:
    """`generate` with an assistant, with earlier text, with the model's first layers, or with its MTP modules."""

    name = "transformers"
    dialects = (Dialect("5.15", "5.24.0", "mtp and dflash"), Dialect("4.46", "5.14", "assistants"))

    def export(self, view: RecipeView, dialect: Dialect) -> Exported:
        """A script with everything in it, and the same settings as JSON."""
        ledger = Ledger(view)
        plan = _Plan(view.target)
        _load(view, plan, ledger, "dtype" if dialect.name == "mtp and dflash" else "torch_dtype")
        _sample(view, plan, ledger)
        draft = choose_draft(view, ledger, _FAMILIES[dialect.name], "transformers")
        plan.notes += notes_on(view, None if draft is not None and draft.family in _WITHIN else draft)
        if draft is not None:
            _draft(view, draft, plan, ledger)
        lacks_schedule(view, ledger)
        files = {"generate.py": _script(view, plan, dialect), "generation_config.json": _json(plan.settings)}
        if plan.drafting:
            files["drafter_generation_config.json"] = _json(plan.drafting)
            plan.notes.append(
                "drafter_generation_config.json is for the model that drafts: generate reads it there alone"
            )
        command = ("python", "generate.py")
        return Exported(self.name, dialect.versions, command, files, tuple(plan.notes), ledger.gaps())

    def read(self, given: Given, dialect: Dialect) -> Imported:
        """JSON of a GenerationConfig, a Python script that calls `generate`, or words such as `num_beams=1`.

        Raises:
            RecipeError: It is none of these.
        """
        return read_transformers(given, dialect)


ENGINE = Transformers()


def _json(settings: dict[str, Any]) -> str:
    return json.dumps(settings, indent=2) + "\n"


def _script(view: RecipeView, plan: _Plan, dialect: Dialect) -> str:
    head = f'"""Recipe {view.name} for transformers {dialect.versions}: python generate.py "PROMPT" """'
    named = {
        "TARGET": plan.target,
        "LOADING": plan.loading,
        "DEVICE": plan.device,
        "ASSISTANT": plan.assistant,
        "SETTINGS": plan.settings,
        "DRAFTING": plan.drafting,
        "STOP_IDS": list(plan.stop_ids),
        "SEED": plan.seed,
    }
    constants = "\n".join(f"{name} = {value!r}" for name, value in named.items())
    return SCRIPT.replace("HEAD\n", f"{head}\n", 1).replace("CONSTANTS\n", f"{constants}\n", 1)


def _load(view: RecipeView, plan: _Plan, ledger: Ledger, dtype: str) -> None:
    target = view.recipe.target
    ledger.says("target.model")
    plan.loading[dtype] = target.dtype
    if target.quantization is None:
        ledger.says("target.dtype")
    else:
        plan.loading[dtype] = "auto"
        ledger.lacks("target.dtype", "the checkpoint's own type: load quantised weights by a quantization_config")
    if target.revision is not None:
        plan.loading["revision"] = target.revision
    if target.trust_remote_code:
        plan.loading["trust_remote_code"] = True
    if view.target.endswith(".gguf"):
        plan.notes.append(f"{view.target}: transformers wants its folder, and the file's name as gguf_file")
    plan.device = target.device
    ledger.says("target.revision", "target.trust_remote_code", "target.device")
    if view.recipe.runtime.batch > 1:
        ledger.lacks("runtime.batch", "one request at a time: generate refuses to speculate for more")


def _sample(view: RecipeView, plan: _Plan, ledger: Ledger) -> None:
    """Sampling. What transformers or the model's own config would set (top-k 50, penalties) is written out."""
    sampling, settings = view.sampling, plan.settings
    settings["max_new_tokens"] = sampling.max_new_tokens
    settings["do_sample"] = not view.greedy
    if not view.greedy:
        settings |= {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
        if sampling.min_p > 0.0:
            settings["min_p"] = sampling.min_p
    settings["repetition_penalty"] = sampling.repetition_penalty
    if sampling.min_new_tokens:
        settings["min_new_tokens"] = sampling.min_new_tokens
    if sampling.stop_strings:
        settings["stop_strings"] = list(sampling.stop_strings)
    if sampling.logit_bias:
        settings["sequence_bias"] = [[[token], bias] for token, bias in sampling.logit_bias.items()]
    plan.stop_ids, plan.seed = sampling.stop_ids, sampling.seed
    said = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "min_new_tokens")
    ledger.says(*(f"sampling.{name}" for name in (*said, "stop_strings", "stop_ids", "logit_bias", "seed")))
    if sampling.seed is not None:
        plan.notes.append("the same seed draws other tokens than here: torch's global generator draws them")
    if sampling.ignore_eos:
        settings["min_new_tokens"] = sampling.max_new_tokens
        ledger.lacks("sampling.ignore_eos", "min_new_tokens as high as max_new_tokens: stop ids are impossible")


def _draft(view: RecipeView, draft: DraftView, plan: _Plan, ledger: Ledger) -> None:
    length = length_at_batch(view, draft)
    if length == 0:
        ledger.says("draft", "verify", "length")
        return
    if not draft.is_chain:
        ledger.lacks(draft.key("shape"), f"a chain of {length}: transformers verifies no trees", draft.shape)
        ledger.says(*(draft.key(name) for name in OF_TREES))
    if draft.family in _HISTORY:
        _look_up(draft, length, plan, ledger)
    elif draft.family == "early_exit":
        if draft.options["exit_layer"] is None:
            launched_plainly(ledger, "transformers wants the number of layers: set draft.exit_layer")
            return
        _exit_early(draft, plan, ledger)
        _assist(view, length, plan, ledger)
    elif draft.family == "small_model":
        plan.assistant = draft.place
        _assist(view, length, plan, ledger)
        plan.notes.append("the script compares the tokens of both models; where sizes differ it passes both tokenizers")
    elif draft.family == "mtp":
        _modules(draft, plan, ledger)
    else:
        _block(draft, length, plan, ledger)
    if view.policy == "fixed":
        ledger.says("length")
    _verify(view, draft, ledger)


def _look_up(draft: DraftView, length: int, plan: _Plan, ledger: Ledger) -> None:
    """Prompt lookup: the longest match first, down to one token, and of equal ones the earliest."""
    shortest, longest = draft.match
    plan.settings |= {"prompt_lookup_num_tokens": length, "max_matching_ngram_size": longest}
    ledger.says(draft.key("max_match"), draft.key("index"))
    if shortest > 1:
        ledger.lacks(draft.key("min_match"), "a match of one token drafts", shortest)
    ledger.says(draft.key("min_match"))
    plan.notes.append("of equal matches transformers copies after the earliest, a recipe after the latest")
    if longest > 16:
        plan.notes.append(f"every round searches the whole text for each of {longest} match lengths: lower max_match")


def _exit_early(draft: DraftView, plan: _Plan, ledger: Ledger) -> None:
    plan.settings["assistant_early_exit"] = draft.options["exit_layer"]
    ledger.says(draft.key("exit_layer"), draft.key("leave_out"))
    for name in ("adapter_rank", "weights"):
        if draft.options[name] is not None:
            ledger.lacks(draft.key(name), "no adapter before the head", draft.options[name])


def _assist(view: RecipeView, length: int, plan: _Plan, ledger: Ledger) -> None:
    """How far an assistant drafts. A threshold of 0 switches off the one that is on by default."""
    options, drafting = view.recipe.length.options, plan.drafting
    drafting |= {"num_assistant_tokens": length, "num_assistant_tokens_schedule": "constant"}
    drafting["assistant_confidence_threshold"] = 0.0
    if view.policy == "additive":
        drafting["num_assistant_tokens"] = min(length, options["start"] or length)
        drafting["num_assistant_tokens_schedule"] = "heuristic_transient"
        ledger.lacks("length", "2 more after a draft accepted whole, else 1 less; no upper end", view.policy)
    elif view.policy in ("threshold", "confidence"):
        bar = options["start" if view.policy == "threshold" else "threshold"]
        drafting["assistant_confidence_threshold"] = bar
        moves = "where scikit-learn is installed it moves by its own rule, and stays moved for later calls"
        ledger.lacks("length", f"a draft ends after a token below {bar:g}; {moves}", view.policy)


def _modules(draft: DraftView, plan: _Plan, ledger: Ledger) -> None:
    plan.settings["use_mtp"] = True
    ledger.lacks(draft.key("k"), "as many tokens as the target has MTP modules", draft.k)
    if draft.path is not None:
        ledger.lacks(draft.key("weights"), "the modules inside the target's own checkpoint", draft.path)


def _block(draft: DraftView, length: int, plan: _Plan, ledger: Ledger) -> None:
    plan.settings["speculation_type"] = "dflash"
    plan.assistant = draft.place
    if draft.facts.trained_k != length:
        ledger.lacks(draft.key("k"), "the block of the drafter's own config.json, the anchor's slot left out", length)
    plan.notes.append("transformers runs DFlash drafters whose architecture it has, and refuses others")


def _verify(view: RecipeView, draft: DraftView, ledger: Ledger) -> None:
    """With an assistant rejection sampling, with a search of the text a comparison with sampled tokens."""
    rule = "match" if draft.family in _HISTORY else "rejection"
    if view.rule == "typical":
        ledger.lacks("verify", f"{rule}, which keeps the law of the text", view.rule)
    elif view.greedy or (view.rule == rule == "rejection"):
        ledger.says("verify")
    else:
        ledger.lacks("verify", f"{rule}: the same law, from other random numbers", view.rule)

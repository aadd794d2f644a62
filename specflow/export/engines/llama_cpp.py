"""llama.cpp: recipes as command lines of llama-server. No torch.

Drafts are greedy, and the target's own samples decide: rule match. A flag that keeps its name may still change its
default (`--draft-p-min` 0.75 became 0), so every value that matters is written out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specflow.export.declared_batch import lacks_schedule, length_at_batch
from specflow.export.draft_choice import OF_TREES, notes_on
from specflow.export.engines.base import NO_DRAFTER, Dialect, Exported, Given, Imported
from specflow.export.engines.llama_cpp_flags import DIALECTS, rank_of, spelling
from specflow.export.engines.llama_cpp_read import read_command
from specflow.export.recipe_view import Ledger

if TYPE_CHECKING:
    from specflow.export.recipe_view import DraftView, RecipeView

__all__ = ["ENGINE", "LlamaCpp"]

_TYPES = {
    "small_model": "draft-simple",
    "eagle3": "draft-eagle3",
    "mtp": "draft-mtp",
    "dflash": "draft-dflash",
    "dspark": "draft-dspark",
}
"""Method -> what `--spec-type` calls it; drafts from history come on top."""
_YOUNG = ("b10048", "b10752")
"""Builds in which drafters that read target features were seen: they came one after another, May to July 2026."""
_SAMPLERS = "penalties;temperature;top_k;top_p;min_p"
_SMALL_HASH = 16
_LARGEST_SEED = 2**32 - 2  # the next one asks for a random seed
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(:[\w.-]+)?", re.ASCII)


@dataclass
class _Command:
    """A command line under construction."""

    view: RecipeView
    dialect: Dialect
    ledger: Ledger
    words: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def put(self, meaning: str, value: object) -> None:
        self.words += [spelling(meaning, self.dialect), _word(value)]


class LlamaCpp:
    """The command line of llama-server, both ways."""

    name = "llama_cpp"
    dialects = DIALECTS

    def export(self, view: RecipeView, dialect: Dialect) -> Exported:
        """A recipe as a command line."""
        command = _Command(view, dialect, Ledger(view), ["llama-server"])
        _put_target(command)
        _put_sampling(command)
        young = _put_drafts(command)
        lacks_schedule(view, command.ledger)
        versions = f"{_YOUNG[0]} to {_YOUNG[1]}" if young else dialect.versions
        gaps = command.ledger.gaps()
        return Exported(self.name, versions, tuple(command.words), {}, tuple(command.notes), gaps)

    def read(self, given: Given, dialect: Dialect) -> Imported:
        """A command line as a recipe.

        Raises:
            RecipeError: It is no command of llama.cpp, or a value cannot be read.
        """
        return read_command(given, dialect)


ENGINE = LlamaCpp()


def _word(value: object) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else str(value)


def _put_model(command: _Command, place: str, file: str, hub: str) -> None:
    """A model by its file, or by a repository of the hub."""
    is_file = place.endswith(".gguf") or not _HUB_ID.fullmatch(place)
    command.put(file if is_file else hub, place)
    if place != NO_DRAFTER and not place.endswith(".gguf"):
        what = "a GGUF file, which convert_hf_to_gguf.py makes" if is_file else "a repository with GGUF files"
        command.notes.append(f"{place}: llama.cpp reads {what}")


def _put_target(command: _Command) -> None:
    recipe, ledger = command.view.recipe, command.ledger
    _put_model(command, command.view.target, "model", "hf")
    ledger.says("target.model")
    runtime = recipe.runtime
    if runtime.context is not None:
        command.put("context", runtime.context * runtime.batch)
        ledger.says("runtime.context")
    if runtime.batch > 1:
        command.put("parallel", runtime.batch)
        ledger.says("runtime.batch")
    if recipe.target.threads is not None:
        command.put("threads", recipe.target.threads)
        ledger.says("target.threads")
    if recipe.target.device == "cpu":
        command.put("device", "none")
        ledger.says("target.device")
    if "target.dtype" in command.view.said:
        ledger.lacks("target.dtype", "the type of the GGUF file")
    if "target.revision" in command.view.said:
        ledger.lacks("target.revision", "the newest revision, or the file that is named")


def _put_sampling(command: _Command) -> None:
    """Every default that is not a recipe's is written out: the engine's are temperature 0.8, top-k 40 and others."""
    sampling, ledger, view = command.view.sampling, command.ledger, command.view
    command.put("predict", sampling.max_new_tokens)
    command.put("temperature", sampling.temperature)
    ledger.says("sampling.max_new_tokens", "sampling.temperature")
    if not view.greedy:
        for name in ("top_k", "top_p", "min_p"):
            command.put(name, getattr(sampling, name))
        if sampling.top_p < 1.0 or sampling.min_p > 0.0:
            command.put("samplers", _SAMPLERS)
    ledger.says("sampling.top_k", "sampling.top_p", "sampling.min_p")
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    changed = [name for name in penalties if f"sampling.{name}" in view.said]
    for name in changed:
        command.put(name, getattr(sampling, name))
        ledger.says(f"sampling.{name}")
    if changed:
        command.put("penalty_window", -1)
        command.notes.append("penalties count the prompt too; a recipe's presence and frequency count the text alone")
    if sampling.seed is not None and sampling.seed <= _LARGEST_SEED:
        command.put("seed", sampling.seed)
        ledger.says("sampling.seed")
        command.notes.append("the same seed draws other tokens than here: the engine has its own generator")
    if sampling.ignore_eos:
        command.words.append(spelling("ignore_eos", command.dialect))
        ledger.says("sampling.ignore_eos")
    for token, bias in sampling.logit_bias.items():
        command.put("logit_bias", f"{token}{'+' if bias >= 0 else '-'}{_word(abs(bias))}")
    ledger.says("sampling.logit_bias")
    for name in ("stop_strings", "stop_ids", "min_new_tokens", "logprobs"):
        if f"sampling.{name}" in view.said:
            ledger.lacks(f"sampling.{name}", "left out: what requests ask for, not the command line")


def _put_drafts(command: _Command) -> bool:
    """What drafts; whether it takes a young build."""
    view, ledger = command.view, command.ledger
    taken = _expressible(command)
    lengths = {draft.at: length_at_batch(view, draft) for draft in taken}
    taken = [draft for draft in taken if lengths[draft.at] > 0]
    if not taken:
        ledger.says("draft", "verify", "length")
        command.notes += notes_on(view, None)
        return False
    types = [_type_of(draft) for draft in taken]
    if (rank_of(command.dialect) > 0 and types != ["draft-simple"]) or rank_of(command.dialect) == 2:
        command.put("types", ",".join(types))
    for draft, name in zip(taken, types, strict=True):
        command.notes += [note for note in notes_on(view, draft) if note not in command.notes]
        ledger.says(draft.key("method"), draft.key("source"), draft.key("k"))
        if name.startswith("ngram"):
            _put_history(command, draft, name, lengths[draft.at])
        else:
            _put_model_drafts(command, draft, lengths[draft.at])
    _put_shared_length(command, [lengths[draft.at] for draft in taken], types)
    ledger.says("draft.k")
    _put_rule(command)
    return any(name.startswith("draft") and name != "draft-simple" for name in types)


def _expressible(command: _Command) -> list[DraftView]:
    """Sources the builds know, drafts from history first as the engine has them: one of each kind."""
    rank, ledger = rank_of(command.dialect), command.ledger
    taken: list[DraftView] = []
    for draft in command.view.drafts:
        history = draft.family in ("ngram", "suffix")
        known = rank >= 1 if history else draft.family in _TYPES and (rank == 2 or draft.family == "small_model")
        same = [other for other in taken if (other.family in ("ngram", "suffix")) == history]
        if not known:
            later = "" if rank == 2 else f" in builds {command.dialect.versions}"
            ledger.lacks(draft.at, f"no such drafts{later}: left out", draft.family)
        elif same:
            ledger.lacks(draft.at, f"one draft model, one search of history: {same[0].family} drafts", draft.family)
        else:
            taken.append(draft)
    ordered = sorted(taken, key=lambda draft: draft.family not in ("ngram", "suffix"))
    if ordered != taken:
        ledger.lacks("draft.first_of", "drafts from history always go first", [draft.family for draft in taken])
    if command.view.combined == "merge":
        ledger.lacks("draft.merge", "no trees: the first source that has a draft", [draft.family for draft in taken])
        ledger.says("draft.nodes")
    return ordered


def _type_of(draft: DraftView) -> str:
    if draft.family in ("ngram", "suffix"):
        return "ngram-mod" if draft.options["share"] else "ngram-simple"
    return _TYPES[draft.family]


def _put_history(command: _Command, draft: DraftView, name: str, length: int) -> None:
    """A search that looks for matches of one length: the shortest that a recipe would draft from."""
    shortest, longest = draft.match
    today, shared = rank_of(command.dialect) == 2, name == "ngram-mod"
    command.put("mod_match" if shared and today else f"{name}.size_n" if today else "size_n", shortest)
    if shared:
        command.put("mod_min" if today else "draft_min", 1)
    elif today:
        command.put(f"{name}.size_m", length)
    else:
        command.put("size_m", length)
    if shared and today:
        command.put("mod_max", length)
    if not shared:
        command.notes.append(f"{name} drafts once the text is longer than the match and the draft together")
    elif shortest < _SMALL_HASH:
        command.notes.append(f"ngram-mod hashes {shortest} tokens: below {_SMALL_HASH} its drafts are often wrong")
    ledger = command.ledger
    ledger.says(draft.key("min_match"), draft.key("share"), draft.key("index"))
    if longest > shortest:
        instead = f"the latest match of {shortest} tokens; a longer one is not preferred"
        ledger.lacks(draft.key("max_match"), instead, longest)
    else:
        ledger.says(draft.key("max_match"))
    if draft.family == "suffix":
        ledger.lacks(draft.key("method"), "n-grams of one length")


def _put_model_drafts(command: _Command, draft: DraftView, length: int) -> None:
    ledger = command.ledger
    if draft.path is not None or draft.family != "mtp":
        _put_model(command, draft.place, "draft_model", "draft_hf")
    if rank_of(command.dialect) == 2:
        command.put("draft_max", length)
        command.put("draft_min", 0)
    ledger.says(draft.key("model"), draft.key("weights"))
    if not draft.is_chain:
        ledger.lacks(draft.key("shape"), f"a chain of {length}", draft.shape)
        ledger.says(*(draft.key(name) for name in OF_TREES))
    if draft.options.get("confidence_head"):
        ledger.lacks(draft.key("confidence_head"), "not used: a draft ends by draft probability alone", True)
    for name in ("dtype", "device"):
        if draft.key(name) in command.view.said:
            ledger.lacks(draft.key(name), "the type of the GGUF file" if name == "dtype" else "where the target is")
    _put_unsure(command)


def _put_unsure(command: _Command) -> None:
    """Where a draft ends before k. The default moved from 0.75 to 0 under the same name, so it always stands here."""
    view, ledger = command.view, command.ledger
    drops = rank_of(command.dialect) == 2
    options = view.recipe.length.options
    bar = {"confidence": options.get("threshold"), "threshold": options.get("start")}.get(view.policy)
    command.put("p_min", float(bar or 0.0))
    if bar is None:
        return
    if view.policy == "threshold" and (drops or options["step"] > 0.0):
        stays = "the unsure token is dropped, and " if drops else ""
        ledger.lacks("length", f"{stays}the bar stays at {bar:g}", view.policy)
    elif view.policy == "confidence" and (not drops or options["cumulative"]):
        ledger.lacks("length", "the bar is for each token; the unsure one stays in the draft", view.policy)
    else:
        ledger.says("length")


def _put_shared_length(command: _Command, lengths: list[int], types: list[str]) -> None:
    """Before the renaming one flag said how long drafts of any kind may be."""
    if rank_of(command.dialect) == 2:
        return
    command.put("draft_max", max(lengths))
    if "ngram-mod" not in types:
        command.put("draft_min", 0)
    if len(set(lengths)) > 1:
        command.ledger.lacks("draft.k", f"all drafts up to {max(lengths)}", lengths)


def _put_rule(command: _Command) -> None:
    view, ledger = command.view, command.ledger
    if view.policy == "fixed":
        ledger.says("length")
    if view.rule == "match" or (view.greedy and view.rule != "typical"):
        ledger.says("verify")
    elif view.rule == "typical":
        ledger.lacks("verify", "match: the text is the target's own", view.rule)
    else:
        ledger.lacks("verify", "match: the same law, shorter drafts accepted when sampling", view.rule)

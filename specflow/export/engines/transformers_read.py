"""Settings of transformers' `generate` as recipes, with what is wrong about them. No torch."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any, Literal

from specflow.errors import RecipeError
from specflow.export.engine_input import Fields, as_mapping
from specflow.export.engines.base import Dialect, Finding, Given, Imported, worst_first
from specflow.export.engines.transformers_script import Said, read_script
from specflow.export.imported_draft import drafter, recipe_of
from specflow.recipe import nearest

__all__ = ["OF_DRAFTERS", "OF_SPECULATION", "read_transformers"]

OF_DRAFTERS = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
"""Read from the generation config of the model that drafts, and nowhere else."""
OF_SPECULATION = (
    *OF_DRAFTERS,
    "prompt_lookup_num_tokens",
    "max_matching_ngram_size",
    "assistant_early_exit",
    "assistant_lookbehind",
    "target_lookbehind",
    "assistant_ensemble_weight",
    "use_mtp",
    "speculation_type",
    "is_assistant",
)
"""Fields of a GenerationConfig that are about drafts, in 5.24.0."""
_OTHERS = (
    "assistant_model", "assistant_tokenizer", "tokenizer", "streamer", "do_sample", "temperature", "top_k", "top_p",
    "min_p", "repetition_penalty", "max_new_tokens", "min_new_tokens", "max_length", "min_length", "stop_strings",
    "sequence_bias", "eos_token_id", "bos_token_id", "pad_token_id", "num_beams", "num_return_sequences",
    "cache_implementation", "use_cache", "seed", "stop_ids", "loading", "device", "transformers_version",
    "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h", "no_repeat_ngram_size", "encoder_repetition_penalty",
    "return_dict_in_generate", "output_scores", "output_logits", "attention_mask", "input_ids", "inputs",
    "early_stopping", "length_penalty", "max_time", "_from_model_config",
)  # fmt: skip
_MOST = 256  # draft tokens and tokens of a match that a recipe may name
_ASSISTANT_LENGTH, _BAR, _TOP_K, _NGRAM = 20, 0.4, 50, 2  # what generate takes where nothing is said
_ROOM = 4  # how far above its start a growing draft length may go in a recipe


def read_transformers(given: Given, dialect: Dialect) -> Imported:
    """A recipe that means the same, and the findings.

    Raises:
        RecipeError: It is neither JSON, nor a script, nor words such as `num_beams=1`.
    """
    reader = _Reader(_said(given), given.name, dialect)
    target, sampling = reader.target(), reader.sampling()
    draft = reader.draft()
    length = reader.length(draft) if draft is not None else {}
    rule = {"rule": "match" if draft is not None and draft["method"] == "ngram" else "rejection"}
    if not sampling["temperature"]:
        rule = {"rule": "match"}
    reader.check()
    data = recipe_of(target, draft, verify=rule, length=length, sampling=sampling)
    return Imported("transformers", data, worst_first(reader.findings), dialect.versions)


def _said(given: Given) -> Said:
    if given.is_command:
        return _from_words(given)
    if given.text.lstrip()[:1] != "{":
        return read_script(given.text, given.name)
    settings = as_mapping(given.text, given.name)
    own = {name: settings[name] for name in OF_DRAFTERS if settings.get(name) is not None}
    return Said(settings={key: value for key, value in settings.items() if key not in own}, drafting=own)


def _from_words(given: Given) -> Said:
    """`num_assistant_tokens=5 assistant_model=org/name`"""
    said = Said()
    for word in given.argv:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise RecipeError(
                given.name, repr(word), "words such as prompt_lookup_num_tokens=10, a JSON file or a script"
            )
        try:
            constant = ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            constant = value
        if name in ("assistant_model", "model"):
            setattr(said, "assistant" if name == "assistant_model" else "target", str(constant))
        else:
            said.settings[name] = constant
    return said


class _Reader:
    """Reads the sections of a recipe from settings, and finds faults."""

    def __init__(self, said: Said, where: str, dialect: Dialect) -> None:
        self._said, self._where, self._dialect = said, where, dialect
        self._settings, self._drafting = Fields(said.settings, where), Fields(said.drafting, where)
        self.findings: list[Finding] = []

    def _find(
        self, severity: Literal["error", "warning", "note"], where: str, found: object, meaning: str, fix: str = ""
    ) -> None:
        self.findings.append(Finding(severity, where, str(found), meaning, fix))

    def target(self) -> dict[str, Any]:
        section: dict[str, Any] = {}
        if self._said.target:
            section["model"] = self._said.target
        else:
            self._find("warning", "model", "not named", "the recipe says the default one", "put it into target.model")
        loading = self._said.settings.get("loading")
        fields = Fields(loading if isinstance(loading, Mapping) else {}, "LOADING")
        dtype = fields.text("dtype") or fields.text("torch_dtype") or "auto"
        if dtype in ("float32", "bfloat16", "float16", "float64"):
            section["dtype"] = dtype
        if (revision := fields.text("revision")) is not None:
            section["revision"] = revision
        if fields.truth("trust_remote_code"):
            section["trust_remote_code"] = True
        if (device := self._settings.text("device")) not in (None, "auto"):
            section["device"] = device
        return section

    def sampling(self) -> dict[str, Any]:
        """Greedy unless `do_sample` is true; then top-k is 50 where nothing is said."""
        fields = self._settings
        section: dict[str, Any] = {"temperature": 0.0}
        if fields.truth("do_sample"):
            warm = fields.number("temperature", 0.0, 1e6)
            if warm == 0.0:
                self._find("error", "temperature", warm, "0 and do_sample: refused; read as greedy", "do_sample=False")
            section["temperature"] = 1.0 if warm is None else warm
            top_k = fields.whole("top_k")
            section["top_k"] = _TOP_K if top_k is None else top_k
            if top_k is None:
                self._find("note", "top_k", "not set", f"{_TOP_K} by default; 0 keeps all tokens", "top_k=0")
            if (top_p := fields.number("top_p", 1e-9, 1.0)) is not None:
                section["top_p"] = top_p
            if (min_p := fields.number("min_p", 0.0, 1.0)) is not None:
                section["min_p"] = min_p
        if (penalty := fields.number("repetition_penalty", 1e-9, 1e6)) is not None:
            section["repetition_penalty"] = penalty
        section |= self._ends()
        if (seed := fields.whole("seed")) is not None:
            section["seed"] = seed
        bias = fields.data.get("sequence_bias")
        if bias is not None:
            section["logit_bias"] = self._bias(bias)
        return section

    def _ends(self) -> dict[str, Any]:
        fields, section = self._settings, dict[str, Any]()
        if (most := fields.whole("max_new_tokens", 1)) is not None:
            section["max_new_tokens"] = most
        else:
            what = "max_length counts the prompt too, and is 20 where nothing is said; the recipe stops at 128 tokens"
            self._find("note", "max_new_tokens", "not set", what, "max_new_tokens=256")
        if (least := fields.whole("min_new_tokens")) is not None:
            if least == most is not None:
                section["ignore_eos"] = True
            else:
                section["min_new_tokens"] = least
        stops = fields.data.get("stop_strings")
        if isinstance(stops, str):
            stops = [stops]
        if isinstance(stops, list | tuple) and all(isinstance(each, str) for each in stops):
            section["stop_strings"] = tuple(stops)
        ids = fields.data.get("stop_ids")
        if isinstance(ids, list | tuple) and all(type(each) is int for each in ids):
            section["stop_ids"] = tuple(ids)
        return section

    def _bias(self, bias: Any) -> dict[int, float]:
        pairs = bias.items() if isinstance(bias, Mapping) else bias
        try:
            known = {int(tokens[0]): float(value) for tokens, value in pairs if len(tokens) == 1}
            count = len(list(pairs))
        except (TypeError, ValueError, IndexError, KeyError, OverflowError) as error:
            raise RecipeError(f"{self._where}: sequence_bias", repr(bias)[:80], "pairs such as [[id], bias]") from error
        if len(known) < count:
            self._find("note", "sequence_bias", bias, "biases of several tokens in a row are not in the recipe")
        return known

    def draft(self) -> dict[str, Any] | None:
        """What drafts, in the order in which `generate` looks."""
        said, fields = self._said, self._settings
        early, lookup = fields.whole("assistant_early_exit", 1), fields.whole("prompt_lookup_num_tokens")
        block = fields.text("speculation_type")
        ways = {
            "assistant_early_exit": early is not None,
            "prompt_lookup_num_tokens": lookup is not None,
            "use_mtp": bool(fields.truth("use_mtp")),
            "assistant_model": said.assistant is not None,
        }
        asked = [name for name, there in ways.items() if there]
        for other in asked[1:]:
            self._find("warning", other, "set", f"{asked[0]} goes first: this one is not used", "leave one of them out")
        chosen = asked[0] if asked else "drafting" if said.drafting else ""
        if chosen == "assistant_early_exit":
            assert early is not None
            return {"method": "early_exit", "k": self._drafted(), "exit_layer": early}
        if chosen == "prompt_lookup_num_tokens":
            assert lookup is not None
            return self._look_up(lookup)
        if chosen == "use_mtp":
            self._find("note", "use_mtp", True, "as many tokens as the target has MTP modules; the recipe says 1")
            return {"method": "mtp", "k": 1}
        if chosen == "assistant_model" and block is not None:
            return self._block(block)
        return {**self._assistant(), "k": self._drafted()} if chosen else None

    def _look_up(self, length: int) -> dict[str, Any]:
        longest = self._settings.whole("max_matching_ngram_size")
        if longest is None or longest == 0:
            found = "not set" if longest is None else "0"
            self._find(
                "note", "max_matching_ngram_size", found, f"{_NGRAM} tokens", f"max_matching_ngram_size={_NGRAM}"
            )
            longest = _NGRAM
        if length < 1:
            raise RecipeError(f"{self._where}: prompt_lookup_num_tokens", str(length), "1 or more: generate refuses 0")
        for name in OF_DRAFTERS:
            if name in self._settings or name in self._drafting:
                self._find("note", name, "set", "means nothing with prompt lookup", "leave it out")
        size = self._within("max_matching_ngram_size", longest)
        return {
            "method": "ngram",
            "k": self._within("prompt_lookup_num_tokens", length),
            "min_match": 1,
            "max_match": size,
        }

    def _block(self, kind: str) -> dict[str, Any]:
        if kind != "dflash":
            raise RecipeError(f"{self._where}: speculation_type", repr(kind), "dflash", nearest(kind, ["dflash"]))
        place = drafter(self._said.assistant)
        self._find("note", "speculation_type", kind, "k is the drafter's own block; the recipe says its default")
        return {"method": "dflash", **({"weights": place} if place else {})}

    def _assistant(self) -> dict[str, Any]:
        place = drafter(self._said.assistant)
        if self._said.assistant == "":
            self._find(
                "warning", "assistant_model", "not named", "the script does not say which", "put it into draft.model"
            )
        return {"method": "small_model", **({"model": place} if place else {})}

    def _drafted(self) -> int:
        """How far an assistant drafts: what its own generation config says."""
        for name in OF_DRAFTERS:
            if name in self._settings:
                found = self._settings.data[name]
                what = "has no effect there: generate reads it from the generation config of the model that drafts"
                self._find("warning", name, found, what, f"assistant.generation_config.{name} = {found!r}")
        length = self._drafting.whole("num_assistant_tokens", 1)
        if length is None:
            self._find(
                "note", "num_assistant_tokens", "not set", f"{_ASSISTANT_LENGTH} tokens", "set it on the assistant"
            )
        start = self._within("num_assistant_tokens", length or _ASSISTANT_LENGTH)
        return min(_MOST, start * _ROOM) if self._grows() else start

    def _grows(self) -> bool:
        schedule = self._drafting.text("num_assistant_tokens_schedule") or "constant"
        if schedule not in ("constant", "heuristic", "heuristic_transient"):
            known = ["constant", "heuristic", "heuristic_transient"]
            where = f"{self._where}: num_assistant_tokens_schedule"
            raise RecipeError(where, repr(schedule), f"one of: {', '.join(known)}", nearest(schedule, known))
        return schedule != "constant"

    def length(self, draft: Mapping[str, Any]) -> dict[str, Any]:
        """The schedule, or the threshold that is on by default."""
        if draft["method"] not in ("small_model", "early_exit"):
            return {"policy": "fixed"}
        bar = self._drafting.number("assistant_confidence_threshold", 0.0, 1.0)
        if bar is None:
            what = f"{_BAR} by default: a draft ends after a token below it; it moves, and stays moved for later calls"
            self._find(
                "warning", "assistant_confidence_threshold", "not set", what, "0.0 on the assistant switches it off"
            )
            bar = _BAR
        if self._grows():
            return self._growing(bar)
        return {"policy": "threshold", "start": bar} if bar > 0.0 else {"policy": "fixed"}

    def _growing(self, bar: float) -> dict[str, Any]:
        schedule = self._drafting.data["num_assistant_tokens_schedule"]
        what = "2 more after a draft accepted whole, else 1 less, without an upper end; the recipe has one"
        self._find("note", "num_assistant_tokens_schedule", schedule, what)
        if schedule == "heuristic":
            what = "the length reached stays with the assistant for the next call; a recipe starts anew"
            self._find("warning", "num_assistant_tokens_schedule", schedule, what, "heuristic_transient")
        if bar > 0.0:
            what = "ends drafts beside the schedule; a recipe has one of the two"
            self._find("note", "assistant_confidence_threshold", bar, what)
        start = self._drafting.whole("num_assistant_tokens", 1) or _ASSISTANT_LENGTH
        return {"policy": "additive", "start": min(start, _MOST), "up": 2, "down": 1}

    def _within(self, name: str, value: int) -> int:
        if value > _MOST:
            self._find("warning", name, value, f"a recipe has at most {_MOST}: read as {_MOST}")
        return min(value, _MOST)

    def check(self) -> None:
        """What does not go with drafts, and names that nobody knows."""
        fields = self._settings
        if (weight := fields.number("assistant_ensemble_weight", 0.0, 1.0)) is not None:
            what = "changes the law of the text; a recipe keeps it"
            self._find("warning", "assistant_ensemble_weight", weight, what, "leave it out")
        for name, most in (("num_beams", 1), ("num_return_sequences", 1)):
            if (fields.whole(name) or 1) > most:
                self._find("error", name, fields.data[name], "nothing is drafted, or generate refuses", f"{name}=1")
        cache = fields.text("cache_implementation") or ""
        if "static" in cache:
            self._find("error", "cache_implementation", cache, "drafts cannot be taken back from it", "dynamic")
        if self._dialect.name == "assistants":
            for name in ("use_mtp", "speculation_type"):
                if name in fields:
                    self._find(
                        "error", name, fields.data[name], f"not there in {self._dialect.versions}", "5.15 or newer"
                    )
        for name in self._said.unread:
            self._find("note", name, "not a constant", "its value is not known here")
        known = (*OF_SPECULATION, *_OTHERS)
        for name in [*self._said.settings, *self._said.drafting]:
            if name not in known and (hint := nearest(name, known)):
                what = "unknown: a GenerationConfig keeps it in silence, and nothing reads it"
                self._find("warning", name, self._said.settings.get(name), what, hint)

"""`genai_config.json` of onnxruntime-genai as recipes, with what is wrong about them. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from specflow.errors import RecipeError
from specflow.export.engine_input import Fields, as_mapping
from specflow.export.engines.base import Dialect, Finding, Given, Imported, worst_first
from specflow.export.imported_draft import drafter, recipe_of
from specflow.recipe import nearest

__all__ = ["LARGEST_SEED", "MOST", "OPTIONS", "read_onnxruntime_genai"]

MOST = 16  # draft tokens, and size of an n-gram
LARGEST_SEED = 2**31 - 1
OPTIONS = ("max_draft_tokens", "ngram_size", "ngram_chained_lookup", "min_adaptive_k", "cooldown")
"""Keys of `speculative` in 0.18.0; any other one is refused."""
_UNSET_LENGTH, _TOP_K = 4, 50


def read_onnxruntime_genai(given: Given, dialect: Dialect) -> Imported:
    """A recipe that means the same, and the findings.

    Raises:
        RecipeError: It is no JSON of this engine.
    """
    if given.is_command:
        raise RecipeError(given.name, "a command line", "settings.json or genai_config.json")
    reader = _Reader(as_mapping(given.text, given.name), given.name, dialect)
    draft, sampling = reader.draft(), reader.sampling()
    rule = (
        "rejection" if draft is not None and draft["method"] == "small_model" and sampling["temperature"] else "match"
    )
    length = {"policy": "expected_gain" if reader.adapts else "fixed"}
    data = recipe_of(reader.target(), draft, verify={"rule": rule}, length=length, sampling=sampling)
    return Imported("onnxruntime_genai", data, worst_first(reader.findings), dialect.versions)


class _Reader:
    """Reads the sections of a recipe from a configuration, and finds faults."""

    def __init__(self, data: Mapping[str, Any], where: str, dialect: Dialect) -> None:
        inner = data.get("overlay")
        self._whole = isinstance(inner, Mapping)
        self._settings = Fields(data if self._whole else {}, where)
        config = inner if isinstance(inner, Mapping) else data
        if not self._whole and not set(config) & {"model", "search", "speculative"}:
            raise RecipeError(where, "neither model, search nor speculative", "a genai_config.json, or settings.json")
        self._model = _section(config, "model")
        self._search = Fields(_section(config, "search"), f"{where}: search")
        self._said = Fields(_section(config, "speculative"), f"{where}: speculative")
        self._where, self._dialect = where, dialect
        self.adapts = False
        self.findings: list[Finding] = []

    def _find(
        self, severity: Literal["error", "warning", "note"], where: str, found: object, meaning: str, fix: str = ""
    ) -> None:
        self.findings.append(Finding(severity, where, str(found), meaning, fix))

    def target(self) -> dict[str, Any]:
        if (place := self._settings.text("model")) is not None:
            return {"model": place}
        what = "a genai_config.json does not name its model: the recipe says the default one"
        self._find("warning", "model", "not named", what, "put it into target.model")
        return {}

    def sampling(self) -> dict[str, Any]:
        search = self._search
        section: dict[str, Any] = {"temperature": 0.0}
        if search.truth("do_sample"):
            warm = search.number("temperature", 0.0, 1e6)
            section["temperature"] = 1.0 if warm is None else warm
            top_k = search.whole("top_k")
            section["top_k"] = _TOP_K if top_k is None else top_k
            if top_k is None:
                self._find("note", "top_k", "not set", f"{_TOP_K} by default; 0 keeps all tokens", "top_k: 0")
            if (top_p := search.number("top_p", 1e-9, 1.0)) is not None:
                section["top_p"] = top_p
        if (penalty := search.number("repetition_penalty", 1e-9, 1e6)) is not None:
            section["repetition_penalty"] = penalty
        if (seed := search.whole("random_seed", -1)) is not None and seed >= 0:
            section["seed"] = seed
        for name, low in (("max_new_tokens", 1), ("min_new_tokens", 0)):
            if (number := self._settings.whole(name, low)) is not None:
                section[name] = number
        if "max_new_tokens" not in section:
            what = "max_length counts the prompt too; the recipe stops at 128 tokens"
            self._find("note", "max_length", self._search.data.get("max_length", "not set"), what)
        return section

    def draft(self) -> dict[str, Any] | None:
        said = self._said
        self._check_names()
        size = said.whole("ngram_size") or 0
        named = self._settings.text("draft_model")
        has_draft = named is not None or isinstance(self._model.get("draft"), Mapping)
        if size and has_draft:
            what = "n-gram search and a draft model exclude each other: refused"
            self._find("error", "ngram_size", size, what, "leave one of them out")
        if said.truth("ngram_chained_lookup"):
            self._chained(size)
        if said.truth("cooldown"):
            what = (
                "after three rounds without an accepted token one round is plain; recipes have expected_gain for that"
            )
            self._find("note", "cooldown", True, what)
        if has_draft:
            self._check_search()
            path = drafter(named)
            if named is None:
                what = "the folder does not say which model it was made from"
                self._find("warning", "model.draft", "not named", what, "put it into draft.model")
            return {"method": "small_model", "k": self._length(), **({"model": path} if path else {})}
        if not size:
            return None
        return self._look_up(size)

    def _chained(self, size: int) -> None:
        if size:
            what = "looks up again behind what it found; a recipe copies on"
            self._find("note", "ngram_chained_lookup", True, what)
        else:
            self._find("error", "ngram_chained_lookup", True, "needs ngram_size: refused", "ngram_size: 3")

    def _look_up(self, size: int) -> dict[str, Any]:
        if self._dialect.name != "n-grams":
            self._find("error", "ngram_size", size, f"not there in {self._dialect.versions}", "0.18 or newer")
        if not 2 <= size <= MOST:
            self._find("error", "ngram_size", size, f"0, or 2 to {MOST}: refused", "ngram_size: 3")
        match = max(1, min(size, MOST) - 1)
        self._find("note", "ngram_size", size, f"looks for the last {match} tokens, one fewer than it says")
        return {"method": "ngram", "k": self._length(), "min_match": match, "max_match": match}

    def _length(self) -> int:
        length = self._said.whole("max_draft_tokens")
        least = self._said.whole("min_adaptive_k") or 0
        if least:
            self.adapts = True
            what = f"the length starts there and adapts, up to {MOST}: max_draft_tokens is no upper end any more"
            self._find("note", "min_adaptive_k", least, what, "0 keeps max_draft_tokens")
            return MOST
        if length is None:
            self._find("note", "max_draft_tokens", "not set", f"{_UNSET_LENGTH} tokens by default")
            return _UNSET_LENGTH
        if not 1 <= length <= MOST:
            self._find("error", "max_draft_tokens", length, f"1 to {MOST}: refused", f"max_draft_tokens: {MOST}")
        return max(1, min(length, MOST))

    def _check_names(self) -> None:
        for name in self._said.data:
            if name not in OPTIONS:
                hint = nearest(name, OPTIONS)
                self._find("error", name, self._said.data[name], "unknown: the file is refused", hint)

    def _check_search(self) -> None:
        for name, most in (("num_beams", 1), ("num_return_sequences", 1), ("no_repeat_ngram_size", 0)):
            if (self._search.whole(name) or 0) > most:
                found = self._search.data[name]
                self._find("error", name, found, "does not go with a draft model: refused", f"{name}: {most}")


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}

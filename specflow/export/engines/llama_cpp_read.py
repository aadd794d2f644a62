"""Command lines of llama.cpp as recipes, with what is wrong about them. No torch."""

from __future__ import annotations

import re
from typing import Any

from specflow.errors import RecipeError
from specflow.export.engines.base import NO_DRAFTER, Dialect, Finding, Given, Imported, worst_first
from specflow.export.engines.llama_cpp_flags import DRAFT_TYPES, NGRAM_TYPES, Flags, parse_flags, rank_of, spelling
from specflow.export.imported_draft import recipe_of
from specflow.export.pair_checks import check_block, check_match
from specflow.recipe import nearest

__all__ = ["read_command"]

_METHODS = {
    "draft-simple": "small_model",
    "draft-eagle3": "eagle3",
    "draft-mtp": "mtp",
    "draft-dflash": "dflash",
    "draft-dspark": "dspark",
}
_MOST = 256  # draft tokens, and tokens of a match, that a recipe may name
_LONG_DRAFT = 24  # a smallest draft from here on throws away nearly all that texts repeat
_OLD_LENGTH, _NEW_LENGTH = 16, 3  # default of the flag for draft models, before and after the renaming
_OLD_BAR = 0.75


def read_command(given: Given, dialect: Dialect) -> Imported:
    """A recipe that means the same, and the findings.

    Raises:
        RecipeError: It is no command of llama.cpp, or a value cannot be read.
    """
    flags = parse_flags(given, dialect)
    reader = _Reader(flags, dialect)
    target, sampling, runtime = reader.target(), reader.sampling(), reader.runtime()
    parts = [reader.part(name) for name in reader.types()]
    sections = {"sampling": sampling, "runtime": runtime}
    if parts:
        sections |= {"verify": {"rule": "match"}, "length": reader.length(parts)}
    data = recipe_of(target, reader.draft(parts) if parts else None, **sections)
    if flags.ignored:
        meaning = "says nothing about how tokens are decided: not in the recipe"
        flags.findings.append(Finding("note", "other flags", " ".join(flags.ignored), meaning))
    return Imported("llama_cpp", data, worst_first(flags.findings), dialect.versions)


class _Reader:
    """Reads the sections of a recipe from flags, and finds faults."""

    def __init__(self, flags: Flags, dialect: Dialect) -> None:
        self._flags, self._dialect, self._rank = flags, dialect, rank_of(dialect)

    def _find(self, severity: Any, meaning: str, found: object, what: str, fix: str = "") -> None:
        where = self._flags.spelled.get(meaning) or spelling(meaning, self._dialect)
        self._flags.findings.append(Finding(severity, where, str(found), what, fix))

    def target(self) -> dict[str, Any]:
        flags, section = self._flags, dict[str, Any]()
        place = flags.values.get("model") or flags.values.get("hf")
        if place:
            section["model"] = place
        else:
            self._find("warning", "model", "no model", "the recipe says the default one", "-m FILE or -hf REPOSITORY")
        if (threads := flags.whole("threads", 0)) > 0:
            section["threads"] = threads
        if flags.values.get("device") == "none":
            section["device"] = "cpu"
        return section

    def runtime(self) -> dict[str, Any]:
        section: dict[str, Any] = {}
        batch = max(1, self._flags.whole("parallel", 1))
        if batch > 1:
            section["batch"] = batch
        context = self._flags.whole("context", 0)
        if context // batch >= 2:
            section["context"] = context // batch
        return section

    def sampling(self) -> dict[str, Any]:
        """Flags, and what the engine does without them: it samples at 0.8 with top-k 40, top-p 0.95 and min-p 0.05."""
        flags = self._flags
        warm = max(0.0, flags.number("temperature", 0.8))
        section: dict[str, Any] = {"temperature": warm}
        if warm > 0.0:
            section |= self._warpers()
            if not flags.has("temperature"):
                self._find("note", "temperature", "not set", "requests that say nothing are sampled at 0.8")
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            if flags.has(name):
                section[name] = flags.number(name, 0.0)
        if section.get("repetition_penalty", 1.0) <= 0.0:
            raise RecipeError(flags.spelled["repetition_penalty"], str(section["repetition_penalty"]), "above 0")
        if (most := flags.whole("predict", -1)) > 0:
            section["max_new_tokens"] = most
        else:
            what = "texts go on until the model stops or the context is full; the recipe stops at 128 tokens"
            self._find("note", "predict", "no limit", what)
        if (seed := flags.whole("seed", -1)) >= 0 and seed != 2**32 - 1:
            section["seed"] = seed
        if flags.has("ignore_eos"):
            section["ignore_eos"] = True
        if flags.has("logit_bias"):
            section["logit_bias"] = self._bias()
        return section

    def _warpers(self) -> dict[str, Any]:
        flags = self._flags
        section: dict[str, Any] = {"top_k": max(0, flags.whole("top_k", 40))}
        section["top_p"] = min(1.0, flags.number("top_p", 0.95))
        section["min_p"] = min(1.0, max(0.0, flags.number("min_p", 0.05)))
        if section["top_p"] <= 0.0:
            raise RecipeError(flags.spelled["top_p"], str(section["top_p"]), "above 0, at most 1")
        order = flags.values.get("samplers", "")
        if not order.startswith("penalties;temperature") and (section["top_p"] < 1.0 or section["min_p"] > 0.0):
            what = "temperature comes last here and first in recipes: top-p and min-p keep other tokens"
            fix = "--samplers 'penalties;temperature;top_k;top_p;min_p' has the order of recipes"
            self._find("note", "samplers", order or "not set", what, fix)
        return section

    def _bias(self) -> dict[int, float]:
        word = self._flags.values["logit_bias"]
        match = re.fullmatch(r"([0-9]{1,9})([+-][0-9]{1,6}(?:\.[0-9]{1,17})?)", word)
        if match is None:
            raise RecipeError(self._flags.spelled["logit_bias"], repr(word), "TOKEN_ID+BIAS or TOKEN_ID-BIAS")
        return {int(match[1]): float(match[2])}

    def types(self) -> list[str]:
        """What drafts, drafts from history first.

        Raises:
            RecipeError: A kind of drafts that no build has.
        """
        flags = self._flags
        given = flags.values.get("types", "")
        names = [name.strip().replace("_", "-") for name in given.split(",") if name.strip() not in ("", "none")]
        for name in names:
            if name not in (*DRAFT_TYPES, *NGRAM_TYPES):
                known = (*DRAFT_TYPES, *NGRAM_TYPES)
                hint = nearest(name, known)
                raise RecipeError(flags.spelled["types"], repr(name), f"one of: {', '.join(known)}", hint)
        if flags.has("default") and "ngram-mod" not in names:
            names.append("ngram-mod")
        has_model = flags.has("draft_model", "draft_hf")
        drafting = [name for name in names if name in DRAFT_TYPES]
        if has_model and not drafting:
            names.append("draft-simple")
            if self._rank == 2:
                self._find_silent_model()
        for name in drafting:
            if not has_model and name != "draft-mtp":
                what = f"{name} needs a draft model: nothing is drafted"
                self._find("error", "types", given, what, f"{spelling('draft_model', self._dialect)} FILE")
        if self._rank == 0:
            names = [name for name in names if name == "draft-simple"]
        return sorted(dict.fromkeys(names), key=lambda name: name in DRAFT_TYPES)

    def _find_silent_model(self) -> None:
        what = "since b9464 a draft model alone drafts nothing, or what its file says it is; read as draft-simple"
        meaning = "draft_model" if self._flags.has("draft_model") else "draft_hf"
        self._find("warning", meaning, self._flags.values[meaning], what, "--spec-type draft-simple, or what it is")

    def part(self, name: str) -> dict[str, Any]:
        """The draft section of one kind of drafts."""
        return self._history(name) if name in NGRAM_TYPES else self._model_drafts(name)

    def _history(self, name: str) -> dict[str, Any]:
        flags = self._flags
        if name == "ngram-cache":
            self._find("note", "types", name, "looks up statistics of 1 to 4 tokens; read as a search of the text")
            return {"method": "ngram", "k": self._length("draft_max"), "min_match": 1, "max_match": 4}
        if name == "ngram-mod":
            return self._mod()
        size_key, length_key, hits_key = (
            self._meant(f"{name}.{size}", size) for size in ("size_n", "size_m", "min_hits")
        )
        size = self._match(size_key, 12)
        length = self._within(length_key, flags.whole(length_key, 48), "draft")
        if self._rank < 2 and flags.has("draft_max"):
            length = min(length, self._length("draft_max"))
        if name != "ngram-simple" and (hits := flags.whole(hits_key, 1)) > 1:
            self._find("note", hits_key, hits, "a recipe drafts from the first match on")
        return {"method": "ngram", "k": length, "min_match": size, "max_match": size}

    def _meant(self, own: str, shared: str) -> str:
        """Where a kind of drafts has its number: in its own flag, or in the one that all kinds shared before."""
        if self._flags.has(own):
            return own
        said_before = self._flags.spelled.get(shared) in _SHARED_FLAGS
        return shared if said_before or self._rank < 2 else own

    def _mod(self) -> dict[str, Any]:
        """ngram-mod: its smallest draft decides whether anything is drafted at all."""
        flags, today = self._flags, self._rank == 2
        match_key, least_key = self._meant("mod_match", "size_n"), self._meant("mod_min", "draft_min")
        most_key = self._meant("mod_max", "draft_max")
        size, least, most = (24, 48, 64) if today else (12, 0, _OLD_LENGTH)
        most, least = flags.whole(most_key, most), flags.whole(least_key, least)
        fix = f"{spelling('mod_min' if today else 'draft_min', self._dialect)} 1"
        if least > most:
            self._find("error", least_key, least, f"nothing is ever drafted: the most is {most}", fix)
        elif least >= _LONG_DRAFT:
            what = f"a draft shorter than {least} tokens is thrown away: many texts then draft nothing at all"
            self._find("warning", least_key, least, what, fix)
        elif least > 1:
            self._find("note", least_key, least, "shorter drafts are thrown away; a recipe keeps them")
        size = self._match(match_key, size)
        length = self._within(most_key, most, "draft")
        return {"method": "ngram", "k": length, "min_match": size, "max_match": size, "share": True}

    def _match(self, key: str, default: int) -> int:
        size = self._within(key, self._flags.whole(key, default), "match")
        self._flags.findings += check_match(size, self._flags.spelled.get(key) or spelling(key, self._dialect))
        return size

    def _within(self, key: str, value: int, what: str) -> int:
        if value < 1:
            raise RecipeError(self._flags.spelled.get(key, key), str(value), "1 or more")
        if value > _MOST:
            self._find("warning", key, value, f"a recipe has at most {_MOST} tokens of a {what}: read as {_MOST}")
        return min(value, _MOST)

    def _length(self, key: str) -> int:
        default = _NEW_LENGTH if self._rank == 2 else _OLD_LENGTH
        if not self._flags.has(key):
            before = "; it was 16 before the renaming" if self._rank == 2 else ""
            self._find("note", key, "not set", f"{default} draft tokens{before}", f"{spelling(key, self._dialect)} K")
        value = self._flags.whole(key, default)
        if value == 0:
            self._find("error", key, value, "nothing is drafted", f"{spelling(key, self._dialect)} {default}")
        return self._within(key, max(value, 1), "draft")

    def _model_drafts(self, name: str) -> dict[str, Any]:
        flags = self._flags
        section: dict[str, Any] = {"method": _METHODS[name], "k": self._length("draft_max")}
        place = flags.values.get("draft_model") or flags.values.get("draft_hf")
        if place and place != NO_DRAFTER:
            section["model" if name == "draft-simple" else "weights"] = place
        where = flags.spelled.get("draft_max") or spelling("draft_max", self._dialect)
        flags.findings += check_block(section["k"], section.get("weights"), section["method"], where)
        if (least := flags.whole("draft_min", 0)) > section["k"]:
            self._find("error", "draft_min", least, f"nothing is ever drafted: the most is {section['k']}", "0 or 1")
        elif least > 1:
            self._find("note", "draft_min", least, "shorter drafts are thrown away; a recipe keeps them")
        return section

    def draft(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """One source, or several of which the first that has a draft goes first."""
        if len(parts) == 1:
            return parts[0]
        most = max(part["k"] for part in parts)
        return {"k": most, "first_of": tuple(parts)}

    def length(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """Where a draft of a model ends before k: by draft probability."""
        if all(part["method"] == "ngram" for part in parts):
            return {"policy": "fixed"}
        today = self._rank == 2
        bar = self._flags.number("p_min", 0.0 if today else _OLD_BAR)
        if not self._flags.has("p_min"):
            what = "drafts go on to the most" if today else "drafts end after a token below it, though nothing says so"
            other = "; older builds stopped below 0.75" if today else "; it is 0 since the renaming"
            found = f"not set: {bar:g}"
            self._find(
                "note" if today else "warning", "p_min", found, what + other, f"{spelling('p_min', self._dialect)} 0"
            )
        if not 0.0 <= bar <= 1.0:
            raise RecipeError(self._flags.spelled["p_min"], str(bar), "0 to 1")
        if bar == 0.0:
            return {"policy": "fixed"}
        if today:
            return {"policy": "confidence", "threshold": bar}
        return {"policy": "threshold", "start": bar, "step": 0.0}


_SHARED_FLAGS = (
    "--draft",
    "--draft-n",
    "--draft-max",
    "--draft-min",
    "--draft-n-min",
    "--spec-ngram-size-n",
    "--spec-ngram-size-m",
    "--spec-ngram-min-hits",
)
"""Flags that meant drafts of every kind."""

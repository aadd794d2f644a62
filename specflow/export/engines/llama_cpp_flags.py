"""Flags of llama.cpp: what each is called in which builds, and a command line as their values. No torch.

Pull request 22397 (29 April 2026) renamed the flags of speculation; the old ones are refused since. Environment
variables were renamed too, and the old ones do nothing any more, without a word.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from specflow.errors import RecipeError
from specflow.export.engine_input import find_command
from specflow.export.engines.base import Dialect, Finding, Given
from specflow.recipe import nearest

__all__ = ["DIALECTS", "DRAFT_TYPES", "NGRAM_TYPES", "Flags", "parse_flags", "rank_of", "spelling"]

DIALECTS = (
    Dialect("b8980", "b10752", "spec"),
    Dialect("b7900", "b8930", "ngram"),
    Dialect("b4200", "b7840", "draft"),
)
"""Builds whose flags are named alike: after the renaming, from the first n-gram drafts on, and with draft models alone.
Between two ranges lie a few days whose builds were not looked at."""
_RANKS = {"draft": 0, "ngram": 1, "spec": 2}

_PROGRAMS = ("llama-server", "llama-cli", "llama-speculative-simple", "llama-speculative", "llama-server.exe")
DRAFT_TYPES = ("draft-simple", "draft-eagle3", "draft-mtp", "draft-dflash", "draft-dspark")
NGRAM_TYPES = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")


@dataclass(frozen=True, slots=True)
class _Flag:
    meaning: str
    kind: str  # word, whole, number, switch; skip: a word that says nothing about decoding
    first: int  # rank of the first dialect that has it
    last: int
    words: tuple[str, ...]
    env: str = ""


def _row(meaning: str, kind: str, ranks: str, words: str, env: str = "") -> _Flag:
    return _Flag(meaning, kind, int(ranks[0]), int(ranks[-1]), tuple(words.split()), env)


_ROWS = (
    _row("model", "word", "0-2", "-m --model", "LLAMA_ARG_MODEL"),
    _row("hf", "word", "0-2", "-hf -hfr --hf-repo", "LLAMA_ARG_HF_REPO"),
    _row("context", "whole", "0-2", "-c --ctx-size", "LLAMA_ARG_CTX_SIZE"),
    _row("parallel", "whole", "0-2", "-np --parallel", "LLAMA_ARG_N_PARALLEL"),
    _row("threads", "whole", "0-2", "-t --threads", "LLAMA_ARG_THREADS"),
    _row("device", "word", "0-2", "--device -dev", "LLAMA_ARG_DEVICE"),
    _row("predict", "whole", "0-2", "-n --predict --n-predict", "LLAMA_ARG_N_PREDICT"),
    _row("seed", "whole", "0-2", "--seed -s"),
    _row("temperature", "number", "0-2", "--temp --temperature"),
    _row("top_k", "whole", "0-2", "--top-k", "LLAMA_ARG_TOP_K"),
    _row("top_p", "number", "0-2", "--top-p"),
    _row("min_p", "number", "0-2", "--min-p"),
    _row("repetition_penalty", "number", "0-2", "--repeat-penalty"),
    _row("penalty_window", "whole", "0-2", "--repeat-last-n"),
    _row("presence_penalty", "number", "0-2", "--presence-penalty"),
    _row("frequency_penalty", "number", "0-2", "--frequency-penalty"),
    _row("logit_bias", "word", "0-2", "--logit-bias -l"),
    _row("samplers", "word", "0-2", "--samplers"),
    _row("ignore_eos", "switch", "0-2", "--ignore-eos"),
    _row("draft_model", "word", "2-2", "--spec-draft-model", "LLAMA_ARG_SPEC_DRAFT_MODEL"),
    _row("draft_model", "word", "0-2", "-md --model-draft"),
    _row("draft_model", "word", "0-1", "", "LLAMA_ARG_MODEL_DRAFT"),
    _row("draft_hf", "word", "2-2", "--spec-draft-hf", "LLAMA_ARG_SPEC_DRAFT_HF_REPO"),
    _row("draft_hf", "word", "0-2", "-hfd -hfrd --hf-repo-draft"),
    _row("draft_max", "whole", "2-2", "--spec-draft-n-max", "LLAMA_ARG_SPEC_DRAFT_N_MAX"),
    _row("draft_max", "whole", "0-1", "--draft-max --draft-n --draft", "LLAMA_ARG_DRAFT_MAX"),
    _row("draft_min", "whole", "2-2", "--spec-draft-n-min", "LLAMA_ARG_SPEC_DRAFT_N_MIN"),
    _row("draft_min", "whole", "0-1", "--draft-min --draft-n-min", "LLAMA_ARG_DRAFT_MIN"),
    _row("p_min", "number", "2-2", "--spec-draft-p-min", "LLAMA_ARG_SPEC_DRAFT_P_MIN"),
    _row("p_min", "number", "0-2", "--draft-p-min"),
    _row("p_min", "number", "0-1", "", "LLAMA_ARG_DRAFT_P_MIN"),
    _row("p_split", "number", "2-2", "--spec-draft-p-split", "LLAMA_ARG_SPEC_DRAFT_P_SPLIT"),
    _row("p_split", "number", "0-2", "--draft-p-split"),
    _row("types", "word", "1-2", "--spec-type", "LLAMA_ARG_SPEC_TYPE"),
    _row("default", "switch", "1-2", "--spec-default"),
    _row("size_n", "whole", "1-1", "--spec-ngram-size-n"),
    _row("size_m", "whole", "1-1", "--spec-ngram-size-m"),
    _row("min_hits", "whole", "1-1", "--spec-ngram-min-hits"),
    _row("check_rate", "whole", "1-1", "--spec-ngram-check-rate"),
    *(
        _row(f"{kind}.{size}", "whole", "2-2", f"--spec-{kind}-{size.replace('_', '-')}")
        for kind in ("ngram-simple", "ngram-map-k", "ngram-map-k4v")
        for size in ("size_n", "size_m", "min_hits")
    ),
    _row("mod_match", "whole", "2-2", "--spec-ngram-mod-n-match"),
    _row("mod_min", "whole", "2-2", "--spec-ngram-mod-n-min"),
    _row("mod_max", "whole", "2-2", "--spec-ngram-mod-n-max"),
    _row("placement", "skip", "2-2", "--spec-draft-ngl --spec-draft-device --spec-draft-threads"),
    _row("placement", "skip", "2-2", "--spec-draft-type-k --spec-draft-type-v --spec-draft-override-tensor"),
    _row("placement", "skip", "2-2", "--spec-draft-threads-batch --spec-draft-n-cpu-moe --spec-draft-ncmoe"),
    _row("placement", "skip", "0-2", "-ngld --gpu-layers-draft --n-gpu-layers-draft -devd --device-draft"),
    _row("placement", "skip", "0-2", "-ctkd -ctvd --cache-type-k-draft --cache-type-v-draft -td --threads-draft"),
    _row("draft_context", "skip", "0-1", "-cd --ctx-size-draft --spec-draft-ctx-size"),
    _row("replace", "skip", "0-1", "--spec-replace"),
    _row(
        "placed", "switch", "2-2", "--spec-draft-cpu-moe --spec-draft-backend-sampling --no-spec-draft-backend-sampling"
    ),
)

_ADVICE = {
    "draft_max": "--spec-draft-n-max, or --spec-ngram-mod-n-max for ngram-mod",
    "draft_min": "--spec-draft-n-min, or --spec-ngram-mod-n-min for ngram-mod",
    "size_n": "--spec-ngram-TYPE-size-n, or --spec-ngram-mod-n-match for ngram-mod",
    "size_m": "--spec-ngram-TYPE-size-m",
    "min_hits": "--spec-ngram-TYPE-min-hits",
    "draft_context": "leave it out: the draft model takes the target's context",
    "replace": "leave it out",
    "check_rate": "leave it out",
}
"""What the renaming made of flags that have no single heir."""
_NEVER = {
    "--draft-model": "no build has it: it is --model-draft or --spec-draft-model",
    "--spec-draft-conf-min": "its documentation names it, its argument parser does not know it",
}


@dataclass
class Flags:
    """Values of a command line by what they mean, as they were written.

    Attributes:
        values: Meaning -> word. Of a flag that is there twice the last one counts.
        spelled: Meaning -> the flag or variable that gave it.
        ignored: Flags that say nothing about decoding.
        findings: What is wrong with the flags themselves.
    """

    values: dict[str, str] = field(default_factory=dict)
    spelled: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def has(self, *meanings: str) -> bool:
        return any(meaning in self.values for meaning in meanings)

    def whole(self, meaning: str, default: int) -> int:
        """A whole number.

        Raises:
            RecipeError: It is none.
        """
        word = self.values.get(meaning)
        if word is None:
            return default
        if not re.fullmatch(r"[+-]?[0-9]{1,12}", word):
            raise RecipeError(self.spelled[meaning], repr(word), "a whole number")
        return int(word)

    def number(self, meaning: str, default: float) -> float:
        """A finite number.

        Raises:
            RecipeError: It is none.
        """
        word = self.values.get(meaning)
        if word is None:
            return default
        if not re.fullmatch(r"[+-]?([0-9]{1,16}(\.[0-9]{0,25})?|\.[0-9]{1,25})([eE][+-]?[0-9]{1,3})?", word):
            raise RecipeError(self.spelled[meaning], repr(word), "a number")
        return _finite(float(word), self.spelled[meaning])


def _finite(value: float, where: str) -> float:
    if not math.isfinite(value):
        raise RecipeError(where, str(value), "a finite number")
    return value


def rank_of(dialect: Dialect) -> int:
    """0: draft models alone, 1: n-gram drafts too, 2: the flags of today."""
    return _RANKS[dialect.name]


def spelling(meaning: str, dialect: Dialect) -> str:
    """The flag that says this in the builds of a dialect; where they have none, the flag of others."""
    rank = rank_of(dialect)
    rows = [row for row in _ROWS if row.words and row.meaning == meaning]
    return next((row for row in rows if row.first <= rank <= row.last), rows[0]).words[0]


def parse_flags(given: Given, dialect: Dialect) -> Flags:
    """The flags of a command line, or of a script that holds one.

    Raises:
        RecipeError: There is no command of llama.cpp, or a flag lacks its value.
    """
    words = list(given.argv) if given.is_command else _command_of(given)
    flags, rank = Flags(), rank_of(dialect)
    position = 0
    while position < len(words) and not words[position].startswith("-"):
        _take_variable(flags, words[position], rank)
        position += 1
    while position < len(words):
        position = _take(flags, words, position, dialect)
    return flags


def _command_of(given: Given) -> list[str]:
    """The first command of llama.cpp in a script."""
    words = find_command(given.text, _PROGRAMS)
    if words is None:
        raise RecipeError(given.name, "no command of llama.cpp", f"a line that runs one of: {', '.join(_PROGRAMS)}")
    return list(words)


def _take_variable(flags: Flags, word: str, rank: int) -> None:
    """`NAME=value` before the program; flags that follow go over it."""
    name, found, value = word.partition("=")
    row = _variables().get(name)
    if not found or row is None:
        return
    if row.first <= rank <= row.last:
        flags.values[row.meaning], flags.spelled[row.meaning] = value, name
        return
    heirs = (each for each in _ROWS if each.meaning == row.meaning and each.env)
    heir = next((each.env for each in heirs if each.first <= rank <= each.last), "")
    meaning = "these builds do not read this variable, and do not say so: the value has no effect"
    flags.findings.append(Finding("warning", name, value, meaning, f"write {heir}" if heir else ""))


def _take(flags: Flags, words: list[str], position: int, dialect: Dialect) -> int:
    """Take one flag and its value; the position after them."""
    word = words[position]
    name, joined, inside = word.partition("=") if word.startswith("--") else (word, "", "")
    name = name.replace("_", "-") if name.startswith("--") else name
    row = _spellings().get(name)
    following = words[position + 1] if position + 1 < len(words) else None
    if row is None:
        _take_unknown(flags, name)
        return position + 1 + (not joined and following is not None and not following.startswith("-"))
    if row.kind == "switch":
        value, after = "true", position + 1
    elif joined:
        value, after = inside, position + 1
        advice = f"write {name} {inside}"
        flags.findings.append(Finding("error", name, word, "values are words of their own in llama.cpp", advice))
    elif following is None:
        raise RecipeError(name, "no value", f"{name} VALUE")
    else:
        value, after = following, position + 2
    _check_spelling(flags, name, row, value, dialect)
    flags.values[row.meaning], flags.spelled[row.meaning] = value, name
    return after


def _check_spelling(flags: Flags, name: str, row: _Flag, value: str, dialect: Dialect) -> None:
    rank = rank_of(dialect)
    if row.first <= rank <= row.last:
        return
    known = [each for each in _ROWS if each.meaning == row.meaning and each.words and each.first <= rank <= each.last]
    if rank > row.last:
        meaning = "removed: these builds refuse to start with it"
        heir = _ADVICE.get(row.meaning) or (known[0].words[0] if known else "leave it out")
    else:
        meaning = f"not there yet in builds {dialect.versions}"
        heir = known[0].words[0] if known else "leave it out"
    fix = heir if heir.startswith("leave") else f"write {heir}"
    flags.findings.append(Finding("error", name, value, meaning, fix))


def _take_unknown(flags: Flags, name: str) -> None:
    if name in _NEVER:
        flags.findings.append(Finding("error", name, "unknown flag", _NEVER[name], "leave it out or rename it"))
    elif name.startswith(("--spec", "--draft")):
        hint = nearest(name, list(_spellings()))
        flags.findings.append(Finding("error", name, "unknown flag", "llama.cpp refuses to start with it", hint))
    else:
        flags.ignored.append(name)


@cache
def _spellings() -> Mapping[str, _Flag]:
    return {word: row for row in _ROWS for word in row.words}


@cache
def _variables() -> Mapping[str, _Flag]:
    return {row.env: row for row in _ROWS if row.env}

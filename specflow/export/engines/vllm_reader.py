"""Reads vLLM's command lines and files as recipes, and says what is wrong about them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specflow.errors import RecipeError
from specflow.export.drafter_facts import facts_of
from specflow.export.engine_input import Fields, Flags, as_mapping, find_command, read_file, read_flags
from specflow.export.engines.base import Dialect, Finding, Given, Imported, worst_first
from specflow.export.engines.vllm_schema import FIELDS, GONE, MTP_NAMES, NEVER, RENAMED
from specflow.export.imported_draft import check_left, check_schedule, drafter, recipe_of
from specflow.export.pair_checks import check_block, check_match, check_pair
from specflow.export.recipe_view import Step
from specflow.export.sampling_request import read_defaults
from specflow.recipe import nearest

__all__ = ["BY_NAME", "METHODS", "METHOD_OF", "V2_SCHEDULES", "named_like", "read_vllm"]

METHOD_OF = {
    "ngram": "ngram",
    "suffix": "suffix",
    "small_model": "draft_model",
    "medusa": "medusa",
    "mtp": "mtp",
    "eagle": "eagle",
    "eagle2": "eagle",
    "eagle3": "eagle3",
    "dflash": "dflash",
    "dspark": "dspark",
}
"""Family of a recipe -> method."""

FAMILY_OF = {method: family for family, method in reversed(METHOD_OF.items())} | {"ngram_gpu": "ngram"}

_CURRENT = frozenset({"ngram", "ngram_gpu", "suffix", "draft_model", "eagle", "eagle3", "mtp", "dflash", "dspark"})
METHODS = {"current": _CURRENT, "with medusa": _CURRENT | {"medusa"}}
"""Dialect -> methods that recipes know too."""

V2_SCHEDULES = ("suffix", "medusa", "dspark")
"""Families whose batch schedule Model Runner V1 drops with a warning."""

BY_NAME = ("draft_model", "mtp")
"""Methods that the name of the drafter overrules."""

RUNNER = "VLLM_USE_V2_MODEL_RUNNER=1 in the environment"

SWITCHES = ("--trust-remote-code", "--enforce-eager", "--enable-prefix-caching", "--enable-chunked-prefill")
ALIASES = {"-sc": "--speculative-config", "-tp": "--tensor-parallel-size", "-dp": "--data-parallel-size"}
SPEC = "--speculative-config"
SHORT = {"--spec-method": "method", "--spec-model": "model", "--spec-tokens": "num_speculative_tokens"}


def read_vllm(given: Given, dialect: Dialect) -> Imported:
    """A command line, a script with one, a file for `--config`, or the JSON of `--speculative-config` alone.

    Raises:
        RecipeError: It is none of these.
    """
    findings: list[Finding] = []
    server, spec = _given(given, findings)
    target = _target(server, findings)
    runtime = _runtime(server)
    reader = _Reader(spec, dialect, target.get("model", ""), runtime.get("context"))
    draft = None if spec is None else reader.draft()
    sections = {"sampling": _sampling(server), "runtime": runtime}
    if draft is not None:
        sections |= {"verify": reader.verify(), "length": reader.length()}
    if (replicas := server.whole("data-parallel-size", 1)) is not None and replicas > 1 and reader.has_schedule:
        meaning = "vLLM drops the batch schedule with data parallelism"
        findings.append(Finding("warning", "--data-parallel-size", str(replicas), meaning, "one server a replica"))
    findings += check_left(server.left(), "the server")
    if draft is not None:
        findings += check_left((name for name in reader.fields.left() if name in FIELDS), SPEC)
    data = recipe_of(target, draft, **sections)
    return Imported("vllm", data, worst_first([*findings, *reader.findings]), dialect.versions)


def _given(given: Given, findings: list[Finding]) -> tuple[Fields, Mapping[str, Any] | None]:
    """Settings of the server without dashes, and the speculative mapping where there is one."""
    command = given.argv or find_command(given.text, ("vllm", "vllm.entrypoints.openai.api_server"))
    if command:
        return _from_flags(read_flags(command, SWITCHES, ALIASES), findings)
    data = as_mapping(given.text, given.name)
    plain = {key.replace("_", "-"): value for key, value in data.items()}
    if "speculative-config" in plain or not set(data) & {"method", "num_speculative_tokens", "prompt_lookup_max"}:
        if not set(plain) & {"model", "speculative-config", "override-generation-config"}:
            raise RecipeError(given.name, "nothing of vLLM's", "`vllm serve` words, a --config file, or JSON", "")
        spec = plain.pop("speculative-config", None)
        return Fields(plain, given.name), _spec_mapping(spec, given.name)
    return Fields({}, given.name), data


def _from_flags(flags: Flags, findings: list[Finding]) -> tuple[Fields, Mapping[str, Any] | None]:
    plain: dict[str, Any] = {}
    if (file := flags.values.get("--config")) and Path(file).is_file():
        plain = {key.replace("_", "-"): value for key, value in as_mapping(read_file(file), file).items()}
    spec = _spec_mapping(plain.pop("speculative-config", None), "--config")
    if (text := flags.values.get(SPEC)) is not None:
        spec = {**(spec or {}), **as_mapping(text, SPEC)}
    nested = flags.nested(SPEC)
    short = {key: flags.values[flag] for flag, key in SHORT.items() if flag in flags.values}
    old = {key: flags.values[flag] for flag, key in GONE.items() if flag in flags.values}
    for flag in GONE:
        if flag in flags.values:
            fix = f"{SPEC} '{{\"{GONE[flag]}\": ...}}'" if GONE[flag] else "a batch schedule"
            findings.append(Finding("error", flag, str(flags.values[flag]), "removed: vLLM refuses the flag", fix))
    for flag in flags.values:
        if flag.startswith(("--spec-", "--speculative-")) and not _known(flag):
            hint = nearest(flag, [SPEC, *SHORT])
            findings.append(Finding("error", flag, str(flags.values[flag]), "no such flag: vLLM refuses it", hint))
    given = {**nested, **short, **{key: value for key, value in old.items() if key}}
    words = [word for word in flags.words[1:] if word not in ("serve", "bench", "-m", "python")]
    named = {flag.removeprefix("--"): value for flag, value in flags.values.items() if not _known(flag)}
    server = {**plain, **{name: "true" if value is None else value for name, value in named.items()}}
    if words and "model" not in server:
        server["model"] = words[0]
    return Fields(server, "vllm"), {**(spec or {}), **given} if spec is not None or given else None


def _known(flag: str) -> bool:
    return flag in GONE or flag in SHORT or flag.partition(".")[0] == SPEC


def _spec_mapping(spec: Any, name: str) -> Mapping[str, Any] | None:
    if isinstance(spec, str):
        spec = as_mapping(spec, f"{name}: speculative-config")
    if spec is not None and not isinstance(spec, Mapping):
        raise RecipeError(f"{name}: speculative-config", repr(spec)[:80], "a mapping")
    return spec


def _target(server: Fields, findings: list[Finding]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if (model := server.text("model")) is not None:
        found["model"] = model
    else:
        meaning = "the recipe keeps the embedded model"
        findings.append(Finding("note", "model", "none", meaning, "set target.model"))
    dtype = {"half": "float16", "float": "float32"}.get(str(server.raw("dtype")), server.raw("dtype"))
    if dtype in ("float32", "float16", "bfloat16"):
        found["dtype"] = dtype
    if (revision := server.text("revision")) is not None:
        found["revision"] = revision
    if server.truth("trust-remote-code"):
        found["trust_remote_code"] = True
    return found


def _runtime(server: Fields) -> dict[str, Any]:
    found = {"batch": server.whole("max-num-seqs", 1), "context": None}
    if str(server.raw("max-model-len")) not in ("None", "auto", "-1"):
        found["context"] = server.whole("max-model-len", 1)
    return {key: value for key, value in found.items() if value is not None}


def _sampling(server: Fields) -> dict[str, Any]:
    given = server.raw("override-generation-config")
    if isinstance(given, str):
        given = as_mapping(given, "--override-generation-config")
    if given is not None and not isinstance(given, Mapping):
        raise RecipeError("override-generation-config", repr(given)[:80], "a mapping")
    return read_defaults(given or {}, "override-generation-config")


def _guessed(model: str) -> str:
    """Method that vLLM takes where none is said."""
    parts = model.split(".")
    if len(parts) > 1 and all(part.isidentifier() for part in parts):
        return "custom_class"
    if model in ("ngram", "[ngram]"):
        return "ngram"
    return named_like(model) or "draft_model"


def named_like(model: str) -> str | None:
    """Method that vLLM reads in the name of a model; it goes over those of `BY_NAME`, even where they are asked for."""
    order = (("eagle-", "eagle"), ("eagle3", "eagle3"), ("dflash", "dflash"), ("dspark", "dspark"))
    return next((method for word, method in order if word in model.lower()), None)


class _Reader:
    """Reads one speculative mapping; `findings` grows as it does.

    Args:
        spec: The mapping.
        dialect: Versions it is for.
        target: Name of the target.
        context: Most positions of a request.
    """

    def __init__(self, spec: Mapping[str, Any] | None, dialect: Dialect, target: str, context: int | None) -> None:
        data = {key.replace("-", "_"): value for key, value in (spec or {}).items()}
        self.fields = Fields(data, SPEC)
        self.findings: list[Finding] = []
        self._dialect, self._target, self._context = dialect, target, context
        self._k = 0
        self._method = ""

    @property
    def has_schedule(self) -> bool:
        return "num_speculative_tokens_per_batch_size" in self.fields

    def draft(self) -> dict[str, Any] | None:
        """The draft section; None where vLLM would draft with nothing a recipe knows."""
        self._names()
        self._method, model = self._read_method(), self.fields.text("model")
        family = FAMILY_OF.get(self._method)
        if family is None or self._method not in METHODS["with medusa"]:
            self._say("error", "method", self._method, "no method of a recipe; read as plain decoding")
            return None
        if self._method not in METHODS[self._dialect.name]:
            fix = "another drafter, or a version up to 0.32"
            self._say("error", "method", self._method, f"gone from vLLM {self._dialect.versions}", fix)
        path = drafter(model) if family not in ("ngram", "suffix") else None
        self._k = self._read_k(family, path)
        found: dict[str, Any] = {"method": family, "k": self._k, **self._history(family)}
        if family == "medusa":
            found["shape"] = "chain"
        if path is not None:
            found["model" if family == "small_model" else "weights"] = path
        self._drafting(family, path)
        return found

    def verify(self) -> dict[str, Any]:
        """The verify section."""
        method = self.fields.text("rejection_sample_method") or "standard"
        sampled = self.fields.text("draft_sample_method") or "greedy"
        if method in ("strict", "probabilistic"):
            sampled = "probabilistic" if method == "probabilistic" else "greedy"
            self._say("error", "rejection_sample_method", method, "renamed", f"standard, draft_sample_method {sampled}")
        elif method in ("fly", "synthetic"):
            meaning = "lossy: the text's law is not the target's. The recipe keeps the law"
            self._say("warning", "rejection_sample_method", method, meaning, "standard or block")
        elif method not in ("standard", "block"):
            self._say("error", "rejection_sample_method", method, "unknown", nearest(method, ["standard", "block"]))
        if method == "block":
            return {"rule": "block"}
        certain = sampled == "greedy" or self._method in ("ngram", "ngram_gpu", "suffix")
        return {} if certain else {"rule": "rejection"}

    def length(self) -> dict[str, Any]:
        """The length section."""
        if self.fields.truth("enable_adaptive_verification"):
            if self._method == "dspark":
                return {"policy": "expected_gain"}
            meaning = "only dspark has it; others refuse or ignore it"
            self._say("error", "enable_adaptive_verification", "true", meaning, "false")
        if self.has_schedule:
            if FAMILY_OF[self._method] in V2_SCHEDULES:
                meaning = "Model Runner V1 drops it for this method"
                self._say("warning", "num_speculative_tokens_per_batch_size", self._method, meaning, RUNNER)
            steps = self._schedule()
            self.findings += check_schedule(steps, self._k, "num_speculative_tokens_per_batch_size")
            return {"policy": "expected_gain"}
        if self._method == "suffix":
            factor = self.fields.number("suffix_decoding_max_spec_factor")
            factor = 1.0 if factor is None else factor
            return {"policy": "match", "per_match": factor} if 0 < factor < self._k else {}
        return {}

    def _read_method(self) -> str:
        method, model = self.fields.text("method"), self.fields.text("model") or ""
        if method in MTP_NAMES:
            self._say("warning", "method", method, "deprecated: vLLM reads it as mtp", "mtp")
            return "mtp"
        if method is not None:
            if method not in (*FAMILY_OF, "extract_hidden_states", "custom_class", "mlp_speculator", "mtp"):
                self._say("error", "method", method, "unknown: vLLM refuses it", nearest(method, FAMILY_OF))
            if method in BY_NAME and (other := named_like(model)) is not None:
                meaning = f"vLLM reads {other} in the name of the model, whatever method says"
                self._say("warning", "method", method, meaning, "a name without it")
                return other
            return method.strip("[]")
        guessed = _guessed(model)
        meaning = f"vLLM guesses from the name of the model, here {guessed}"
        self._say("warning", "method", "none", meaning, f'"method": "{guessed}"')
        return guessed

    def _read_k(self, family: str, path: str | None) -> int:
        k, facts = self.fields.whole("num_speculative_tokens", 1), facts_of(path, family)
        where = "num_speculative_tokens"
        if k is None and family == "suffix":
            k = self.fields.whole("suffix_decoding_max_tree_depth", 1) or 24
            self._say("note", where, "none", f"suffix decoding takes the depth of its tree, {k}")
        elif k is None:
            k = (facts.trained_k if family == "dspark" else facts.modules) or 1
            known = facts.trained_k if family == "dspark" else facts.modules
            meaning = (
                f"the drafter's own, {k}" if known else "vLLM refuses it unless the drafter says its own; read as 1"
            )
            self._say("note" if known else "error", where, "none", meaning, '"num_speculative_tokens": K')
        self.findings += check_block(k, path, family, where)
        return k

    def _history(self, family: str) -> dict[str, Any]:
        """Options of lookups in earlier text."""
        if family == "ngram":
            low, high = (self.fields.whole(f"prompt_lookup_{end}", 1) for end in ("min", "max"))
            if low is None and high is None:
                meaning = "vLLM takes 5 and 5: matches shorter than 5 tokens never draft"
                self._say("warning", "prompt_lookup_min", "none", meaning, '"prompt_lookup_min": 1 or 2')
                low = high = 5
            elif low is None:
                meaning = f"vLLM takes prompt_lookup_max, {high}: shorter matches never draft"
                self._say("warning", "prompt_lookup_min", "none", meaning, '"prompt_lookup_min": 1')
            low, high = low or high or 5, high or low or 5
            if low > high:
                self._say(
                    "error", "prompt_lookup_min", str(low), f"above prompt_lookup_max, {high}: refused", str(high)
                )
                low = high
            self.findings += check_match(low, "prompt_lookup_min")
            return {"min_match": low, "max_match": high}
        if family != "suffix":
            return {}
        depth = self.fields.whole("suffix_decoding_max_tree_depth", 1) or 24
        probability = self.fields.number("suffix_decoding_min_token_prob", 0.0, 1.0)
        if probability is None or probability > 0:
            found, value = ("on by default, 0.1", 0.1) if probability is None else (f"{probability:g}", probability)
            meaning = (
                f"continuations seen less often than {value:g} of the time are not drafted; recipes have no such bar"
            )
            self._say("note", "suffix_decoding_min_token_prob", found, meaning, "0.0 to switch it off")
        cached = self.fields.whole("suffix_decoding_max_cached_requests")
        longest = max(1, min(256, depth - self._k))
        if depth <= self._k:
            meaning = f"match and draft together are at most {depth} tokens: no draft of {self._k} is ever reached"
            self._say("warning", "suffix_decoding_max_tree_depth", str(depth), meaning, f"{self._k} and the match")
        return {"max_match": longest, "share": cached != 0}

    def _drafting(self, family: str, path: str | None) -> None:
        """What else is said about drafting."""
        if family != "mtp" and family not in ("ngram", "suffix") and "model" not in self.fields:
            severity = "note" if family == "dspark" else "error"
            self._say(severity, "model", "none", "the drafter has to be in the target's checkpoint", '"model": ...')
        if self.fields.truth("parallel_drafting") and family not in ("dflash", "dspark"):
            self._say("warning", "parallel_drafting", "true", "all tokens in one pass; read as one after another")
        if self.fields.truth("use_heterogeneous_vocab"):
            meaning = "drafter and target have different tokens; a recipe wants one vocabulary"
            severity = "warning" if family == "small_model" else "error"
            self._say(severity, "use_heterogeneous_vocab", "true", meaning, "a drafter of the target's family")
        if family == "mtp" and self._k > 1 and facts_of(path, family).modules == 1:
            meaning = "one module runs again on its own output: each further token stands less often"
            self._say("note", "num_speculative_tokens", str(self._k), meaning)
        self.findings += check_pair(self._target, path, family, self._context)

    def _schedule(self) -> list[Step]:
        where, given = (
            "num_speculative_tokens_per_batch_size",
            self.fields.raw("num_speculative_tokens_per_batch_size"),
        )
        rows = given if isinstance(given, tuple | list) else ()
        if not rows or not all(isinstance(row, tuple | list) and len(row) == 3 for row in rows):
            raise RecipeError(where, repr(given)[:80], "a list of [first batch size, last, draft tokens]")
        fields = [Fields(dict(zip(("low", "high", "k"), row, strict=True)), where) for row in rows]
        steps = [Step(each.whole("low", 1) or 1, each.whole("high", 1) or 1, each.whole("k") or 0) for each in fields]
        steps.sort(key=lambda step: step.low)
        gaps = [step for before, step in zip([Step(0, 0, 0), *steps], steps, strict=False) if step.low <= before.high]
        if steps[0].low != 1 or gaps or any(step.low > step.high for step in steps):
            self._say(
                "error", where, repr(given)[:80], "refused: ranges start at 1 and do not overlap", "[[1, 8, 4], ...]"
            )
        if steps[-1].k:
            meaning = f"larger batches keep {steps[-1].k} draft tokens"
            self._say(
                "note", where, f"ends at batch {steps[-1].high}", meaning, f"[{steps[-1].high + 1}, N, 0] to stop"
            )
        return steps

    def _names(self) -> None:
        """Keys that vLLM does not take."""
        for name in self.fields.data:
            if name in RENAMED:
                self._say(
                    "error", name, repr(self.fields.data[name])[:40], "renamed or removed: refused", RENAMED[name]
                )
            elif name in NEVER:
                self._say("error", name, "set", "filled in by vLLM itself", "leave it out")
            elif name not in FIELDS:
                self._say("error", name, "unknown key", "vLLM refuses it", nearest(name, FIELDS))

    def _say(self, severity: Any, where: str, found: str, meaning: str, fix: str = "") -> None:
        self.findings.append(Finding(severity, where, found, meaning, fix))

"""Reads TensorRT-LLM's command lines and files as recipes, and says what is wrong about them."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from specflow.errors import RecipeError
from specflow.export.drafter_facts import facts_of
from specflow.export.engine_input import Fields, as_mapping, find_command, read_file, read_flags
from specflow.export.engines.base import Dialect, Finding, Given, Imported, worst_first
from specflow.export.engines.tensorrt_llm_schema import BASE, CLASSES, FAMILY_OF, RENAMED
from specflow.export.imported_draft import check_left, check_schedule, drafter, recipe_of
from specflow.export.pair_checks import check_block, check_pair
from specflow.export.recipe_view import Step
from specflow.recipe import nearest

__all__ = ["read_tensorrt_llm"]

CONFIG = ("--config", "--extra-llm-api-options")
SWITCHES = ("--trust-remote-code",)
SCHEDULE = "draft_len_schedule"
LARGEST_BATCH = 1 << 20  # stands for "all larger ones" in a range
CORRECTORS = {"vanilla": "markov", "gated": "gated", "rnn": "rnn"}

Severity = Literal["error", "warning", "note"]


def read_tensorrt_llm(given: Given, dialect: Dialect) -> Imported:
    """A command line, a script with one, or the YAML file.

    Raises:
        RecipeError: It is none of these.
    """
    findings: list[Finding] = []
    server, spec = _given(given, findings)
    target = _target(server, findings)
    runtime = {
        key: value
        for name, key in (("max_batch_size", "batch"), ("max_seq_len", "context"))
        if (value := server.whole(name, 1)) is not None
    }
    reader = _Reader(spec or {}, dialect, str(target.get("model", "")), runtime.get("context"))
    draft = None if spec is None else reader.draft(bool(server.truth("disable_overlap_scheduler")))
    sections: dict[str, Mapping[str, Any]] = {"runtime": runtime}
    if draft is not None:
        sections |= {"verify": reader.verify(), "length": reader.length()}
    findings += check_left((name for name in server.left() if name != "speculative_config"), "the server")
    if draft is not None:
        findings += check_left((name for name in reader.fields.left() if reader.takes(name)), "speculative_config")
    data = recipe_of(target, draft, **sections)
    return Imported("tensorrt_llm", data, worst_first([*findings, *reader.findings]), dialect.versions)


def _given(given: Given, findings: list[Finding]) -> tuple[Fields, Mapping[str, Any] | None]:
    """Settings of the server, and the speculative mapping where there is one."""
    command = given.argv or find_command(given.text, ("trtllm-serve", "trtllm-bench"))
    if command:
        return _from_command(command, findings)
    data = as_mapping(given.text, given.name)
    if "decoding_type" in data:
        return Fields({}, given.name), data
    if (match := re.search(r"^#\s*(trtllm-serve [^\n]*)$", given.text, re.MULTILINE)) is not None:
        data = {**_launched(match[1]), **data}
    known = {"speculative_config", "max_batch_size", "max_seq_len", "backend", "kv_cache_config", "model", "dtype"}
    if not known & set(data):
        expected = "`trtllm-serve` words, or its YAML file with speculative_config"
        raise RecipeError(given.name, "nothing of TensorRT-LLM's", expected)
    return Fields(data, given.name), _spec_of(data, given.name)


def _launched(line: str) -> dict[str, Any]:
    """What the command says that a written file carries in its first line."""
    try:
        words = shlex.split(line)
    except ValueError:
        return {}
    flags = read_flags(words, SWITCHES)
    model = {"model": flags.words[1]} if len(flags.words) > 1 else {}
    return {**model, **({"trust_remote_code": True} if "--trust-remote-code" in flags.values else {})}


def _from_command(command: tuple[str, ...], findings: list[Finding]) -> tuple[Fields, Mapping[str, Any] | None]:
    flags = read_flags(command, SWITCHES)
    words = [word for word in flags.words[1:] if word not in ("serve", "throughput", "latency")]
    named = {name.removeprefix("--").replace("-", "_"): value for name, value in flags.values.items()}
    server: dict[str, Any] = {name: "true" if value is None else value for name, value in named.items()}
    if words:
        server["model"] = words[0]
    file = next((value for name in CONFIG if (value := flags.values.get(name))), None)
    if file is None:
        return Fields(server, "trtllm-serve"), None
    if not Path(file).is_file():
        meaning = "speculation is configured there; it is not here, so it was not read"
        findings.append(Finding("warning", CONFIG[0], file, meaning, f"specflow import tensorrt_llm {file}"))
        return Fields(server, "trtllm-serve"), None
    data = as_mapping(read_file(file), file)
    return Fields({**data, **server}, file), _spec_of(data, file)


def _spec_of(data: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    spec = data.get("speculative_config")
    if spec is not None and not isinstance(spec, Mapping):
        raise RecipeError(f"{name}: speculative_config", repr(spec)[:80], "a mapping")
    return spec


def _target(server: Fields, findings: list[Finding]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if (model := server.text("model")) is not None:
        found["model"] = model
    else:
        findings.append(Finding("note", "model", "none", "the recipe keeps the embedded model", "set target.model"))
    if server.raw("dtype") in ("float32", "float16", "bfloat16"):
        found["dtype"] = server.raw("dtype")
    if (revision := server.text("revision")) is not None:
        found["revision"] = revision
    if server.truth("trust_remote_code"):
        found["trust_remote_code"] = True
    return found


class _Reader:
    """Reads one `speculative_config`; `findings` grows as it does.

    Args:
        spec: The mapping.
        dialect: Versions it is for.
        target: Name of the target.
        context: Most positions of a request.
    """

    def __init__(self, spec: Mapping[str, Any], dialect: Dialect, target: str, context: int | None) -> None:
        self.fields = Fields(spec, "speculative_config")
        self.findings: list[Finding] = []
        self._dialect, self._target, self._context = dialect, target, context
        self._family, self._k = "", 0

    def takes(self, name: str) -> bool:
        """Whether the class of this drafter has the key."""
        return name in (*BASE, *CLASSES.get(str(self.fields.raw("decoding_type")), ()))

    def draft(self, no_overlap: bool) -> dict[str, Any] | None:
        """The draft section; None where it drafts with nothing a recipe knows.

        Args:
            no_overlap: Whether the overlap scheduler is off.
        """
        kind = self.fields.text("decoding_type")
        if kind is None or kind not in CLASSES:
            found = kind or "none"
            self._say("error", "decoding_type", found, "refused", nearest(found, CLASSES) or ", ".join(CLASSES))
            return None
        self._names(kind)
        if kind not in FAMILY_OF:
            self._say("warning", "decoding_type", kind, "no method of a recipe; read as plain decoding")
            return None
        self._spelling(kind)
        self._family = FAMILY_OF[kind]
        path = drafter(self.fields.text("speculative_model") or self.fields.text("speculative_model_dir"))
        self._k = self._read_k(kind, path)
        found_draft: dict[str, Any] = {"method": self._family, "k": self._k, **self._options(kind)}
        if path is not None and self._family not in ("ngram", "suffix"):
            found_draft["model" if self._family == "small_model" else "weights"] = path
        self._drafting(kind, path, no_overlap)
        return self._with_automaton(found_draft)

    def verify(self) -> dict[str, Any]:
        """The verify section."""
        if self.fields.truth("use_relaxed_acceptance_for_thinking"):
            meaning = "lossy while a model thinks: the text's law is not the target's. The recipe keeps the law"
            self._say("warning", "use_relaxed_acceptance_for_thinking", "true", meaning, "false")
        asked = self.fields.truth("use_rejection_sampling")
        return {"rule": "rejection"} if asked and self._family not in ("ngram", "suffix") else {}

    def length(self) -> dict[str, Any]:
        """The length section."""
        limit, given = self.fields.whole("max_concurrency", 1), self.fields.raw(SCHEDULE)
        if limit is not None and given is not None:
            self._say("error", "max_concurrency", str(limit), f"refused together with {SCHEDULE}", "one of them")
        if (threshold := self.fields.number("acceptance_rate_threshold", 0.0, 1.0)) is not None:
            meaning = "once the rate falls below it, speculation stays off for good"
            self._say("warning", "acceptance_rate_threshold", f"{threshold:g}", meaning, "length.policy expected_gain")
        if given is not None:
            self.findings += check_schedule(self._schedule(given), self._k, SCHEDULE)
            return {"policy": "expected_gain"}
        if limit is not None:
            meaning = f"speculation is off above {limit} requests; a recipe measures where it stops paying"
            self._say("note", "max_concurrency", str(limit), meaning)
            return {"policy": "expected_gain"}
        return {}

    def _read_k(self, kind: str, path: str | None) -> int:
        k, old = self.fields.whole("max_draft_len"), self.fields.whole("num_nextn_predict_layers", 1)
        where = "max_draft_len"
        if kind == "MTP" and old is not None:
            if self._dialect.name != "starts":
                self._say("warning", "num_nextn_predict_layers", str(old), "deprecated", "max_draft_len")
            k, where = (old, "num_nextn_predict_layers") if k is None else (k, where)
        if not k:
            facts = facts_of(path, self._family)
            guess = facts.trained_k or facts.modules or 1
            severity: Severity = "note" if kind == "MTP" and k is None else "error"
            self._say(severity, where, "none" if k is None else "0", f"read as {guess}", "max_draft_len: K")
            k = guess
        self.findings += check_block(k, path, self._family, where)
        return k

    def _options(self, kind: str) -> dict[str, Any]:
        if kind == "NGram":
            size = self.fields.whole("max_matching_ngram_size", 1) or 2
            if self.fields.truth("is_use_oldest") is not False:
                meaning = "of several matches the oldest is copied; recipes take the newest, which stands more often"
                self._say("note", "is_use_oldest", "true, the default", meaning, "false")
            share = self.fields.truth("is_public_pool") is not False
            self.fields.truth("is_keep_all")
            return {"max_match": min(size, 256), "share": share}
        if kind == "SA":
            length = self.fields.whole("max_matching_ngram_size", -1)
            share = bool(self.fields.truth("enable_global_pool"))
            if length == 0:
                self._say("error", "max_matching_ngram_size", "0", "refused", "-1 for the longest match")
            fixed = dict.fromkeys(("min_match", "max_match"), min(length, 256)) if length and length > 0 else {}
            return {**fixed, "share": share}
        return {**self._tree(), **self._network(kind)}

    def _tree(self) -> dict[str, Any]:
        topk, nodes = self.fields.whole("dynamic_tree_max_topK", 1), self.fields.whole("max_total_draft_tokens", 1)
        if not self.fields.truth("use_dynamic_tree"):
            if topk is not None:
                meaning = "ignored with a warning: without use_dynamic_tree a chain is drafted"
                self._say("warning", "dynamic_tree_max_topK", str(topk), meaning, "use_dynamic_tree: true")
            return {}
        if topk is None:
            self._say("error", "dynamic_tree_max_topK", "none", "refused: a dynamic tree needs it", "8")
        branch = topk or 8
        if nodes is not None and not self._k <= nodes <= branch * self._k:
            meaning = f"refused: from {self._k} (max_draft_len) to {branch * self._k} (topK times it)"
            self._say("error", "max_total_draft_tokens", str(nodes), meaning)
        return {"shape": "beam", "branch": min(branch, 256), "nodes": min(nodes or branch * self._k, 1024)}

    def _network(self, kind: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        name = "eagle3_layers_to_capture" if kind.startswith("Eagle") else "target_layer_ids"
        taps = self.fields.raw(name) if name in self.fields else None
        if isinstance(taps, tuple) and all(type(each) is int and each >= 0 for each in taps):
            found["taps"] = taps
        if self._family in ("dflash", "dspark") and (token := self.fields.whole("mask_token_id")) is not None:
            found["mask_token"] = token
        if kind == "DSpark":
            size, head = self.fields.whole("block_size", 1), self.fields.text("markov_head_type")
            if size is not None and size != self._k:
                self._say("warning", "block_size", str(size), "differs from max_draft_len", str(self._k))
            if head in ("gated", "rnn"):
                found["corrector"] = CORRECTORS[head]
            if rank := self.fields.whole("markov_rank"):
                found["corrector_rank"] = rank
        return found

    def _drafting(self, kind: str, path: str | None, no_overlap: bool) -> None:
        if path is None and self._family in ("eagle3", "small_model", "dflash"):
            given = self.fields.raw("speculative_model") or self.fields.raw("speculative_model_dir")
            if given is None:
                self._say(
                    "error", "speculative_model", "none", f"refused: {kind} needs a drafter", "its folder or hub id"
                )
        if self._dialect.name == "starts" and self._family in ("ngram", "small_model") and not no_overlap:
            meaning = "these versions draft beside the target and cannot overlap"
            self._say("error", "disable_overlap_scheduler", "not set", meaning, "disable_overlap_scheduler: true")
        if self.fields.raw("eagle_choices") is not None:
            meaning = "static trees are deprecated and gone in 1.4; read as a chain"
            self._say("warning", "eagle_choices", "given", meaning, "use_dynamic_tree: true")
        if "allow_advanced_sampling" in self.fields and self._dialect.name == "ends":
            self._say("note", "allow_advanced_sampling", "given", "without effect now", "leave it out")
        self.findings += check_pair(self._target, path, self._family, self._context)

    def _with_automaton(self, draft: dict[str, Any]) -> dict[str, Any]:
        """A suffix automaton in front of the drafter, where there is one."""
        given = self.fields.raw("sa_config") if "sa_config" in self.fields else None
        if given is None or self._family not in ("eagle3", "mtp"):
            return draft
        if not isinstance(given, Mapping):
            raise RecipeError("sa_config", repr(given)[:80], "a mapping")
        automaton = Fields(given, "sa_config")
        shortest = automaton.whole("threshold", 1)
        if shortest is None:
            self._say("note", "sa_config.threshold", "none", "4 by default: shorter matches are left to the drafter")
        first: dict[str, Any] = {"method": "suffix", "min_match": min(shortest or 4, 64)}
        if automaton.truth("enable_global_pool"):
            first["share"] = True
        k = draft.pop("k")
        return {"k": k, "first_of": (first, draft)}

    def _schedule(self, given: Any) -> list[Step]:
        rows = given.items() if isinstance(given, Mapping) else ()
        pairs = {int(key): value for key, value in rows if re.fullmatch(r"\d{1,9}", str(key), re.ASCII)}
        wrong = len(pairs) != len(rows) or any(type(each) is not int or not 0 <= each < 1000 for each in pairs.values())
        if not pairs or wrong or min(pairs) < 1:
            raise RecipeError(SCHEDULE, repr(given)[:80], "a mapping from batch sizes to draft tokens")
        keys = sorted(pairs)
        starts = self._dialect.name == "starts" or (self._dialect.name == "unsure" and keys[0] == 1)
        if pairs[keys[0]] != self._k:
            meaning = f"refused: the smallest key's value has to be max_draft_len, {self._k}"
            self._say("error", SCHEDULE, f"{{{keys[0]}: {pairs[keys[0]]}, ...}}", meaning, f"{keys[0]}: {self._k}")
        self._turned(pairs, keys)
        if starts:
            ends = [*(key - 1 for key in keys[1:]), LARGEST_BATCH]
            return [Step(key, end, pairs[key]) for key, end in zip(keys, ends, strict=True)]
        lows = [1, *(key + 1 for key in keys)]
        steps = [Step(low, key, pairs[key]) for low, key in zip(lows, keys, strict=False)]
        return [*steps, Step(keys[-1] + 1, LARGEST_BATCH, 0)]

    def _turned(self, pairs: Mapping[int, int], keys: list[int]) -> None:
        """Signs of a schedule that was written for the other meaning of its keys."""
        said = "{" + ", ".join(f"{key}: {pairs[key]}" for key in keys) + "}"
        old_look = keys[0] == 1 and len(keys) > 1
        if self._dialect.name == "ends" and old_look:
            meaning = (
                f"a key is the last batch size of its range: {pairs[1]} at batch 1 only, 0 above {keys[-1]}. With "
                "key 1 it looks written for versions up to 1.2, where a key is the first of its range"
            )
            fix = {key - 1: pairs[before] for before, key in itertools.pairwise(keys)}
            self._say("warning", SCHEDULE, said, meaning, f"{SCHEDULE}: {fix}")
        if self._dialect.name == "starts" and keys[0] != 1:
            meaning = (
                "refused: key 1 is required. It looks written for versions from 1.3 on, where a key ends its range"
            )
            lows = [1, *(key + 1 for key in keys)]
            fix = {low: pairs[key] for low, key in zip(lows, keys, strict=False)} | {keys[-1] + 1: 0}
            self._say("error", SCHEDULE, said, meaning, f"{SCHEDULE}: {fix}")
        if self._dialect.name == "unsure":
            meaning = "what its keys mean changed among these release candidates: first or last batch size of a range"
            self._say("warning", SCHEDULE, said, meaning, "max_concurrency, which means the same in all")

    def _names(self, kind: str) -> None:
        """Keys that these versions do not take."""
        known = {*BASE, *CLASSES[kind]}
        for name in self.fields.data:
            if name in RENAMED:
                severity: Severity = "note" if self._dialect.name == "starts" else "error"
                self._say(severity, name, "an older name", "refused from 1.3 on", RENAMED[name])
            elif name not in known:
                self._say("error", name, "unknown key", f"refused for {kind}", nearest(name, sorted(known)))

    def _spelling(self, kind: str) -> None:
        """Decoding types that were renamed."""
        if kind == "DraftTarget" and self._dialect.name != "starts":
            meaning = "the spelling of the documentation; the source has Draft_Target"
            self._say("error", "decoding_type", kind, meaning, "Draft_Target")
        if kind == "Draft_Target" and self._dialect.name == "starts":
            self._say("error", "decoding_type", kind, "these versions say DraftTarget", "DraftTarget")
        if kind == "Eagle" and self._dialect.name != "starts":
            self._say(
                "warning", "decoding_type", kind, "read as Eagle3: weights of EAGLE-1 and 2 do not load", "Eagle3"
            )

    def _say(self, severity: Severity, where: str, found: str, meaning: str, fix: str = "") -> None:
        self.findings.append(Finding(severity, where, found, meaning, fix))

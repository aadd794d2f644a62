"""Reads SGLang's command lines and files as recipes, and says what is wrong about them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from specflow.errors import RecipeError
from specflow.export.drafter_facts import facts_of
from specflow.export.engine_input import Fields, as_mapping, find_command, read_file, read_flags
from specflow.export.engines.base import Dialect, Finding, Given, Imported, worst_first
from specflow.export.engines.sglang_schema import ALGORITHMS, FLAGS, OLDER, RENAMED, SWITCHES, WINDOWS
from specflow.export.imported_draft import check_left, check_schedule, drafter, recipe_of
from specflow.export.pair_checks import check_block, check_match, check_pair
from specflow.export.recipe_view import Step
from specflow.export.sampling_request import read_defaults
from specflow.recipe import nearest

__all__ = ["read_sglang"]

FAMILY_OF = {
    "EAGLE": "eagle",
    "EAGLE3": "eagle3",
    "NEXTN": "mtp",
    "STANDALONE": "small_model",
    "NGRAM": "suffix",
    "DFLASH": "dflash",
    "DSPARK": "dspark",
}
STEPPING = ("eagle", "eagle3", "mtp", "small_model")
EAGLES = ("eagle", "eagle3", "mtp")
LARGEST_BATCH = 1 << 20  # stands for "all larger ones" in a range
STEPS = "--speculative-num-steps"
TOPK = "--speculative-eagle-topk"
TOKENS = "--speculative-num-draft-tokens"

Severity = Literal["error", "warning", "note"]


def read_sglang(given: Given, dialect: Dialect) -> Imported:
    """A command line, a script with one, or a YAML file for `--config`.

    Raises:
        RecipeError: It is none of these.
    """
    flags, environment = _given(given)
    reader = _Reader(flags, environment, dialect)
    draft = reader.draft()
    sections: dict[str, Mapping[str, Any]] = {"sampling": reader.sampling(), "runtime": reader.runtime()}
    if draft is not None:
        sections |= {"verify": reader.verify(), "length": reader.length()}
    target = reader.target()
    reader.findings += check_left((name for name in reader.fields.left() if reader.takes(name)), "the server")
    data = recipe_of(target, draft, **sections)
    return Imported("sglang", data, worst_first(reader.findings), dialect.versions)


def _given(given: Given) -> tuple[dict[str, Any], Mapping[str, str]]:
    """Flag -> value, and the environment."""
    command = given.argv or find_command(given.text, ("sglang.launch_server", "sglang", "launch_server.py"))
    if not command:
        data = {f"--{key.replace('_', '-')}": value for key, value in as_mapping(given.text, given.name).items()}
        if not set(data) & {"--model-path", "--model", "--speculative-algorithm"}:
            raise RecipeError(given.name, "nothing of SGLang's", "`sglang.launch_server` words, or a --config file")
        return data, {}
    flags = read_flags(command, SWITCHES)
    values: dict[str, Any] = {name: True if value is None else value for name, value in flags.values.items()}
    if (file := flags.values.get("--config")) and Path(file).is_file():
        kept = as_mapping(read_file(file), file)
        values = {**{f"--{key.replace('_', '-')}": value for key, value in kept.items()}, **values}
    return values, flags.environment


class _Reader:
    """Reads one set of flags; `findings` grows as it does.

    Args:
        flags: Flag -> value.
        environment: Variables set on the line.
        dialect: Versions it is for.
    """

    def __init__(self, flags: Mapping[str, Any], environment: Mapping[str, str], dialect: Dialect) -> None:
        self.fields = Fields(flags, "sglang")
        self.findings: list[Finding] = []
        self._environment, self._dialect = environment, dialect
        self._family, self._k, self._topk = "", 0, 1
        self._names()

    def takes(self, flag: str) -> bool:
        """Whether these versions have the flag, as far as is known."""
        return not flag.startswith("--speculative-") or flag in (*FLAGS, *OLDER[self._dialect.name])

    def target(self) -> dict[str, Any]:
        """The target section."""
        found: dict[str, Any] = {}
        model = self.fields.text("--model-path") or self.fields.text("--model")
        if model is None:
            self._say("note", "--model-path", "none", "the recipe keeps the embedded model", "set target.model")
        else:
            found["model"] = model
        dtype = {"half": "float16", "float": "float32"}.get(str(self.fields.raw("--dtype")))
        dtype = dtype or self.fields.raw("--dtype")
        if dtype in ("float32", "float16", "bfloat16"):
            found["dtype"] = dtype
        if (revision := self.fields.text("--revision")) is not None:
            found["revision"] = revision
        if self.fields.truth("--trust-remote-code"):
            found["trust_remote_code"] = True
        return found

    def runtime(self) -> dict[str, Any]:
        """The runtime section."""
        names = {"--max-running-requests": "batch", "--context-length": "context"}
        found = {key: value for name, key in names.items() if (value := self.fields.whole(name, 1)) is not None}
        if (chunk := self.fields.whole("--chunked-prefill-size", -1)) is not None and chunk > 0:
            found["prefill_chunk"] = chunk
        return found

    def sampling(self) -> dict[str, Any]:
        """The sampling section."""
        given = self.fields.raw("--preferred-sampling-params")
        if isinstance(given, str):
            given = as_mapping(given, "--preferred-sampling-params")
        if given is not None and not isinstance(given, Mapping):
            raise RecipeError("--preferred-sampling-params", repr(given)[:80], "a mapping")
        return read_defaults(given or {}, "--preferred-sampling-params")

    def draft(self) -> dict[str, Any] | None:
        """The draft section; None where nothing drafts, or nothing a recipe knows."""
        algorithm = self.fields.text("--speculative-algorithm")
        if algorithm is None:
            given = [name for name in self.fields.data if name.startswith("--speculative-")]
            if given:
                meaning = "without --speculative-algorithm nothing is drafted"
                self._say("warning", given[0], "given alone", meaning, "--speculative-algorithm")
            return None
        name = algorithm.upper()
        if name not in FAMILY_OF:
            severity: Severity = "warning" if name in ALGORITHMS else "error"
            meaning = "no method of a recipe, or a plugin's; read as plain decoding"
            self._say(severity, "--speculative-algorithm", algorithm, meaning, nearest(name, ALGORITHMS))
            return None
        place = self.fields.text("--speculative-draft-model-path") or self.fields.text("--speculative-draft-model")
        path = drafter(place)
        family = FAMILY_OF[name]
        if family == "eagle" and place is None:
            family = "mtp"
            self._say(
                "note", "--speculative-algorithm", algorithm, "without a draft model: the target's own MTP modules"
            )
        if family == "suffix" and path is not None:
            meaning = "not used: NGRAM drafts from earlier text"
            self._say("note", "--speculative-draft-model-path", path, meaning, "leave it out")
            path = None
        self._family = family
        found = {**self._sizes(path), **({} if path is None else self._weights(path))}
        self.findings += check_block(self._k, path, family, TOKENS)
        model = self.fields.raw("--model-path") or self.fields.raw("--model") or ""
        self.findings += check_pair(str(model), path, family, self.fields.whole("--context-length", 1))
        if place is None and family in ("eagle3", "dflash", "small_model"):
            self._say(
                "error", "--speculative-draft-model-path", "none", f"{name} needs a drafter", "its folder or hub id"
            )
        return found

    def verify(self) -> dict[str, Any]:
        """The verify section."""
        for name in ("single", "acc"):
            flag = f"--speculative-accept-threshold-{name}"
            if (value := self.fields.number(flag, 0.0, 1.0)) is not None and value < 1.0:
                meaning = "lossy: below 1 the text's law is not the target's. The recipe keeps the law"
                self._say("warning", flag, f"{value:g}", meaning, "1.0")
        blocks = self._family in ("dflash", "dspark")
        if self.fields.truth("--speculative-use-block-verification"):
            if blocks or (self._family in EAGLES and self._topk == 1):
                return {"rule": "block"}
            self._refused("--speculative-use-block-verification")
        if self.fields.truth("--speculative-use-rejection-sampling"):
            if self._family in EAGLES and self._topk == 1:
                return {"rule": "rejection"}
            self._refused("--speculative-use-rejection-sampling")
        return {"rule": "rejection"} if blocks else {}

    def length(self) -> dict[str, Any]:
        """The length section."""
        threshold = self.fields.number("--speculative-dspark-confidence-threshold", 0.0, 1.0)
        if threshold and self._dialect.name == "anchor":
            return {"policy": "confidence", "threshold": threshold}
        if (table := self.fields.text("--speculative-dspark-sps-table-path")) is not None:
            mode = self._environment.get("SGLANG_RAGGED_VERIFY_MODE", "static")
            if mode == "static":
                meaning = "without effect: the scheduler that reads it is off in mode static, the default"
                self._say("warning", "--speculative-dspark-sps-table-path", table, meaning, MODE)
            return {"policy": "expected_gain"}
        if self._family == "dspark" and self._dialect.name == "gamma":
            meaning = "SGLang takes every pass to cost the same, and verifies whole blocks"
            self._say(
                "note",
                "--speculative-dspark-sps-table-path",
                "none",
                meaning,
                "specflow export engine sglang --profile",
            )
        return self._adaptive() if self.fields.truth("--speculative-adaptive") else {}

    def _weights(self, path: str) -> dict[str, Any]:
        return {"model" if self._family == "small_model" else "weights": path}

    def _sizes(self, path: str | None) -> dict[str, Any]:
        """Method, k and shape."""
        if self._family in STEPPING:
            return self._stepping()
        if self._family == "suffix":
            return self._trie()
        facts, tokens = facts_of(path, self._family), self.fields.whole(TOKENS, 1)
        if self._family == "dflash":
            size = self.fields.whole("--speculative-dflash-block-size", 1)
            if size is not None and tokens is not None and size != tokens:
                self._say("error", TOKENS, str(tokens), f"differs from --speculative-dflash-block-size {size}: refused")
            window = size or tokens or (facts.trained_k or 15) + 1
        else:
            window = self._dspark_window(tokens, facts.trained_k)
        self._k = max(1, window - 1)
        if facts.trained_k == self._k + 1:
            meaning = f"SGLang counts the anchor: this drafts {self._k} of the {facts.trained_k} trained tokens"
            self._say("warning", TOKENS, str(window), meaning, str(facts.trained_k + 1))
        return {"method": self._family, "k": self._k}

    def _dspark_window(self, tokens: int | None, trained: int | None) -> int:
        """Rows of a verified block, the anchor's included."""
        flag = "--speculative-dspark-block-size"
        size = self.fields.whole(flag, 1)
        if self._dialect.name != "gamma":
            if size is not None:
                meaning = "counts the anchor in these versions, and from 0.5.23 on it does not"
                self._say("warning", flag, str(size), meaning, f"{TOKENS} {size}, which always counts it")
            return size or tokens or (trained or 7) + 1
        if size is None:
            return tokens or (trained or 7) + 1
        if tokens is not None and tokens != size + 1:
            meaning = f"refused: {flag} counts no anchor, so this has to be {size + 1}"
            self._say("error", TOKENS, str(tokens), meaning, str(size + 1))
        return size + 1

    def _stepping(self) -> dict[str, Any]:
        """Chains and beam trees of drafters that go step by step."""
        steps, topk, tokens = self.fields.whole(STEPS), self.fields.whole(TOPK, 1), self.fields.whole(TOKENS, 1)
        given = {name for name, value in ((STEPS, steps), (TOPK, topk), (TOKENS, tokens)) if value is not None}
        if given and len(given) < 3 and not self.fields.truth("--speculative-adaptive"):
            missing = ", ".join(sorted({STEPS, TOPK, TOKENS} - given))
            self._say("error", missing, "none", "SGLang wants all three of steps, topk and tokens, or none of them")
        if not given:
            meaning = "SGLang chooses by the architecture: 3, 1 and 4, or a tree of 5, 4 and 8 for Llama"
            self._say("note", STEPS, "none", f"{meaning}; read as 3, 1, 4", "say all three")
        self._topk = topk or 1
        if steps is None:
            steps = tokens - 1 if tokens is not None and self._topk == 1 and tokens > 1 else 3
        self._k = max(1, steps)
        method = self._family
        if self._topk == 1:
            if tokens is not None and tokens != self._k + 1:
                meaning = f"SGLang counts the anchor and makes it {self._k + 1}: {self._k} draft tokens"
                self._say("warning", TOKENS, str(tokens), meaning, f"{self._k + 1}, or {STEPS} {max(1, tokens - 1)}")
            return {"method": method, "k": self._k}
        nodes = max(1, (tokens or self._k + 1) - 1)
        shape = {"nodes": nodes, "branch": self._topk}
        return {"method": "eagle2", "k": self._k, **shape} if method == "eagle" else {
            "method": method, "k": self._k, "shape": "beam", **shape
        }  # fmt: skip

    def _trie(self) -> dict[str, Any]:
        """Drafts from earlier text."""
        tokens = self.fields.whole(TOKENS, 1)
        if tokens is None:
            self._say("note", TOKENS, "none", "SGLang takes 12, the anchor included: 11 draft tokens")
        self._k = max(1, (tokens or 12) - 1)
        self.fields.whole("--speculative-ngram-min-bfs-breadth", 1)
        breadth = self.fields.whole("--speculative-ngram-max-bfs-breadth", 1)
        if breadth is None or breadth > 1:
            found = "10 by default" if breadth is None else str(breadth)
            meaning = f"drafts a tree of {self._k} nodes; read as one continuation"
            self._say("note", "--speculative-ngram-max-bfs-breadth", found, meaning, "1 for a chain")
        found_sizes: dict[str, Any] = {"method": "suffix", "k": self._k, "share": True}
        if self._dialect.name == "windows":
            low, high = self.fields.whole(WINDOWS[0], 1) or 1, self.fields.whole(WINDOWS[1], 1) or 12
            self.findings += check_match(low, WINDOWS[0])
            if low > high:
                self._say("error", WINDOWS[0], str(low), f"above {WINDOWS[1]}, {high}: nothing ever drafts", str(high))
            self.fields.whole("--speculative-ngram-branch-length", 1)
            return {**found_sizes, "min_match": min(low, high, 256), "max_match": min(max(low, high), 256)}
        depth = self.fields.whole("--speculative-ngram-max-trie-depth", 1) or 18
        if depth <= self._k:
            meaning = f"match and draft together are at most {depth} tokens: no draft of {self._k} is ever reached"
            self._say("warning", "--speculative-ngram-max-trie-depth", str(depth), meaning, f"{self._k} and the match")
        return {**found_sizes, "max_match": max(1, min(256, depth - self._k))}

    def _adaptive(self) -> dict[str, Any]:
        """The schedule of `--speculative-adaptive`: keys are lower ends of batch sizes."""
        if self._family not in EAGLES or self._topk != 1:
            meaning = "switched off without an error: chains of EAGLE and EAGLE3 alone have it"
            self._say("warning", "--speculative-adaptive", "true", meaning, f"{TOPK} 1")
            return {}
        file = self.fields.text("--speculative-adaptive-config")
        if file is None or not Path(file).is_file():
            found = "the built-in table" if file is None else f"{file}, which is not here"
            self._say("note", "--speculative-adaptive-config", found, "draft lengths follow batch size and acceptance")
            return {"policy": "expected_gain"}
        steps = self._adaptive_steps(as_mapping(read_file(file), file), file)
        if self._k not in {step.k for step in steps}:
            known = ", ".join(str(step.k) for step in steps)
            self._say("error", STEPS, str(self._k), f"none of the candidates of {file}: refused", known)
        if any(step.k == 0 for step in steps) and self._dialect.name != "gamma":
            self._say("error", file, "0 candidate steps", "these versions refuse 0", "1")
        self.findings += check_schedule(steps, max(self._k, *(step.k for step in steps)), file)
        return {"policy": "expected_gain"}

    def _adaptive_steps(self, data: Mapping[str, Any], file: str) -> list[Step]:
        lows = sorted(int(key) for key in data if key.isascii() and key.isdigit() and len(key) < 9)
        if not lows:
            raise RecipeError(file, "no batch size", 'keys such as "1", each with candidate_steps')
        steps = []
        for low, following in zip(lows, [*lows[1:], LARGEST_BATCH], strict=True):
            row = next(value for key, value in data.items() if key.isdigit() and int(key) == low)
            given = row.get("candidate_steps") if isinstance(row, Mapping) else None
            wrong = not isinstance(given, tuple) or not given
            if wrong or any(type(each) is not int or not 0 <= each < 1000 for each in given or ()):
                raise RecipeError(f"{file}: {low}", repr(given)[:80], "candidate_steps: a list of whole numbers")
            steps.append(Step(low, following - 1, max(given or (0,))))
        return steps

    def _names(self) -> None:
        """Flags that these versions do not take."""
        known = {*FLAGS, *OLDER[self._dialect.name]}
        for flag in self.fields.data:
            if not flag.startswith("--speculative-") or flag in known:
                continue
            if flag in RENAMED:
                alias = flag == "--speculative-draft-model"
                if not alias:
                    self._say("error", flag, "renamed or removed", "SGLang refuses it", RENAMED[flag])
            else:
                self._say("error", flag, "unknown flag", "SGLang refuses it", nearest(flag, FLAGS))
        if "--speculative-token-map" in self.fields and self.fields.raw("--speculative-algorithm") == "EAGLE3":
            meaning = "ignored: EAGLE3 has its own reduced vocabulary"
            self._say("warning", "--speculative-token-map", "given", meaning, "leave it out")

    def _refused(self, flag: str) -> None:
        found = f"with {self._family} and topk {self._topk}"
        self._say("error", flag, found, "refused: it wants a chain of a method that samples its drafts", f"{TOPK} 1")

    def _say(self, severity: Severity, where: str, found: str, meaning: str, fix: str = "") -> None:
        self.findings.append(Finding(severity, where, found, meaning, fix))


MODE = "SGLANG_RAGGED_VERIFY_MODE=compact in the environment"

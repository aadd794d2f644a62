"""Settings of openvino-genai as recipes, with what is wrong about them. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from specflow.errors import RecipeError
from specflow.export.engine_input import Fields, as_mapping
from specflow.export.engines.base import Dialect, Finding, Given, Imported, worst_first
from specflow.export.imported_draft import drafter, recipe_of
from specflow.recipe import nearest

__all__ = ["FIELDS", "most_candidates", "read_openvino_genai"]

FIELDS = (
    "adapters", "apply_chat_template", "assistant_confidence_threshold", "branching_factor", "diversity_penalty",
    "do_sample", "echo", "eos_token_id", "frequency_penalty", "ignore_eos", "include_stop_str_in_output",
    "length_penalty", "logprobs", "max_length", "max_new_tokens", "max_ngram_size", "min_new_tokens", "min_p",
    "no_repeat_ngram_size", "num_assistant_tokens", "num_beam_groups", "num_beams", "num_return_sequences",
    "presence_penalty", "pruning_ratio", "relevance_weight", "repetition_penalty", "rng_seed", "stop_criteria",
    "stop_strings", "stop_token_ids", "structured_output_config", "temperature", "top_k", "top_p", "tree_depth",
)  # fmt: skip
"""Fields of a GenerationConfig in 2026.4.1 that a user sets."""
_NOT_FROM_FILES = ("stop_token_ids", "rng_seed")
_OF_TREES = ("branching_factor", "tree_depth")
_UNSET_LENGTH = 5  # draft tokens where a draft model is given and no number
_MOST = 256
_ALL = 2**63  # a top-k that keeps everything is a larger number


def most_candidates(branching: int, depth: int) -> int:
    """Draft tokens a tree has room for: `branching` at the first level, `branching` squared at every later one."""
    return branching * branching * (depth - 1) + branching


def read_openvino_genai(given: Given, dialect: Dialect) -> Imported:
    """A recipe that means the same, and the findings.

    Raises:
        RecipeError: It is no JSON of this engine.
    """
    if given.is_command:
        raise RecipeError(given.name, "a command line", "settings.json, or the JSON of a GenerationConfig")
    reader = _Reader(as_mapping(given.text, given.name), given.name, dialect)
    draft = reader.draft()
    sampling, target = reader.sampling(), reader.target()
    length = reader.length(draft)
    reader.check()
    data = recipe_of(target, draft, verify={"rule": "match"}, length=length, sampling=sampling)
    return Imported("openvino_genai", data, worst_first(reader.findings), dialect.versions)


class _Reader:
    """Reads the sections of a recipe from settings, and finds faults."""

    def __init__(self, data: Mapping[str, Any], where: str, dialect: Dialect) -> None:
        inner = data.get("generation_config")
        self._whole = isinstance(inner, Mapping)
        self._pipeline = Fields(data if self._whole else {}, where)
        self._config = Fields(inner if isinstance(inner, Mapping) else data, where)
        self._where, self._dialect = where, dialect
        self.findings: list[Finding] = []
        if not self._whole and not set(data) & set(FIELDS):
            raise RecipeError(where, "no field of a GenerationConfig", f"for example {', '.join(FIELDS[:4])}")

    def _find(
        self, severity: Literal["error", "warning", "note"], where: str, found: object, meaning: str, fix: str = ""
    ) -> None:
        self.findings.append(Finding(severity, where, str(found), meaning, fix))

    def target(self) -> dict[str, Any]:
        section: dict[str, Any] = {}
        if (place := self._pipeline.text("models_path")) is not None:
            section["model"] = place
        else:
            self._find(
                "warning", "models_path", "not named", "the recipe says the default one", "put it into target.model"
            )
        if self._pipeline.text("device") == "NPU":
            what = "takes the number of draft tokens as a start and adapts it"
            self._find("note", "device", "NPU", what, "CPU or GPU keep it")
        properties = self._pipeline.data.get("properties")
        fields = Fields(properties if isinstance(properties, Mapping) else {}, f"{self._where}: properties")
        if (threads := fields.whole("INFERENCE_NUM_THREADS", 1)) is not None:
            section["threads"] = threads
        precisions = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
        if (precision := fields.text("INFERENCE_PRECISION_HINT")) in precisions:
            section["dtype"] = precisions[precision]
        return section

    def sampling(self) -> dict[str, Any]:
        fields = self._config
        section: dict[str, Any] = {"temperature": 0.0}
        if fields.truth("do_sample"):
            warm = fields.number("temperature", 0.0, 1e6)
            if warm == 0.0:
                self._find("error", "temperature", warm, "0 and do_sample: refused", "do_sample: false")
            section["temperature"] = 1.0 if warm is None else warm
            for name in ("top_p", "min_p"):
                if (value := fields.number(name, 0.0, 1.0)) is not None:
                    section[name] = value
            if (top_k := fields.data.get("top_k")) is not None and not (type(top_k) is int and top_k >= _ALL):
                section["top_k"] = fields.whole("top_k")
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            if (value := fields.number(name, -1e6, 1e6)) is not None:
                section[name] = value
        for name, key in (
            ("max_new_tokens", "max_new_tokens"),
            ("min_new_tokens", "min_new_tokens"),
            ("rng_seed", "seed"),
        ):
            if (number := fields.whole(name)) is not None:
                section[key] = number
        for name in ("ignore_eos", "logprobs"):
            if fields.data.get(name):
                section[name] = True
        return section | self._stops()

    def _stops(self) -> dict[str, Any]:
        fields, section = self._config, dict[str, Any]()
        strings, ids = fields.data.get("stop_strings"), fields.data.get("stop_token_ids")
        if isinstance(strings, list | tuple) and all(isinstance(each, str) for each in strings):
            section["stop_strings"] = tuple(strings)
        if isinstance(ids, list | tuple) and all(type(each) is int for each in ids):
            section["stop_ids"] = tuple(ids)
        if not self._whole:
            for name in _NOT_FROM_FILES:
                if fields.data.get(name):
                    what = "a GenerationConfig that is read from a file leaves it out, in silence"
                    self._find("warning", name, fields.data[name], what, f"set config.{name} in Python")
        return section

    def draft(self) -> dict[str, Any] | None:
        config = self._config
        place, lookup = self._pipeline.text("draft_model"), bool(self._pipeline.truth("prompt_lookup"))
        longest = config.whole("max_ngram_size") or 0
        length = config.whole("num_assistant_tokens") or 0
        if place is not None and (lookup or longest):
            self._find("error", "max_ngram_size", longest, "a draft model and prompt lookup exclude each other", "0")
        elif longest or lookup:
            return self._look_up(longest, length, lookup)
        if place is None and not length and not config.number("assistant_confidence_threshold", 0.0, 1.0):
            return None
        method = self._pipeline.text("draft_method") or "small_model"
        depth = config.whole("tree_depth") or 0
        if method not in ("small_model", "eagle3"):
            raise RecipeError(f"{self._where}: draft_method", repr(method), "small_model or eagle3")
        path = drafter(place)
        if depth:
            section = self._tree(depth, length)
            return {**section, **({"weights": path} if path else {})}
        if not length and not config.number("assistant_confidence_threshold", 0.0, 1.0):
            self._find("note", "num_assistant_tokens", "not set", f"acts as {_UNSET_LENGTH}", "num_assistant_tokens: 5")
        key = "model" if method == "small_model" else "weights"
        return {"method": method, "k": self._within(length or _UNSET_LENGTH), **({key: path} if path else {})}

    def _look_up(self, longest: int, length: int, lookup: bool) -> dict[str, Any]:
        if longest and not length:
            what = "needs num_assistant_tokens above 0: refused"
            self._find("error", "max_ngram_size", longest, what, "num_assistant_tokens: 5")
        if self._whole and not lookup:
            what = "means nothing unless the pipeline is made with prompt_lookup=True"
            self._find("warning", "max_ngram_size", longest, what, "prompt_lookup: true")
        if lookup and not longest:
            self._find("error", "max_ngram_size", "not set", "0: nothing is looked up", "max_ngram_size: 3")
        size = min(longest or 3, _MOST)
        return {"method": "ngram", "k": self._within(length or _UNSET_LENGTH), "min_match": 1, "max_match": size}

    def _tree(self, depth: int, nodes: int) -> dict[str, Any]:
        branch = self._config.whole("branching_factor", 1) or 1
        if self._config.truth("do_sample"):
            self._find("error", "tree_depth", depth, "trees go with greedy decoding only: refused", "do_sample: false")
        if nodes < depth:
            what = f"must be at least tree_depth, {depth}: refused"
            self._find("error", "num_assistant_tokens", nodes, what, f"num_assistant_tokens: {depth}")
        if nodes > (room := most_candidates(branch, depth)):
            what = f"a tree of {depth} levels and {branch} branches has room for {room}"
            self._find("warning", "num_assistant_tokens", nodes, what, f"num_assistant_tokens: {room}")
        if self._dialect.name == "chains":
            self._find("error", "tree_depth", depth, f"not there in {self._dialect.versions}", "2026.3 or newer")
        size = min(max(nodes, 1), 1024)
        return {
            "method": "eagle3",
            "shape": "beam",
            "k": self._within(depth),
            "nodes": size,
            "branch": min(branch, _MOST),
        }

    def length(self, draft: Mapping[str, Any] | None) -> dict[str, Any]:
        bar = self._config.number("assistant_confidence_threshold", 0.0, 1.0) or 0.0
        if bar and self._config.whole("num_assistant_tokens"):
            what = "excludes num_assistant_tokens: refused"
            self._find("error", "assistant_confidence_threshold", bar, what, "leave one of them out")
        if draft is None or draft["method"] == "ngram" or not bar:
            return {"policy": "fixed"}
        what = "nothing else ends a draft; the recipe stops at k as well"
        self._find("note", "assistant_confidence_threshold", bar, what)
        return {"policy": "threshold", "start": bar, "step": 0.0}

    def _within(self, value: int) -> int:
        if value > _MOST:
            self._find("warning", "num_assistant_tokens", value, f"a recipe has at most {_MOST}: read as {_MOST}")
        return min(value, _MOST)

    def check(self) -> None:
        config = self._config
        for name in ("num_beams", "num_return_sequences"):
            if (config.whole(name) or 1) > 1:
                self._find("error", name, config.data[name], "does not go with drafts", f"{name}: 1")
        for name in config.data:
            if name not in FIELDS:
                what = "unknown: a GenerationConfig that is read from a file leaves it out, in silence"
                self._find("warning", name, str(config.data[name])[:40], what, nearest(name, FIELDS))

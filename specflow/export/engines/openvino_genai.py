"""openvino-genai: settings of an LLMPipeline and its GenerationConfig, and a script that runs them. No torch.

Tried with 2026.4.1. A GenerationConfig that is read from a file skips what it does not know in silence, and
`stop_token_ids` and `rng_seed` too, so the script hands every value over by name.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from specflow.export.declared_batch import lacks_schedule, length_at_batch
from specflow.export.draft_choice import OF_TREES, choose_draft, notes_on
from specflow.export.engines.base import Dialect, Exported, Given, Imported
from specflow.export.engines.openvino_genai_read import most_candidates, read_openvino_genai
from specflow.export.recipe_view import Ledger

if TYPE_CHECKING:
    from specflow.export.recipe_view import DraftView, RecipeView

__all__ = ["ENGINE", "OpenVINOGenAI"]

_HISTORY = ("ngram", "suffix")
_FAMILIES = {"trees": (*_HISTORY, "small_model", "eagle3"), "chains": (*_HISTORY, "small_model")}
_PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")

_SCRIPT = '''"""Runs settings.json, which stands beside this script: python generate.py "PROMPT" """

import json
import sys
from pathlib import Path

import openvino_genai

SETS = ("stop_strings", "stop_token_ids")


def load(settings):
    """The pipeline; what drafts is fixed here."""
    asked = dict(settings["properties"])
    if settings["prompt_lookup"]:
        asked["prompt_lookup"] = True
    if settings["draft_model"] is not None:
        asked["draft_model"] = openvino_genai.draft_model(settings["draft_model"], settings["draft_device"])
    return openvino_genai.LLMPipeline(settings["models_path"], settings["device"], **asked)


def configuration(settings):
    """Every value by its name: read from a file, some are left out in silence."""
    given = settings["generation_config"]
    config = openvino_genai.GenerationConfig(**{key: set(v) if key in SETS else v for key, v in given.items()})
    config.validate()
    return config


if __name__ == "__main__":
    said = json.loads(Path(__file__).with_name("settings.json").read_text(encoding="utf-8"))
    print(load(said).generate(" ".join(sys.argv[1:]) or sys.stdin.read(), configuration(said)))
'''


class OpenVINOGenAI:
    """LLMPipeline with a draft model, with earlier text, or with EAGLE-3."""

    name = "openvino_genai"
    dialects = (Dialect("2026.3", "2026.4.1", "trees"), Dialect("2025.0", "2026.2", "chains"))

    def export(self, view: RecipeView, dialect: Dialect) -> Exported:
        """Settings, and the script that runs them."""
        ledger = Ledger(view)
        settings = _pipeline(view, ledger)
        config = _sampling(view, ledger)
        draft = choose_draft(view, ledger, _FAMILIES[dialect.name], "openvino-genai")
        notes = [f"{view.target}: a folder with openvino_model.xml; optimum-cli export openvino makes it"]
        notes += notes_on(view, draft)
        if draft is not None:
            config |= _draft(view, draft, settings, ledger)
        lacks_schedule(view, ledger)
        settings["generation_config"] = config
        files = {"settings.json": json.dumps(settings, indent=2) + "\n", "generate.py": _SCRIPT}
        if view.sampling.seed is not None:
            notes.append("the same seed draws other tokens than here: the engine has its own generator")
        command = ("python", "generate.py")
        return Exported(self.name, dialect.versions, command, files, tuple(notes), ledger.gaps())

    def read(self, given: Given, dialect: Dialect) -> Imported:
        """Settings as written here, or the JSON of a GenerationConfig.

        Raises:
            RecipeError: It is neither.
        """
        return read_openvino_genai(given, dialect)


ENGINE = OpenVINOGenAI()


def _pipeline(view: RecipeView, ledger: Ledger) -> dict[str, Any]:
    target, properties = view.recipe.target, dict[str, Any]()
    ledger.says("target.model")
    if target.threads is not None:
        properties["INFERENCE_NUM_THREADS"] = target.threads
        ledger.says("target.threads")
    if target.dtype in _PRECISIONS:
        properties["INFERENCE_PRECISION_HINT"] = _PRECISIONS[target.dtype]
        ledger.says("target.dtype")
    elif target.dtype != "auto":
        ledger.lacks("target.dtype", "the type the folder was converted to")
    if target.device == "cpu":
        ledger.says("target.device")
    elif target.device != "auto":
        ledger.lacks("target.device", "CPU; GPU and NPU are Intel's")
    if target.runtime == "openvino":
        ledger.says("target.runtime")
    if view.recipe.runtime.batch > 1:
        ledger.lacks("runtime.batch", "as many at a time as the script is given prompts: one")
    return {
        "models_path": view.target,
        "device": "CPU",
        "draft_model": None,
        "draft_device": "CPU",
        "prompt_lookup": False,
        "properties": properties,
        "draft_method": None,
    }


def _sampling(view: RecipeView, ledger: Ledger) -> dict[str, Any]:
    """Sampling; temperature 0 and sampling exclude each other there."""
    sampling = view.sampling
    config: dict[str, Any] = {"max_new_tokens": sampling.max_new_tokens, "do_sample": not view.greedy}
    if not view.greedy:
        config |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "min_p": sampling.min_p}
        if sampling.top_k:
            config["top_k"] = sampling.top_k
    config |= {name: getattr(sampling, name) for name in _PENALTIES if f"sampling.{name}" in view.said}
    if sampling.seed is not None:
        config["rng_seed"] = sampling.seed
    if sampling.min_new_tokens:
        config["min_new_tokens"] = sampling.min_new_tokens
    if sampling.ignore_eos:
        config["ignore_eos"] = True
    if sampling.stop_strings:
        config["stop_strings"] = list(sampling.stop_strings)
    if sampling.stop_ids:
        config["stop_token_ids"] = list(sampling.stop_ids)
    if sampling.logprobs:
        config["logprobs"] = 1
    said = ("temperature", "top_p", "top_k", "min_p", "seed", "max_new_tokens", "min_new_tokens", "ignore_eos")
    ledger.says(*(f"sampling.{name}" for name in (*said, *_PENALTIES, "stop_strings", "stop_ids", "logprobs")))
    return config


def _draft(view: RecipeView, draft: DraftView, settings: dict[str, Any], ledger: Ledger) -> dict[str, Any]:
    """What the GenerationConfig says about drafts; which model drafts goes into the settings of the pipeline."""
    length = length_at_batch(view, draft)
    if length == 0:
        ledger.says("draft", "verify", "length")
        return {}
    _verify(view, ledger)
    if draft.family in _HISTORY:
        return _look_up(view, draft, length, settings, ledger)
    settings["draft_model"] = draft.place
    settings["draft_method"] = draft.family
    if (device := draft.options.get("device")) is not None:
        ledger.lacks(draft.key("device"), "CPU", device)
    if not draft.is_chain:
        return _tree(view, draft, length, ledger)
    policy, options = view.policy, view.recipe.length.options
    if policy in ("threshold", "confidence"):
        bar = options["start" if policy == "threshold" else "threshold"]
        if bar > 0.0:
            ledger.lacks("length", f"a draft ends below {bar:g}, which never moves, and nothing else ends it", policy)
            ledger.lacks(draft.key("k"), "a threshold and a number of tokens exclude each other", draft.k)
            return {"assistant_confidence_threshold": bar}
    if policy == "fixed":
        ledger.says("length")
    return {"num_assistant_tokens": length}


def _look_up(
    view: RecipeView, draft: DraftView, length: int, settings: dict[str, Any], ledger: Ledger
) -> dict[str, Any]:
    shortest, longest = draft.match
    settings["prompt_lookup"] = True
    ledger.says(draft.key("max_match"), draft.key("index"), draft.key("min_match"))
    if shortest > 1:
        ledger.lacks(draft.key("min_match"), "a match of one token drafts", shortest)
    if view.policy == "fixed":
        ledger.says("length")
    return {"num_assistant_tokens": length, "max_ngram_size": longest}


def _tree(view: RecipeView, draft: DraftView, length: int, ledger: Ledger) -> dict[str, Any]:
    """EAGLE-3 grows a tree level by level; it samples along chains only."""
    ledger.says(*(draft.key(name) for name in OF_TREES))
    if view.policy == "fixed":
        ledger.says("length")
    if draft.shape != "beam" or not view.greedy or draft.family != "eagle3":
        why = "trees go with greedy decoding" if draft.shape == "beam" else "trees are grown level by level"
        ledger.lacks(draft.key("shape"), f"a chain of {length}: {why}", draft.shape)
        return {"num_assistant_tokens": length}
    branch = int(draft.options["branch"])
    nodes = max(length, min(draft.nodes, most_candidates(branch, length)))
    if nodes != draft.nodes:
        ledger.lacks(draft.key("nodes"), f"{nodes}: what a depth of {length} with {branch} branches holds", draft.nodes)
    ledger.says(draft.key("shape"))
    return {"num_assistant_tokens": nodes, "branching_factor": branch, "tree_depth": length}


def _verify(view: RecipeView, ledger: Ledger) -> None:
    if view.rule == "typical":
        ledger.lacks("verify", "the engine's own rule: text of the target alone", view.rule)
    elif view.greedy:
        ledger.says("verify")
    else:
        ledger.lacks("verify", "the engine's own rule: that sampling keeps its law there was not checked", view.rule)

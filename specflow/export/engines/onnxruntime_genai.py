"""onnxruntime-genai: an overlay of `genai_config.json`, and a script that runs it. No torch.

Tried with 0.18.0. Drafts have 1 to 16 tokens. An n-gram search of size N looks for the last N - 1 tokens, neither more
nor fewer.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from specflow.export.declared_batch import lacks_schedule, length_at_batch
from specflow.export.draft_choice import OF_TREES, choose_draft, notes_on
from specflow.export.engines.base import Dialect, Exported, Given, Imported
from specflow.export.engines.onnxruntime_genai_read import LARGEST_SEED, MOST, read_onnxruntime_genai
from specflow.export.recipe_view import Ledger

if TYPE_CHECKING:
    from specflow.export.recipe_view import DraftView, RecipeView

__all__ = ["ENGINE", "ONNXRuntimeGenAI"]

_HISTORY = ("ngram", "suffix")
_FAMILIES = {"n-grams": (*_HISTORY, "small_model"), "draft models": ("small_model",)}
_LACKING = ("min_p", "presence_penalty", "frequency_penalty", "logit_bias", "stop_strings", "stop_ids", "ignore_eos")

_SCRIPT = '''"""Runs settings.json, which stands beside this script: python generate.py MODEL_FOLDER "PROMPT" """

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime_genai as og


def generate(settings, folder, prompt):
    """The text after a prompt, and what was drafted."""
    config = og.Config(folder)
    config.overlay(json.dumps(settings["overlay"]))
    model = og.Model(config)
    tokenizer = og.Tokenizer(model)
    if (Path(folder) / "chat_template.jinja").is_file():
        chat = json.dumps([{"role": "user", "content": prompt}])
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
    tokens = np.asarray(tokenizer.encode(prompt), np.int32)
    asked = og.GeneratorParams(model)
    least, most = settings["min_new_tokens"], settings["max_new_tokens"]
    asked.set_search_options(max_length=len(tokens) + most, min_length=len(tokens) + least if least else 0)
    generator = og.Generator(model, asked)
    generator.append_tokens(tokens)
    while not generator.is_done():
        generator.generate_next_token()
    return tokenizer.decode(generator.get_sequence(0)[len(tokens) :]), generator.get_speculative_stats()


if __name__ == "__main__":
    said = json.loads(Path(__file__).with_name("settings.json").read_text(encoding="utf-8"))
    print(generate(said, sys.argv[1], " ".join(sys.argv[2:]) or sys.stdin.read())[0])
'''


class ONNXRuntimeGenAI:
    """A generator with a draft model beside the target, or with earlier text."""

    name = "onnxruntime_genai"
    dialects = (Dialect("0.18", "0.18.0", "n-grams"), Dialect("0.16", "0.17", "draft models"))

    def export(self, view: RecipeView, dialect: Dialect) -> Exported:
        """The overlay, and the script that runs it."""
        ledger, overlay = Ledger(view), dict[str, Any]()
        notes = _target(view, ledger)
        overlay["search"] = _search(view, ledger)
        draft = choose_draft(view, ledger, _FAMILIES[dialect.name], "onnxruntime-genai")
        notes += notes_on(view, draft)
        if draft is not None:
            overlay |= _draft(view, draft, notes, ledger)
        lacks_schedule(view, ledger)
        sampling = view.sampling
        settings = {
            "model": view.target,
            "draft_model": draft.place if draft is not None and draft.family == "small_model" else None,
            "max_new_tokens": sampling.max_new_tokens,
            "min_new_tokens": sampling.min_new_tokens,
            "overlay": overlay,
        }
        files = {"settings.json": json.dumps(settings, indent=2) + "\n", "generate.py": _SCRIPT}
        command = ("python", "generate.py", "MODEL_FOLDER")
        return Exported(self.name, dialect.versions, command, files, tuple(notes), ledger.gaps())

    def read(self, given: Given, dialect: Dialect) -> Imported:
        """Settings as written here, or a `genai_config.json`.

        Raises:
            RecipeError: It is neither.
        """
        return read_onnxruntime_genai(given, dialect)


ENGINE = ONNXRuntimeGenAI()


def _target(view: RecipeView, ledger: Ledger) -> list[str]:
    ledger.says("target.model")
    if "target.dtype" in view.said:
        ledger.lacks("target.dtype", "the type the folder was written in")
    if view.recipe.target.runtime == "onnx":
        ledger.says("target.runtime")
    if view.recipe.runtime.batch > 1:
        ledger.lacks("runtime.batch", "one request at a time: drafts go with batch 1 only")
    return [
        f"MODEL_FOLDER is {view.target} with genai_config.json, as its model builder or `specflow export onnx` writes"
    ]


def _search(view: RecipeView, ledger: Ledger) -> dict[str, Any]:
    """Sampling. Its own top-k of 50 is written over."""
    sampling = view.sampling
    search: dict[str, Any] = {"do_sample": not view.greedy, "num_beams": 1, "num_return_sequences": 1}
    if not view.greedy:
        search |= {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
    search["repetition_penalty"] = sampling.repetition_penalty
    said = ["temperature", "top_k", "top_p", "repetition_penalty", "max_new_tokens", "min_new_tokens"]
    if sampling.seed is not None and sampling.seed <= LARGEST_SEED:
        search["random_seed"] = sampling.seed
        said.append("seed")
    ledger.says(*(f"sampling.{name}" for name in said))
    for name in _LACKING:
        if f"sampling.{name}" in view.said:
            ledger.lacks(f"sampling.{name}", "left out: the engine has no such option")
    return search


def _draft(view: RecipeView, draft: DraftView, notes: list[str], ledger: Ledger) -> dict[str, Any]:
    length = length_at_batch(view, draft)
    if length == 0:
        ledger.says("draft", "verify", "length")
        return {}
    options: dict[str, Any] = {"max_draft_tokens": min(length, MOST), "min_adaptive_k": 0, "cooldown": False}
    if length > MOST:
        ledger.lacks(draft.key("k"), f"{MOST}, the most there is", draft.k)
    if draft.family in _HISTORY:
        options |= _look_up(draft, ledger)
    else:
        notes.append("`specflow export onnx` of this recipe writes such a folder with the draft model in it, as genai")
        if not draft.is_chain:
            ledger.lacks(draft.key("shape"), f"a chain of {options['max_draft_tokens']}", draft.shape)
            ledger.says(*(draft.key(name) for name in OF_TREES))
        for name in ("dtype", "device"):
            if draft.key(name) in view.said:
                ledger.lacks(draft.key(name), "as the target: both run on the same provider")
    if view.policy == "fixed":
        ledger.says("length")
    else:
        notes.append(
            "min_adaptive_k above 0 adapts the length to measured speed, up to 16 whatever max_draft_tokens says"
        )
    _verify(view, draft, ledger)
    return {"speculative": options}


def _look_up(draft: DraftView, ledger: Ledger) -> dict[str, Any]:
    """The shortest match a recipe drafts from is the one length the engine looks for."""
    shortest, longest = draft.match
    size = min(shortest + 1, MOST)
    ledger.says(draft.key("min_match"), draft.key("max_match"), draft.key("index"))
    if size < shortest + 1:
        ledger.lacks(draft.key("min_match"), f"{size - 1}, the most there is", shortest)
    if longest > shortest:
        ledger.lacks(draft.key("max_match"), f"matches of {size - 1} tokens; a longer one is not preferred", longest)
    if draft.family == "suffix":
        ledger.lacks(draft.key("method"), "n-grams of one length", draft.family)
    return {"ngram_size": size, "ngram_chained_lookup": False}


def _verify(view: RecipeView, draft: DraftView, ledger: Ledger) -> None:
    rule = "match" if draft.family in _HISTORY else "rejection"
    if view.rule == "typical":
        ledger.lacks("verify", f"{rule}, which keeps the law of the text", view.rule)
    elif view.greedy or view.rule == rule == "rejection":
        ledger.says("verify")
    else:
        ledger.lacks("verify", f"{rule}: the same law, from other random numbers", view.rule)

"""Exported scripts run: transformers' `generate` on the embedded model, with earlier text and with an assistant."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from specflow.export.engines.base import choose_dialect, find_engine
from specflow.export.recipe_view import view_of
from specflow.recipe import load_recipe
from specflow.target.load import resolve_model

FOLDER = resolve_model("smollm2-135m").directory
QUESTION = "Repeat three times: the quick brown fox jumps."
NUM_TOKENS = 16
K = 3


def script(name: str, *overrides: str) -> ModuleType:
    """The exported script of a recipe, as a module."""
    said = [f"target.model={FOLDER}", "target.device=cpu", f"sampling.max_new_tokens={NUM_TOKENS}", *overrides]
    engine = find_engine("transformers")
    exported = engine.export(view_of(load_recipe(name, said)), choose_dialect(engine, None))
    module = ModuleType("generated")
    exec(compile(exported.files["generate.py"], "generate.py", "exec"), module.__dict__)
    return module


@pytest.fixture(scope="module")
def plain() -> str:
    text: str = script("vanilla").generate(QUESTION)
    assert "quick brown fox" in text
    return text


@pytest.fixture(scope="module")
def assistant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model over the embedded model's tokens."""
    folder = tmp_path_factory.mktemp("assistant")
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=49_152, max_position_embeddings=512, **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def watched(module: ModuleType, count: Callable[[Any, Any], None]) -> None:
    """Have the script load models that tell what they do."""
    load = module.load

    def loaded() -> Any:
        tokenizer, model, drafter = load()
        count(model, drafter)
        return tokenizer, model, drafter

    module.load = loaded  # type: ignore[attr-defined]


def test_prompt_lookup_says_what_plain_decoding_says_in_fewer_passes(plain: str) -> None:
    module, passes = script("ngram", f"draft.k={K}", "draft.max_match=3", "length.policy=fixed"), [0]

    def count(model: Any, drafter: Any) -> None:
        assert drafter is None
        model.register_forward_hook(lambda *_: passes.__setitem__(0, passes[0] + 1))

    watched(module, count)
    assert module.generate(QUESTION) == plain
    assert 1 < passes[0] < NUM_TOKENS


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_an_assistant_drafts_k_tokens_a_round(plain: str, assistant: Path, temperature: float) -> None:
    """A random assistant is never sure: the threshold that is on by default would end its drafts after one token."""
    said = [f"draft.model={assistant}", f"draft.k={K}", "length.policy=fixed", f"sampling.temperature={temperature}"]
    module, drafted = script("small_model", *said), list[int]()

    def count(model: Any, drafter: Any) -> None:
        generate = drafter.generate

        def counted(**given: Any) -> Any:
            made = generate(**given)
            drafted.append(made.sequences.shape[1] - given["input_ids"].shape[1])
            return made

        drafter.generate = counted

    watched(module, count)
    text = module.generate(QUESTION)
    assert len(drafted) > 3
    assert set(drafted[:-2]) == {K}
    assert temperature or text == plain


def test_the_first_layers_draft(plain: str) -> None:
    module = script("early_exit", f"draft.k={K}", "draft.exit_layer=25", "length.policy=fixed")
    assert module.generate(QUESTION) == plain


def test_an_assistant_with_other_tokens_is_refused(assistant: Path, tmp_path: Path) -> None:
    other = shutil.copytree(assistant, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.__getitem__)[500:502]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    module = script("small_model", f"draft.model={other}", "length.policy=fixed")
    with pytest.raises(SystemExit, match="2 tokens have other ids"):
        module.generate(QUESTION)

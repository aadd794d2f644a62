"""onnxruntime-genai generates our greedy text from the directory we write for it, with and without a draft model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from families import VOCAB, make_model, make_native, make_tokens
from tiny import EOS, tiny_engine
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from specflow.engine import Engine, EngineParts
from specflow.export.genai import GenaiDraft, GenaiModel, GenaiText, write_genai
from specflow.length import Fixed
from specflow.onnx.graphs import Precision
from specflow.target.base import TargetOptions
from specflow.target.load import load_tokenizer, read_tensors, resolve_model
from specflow.target.transformer import NativeTarget
from specflow.types import Sampling
from specflow.verify import Match

Foreign = Callable[[str], ModuleType]

FLOAT32 = Precision("float32")
TEXT = GenaiText(resolve_model("smollm2-135m").directory, stop_ids=(EOS, 11))
QUESTIONS = (
    "What is a prime number?",
    "Write a Python function that reverses a list.",
    "How much is 12 plus 30? A naïve answer, please.",
)


def generate(model: Any, og: ModuleType, prompt: Sequence[int], most: int) -> tuple[list[int], dict[str, Any]]:
    """Their greedy tokens after a prompt, without the one that ended the text, and what they say of drafting."""
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=len(prompt) + most)
    generator = og.Generator(model, params)
    generator.append_tokens(np.array(prompt, np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    stats = generator.get_speculative_stats()
    return [int(token) for token in generator.get_sequence(0)][len(prompt) :], stats


def until_stop(tokens: Sequence[int]) -> list[int]:
    return list(takewhile(lambda token: token not in TEXT.stop_ids, tokens))


def genai_model(model: Any) -> GenaiModel:
    return GenaiModel("tiny", model.config, dict(model.state_dict()))


@pytest.mark.parametrize("family", ["llama3_rope", "qwen2", "qwen3", "mistral_window", "smollm3"])
def test_it_says_what_we_say(foreign: Foreign, tmp_path: Path, family: str) -> None:
    og, model = foreign("onnxruntime_genai"), make_model(family)
    prompts = [make_tokens(11, seed)[0].tolist() for seed in range(3)]
    engine = tiny_engine(target=make_native(model))
    ours = [until_stop(engine.generate([prompt], Sampling(max_new_tokens=40))[0].tokens) for prompt in prompts]
    assert max(map(len, ours)) > 10
    drafts = {
        "plain": None,
        "itself": GenaiDraft(genai_model(model), 3),
        "another": GenaiDraft(genai_model(make_model("llama3_rope", seed=3, vocab_size=VOCAB - 9)), 5),
    }
    for name, draft in drafts.items():
        write_genai(tmp_path / name, genai_model(model), TEXT, FLOAT32, draft)
        theirs = og.Model(str(tmp_path / name))
        for prompt, wanted in zip(prompts, ours, strict=True):
            found, stats = generate(theirs, og, prompt, 40)
            assert found == wanted, name
            assert (stats["rounds"] > 0) == (draft is not None)
            if name == "itself":
                assert stats["draft_tokens_accepted"] == stats["draft_tokens_evaluated"] > 0


def test_the_embedded_model_with_a_small_one(foreign: Foreign, tmp_path: Path) -> None:
    og, files = foreign("onnxruntime_genai"), resolve_model("smollm2-135m")
    config, codec = AutoConfig.from_pretrained(files.directory), load_tokenizer(files)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2}
    torch.manual_seed(0)
    small = LlamaForCausalLM(LlamaConfig(vocab_size=config.vocab_size, max_position_embeddings=512, **sizes))
    target = GenaiModel(files.name, config, read_tensors(files.directory))
    text = GenaiText(files.directory, codec.stop_ids)
    write_genai(tmp_path, target, text, FLOAT32, GenaiDraft(genai_model(small), 4))
    options = TargetOptions(files.name, torch.float32, torch.device("cpu"), codec.stop_ids)
    engine = Engine(EngineParts(NativeTarget(config, target.tensors, options), codec, Match(), Fixed(0), None))
    theirs = og.Model(str(tmp_path))
    tokenizer = og.Tokenizer(theirs)
    for question in QUESTIONS:
        prompt = codec.encode_chat([{"role": "user", "content": question}])
        ours = engine.generate([prompt], Sampling(max_new_tokens=24))[0]
        found, stats = generate(theirs, og, prompt, 24)
        assert found == [token for token in ours.tokens if token not in codec.stop_ids]
        assert tokenizer.decode(np.array(found, np.int32)) == ours.text
        assert tokenizer.encode(question).tolist() == codec.encode(question)
        assert stats["draft_tokens_proposed"] > 0

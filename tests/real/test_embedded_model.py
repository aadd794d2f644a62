"""The embedded model as it is fetched: hash, tokenizer, chat template, and a plain transformers run."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specflow.target.load import load_tokenizer, read_tensors, resolve_model
from specflow.target.store import CATALOGUE, ModelFiles, ModelStore
from specflow.text import TextCodec

NAME = "smollm2-135m"


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return resolve_model(NAME)


@pytest.fixture(scope="module")
def codec(files: ModelFiles) -> TextCodec:
    return load_tokenizer(files)


def test_every_hash_of_the_cached_model_is_right(files: ModelFiles) -> None:
    store = ModelStore()
    assert store.verify(NAME) == []
    stored = next(model for model in store.cached() if model.name == NAME)
    assert CATALOGUE[NAME].sha256 in stored.source
    assert stored.hash == files.hash


def test_digits_are_split_one_by_one(codec: TextCodec) -> None:
    ids = codec.encode("It is 2024, pi is 3.14")
    pieces = [codec.decode([token]) for token in ids]
    assert "".join(pieces) == "It is 2024, pi is 3.14"
    assert [piece for piece in pieces if piece.isdigit()] == list("2024314")


def test_text_survives_a_round_trip(codec: TextCodec) -> None:
    text = "def f(x):\n    return x + 1  # naïve café 🙂 日本\n\n\tend"
    assert codec.decode(codec.encode(text)) == text


def test_the_chat_template_frames_a_conversation(codec: TextCodec) -> None:
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    ids = codec.encode_chat([{"role": "user", "content": "Hello"}])
    assert codec.render_chat([{"role": "user", "content": "Hello"}]) == (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 3, 2)


def test_stop_id_and_vocabulary(codec: TextCodec) -> None:
    assert codec.stop_ids == (2,)
    assert codec.vocab_size == 49152


def test_tensors_are_float32_and_tied(files: ModelFiles) -> None:
    tensors = read_tensors(files.directory)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert tensors["model.embed_tokens.weight"].shape == (49152, 576)
    assert "lm_head.weight" not in tensors
    assert len(tensors) == 272


def test_plain_transformers_loads_it_and_it_knows_france(files: ModelFiles, codec: TextCodec) -> None:
    model = AutoModelForCausalLM.from_pretrained(files.directory)
    tokenizer = AutoTokenizer.from_pretrained(files.directory)
    assert (model.dtype, tokenizer.model_max_length, tokenizer.eos_token_id) == (torch.float32, 8192, 2)
    prompt = "The capital of France is"
    encoded = tokenizer(prompt, return_tensors="pt")
    assert encoded.input_ids[0].tolist() == codec.encode(prompt)
    with torch.no_grad():
        out = model.generate(**encoded, max_new_tokens=2, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0])

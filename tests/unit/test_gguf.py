"""Conversion of GGUF files: the tensors, config and tokenizer that come out, and what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize
from made_gguf import TOKENS, sentencepiece, tiny_config, tiny_model, vocabulary, write_gguf

from specflow.errors import CheckpointError
from specflow.target import gguf as gguf_module
from specflow.target.gguf import convert_gguf
from specflow.target.gguf_tokenizer import build_tokenizer
from specflow.target.load import read_tensors


def convert(tmp_path: Path, model: Any, **options: Any) -> Path:
    out = tmp_path / "converted"
    out.mkdir()
    convert_gguf(write_gguf(tmp_path / "made.gguf", model, **options), out)
    return out


@pytest.mark.parametrize(
    ("family", "changes", "fields"),
    [
        ("llama", {}, {}),
        ("llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}, {}),
        ("mistral", {"sliding_window": 8}, {"attention.sliding_window": 8}),
        ("qwen2", {}, {}),
        ("qwen3", {}, {}),
    ],
)
def test_converted_model_gives_the_same_logits_in_plain_transformers(
    tmp_path: Path, family: str, changes: dict[str, Any], fields: dict[str, Any]
) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny_model(tiny_config(family, **changes))
    out = convert(tmp_path, model, fields=fields)
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype="auto").eval()
    ids = torch.arange(3, 33)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert loaded.config.model_type == family
    assert loaded.config.rms_norm_eps == 1e-5
    assert loaded.dtype == torch.float32
    assert loaded.generation_config.eos_token_id == 2


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_quantised_weights_become_exactly_their_float32_values(tmp_path: Path, kind: str) -> None:
    model = tiny_model(tiny_config("qwen2", intermediate_size=128))
    tensors = read_tensors(convert(tmp_path, model, kind=kind))
    name = "model.layers.1.mlp.up_proj.weight"
    quantisation = GGMLQuantizationType[kind]
    expected = dequantize(quantize(model.state_dict()[name].numpy(), quantisation), quantisation)
    assert tensors[name].dtype == torch.float32
    assert np.array_equal(tensors[name].numpy(), expected)


@pytest.mark.parametrize(("kind", "dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_half_precision_weights_keep_their_type(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    model = tiny_model(tiny_config("llama"))
    out = convert(tmp_path, model, kind=kind)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(read_tensors(out)[name], model.state_dict()[name].to(dtype))
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == str(dtype).removeprefix("torch.")


def test_large_models_are_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_module, "_SHARD_BYTES", 20_000)
    model = tiny_model(tiny_config("qwen3"))
    out = convert(tmp_path, model)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    tensors = read_tensors(out)
    state = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    assert tensors.keys() == state.keys()
    assert all(torch.equal(tensors[name], value) for name, value in state.items())


def test_llama3_rope_divisors_become_rope_scaling(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = tiny_config("llama", rope_parameters={**scaling, "rope_theta": 500000.0})
    model = tiny_model(config)
    plain = 1.0 / 500000.0 ** (torch.arange(0, 16, 2).double() / 16)
    divisors = plain / model.model.rotary_emb.inv_freq.double()
    out = convert(tmp_path, model, extra={"rope_freqs.weight": divisors.numpy()})
    written = json.loads((out / "config.json").read_text())["rope_scaling"]
    assert written.pop("factor") == pytest.approx(scaling.pop("factor"), rel=1e-4)
    assert written == scaling


def test_unknown_rope_divisors_are_refused(tmp_path: Path) -> None:
    model = tiny_model(tiny_config("llama"))
    with pytest.raises(CheckpointError, match="follows no known formula"):
        convert(tmp_path, model, extra={"rope_freqs.weight": np.linspace(1, 3, 8)})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"architecture": "mamba"}, "architecture 'mamba'"),
        ({"expert_count": 8}, "mixture of experts"),
        ({"rope.dimension_count": 8}, "a part of each head"),
        ({"rope.scaling.type": "longrope"}, "rope scaling 'longrope'"),
        ({"pre": "unheard-of"}, "pre-tokenizer 'unheard-of'"),
        ({"embedding_length": None}, "embedding_length"),
        ({"block_count": 3}, "missing tensors"),
        ({"block_count": 1}, "unexpected tensors"),
    ],
)
def test_what_cannot_be_converted_is_refused_with_its_reason(
    tmp_path: Path, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(CheckpointError, match=reason):
        convert(tmp_path, tiny_model(tiny_config("llama")), fields=fields)


def test_unknown_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"blk\.0\.ssm_in"):
        convert(tmp_path, tiny_model(tiny_config("llama")), extra={"blk.0.ssm_in.weight": np.ones(4)})


@pytest.mark.parametrize("keep", [0, 3, 60, 0.5, 0.99])
def test_truncated_files_are_named(tmp_path: Path, keep: float) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", tiny_model(tiny_config("llama"))).read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: int(keep * len(whole)) if 0 < keep < 1 else int(keep)])
    with pytest.raises(CheckpointError, match=r"cut\.gguf.*not a complete GGUF file"):
        convert_gguf(cut, tmp_path)


def test_digits_are_split_one_by_one() -> None:
    assert build_tokenizer(vocabulary()).encode("a12").tokens == ["a", "1", "2"]
    assert build_tokenizer(vocabulary(pre="gpt-2")).encode("a12").tokens == ["a", "12"]


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2", "tekken"])
def test_byte_level_text_survives_a_round_trip(pre: str) -> None:
    tokenizer = build_tokenizer(vocabulary(pre=pre))
    text = "hello world,\n\n  it's 1234 €é🙂\t<end>"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize("space_prefix", [True, False])
def test_sentencepiece_merges_follow_the_scores(space_prefix: bool) -> None:
    tokenizer = build_tokenizer(sentencepiece(space_prefix))
    encoded = tokenizer.encode("hello h€")
    head = ["▁h", "e", "llo"] if space_prefix else ["he", "llo"]
    assert encoded.tokens == ["<s>", *head, "▁h", "<0xE2>", "<0x82>", "<0xAC>"]
    assert tokenizer.decode(encoded.ids) == "hello h€"


def test_beginning_token_is_added_only_where_the_file_says_so() -> None:
    assert build_tokenizer(vocabulary(add_bos=True)).encode("he").ids[0] == 1
    assert build_tokenizer(vocabulary()).encode("he").ids == [TOKENS.index("he")]


def test_duplicate_tokens_are_refused() -> None:
    with pytest.raises(CheckpointError, match="distinct tokens"):
        build_tokenizer(vocabulary(tokens=(*TOKENS[:-1], TOKENS[5])))


def test_merges_of_unknown_tokens_are_refused() -> None:
    with pytest.raises(CheckpointError, match="merge 'w x'"):
        build_tokenizer(vocabulary(merges=("w x",)))


def test_damaged_files_never_end_in_a_traceback(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", tiny_model(tiny_config("llama"))).read_bytes()
    chosen = random.Random(5)
    refused = 0
    for number in range(60):
        damaged = bytearray(whole)
        for _ in range(chosen.randint(1, 6)):
            damaged[chosen.randrange(6000)] = chosen.randrange(256)
        path, out = tmp_path / "damaged.gguf", tmp_path / str(number)
        path.write_bytes(damaged)
        out.mkdir()
        try:
            convert_gguf(path, out)
        except CheckpointError:
            refused += 1
    assert refused > 5

"""The directory for onnxruntime-genai: its graphs give torch's logits as its runtime feeds them, its config names them.

That its runtime generates our text with it is tested in tests/parity.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from families import VOCAB, make_model, make_tokens
from onnxruntime import InferenceSession, OrtValue
from torch import Tensor

from specflow.errors import CheckpointError, ModelError
from specflow.export.genai import GenaiDraft, GenaiModel, GenaiText, write_genai
from specflow.onnx.graphs import Precision

FLOAT32 = Precision("float32")
FAMILIES = ("llama_biases_tied", "llama_yarn", "mistral_window", "qwen2_mixed", "qwen3", "smollm3")


def genai_model(family: str, **changes: Any) -> tuple[GenaiModel, Any]:
    model = make_model(family, **changes)
    return GenaiModel(family, model.config, dict(model.state_dict())), model


@pytest.fixture
def text(tmp_path: Path) -> GenaiText:
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors").write_text("not for copying")
    return GenaiText(directory, (2, 5))


def expected(model: Any, tokens: Tensor) -> np.ndarray:
    with torch.no_grad():
        logits: np.ndarray = model(tokens).logits.numpy()
    return logits


class Runtime:
    """Feeds a graph as onnxruntime-genai does: a mask over past and new tokens, a cache handed from pass to pass."""

    def __init__(self, path: Path, config: Any, dtype: Any = np.float32) -> None:
        self.session = InferenceSession(str(path), providers=["CPUExecutionProvider"])
        self.dtype, self.shape = dtype, (config.num_key_value_heads, 0, config.head_dim)
        self.names = [value.name for value in self.session.get_outputs()]
        self.layers = config.num_hidden_layers
        self.cache: dict[str, np.ndarray] = {}

    def run(self, tokens: Tensor, mask: np.ndarray) -> np.ndarray:
        """Logits.  # [B, R, V]"""
        if not self.cache:
            empty = np.zeros((tokens.shape[0], *self.shape), self.dtype)
            self.cache = {f"past_key_values.{i}.{kind}": empty for i in range(self.layers) for kind in ("key", "value")}
        feeds = {"input_ids": tokens.numpy(), "attention_mask": mask.astype(np.int64), **self.cache}
        found = dict(zip(self.names, self.session.run(None, feeds), strict=True))
        self.cache = {name: found[name.replace("past_key_values", "present")] for name in self.cache}
        return found["logits"]


def gap(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).max() / np.abs(other).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_passes_over_a_growing_cache_give_torch_logits(family: str, tmp_path: Path, text: GenaiText) -> None:
    source, model = genai_model(family, head_dim=16)
    write_genai(tmp_path, source, text, FLOAT32)
    tokens = make_tokens(28)
    wanted, runtime, begin = expected(model, tokens), Runtime(tmp_path / "model.onnx", model.config), 0
    for rows in (13, 1, 5, 1, 8):
        end = begin + rows
        found = runtime.run(tokens[:, begin:end], np.ones((1, end)))
        assert gap(found, wanted[:, begin:end]) < 1e-5, f"tokens {begin} to {end}"
        begin = end


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_prompts_of_different_lengths_in_one_batch(family: str, tmp_path: Path, text: GenaiText) -> None:
    source, model = genai_model(family, head_dim=16)
    write_genai(tmp_path, source, text, FLOAT32)
    runtime = Runtime(tmp_path / "model.onnx", model.config)
    tokens, lengths = torch.cat((make_tokens(9, 1), make_tokens(9, 2))), (8, 5)
    mask = np.arange(8) < np.array(lengths)[:, None]
    found = runtime.run(tokens[:, :8], mask)
    step = runtime.run(tokens[:, 8:], np.arange(9) < np.array(lengths)[:, None] + 1)
    for row, length in enumerate(lengths):
        read = torch.cat((tokens[row, :length], tokens[row, 8:])).unsqueeze(0)
        wanted = expected(model, read)
        assert gap(found[row : row + 1, :length], wanted[:, :-1]) < 1e-5
        assert gap(step[row : row + 1], wanted[:, -1:]) < 1e-5


def test_past_and_present_may_share_a_buffer_that_is_rewound(tmp_path: Path, text: GenaiText) -> None:
    source, model = genai_model("qwen3")
    write_genai(tmp_path, source, text, FLOAT32)
    session = InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    names = [f"{layer}.{kind}" for layer in range(3) for kind in ("key", "value")]
    rooms = {name: OrtValue.ortvalue_from_numpy(np.zeros((1, 2, 32, 16), np.float32)) for name in names}

    def run(tokens: Tensor, end: int) -> np.ndarray:
        binding = session.io_binding()
        binding.bind_cpu_input("input_ids", tokens.numpy())
        binding.bind_cpu_input("attention_mask", np.ones((1, end), np.int64))
        binding.bind_output("logits")
        for name, room in rooms.items():
            binding.bind_ortvalue_input(f"past_key_values.{name}", room)
            binding.bind_ortvalue_output(f"present.{name}", room)
        session.run_with_iobinding(binding)
        logits: np.ndarray = binding.get_outputs()[0].numpy()
        return logits

    tokens = make_tokens(20)
    wanted = expected(model, tokens)
    assert gap(run(tokens[:, :12], 12), wanted[:, :12]) < 1e-5
    run(make_tokens(5, seed=9), 17)  # drafts, all of them rejected
    assert gap(run(tokens[:, 12:15], 15), wanted[:, 12:15]) < 1e-5
    assert gap(run(tokens[:, 15:], 20), wanted[:, 15:]) < 1e-5


@pytest.mark.parametrize(("name", "most"), [("float16", 0.01), ("int8", 0.1), ("int4", 0.4)])
def test_other_precisions_stay_near(name: str, most: float, tmp_path: Path, text: GenaiText) -> None:
    source, model = genai_model("qwen3")
    write_genai(tmp_path / "float32", source, text, FLOAT32)
    write_genai(tmp_path / name, source, text, Precision.named(name))
    runtime = Runtime(tmp_path / name / "model.onnx", model.config, np.float16 if name == "float16" else np.float32)
    tokens = make_tokens(20)
    found = runtime.run(tokens, np.ones((1, 20))).astype(np.float32)
    assert 1e-6 < gap(found, expected(model, tokens)) < most
    whole, small = ((tmp_path / folder / "weights.bin").stat().st_size for folder in ("float32", name))
    assert small < whole


def test_the_config_names_what_the_graphs_have(tmp_path: Path, text: GenaiText) -> None:
    target, _ = genai_model("qwen3")
    draft, _ = genai_model("llama_wide_heads", num_hidden_layers=1, max_position_embeddings=128)
    write_genai(tmp_path, target, text, FLOAT32, GenaiDraft(draft, 6))
    config = json.loads((tmp_path / "genai_config.json").read_text())
    model, search = config["model"], config["search"]
    assert (model["type"], model["vocab_size"], model["context_length"]) == ("speculative", VOCAB, 128)
    assert config["speculative"] == {"max_draft_tokens": 6}
    assert (search["do_sample"], search["num_beams"], search["max_length"]) == (False, 1, 128)
    assert search["past_present_share_buffer"] is True
    assert model["eos_token_id"] == [2, 5]
    check_decoder(tmp_path, model["decoder"], layers=3, head_size=16)
    check_decoder(tmp_path, model["draft"], layers=1, head_size=32)
    files = {"genai_config.json", "model.onnx", "draft.onnx", "weights.bin", "tokenizer.json"}
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == files


def check_decoder(folder: Path, decoder: Mapping[str, Any], layers: int, head_size: int) -> None:
    path = folder / decoder["filename"]
    onnx.checker.check_model(str(path), full_check=True)
    graph = onnx.shape_inference.infer_shapes(onnx.load(path, load_external_data=False), strict_mode=True).graph
    for side, values in (("inputs", graph.input), ("outputs", graph.output)):
        named = {name % layer if "%d" in name else name for name in decoder[side].values() for layer in range(layers)}
        assert named == {value.name for value in values}
    shapes = {value.name: value.type.tensor_type.shape.dim for value in graph.input}
    cache = shapes["past_key_values.0.key"]
    assert (decoder["num_hidden_layers"], decoder["head_size"]) == (layers, head_size)
    assert (cache[1].dim_value, cache[3].dim_value) == (decoder["num_key_value_heads"], head_size)
    assert (decoder["num_attention_heads"], decoder["hidden_size"]) == (4, 64)


def test_without_a_draft_model_it_is_a_plain_one(tmp_path: Path, text: GenaiText) -> None:
    target, _ = genai_model("qwen2", pad_token_id=None)
    write_genai(tmp_path, target, GenaiText(text.directory, (7,)), FLOAT32)
    config = json.loads((tmp_path / "genai_config.json").read_text())
    assert config["model"]["type"] == "qwen2"
    assert (config["model"]["eos_token_id"], config["model"]["pad_token_id"]) == (7, 7)
    assert not {"draft", "speculative"} & {*config, *config["model"]}
    assert not (tmp_path / "draft.onnx").exists()


@pytest.mark.parametrize("size", [VOCAB - 11, VOCAB + 11])
def test_a_draft_with_another_vocabulary_scores_the_targets(size: int, tmp_path: Path, text: GenaiText) -> None:
    target, _ = genai_model("qwen2")
    draft, model = genai_model("qwen3", vocab_size=size)
    write_genai(tmp_path, target, text, FLOAT32, GenaiDraft(draft))
    tokens = torch.tensor([[3, VOCAB - 1, 4, 0, 9]])
    found = Runtime(tmp_path / "draft.onnx", model.config).run(tokens, np.ones((1, 5)))
    wanted = expected(model, tokens.where(tokens < size, 0))[..., :VOCAB]
    assert found.shape == (1, 5, VOCAB)
    assert gap(found[..., : wanted.shape[2]], wanted) < 1e-5
    assert (found[..., wanted.shape[2] :] < -1e30).all()


def test_the_same_weights_give_the_same_bytes(tmp_path: Path, text: GenaiText) -> None:
    target, _ = genai_model("qwen3")
    for name in ("one", "other"):
        write_genai(tmp_path / name, target, text, FLOAT32, GenaiDraft(target))
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "other" / path.name).read_bytes(), path.name


def test_what_its_runtime_cannot_run_is_refused(tmp_path: Path, text: GenaiText) -> None:
    target, _ = genai_model("qwen3")
    narrow, _ = genai_model("qwen3", head_dim=24)
    folder = tmp_path / "out"
    with pytest.raises(ModelError, match="bfloat16 for onnxruntime-genai"):
        write_genai(folder, target, text, Precision("bfloat16", "bfloat16"))
    for most in (0, 17):
        with pytest.raises(ModelError, match=f"{most} draft tokens a round"):
            write_genai(folder, target, text, FLOAT32, GenaiDraft(target, most))
    with pytest.raises(ModelError, match="heads of width 24"):
        write_genai(folder, target, text, FLOAT32, GenaiDraft(narrow))
    with pytest.raises(ModelError, match="no tokenizer to copy"):
        write_genai(folder, target, GenaiText(tmp_path, (2,)), FLOAT32)
    assert not folder.exists()
    torn = GenaiModel("torn", target.config, {k: v for k, v in target.tensors.items() if "layers.1.mlp" not in k})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp"):
        write_genai(folder, torn, text, FLOAT32)

"""openvino-genai and onnxruntime-genai take what is exported for them, and generate with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from engine_trips import export, read
from transformers import LlamaConfig, LlamaForCausalLM

from specflow.export.engines.base import Exported
from specflow.export.engines.onnxruntime_genai_read import OPTIONS
from specflow.export.engines.openvino_genai_read import FIELDS
from specflow.export.genai import GenaiDraft, GenaiModel, GenaiText, write_genai
from specflow.onnx.graphs import Precision
from specflow.recipe import shipped_recipes
from specflow.target.load import load_tokenizer, resolve_model

Foreign = Callable[[str], ModuleType]

FILES = resolve_model("smollm2-135m")
QUESTION = "What is a prime number?"
SAMPLED = ("sampling.temperature=0.5", "sampling.seed=3", "sampling.stop_ids=[5]", "sampling.stop_strings=['.']")
TREE = ("draft.shape=beam", "draft.nodes=20", "draft.branch=4", "verify.rule=match", "length.policy=fixed")


def script(exported: Exported) -> ModuleType:
    module = ModuleType("generated")
    exec(compile(exported.files["generate.py"], "generate.py", "exec"), module.__dict__)
    return module


def settings(exported: Exported) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(exported.files["settings.json"])
    return found


def test_openvino_genai_takes_every_configuration(foreign: Foreign) -> None:
    engine = foreign("openvino_genai")
    assert [name for name in FIELDS if not hasattr(engine.GenerationConfig(), name)] == []
    exports = [export("openvino_genai", name) for name in shipped_recipes()]
    exports += [export("openvino_genai", name, *SAMPLED) for name in ("ngram", "small_model", "vanilla")]
    exports += [export("openvino_genai", "small_model", f"length.policy={policy}") for policy in ("threshold", "fixed")]
    exports.append(export("openvino_genai", "eagle3", *TREE))
    for exported in exports:
        said = settings(exported)
        config = script(exported).configuration(said)  # validates
        for name, value in said["generation_config"].items():
            found = getattr(config, name)
            assert found == (set(value) if isinstance(value, list) else pytest.approx(value)), name
        assert config.is_prompt_lookup() == said["prompt_lookup"]


@pytest.mark.parametrize(
    "config",
    [
        {"num_assistant_tokens": 5, "assistant_confidence_threshold": 0.5},
        {"max_ngram_size": 3},
        {"num_assistant_tokens": 3, "branching_factor": 2, "tree_depth": 5},
        {"num_assistant_tokens": 8, "branching_factor": 2, "tree_depth": 5, "do_sample": True, "temperature": 0.5},
        {"do_sample": True, "temperature": 0.0},
    ],
)
def test_what_openvino_genai_refuses_is_an_error_here(foreign: Foreign, config: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError):
        foreign("openvino_genai").GenerationConfig(max_new_tokens=4, **config).validate()
    found = read("openvino_genai", json.dumps(config)).findings
    assert "error" in [finding.severity for finding in found]


def tiny(seed: int, layers: int) -> GenaiModel:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": layers}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=49_152, max_position_embeddings=512, **sizes))
    return GenaiModel("tiny", model.config, dict(model.state_dict()))


def test_onnxruntime_genai_generates_the_same_with_drafts(foreign: Foreign, tmp_path: Path) -> None:
    foreign("onnxruntime_genai")
    text = GenaiText(FILES.directory, load_tokenizer(FILES).stop_ids)
    write_genai(tmp_path / "plain", tiny(0, 2), text, Precision("float32"))
    write_genai(tmp_path / "draft", tiny(0, 2), text, Precision("float32"), GenaiDraft(tiny(1, 1), 4))
    length = "sampling.max_new_tokens=40"
    plain, ngram, small = (
        export("onnxruntime_genai", name, length, *more)
        for name, more in (("vanilla", ()), ("ngram", ("draft.k=5",)), ("small_model", ("draft.k=3",)))
    )
    wanted, none = script(plain).generate(settings(plain), str(tmp_path / "plain"), QUESTION)
    assert none["draft_tokens_proposed"] == 0
    for exported, folder in ((ngram, "plain"), (small, "draft")):
        found, stats = script(exported).generate(settings(exported), str(tmp_path / folder), QUESTION)
        assert found == wanted
        assert stats["draft_tokens_proposed"] > 0
    assert stats["effective_k"] == 3


@pytest.mark.parametrize("options", [{"ngram_size": 1}, {"max_draft_tokens": 17}, {"max_draft_token": 3}])
def test_what_onnxruntime_genai_refuses_is_an_error_here(
    foreign: Foreign, tmp_path: Path, options: dict[str, Any]
) -> None:
    engine = foreign("onnxruntime_genai")
    text = GenaiText(FILES.directory, load_tokenizer(FILES).stop_ids)
    write_genai(tmp_path, tiny(0, 1), text, Precision("float32"))
    config = engine.Config(str(tmp_path))
    config.overlay(json.dumps({"speculative": dict.fromkeys(OPTIONS[:2], 4)}))
    with pytest.raises(Exception, match="speculative"):
        config.overlay(json.dumps({"speculative": options}))
    given = json.dumps({"speculative": {"ngram_size": 3, **options}})
    assert "error" in [finding.severity for finding in read("onnxruntime_genai", given).findings]

"""What `speculators` saves is recognised, is whole, and holds what its models hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from random_weights import randomise
from safetensors.torch import load_file, save_file
from test_dflash_parity import BLOCK, MASK, qwen
from test_eagle3_parity import layer
from tiny import VOCAB
from transformers import LlamaConfig

from specflow.checkpoint.layout import read

Foreign = Callable[[str], ModuleType]

RANK = 6
IDS = torch.arange(2, VOCAB, 3)


def saved(model: Any, path: Path) -> None:
    """Weights as random numbers, written by their own code, and a map of the vocabulary where it has one."""
    randomise(model)
    model.save_pretrained(str(path))
    if (file := path / "model.safetensors").is_file() and "d2t" in (tensors := load_file(file)):
        tensors["d2t"] = IDS - torch.arange(len(IDS))
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, IDS, True)
        save_file(tensors, file)


def proposals(foreign: Foreign, kind: str, tokens: int) -> Any:
    config, greedy = foreign("speculators.config"), foreign("speculators.proposals.greedy")
    return config.SpeculatorsConfig(
        algorithm=kind,
        proposal_methods=[greedy.GreedyTokenProposalConfig(speculative_tokens=tokens)],
        default_proposal_method="greedy",
        verifier=config.VerifierConfig(name_or_path="org/target", architectures=["LlamaForCausalLM"]),
    )


@pytest.mark.parametrize("size", [VOCAB, len(IDS)], ids=["full", "reduced"])
def test_eagle3(foreign: Foreign, tmp_path: Path, size: int) -> None:
    package = foreign("speculators.models.eagle3")
    config = package.Eagle3SpeculatorConfig(
        transformer_layer_config=layer(LlamaConfig),
        draft_vocab_size=size,
        norm_before_fc=True,
        eagle_aux_hidden_state_layer_ids=[0, 1, 2],
        speculators_config=proposals(foreign, "eagle3", 3),
    )
    model = package.Eagle3DraftModel(config)
    saved(model, tmp_path)
    found = read(tmp_path)
    assert found.layout.name == "eagle3-speculators"
    assert found.options["taps"] == (-1, 0, 1)
    assert found.options.get("draft_vocab_size") == (None if size == VOCAB else size)
    assert (found.layout.target.name, found.layout.target.vocab_size) == ("org/target", VOCAB)
    assert torch.equal(found.tensors["midlayer.mlp.up_proj.weight"], model.layers[0].mlp.up_proj.weight)


@pytest.mark.parametrize("size", [VOCAB, len(IDS)], ids=["full", "reduced"])
def test_dflash(foreign: Foreign, tmp_path: Path, size: int) -> None:
    package = foreign("speculators.models.dflash")
    config = package.DFlashSpeculatorConfig(
        transformer_layer_config=qwen({"window": 4}),
        draft_vocab_size=size,
        block_size=BLOCK,
        aux_hidden_state_layer_ids=[0, 1],
        mask_token_id=MASK,
        sliding_window_non_causal=True,
        speculators_config=proposals(foreign, "dflash", BLOCK - 1),
    )
    model = package.DFlashDraftModel(config)
    saved(model, tmp_path)
    found = read(tmp_path)
    assert found.layout.name == "dflash-speculators"
    assert (found.options["taps"], found.options["layout"]) == ((-1, 0), "fill_in")
    assert (found.options["window"], found.options["window_from"], found.options["causal"]) == (4, "anchor", False)
    assert torch.equal(found.tensors["layers.1.self_attn.q_norm.weight"], model.layers[1].self_attn.q_norm.weight)


@pytest.mark.parametrize(("kind", "ours"), [("vanilla", "markov"), ("gated", "gated"), ("rnn", "rnn")])
def test_dspark(foreign: Foreign, tmp_path: Path, kind: str, ours: str) -> None:
    package = foreign("speculators.models.dspark")
    config = package.DSparkSpeculatorConfig(
        transformer_layer_config=qwen({}),
        draft_vocab_size=len(IDS),
        block_size=BLOCK,
        aux_hidden_state_layer_ids=[0, 1],
        mask_token_id=MASK,
        markov_rank=RANK,
        markov_head_type=kind,
        speculators_config=proposals(foreign, "dspark", BLOCK),
    )
    saved(package.DSparkDraftModel(config), tmp_path)
    found = read(tmp_path)
    assert found.layout.name == "dspark-speculators"
    assert (found.options["corrector"], found.options["layout"]) == (ours, "shifted")
    assert torch.equal(found.tensors["d2t"] + torch.arange(len(IDS)), IDS)


def test_mtp(foreign: Foreign, tmp_path: Path) -> None:
    package, configs = foreign("speculators.models.mtp.core"), foreign("speculators.models.mtp.config")
    from transformers import Qwen3Config

    config = configs.MTPSpeculatorConfig(
        transformer_layer_config=layer(Qwen3Config), speculators_config=proposals(foreign, "mtp", 3)
    )
    model = package.MTPDraftModel(config)
    saved(model, tmp_path)
    found = read(tmp_path)
    assert found.layout.name == "mtp-speculators"
    assert (found.options["unrolled"], found.options["offset_norms"]) == (3, False)
    assert torch.equal(found.tensors["mtp.fc.weight"], model.mtp_layers[0].input_proj.weight)

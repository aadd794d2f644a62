"""EAGLE-3 and MTP against `speculators`: logits of every step at every position, with the same random weights.

Theirs come from their training pass over a whole text, ours from drafting after each of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from dense_steps import FEATURES, INFO, TARGET, TEXT, WIDTH, Config, stage
from random_weights import randomise
from safetensors.torch import save_file
from tiny import VOCAB
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from specflow.draft.sources.eagle import EagleConfig
from specflow.draft.sources.mtp import MTPConfig

Foreign = Callable[[str], ModuleType]

LENGTH, DEPTH = 24, 3
REDUCED = torch.arange(2, VOCAB, 3)
"""Target ids of a reduced draft vocabulary."""


def layer(family: type[PretrainedConfig]) -> PretrainedConfig:
    """The target's block in their words."""
    shape = INFO.shape
    config = family(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=shape.mlp_size,
        num_hidden_layers=1,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_width,
        rms_norm_eps=shape.eps,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    config._attn_implementation = "eager"
    return config


def assert_drafts_like(config: Config, theirs: Tensor) -> None:
    """Draft after every position, as deep as their text goes, in rounds of one to three tokens.

    Args:
        config: Ours, with their weights.
        theirs: # [DEPTH, LENGTH, Vd], the token after position i + j read by step j
    """
    scene, compared = stage(config, [0]), 0
    for round_ in range(LENGTH):
        scene.commit([1 + round_ % 3])
        row = scene.lengths[0] - 1
        if row + DEPTH > LENGTH:
            break
        found = scene.draft(TEXT[:1, row + 2 : row + 1 + DEPTH])[0]
        torch.testing.assert_close(found, theirs[:, row].to(found.dtype), atol=1e-4, rtol=0)
        compared += 1
    assert compared > 8


@pytest.mark.parametrize("family", [LlamaConfig, Qwen3Config], ids=["llama", "qwen3"])
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"norm_before_residual": True, "norm_before_fc": True},
        {"fc_norm": True, "norm_output": True},
        {"draft_vocab_size": len(REDUCED)},
    ],
    ids=["eagle3", "normed", "eagle3.1", "reduced"],
)
def test_eagle3(foreign: Foreign, tmp_path: Path, family: type[PretrainedConfig], flags: dict[str, bool | int]) -> None:
    package = foreign("speculators.models.eagle3")
    options = {"norm_before_residual": False, "draft_vocab_size": VOCAB} | flags
    model = package.Eagle3DraftModel(
        package.Eagle3SpeculatorConfig(
            transformer_layer_config=layer(family), eagle_aux_hidden_state_layer_ids=[0, 1, 2], **options
        )
    )
    model = model.eval()
    randomise(model)
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("verifier")}
    if "draft_vocab_size" in flags:
        state["d2t"] = REDUCED - torch.arange(len(REDUCED))
    renamed = {name.replace("layers.0.", "midlayer."): tensor.contiguous() for name, tensor in state.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    seen: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda _, __, logits: seen.append(logits.detach()))
    with torch.no_grad():
        model(
            FEATURES[:1, :LENGTH].float(),
            TEXT[:1, 1 : LENGTH + 1],
            torch.zeros(1, LENGTH, dtype=torch.int64),
            ttt_steps=DEPTH,
        )
    config = EagleConfig(weights=str(tmp_path), taps=(-1, 0, 1), **flags)  # type: ignore[arg-type]
    assert_drafts_like(config, torch.cat(seen))


def test_mtp(foreign: Foreign, tmp_path: Path) -> None:
    package, config_module = foreign("speculators.models.mtp.core"), foreign("speculators.config")
    proposals = foreign("speculators.proposals.greedy")
    configs = foreign("speculators.models.mtp.config")
    model = package.MTPDraftModel(
        configs.MTPSpeculatorConfig(
            transformer_layer_config=layer(Qwen3Config),
            speculators_config=config_module.SpeculatorsConfig(
                algorithm="mtp",
                proposal_methods=[proposals.GreedyTokenProposalConfig(speculative_tokens=DEPTH)],
                default_proposal_method="greedy",
                verifier=config_module.VerifierConfig(name_or_path=None, architectures=[]),
            ),
        )
    ).eval()
    randomise(model)
    model.embed_tokens.weight.data = TARGET.embedding.float()
    model.lm_head.weight.data = TARGET.head.weight.data.float()
    names = {
        "input_proj.": "mtp.fc.",
        "hidden_layernorm.": "mtp.pre_fc_norm_hidden.",
        "token_layernorm.": "mtp.pre_fc_norm_embedding.",
        "final_layernorm.": "mtp.norm.",
    }
    state = {}
    for name, tensor in model.state_dict().items():
        if name.startswith("mtp_layers.0."):
            part = name.removeprefix("mtp_layers.0.")
            first = next((old for old in names if part.startswith(old)), "")
            state[names.get(first, "mtp.layers.0.") + part.removeprefix(first)] = tensor.contiguous()
    save_file(state, tmp_path / "model.safetensors")
    with torch.no_grad():
        logits, *_ = model(TEXT[:1, : LENGTH + DEPTH + 1], FEATURES[:1, : LENGTH + DEPTH + 1, :WIDTH].float())
    config = MTPConfig(weights=str(tmp_path), unrolled=DEPTH)
    assert_drafts_like(config, torch.cat(logits)[:, :LENGTH])

"""Drafters with scaled rotary positions turn as `transformers` does, and every parameter a kind needs is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specflow.draft.nn.rope import RotaryTable
from specflow.draft.weight_options import BlockOptions, RopeScaling
from specflow.errors import ModelError
from specflow.types import BlockShape

TARGET = BlockShape(hidden_size=32, mlp_size=48, num_heads=4, num_kv_heads=2, head_width=16, rope_theta=500.0)
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0},
}


@pytest.mark.parametrize("parameters", KINDS.values(), ids=list(KINDS))
def test_the_table_is_that_of_transformers(parameters: dict[str, Any]) -> None:
    shape = BlockOptions(rope_scaling=RopeScaling(**parameters)).shape_for(TARGET)
    table = RotaryTable.shaped(shape, torch.float32, torch.device("cpu"))
    plain = RotaryTable.shaped(TARGET, torch.float32, torch.device("cpu"))
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=4, head_dim=16, rope_parameters={"rope_theta": 500.0, **parameters}
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(100).unsqueeze(0))
    ours = table.halves(100)
    torch.testing.assert_close(ours[0], cos[0, :, :8])
    torch.testing.assert_close(ours[1], sin[0, :, :8])
    assert not torch.allclose(ours[0], plain.halves(100)[0], atol=1e-2)


def test_what_a_kind_needs_is_asked_for() -> None:
    with pytest.raises(ValidationError, match="llama3 needs original_max_position_embeddings"):
        RopeScaling(rope_type="llama3", factor=2.0)
    assert BlockOptions().shape_for(TARGET).rope_scaling is None


def test_what_transformers_refuses_is_an_error_of_ours() -> None:
    shape = BlockShape(32, 48, 4, 2, 16, rope_scaling=(("rope_type", "llama3"), ("factor", 2.0)))
    with pytest.raises(ModelError, match="rope_scaling"):
        RotaryTable.shaped(shape, torch.float32, torch.device("cpu"))

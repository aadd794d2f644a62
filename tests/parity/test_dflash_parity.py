"""Draft logits of DFlash against the packages `dflash` (z-lab) and `speculators`, with the same random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import pytest
import torch
from dense_block import FEATURES, TAPS, Stage
from random_weights import randomise
from safetensors.torch import save_file
from tiny import VOCAB, tiny_target
from torch import Tensor
from transformers import Qwen3Config

from specflow.draft.backbone import ContextBackbone
from specflow.draft.backbone_options import BackboneOptions
from specflow.draft.base import SourceContext
from specflow.draft.checkpoint import open_weights

Foreign = Callable[[str], ModuleType]

TARGET = tiny_target(torch.float32)
SHAPE = TARGET.info.shape
BLOCK = 6
MASK = VOCAB - 3
ROUNDS = (9, 1, 6, 3, 40, 2, 5)
"""Tokens committed before each draft."""
FORMS: dict[str, dict[str, object]] = {
    "full": {},
    "sliding": {"window": 4},
    "mixed": {"window": 7, "layer_types": ("sliding_attention", "full_attention")},
    "sliding-both-ways": {"window": 9, "causal": False},
}


def qwen(form: Mapping[str, object], **extra: object) -> Qwen3Config:
    """The configuration of the same backbone in their words."""
    full = "sliding_attention" if "window" in form else "full_attention"
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=SHAPE.hidden_size,
        intermediate_size=SHAPE.mlp_size,
        num_hidden_layers=2,
        num_attention_heads=SHAPE.num_heads,
        num_key_value_heads=SHAPE.num_kv_heads,
        head_dim=SHAPE.head_width,
        rms_norm_eps=SHAPE.eps,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        use_sliding_window="window" in form,
        sliding_window=form.get("window"),
        layer_types=list(form.get("layer_types", (full,) * 2)),  # type: ignore[call-overload]
        **extra,
    )
    config._attn_implementation = "eager"
    return config


def ours(state: Mapping[str, Tensor], path: Path, k: int, **options: object) -> ContextBackbone:
    """Our backbone with their tensors, every one of which must find its place."""
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path / "model.safetensors")
    config = BackboneOptions(
        **{"num_layers": 2, "taps": TAPS, "block_size": BLOCK, "mask_token": MASK, "weights": str(path), **options}  # type: ignore[arg-type]
    )
    reader = open_weights(config.weights, 0, TARGET)
    network = ContextBackbone(config, reader, SourceContext(TARGET, k))
    reader.close()
    return network


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_dflash_draws_the_same_logits_in_every_round(foreign: Foreign, form: dict[str, object], tmp_path: Path) -> None:
    """Their cache against ours: new features and block in, then the block cropped away."""
    theirs = foreign("dflash.model")
    extra = {} if form.get("causal") is None else {"is_causal": form["causal"]}
    settings = {"target_layer_ids": [0, 1], "mask_token_id": MASK, "block_size": BLOCK}
    config = qwen(form, num_target_layers=2, dflash_config=settings, **extra)
    model = theirs.DFlashDraftModel(config).float().eval()
    randomise(model)
    stage = Stage(ours(model.state_dict(), tmp_path, BLOCK - 1, **form), [0], TARGET)
    for index, count in enumerate(ROUNDS):
        stage.commit([count])
        anchor, start = 5 + index, stage.lengths[0]
        features = FEATURES[:1, :start].flatten(2).float()
        block = torch.tensor([[anchor, *[MASK] * (BLOCK - 1)]])
        with torch.no_grad():
            hidden = model(
                target_hidden=features,
                noise_embedding=TARGET.embed(block),
                position_ids=torch.arange(start + BLOCK).unsqueeze(0),
            )
            expected = model.compute_logits(hidden[:, 1:], TARGET.score)
        torch.testing.assert_close(stage.draft([anchor]), expected, atol=1e-4, rtol=0)


def test_dflash_incremental_rounds_with_its_own_cache(foreign: Foreign, tmp_path: Path) -> None:
    from transformers import DynamicCache

    theirs = foreign("dflash.model")
    settings = {"target_layer_ids": [0, 1], "mask_token_id": MASK, "block_size": BLOCK}
    caps = {"final_logit_softcapping": 4.0, "output_multiplier": 0.7}
    model = theirs.DFlashDraftModel(qwen({}, num_target_layers=2, dflash_config={**settings, **caps})).float().eval()
    randomise(model)
    net = ours(model.state_dict(), tmp_path, BLOCK - 1, logit_scale=0.7, logit_cap=4.0)
    stage, cache, seen = Stage(net, [2], TARGET), DynamicCache(), 0
    for index, count in enumerate(ROUNDS):
        stage.commit([count])
        anchor, start = 5 + index, stage.lengths[0]
        block = torch.tensor([[anchor, *[MASK] * (BLOCK - 1)]])
        with torch.no_grad():
            hidden = model(
                target_hidden=FEATURES[2:3, seen:start].flatten(2).float(),
                noise_embedding=TARGET.embed(block),
                position_ids=torch.arange(seen, start + BLOCK).unsqueeze(0),
                past_key_values=cache,
                use_cache=True,
            )
            cache.crop(-BLOCK)
            expected = model.compute_logits(hidden[:, 1:], TARGET.score)
        seen = start
        torch.testing.assert_close(stage.draft([anchor]), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_speculators_draws_the_same_logits_at_every_anchor(
    foreign: Foreign, form: dict[str, object], tmp_path: Path
) -> None:
    """Their training pass scores many anchors of one text at once; ours decodes to each of them."""
    theirs = foreign("speculators.models.dflash")
    config = theirs.DFlashSpeculatorConfig(
        transformer_layer_config=qwen(form),
        draft_vocab_size=VOCAB,
        block_size=BLOCK,
        aux_hidden_state_layer_ids=[0, 1],
        mask_token_id=MASK,
        sliding_window_non_causal=form.get("causal") is False,
    )
    model = theirs.DFlashDraftModel(config).float().eval()
    randomise(model)
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("verifier")}
    end = {"window_from": "anchor"} if form.get("window") else {}
    net = ours(state, tmp_path, BLOCK - 1, **end, **form)
    anchors, span = (3, 4, 17, 50, 90), 120
    text = torch.randint(0, VOCAB, (1, span), generator=torch.Generator().manual_seed(2))
    chosen = torch.zeros(1, span)
    chosen[0, list(anchors)] = 1
    with torch.no_grad():
        logits = model._backbone_forward(
            FEATURES[1:2, :span].flatten(2).float(),
            text,
            chosen,
            torch.zeros(1, span, SHAPE.hidden_size),
            torch.zeros(1, span, dtype=torch.int64),
            max_anchors=len(anchors),
        )[1].view(len(anchors), BLOCK, VOCAB)
    stage = Stage(net, [1], TARGET)
    for index, anchor in enumerate(anchors):
        stage.commit([anchor - stage.lengths[0]])
        got = stage.draft([int(text[0, anchor])])
        torch.testing.assert_close(got[0], logits[index, 1:], atol=1e-4, rtol=0)

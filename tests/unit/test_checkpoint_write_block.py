"""DFlash and DSpark on their way out: names, shapes and keys of each layout, and what a layout refuses to say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from outgoing import IDS, LAYERS, VERIFIER, WEIGHTS, WIDTH, K, given_ids, stored
from tiny import VOCAB

from specflow.checkpoint.writing import lay_out
from specflow.errors import CheckpointError

BODY = {"fc.weight", "hidden_norm.weight", "norm.weight"} | {
    f"layers.{layer}.{name}.weight"
    for layer in range(2)
    for name in (
        "input_layernorm",
        "post_attention_layernorm",
        *(f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
        *(f"mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj")),
    )
}
FORM = {"num_layers": 2, "taps": (1, 5), "block_size": 6, "mask_token": VOCAB - 3}


def test_zlab_dflash_has_the_published_names_and_keys() -> None:
    drafter = stored("dflash", **FORM, window=4, layer_types=("sliding_attention", "full_attention"), logit_cap=3.0)
    written = lay_out(drafter, "official", VERIFIER)
    assert set(written.tensors) == BODY
    assert written.tensors["fc.weight"].shape == (WIDTH, 2 * WIDTH)
    config = written.config
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["dflash_config"] == {
        "target_layer_ids": [1, 5],  # theirs is the output of layer k, as ours
        "mask_token_id": VOCAB - 3,
        "final_logit_softcapping": 3.0,
    }
    shown = {name: config[name] for name in ("model_type", "block_size", "num_target_layers", "num_hidden_layers")}
    assert shown == {"model_type": "qwen3", "block_size": 6, "num_target_layers": LAYERS, "num_hidden_layers": 2}
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    assert (config["use_sliding_window"], config["sliding_window"]) == (True, 4)
    assert config["vocab_size"] == VOCAB
    assert "is_causal" not in config


def test_speculators_dflash_counts_what_enters_a_layer() -> None:
    written = lay_out(stored("dflash", **FORM), "speculators", VERIFIER)
    assert set(written.tensors) == BODY  # neither embedding nor a head of the whole vocabulary is ever stored
    config = written.config
    assert config["speculators_model_type"] == "dflash"
    assert config["aux_hidden_state_layer_ids"] == [2, 6]
    assert (config["sample_from_anchor"], config["draft_vocab_size"], config["block_size"]) == (False, VOCAB, 6)
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "org/tiny",
        "architectures": ["LlamaForCausalLM"],
    }
    assert config["transformer_layer_config"]["model_type"] == "qwen3"


def test_a_reduced_vocabulary_brings_its_maps_and_the_targets_rows() -> None:
    drafter = stored("dflash", given_ids(), **FORM, draft_vocab_size=len(IDS), own_head=False)
    assert "lm_head.weight" not in drafter.tensors
    written = lay_out(drafter, "speculators", VERIFIER)
    assert torch.equal(written.tensors["lm_head.weight"], WEIGHTS["lm_head.weight"][IDS])
    assert torch.equal(written.tensors["d2t"] + torch.arange(len(IDS)), IDS)
    assert written.tensors["t2d"].dtype == torch.bool
    assert torch.equal(written.tensors["t2d"].nonzero().squeeze(1), IDS)
    assert written.config["draft_vocab_size"] == len(IDS)


@pytest.mark.parametrize(("corrector", "theirs"), [("markov", "vanilla"), ("gated", "gated"), ("rnn", "rnn")])
def test_deepspec_dspark_stores_the_targets_tables(corrector: str, theirs: str) -> None:
    drafter = stored("dspark", **FORM, corrector=corrector, corrector_rank=6)
    written = lay_out(drafter, "official", VERIFIER)
    beside = {"markov": set(), "gated": {"gate_proj"}, "rnn": {"joint_proj"}}[corrector]
    heads = {f"markov_head.{name}.weight" for name in {"markov_w1", "markov_w2", *beside}}
    heads |= {f"markov_head.{name}.bias" for name in beside}
    heads |= {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    assert set(written.tensors) == BODY | heads | {"embed_tokens.weight", "lm_head.weight"}
    assert torch.equal(written.tensors["embed_tokens.weight"], WEIGHTS["model.embed_tokens.weight"])
    assert written.tensors["confidence_head.proj.weight"].shape == (1, WIDTH + 6)
    config = written.config
    assert config["architectures"] == ["Qwen3DSparkModel"]
    shown = {name: config[name] for name in ("markov_rank", "markov_head_type", "target_layer_ids", "mask_token_id")}
    assert shown == {
        "markov_rank": 6,
        "markov_head_type": theirs,
        "target_layer_ids": [1, 5],
        "mask_token_id": VOCAB - 3,
    }
    assert (config["enable_confidence_head"], config["confidence_head_with_markov"]) == (True, True)


def test_speculators_dspark_says_its_heads_and_the_anchors_slot() -> None:
    drafter = stored(
        "dspark",
        given_ids(),
        **FORM,
        draft_vocab_size=len(IDS),
        corrector_rank=6,
        confidence_tokens=False,
        confidence_bias=False,
        temperatures=(1.0, 2.0, 1.0, 1.0, 1.0, 1.0),
    )
    written = lay_out(drafter, "speculators", VERIFIER)
    assert written.config["speculators_model_type"] == "dspark"
    assert written.config["sample_from_anchor"]
    assert written.config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 6
    assert not written.config["confidence_head_with_markov"]
    assert written.tensors["confidence_head.proj.weight"].shape == (1, WIDTH)
    assert torch.equal(written.tensors["confidence_head.proj.bias"], torch.zeros(1))  # ours has none
    assert written.tensors["markov_head.markov_w1.weight"].shape == (VOCAB, 6)
    assert written.tensors["markov_head.markov_w2.weight"].shape == (len(IDS), 6)
    assert any("temperatures" in note for note in written.notes)


def test_shifted_dflash_is_published_as_dspark_without_heads() -> None:
    drafter = stored("dflash", **FORM, layout="shifted")
    assert lay_out(drafter, "official", VERIFIER).config["architectures"] == ["Qwen3DSparkModel"]
    config = lay_out(drafter, "speculators", VERIFIER).config
    assert (config["speculators_model_type"], config["markov_rank"]) == ("dspark", 0)
    assert not config["enable_confidence_head"]


REFUSED: dict[str, tuple[str, str, dict[str, object], str]] = {
    "window of a row": ("dflash", "speculators", {"window": 4}, "window"),
    "window of the anchor": ("dflash", "official", {"window": 4, "window_from": "anchor"}, "window"),
    "causal": ("dflash", "speculators", {"causal": True}, "causal"),
    "cap": ("dflash", "speculators", {"logit_cap": 2.0}, "logit_cap"),
    "last layer": ("dflash", "official", {"taps": (1, LAYERS - 1)}, "last layer"),
    "tap of another target": ("dflash", "speculators", {"taps": (1, LAYERS)}, "layers from -1"),
    "mask token of another target": ("dflash", "official", {"mask_token": VOCAB}, "mask_token"),
    "corrector in fill-in": ("dspark", "official", {"layout": "fill_in", "corrector_rank": 6}, "fill_in"),
    "scaled": ("dspark", "official", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
    "reduced": ("dspark", "official", {"draft_vocab_size": len(IDS), "corrector_rank": 6}, "draft_vocab_size"),
}


@pytest.mark.parametrize(("source", "layout", "options", "said"), REFUSED.values(), ids=list(REFUSED))
def test_what_a_layout_cannot_say_is_refused(source: str, layout: str, options: dict[str, object], said: str) -> None:
    given = given_ids() if "draft_vocab_size" in options else None
    buildable = {name: value for name, value in options.items() if name not in ("taps", "mask_token")}
    drafter = stored(source, given, **{**FORM, **buildable})
    drafter = replace(drafter, options=type(drafter.options).model_validate({**FORM, **options}))
    with pytest.raises(CheckpointError, match=said):
        lay_out(drafter, layout, VERIFIER)  # type: ignore[arg-type]


def test_what_is_borrowed_needs_the_target() -> None:
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_width": 8, "mlp_size": 48, "eps": 1e-6, "rope_theta": 10000.0}
    drafter = stored("dspark", **FORM, **sizes, corrector_rank=6)
    with pytest.raises(CheckpointError, match=r"no target is named(?s:.)*--target"):
        lay_out(drafter, "official")
    written = lay_out(drafter, "speculators")  # nothing of the target is stored there
    assert written.config["transformer_layer_config"]["vocab_size"] == VOCAB
    assert written.config["speculators_config"]["verifier"]["name_or_path"] is None


def test_tables_that_readers_take_from_the_target_must_be_its_own() -> None:
    same = {"embed_tokens.weight": WEIGHTS["model.embed_tokens.weight"].clone()}
    assert "embed_tokens.weight" not in lay_out(stored("dflash", same, **FORM), "official", VERIFIER).tensors
    other = {"embed_tokens.weight": WEIGHTS["model.embed_tokens.weight"] + 1.0}
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight that is not the target's"):
        lay_out(stored("dflash", other, **FORM), "official", VERIFIER)


def test_every_tensor_must_find_its_place_and_shape() -> None:
    drafter = stored("dflash", **FORM)
    extra = replace(drafter, tensors={**drafter.tensors, "layers.2.mlp.up_proj.weight": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"no place for: layers\.2\.mlp\.up_proj\.weight"):
        lay_out(extra, "official", VERIFIER)
    less = replace(drafter, tensors={name: t for name, t in drafter.tensors.items() if "q_norm" not in name})
    with pytest.raises(CheckpointError, match="no norms of queries and keys"):
        lay_out(less, "official", VERIFIER)
    wrong = replace(VERIFIER, shape=replace(VERIFIER.shape, num_heads=2))
    with pytest.raises(CheckpointError, match=r"q_proj\.weight has shape"):
        lay_out(drafter, "official", wrong)


def test_a_block_without_size_takes_that_of_its_recipe() -> None:
    form = {name: value for name, value in FORM.items() if name != "block_size"}
    drafter = stored("dflash", **form)
    assert lay_out(drafter, "official", VERIFIER).config["block_size"] == K + 1
    with pytest.raises(CheckpointError, match="no block_size"):
        lay_out(replace(drafter, k=None), "official", VERIFIER)

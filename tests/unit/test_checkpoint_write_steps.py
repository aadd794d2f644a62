"""EAGLE, MTP and Medusa on their way out: names, shapes and keys of each layout, and what a layout refuses to say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from outgoing import IDS, LAYERS, OFFICIAL_TAPS, VERIFIER, WEIGHTS, WIDTH, K, given_ids, stored
from tiny import VOCAB

from specflow.checkpoint.writing import lay_out
from specflow.errors import CheckpointError

LINEARS = {
    *(f"self_attn.{part}.weight" for part in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *(f"mlp.{part}.weight" for part in ("gate_proj", "up_proj", "down_proj")),
    "post_attention_layernorm.weight",
}
HEAD_NORMS = {f"{prefix}.self_attn.{part}_norm.weight": torch.ones(8) for prefix in ("mtp.layers.0",) for part in "qk"}


def third(prefix: str) -> set[str]:
    block = {f"{prefix}.{name}" for name in {*LINEARS, "input_layernorm.weight", "hidden_norm.weight"}}
    return block | {"fc.weight", "norm.weight", "lm_head.weight"}


def test_official_eagle3_has_the_published_names_and_keys() -> None:
    written = lay_out(stored("eagle", given_ids(), draft_vocab_size=len(IDS)), "official", VERIFIER)
    assert set(written.tensors) == third("midlayer") | {"d2t", "t2d"}
    assert written.tensors["midlayer.self_attn.q_proj.weight"].shape == (WIDTH, 2 * WIDTH)
    assert written.tensors["fc.weight"].shape == (WIDTH, 3 * WIDTH)
    assert written.tensors["d2t"].dtype == torch.int64
    config = written.config
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    shown = {name: config[name] for name in ("draft_vocab_size", "vocab_size", "num_hidden_layers", "model_type")}
    assert shown == {"draft_vocab_size": len(IDS), "vocab_size": VOCAB, "num_hidden_layers": 1, "model_type": "llama"}
    assert config["max_position_embeddings"] == 256


def test_official_eagle3_has_no_maps_of_the_whole_vocabulary_and_borrows_no_head() -> None:
    written = lay_out(stored("eagle"), "official", VERIFIER)
    assert set(written.tensors) == third("midlayer")
    assert torch.equal(written.tensors["lm_head.weight"], WEIGHTS["lm_head.weight"])
    with pytest.raises(CheckpointError, match="no target is named"):
        lay_out(stored("eagle"), "official")


def test_official_eagle3_fixes_its_taps() -> None:
    assert lay_out(stored("eagle", taps=OFFICIAL_TAPS), "official", VERIFIER).config
    with pytest.raises(CheckpointError, match=r"taps \[2, 3, 4\](?s:.)*\[1, 3, 4\](?s:.)*--to speculators"):
        lay_out(stored("eagle", taps=(2, 3, 4)), "official", VERIFIER)


def test_speculators_eagle3_says_taps_and_norms() -> None:
    drafter = stored("eagle", taps=(-1, 2, 6), fc_norm=True, norm_output=True, norm_before_residual=True, eps=1e-5)
    written = lay_out(drafter, "speculators", VERIFIER)
    norms = {f"fc_norm.{index}.weight" for index in range(3)}
    assert set(written.tensors) == third("layers.0") | norms | {"embed_tokens.weight"}
    assert torch.equal(written.tensors["embed_tokens.weight"], WEIGHTS["model.embed_tokens.weight"])
    config = written.config
    assert config["speculators_model_type"] == "eagle3"
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 3, 7]
    flags = {name: config[name] for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")}
    assert flags == {"norm_before_residual": True, "norm_before_fc": False, "fc_norm": True, "norm_output": True}
    layer = config["transformer_layer_config"]
    assert (layer["rms_norm_eps"], layer["head_dim"], layer["num_hidden_layers"]) == (1e-5, 8, 1)
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == K


@pytest.mark.parametrize(
    ("options", "said"),
    [({"fc_norm": True}, "fc_norm"), ({"norm_output": True}, "norm_output"), ({"confidence_head": True}, "confidence")],
)
def test_later_options_are_refused_by_the_official_layout(options: dict[str, object], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        lay_out(stored("eagle", **options), "official", VERIFIER)


def test_a_confidence_head_can_be_left_out() -> None:
    drafter = stored("eagle", confidence_head=True)
    written = lay_out(drafter.without_confidence(), "speculators", VERIFIER)
    assert set(written.tensors) == third("layers.0") | {"embed_tokens.weight"}


def test_official_eagle1_stores_the_targets_embedding() -> None:
    written = lay_out(stored("eagle", variant=1), "official", VERIFIER)
    names = {f"layers.0.{name}" for name in LINEARS} | {"fc.weight", "fc.bias", "embed_tokens.weight"}
    assert set(written.tensors) == names
    assert written.config["bias"] is True
    with pytest.raises(CheckpointError, match="EAGLE-1"):
        lay_out(stored("eagle", variant=1), "speculators", VERIFIER)


def test_maps_that_do_not_rise_are_refused() -> None:
    ids = IDS.flip(0)
    given = {"d2t": ids - torch.arange(len(ids))}
    with pytest.raises(CheckpointError, match="d2t does not lead to rising ids"):
        lay_out(stored("eagle", given, draft_vocab_size=len(ids)), "speculators", VERIFIER)


def test_speculators_mtp_renames_the_module() -> None:
    written = lay_out(stored("mtp", HEAD_NORMS, unrolled=3), "speculators", VERIFIER)
    norms = {"input_layernorm", "hidden_layernorm", "token_layernorm", "final_layernorm"}
    norms |= {"self_attn.q_norm", "self_attn.k_norm"}
    names = {*LINEARS, "input_proj.weight", *(f"{name}.weight" for name in norms)}
    assert set(written.tensors) == {f"mtp_layers.0.{name}" for name in names}
    config = written.config
    assert (config["speculators_model_type"], config["num_nextn_predict_layers"]) == ("mtp", 1)
    assert config["transformer_layer_config"]["num_hidden_layers"] == LAYERS
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3


MTP_REFUSED: dict[str, tuple[str, dict[str, object], str]] = {
    "several modules": ("speculators", {"num_modules": 2}, "2 modules"),
    "order": ("speculators", {"order": "hidden_first"}, "order"),
    "recycled before the norm": ("speculators", {"recycle": "pre_norm"}, "recycle"),
    "llama block": ("speculators", {}, "no norms of queries and keys"),
    "official": ("official", {}, "inside their target's checkpoint"),
}


@pytest.mark.parametrize(("layout", "options", "said"), MTP_REFUSED.values(), ids=list(MTP_REFUSED))
def test_what_mtp_layouts_cannot_say_is_refused(layout: str, options: dict[str, object], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        lay_out(stored("mtp", **options), layout, VERIFIER)  # type: ignore[arg-type]


def test_gains_that_are_stored_less_one_are_written_whole() -> None:
    plain = stored("mtp", HEAD_NORMS, unrolled=3)
    less = {name: t - 1.0 if "norm" in name else t for name, t in plain.tensors.items()}
    config = type(plain.options).model_validate({"unrolled": 3, "offset_norms": True})
    written = lay_out(replace(plain, tensors=less, options=config), "speculators", VERIFIER)
    expected = lay_out(plain, "speculators", VERIFIER).tensors
    for name, tensor in written.tensors.items():
        torch.testing.assert_close(tensor, expected[name])


@pytest.mark.parametrize("own", [True, False])
def test_medusa_stores_an_output_layer_for_every_head(own: bool) -> None:
    drafter = stored("medusa", num_heads=K, num_layers=2, own_heads=own)
    written = lay_out(drafter, "official", VERIFIER)
    names = {f"{head}.{layer}.linear.{kind}" for head in range(K) for layer in (0, 1) for kind in ("weight", "bias")}
    assert set(written.tensors) == names | {f"{head}.2.weight" for head in range(K)}
    if not own:
        assert all(torch.equal(written.tensors[f"{head}.2.weight"], WEIGHTS["lm_head.weight"]) for head in range(K))
    assert written.file == "medusa_lm_head.pt"
    assert written.config == {"medusa_num_heads": K, "medusa_num_layers": 2, "base_model_name_or_path": "org/tiny"}


@pytest.mark.parametrize(
    ("layout", "options", "said"),
    [
        ("official", {"draft_vocab_size": len(IDS), "own_heads": True}, "draft_vocab_size"),
        ("official", {"corrector": "markov", "corrector_rank": 6}, "corrector"),
        ("speculators", {}, "Medusa"),
    ],
)
def test_what_medusa_layouts_cannot_say_is_refused(layout: str, options: dict[str, object], said: str) -> None:
    given = given_ids() if "draft_vocab_size" in options else None
    with pytest.raises(CheckpointError, match=said):
        lay_out(stored("medusa", given, **options), layout, VERIFIER)  # type: ignore[arg-type]


def test_heads_that_are_more_than_rows_are_refused() -> None:
    bent = replace(VERIFIER, bent="logit_scale")
    with pytest.raises(CheckpointError, match="logit_scale"):
        lay_out(stored("eagle"), "official", bent)
    biased = replace(VERIFIER, tensors={**WEIGHTS, "lm_head.bias": torch.zeros(VOCAB)})
    with pytest.raises(CheckpointError, match="adds a bias"):
        lay_out(stored("eagle"), "official", biased)

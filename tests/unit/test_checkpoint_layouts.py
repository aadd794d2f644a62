"""Every published layout is recognised, says the options we say, and drafts what the same weights draft in our own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from outgoing import IDS, LAYERS, given_ids
from published import BLOCK, LLAMA, MASK, OURS, POSITIONS, QWEN, RANK, SHAPED, Published, drafted, drawn, law_of
from tiny import VOCAB
from torch import Tensor

from specflow.checkpoint.layout import detect, read
from specflow.checkpoint.report import inspect_checkpoint
from specflow.recipe import parse_recipe

WIDTH = LLAMA["hidden_size"]
MAP = {"d2t": IDS - torch.arange(len(IDS)), "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, IDS, True)}
MARKS = {"t2d": MAP["t2d"]}
SIZE = len(IDS)
TABLES = {"embed_tokens.weight": drawn(VOCAB, WIDTH)}
TARGETS_OWN = {
    "model.layers.0.mlp.up_proj.weight": drawn(4, 4),
    "model.norm.weight": drawn(4),
    "lm_head.weight": drawn(4, 4),
}
VERIFIER = {
    "speculators_version": "0.9.0",
    "speculators_config": {
        "algorithm": "any",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": BLOCK - 1, "accept_tolerance": 0.0}],
        "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
    },
    "transformers_version": "5.3.0",
    "dtype": "bfloat16",
}
NESTED = {"target_layer_ids": [1, 4], "mask_token_id": MASK}
DFLASH = {
    **SHAPED,
    "num_layers": 2,
    "block_size": BLOCK,
    "mask_token": MASK,
    "taps": (1, 4),
    "layout": "fill_in",
    "own_head": False,
    "corrector": None,
    "confidence_head": False,
}
BOTH = {**DFLASH, "layout": "shifted", "own_head": True, "num_layers": 2}
SPARK = {
    **BOTH,
    "corrector": "markov",
    "corrector_rank": RANK,
    "confidence_head": True,
    "confidence_bias": True,
    "confidence_tokens": True,
}
DEEPSPEC = {
    **QWEN,
    "architectures": ["Qwen3DSparkModel"],
    "num_target_layers": LAYERS,
    "block_size": BLOCK,
    "mask_token_id": MASK,
    "target_layer_ids": [1, 4],
    "num_anchors": 512,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    # the target's, and no word about the drafter
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    "partial_rotary_factor": 0.25,
    "attn_output_gate": True,
}
STORED = {"embed_tokens.weight": TABLES["embed_tokens.weight"]}
EAGLE3 = {
    **SHAPED,
    "variant": 3,
    "own_head": True,
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
}
MTP = {**OURS, "num_modules": 1, "offset_norms": False}
QWEN_MTP = {
    "mtp.layers.0.": "mtp_layers.0.",
    "mtp.fc.": "mtp_layers.0.input_proj.",
    "mtp.pre_fc_norm_hidden.": "mtp_layers.0.hidden_layernorm.",
    "mtp.pre_fc_norm_embedding.": "mtp_layers.0.token_layernorm.",
    "mtp.norm.": "mtp_layers.0.final_layernorm.",
}
DEEPSEEK = {
    "mtp.layers.0.": f"model.layers.{LAYERS}.",
    "mtp.fc.": f"model.layers.{LAYERS}.eh_proj.",
    "mtp.pre_fc_norm_hidden.": f"model.layers.{LAYERS}.hnorm.",
    "mtp.pre_fc_norm_embedding.": f"model.layers.{LAYERS}.enorm.",
    "mtp.norm.": f"model.layers.{LAYERS}.shared_head.norm.",
}


def prefixed(names: Mapping[str, str]) -> Any:
    """A renaming of the beginnings of names."""
    return lambda name: next((new + name.removeprefix(old) for old, new in names.items() if name.startswith(old)), name)


def vllm_medusa(name: str) -> str:
    head, layer, *rest = name.split(".")
    return f"blocks.{head}.layers.{layer}.{rest[1]}" if rest[0] == "linear" else f"lm_heads.{head}.weight"


def as_token_map(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    kept = {vllm_medusa(name): tensor for name, tensor in tensors.items() if name not in ("d2t", "token_map")}
    return {**kept, "token_map": IDS}


def as_absolute(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, "d2t": IDS}


def less_one(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gains as Qwen3-Next stores them."""
    return {
        name: tensor - 1.0 if name.startswith("mtp.") and "norm" in name else tensor for name, tensor in tensors.items()
    }


def fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """One tensor for queries, keys and values, one for gate and up."""
    made = dict(tensors)
    for layer in range(2):
        for section, parts, together in (("self_attn", "qkv", "qkv_proj"), ("mlp", ("gate", "up"), "gate_up_proj")):
            names = [f"layers.{layer}.{section}.{part}_proj.weight" for part in parts]
            made[f"layers.{layer}.{section}.{together}.weight"] = torch.cat([made.pop(name) for name in names])
    return made


def speculators(kind: str, block: Mapping[str, Any], **keys: Any) -> dict[str, Any]:
    return {"speculators_model_type": kind, "transformer_layer_config": dict(block), **VERIFIER, **keys}


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

CASES: dict[str, Published] = {
    "medusa": Published(
        "medusa",
        "medusa",
        {"num_heads": 3, "num_layers": 1, "own_heads": True},
        {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"},
        file="medusa_lm_head.pt",
    ),
    "medusa-tgi": Published(
        "medusa",
        "medusa",
        {"num_heads": 2, "num_layers": 2, "own_heads": True},
        {"medusa_num_heads": 2, "medusa_num_layers": 2, "base_model_name_or_path": "org/target"},
        file="medusa_lm_head.safetensors",
    ),
    "medusa-whole": Published(
        "medusa-whole",
        "medusa",
        {"num_heads": 3, "num_layers": 1, "own_heads": True},
        {**LLAMA, "architectures": ["MedusaLlamaForCausalLM"], "medusa_num_heads": 3, "medusa_num_layers": 1},
        rename=lambda name: f"medusa_head.{name}",
        tensors=TARGETS_OWN,
    ),
    "medusa-vllm": Published(
        "medusa-vllm",
        "medusa",
        {"num_heads": 2, "num_layers": 1, "own_heads": True},
        {
            "model_type": "medusa",
            "hidden_size": WIDTH,
            "num_heads": 2,
            "num_hidden_layers": 1,
            "vocab_size": VOCAB,
            "medusa_fc_bias": True,
        },
        rename=vllm_medusa,
    ),
    "medusa-vllm-reduced": Published(
        "medusa-vllm",
        "medusa",
        {"num_heads": 2, "num_layers": 1, "own_heads": True, "draft_vocab_size": SIZE},
        {
            "model_type": "medusa",
            "hidden_size": WIDTH,
            "num_heads": 2,
            "num_hidden_layers": 1,
            "vocab_size": VOCAB,
            "truncated_vocab_size": SIZE,
        },
        given=given_ids(),
        change=as_token_map,
    ),
    "eagle": Published(
        "eagle",
        "eagle",
        {**SHAPED, "variant": 1, "bias": True},
        {**LLAMA, "architectures": ["LlamaForCausalLM"]},
        tensors={**TABLES, "layers.0.self_attn.rotary_emb.inv_freq": drawn(6)},
        file="pytorch_model.bin",
    ),
    "eagle-no-bias": Published(
        "eagle",
        "eagle",
        {**SHAPED, "variant": 1, "bias": False, "rope_theta": 10000.0},
        {**{key: value for key, value in LLAMA.items() if key != "rope_theta"}, "bias": False},
        tensors=TABLES,
    ),
    "eagle3": Published(
        "eagle3",
        "eagle",
        {**EAGLE3, "draft_vocab_size": SIZE},
        {**LLAMA, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 40, "draft_vocab_size": SIZE},
        tensors=MARKS,
        given=given_ids(),
        file="pytorch_model.bin",
    ),
    "eagle3-ids-as-they-are": Published(
        "eagle3",
        "eagle",
        {**EAGLE3, "draft_vocab_size": SIZE},
        {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": SIZE},
        tensors=MARKS,
        given=given_ids(),
        change=as_absolute,
    ),
    "eagle3-specforge": Published(
        "eagle3",
        "eagle",
        {**EAGLE3, "fc_norm": True, "norm_output": True},
        {
            **LLAMA,
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": VOCAB,
            "fc_norm": True,
            "norm_output": True,
        },
    ),
    "eagle3-llama3": Published(
        "eagle3",
        "eagle",
        {**EAGLE3, "rope_scaling": LLAMA3},
        {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VOCAB, "rope_scaling": LLAMA3},
    ),
    "eagle3-angelslim": Published(
        "eagle3",
        "eagle",
        {**EAGLE3, "draft_vocab_size": SIZE, "taps": (1, 4, 6), "norm_before_residual": True},
        {
            **LLAMA,
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": SIZE,
            "norm_before_residual": True,
            "eagle_aux_hidden_state_layer_ids": [2, 5, 7],
        },
        rename=prefixed({"midlayer.": "layers.0."}),
        tensors=MARKS,
        given=given_ids(),
    ),
    "eagle3-eagle-config": Published(
        "eagle3",
        "eagle",
        {**EAGLE3, "taps": (1, 3, 7)},
        {
            **LLAMA,
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": VOCAB,
            "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [2, 4, 8]},
        },
    ),
    "eagle3-deepspec": Published(
        "eagle3-deepspec",
        "eagle",
        {**EAGLE3, "taps": (1, 2, 3, 4, 5)},
        {
            **QWEN,
            "architectures": ["Qwen3Eagle3Model"],
            "num_hidden_layers": 1,
            "num_target_layers": LAYERS,
            "target_layer_ids": [1, 2, 3, 4, 5],
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        },
        tensors=STORED,
    ),
    "eagle3-speculators": Published(
        "eagle3-speculators",
        "eagle",
        {**EAGLE3, "draft_vocab_size": SIZE, "taps": (1, 4, LAYERS - 1), "norm_before_fc": True},
        speculators(
            "eagle3",
            LLAMA,
            architectures=["Eagle3Speculator"],
            draft_vocab_size=SIZE,
            norm_before_residual=False,
            norm_before_fc=True,
            fc_norm=False,
            norm_output=False,
            target_hidden_size=None,
            eagle_aux_hidden_state_layer_ids=[2, 5, LAYERS],
            embed_requires_grad=False,
        ),
        rename=prefixed({"midlayer.": "layers.0."}),
        tensors={**TABLES, **MARKS},
        given=given_ids(),
    ),
    "dflash": Published(
        "dflash",
        "dflash",
        DFLASH,
        {
            **QWEN,
            "architectures": ["DFlashDraftModel"],
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "num_target_layers": LAYERS,
            "block_size": BLOCK,
            "dflash_config": NESTED,
        },
    ),
    "dflash-nested": Published(
        "dflash",
        "dflash",
        {
            **DFLASH,
            "logit_scale": 0.5,
            "logit_cap": 4.0,
            "window": 4,
            "layer_types": ("sliding_attention", "full_attention"),
            "causal": False,
        },
        {
            **QWEN,
            "architectures": ["DFlashDraftModel"],
            "layer_types": ["sliding_attention", "full_attention"],
            "use_sliding_window": True,
            "sliding_window": 4,
            "dflash_config": {
                **NESTED,
                "block_size": BLOCK,
                "causal": False,
                "output_multiplier": 0.5,
                "final_logit_softcapping": 4.0,
            },
        },
        change=fused,
    ),
    "dflash-yarn": Published(
        "dflash",
        "dflash",
        {**DFLASH, "rope_scaling": YARN},
        {
            **{key: value for key, value in QWEN.items() if key not in ("rope_theta", "rope_scaling")},
            "architectures": ["DFlashDraftModel"],
            "block_size": BLOCK,
            "rope_parameters": {**YARN, "rope_theta": 5000.0},
            "dflash_config": NESTED,
        },
    ),
    "dflash-window-of-all": Published(
        "dflash",
        "dflash",
        {**DFLASH, "window": 3},
        {
            **QWEN,
            "architectures": ["DFlashDraftModel"],
            "dflash_config": {**NESTED, "block_size": BLOCK, "use_swa": True, "swa_window_size": 3},
        },
    ),
    "dflash-deepspec": Published(
        "dflash-deepspec",
        "dflash",
        BOTH,
        {
            **DEEPSPEC,
            "markov_rank": 0,
            "enable_confidence_head": False,
            "confidence_head_with_markov": None,
            "markov_head_type": None,
        },
        tensors=STORED,
    ),
    "dflash-speculators": Published(
        "dflash-speculators",
        "dflash",
        {
            **DFLASH,
            "own_head": True,
            "draft_vocab_size": SIZE,
            "window": 4,
            "layer_types": ("sliding_attention",) * 2,
            "window_from": "anchor",
        },
        speculators(
            "dflash",
            {**QWEN, "layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 4},
            architectures=["DFlashSpeculator"],
            draft_vocab_size=SIZE,
            block_size=BLOCK,
            aux_hidden_state_layer_ids=[2, 5],
            mask_token_id=MASK,
            sample_from_anchor=False,
            sliding_window_non_causal=False,
            target_hidden_size=WIDTH,
        ),
        tensors=MARKS,
        given=given_ids(),
    ),
    "dspark-deepspec": Published("dspark-deepspec", "dspark", SPARK, DEEPSPEC, tensors=STORED),
    "dspark-deepspec-gated": Published(
        "dspark-deepspec",
        "dspark",
        {**SPARK, "corrector": "gated", "confidence_tokens": False},
        {**DEEPSPEC, "markov_head_type": "gated", "confidence_head_with_markov": False},
        tensors=STORED,
        given={"markov_head.gate_proj.bias": drawn(RANK)},
    ),
    "dspark-deepspec-rnn": Published(
        "dspark-deepspec",
        "dspark",
        {**SPARK, "corrector": "rnn"},
        {**DEEPSPEC, "markov_head_type": "rnn"},
        tensors=STORED,
        given={"markov_head.joint_proj.bias": drawn(3 * RANK)},
    ),
    "dspark-specforge": Published(
        "dspark-specforge",
        "dspark",
        {**SPARK, "own_head": False, "causal": True},
        {
            **QWEN,
            "architectures": ["DSparkDraftModel"],
            "block_size": BLOCK,
            "num_target_layers": LAYERS,
            "is_causal": True,
            "dflash_config": {
                **NESTED,
                "projector_type": "dspark",
                "attention_mode": "gqa",
                "markov_rank": RANK,
                "markov_head_type": "vanilla",
                "confidence_head_alpha": 1.0,
                "enable_confidence_head": True,
                "confidence_head_with_markov": True,
            },
        },
    ),
    "dspark-speculators": Published(
        "dspark-speculators",
        "dspark",
        {**SPARK, "draft_vocab_size": SIZE},
        speculators(
            "dspark",
            QWEN,
            architectures=["DSparkSpeculator"],
            draft_vocab_size=SIZE,
            block_size=BLOCK,
            aux_hidden_state_layer_ids=[2, 5],
            mask_token_id=MASK,
            sample_from_anchor=True,
            markov_rank=RANK,
            markov_head_type="vanilla",
            enable_confidence_head=True,
            confidence_head_with_markov=True,
        ),
        tensors=MARKS,
        given=given_ids(),
    ),
    "mtp-deepseek": Published(
        "mtp-deepseek",
        "mtp",
        {**MTP, "zero_first": True},
        {
            **LLAMA,
            "model_type": "deepseek_v3",
            "architectures": ["DeepseekV3ForCausalLM"],
            "num_hidden_layers": LAYERS,
            "num_nextn_predict_layers": 1,
        },
        rename=prefixed(DEEPSEEK),
        tensors={
            **TARGETS_OWN,
            f"model.layers.{LAYERS}.embed_tokens.weight": drawn(VOCAB, WIDTH),
            f"model.layers.{LAYERS}.shared_head.head.weight": drawn(VOCAB, WIDTH),
        },
    ),
    "mtp-qwen": Published(
        "mtp-qwen",
        "mtp",
        {**MTP, "offset_norms": True},
        {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_5",
            "text_config": {
                **LLAMA,
                "model_type": "qwen3_next",
                "num_hidden_layers": LAYERS,
                "mtp_num_hidden_layers": 1,
            },
        },
        tensors=TARGETS_OWN,
        change=less_one,
        native={"offset_norms": False},
        exact=False,
    ),
    "mtp-mimo": Published(
        "mtp-mimo",
        "mtp",
        {**MTP, "order": "hidden_first", "zero_first": True},
        {
            **LLAMA,
            "model_type": "mimo",
            "architectures": ["MiMoForCausalLM"],
            "num_hidden_layers": LAYERS,
            "num_nextn_predict_layers": 1,
        },
        rename=prefixed({old: f"model.{new}" for old, new in QWEN_MTP.items()}),
        tensors=TARGETS_OWN,
    ),
    "mtp-speculators": Published(
        "mtp-speculators",
        "mtp",
        {**MTP, "hidden": "pre_norm", "recycle": "post_norm", "unrolled": BLOCK - 1, "max_positions": POSITIONS},
        speculators(
            "mtp", {**QWEN, "num_hidden_layers": LAYERS}, architectures=["MTPDraftModel"], num_nextn_predict_layers=1
        ),
        rename=prefixed(QWEN_MTP),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_a_layout_is_recognised_and_whole(case: Published, tmp_path: Path) -> None:
    layout = detect(case.write(tmp_path))
    assert (layout.name, layout.source) == (case.layout, case.source)
    assert (layout.missing, layout.left_over, layout.misshapen) == ((), (), ())
    assert layout.dtypes == ("float32",) or "d2t" in case.ours()
    assert dict(layout.options) == dict(case.options)


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_it_drafts_what_our_own_layout_drafts(case: Published, tmp_path: Path) -> None:
    theirs, ours = case.write(tmp_path / "theirs"), case.write_ours(tmp_path / "ours")
    if case.exact:
        found, made = read(theirs).tensors, case.ours()
        assert set(found) == set(made)
        assert all(torch.equal(found[name], tensor) for name, tensor in made.items())
    variant = {"variant": 1} if case.options.get("variant") == 1 else {}
    expected, block = drafted(case.source, ours, **variant), drafted(case.source, theirs, **variant)
    torch.testing.assert_close(law_of(block), law_of(expected), atol=1e-6, rtol=0)
    assert torch.equal(block.tokens, expected.tokens)
    assert (block.confidence is None) == (expected.confidence is None)
    if block.confidence is not None and expected.confidence is not None:
        torch.testing.assert_close(block.confidence, expected.confidence, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["eagle3-angelslim", "eagle3-llama3", "dflash", "mtp-mimo", "dspark-speculators"])
def test_another_reading_drafts_something_else(name: str, tmp_path: Path) -> None:
    """The comparison above can fail; and a recipe may read the weights otherwise than the layout says."""
    case = CASES[name]
    weights = case.write(tmp_path)
    other: dict[str, object] = {"order": "embedding_first"} if case.source == "mtp" else {"rope_scaling": YARN}
    if "taps" in case.options:
        other = {"taps": tuple(tap - 1 for tap in case.options["taps"])}
    assert not torch.allclose(
        law_of(drafted(case.source, weights, **other)), law_of(drafted(case.source, weights)), atol=1e-3
    )


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_its_recipe_is_one_that_we_take(case: Published, tmp_path: Path) -> None:
    """Lines that `specflow inspect` prints, with every tap as a layer whose output is read."""
    import yaml

    report = inspect_checkpoint(case.write(tmp_path))
    recipe = parse_recipe(yaml.safe_load(report.recipe()), "inspect")
    assert recipe.draft is not None
    assert recipe.draft.parts[0].source == case.source
    assert recipe.draft.k == report.k
    assert report.is_whole
    assert "taps" not in case.options or report.taps == case.options["taps"]

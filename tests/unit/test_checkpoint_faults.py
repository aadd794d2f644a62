"""Checkpoints that are not whole, not what they say, or not computed by any source of ours: a clear error each."""

from __future__ import annotations

import json
import logging
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from outgoing import LAYERS, TARGET, stored
from published import BLOCK, Published, drafted, drawn, law_of, save
from test_checkpoint_layouts import CASES, WIDTH
from tiny import VOCAB

from specflow.checkpoint.layout import detect, read
from specflow.checkpoint.report import inspect_checkpoint
from specflow.draft.base import SourceContext
from specflow.draft.checkpoint import open_weights, read_options, weights_identity
from specflow.draft.sources.dflash import DFlashConfig
from specflow.draft.sources.dspark import DSparkConfig
from specflow.draft.sources.eagle import EagleConfig
from specflow.draft.sources.medusa import MedusaConfig
from specflow.errors import CheckpointError, SpecFlowError

_COPIES = ("embed_tokens.weight", "lm_head.weight")
"""Where a drafter has none of its own, the target's serve."""


def fault(path: str) -> CheckpointError:
    """What reading says."""
    with pytest.raises(CheckpointError) as error:
        read(path)
    assert all((error.value.where, error.value.found, error.value.expected)), error.value
    return error.value


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_every_missing_tensor_is_named(case: Published, tmp_path: Path) -> None:
    """Each is taken out in turn; a layout that no longer can be told is refused too."""
    tensors = case.theirs()
    layout = detect(case.write(tmp_path / "whole"))
    needed = {wanted.theirs[0] for wanted in layout.wanted} - {"fc.bias", *_COPIES}
    for number, name in enumerate(sorted(needed)[:: max(1, len(needed) // 5)]):
        error = fault(case.write(tmp_path / str(number), {n: t for n, t in tensors.items() if n != name}))
        parts = name.removesuffix(".weight").removesuffix(".bias")
        parts = parts.replace("qkv_proj", "q_proj").replace("gate_up_proj", "gate_proj")
        assert parts in str(error) or "d2t" in name or "no drafter" in error.found or "reads" in error.found, (
            name,
            error,
        )


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_a_tensor_too_many_is_named(case: Published, tmp_path: Path) -> None:
    if case.layout.startswith("mtp-") and case.layout != "mtp-speculators":
        extra = {
            "mtp-qwen": "mtp.odd.weight",
            "mtp-mimo": "model.mtp_layers.0.odd",
            "mtp-deepseek": f"model.layers.{LAYERS}.odd",
        }[case.layout]
    else:
        extra = "medusa_head.odd" if case.layout == "medusa-whole" else "odd.weight"
    weights = case.write(tmp_path, {**case.theirs(), extra: torch.zeros(3)})
    assert detect(weights).left_over == (extra,)
    error = fault(weights)
    assert extra in error.found
    assert "not part of the layout" in error.found


def test_all_that_is_missing_is_listed(tmp_path: Path) -> None:
    case = CASES["dflash"]
    gone = ("layers.1.self_attn.q_norm.weight", "layers.1.mlp.up_proj.weight", "norm.weight")
    error = fault(case.write(tmp_path, {n: t for n, t in case.theirs().items() if n not in gone}))
    assert all(name in error.found for name in gone)
    assert "3 tensors are missing" in error.found
    report = inspect_checkpoint(tmp_path)
    assert not report.is_whole
    assert set(report.layout.missing) == set(gone)


@pytest.mark.parametrize(
    ("name", "tensor", "shape"),
    [
        ("eagle", "fc.weight", (WIDTH, WIDTH + 3)),
        ("eagle3", "lm_head.weight", (7, WIDTH)),
        ("dflash", "layers.0.mlp.gate_proj.weight", (41, WIDTH)),
        ("dspark-deepspec", "markov_head.markov_w2.weight", (VOCAB, 3)),
        ("mtp-qwen", "mtp.fc.weight", (WIDTH, WIDTH)),
        ("medusa", "0.0.linear.weight", (WIDTH, WIDTH - 1)),
    ],
)
def test_a_wrong_shape_says_both(name: str, tensor: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    case = CASES[name]
    error = fault(case.write(tmp_path, {**case.theirs(), tensor: torch.zeros(shape)}))
    assert tensor in str(error) or "no drafter" in error.found
    assert str(shape) in error.found or "no drafter" in error.found


def test_taps_and_columns_must_agree(tmp_path: Path) -> None:
    """Methods 11.2: the columns of fc over the width are the number of taps."""
    case = CASES["dflash"]
    nested = {**case.config["dflash_config"], "target_layer_ids": [1, 2, 4]}
    error = fault(case.write(tmp_path / "a", dflash_config=nested))
    assert "64 columns: 2 taps" in error.found
    assert error.expected.startswith("3")
    eagle = CASES["eagle3-angelslim"]
    assert "3 taps" in str(fault(eagle.write(tmp_path / "b", eagle_aux_hidden_state_layer_ids=[2, 5])))


@pytest.mark.parametrize(
    ("name", "keys", "found"),
    [
        ("eagle3-speculators", {"norm_before_fcs": True}, "unknown key 'norm_before_fcs'"),
        ("dflash-speculators", {"window_of_it": 3}, "unknown key 'window_of_it'"),
        ("dspark-speculators", {"markov_type": "rnn"}, "unknown key 'markov_type'"),
        ("mtp-speculators", {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2"),
        ("mtp-speculators", {"speculators_model_type": "mpt"}, "speculators_model_type is 'mpt'"),
        ("eagle3-eagle-config", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is False"),
        ("eagle3-eagle-config", {"eagle_config": {"use_aux_hidden_sates": True}}, "unknown key 'eagle_config.use_aux"),
        ("eagle", {"bias": False}, "bias is False"),
        ("eagle", {"hidden_size": "many"}, "hidden_size is 'many'"),
        ("eagle", {"num_attention_heads": 0}, "num_attention_heads is 0"),
        ("eagle", {"num_attention_heads": None}, "no num_attention_heads"),
        ("eagle", {"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
        ("eagle", {"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'"),
        ("eagle", {"rope_scaling": {"type": "linear"}}, "no rope_scaling.factor"),
        ("dflash", {"num_hidden_layers": 3}, "num_hidden_layers is 3"),
        ("dflash", {"block_size": None}, "no block_size"),
        ("dflash", {"layer_types": ["sliding_attention"] * 3, "sliding_window": 3}, "layer_types is"),
        ("dspark-deepspec", {"markov_head_type": "lstm"}, "markov_head_type is 'lstm'"),
        ("dspark-deepspec", {"target_layer_ids": None}, "no target_layer_ids"),
        ("dspark-deepspec", {"target_layer_ids": [1, -4]}, r"target_layer_ids is \[1, -4\]"),
        ("dspark-deepspec", {"markov_rank": 0}, "confidence_head_with_markov is True"),
    ],
)
def test_a_wrong_key_is_named(name: str, keys: dict[str, Any], found: str, tmp_path: Path) -> None:
    error = fault(CASES[name].write(tmp_path, **keys))
    assert re.search(found, error.found), error


@pytest.mark.parametrize(
    ("name", "keys", "reason"),
    [
        ("dflash", {"architectures": ["DFlash2DraftModel"]}, "DFlash-2"),
        ("dflash", {"dflash_config": {"target_layer_ids": [1, 4], "selector_rank": 256}}, "DFlash-2"),
        (
            "dflash",
            {"dflash_config": {"target_layer_ids": [1, 4], "projector_type": "domino"}},
            "projector is 'domino'",
        ),
        ("dflash", {"dflash_config": {"attention_mode": "kda"}}, "attention is kda"),
        ("dflash", {"dflash_config": {"input_embedding_scale": 45.25}}, "scales the embedding"),
        ("dflash", {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, r"scaled \(longrope\)"),
        ("eagle", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"scaled \(dynamic\)"),
        ("dflash", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}, "a part of each head"),
        ("dflash", {"rope_is_neox_style": False}, "neighbouring values"),
        ("dflash", {"hidden_act": "gelu_pytorch_tanh"}, "activated by gelu"),
        ("dspark-deepspec", {"architectures": ["Gemma4DSparkModel"]}, "Gemma"),
        ("dspark-deepspec", {"architectures": ["Lfm2DSparkDraftModel"]}, "neighbouring"),
        ("dflash-speculators", {"speculators_model_type": "dflash2"}, "DFlash-2"),
        ("eagle3-speculators", {"speculators_model_type": "peagle"}, "P-EAGLE"),
        ("eagle3-speculators", {"target_hidden_size": 4096}, "its target 4096"),
        ("mtp-qwen", {"dspark_block_size": 5}, "DeepSeek-V4"),
    ],
)
def test_what_no_source_computes_is_refused_with_the_reason(
    name: str, keys: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    error = fault(CASES[name].write(tmp_path, **keys))
    assert re.search(reason, error.found), error
    assert error.expected == "a drafter that a source of ours computes"


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("dflash", "candidate_selector.hidden_projection.weight", "DFlash-2"),
        ("dflash", "aux_hidden_norms.0.weight", "norms every tap"),
        ("dflash", "layers.0.self_attn.g_proj.weight", "has a gate"),
        ("dflash", "layers.1.mlp.experts.0.up_proj.weight", "mixture of experts"),
        ("eagle3", "midlayer.self_attn.sinks", "sinks"),
        ("eagle3", "midlayer.mlp.up_proj.weight_scale", "quantised"),
        ("mtp-deepseek", f"model.layers.{LAYERS}.self_attn.kv_a_proj_with_mqa.weight", "MLA"),
        ("mtp-qwen", "mtp.layers.0.mlp.experts.3.up_proj.weight", "mixture of experts"),
    ],
)
def test_tensors_of_other_networks_are_refused_with_the_reason(
    name: str, tensor: str, reason: str, tmp_path: Path
) -> None:
    case = CASES[name]
    error = fault(case.write(tmp_path, {**case.theirs(), tensor: torch.zeros(2)}))
    assert reason in error.found
    assert tensor in error.where


def test_gated_queries_are_refused(tmp_path: Path) -> None:
    """Twice the rows of q_proj (Qwen3-Next, Qwen3.5): half of them are a gate (methods 11.2)."""
    case, name = CASES["mtp-qwen"], "mtp.layers.0.self_attn.q_proj.weight"
    tensors = case.theirs()
    error = fault(case.write(tmp_path, {**tensors, name: tensors[name].repeat(2, 1)}))
    assert "has a gate" in error.found


def test_v4_drafters_are_not_taken_for_mtp(tmp_path: Path) -> None:
    """Methods 5, DANGER: the prefix `mtp.` and num_nextn_predict_layers do not tell."""
    case = CASES["mtp-qwen"]
    error = fault(case.write(tmp_path, {**case.theirs(), "mtp.2.markov_head.markov_w1.weight": torch.zeros(3, 2)}))
    assert "DSpark drafter of DeepSeek-V4" in error.found


class Code:
    """What a hostile pickle does when it is read."""

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return (Path.touch, (Path("owned"),))


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    case = CASES["medusa"]
    case.write(tmp_path)
    torch.save({**case.theirs(), "0.0.linear.weight": Code()}, tmp_path / case.file)
    assert "a pickle of more than tensors" in fault(str(tmp_path)).found
    (tmp_path / case.file).write_bytes(pickle.dumps(Code()))
    assert "cannot be read" in fault(str(tmp_path)).found or "more than tensors" in fault(str(tmp_path)).found
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.99])
def test_a_truncated_file_is_refused(name: str, keep: float, tmp_path: Path) -> None:
    case = CASES[name]
    case.write(tmp_path)
    whole = (tmp_path / case.file).read_bytes()
    (tmp_path / case.file).write_bytes(whole[: int(keep * len(whole)) if keep < 1 else int(keep)])
    error = fault(str(tmp_path))
    assert "cannot be read" in error.found
    assert case.file in error.where


@pytest.mark.parametrize(("what", "found"), [([drawn(3)], "a list"), ({"a": 1}, "'a' is a int"), ({}, "a dict")])
def test_a_pickle_of_other_things_is_refused(what: object, found: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CASES["eagle"].config))
    torch.save(what, tmp_path / "pytorch_model.bin")
    assert found in fault(str(tmp_path)).found


def test_old_pickles_and_shards_are_read(tmp_path: Path) -> None:
    case = CASES["eagle"]
    tensors, other = case.theirs(), tmp_path / "shards"
    case.write(tmp_path / "old")
    torch.save(tensors, tmp_path / "old" / case.file, _use_new_zipfile_serialization=False)
    names = sorted(tensors)
    case.write(other, {name: tensors[name] for name in names[:4]})
    (other / case.file).rename(other / "pytorch_model-1.bin")
    save({name: tensors[name] for name in names[4:]}, other / "pytorch_model-2.bin")
    places = {name: f"pytorch_model-{1 if name in names[:4] else 2}.bin" for name in names}
    (other / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    for folder in ("old", "shards"):
        found = read(tmp_path / folder).tensors
        assert all(torch.equal(found[name], tensor) for name, tensor in case.ours().items())
    (other / "pytorch_model-2.bin").unlink()
    assert "the file is missing" in fault(str(other)).found


def test_a_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    assert "no such directory" in fault(str(tmp_path / "absent")).found
    (tmp_path / "file.bin").write_bytes(b"x")
    assert "a file" in fault(str(tmp_path / "file.bin")).found
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    assert "no weight files" in fault(str(tmp_path / "model")).found
    save({"model.norm.weight": drawn(3)}, tmp_path / "model" / "model.safetensors")
    error = fault(str(tmp_path / "model"))
    assert "no drafter that is known: LlamaForCausalLM" in error.found
    assert "model.norm.weight" in error.found


def test_maps_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    case = CASES["eagle3"]
    wrong = torch.zeros(VOCAB, dtype=torch.bool)
    wrong[:20] = True
    found = read(case.write(tmp_path, {**case.theirs(), "t2d": wrong})).tensors
    with pytest.raises(CheckpointError, match="other tokens than t2d marks"):
        _ = found["d2t"]


class TestWrongVocabulary:
    def test_a_drafter_of_another_vocabulary_is_refused(self, tmp_path: Path) -> None:
        """Reports, row 42: another vocabulary drafts nonsense without a word."""
        weights = CASES["dspark-deepspec"].write(tmp_path, vocab_size=VOCAB + 5000)
        with pytest.raises(CheckpointError, match="not " + r"\("):
            open_weights(weights, 0, TARGET)
        borrowed = CASES["dflash"].write(tmp_path / "borrowed", vocab_size=VOCAB + 5000)
        with pytest.raises(CheckpointError, match=f"made for a vocabulary of {VOCAB + 5000} tokens") as error:
            open_weights(borrowed, 0, TARGET)
        assert f"and tiny has {VOCAB}" in error.value.found

    def test_padding_may_differ(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """Reports, row 41: the same tokenizer, and embeddings padded otherwise (Qwen: 151936 and 152064)."""
        case = CASES["dspark-deepspec"]
        made, rows = (
            case.theirs(),
            ("embed_tokens.weight", "lm_head.weight", "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"),
        )
        padded = {n: torch.cat((t, torch.full((3, t.shape[1]), 9.0))) if n in rows else t for n, t in made.items()}
        wide = case.write(tmp_path / "wide", padded, vocab_size=VOCAB + 3)
        with caplog.at_level(logging.WARNING):
            block = drafted("dspark", wide)
        assert "taken for the same but for padding" in caplog.text
        assert torch.equal(law_of(block), law_of(drafted("dspark", case.write(tmp_path / "own"))))

    def test_a_head_that_lacks_tokens_is_refused(self, tmp_path: Path) -> None:
        case = CASES["medusa"]
        short = {n: t[:-2] if n.endswith(".1.weight") else t for n, t in case.theirs().items()}
        with pytest.raises(CheckpointError, match=f"vocabulary of {VOCAB - 2} tokens"):
            open_weights(case.write(tmp_path, short), 0, TARGET)

    def test_a_reduced_vocabulary_of_a_padded_target_is_taken(self, tmp_path: Path) -> None:
        """Its ids lie below the padding: rows of zeros stand for what the target cannot say."""
        case = CASES["eagle3-speculators"]
        made = case.theirs()
        short = {**made, "embed_tokens.weight": made["embed_tokens.weight"][:-2], "t2d": made["t2d"][:-2]}
        layer = {**case.config["transformer_layer_config"], "vocab_size": VOCAB - 2}
        block = drafted("eagle", case.write(tmp_path / "a", short, transformer_layer_config=layer))
        assert torch.equal(law_of(block), law_of(drafted("eagle", case.write(tmp_path / "b"))))


@pytest.mark.parametrize(
    ("name", "keys", "found"),
    [("dflash", {"num_target_layers": 40}, "layers: 40"), ("dspark-deepspec", {"num_target_layers": 4}, "layers: 4")],
)
def test_a_drafter_of_another_target_is_refused(name: str, keys: dict[str, Any], found: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=found):
        open_weights(CASES[name].write(tmp_path, **keys), 0, TARGET)


class TestWithARecipe:
    def test_another_source_is_named(self, tmp_path: Path) -> None:
        weights = CASES["eagle3"].write(tmp_path)
        with pytest.raises(CheckpointError, match=r"weights of source eagle \(eagle3\)") as error:
            read_options(MedusaConfig(), weights)
        assert error.value.hint == "set draft.method: eagle3"

    def test_what_the_weights_are_is_not_up_to_the_recipe(self, tmp_path: Path) -> None:
        weights = CASES["dflash"].write(tmp_path)
        with pytest.raises(CheckpointError, match="num_layers is 2, and 3 in the recipe"):
            read_options(DFlashConfig(num_layers=3), weights)

    def test_how_they_are_read_is(self, tmp_path: Path) -> None:
        weights = CASES["dflash"].write(tmp_path)
        options = read_options(DFlashConfig(taps=(0, 3), layout="shifted", causal=True), weights)
        assert (options.taps, options.layout, options.causal) == ((0, 3), "shifted", True)
        assert options.block_size == BLOCK

    def test_a_mask_token_that_nobody_names_is_asked_for(self, tmp_path: Path) -> None:
        case = CASES["dflash"]
        weights = case.write(tmp_path, dflash_config={"target_layer_ids": [1, 4], "mask_token_id": None})
        with pytest.raises(CheckpointError, match="fills the unknown slots") as error:
            read_options(DFlashConfig(), weights)
        assert error.value.hint == "set draft.mask_token"
        assert read_options(DFlashConfig(mask_token=7), weights).mask_token == 7
        assert "mask_token: 0  # fill in" in inspect_checkpoint(weights).recipe()

    def test_positions_end_where_the_drafter_was_trained_to(self, tmp_path: Path) -> None:
        """Reports, row 40: longer texts go on undrafted; a recipe that knows better may say so."""
        weights = CASES["eagle3"].write(tmp_path, max_position_embeddings=64)
        assert read_options(EagleConfig(), weights).max_positions == 64
        assert read_options(EagleConfig(max_positions=200), weights).max_positions == 200

    def test_a_window_is_kept(self, tmp_path: Path) -> None:
        """Reports, row 64: windowed layers that run as full attention spoil all positions from the fifth on."""
        options = read_options(DFlashConfig(), CASES["dflash-window-of-all"].write(tmp_path))
        assert (options.window, options.windowed) == (3, (True, True))

    def test_another_k_than_the_trained_block_is_drafted_whole(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Reports, row 65: a block of another width spoils every position; the trained one is drafted, then cut."""
        weights = CASES["dspark-deepspec"].write(tmp_path)
        assert read_options(DSparkConfig(), weights).block_size == BLOCK
        with caplog.at_level(logging.WARNING):
            drafted("dspark", weights)
        assert f"draft.k is 3 of a block that holds {BLOCK}" in caplog.text

    def test_a_block_is_never_widened(self, tmp_path: Path) -> None:
        """Reports, row 65, the other way."""
        weights = CASES["dflash"].write(tmp_path)
        from specflow.draft.sources.dflash import SOURCE

        with pytest.raises(SpecFlowError, match="holds 4 draft tokens"):
            SOURCE.build(DFlashConfig(weights=weights), SourceContext(TARGET, 7, "parallel", "greedy"))


def test_the_anchor_predicts_where_old_files_leave_it_open(tmp_path: Path) -> None:
    """Old speculators files do not say which slot predicts first; the tokens they propose do (methods 8.7)."""
    case = CASES["dspark-speculators"]
    says = case.config["speculators_config"]
    ways = [{"proposal_type": "greedy", "speculative_tokens": BLOCK}]
    kept = detect(case.write(tmp_path / "a", sample_from_anchor=None)).options["layout"]
    shifted = {**says, "proposal_methods": ways}
    whole = detect(case.write(tmp_path / "b", sample_from_anchor=None, speculators_config=shifted)).options["layout"]
    silent = detect(case.write(tmp_path / "c", sample_from_anchor=None, speculators_config=None)).options["layout"]
    assert (kept, whole, silent) == ("fill_in", "shifted", "shifted")


@pytest.mark.parametrize("name", ["medusa", "medusa-tgi"])
def test_medusas_weight_file_alone_is_enough(name: str, tmp_path: Path) -> None:
    """The number of heads and of their layers is that of the tensors."""
    case = CASES[name]
    case.write(tmp_path)
    (tmp_path / "config.json").unlink()
    assert read(tmp_path).options == case.options


def test_heads_of_vllm_without_biases_have_zero_ones(tmp_path: Path) -> None:
    case = CASES["medusa-vllm"]
    plain = {name: tensor for name, tensor in case.theirs().items() if not name.endswith("bias")}
    found = read(case.write(tmp_path, plain, medusa_fc_bias=False)).tensors
    assert torch.equal(found["1.0.linear.bias"], torch.zeros(WIDTH))


def test_heads_of_vllm_may_share_the_targets_own(tmp_path: Path) -> None:
    case = CASES["medusa-vllm"]
    kept = {name: tensor for name, tensor in case.theirs().items() if name != "lm_heads.1.weight"}
    made = read(case.write(tmp_path, kept, original_lm_head=True))
    assert made.options == {"num_heads": 2, "num_layers": 1, "own_heads": False}


def test_several_blocks_share_what_stands_around_them(tmp_path: Path) -> None:
    """Qwen's `mtp.layers.{i}`: one fc, one set of norms."""
    case = CASES["mtp-qwen"]
    made = case.theirs()
    more = {n.replace("layers.0.", "layers.1."): t + 1 for n, t in made.items() if n.startswith("mtp.layers.0.")}
    found = read(case.write(tmp_path, {**made, **more}))
    assert found.options["num_modules"] == 2
    assert torch.equal(found.tensors["mtp.0.fc.weight"], found.tensors["mtp.1.fc.weight"])
    name = "layers.0.mlp.up_proj.weight"
    assert torch.equal(found.tensors[f"mtp.1.{name}"], found.tensors[f"mtp.0.{name}"] + 1)


def test_identity_is_that_of_the_content(tmp_path: Path) -> None:
    case = CASES["eagle3"]
    first, again = case.write(tmp_path / "a"), case.write(tmp_path / "b")
    assert weights_identity(first, 0) == weights_identity(again, 1)
    made = case.theirs()
    other = case.write(tmp_path / "c", {**made, "norm.weight": made["norm.weight"] + 1})
    assert weights_identity(other, 0) != weights_identity(first, 0)


def test_native_checkpoints_are_read_as_they_stand(tmp_path: Path) -> None:
    made: dict[str, dict[str, Any]] = {
        "medusa": {"num_heads": 2},
        "mtp": {"order": "hidden_first"},
        "dspark": {"num_layers": 1},
        "eagle": {"variant": 1},
    }
    for source, options in made.items():
        drafter, folder = stored(source, **options), tmp_path / source
        folder.mkdir()
        save(drafter.tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(options))
        found = read(folder)
        assert (found.layout.name, found.source, dict(found.options)) == ("native", source, options)
        assert set(found.tensors) == set(drafter.tensors)

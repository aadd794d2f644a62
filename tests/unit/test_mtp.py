"""MTP as a source: its published names, its identity, and text that equals vanilla's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dense_steps import FEATURES, TARGET, TEXT, Dense, Stage, network_of, stage
from pydantic import ValidationError
from safetensors.torch import save_file
from stepping import NARROW, PROMPTS, SAMPLINGS, plain_embedding_target, same_text
from tiny import tiny_engine
from torch import Tensor

from specflow.draft.base import SourceContext
from specflow.draft.chain import ChainDrafter
from specflow.draft.feature_model import FeatureModel
from specflow.draft.sources.mtp import SOURCE, MTPConfig, build
from specflow.errors import CheckpointError
from specflow.target.transformer import NativeTarget
from specflow.types import Sampling


def tensors(target: NativeTarget, prefix: str = "mtp") -> dict[str, Tensor]:
    """A checkpoint under the names of Qwen3-Next."""
    shape, numbers = target.info.shape, torch.Generator().manual_seed(4)
    width, layer = shape.hidden_size, f"{prefix}.layers.0"
    inner, outer = shape.num_heads * shape.head_width, shape.num_kv_heads * shape.head_width
    sizes: dict[str, tuple[int, ...]] = {
        f"{prefix}.fc.weight": (width, 2 * width),
        f"{prefix}.pre_fc_norm_hidden.weight": (width,),
        f"{prefix}.pre_fc_norm_embedding.weight": (width,),
        f"{prefix}.norm.weight": (width,),
        f"{layer}.input_layernorm.weight": (width,),
        f"{layer}.post_attention_layernorm.weight": (width,),
        f"{layer}.self_attn.q_proj.weight": (inner, width),
        f"{layer}.self_attn.k_proj.weight": (outer, width),
        f"{layer}.self_attn.v_proj.weight": (outer, width),
        f"{layer}.self_attn.o_proj.weight": (width, inner),
        f"{layer}.mlp.gate_proj.weight": (shape.mlp_size, width),
        f"{layer}.mlp.up_proj.weight": (shape.mlp_size, width),
        f"{layer}.mlp.down_proj.weight": (width, shape.mlp_size),
    }
    return {name: torch.randn(size, generator=numbers) * size[-1] ** -0.5 for name, size in sizes.items()}


def saved(path: Path, found: dict[str, Tensor]) -> str:
    save_file(found, path / "model.safetensors")
    return str(path)


def test_a_checkpoint_of_published_names_drafts_by_its_formulas(tmp_path: Path) -> None:
    found = tensors(TARGET)
    config = MTPConfig(weights=saved(tmp_path, found), offset_norms=True)
    scene = stage(config, [0])
    scene.commit([9])
    tokens = TEXT[1:2, :3]

    def whole(name: str, size: tuple[int, ...]) -> Tensor:
        tensor = found[name].double()
        assert tensor.shape == size
        return tensor + 1.0 if "norm" in name else tensor

    text = torch.cat((TEXT[0, :10], tokens[0]))
    expected = Dense(config, whole).trained_logits(text, FEATURES[0, :9], 3)[:, -1]
    assert (scene.draft(tokens)[0] - expected).abs().max() < 1e-6  # 1 + w is a float32 sum


@pytest.mark.parametrize("own", [False, True], ids=["borrowed", "own"])
def test_a_reduced_vocabulary_drafts_its_columns_of_the_whole(tmp_path: Path, own: bool) -> None:
    """FastMTP's compressed vocabulary: the same network, fewer rows of the head."""
    found, ids = tensors(TARGET), torch.tensor([0, 3, 4, 9, 20])
    whole = stage(MTPConfig(weights=saved(tmp_path, found)), [0])
    whole.commit([9])
    rows = (
        {"lm_head.weight": TARGET.score(torch.eye(TARGET.info.hidden_size).double()[None])[0].t()[ids]} if own else {}
    )
    small = tmp_path / "small"
    small.mkdir()
    weights = saved(small, {**found, **rows, "d2t": ids - torch.arange(5)})
    scene = stage(MTPConfig(weights=weights, draft_vocab_size=5, own_head=own), [0])
    scene.commit([9])
    tokens = TEXT[1:2, :3]
    assert torch.allclose(scene.draft(tokens), whole.draft(tokens)[..., ids], atol=1e-9)


@pytest.mark.parametrize("change", ["extra", "missing"])
def test_a_checkpoint_of_other_tensors_is_refused(tmp_path: Path, change: str) -> None:
    found = tensors(TARGET)
    if change == "extra":
        found["mtp.layers.1.mlp.up_proj.weight"] = torch.zeros(2)
    else:
        del found["mtp.fc.weight"]
    config = MTPConfig(weights=saved(tmp_path, found))
    with pytest.raises(CheckpointError, match=r"layers\.1|fc\.weight"):
        build(config, SourceContext(target=TARGET, k=2))


def test_several_modules_have_their_own_parameters() -> None:
    network = network_of(MTPConfig(num_modules=3))
    own = [dict(step.named_parameters()) for step in network.steps]
    for name in own[0]:
        first, second, third = (parameters[name] for parameters in own)
        assert len({part.data_ptr() for part in (first, second, third)}) == 3
        assert not torch.equal(first, second)
        assert not torch.equal(second, third)


def test_the_config_says_the_norms_it_reads_before() -> None:
    assert network_of(MTPConfig(hidden="pre_norm")).needs.hidden_pre
    assert network_of(MTPConfig()).needs.hidden_post


def test_unrolled_goes_with_one_module() -> None:
    with pytest.raises(ValidationError, match="set one of them"):
        MTPConfig(unrolled=3, num_modules=2)


def test_depth_ends_with_the_modules() -> None:
    drafter = build(MTPConfig(num_modules=3), SourceContext(target=TARGET, k=8))
    assert drafter.num_nodes == 3
    assert build(MTPConfig(), SourceContext(target=TARGET, k=8)).num_nodes == 8


@pytest.mark.parametrize("options", [{}, {"num_modules": 4}, {"unrolled": 4}], ids=["one", "four", "unrolled"])
def test_a_module_that_says_what_the_target_says_is_always_right(tmp_path: Path, options: dict[str, int]) -> None:
    """The target's layers add nothing, so the next token follows from the embedding, which fc hands through."""
    target = plain_embedding_target()
    width, found = target.info.hidden_size, {}
    count = options.get("num_modules", 1)
    for prefix in [f"mtp.{index}" for index in range(count)] if count > 1 else ["mtp"]:
        part = tensors(target, prefix)
        part[f"{prefix}.fc.weight"] = torch.eye(width, 2 * width)
        part[f"{prefix}.pre_fc_norm_embedding.weight"] = torch.ones(width)
        part[f"{prefix}.norm.weight"] = target._norm.gain.float() / width**0.5
        part[f"{prefix}.layers.0.self_attn.o_proj.weight"].zero_()
        part[f"{prefix}.layers.0.mlp.down_proj.weight"].zero_()
        found |= part
    config = MTPConfig(weights=saved(tmp_path, found), **options)  # type: ignore[arg-type]
    drafter = build(config, SourceContext(target=target, k=4, draw="coupled"))
    for sampling in SAMPLINGS:
        for done in tiny_engine(drafter, k=4, batch=4, target=target).generate(PROMPTS, sampling):
            assert done.counts.num_accepted_draft_tokens == done.counts.num_draft_tokens > 0


@pytest.mark.parametrize(
    "options", [{}, {"num_modules": 3}, {"unrolled": 5, "zero_first": True}], ids=["one", "three", "unrolled"]
)
@pytest.mark.parametrize("shape", ["chain", "beam", "static"])
def test_text_equals_vanilla(options: dict[str, int], shape: str) -> None:
    config = MTPConfig(shape=shape, **NARROW[shape], **options)  # type: ignore[arg-type]
    same_text(lambda k: build(config, SourceContext(target=TARGET, k=k, draw="coupled")), TARGET)


def test_one_drafter_serves_call_after_call() -> None:
    drafter = build(MTPConfig(num_modules=2), SourceContext(target=TARGET, k=2, draw="coupled"))
    assert isinstance(drafter, ChainDrafter)
    engine, plain = tiny_engine(drafter, k=2, batch=2, target=TARGET), tiny_engine(k=0, target=TARGET)
    for prompts in (PROMPTS, PROMPTS[:1], PROMPTS[2:]):
        sampling = Sampling(max_new_tokens=9, ignore_eos=True)
        assert [d.tokens for d in engine.generate(prompts, sampling)] == [
            d.tokens for d in plain.generate(prompts, sampling)
        ]


def test_positions_end_where_it_was_trained_to() -> None:
    model = FeatureModel(network_of(MTPConfig()), TARGET, max_positions=20)
    assert model.most_positions == 20
    assert Stage(model, [0]).model.most_depth >= 20
    drafter = build(MTPConfig(max_positions=12), SourceContext(target=TARGET, k=4, draw="coupled"))
    done = tiny_engine(drafter, k=4, target=TARGET).generate([[3] * 11], Sampling(max_new_tokens=20, ignore_eos=True))
    assert done[0].counts.num_draft_tokens == 0


def test_it_says_what_it_reads_and_offers() -> None:
    assert SOURCE.dependency == ("ar",)
    assert "features" in SOURCE.reads
    assert {"logits", "confidence"} <= set(SOURCE.offers)

"""EAGLE as a source: published names, taps, its identity, confidence, and text that equals vanilla's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dense_steps import FEATURES, TARGET, TEXT, Dense, network_of, stage
from pydantic import ValidationError
from safetensors.torch import save_file
from stepping import NARROW, PROMPTS, SAMPLINGS, plain_embedding_target, same_text
from tiny import VOCAB, tiny_engine
from torch import Tensor

from specflow.draft.base import SourceContext
from specflow.draft.sources import eagle, mtp
from specflow.draft.sources.eagle import SOURCE, EagleConfig, build, default_taps
from specflow.errors import CheckpointError, GraphError
from specflow.graph import DecodeGraph
from specflow.noise import RoundNoise
from specflow.recipe import parse_recipe
from specflow.recipe_draft import DraftSection
from specflow.types import BlockShape, DraftBudget, Sampling

REDUCED = torch.arange(1, VOCAB, 3)


def block_sizes(shape: BlockShape, prefix: str, entered: int) -> dict[str, tuple[int, ...]]:
    width = shape.hidden_size
    inner, outer = shape.num_heads * shape.head_width, shape.num_kv_heads * shape.head_width
    return {
        f"{prefix}.post_attention_layernorm.weight": (width,),
        f"{prefix}.self_attn.q_proj.weight": (inner, entered),
        f"{prefix}.self_attn.k_proj.weight": (outer, entered),
        f"{prefix}.self_attn.v_proj.weight": (outer, entered),
        f"{prefix}.self_attn.o_proj.weight": (width, inner),
        f"{prefix}.mlp.gate_proj.weight": (shape.mlp_size, width),
        f"{prefix}.mlp.up_proj.weight": (shape.mlp_size, width),
        f"{prefix}.mlp.down_proj.weight": (width, shape.mlp_size),
    }


def first_sizes(shape: BlockShape) -> dict[str, tuple[int, ...]]:
    """EAGLE-1 as published."""
    width = shape.hidden_size
    return {"fc.weight": (width, 2 * width), "fc.bias": (width,), **block_sizes(shape, "layers.0", width)}


def third_sizes(shape: BlockShape) -> dict[str, tuple[int, ...]]:
    """EAGLE-3 as published, with its vocabulary."""
    width = shape.hidden_size
    return {
        "fc.weight": (width, 3 * width),
        "norm.weight": (width,),
        "lm_head.weight": (len(REDUCED), width),
        "midlayer.hidden_norm.weight": (width,),
        "midlayer.input_layernorm.weight": (width,),
        **block_sizes(shape, "midlayer", 2 * width),
    }


def made(sizes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(6)
    return {name: torch.randn(size, generator=numbers) * size[-1] ** -0.5 for name, size in sizes.items()}


def saved(path: Path, found: dict[str, Tensor]) -> str:
    save_file(found, path / "model.safetensors")
    return str(path)


def vocabulary() -> dict[str, Tensor]:
    offsets = REDUCED - torch.arange(len(REDUCED))
    return {"d2t": offsets, "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, REDUCED, True)}


@pytest.mark.parametrize("variant", [1, 3])
def test_a_checkpoint_of_published_names_drafts_by_its_formulas(tmp_path: Path, variant: int) -> None:
    shape = TARGET.info.shape
    found = made(first_sizes(shape) if variant == 1 else third_sizes(shape))
    stored = found | (vocabulary() if variant == 3 else {})
    config = EagleConfig(
        variant=variant,  # type: ignore[arg-type]
        weights=saved(tmp_path, stored),
        **({} if variant == 1 else {"taps": (0, 1, -1), "draft_vocab_size": len(REDUCED)}),  # type: ignore[arg-type]
    )
    scene = stage(config, [0])
    scene.commit([9])
    tokens = TEXT[1:2, :3]

    def take(name: str, size: tuple[int, ...]) -> Tensor:
        assert found[name].shape == size
        return found[name].double()

    expected = Dense(config, take).trained_logits(torch.cat((TEXT[0, :10], tokens[0])), FEATURES[0, :9], 3)[:, -1]
    assert (scene.draft(tokens)[0] - expected).abs().max() < 1e-9
    if variant == 3:
        assert scene.model.vocabulary is not None
        assert torch.equal(scene.model.vocabulary.to_target, REDUCED)


def test_a_checkpoint_with_embedding_and_head_uses_its_own(tmp_path: Path) -> None:
    """DeepSpec stores both, over the whole vocabulary and without a map."""
    shape = TARGET.info.shape
    sizes = third_sizes(shape) | {"lm_head.weight": (VOCAB, shape.hidden_size)}
    found = made(sizes | {"embed_tokens.weight": (VOCAB, shape.hidden_size)})
    plain = {name: tensor for name, tensor in found.items() if name not in ("embed_tokens.weight", "lm_head.weight")}
    for folder in ("own", "borrowed"):
        (tmp_path / folder).mkdir()
    context = SourceContext(target=TARGET, k=3)
    drafts = []
    for weights in (saved(tmp_path / "own", found), saved(tmp_path / "borrowed", plain)):
        model: Any = build(EagleConfig(weights=weights), context)._model  # type: ignore[attr-defined]
        assert model.vocabulary is None
        drafts.append(model.network)
    own, borrowed = drafts
    rows = torch.randn(1, 2, shape.hidden_size, dtype=torch.float64)
    assert torch.equal(own.score(rows), rows @ found["lm_head.weight"].double().T)
    assert torch.equal(borrowed.score(rows), TARGET.score(rows))
    ids = torch.tensor([[5, -1]])
    assert torch.equal(own.embed(ids)[0, 0], found["embed_tokens.weight"][5].double())
    assert torch.equal(borrowed.embed(ids), TARGET.embed(ids))


def test_left_over_tensors_are_refused(tmp_path: Path) -> None:
    found = made(first_sizes(TARGET.info.shape) | {"layers.0.input_layernorm.weight": (32,)})
    with pytest.raises(CheckpointError, match="input_layernorm"):
        build(EagleConfig(variant=1, weights=saved(tmp_path, found)), SourceContext(target=TARGET, k=3))


def test_default_taps_are_the_layers_before_those_entered() -> None:
    assert default_taps(32) == (1, 15, 28)
    assert default_taps(30) == (1, 14, 26)
    for num_layers in range(1, 8):
        assert all(0 <= tap < num_layers for tap in default_taps(num_layers))
    assert network_of(EagleConfig()).needs.taps == (1, 0, 0)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"variant": 1, "taps": (1,)}, "taps: options of variant 3"),
        ({"variant": 1, "fc_norm": True}, "fc_norm: options of variant 3"),
        ({"fc_norm": True, "norm_before_fc": True}, "set one of them"),
        ({"variant": 2}, "variant"),
        ({"bias": False}, "bias: an option of variant 1"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], found: str) -> None:
    with pytest.raises(ValidationError, match=found):
        EagleConfig(**options)


@pytest.mark.parametrize("source", [eagle, mtp], ids=["eagle", "mtp"])
def test_heads_must_share_keys_evenly(source: Any) -> None:
    with pytest.raises(GraphError, match="3 query heads and 2"):
        source.build(source.SOURCE.config(num_heads=3), SourceContext(target=TARGET, k=2))


def test_a_first_eagle_that_says_what_the_target_says_is_always_right(tmp_path: Path) -> None:
    """The target's layers add nothing; fc hands the embedding through, scaled like the final norm does."""
    target = plain_embedding_target()
    width = target.info.hidden_size
    found = made(first_sizes(target.info.shape))
    gain = target._norm.gain.float() / width**0.5
    found["fc.weight"] = torch.cat((gain.diag(), torch.zeros(width, width)), dim=1)
    for name in ("fc.bias", "layers.0.self_attn.o_proj.weight", "layers.0.mlp.down_proj.weight"):
        found[name].zero_()
    config = EagleConfig(variant=1, weights=saved(tmp_path, found))
    drafter = build(config, SourceContext(target=target, k=5, draw="coupled"))
    for done in tiny_engine(drafter, k=5, batch=4, target=target).generate(PROMPTS, SAMPLINGS[0]):
        assert done.counts.num_accepted_draft_tokens == done.counts.num_draft_tokens > 0


def test_a_third_eagle_that_says_what_the_target_says_is_always_right(tmp_path: Path) -> None:
    """Its embedding reaches the head through attention alone: sharp heads let every row see its own token only."""
    target = plain_embedding_target()
    info = target.info
    width, wide, sharp = info.hidden_size, info.shape.head_width, 60.0
    found = made(third_sizes(info.shape))
    del found["lm_head.weight"]
    read, nothing = torch.eye(width), torch.zeros(width, width)
    for part in "qkv":
        found[f"midlayer.self_attn.{part}_proj.weight"] = torch.cat((read, nothing), dim=1)
    for part in "qk":
        found[f"midlayer.self_attn.{part}_norm.weight"] = torch.full((wide,), sharp)
    found["midlayer.self_attn.o_proj.weight"] = torch.eye(width)
    found["midlayer.input_layernorm.weight"] = torch.ones(width)
    found["norm.weight"] = target._norm.gain.float() / width**0.5
    for name in ("fc.weight", "midlayer.mlp.down_proj.weight"):
        found[name].zero_()
    config = EagleConfig(
        weights=saved(tmp_path, found), num_kv_heads=info.shape.num_heads, norm_before_residual=False, norm_output=False
    )
    drafter = build(config, SourceContext(target=target, k=1, draw="coupled"))
    for done in tiny_engine(drafter, k=1, batch=4, target=target).generate(PROMPTS, SAMPLINGS[0]):
        assert done.counts.num_accepted_draft_tokens == done.counts.num_draft_tokens > 0


@pytest.mark.parametrize("shape", ["chain", "beam", "static"])
@pytest.mark.parametrize(
    "options", [{"variant": 1}, {"fc_norm": True, "norm_output": True, "draft_vocab_size": 25}], ids=["first", "third"]
)
def test_text_equals_vanilla(options: dict[str, Any], shape: str) -> None:
    config = EagleConfig(shape=shape, **NARROW[shape], **options)  # type: ignore[arg-type]
    same_text(lambda k: build(config, SourceContext(target=TARGET, k=k, draw="coupled")), TARGET)


def test_a_confidence_head_says_how_likely_tokens_are_to_stand() -> None:
    context = SourceContext(target=TARGET, k=4, confidence=True)
    drafter = build(EagleConfig(confidence_head=True), context)
    tiny_engine(drafter, k=4, batch=2, target=TARGET).generate(PROMPTS[:2], Sampling(max_new_tokens=1))
    noise = RoundNoise([1, 2], [3, 1], TARGET.info.device)
    block = drafter.propose([4, 5], DraftBudget((4, 3)), noise)
    assert block is not None
    assert block.confidence is not None
    assert block.confidence_from == "prefix"
    assert bool(((block.confidence > 0) & (block.confidence < 1)).all())


def test_a_confidence_head_over_eagle_is_one_line_of_a_recipe() -> None:
    for method, fixed in SOURCE.presets().items():
        draft = {"method": method, "k": 3, "confidence_head": True}
        recipe = parse_recipe({"name": "x", "draft": draft, "verify": {"rule": "match"}}, "here")
        DecodeGraph.from_recipe(recipe).check()
        assert isinstance(recipe.draft, DraftSection)
        assert recipe.draft.method == method
        options = recipe.draft.options
        assert isinstance(options, EagleConfig)
        assert options.confidence_head
        assert {name: getattr(options, name) for name in fixed} == fixed

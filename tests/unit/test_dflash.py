"""DFlash: the backbone against dense formulas, its context rows, its slots, and texts that equal vanilla's."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from dense_block import FEATURES, INFO, TAPS, TARGET, WIDTH, Stage, dense_logits, network
from pydantic import ValidationError
from safetensors.torch import save_file
from tiny import VOCAB, tiny_engine
from torch import Tensor

from specflow.draft.backbone_options import BackboneOptions, spread_taps
from specflow.draft.base import Drafter, SourceContext
from specflow.draft.nn.weights import SeededTensors
from specflow.draft.sources.dflash import DFlashConfig, build
from specflow.errors import CheckpointError, GraphError
from specflow.law import Reduced
from specflow.types import DraftBudget, Features, Observation, Sampling

K = 5
FORMS: dict[str, dict[str, object]] = {
    "bidirectional": {},
    "causal": {"causal": True},
    "shifted": {"layout": "shifted"},
    "window": {"window": 5},
    "window-1": {"window": 1},
    "window-both-ways": {"window": 3, "causal": False},
    "window-from-anchor": {"window": 4, "window_from": "anchor"},
    "window-from-anchor-both-ways": {"window": 3, "window_from": "anchor", "causal": False},
    "mixed-layers": {"window": 4, "layer_types": ("full_attention", "sliding_attention")},
    "own-sizes": {
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_width": 12,
        "mlp_size": 20,
        "rope_theta": 500.0,
        "eps": 0.01,
    },
    "scaled-and-capped": {"logit_scale": 0.5, "logit_cap": 3.0},
    "mask-token": {"mask_token": 7, "layout": "shifted", "seed": 4},
}
PROMPTS = [[5, 9, 33, 17] * 3, [7], [11] * 20, [3, 4, 5]]


def options(**extra: object) -> BackboneOptions:
    return BackboneOptions(**{"taps": TAPS, "num_layers": 2, **extra})  # type: ignore[arg-type]


def drafter(k: int, draw: str = "coupled", **extra: object) -> Drafter:
    config = DFlashConfig(**{"taps": TAPS, "num_layers": 2, **extra})  # type: ignore[arg-type]
    return build(config, SourceContext(TARGET, k, "parallel", draw))  # type: ignore[arg-type]


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_drafts_are_those_of_the_dense_formulas_in_every_round(form: dict[str, object]) -> None:
    """Ragged rows, mixed acceptance, and the context rows of all rounds against a computation from scratch."""
    rng, said = random.Random(1), options(**form)
    stage = Stage(network(K, **form), [0, 1, 2])
    stage.commit([40, 3, 1])
    for _ in range(6):
        anchors = [rng.randrange(VOCAB) for _ in stage.requests]
        got = stage.draft(anchors)
        for row, (request, length) in enumerate(zip(stage.requests, stage.lengths, strict=True)):
            expected = dense_logits(said, said.slots(K), FEATURES[request, :length], anchors[row])
            torch.testing.assert_close(got[row], expected, atol=1e-5, rtol=0)
        stage.commit([rng.randint(1, K + 1) for _ in anchors])


def test_rounds_without_a_draft_and_moved_rows_keep_the_context() -> None:
    stage = Stage(network(K), [0, 1, 2])
    stage.commit([33, 70, 2])
    stage.commit([1, 40, 3])
    stage.select([2, 0])
    stage.commit([2, 1])
    stage.draft([4, 4])
    stage.restart(1, 3)
    stage.commit([1, 9])
    got = stage.draft([6, 8])
    for row, (request, anchor) in enumerate(((2, 6), (3, 8))):
        expected = dense_logits(options(), K + 1, FEATURES[request, : stage.lengths[row]], anchor)
        torch.testing.assert_close(got[row], expected, atol=1e-5, rtol=0)


def test_drafting_twice_says_the_same_and_leaves_nothing() -> None:
    stage, other = Stage(network(K), [0, 1]), Stage(network(K), [0, 1])
    for each in (stage, other):
        each.commit([5, 9])
    first = stage.draft([3, 4])
    assert not torch.equal(stage.draft([8, 1]), first)
    assert torch.equal(stage.draft([3, 4]), first)
    for each in (stage, other):
        each.commit([1, 2])
    torch.testing.assert_close(stage.draft([3, 4]), other.draft([3, 4]))


def test_context_ends_before_the_anchor() -> None:
    """Features of the anchor change nothing in its own round, and something in the next."""
    stage, odd = Stage(network(K), [0]), Stage(network(K), [0])
    stage.commit([6])
    odd.commit([6])
    wide = {tap: FEATURES[0, :7, index].unsqueeze(0) for index, tap in enumerate(TAPS)}
    moved = Stage(network(K), [0])
    moved.model.observe(Observation(((3,) * 6,), (0,), (6,), Features(wide)), [0])
    moved.cache.keep([6])
    assert torch.equal(moved.draft([5]), stage.draft([5]))
    stage.commit([1])
    assert (stage.draft([5]) - odd.draft([5])).abs().max() > 1e-3
    odd.cache.keep([1])
    with pytest.raises(AssertionError, match="context rows"):
        odd.draft([5])


def test_a_window_makes_blocks_the_same_at_every_offset() -> None:
    """Rotary positions are relative: where only the last positions count, it does not matter how many came before.

    A position that is one too early or late shows as acceptance that falls with context (ik_llama #2296).
    """
    window, local = 6, FEATURES[0, 50:60]
    for window_from in ("row", "anchor"):
        drafts = []
        for offset in (0, 1, 37, 90):
            # Sliding layers see no further than one window each; only fused rows are seen, so it does not add up.
            stage = Stage(network(K, window=window, window_from=window_from), [1])
            if offset:
                stage.commit([offset])
            taps = {tap: local[:, index].unsqueeze(0) for index, tap in enumerate(TAPS)}
            count = len(local)
            stage.model.observe(Observation(((3,) * count,), (offset,), (count,), Features(taps)), [0])
            stage.cache.keep([count])
            drafts.append(stage.draft([9]))
        for other in drafts[1:]:
            torch.testing.assert_close(other, drafts[0], atol=1e-4, rtol=0)


def test_a_longer_context_is_seen_without_a_window() -> None:
    near, far = Stage(network(K), [0]), Stage(network(K), [1])
    near.commit([30])
    far.commit([30])
    assert (near.draft([9]) - far.draft([9])).abs().max() > 1e-3


@pytest.mark.parametrize(("layout", "slots"), [("fill_in", K + 1), ("shifted", K)])
def test_a_slot_predicts_its_own_position_or_the_next(layout: str, slots: int) -> None:
    """With branches that add nothing, a slot says what its own input row says: known token by token."""
    net = network(K, layout=layout)
    for layer in net.layers.layers:
        for linear in (layer.out, layer.down):
            linear.weight.data.zero_()
    stage = Stage(net, [0])
    stage.commit([4])
    anchor, mask = (
        TARGET.score(net.layers.norm(TARGET.embed(torch.tensor([[token]]))))[0, 0] for token in (9, VOCAB - 1)
    )
    got = stage.draft([9])[0]
    rows = [mask] * K if layout == "fill_in" else [anchor, *[mask] * (K - 1)]
    torch.testing.assert_close(got, torch.stack(rows))
    assert options(layout=layout).slots(K) == slots
    assert not torch.allclose(anchor, mask)


def test_repeated_blocks_have_parameters_of_their_own() -> None:
    layers = network(K, num_layers=3).layers.layers
    weights = [layer.qkv.weight for layer in layers]
    assert len({weight.data_ptr() for weight in weights}) == 3
    assert not torch.equal(weights[0], weights[1])


@pytest.mark.parametrize(
    ("num_layers", "num_target_layers", "expected"),
    [
        (5, 36, (1, 9, 17, 25, 33)),
        (5, 24, (1, 6, 11, 16, 21)),
        (5, 40, (1, 10, 19, 28, 37)),
        (5, 32, (1, 8, 15, 22, 29)),
        (1, 36, (18,)),
        (5, 5, (1, 2)),
        (5, 2, (0,)),
        (1, 2, (0,)),
        (2, 1, (0,)),
    ],
)
def test_taps_are_spread_evenly(num_layers: int, num_target_layers: int, expected: tuple[int, ...]) -> None:
    assert spread_taps(num_layers, num_target_layers) == expected


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("form", [{}, {"window": 4}, {"layout": "shifted", "block_size": 8}], ids=str)
def test_text_is_vanillas(form: dict[str, object], temperature: float, batch: int) -> None:
    """Prompts on both sides of a small window, whose boundary every request crosses."""
    sampling = Sampling(max_new_tokens=30, ignore_eos=True, seed=5, temperature=temperature)
    expected = tiny_engine(target=TARGET, batch=batch).generate(PROMPTS, sampling)
    for k in (1, 4, 7):
        got = tiny_engine(drafter(k, **form), k=k, batch=batch, target=TARGET).generate(PROMPTS, sampling)
        assert [each.tokens for each in got] == [each.tokens for each in expected]
        assert all(each.counts.num_draft_tokens > 0 for each in got)


def test_a_tree_over_the_marginals_is_vanilla_too() -> None:
    sampling = Sampling(max_new_tokens=20, ignore_eos=True, seed=5, temperature=0.9)
    expected = tiny_engine(target=TARGET).generate(PROMPTS, sampling)
    tree = drafter(4, shape="best_first", nodes=12)
    got = tiny_engine(tree, k=4, batch=4, target=TARGET).generate(PROMPTS, sampling)
    assert [each.tokens for each in got] == [each.tokens for each in expected]
    assert sum(each.counts.num_draft_tokens for each in got) > 100


def checkpoint(path: Path, tensors: Mapping[str, Tensor]) -> str:
    path.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return str(path)


def published(num_layers: int = 2) -> dict[str, Tensor]:
    """All tensors of a DFlash checkpoint under the names of methods 7.4, with the values of the random ones."""
    shape, draw = INFO.shape, SeededTensors(0).draw
    inner, outer = shape.num_heads * shape.head_width, shape.num_kv_heads * shape.head_width
    sizes: dict[str, tuple[int, ...]] = {
        "fc": (WIDTH, len(TAPS) * WIDTH),
        "hidden_norm": (WIDTH,),
        "norm": (WIDTH,),
    }
    for index in range(num_layers):
        sizes |= {
            f"layers.{index}.self_attn.q_proj": (inner, WIDTH),
            f"layers.{index}.self_attn.k_proj": (outer, WIDTH),
            f"layers.{index}.self_attn.v_proj": (outer, WIDTH),
            f"layers.{index}.self_attn.o_proj": (WIDTH, inner),
            f"layers.{index}.self_attn.q_norm": (shape.head_width,),
            f"layers.{index}.self_attn.k_norm": (shape.head_width,),
            f"layers.{index}.mlp.gate_proj": (shape.mlp_size, WIDTH),
            f"layers.{index}.mlp.up_proj": (shape.mlp_size, WIDTH),
            f"layers.{index}.mlp.down_proj": (WIDTH, shape.mlp_size),
            f"layers.{index}.input_layernorm": (WIDTH,),
            f"layers.{index}.post_attention_layernorm": (WIDTH,),
        }
    return {f"{name}.weight": draw(f"{name}.weight", size) for name, size in sizes.items()}


def propose(made: Drafter, budget: int, draw_at: float = 0.0) -> object:
    """A block after one committed token, at a temperature."""
    cache = TARGET.new_cache(1, 64)
    made.reset(1, cache)
    made.start(0, [3], Sampling(temperature=draw_at, seed=1))
    taps = {tap: FEATURES[0, :1, index].unsqueeze(0) for index, tap in enumerate(TAPS)}
    made.observe(Observation(((9,),), (0,), (1,), Features(taps)), [0])
    cache.keep([1])
    return made.propose([9], DraftBudget((budget,)), Keyed())


class Keyed:
    def uniform(self, stream: str, row: int, position: int) -> float:
        return random.Random(f"{stream} {row} {position}").random()


def test_a_checkpoint_with_the_published_names_is_read_whole(tmp_path: Path) -> None:
    made = drafter(4, weights=checkpoint(tmp_path, published()))
    assert torch.equal(propose(made, 4).tokens, propose(drafter(4), 4).tokens)  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="selector"):
        drafter(4, weights=checkpoint(tmp_path, {**published(), "candidate_selector.weight": torch.zeros(1)}))
    with pytest.raises(CheckpointError, match=r"fc\.weight"):
        drafter(4, weights=checkpoint(tmp_path, {**published(), "fc.weight": torch.zeros(WIDTH, WIDTH)}))


def test_own_embedding_and_head_are_used_where_the_checkpoint_has_them(tmp_path: Path) -> None:
    own = {"embed_tokens.weight": TARGET.embedding.flip(0), "lm_head.weight": TARGET.head.weight.flip(0)}
    mirrored = drafter(4, mask_token=0, weights=checkpoint(tmp_path / "own", {**published(), **own}))
    flipped = VOCAB - 1 - propose(mirrored, 4).tokens  # type: ignore[attr-defined]
    cache = TARGET.new_cache(1, 64)
    plain = Stage(network(4), [0])
    plain.cache = cache
    plain.model.reset(1, 4, cache)
    plain.commit([1])
    assert flipped[0].tolist() == plain.draft([VOCAB - 1 - 9])[0].argmax(-1).tolist()


def test_a_reduced_vocabulary_drafts_only_its_tokens(tmp_path: Path) -> None:
    ids = torch.arange(3, VOCAB, 4)
    extra = {"d2t": ids - torch.arange(len(ids)), "lm_head.weight": TARGET.head.weight[ids]}
    weights = checkpoint(tmp_path, {**published(), **extra})
    block = propose(drafter(6, "sampled", weights=weights, draft_vocab_size=len(ids)), 6, 1.5)
    assert isinstance(block.law, Reduced)  # type: ignore[attr-defined]
    assert set(block.tokens[0].tolist()) <= set(ids.tolist())  # type: ignore[attr-defined]


def test_the_width_of_a_block_is_the_one_it_was_trained_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Wider would spoil every position; narrower is the full block, cut (vllm #41834)."""
    with pytest.raises(GraphError, match=r"k is 8, and a block of 8 slots holds 7 draft tokens"):
        drafter(8, block_size=8)
    assert drafter(8, block_size=8, layout="shifted").num_nodes == 8
    weights = checkpoint(tmp_path, published())
    with caplog.at_level(logging.WARNING):
        short = drafter(3, block_size=8, weights=weights)
    assert sum("all of it is drafted, then cut" in record.message for record in caplog.records) == 1
    full = propose(drafter(7, block_size=8, weights=weights), 7)
    cut = propose(short, 3)
    assert torch.equal(cut.tokens, full.tokens[:, :3])  # type: ignore[attr-defined]


def test_a_mask_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(GraphError, match=f"id {VOCAB} of a vocabulary of {VOCAB}"):
        drafter(2, mask_token=VOCAB)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"num_layers": 2, "layer_types": ("full_attention",)}, "names 1 layers"),
        ({"num_layers": 1, "layer_types": ("sliding_attention",)}, "window is not set"),
        ({"num_layers": 1, "layer_types": ("full_attention",), "window": 4}, "no layer"),
        ({"window_from": "anchor"}, "no layer has a window"),
        ({"block_size": 1}, "predicts nothing"),
    ],
)
def test_options_that_contradict_each_other_are_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        DFlashConfig(**wrong)  # type: ignore[arg-type]


def test_heads_must_share_keys_evenly() -> None:
    with pytest.raises(GraphError, match="3 query heads and 2"):
        drafter(2, num_heads=3)


def test_texts_beyond_its_positions_go_on_undrafted() -> None:
    sampling = Sampling(max_new_tokens=30, ignore_eos=True)
    prompt = PROMPTS[0]
    got = tiny_engine(drafter(4, max_positions=20), k=4, target=TARGET).generate([prompt], sampling)[0]
    assert got.tokens == tiny_engine(target=TARGET).generate([prompt], sampling)[0].tokens
    assert 0 < got.counts.num_spec_steps < got.counts.num_rounds


def test_no_budget_no_block() -> None:
    assert propose(drafter(4), 0) is None

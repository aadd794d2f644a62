"""Medusa heads: names, slots, rows, and text that equals vanilla."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from stepping import NARROW
from tiny import VOCAB, tiny_engine, tiny_target
from torch import Tensor

from specflow.draft.base import SourceContext
from specflow.draft.nn.medusa import MedusaShape, read_medusa
from specflow.draft.nn.weights import SeededTensors, WeightReader
from specflow.draft.sources.medusa import SOURCE, MedusaConfig, MedusaModel, build
from specflow.errors import CheckpointError, GraphError
from specflow.types import PAD, DraftBlock, DraftBudget, Features, Observation, Sampling
from specflow.verify import BlockRule, Match, Rejection

H, K = 32, 4
DOUBLE = torch.empty(0, dtype=torch.float64)
TARGET = tiny_target()
PROMPTS = [[5, 9, 33, 17, 40, 41] * 3, [7], [5, 9, 33, 3, 4, 5, 9], [11] * 20]
GREEDY = Sampling(max_new_tokens=24, ignore_eos=True, seed=3)
WARM = GREEDY.model_copy(update={"temperature": 0.8})
CHAIN = {"shape": "chain"}
CORRECTED = [{"corrector": kind, "corrector_rank": 3} for kind in ("markov", "gated", "rnn")]


class Fixed:
    def uniform(self, stream: str, row: int, position: int) -> float:
        return 0.5


def context(k: int = K, draw: str = "greedy", **more: object) -> SourceContext:
    options = {"dependency": "parallel", **more}
    return SourceContext(target=TARGET, k=k, draw=draw, **options)  # type: ignore[arg-type]


def model(config: MedusaConfig, tensors: Mapping[str, Tensor] | None = None, **more: object) -> MedusaModel:
    source = SeededTensors(0) if tensors is None else tensors
    made = MedusaModel(config, WeightReader(source, "made here", DOUBLE), context(**more))
    made.reset(1, K, TARGET.new_cache(1, 64))
    return made


def watch(network: MedusaModel, rows: Sequence[int], hidden: Tensor, counts: Sequence[int], start: int = 0) -> None:
    """Show features to some rows. # hidden [B, R, H]"""
    tokens = tuple((0,) * count for count in counts)
    starts = (start,) * len(rows)
    network.observe(Observation(tokens, starts, tuple(counts), Features({}, hidden_post=hidden)), rows)


def features(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def checkpoint(num_heads: int, num_layers: int, outputs: int | None, seed: int = 0) -> dict[str, Tensor]:
    """Tensors under their published names."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * shape[-1] ** -0.5

    found = {}
    for k in range(num_heads):
        for j in range(num_layers):
            found[f"{k}.{j}.linear.weight"], found[f"{k}.{j}.linear.bias"] = draw(H, H), draw(H)
        if outputs is not None:
            found[f"{k}.{num_layers}.weight"] = draw(outputs, H)
    return found


@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("layers", [0, 1, 2])
def test_heads_follow_the_formula(layers: int, own: bool, projected: bool) -> None:
    tensors = checkpoint(3, layers, VOCAB if own else None)
    if projected:
        for k, weight in enumerate(
            torch.randn(4, H, H, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
        ):
            tensors[f"{k}.projection.weight"] = weight
    shape = MedusaShape(4 if projected else 3, 3, layers, H, VOCAB, own, projected)
    reader = WeightReader(tensors, "made here", DOUBLE)
    heads = read_medusa(reader, shape, TARGET.score)
    reader.close()
    rows = features(2, 5, H)
    logits, hidden = heads(rows)
    assert (logits.shape, hidden.shape) == ((2, 5, 3, VOCAB), (2, 5, 3, H))
    for k in range(3):
        x = rows
        for j in range(layers):
            z = x @ tensors[f"{k}.{j}.linear.weight"].T + tensors[f"{k}.{j}.linear.bias"]
            x = x + z / (1 + (-z).exp())
        if projected:
            x = x @ tensors[f"{k}.projection.weight"].T
        output = tensors[f"{k}.{layers}.weight"] if own else TARGET.head.weight
        assert torch.allclose(hidden[:, :, k], x, atol=1e-12)
        assert torch.allclose(logits[:, :, k], x @ output.T, atol=1e-12)


def test_no_two_blocks_share_a_parameter() -> None:
    shape = MedusaShape(3, 3, 2, H, VOCAB, True)
    heads = read_medusa(WeightReader(SeededTensors(0), "random", DOUBLE), shape, TARGET.score)
    parameters = [parameter for _, parameter in heads.named_parameters(remove_duplicate=False)]
    assert len(parameters) == 3 * (2 * 2 + 1)
    assert len({parameter.data_ptr() for parameter in parameters}) == len(parameters)
    weights = [parameter for parameter in parameters if parameter.shape == (H, H)]
    assert not any(torch.equal(one, other) for i, one in enumerate(weights) for other in weights[:i])


def test_heads_that_are_not_drafted_from_are_not_loaded() -> None:
    reader = WeightReader(checkpoint(4, 2, VOCAB), "made here", DOUBLE)
    network = MedusaModel(MedusaConfig(num_layers=2, own_heads=True), reader, context(k=2))
    reader.close()
    assert network.most_depth == 2
    assert len(network.heads.blocks) == 2


def counting() -> tuple[MedusaConfig, dict[str, Tensor]]:
    """Heads on a feature that says "the token here is t": head k foretells t + 1 + k."""
    tensors = {}
    for k in range(K):
        tensors[f"{k}.0.linear.weight"], tensors[f"{k}.0.linear.bias"] = torch.zeros(H, H), torch.zeros(H)
        tensors[f"{k}.1.weight"] = torch.zeros(VOCAB, H)
        for token in range(H):
            tensors[f"{k}.1.weight"][(token + 1 + (k + 1)) % VOCAB, token] = 5.0
    return MedusaConfig(own_heads=True, shape="chain"), tensors


def test_draft_position_k_is_the_kth_token_after_the_anchor() -> None:
    """On the text 0, 1, 2, ... the newest feature is of token t, the anchor is t + 1, and drafts go on from t + 2."""
    from specflow.draft.chain import ChainDrafter
    from specflow.draft.parallel import ParallelModel

    network = model(*counting())
    drafter = ChainDrafter(ParallelModel(network), context())
    cache = TARGET.new_cache(1, 64)
    drafter.reset(1, cache)
    drafter.start(0, list(range(8)), GREEDY)
    hidden = torch.eye(H, dtype=torch.float64).unsqueeze(0)
    for first, count in ((0, 5), (5, 3)):  # a prompt of 8 tokens in two chunks; token 8 is the first anchor
        watch(network, [0], hidden[:, first : first + count], [count], first)
    cache.keep([8])
    for anchor, accepted in ((8, 2), (11, 0), (12, 4)):
        block = drafter.propose([anchor], DraftBudget((K,)), Fixed())
        assert block is not None
        assert block.tokens.tolist() == [[anchor + 1, anchor + 2, anchor + 3, anchor + 4]]
        watch(network, [0], hidden[:, anchor : anchor + K + 1], [accepted + 1], anchor)
        cache.keep([accepted + 1])


def test_training_and_drafting_score_a_slot_alike() -> None:
    """Heads over a whole text give at position t, head k what a draft behind the anchor t + 1 gives at slot k."""
    text = torch.tensor([[3, 9, 4, 4, 17, 60, 22, 8, 31, 5]])
    cache = TARGET.new_cache(1, 16)
    output = TARGET.forward(text, torch.arange(10).unsqueeze(0), cache)
    assert output.hidden_post is not None
    network = model(MedusaConfig(num_layers=2, own_heads=True))
    trained, _ = network.heads(output.hidden_post)  # [1, T, K, V]
    for t in range(9):
        network.start(0, [])
        watch(network, [0], output.hidden_post[:, : t + 1], [t + 1])
        drafted = network.marginals(text[0, t + 1 : t + 2].tolist(), [True]).logits
        assert torch.allclose(drafted[0], trained[0, t], atol=1e-12)


def test_rows_are_ragged_and_only_the_last_real_one_counts() -> None:
    together, rows = model(MedusaConfig()), features(3, 6, H)
    together.reset(3, K, TARGET.new_cache(3, 64))
    counts = [4, 1, 6]
    watch(together, [0, 1, 2], rows, counts)
    for row, count in enumerate(counts):
        alone = model(MedusaConfig())
        watch(alone, [0], rows[row : row + 1, :count], [count])
        got, expected = together.marginals([1, 2, 3], [True] * 3), alone.marginals([row + 1], [True])
        assert torch.allclose(got.logits[row], expected.logits[0], atol=1e-12)
        assert torch.allclose(got.hidden[row], expected.hidden[0], atol=1e-12)


def test_rows_move_start_again_and_are_forgotten() -> None:
    network, rows = model(MedusaConfig()), features(3, 1, H)
    network.reset(3, K, TARGET.new_cache(3, 64))
    watch(network, [0, 1, 2], rows, [1, 1, 1])
    before = network.marginals([0] * 3, [True] * 3).logits
    network.select([2, 0])
    assert torch.allclose(network.marginals([0] * 2, [True] * 2).logits, before[[2, 0]], atol=1e-12)
    watch(network, [1], rows[1:2], [1])
    assert torch.allclose(network.marginals([0] * 2, [True] * 2).logits, before[[2, 1]], atol=1e-12)
    blank = model(MedusaConfig()).marginals([0], [True]).logits
    network.start(0, [1, 2])
    assert torch.allclose(network.marginals([0] * 2, [True] * 2).logits[0], blank[0], atol=1e-12)
    network.reset(1, K, TARGET.new_cache(1, 64))
    assert torch.allclose(network.marginals([0], [True]).logits, blank, atol=1e-12)


def test_what_was_kept_does_not_change_with_the_targets_tensors() -> None:
    network, rows = model(MedusaConfig()), features(1, 3, H)
    watch(network, [0], rows, [3])
    before = network.marginals([0], [True]).logits
    rows.zero_()
    assert torch.equal(network.marginals([0], [True]).logits, before)


def reduced(own: bool) -> tuple[MedusaConfig, dict[str, Tensor], list[int]]:
    ids = [2, 3, 10, 11, 40, 60]
    tensors = checkpoint(K, 1, len(ids) if own else None)
    tensors["d2t"] = torch.tensor([token - index for index, token in enumerate(ids)])
    return MedusaConfig(own_heads=own, draft_vocab_size=len(ids), shape="chain"), tensors, ids


@pytest.mark.parametrize("own", [True, False])
def test_a_reduced_vocabulary_drafts_target_ids(own: bool) -> None:
    config, tensors, ids = reduced(own)
    network = model(config, tensors)
    watch(network, [0], features(1, 1, H), [1])
    assert network.vocabulary is not None
    assert network.vocabulary.to_target.tolist() == ids
    got = network.marginals([0], [True])
    assert got.logits.shape == (1, K, len(ids))
    if not own:
        assert torch.allclose(got.logits, TARGET.score(got.hidden)[..., ids], atol=1e-12)


def drafter_text(config: MedusaConfig, rule: object, sampling: Sampling, batch: int, **more: object) -> list[tuple]:  # type: ignore[type-arg]
    engine = tiny_engine(build(config, context(**more)), k=K, batch=batch, rule=rule, target=TARGET)  # type: ignore[arg-type]
    return [generation.tokens for generation in engine.generate(PROMPTS, sampling)]


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["T0", "T0.8"])
@pytest.mark.parametrize(
    "options", [{}, *CORRECTED, {"draft_vocab_size": 40}], ids=lambda options: options.get("corrector", "plain")
)
def test_text_equals_vanilla(options: dict[str, object], sampling: Sampling, batch: int) -> None:
    expected = [generation.tokens for generation in tiny_engine(target=TARGET).generate(PROMPTS, sampling)]
    dependency = "parallel+corrector" if "corrector" in options else "parallel"
    for k in (1, 3, 9):
        config = MedusaConfig(**{**CHAIN, **options, "num_heads": 9})
        for draw in ("greedy", "coupled"):
            got = drafter_text(config, Match(), sampling, batch, k=k, draw=draw, dependency=dependency)
            assert got == expected, (k, draw)


@pytest.mark.parametrize("rule", [Rejection(), BlockRule()], ids=["rejection", "block"])
@pytest.mark.parametrize(
    "options", [{}, *CORRECTED, {"draft_vocab_size": 40}], ids=lambda options: options.get("corrector", "plain")
)
def test_rules_that_weigh_laws_take_its_blocks(options: dict[str, object], rule: object) -> None:
    dependency = "parallel+corrector" if "corrector" in options else "parallel"
    config = MedusaConfig(**{**CHAIN, **options})
    expected = [generation.tokens for generation in tiny_engine(target=TARGET).generate(PROMPTS, GREEDY)]
    assert drafter_text(config, rule, GREEDY, 4, draw="sampled", dependency=dependency) == expected
    together = drafter_text(config, rule, WARM, 4, draw="sampled", dependency=dependency)
    assert together == drafter_text(config, rule, WARM, 1, draw="sampled", dependency=dependency)


@pytest.mark.parametrize("shape", ["static", "beam", "best_first", "sampled"])
@pytest.mark.parametrize("options", [{}, CORRECTED[2]], ids=["plain", "rnn"])
def test_trees_over_the_heads_equal_vanilla(shape: str, options: dict[str, object]) -> None:
    dependency = "parallel+corrector" if options else "parallel"
    config = MedusaConfig(shape=shape, **NARROW[shape], **options)  # type: ignore[arg-type]
    for sampling in (GREEDY, WARM):
        expected = [generation.tokens for generation in tiny_engine(target=TARGET).generate(PROMPTS, sampling)]
        assert drafter_text(config, Match(), sampling, 4, draw="coupled", dependency=dependency) == expected


def proposed(config: MedusaConfig, *counts: int, **more: object) -> DraftBlock:
    """A block drafted behind features of these many positions."""
    drafter = build(config, context(**more))
    cache = TARGET.new_cache(len(counts), 64)
    drafter.reset(len(counts), cache)
    for row in range(len(counts)):
        drafter.start(row, [1], GREEDY)
    hidden = features(len(counts), max(counts), H)
    tokens = tuple((4,) * count for count in counts)
    drafter.observe(
        Observation(tokens, (0,) * len(counts), counts, Features({}, hidden_post=hidden)), range(len(counts))
    )
    cache.keep(counts)
    block = drafter.propose([4] * len(counts), DraftBudget((K,) * len(counts)), Fixed())
    assert block is not None
    return block


def test_a_corrector_changes_the_draft_and_a_confidence_head_says_so_in_advance() -> None:
    plain = proposed(MedusaConfig(**CHAIN, own_heads=True), 3, 1)
    markov = MedusaConfig(**CHAIN, own_heads=True, corrector="markov", corrector_rank=1, confidence_head=True)
    corrected = proposed(markov, 3, 1, dependency="parallel+corrector", confidence=True)
    assert not torch.equal(plain.tokens, corrected.tokens)
    assert plain.confidence is None
    assert corrected.confidence is not None
    assert corrected.confidence.shape == (2, K)
    assert corrected.confidence_from == "prefix"
    hot = replace_options(markov, temperatures=(1e6,) * K)
    flat = proposed(hot, 3, 1, dependency="parallel+corrector", confidence=True).confidence
    assert flat is not None
    assert torch.allclose(flat, torch.full_like(flat, 0.5), atol=1e-4)
    assert torch.equal(proposed(markov, 3, 1, dependency="parallel+corrector").tokens, corrected.tokens)


def replace_options(config: MedusaConfig, **more: object) -> MedusaConfig:
    return MedusaConfig(**{**config.model_dump(exclude_unset=True), **more})


def test_blocks_go_no_deeper_than_there_are_heads() -> None:
    block = proposed(MedusaConfig(**CHAIN, num_heads=2), 1, k=7)
    assert block.tokens.shape == (1, 2)
    assert (block.tokens != PAD).all()


def test_proposing_changes_nothing() -> None:
    drafter = build(MedusaConfig(), context())
    drafter.reset(1, cache := TARGET.new_cache(1, 64))
    drafter.start(0, [1], GREEDY)
    drafter.observe(Observation(((4,),), (0,), (1,), Features({}, hidden_post=features(1, 1, H))), [0])
    cache.keep([1])
    blocks = [drafter.propose([4], DraftBudget((K,)), Fixed()) for _ in range(2)]
    assert blocks[0] is not None
    assert blocks[1] is not None
    assert torch.equal(blocks[0].tokens, blocks[1].tokens)


def test_the_default_is_a_static_tree() -> None:
    assert MedusaConfig().shape == "static"
    assert SOURCE.presets() == {"medusa": {}}
    assert not proposed(MedusaConfig(), 2).topology.is_chain


def saved(directory: Path, tensors: Mapping[str, Tensor], options: Mapping[str, object]) -> str:
    save_file(dict(tensors), directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(options), encoding="utf-8")
    return str(directory)


def test_a_directory_brings_weights_and_options(tmp_path: Path) -> None:
    tensors = checkpoint(3, 2, VOCAB)
    tensors["markov_head.markov_w1.weight"] = features(VOCAB, 4)
    tensors["markov_head.markov_w2.weight"] = features(VOCAB, 4, seed=1)
    options = {"num_heads": 3, "num_layers": 2, "own_heads": True, "corrector": "markov", "corrector_rank": 4}
    weights = saved(tmp_path, tensors, options)
    block = proposed(MedusaConfig(shape="chain", weights=weights), 2, dependency="parallel+corrector")
    x, token, expected = features(1, 2, H)[0, 1], 4, []
    for k in range(3):
        row = x
        for j in range(2):
            row = row + torch.nn.functional.silu(
                tensors[f"{k}.{j}.linear.weight"] @ row + tensors[f"{k}.{j}.linear.bias"]
            )
        bias = tensors["markov_head.markov_w2.weight"] @ tensors["markov_head.markov_w1.weight"][token]
        token = int((tensors[f"{k}.2.weight"] @ row + bias).argmax())
        expected.append(token)
    assert block.tokens.tolist() == [expected]
    with pytest.raises(CheckpointError, match="num_layers"):
        build(MedusaConfig(weights=weights, num_layers=1), context(dependency="parallel+corrector"))


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="without a corrector"):
        build(MedusaConfig(), context(dependency="parallel+corrector"))
    weights = saved(tmp_path, checkpoint(3, 1, VOCAB), {"num_heads": 2, "own_heads": True})
    with pytest.raises(CheckpointError, match=r"3 tensors are not part of this architecture: 2\.0"):
        build(MedusaConfig(weights=weights), context())
    weights = saved(tmp_path, checkpoint(1, 1, VOCAB), {"num_heads": 2, "own_heads": True})
    with pytest.raises(CheckpointError, match=r"1\.0\.linear\.weight"):
        build(MedusaConfig(weights=weights), context())

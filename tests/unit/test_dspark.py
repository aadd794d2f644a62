"""DSpark: corrected logits, confidence and laws against the formulas, and texts that equal vanilla's."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from dense_block import FEATURES, INFO, TAPS, TARGET, WIDTH, dense_hidden
from safetensors.torch import save_file
from test_dflash import published
from tiny import VOCAB, tiny_engine
from torch import Tensor

from specflow.draft.base import Drafter, SourceContext
from specflow.draft.nn.weights import SeededTensors
from specflow.draft.sources.dspark import SOURCE, DSparkConfig
from specflow.errors import CheckpointError, GraphError
from specflow.types import DraftBlock, DraftBudget, Features, Observation, Sampling
from specflow.verify import BlockRule, Match

RANK = 6
K = 5
PROMPTS = [[5, 9, 33, 17] * 3, [7], [11] * 20, [3, 4, 5]]
FORMS = ({}, {"corrector": "rnn", "window": 4}, {"corrector": "gated", "block_size": 9})
SIZES: dict[str, tuple[int, ...]] = {
    "markov_head.markov_w1.weight": (VOCAB, RANK),
    "markov_head.markov_w2.weight": (VOCAB, RANK),
    "confidence_head.proj.weight": (1, WIDTH + RANK),
    "confidence_head.proj.bias": (1,),
}


def config(**extra: object) -> DSparkConfig:
    return DSparkConfig(**{"taps": TAPS, "num_layers": 2, "corrector_rank": RANK, **extra})  # type: ignore[arg-type]


def drafter(k: int, draw: str = "coupled", dependency: str = SOURCE.dependency[0], **extra: object) -> Drafter:
    return SOURCE.build(config(**extra), SourceContext(TARGET, k, dependency, draw, confidence=True))  # type: ignore[arg-type]


def heads() -> list[Tensor]:
    """The corrector's two tables, and weight and bias of the confidence head, as the random drafter has them."""
    return [SeededTensors(0).draw(name, size).to(INFO.dtype) for name, size in SIZES.items()]


class Keyed:
    def uniform(self, stream: str, row: int, position: int) -> float:
        return random.Random(f"{stream} {row} {position}").random()


def propose(made: Drafter, anchors: list[int], context: int, temperature: float = 0.0) -> DraftBlock:
    """A block of every row after so many committed tokens."""
    cache, count = TARGET.new_cache(len(anchors), 64), len(anchors)
    made.reset(count, cache)
    for row in range(count):
        made.start(row, [3], Sampling(temperature=temperature, seed=1))
    taps = {tap: FEATURES[:count, :context, index] for index, tap in enumerate(TAPS)}
    tokens = tuple((3,) * context for _ in anchors)
    made.observe(Observation(tokens, (0,) * count, (context,) * count, Features(taps)), range(count))
    cache.keep([context] * count)
    block = made.propose(anchors, DraftBudget((made.num_nodes,) * count), Keyed())
    assert block is not None
    return block


def test_every_token_follows_the_one_before_and_is_trusted_by_it() -> None:
    """U + B and sigma(w [h; W1 x] + b) of methods 8.1, h the output of the final norm at the slot before the token."""
    table, out, weight, bias = heads()
    anchors = [9, 40, 2]
    block = propose(drafter(K), anchors, context=12)
    assert block.confidence is not None
    assert block.confidence_from == "prefix"
    for row, anchor in enumerate(anchors):
        hidden, before = dense_hidden(config(), K, FEATURES[row, :12], anchor), anchor
        for step in range(K):
            logits = hidden[step] @ TARGET.head.weight.T + table[before] @ out.T
            sure = torch.sigmoid(torch.cat((hidden[step], table[before])) @ weight[0] + bias[0])
            torch.testing.assert_close(block.confidence[row, step], sure, atol=1e-5, rtol=0, check_dtype=False)
            before = int(block.tokens[row, step])
            assert before == int(logits.argmax())


def test_q_is_the_corrected_law_that_was_drawn_from() -> None:
    table, out, *_ = heads()
    block = propose(drafter(K, "sampled"), [9], context=12, temperature=0.7)
    hidden, before = dense_hidden(config(), K, FEATURES[0, :12], 9), 9
    for step, told in enumerate(block.law.prob()[0].tolist()):
        logits = hidden[step] @ TARGET.head.weight.T + table[before] @ out.T
        before = int(block.tokens[0, step])
        assert told == pytest.approx(float((logits / 0.7).softmax(-1)[before]), abs=1e-5)


def test_a_block_of_b_slots_gives_b_tokens() -> None:
    assert drafter(7, block_size=7).num_nodes == 7
    with pytest.raises(GraphError, match="holds 7 draft tokens"):
        drafter(8, block_size=7)
    assert drafter(6, block_size=7, layout="fill_in").num_nodes == 6


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_text_is_vanillas(form: dict[str, object], temperature: float, batch: int) -> None:
    sampling = Sampling(max_new_tokens=30, ignore_eos=True, seed=5, temperature=temperature)
    expected = tiny_engine(target=TARGET, batch=batch).generate(PROMPTS, sampling)
    for k in (1, 4, 8):
        got = tiny_engine(drafter(k, **form), k=k, batch=batch, target=TARGET).generate(PROMPTS, sampling)
        assert [each.tokens for each in got] == [each.tokens for each in expected]
        assert all(each.counts.num_draft_tokens > 0 for each in got)


@pytest.mark.parametrize("rule", [Match(), BlockRule()], ids=["match", "block"])
def test_without_a_corrector_it_is_the_plain_backbone(rule: Match | BlockRule) -> None:
    sampling = Sampling(max_new_tokens=20, ignore_eos=True)
    draw = "sampled" if isinstance(rule, BlockRule) else "coupled"
    made = drafter(4, draw, "parallel", corrector=None)
    got = tiny_engine(made, k=4, target=TARGET, rule=rule).generate(PROMPTS, sampling)
    assert [each.tokens for each in got] == [
        each.tokens for each in tiny_engine(target=TARGET).generate(PROMPTS, sampling)
    ]
    hidden = dense_hidden(config(), K, FEATURES[0, :12], 9)
    block = propose(drafter(K, dependency="parallel", corrector=None), [9], context=12)
    assert block.tokens[0].tolist() == (hidden @ TARGET.head.weight.T).argmax(-1).tolist()


def test_a_checkpoint_with_the_published_names_is_read_whole(tmp_path: Path) -> None:
    """Backbone, own embedding and head, corrector and confidence head (methods 8.7)."""
    draw = SeededTensors(0).draw
    tensors = {**published(), **{name: draw(name, size) for name, size in SIZES.items()}}
    tensors |= {"embed_tokens.weight": TARGET.embedding.clone(), "lm_head.weight": TARGET.head.weight.clone()}
    save_file(tensors, tmp_path / "model.safetensors")
    loaded, random_ = (propose(drafter(K, weights=where), [9], 12) for where in (str(tmp_path), None))
    assert torch.equal(loaded.tokens, random_.tokens)
    del tensors["markov_head.markov_w2.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"markov_head\.markov_w2"):
        drafter(K, weights=str(tmp_path))

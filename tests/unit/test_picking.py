"""A greedy step that picks tokens without their logits says what it says with them, in every kind of round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from families import CPU, make_model, make_onnx
from tiny import VOCAB, Adversary, Branching, Empty, NumberText, Oracle, Ragged, tiny_model
from torch import Tensor

from specflow.cost import ProfileKey
from specflow.draft.base import Needs
from specflow.engine import Engine, EngineParts, EngineSettings
from specflow.handover import score_block
from specflow.law import PointMass
from specflow.length import Fixed
from specflow.noise import RoundNoise
from specflow.onnx import screen
from specflow.onnx.decoder import DecoderPart
from specflow.onnx.screened import ScreenedHead
from specflow.profiling import Plan, Profiler
from specflow.recipe import parse_recipe
from specflow.rules import RULE_INFOS
from specflow.sampling import BatchSampler, PickedLaw, TargetLaw
from specflow.target import onnx
from specflow.target.base import TargetOptions
from specflow.target.onnx import OPENVINO, GraphPart, ModelGraphs, OnnxTarget
from specflow.tree import chain, from_parents
from specflow.types import DraftBlock, Entry, Sampling, TargetOutput
from specflow.verify import RULES, Rule

PROMPTS = [[1, 7, 9, 4], [5, 5, 8], [3, 11, 60, 2, 4, 9, 30]]
GREEDY = Sampling(max_new_tokens=30)
ROUNDS: list[tuple[str, Any]] = [
    (rule, kind) for rule in sorted(RULES) for kind in (None, Oracle, Adversary, Ragged, Empty)
]
ROUNDS += [(rule, Branching) for rule in sorted(RULES) if RULE_INFOS[rule].trees]


class Watched:
    """A target that counts the rows it picks for."""

    def __init__(self, target: OnnxTarget) -> None:
        self.target, self.rows = target, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def pick(self, normed: Tensor) -> Tensor:
        self.rows += normed.shape[0] * normed.shape[1]
        return self.target.pick(normed)


@cache
def target_of(divided: bool) -> OnnxTarget:
    """The tiny model; heads of its size have no screen unless they are told to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnx, "screen_refusal", lambda weight: "" if divided else "small")
        return make_onnx(tiny_model())


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def texts(
    target: Any,
    sampling: Sampling | Sequence[Sampling] = GREEDY,
    drafter: Any = None,
    batch: int = 1,
    rule: str = "match",
) -> list[tuple[int, ...]]:
    codec: Any = NumberText()
    parts = EngineParts(target, codec, RULES[rule](), Fixed(4), drafter)
    found = Engine(parts, EngineSettings(batch=batch, prefill_chunk=8)).generate(PROMPTS, sampling)
    return [generation.tokens for generation in found]


@cache
def plain_texts() -> list[tuple[int, ...]]:
    return texts(target_of(False))


def test_only_the_divided_target_picks() -> None:
    assert target_of(True).info.picks
    assert target_of(True).info.greedy_head == "screened"
    assert not target_of(False).info.picks
    assert target_of(False).info.greedy_head == "whole: small"


def test_logits_are_those_of_the_whole_graph_bit_for_bit() -> None:
    found = []
    for divided in (True, False):
        target = target_of(divided)
        memory = target.new_cache(2, 64)
        tokens, positions = torch.tensor([[3, 9, 4], [8, 8, 1]]), torch.arange(3).expand(2, -1)
        found += [target.forward(tokens, positions, memory, taps=(0,), rows=rows) for rows in ("all", "last", "none")]
    for one, other in zip(found[:3], found[3:], strict=True):
        assert one.logits.equal(other.logits)
        assert one.hidden_post is not None
        assert one.hidden_post.equal(other.hidden_post)  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("rule", "kind"), ROUNDS)
def test_every_round_says_what_plain_steps_with_logits_say(kind: Any, rule: str, batch: int) -> None:
    plain = plain_texts()
    drafter = None if kind is None else kind([text[1:] for text in plain])
    target = Watched(target_of(True))
    assert texts(target, drafter=drafter, batch=batch, rule=rule) == plain
    assert target.rows > 0


@pytest.mark.parametrize(
    "other",
    [
        Sampling(max_new_tokens=30, temperature=1.0, seed=1),
        Sampling(max_new_tokens=30, repetition_penalty=1.3),
        Sampling(max_new_tokens=30, logit_bias={7: 4.0}),
        Sampling(max_new_tokens=30, logprobs=True),
        Sampling(max_new_tokens=30, min_new_tokens=30),
    ],
    ids=["temperature", "penalty", "bias", "logprobs", "least tokens"],
)
def test_whoever_needs_logits_gets_them_and_so_do_the_others(other: Sampling) -> None:
    settings = [other, GREEDY, GREEDY]
    target = Watched(target_of(True))
    assert texts(target, settings, batch=1)[1:] == plain_texts()[1:]
    alone = target.rows
    assert texts(target, settings, batch=3) == texts(target_of(False), settings, batch=3)
    assert alone > 0
    target.rows = 0
    texts(target, [other] * 3, batch=3)
    assert target.rows == 0


def test_without_the_bound_texts_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a model whose tokens come in pairs that 8 bits do not tell apart."""
    model = make_model("llama3_rope", vocab_size=VOCAB)
    with torch.no_grad():
        half = VOCAB // 2
        model.lm_head.weight[half : 2 * half] = model.lm_head.weight[:half] * 1.001
    monkeypatch.setattr(onnx, "screen_refusal", lambda weight: "")
    monkeypatch.setattr(ScreenedHead, "holds", lambda head: True)
    whole = make_onnx(model)
    sizes = screen._errors
    monkeypatch.setattr(screen, "_errors", lambda *parts: 0 * sizes(*parts) + 1e-20)
    unbound = make_onnx(model)
    monkeypatch.setattr(onnx, "screen_refusal", lambda weight: "small")
    expected = texts(make_onnx(model))
    assert texts(whole) == expected
    assert texts(unbound) != expected


def test_a_verification_that_enters_behind_the_draft_picks_too() -> None:
    target, memory = target_of(True), target_of(True).new_cache(1, 64)
    tokens = torch.tensor([[3, 9, 4]])
    lower = target.forward(tokens, torch.arange(3).unsqueeze(0), memory, taps=(0,), layers=(0, 1), rows="none")
    law = PointMass(tokens[:, 1:], VOCAB)
    block = DraftBlock(tokens[:, 1:], (2,), chain(2, CPU), law, entry=Entry(1, lower.taps[0]))
    scored, picked = (score_block(target, memory, [3], block, Needs(), greedy) for greedy in (False, True))
    assert picked.picked is not None
    assert picked.picked.equal(scored.logits.argmax(-1))
    assert picked.logits.shape == (1, 0, VOCAB)


@pytest.mark.parametrize("rule", [RULES[name]() for name in sorted(RULES)], ids=lambda rule: rule.name)
def test_rules_decide_the_same_without_logits(rule: Rule) -> None:
    logits = torch.randn(2, 4, VOCAB, generator=torch.Generator().manual_seed(1))
    best = logits.argmax(-1)
    tokens = torch.stack((best[0, :3], torch.tensor([int(best[1, 0]), 5, 6])))
    block = DraftBlock(tokens, (3, 3), chain(3, CPU), PointMass(tokens, VOCAB))
    laws = TargetLaw(logits, logits, [True, True]), PickedLaw(best, VOCAB)
    noise = RoundNoise([1, 2], [3, 4], CPU)
    one, other = (rule.verify(block, law, noise) for law in laws)
    assert one.tokens.equal(other.tokens)
    assert one.path.equal(other.path)
    assert laws[0].probs().equal(laws[1].probs())


def test_tokens_that_were_picked_have_no_logprobs() -> None:
    law, rows = PickedLaw(torch.tensor([[3, 5]]), VOCAB), torch.tensor([[0, 1]])
    with pytest.raises(AssertionError, match="log-probabilities"):
        law.logprob(rows, rows)


def test_the_sampler_says_when_the_likeliest_tokens_will_do() -> None:
    sampler = BatchSampler(VOCAB, (2,), CPU)
    sampler.reset(2)
    assert sampler.takes_likeliest([0, 0])
    sampler.start(1, Sampling(min_new_tokens=3), 0, [1])
    assert not sampler.takes_likeliest([5, 2])
    assert sampler.takes_likeliest([5, 3])
    sampler.start(0, Sampling(temperature=0.5), 0, [1])
    assert not sampler.takes_likeliest([5, 3])


def test_a_tree_is_picked_for_row_by_row() -> None:
    target = target_of(True)
    memory, tokens = target.new_cache(1, 64), torch.tensor([[5, 6, 7]])
    block = DraftBlock(tokens, (3,), from_parents(torch.tensor([[-1, -1, 0]])), PointMass(tokens, VOCAB))
    outputs: list[TargetOutput] = [score_block(target, memory, [3], block, Needs(), each) for each in (False, True)]
    assert outputs[1].picked is not None
    assert outputs[1].picked.equal(outputs[0].logits.argmax(-1))


@pytest.mark.parametrize("kind", ["float16", "variant", "inexact", "openvino"])
def test_where_bits_are_not_promised_the_head_stays_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx, "screen_refusal", lambda weight: "")
    if kind == "openvino":
        info, head = make_onnx(tiny_model(), runtime=OPENVINO).info, "whole"
    elif kind == "float16":
        info, head = make_onnx(tiny_model(), torch.float16).info, "whole: float16 weights"
    elif kind == "variant":
        info, head = make_onnx(tiny_model(), row_invariant=False).info, "whole: row_invariant: false"
    else:
        monkeypatch.setattr(onnx, "passes_agree", lambda target: False)
        info, head = make_onnx(tiny_model()).info, "whole: rows that change their bits with their number"
    assert not info.picks
    assert info.greedy_head == head


def test_a_processor_whose_products_saturate_has_the_full_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx, "screen_refusal", lambda weight: "")
    monkeypatch.setattr(ScreenedHead, "holds", lambda head: False)
    target = make_onnx(tiny_model())
    assert not target.info.picks
    assert "saturate" in target.info.greedy_head
    assert texts(target) == plain_texts()


def test_graphs_that_are_one_file_are_never_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a draft model."""
    monkeypatch.setattr(onnx, "screen_refusal", lambda weight: "")
    model, asked = tiny_model(), set()
    whole = target_of(False)._graphs
    options = TargetOptions("tiny", torch.float32, CPU, (2,))

    def find(part: GraphPart) -> Path:
        asked.add(part)
        return whole.find(part)

    target = OnnxTarget(ModelGraphs(model.config, whole.tensors, find), options)
    assert not target.info.picks
    assert asked == {DecoderPart(0, 2)}


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.7}, {"logprobs": True}, {"repetition_penalty": 1.2}])
@pytest.mark.parametrize("kind", [None, Adversary])
def test_a_profile_times_the_passes_that_rounds_of_these_requests_make(changes: dict[str, Any], kind: Any) -> None:
    watched: Any = Watched(target_of(True))
    drafter = None if kind is None else kind([text[1:] for text in plain_texts()])
    codec: Any = NumberText()
    parts = EngineParts(watched, codec, RULES["match"](), Fixed(0), drafter)
    plan = Plan(rows=(1, 4), contexts=(10,), depths=() if kind is None else (2,), repeat=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Profiler, "_time_rounds", lambda *_, **__: None)
        Profiler(parts, plan, GREEDY.model_copy(update=changes)).measure()
    rows = 2 * (1 + 4) + (0 if kind is None else 2 * (1 + 2))  # each is run once to warm up
    assert watched.rows == (0 if changes else rows)


def test_profiles_of_picked_and_of_scored_passes_are_kept_apart() -> None:
    greedy = parse_recipe({"target": {"model": "m"}})
    sampled = parse_recipe({"target": {"model": "m"}, "sampling": {"temperature": 0.7}})
    late = parse_recipe({"target": {"model": "m"}, "sampling": {"min_new_tokens": 9}})
    divided, whole = (target_of(each).info for each in (True, False))
    assert ProfileKey.of(greedy, divided).target["head"] == "picked"
    assert ProfileKey.of(sampled, divided).target["head"] == "scored"
    assert ProfileKey.of(late, divided) == ProfileKey.of(greedy, divided)  # most of its rounds, and what is timed
    assert ProfileKey.of(greedy, whole) == ProfileKey.of(sampled, whole)

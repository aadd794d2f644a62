"""Whether a diverging text is a near-tie or a bug, asked of tiny targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import VOCAB, tiny_engine, tiny_target

from specflow.bench import divergence
from specflow.bench.divergence import TIE_MARGINS, Control, DivergenceJudge
from specflow.bench.methods import Ask
from specflow.target.transformer import NativeTarget
from specflow.types import Sampling

PROMPT = (5, 9, 13, 21, 34)
ASK = Ask(PROMPT, 40, True, 0)


@pytest.fixture(scope="module")
def target() -> NativeTarget:
    return tiny_target()


def plain(target: NativeTarget, sampling: Sampling | None = None) -> tuple[int, ...]:
    (made,) = tiny_engine(target=target).generate([PROMPT], ASK.sampling(sampling or Sampling()))
    return made.tokens


def next_logits(target: NativeTarget, tokens: Sequence[int]) -> torch.Tensor:
    cache = target.new_cache(1, len(tokens))
    return target.forward(torch.tensor([tokens]), torch.arange(len(tokens)).unsqueeze(0), cache).logits[0, -1]


def changed(text: Sequence[int], at: int, token: int) -> tuple[int, ...]:
    return (*text[:at], token, *text[at + 1 :])


@pytest.mark.parametrize("at", [0, 1, 33])
def test_another_token_where_the_logits_are_far_apart_is_a_bug(target: NativeTarget, at: int) -> None:
    text = plain(target)
    scores = next_logits(target, [*PROMPT, *text[:at]])
    other = int(scores.argsort()[-3])
    found = DivergenceJudge(target, Sampling()).judge(ASK, changed(text, at, other), text)
    assert found.kind == "bug"
    assert found.margin == pytest.approx(float(scores.max() - scores[other]))
    assert found.tolerance == TIE_MARGINS[torch.float64]


def test_two_tokens_with_nearly_the_same_logit_are_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    text = plain(target)
    scores = next_logits(target, [*PROMPT, *text[:7]])
    second = int(scores.argsort()[-2])
    forward = target.forward

    def close(*args: Any, **options: Any) -> Any:
        output = forward(*args, **options)
        logits = output.logits.clone()
        logits[..., second] = logits[..., text[7]] - 5e-7
        return replace(output, logits=logits)

    monkeypatch.setattr(target, "forward", close)
    found = DivergenceJudge(target, Sampling()).judge(ASK, changed(text, 7, second), text)
    assert found.kind == "tie"
    assert found.margin == pytest.approx(5e-7)


def test_a_text_that_ends_early_is_a_bug_without_a_margin(target: NativeTarget) -> None:
    text = plain(target)
    found = DivergenceJudge(target, Sampling()).judge(ASK, text[:-2], text)
    assert (found.kind, found.margin) == ("bug", None)


def test_an_impossible_token_is_a_bug_without_a_margin(target: NativeTarget) -> None:
    text = plain(target)
    judge = DivergenceJudge(target, Sampling(min_new_tokens=3))
    stop = target.info.stop_ids[0]
    assert judge.judge(Ask(PROMPT, 40, False, 0), (stop,), text).margin is None


def test_the_margin_is_taken_after_the_edits_of_the_sampling(target: NativeTarget) -> None:
    text = plain(target)
    other = (text[0] + 1) % VOCAB
    raw = DivergenceJudge(target, Sampling()).judge(ASK, changed(text, 0, other), text).margin
    biased = DivergenceJudge(target, Sampling(logit_bias={other: -3.0}))
    assert raw is not None
    assert biased.judge(ASK, changed(text, 0, other), text).margin == pytest.approx(raw + 3.0)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(repetition_penalty=1.5, frequency_penalty=0.5)])
@pytest.mark.parametrize("rows", [1, 3, 32, 64])
def test_the_control_agrees_with_sound_plain_decoding_in_passes_of_any_width(
    target: NativeTarget, sampling: Sampling, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(divergence, "SCORED_ROWS", rows)
    text = plain(target, sampling)
    assert DivergenceJudge(target, sampling).control(ASK, text) == Control(40, 40, None)


def test_the_control_names_the_first_token_that_many_rows_would_not_choose(target: NativeTarget) -> None:
    text = plain(target)
    control = DivergenceJudge(target, Sampling()).control(ASK, changed(text, 9, (text[9] + 1) % VOCAB))
    assert control.first_mismatch == 9
    assert control.agreeing < control.scored == 40


def test_a_prompt_of_one_token_can_be_judged(target: NativeTarget) -> None:
    ask = Ask((5,), 8, True, 0)
    (made,) = tiny_engine(target=target).generate([ask.prompt], ask.sampling(Sampling()))
    judge = DivergenceJudge(target, Sampling())
    assert judge.control(ask, made.tokens) == Control(8, 8, None)
    assert judge.explain(ask, changed(made.tokens, 0, (made.tokens[0] + 1) % VOCAB), made.tokens)["divergence"] == "bug"


def test_an_explanation_is_asked_once_of_repetitions_and_not_of_sampled_texts() -> None:
    target = tiny_target()
    text = plain(target)
    wrong = changed(text, 4, (text[4] + 1) % VOCAB)
    judge = DivergenceJudge(target, Sampling())
    row = judge.explain(ASK, wrong, text)
    assert row == {
        "divergence": "bug",
        "divergence_margin": row["divergence_margin"],
        "divergence_tolerance": 1e-6,
        "control_agrees": 40,
        "control_scored": 40,
        "control_first_mismatch": None,
    }
    target.forward = None  # type: ignore[assignment,method-assign]
    assert judge.explain(ASK, wrong, text) == row
    assert judge.explain(ASK, text, text) == {}
    assert DivergenceJudge(target, Sampling(temperature=0.7)).explain(ASK, wrong, text) == {}


def test_every_type_of_weights_has_its_tolerance() -> None:
    assert set(TIE_MARGINS) == {torch.float64, torch.float32, torch.bfloat16, torch.float16}

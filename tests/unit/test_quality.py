"""Quality of changed weights: equal models are equal, worse ones are told and refused with figure and limit."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from specflow.export.quality import QUALITY_TEXT, Quality, Threshold, load_quality_text, measure_quality

WIDTH = 50
GOOD = Quality(1000, 0.98, 20.0, 20.1, 1.0, 0.01)


class Bigram:
    """Logits that hang on the last token alone."""

    def __init__(self, noise: float = 0.0) -> None:
        draw = torch.Generator().manual_seed(0)
        self.table = torch.randn(WIDTH, WIDTH, generator=draw) * 3
        self.table = self.table + noise * torch.randn(WIDTH, WIDTH, generator=draw)

    def __call__(self, tokens: list[int]) -> Tensor:
        return self.table[tokens]


def sequences(count: int = 4, length: int = 60) -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    return torch.randint(0, WIDTH, (count, length), generator=draw).tolist()


def test_a_model_agrees_with_itself_in_torch_and_in_numpy() -> None:
    model = Bigram()

    def candidate(tokens: list[int]) -> NDArray[np.float32]:
        return model(tokens).numpy()

    quality = measure_quality(model, candidate, sequences())
    assert quality.positions == 4 * 59
    assert quality.agreement == 1
    assert quality.perplexity_change == 0
    assert quality.largest_difference == 0
    assert quality.mean_difference == 0
    assert Threshold().refusal(quality) == ""


def test_the_figures_are_those_of_their_definitions() -> None:
    reference, candidate, tokens = Bigram(), Bigram(0.5), sequences(1)[0]
    quality = measure_quality(reference, candidate, [tokens])
    ours, theirs = (model.table.double().log_softmax(-1)[tokens[:-1]] for model in (reference, candidate))
    following = torch.tensor(tokens[1:])[:, None]
    assert quality.agreement == pytest.approx((ours.argmax(-1) == theirs.argmax(-1)).double().mean().item())
    assert quality.reference_perplexity == pytest.approx(math.exp(-ours.gather(1, following).mean()), rel=1e-5)
    assert quality.perplexity == pytest.approx(math.exp(-theirs.gather(1, following).mean()), rel=1e-5)
    assert quality.largest_difference == pytest.approx((ours - theirs).abs().max().item(), rel=1e-4)
    assert quality.mean_difference == pytest.approx((ours - theirs).abs().mean().item(), rel=1e-4)


def test_adding_a_constant_to_all_logits_changes_nothing() -> None:
    model = Bigram()
    quality = measure_quality(model, lambda tokens: model(tokens) + 7, sequences())
    assert quality.agreement == 1
    assert quality.largest_difference < 1e-5


def test_a_corrupted_model_is_refused() -> None:
    quality = measure_quality(Bigram(), Bigram(3.0), sequences())
    assert quality.agreement < 0.9
    assert f"{quality.agreement:.2%}" in Threshold().refusal(quality)


def test_logits_that_are_not_numbers_are_refused() -> None:
    model = Bigram()
    quality = measure_quality(model, lambda tokens: model(tokens) * math.nan, sequences())
    assert math.isnan(quality.largest_difference)
    assert "perplexity" in Threshold().refusal(quality)


def test_a_candidate_that_rules_out_the_text_is_refused_without_overflow() -> None:
    model = Bigram()

    def candidate(tokens: list[int]) -> Tensor:
        logits = model(tokens).clone()
        logits[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])] = -math.inf
        return logits

    quality = measure_quality(model, candidate, sequences())
    assert quality.perplexity == math.inf
    assert "+inf%" in Threshold().refusal(quality)


def test_tokens_that_both_rule_out_do_not_differ() -> None:
    model = Bigram()

    def ruled(tokens: list[int]) -> Tensor:
        return model(tokens).index_fill(1, torch.tensor([3]), -math.inf)

    text = [[token for token in tokens if token != 3] for tokens in sequences()]
    assert measure_quality(ruled, ruled, text).largest_difference == 0


def test_a_refusal_names_every_figure_and_its_limit() -> None:
    threshold = Threshold()
    assert threshold.refusal(GOOD) == ""
    few = threshold.refusal(replace(GOOD, agreement=0.9123))
    assert "91.23%" in few
    assert "95.00%" in few
    assert "perplexity" not in few
    worse = threshold.refusal(replace(GOOD, perplexity=21.0))
    assert "+5.00%" in worse
    assert "+2.00%" in worse
    assert "agree" not in worse
    both = threshold.refusal(replace(GOOD, agreement=0.5, perplexity=30.0))
    assert "agree" in both
    assert "perplexity" in both
    assert threshold.refusal(replace(GOOD, perplexity=15.0)) == ""


def test_the_limits_themselves_pass() -> None:
    edge = replace(GOOD, agreement=0.95, reference_perplexity=100.0, perplexity=102.0)
    assert Threshold(perplexity=edge.perplexity_change).refusal(edge) == ""


def test_sequences_of_one_token_are_passed_over() -> None:
    model = Bigram()
    assert measure_quality(model, model, [[1], [1, 2], []]).positions == 1


def test_the_shipped_text_is_prose_and_code_with_its_licence() -> None:
    passages = load_quality_text()
    assert len(passages) == 32
    assert all(len(passage) > 1000 for passage in passages)
    assert any("def " in passage for passage in passages)
    assert QUALITY_TEXT.stat().st_size <= 60 * 1024
    licence = QUALITY_TEXT.with_name("LICENSE-quality.txt").read_text(encoding="utf-8")
    assert "CC0-1.0" in licence
    assert "PSF-2.0" in licence

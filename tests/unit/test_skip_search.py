"""Searching for sub-layers to leave out: what reading promises is what decoding does; studies are seeded and resume."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_model, make_native
from tiny import VOCAB, NumberText

from specflow.bench import RunDirectory
from specflow.build import LoadedTarget, build_engine
from specflow.draft.base import SourceContext
from specflow.draft.chain import ChainDrafter
from specflow.draft.lm_shared import SharedLayers
from specflow.draft.lm_steps import Shortcut
from specflow.draft.skip_search import FinishedText, Outlook, PassCosts, SkipMeter, grow_skips, rank_sublayers
from specflow.errors import RecipeError
from specflow.provenance import Provenance
from specflow.recipe import Recipe, load_recipe, parse_recipe
from specflow.search import SearchPlan, SkipSearch, check_recipe
from specflow.types import DraftBudget, Sampling, Skip

LAYERS, K = 4, 3
PROMPTS = [[5, 9, 33, 17], [7, 8], [3, 4, 5, 9, 11]]
RECIPE = parse_recipe({"draft": {"method": "layer_skip", "k": K}, "verify": {"rule": "match"}})
PLAN = SearchPlan(trials=4, seed=1, max_new_tokens=10, read_tokens=16, warm_starts=2)


@cache
def loaded() -> LoadedTarget:
    model = make_model("llama3_rope", vocab_size=VOCAB, num_hidden_layers=LAYERS)
    return LoadedTarget(make_native(model, torch.float64), NumberText())  # type: ignore[arg-type]


@cache
def finished() -> tuple[FinishedText, ...]:
    engine = build_engine(Recipe(), loaded())
    made = engine.generate(PROMPTS, Sampling(max_new_tokens=31, ignore_eos=True))
    return tuple(FinishedText((*prompt, *g.tokens), len(prompt)) for prompt, g in zip(PROMPTS, made, strict=True))


def meter() -> SkipMeter:
    return SkipMeter(loaded().target, finished(), K)


SETS = [Skip(frozenset({1})), Skip(frozenset(), frozenset({2})), Skip(frozenset({3}), frozenset({2, 3}))]


@pytest.mark.parametrize("skip", [Skip(), *SETS])
def test_reading_says_what_decoding_would_accept(skip: Skip) -> None:
    """Every block of the text, drafted for real after what the target made of the text before it."""
    target, stood = loaded().target, []
    model = SharedLayers(target, Shortcut(skip=skip), K)
    drafter = ChainDrafter(model, SourceContext(target=target, k=K))
    for text in finished():
        for begin in range(text.begin, text.begin + 30, K):
            cache, before = target.new_cache(1, 64), torch.tensor([text.tokens[:begin]])
            target.forward(before, torch.arange(begin).unsqueeze(0), cache)
            cache.keep([begin])
            drafter.reset(1, cache)
            block = drafter.propose([text.tokens[begin]], DraftBudget((K,)), None)  # type: ignore[arg-type]
            assert block is not None
            right = torch.tensor(text.tokens[begin + 1 : begin + 1 + K])
            stood.append((block.tokens[0] == right).long().cumprod(0).tolist())
    expected = [sum(row[step] for row in stood) / len(stood) for step in range(K)]
    assert meter().measure(skip).reached == pytest.approx(expected)
    assert skip != Skip() or expected == [1.0] * K


def test_the_ranking_begins_with_what_is_minded_least() -> None:
    named: list[str] = []
    ranking = rank_sublayers(meter(), named.append)
    assert sorted(ranking) == sorted((kind, layer) for kind in ("attention", "mlp") for layer in range(LAYERS))
    assert len(named) == 2 * LAYERS
    minded = []
    for kind, layer in ranking:
        one = frozenset({layer})
        minded.append(meter().measure(Skip(one) if kind == "attention" else Skip(frozenset(), one)).logprob)
    assert minded == sorted(minded, reverse=True)


def test_a_growing_series_takes_the_better_promise() -> None:
    costs = PassCosts(plain_s=1.0, block_s=1.1, attention_s=0.05, mlp_s=0.15, k=K)
    series = list(grow_skips(meter(), rank_sublayers(meter()), costs, tries=2 * LAYERS))
    assert [len(skip.attention) + len(skip.mlp) for skip in series] == list(range(1, 2 * LAYERS + 1))
    assert all(before.attention <= after.attention and before.mlp <= after.mlp for before, after in pairwise(series))
    everything = [Skip(frozenset({layer})) for layer in range(LAYERS)]
    everything += [Skip(frozenset(), frozenset({layer})) for layer in range(LAYERS)]
    best = max(costs.speed(skip, meter().measure(skip)) for skip in everything)
    assert costs.speed(series[0], meter().measure(series[0])) == pytest.approx(best)


def test_promised_speed_weighs_tokens_against_passes() -> None:
    costs = PassCosts(plain_s=1.0, block_s=1.25, attention_s=0.05, mlp_s=0.15, k=2)
    outlook = Outlook((0.8, 0.5), -1.0)
    assert outlook.acceptance_length == pytest.approx(2.3)
    assert costs.speed(Skip(frozenset({1}), frozenset({1, 2})), outlook) == pytest.approx(2.3 / (2 * 0.65 + 1.25))


def test_costs_are_measured() -> None:
    costs = PassCosts.measure(loaded().target, K, context=16, repeats=3)
    assert costs.plain_s > 0
    assert costs.block_s > 0
    assert min(costs.attention_s, costs.mlp_s) >= 0
    assert costs.k == K


class TestStudy:
    def study(self, path: Path, trials: int, resume: bool = False, recipe: Recipe = RECIPE) -> SkipSearch:
        plan = SearchPlan(**{**vars_of(PLAN), "trials": trials})
        store = RunDirectory(path, {"plan": "test"}, Provenance.collect("cpu"), resume)
        return SkipSearch(recipe, loaded(), PROMPTS, plan, store)

    def test_it_measures_keeps_and_names_the_fastest(self, tmp_path: Path) -> None:
        study = self.study(tmp_path / "run", 4)
        study.prepare()
        found = study.run()
        rows = [json.loads(line) for line in (tmp_path / "run" / "results.jsonl").read_text().splitlines()]
        assert len(rows) == 4
        assert all(row["equal_texts"] == len(PROMPTS) for row in rows)
        assert all(1.0 <= row["acceptance_length"] <= K + 1 for row in rows)
        assert found.ratio == max(each.ratio for each in study.ranked())
        assert sum(each.num_trials for each in study.ranked()) == 4
        best = load_recipe(tmp_path / "run" / "best.yaml")
        assert best == study.recipe_with(found.skip)
        assert best.draft is not None
        assert best.draft.k == K

    def test_a_stopped_study_goes_on(self, tmp_path: Path) -> None:
        self.study(tmp_path / "run", 2).run()
        first = (tmp_path / "run" / "results.jsonl").read_text()
        study = self.study(tmp_path / "run", 5, resume=True)
        study.run()
        both = (tmp_path / "run" / "results.jsonl").read_text()
        assert both.startswith(first)
        assert [json.loads(line)["repetition"] for line in both.splitlines()] == [0, 1, 2, 3, 4]

    def test_the_recipes_own_set_is_measured_first(self, tmp_path: Path) -> None:
        own = parse_recipe({"draft": {"method": "layer_skip", "k": K, "skip_mlp": (1,)}})
        study = self.study(tmp_path / "run", 1, recipe=own)
        study.prepare()
        study.run()
        (row,) = study.store.rows
        assert (row["skip_attention"], row["skip_mlp"]) == ([], [1])

    def test_no_trial_begins_after_the_budget(self, tmp_path: Path) -> None:
        plan = SearchPlan(**{**vars_of(PLAN), "budget_s": 0.0})
        store = RunDirectory(tmp_path / "run", {}, Provenance.collect("cpu"))
        SkipSearch(RECIPE, loaded(), PROMPTS, plan, store).run()
        assert len(store.rows) == 1

    @pytest.mark.parametrize(
        "data",
        [
            {},
            {"draft": {"method": "ngram"}},
            {"draft": {"method": "early_exit"}},
            {"draft": {"method": "layer_skip", "k": 0}},
        ],
    )
    def test_recipes_without_sublayers_to_skip_are_refused(self, data: dict[str, Any]) -> None:
        with pytest.raises(RecipeError, match="skip_attention"):
            check_recipe(parse_recipe(data))


def vars_of(plan: SearchPlan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in SearchPlan.__dataclass_fields__}

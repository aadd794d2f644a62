"""Self-speculation: sub-layers left out, early exits whose states verification goes on from, the exit adapter."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_adapter, make_model, make_native
from pydantic import ValidationError
from safetensors.torch import save_file
from tiny import VOCAB, NumberText, tiny_target

from specflow.draft.base import Needs, SourceContext
from specflow.draft.lm_shared import SharedLayers, open_adapter
from specflow.draft.lm_steps import Shortcut
from specflow.draft.sources.skipped_layers import SOURCE, SkippedLayersConfig, build
from specflow.draft.steps import Frontier
from specflow.engine import Engine, EngineParts, EngineSettings
from specflow.errors import CheckpointError, GraphError
from specflow.handover import score_block
from specflow.length import Additive, Fixed
from specflow.measure import merge_counts
from specflow.target.base import Target
from specflow.types import DraftBudget, Generation, Sampling, Skip
from specflow.verify import BlockRule, Match, Rule

PROMPTS = [[5, 9, 33, 17, 40, 41] * 3, [7], [3, 4, 5, 9], [11] * 58]
GREEDY = Sampling(max_new_tokens=20, ignore_eos=True, seed=3)
WARM = Sampling(max_new_tokens=20, ignore_eos=True, seed=3, temperature=0.9, top_k=20)
SKIPS = {"skip_attention": (1,), "skip_mlp": (2,)}
LAYERS = 4


@cache
def target_of(kind: str = "float64") -> Target:
    model = make_model("llama3_rope", vocab_size=VOCAB, num_hidden_layers=LAYERS)
    if kind == "adapter":
        return make_adapter(model, torch.float64)
    return make_native(model, getattr(torch, kind))


def drafting(options: dict[str, Any], k: int = 4, draw: Any = "greedy", target: Target | None = None) -> Any:
    context = SourceContext(target=target or target_of(), k=k, dependency="ar", draw=draw)
    return build(SkippedLayersConfig(**options), context)


def decode(
    drafter: Any, sampling: Sampling, target: Target | None = None, batch: int = 1, **parts: Any
) -> list[Generation]:
    chosen = {"rule": Match(), "length": Fixed(drafter.num_nodes if drafter else 0), **parts}
    whole = EngineParts(target or target_of(), NumberText(), drafter=drafter, **chosen)  # type: ignore[arg-type]
    return Engine(whole, EngineSettings(batch=batch, prefill_chunk=8)).generate(PROMPTS, sampling)


def vanilla(sampling: Sampling, kind: str = "float64") -> list[tuple[int, ...]]:
    return _vanilla(sampling is WARM, kind)


@cache
def _vanilla(warm: bool, kind: str) -> list[tuple[int, ...]]:
    return texts(decode(None, WARM if warm else GREEDY, target_of(kind)))


def texts(generations: Sequence[Generation]) -> list[tuple[int, ...]]:
    return [generation.tokens for generation in generations]


TAIL = {"leave_out": "tail", "exit_layer": 3}


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("k", [1, 3, 16])
@pytest.mark.parametrize(("sampling", "draw"), [(GREEDY, "greedy"), (WARM, "coupled")])
@pytest.mark.parametrize("options", [SKIPS, TAIL, {**TAIL, "adapter_rank": 4}], ids=["skip", "exit", "adapter"])
def test_text_is_vanillas(options: dict[str, Any], sampling: Sampling, draw: str, k: int, batch: int) -> None:
    found = decode(drafting(options, k, draw), sampling, batch=batch)
    assert texts(found) == vanilla(sampling)
    counts = merge_counts(generation.counts for generation in found)
    assert 0 < counts.num_accepted_draft_tokens < counts.num_draft_tokens or "adapter_rank" in options


@pytest.mark.parametrize("kind", ["float64", "adapter"])
@pytest.mark.parametrize("options", [{}, {"leave_out": "tail", "exit_layer": LAYERS}], ids=["skip", "exit"])
@pytest.mark.parametrize(
    ("sampling", "draw", "rule"),
    [(GREEDY, "greedy", Match()), (WARM, "coupled", Match()), (WARM, "sampled", BlockRule())],
)
def test_with_nothing_left_out_every_draft_stands(
    options: dict[str, Any], sampling: Sampling, draw: str, rule: Rule, kind: str
) -> None:
    target = target_of(kind)
    found = decode(drafting(options, 4, draw, target), sampling, target, batch=4, rule=rule)
    counts = merge_counts(generation.counts for generation in found)
    assert counts.num_accepted_draft_tokens == counts.num_draft_tokens > 0


@pytest.mark.parametrize("options", [SKIPS, TAIL], ids=["skip", "exit"])
@pytest.mark.parametrize("shape", ["beam", "static"])
def test_trees_over_the_targets_own_cache(options: dict[str, Any], shape: str) -> None:
    expected = vanilla(GREEDY)
    drafter = drafting({**options, "shape": shape, "nodes": 8, "branch": 4}, 3)
    for batch in (1, 4):
        found = decode(drafter, GREEDY, batch=batch, length=Fixed(3))
        assert texts(found) == expected
        assert merge_counts(generation.counts for generation in found).num_accepted_draft_tokens > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [SKIPS, TAIL], ids=["skip", "exit"])
def test_text_is_vanillas_in_packed_types_where_the_target_promises_bits(options: dict[str, Any], dtype: str) -> None:
    target = target_of(dtype)
    for batch in (1, 4):
        found = decode(drafting(options, 5, target=target), GREEDY, target, batch=batch)
        same = texts(found) == vanilla(GREEDY, dtype)
        assert same or target.info.exactness != "bit-exact"
    assert dtype == "float32" or target.info.exactness == "bit-exact"


@pytest.mark.parametrize("options", [SKIPS, TAIL], ids=["skip", "exit"])
def test_chains_that_end_early_and_differ_in_length(options: dict[str, Any]) -> None:
    expected = vanilla(GREEDY)
    drafter = drafting(options, 8)
    assert texts(decode(drafter, GREEDY, batch=4, length=Additive(8, start=1))) == expected

    class Doubting(Fixed):
        def budget(self, limits: Sequence[int], contexts: Sequence[int] = ()) -> DraftBudget:
            tokens = super().budget(limits, contexts).tokens
            return DraftBudget(tokens, stop_below=(0.6,) * len(tokens))

    counts = []
    for batch in (1, 4):
        found = decode(drafter, GREEDY, batch=batch, length=Doubting(8))
        assert texts(found) == expected
        counts.append(merge_counts(generation.counts for generation in found))
    assert counts[0].num_draft_tokens < 8 * counts[0].num_rounds
    assert counts[0].num_draft_tokens == counts[1].num_draft_tokens


class TestEntry:
    def block(self, options: dict[str, Any], *budget: int, **more: Any) -> tuple[Any, Any, list[int]]:
        target = target_of()
        cache, prompts = target.new_cache(2, 64), torch.tensor([[5, 9, 33], [8, 7, 6]])
        target.forward(prompts, torch.arange(3).expand(2, -1), cache)
        cache.keep([3, 2])
        drafter, anchors = drafting(options, 4), [17, 6]
        drafter.reset(2, cache)
        return drafter.propose(anchors, DraftBudget(budget, **more), None), cache, anchors

    @pytest.mark.parametrize("budget", [(4, 4), (1, 1), (4, 2), (0, 3)])
    def test_the_rest_of_the_layers_says_what_all_say(self, budget: tuple[int, int]) -> None:
        block, cache, anchors = self.block(TAIL, *budget)
        assert block.entry.layer == 3
        assert block.entry.hidden.shape == (2, max(budget) + 1, 64)
        entered = score_block(target_of(), cache, anchors, block, Needs(taps=(3,), hidden_post=True))
        tokens = torch.cat((torch.tensor(anchors).unsqueeze(1), block.tokens), dim=1)
        positions = torch.tensor([[3], [2]]) + torch.arange(tokens.shape[1])
        whole = target_of().forward(tokens, positions, cache, taps=(3,))
        for row, count in enumerate(budget):
            rows = slice(0, count + 1)
            torch.testing.assert_close(entered.logits[row, rows], whole.logits[row, rows], atol=1e-9, rtol=0)
            torch.testing.assert_close(entered.taps[3][row, rows], whole.taps[3][row, rows], atol=1e-9, rtol=0)

    def test_a_chain_that_stopped_has_states_of_its_own_length(self) -> None:
        block, _, _ = self.block(TAIL, 4, 4, stop_below=(2.0, 2.0))
        assert block.num_nodes == 1
        assert block.entry.hidden.shape[1] == 2

    def test_skipped_sublayers_have_none(self) -> None:
        block, cache, _ = self.block(SKIPS, 3, 3)
        assert block.entry is None
        assert list(cache.lengths) == [3, 2]

    def test_nor_do_branches(self) -> None:
        model = SharedLayers(target_of(), Shortcut(exit_layer=2), 4)
        model.reset(1, 4, target_of().new_cache(1, 64))
        steps = model.open([5], [True])
        steps.extend(torch.tensor([[4, 6]]), Frontier(torch.tensor([[0, 0]]), torch.eye(2).bool().unsqueeze(0)))
        assert steps.entry(torch.tensor([[7]])) is None

    def test_taps_of_layers_that_verification_does_not_run_are_refused(self) -> None:
        block, cache, anchors = self.block(TAIL, 2, 2)
        with pytest.raises(GraphError, match=r"taps -1, 2 below layer 3"):
            score_block(target_of(), cache, anchors, block, Needs(taps=(-1, 2, 3)))

    def test_verification_runs_only_the_rest(self) -> None:
        target = make_native(make_model("llama3_rope", vocab_size=VOCAB, num_hidden_layers=LAYERS), torch.float64)
        spans, plain = [], target.forward

        def forward(tokens: Any, *args: Any, **kwargs: Any) -> Any:
            spans.append((kwargs.get("layers"), tokens.shape[1]))
            return plain(tokens, *args, **kwargs)

        target.forward = forward  # type: ignore[method-assign]
        decode(drafting(TAIL, 3, target=target), GREEDY, target)
        assert ((3, 4), 4) in spans
        assert {span for span, _ in spans} == {None, (0, 3), (3, 4)}
        assert all(rows == 1 for span, rows in spans if span == (0, 3))


def test_branches_equal_their_paths() -> None:
    def opened() -> Any:
        model = SharedLayers(target_of(), Shortcut(skip=Skip(frozenset({1}), frozenset({2}))), 4)
        cache = target_of().new_cache(1, 64)
        target_of().forward(torch.tensor([[5, 9]]), torch.tensor([[0, 1]]), cache)
        cache.keep([2])
        model.reset(1, 4, cache)
        return model.open([33], [True])

    tree = opened()
    tree.extend(torch.tensor([[4, 5]]), Frontier(torch.tensor([[0, 0]]), torch.eye(2).bool().unsqueeze(0)))
    visible = torch.tensor([[[0, 1, 1]]]).bool()
    below = tree.extend(torch.tensor([[7]]), Frontier(torch.tensor([[2]]), visible))
    chain = opened()
    chain.extend(torch.tensor([[5]]))
    torch.testing.assert_close(below, chain.extend(torch.tensor([[7]])), atol=1e-9, rtol=0)


class TestAdapter:
    def test_a_trained_one_changes_the_draft_as_it_says(self, tmp_path: Path) -> None:
        down, up = torch.randn(4, 64), torch.zeros(64, 4)
        save_file({"adapter.down.weight": down, "adapter.up.weight": up}, tmp_path / "model.safetensors")
        options = {**TAIL, "adapter_rank": 4}
        neutral = decode(drafting({**options, "weights": str(tmp_path)}), GREEDY)
        counts = [merge_counts(g.counts for g in each) for each in (neutral, decode(drafting(TAIL), GREEDY))]
        assert counts[0] == counts[1]
        hidden = torch.randn(2, 3, 64, dtype=torch.float64)
        save_file({"adapter.down.weight": down, "adapter.up.weight": up + 1}, tmp_path / "model.safetensors")
        changed = open_adapter(str(tmp_path), 0, 4, target_of())(hidden)
        torch.testing.assert_close(changed, hidden + (hidden @ down.double().T).sum(-1, keepdim=True))

    def test_one_without_its_rank_is_refused(self, tmp_path: Path) -> None:
        save_file({"adapter.down.weight": torch.zeros(4, 64)}, tmp_path / "model.safetensors")
        with pytest.raises(GraphError, match=r"draft\.weights: an adapter without adapter_rank"):
            drafting({**TAIL, "weights": str(tmp_path)})

    def test_a_checkpoint_of_another_rank_is_refused(self, tmp_path: Path) -> None:
        save_file({"adapter.down.weight": torch.zeros(4, 64)}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"adapter\.down\.weight has shape \(4, 64\)"):
            drafting({**TAIL, "adapter_rank": 8, "weights": str(tmp_path)})


class TestOptions:
    def test_presets(self) -> None:
        assert set(SOURCE.presets()) == {"layer_skip", "early_exit"}

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"exit_layer": 2}, "exit_layer with leave_out sublayers"),
            ({"leave_out": "tail", "skip_mlp": (1,)}, "skip_mlp with leave_out tail"),
            ({"skip_mlp": (1, 1)}, "different layers"),
            ({"skip_attention": (-1,)}, "different layers"),
        ],
    )
    def test_what_makes_no_sense_together_is_refused(self, options: dict[str, Any], reason: str) -> None:
        with pytest.raises(ValidationError, match=reason):
            SkippedLayersConfig(**options)

    @pytest.mark.parametrize(
        ("options", "key"),
        [
            ({"skip_attention": (0, 4)}, "draft.skip_attention: layer 4"),
            ({"skip_mlp": (9,)}, "draft.skip_mlp: layer 9"),
            ({"leave_out": "tail", "exit_layer": 5}, "draft.exit_layer: layer 5"),
        ],
    )
    def test_layers_the_target_lacks_are_refused(self, options: dict[str, Any], key: str) -> None:
        with pytest.raises(GraphError, match=key):
            drafting(options)

    def test_the_default_exit_is_within_the_target(self) -> None:
        for target in (target_of(), tiny_target()):
            drafter = drafting({"leave_out": "tail"}, target=target)
            drafter.reset(1, target.new_cache(1, 64))
            assert drafter.propose([5], DraftBudget((2,)), None).entry.layer == 2 * target.info.num_layers // 3

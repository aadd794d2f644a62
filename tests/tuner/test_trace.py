"""Traces on disk: they go on where they ended, take drafters later, and refuse what they cannot tell."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from tracing import PLAN, PROMPTS, ROOT, TARGET, SteepCosts, recipe_at, recorded, run_for_real

from specflow.errors import DataError, GraphError, SpecFlowError
from specflow.length_base import priced_context
from specflow.recipe import Recipe, parse_recipe, recipe_data
from tuner.recorded import Trace, load_trace
from tuner.replay import Replayer, replay
from tuner.replay_types import ReplayConfig
from tuner.trace import TracedPrompt, TracePlan, record

NGRAM = recipe_at(ROOT / "recipes" / "ngram.yaml", 4)
SKIP = recipe_at(ROOT / "recipes" / "layer_skip.yaml", 3)
WORK = [TracedPrompt(str(number), "all", tokens) for number, tokens in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trace]:
    path = tmp_path_factory.mktemp("traces") / "ngram"
    return path, recorded({"ngram": NGRAM}, path)


def stamps(path: Path) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in path.rglob("*.npz")}


def test_what_a_trace_says_of_itself(made: tuple[Path, Trace]) -> None:
    path, trace = made
    info = trace.info
    assert info.num_requests == len(PROMPTS)
    assert info.num_tokens == sum(request.num_tokens for request in trace.requests) > len(PROMPTS)
    assert info.categories == ("kind0", "kind1")
    assert info.recipes == {"ngram": ("ngram",)}
    assert info.drafters["ngram"].exact_k == (1, 2, 3, 4)
    assert info.provenance["plan"]["max_new_tokens"] == PLAN.max_new_tokens
    assert info.provenance["source_sha256"]
    assert trace.context[0] == len(PROMPTS[0])
    assert load_trace(path).info == info


def test_positions_after_the_first_rejection_are_recorded(made: tuple[Path, Trace]) -> None:
    drafts = made[1].drafts["ngram"]
    assert (drafts.length > drafts.agree + 1).any()


def test_interrupted_it_goes_on_and_nothing_is_written_twice(tmp_path: Path, made: tuple[Path, Trace]) -> None:
    def stop(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record({"ngram": NGRAM}, WORK, tmp_path / "t", TARGET, PLAN, stop)
    with pytest.raises(DataError, match="not finished"):
        load_trace(tmp_path / "t")
    before = stamps(tmp_path / "t")
    assert 0 < len(before) < 2 * len(PROMPTS)
    trace = record({"ngram": NGRAM}, WORK, tmp_path / "t", TARGET, PLAN)
    after = stamps(tmp_path / "t")
    assert {file: after[file] for file in before} == before
    assert np.array_equal(trace.drafts["ngram"].agree, made[1].drafts["ngram"].agree)


def test_a_drafter_is_added_later(tmp_path: Path) -> None:
    first = recorded({"ngram": NGRAM}, tmp_path / "t")
    before = stamps(tmp_path / "t")
    both = recorded({"layer_skip": SKIP}, tmp_path / "t")
    assert list(both.drafts) == ["ngram", "layer_skip"]
    assert before.items() <= stamps(tmp_path / "t").items()
    assert np.array_equal(both.drafts["ngram"].agree, first.drafts["ngram"].agree)
    assert both.drafts["layer_skip"].agree.sum() > 0


def test_a_drafter_that_is_not_finished_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorded({"ngram": NGRAM, "layer_skip": SKIP}, tmp_path / "t")
    (tmp_path / "t" / "d1" / "000002.npz").unlink()
    trace = load_trace(tmp_path / "t")
    assert list(trace.drafts) == list(trace.info.drafters) == list(trace.info.recipes) == ["ngram"]
    assert "layer_skip was not recorded to the end" in caplog.text
    assert list(recorded({"layer_skip": SKIP}, tmp_path / "t").drafts) == ["ngram", "layer_skip"]


def test_cascades_in_any_order(tmp_path: Path) -> None:
    """Drafters of different recipes, in an order that no recipe had."""
    trace = recorded({"ngram": NGRAM, "layer_skip": SKIP}, tmp_path / "t")
    alone, copies = (replay(trace, ReplayConfig((name,), k=3)) for name in ("layer_skip", "ngram"))
    first = replay(trace, ReplayConfig(("ngram", "layer_skip"), k=3))
    never = replay(trace, ReplayConfig(("layer_skip", "ngram"), k=3))
    assert [each.rounds for each in never.requests] == [each.rounds for each in alone.requests]
    assert first.counts.num_spec_steps > copies.counts.num_spec_steps
    assert first.drafted != alone.drafted


def test_another_trace_is_refused(made: tuple[Path, Trace], tmp_path: Path) -> None:
    path, _ = made
    with pytest.raises(DataError, match="sampling"):
        record({"ngram": NGRAM}, WORK, path, TARGET, TracePlan(max_new_tokens=7, seed=3))
    with pytest.raises(DataError, match="other prompts"):
        record({"ngram": NGRAM}, WORK[:2], path, TARGET, PLAN)
    with pytest.raises(DataError, match="another section"):
        recorded({"ngram": recipe_at(ROOT / "recipes" / "ngram.yaml", 2)}, path)
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    with pytest.raises(DataError, match="no trace"):
        recorded({"ngram": NGRAM}, tmp_path)
    with pytest.raises(DataError, match="no prompts"):
        record({"ngram": NGRAM}, [], tmp_path / "t", TARGET)


def test_drafts_that_depend_on_earlier_requests_are_refused(tmp_path: Path) -> None:
    shared = recipe_at(ROOT / "recipes" / "suffix.yaml", 4, ["draft.share=true"])
    with pytest.raises(GraphError, match="requests that came before"):
        recorded({"suffix": shared}, tmp_path / "t")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (ReplayConfig(("dspark",), k=4), "does not have"),
        (ReplayConfig(("ngram",), k=5), "recorded at 4"),
        (ReplayConfig(("ngram",), k=4, policy="bold"), "'bold'"),
        (ReplayConfig(("ngram",), k=4, policy="additive", options={"up": -1}), "length.*up"),
        (ReplayConfig(("ngram",), k=4, rule="mach"), "'mach'"),
        (ReplayConfig(("ngram",), k=4, categories=("poems",)), "poems"),
        (ReplayConfig(("ngram",), k=4, concurrency=0), "at least 1"),
    ],
)
def test_what_a_trace_cannot_tell(config: ReplayConfig, reason: str, made: tuple[Path, Trace]) -> None:
    with pytest.raises(DataError, match=rf"(?s){reason}"):
        replay(made[1], config)


def test_ranges_of_context_and_categories_add_up(made: tuple[Path, Trace]) -> None:
    player = Replayer(made[1])
    whole = player.run(ReplayConfig(("ngram",), k=4))
    parts = [player.run(ReplayConfig(("ngram",), k=4, contexts=each)) for each in ((0, 30), (30, 10**6))]
    kinds = [player.run(ReplayConfig(("ngram",), k=4, categories=(each,))) for each in ("kind0", "kind1")]
    for split in (parts, kinds):
        assert min(each.rounds for each in split) > 0
        assert sum(each.rounds for each in split) == whole.rounds
        assert sum(each.accepted for each in split) == whole.accepted
        assert sum(each.tokens for each in split) == whole.tokens


def problem_with(path: Path) -> str:
    """What is said of a trace that cannot be read; its path where it can."""
    try:
        load_trace(path)
    except SpecFlowError as error:
        return str(error)
    return str(path)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    recorded({"ngram": NGRAM}, tmp_path / "t")
    file, draw = tmp_path / "t" / "d0" / "000001.npz", random.Random(0)
    good = file.read_bytes()
    for _ in range(30):
        broken = bytearray(good[: draw.randrange(1, len(good))] if draw.random() < 0.5 else good)
        broken[draw.randrange(len(broken))] ^= 1 << draw.randrange(8)
        file.write_bytes(broken)
        assert str(tmp_path) in problem_with(tmp_path / "t")
    file.write_bytes(good[:40])
    with pytest.raises(DataError, match=r"000001\.npz"):
        load_trace(tmp_path / "t")


def test_damaged_headers_are_refused(tmp_path: Path) -> None:
    recorded({"ngram": NGRAM}, tmp_path / "t")
    file = tmp_path / "t" / "trace.json"
    good = json.loads(file.read_text(encoding="utf-8"))
    for name in good:
        for value in (None, [], {}, 3, "x"):
            file.write_text(json.dumps({**good, name: value}), encoding="utf-8")
            assert str(tmp_path) in problem_with(tmp_path / "t")
    file.write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match="cannot be read"):
        load_trace(tmp_path / "t")


@pytest.mark.parametrize("name", ["dspark", "layer_skip", "medusa", "history_then_dspark"])
def test_sampled_texts_under_match_are_replayed_exactly(name: str, tmp_path: Path) -> None:
    settings = ["sampling.temperature=0.7", "verify.rule=match", "length.policy=fixed"]
    recipe = recipe_at(ROOT / "recipes" / f"{name}.yaml", 4, settings)
    trace = recorded({name: recipe}, tmp_path / "t")
    assert not trace.info.greedy
    result, real = replay(trace, ReplayConfig.of(recipe, trace.info)), run_for_real(recipe)
    assert [each.rounds for each in result.requests] == real.rounds
    assert result.accepted > 0
    with pytest.raises(DataError, match="lossless rule"):
        replay(trace, ReplayConfig.of(recipe, trace.info, rule="typical"))


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_sampled_acceptance_is_within_the_interval_of_a_real_run(rule: str, tmp_path: Path) -> None:
    """Other seeds, other texts: only their law is the same."""
    settings = ["sampling.temperature=0.9", f"verify.rule={rule}", "length.policy=fixed", "draft.skip_mlp=[]"]
    recipe = recipe_at(ROOT / "recipes" / "layer_skip.yaml", 4, settings)
    prompts = tuple((5 + number % 7, 9, 33, 17 + number % 5) for number in range(40))
    plan = TracePlan(max_new_tokens=16, ignore_eos=True, seed=10**6, batch=20)
    trace = recorded({"layer_skip": recipe}, tmp_path / "t", plan, prompts)
    result = replay(trace, ReplayConfig.of(recipe, trace.info, draws=8))
    real = run_for_real(recipe, plan=TracePlan(max_new_tokens=16, ignore_eos=True, seed=1), batch=20, prompts=prompts)
    mean, error = spread_of([each.rounds for each in result.requests[: len(prompts)]])
    expected, doubt = spread_of(real.rounds)
    assert abs(1 + result.accepted / result.rounds - expected) < 4 * np.hypot(error, doubt)
    assert mean > 1.05
    assert len(result.requests) == 8 * len(prompts)


def spread_of(rounds: list[tuple[tuple[int, int], ...]]) -> tuple[float, float]:
    """Acceptance length and its standard error, requests being independent."""
    accepted = np.array([sum(each for _, each in request) for request in rounds], dtype=float)
    count = np.array([len(request) for request in rounds], dtype=float)
    mean = accepted.sum() / count.sum()
    return 1 + mean, float(np.sqrt(((accepted - mean * count) ** 2).sum()) / count.sum())


def test_a_merged_tree_is_replayed(tmp_path: Path) -> None:
    """All sources in one tree: its nodes at every depth are what a run would verify."""
    parts = [{"method": "ngram", "min_match": 1}, {"method": "layer_skip", "skip_attention": [1], "shape": "beam"}]
    recipe = parse_recipe({"name": "both", "draft": {"k": 3, "merge": parts, "nodes": 12}, "verify": {"rule": "match"}})
    trace = recorded({"both": recipe}, tmp_path / "t")
    for k in (2, 3):
        asked = recipe.model_copy(update={"draft": drafted_to(recipe, k)})
        result, real = replay(trace, ReplayConfig.of(asked, trace.info)), run_for_real(asked)
        assert [each.rounds for each in result.requests] == real.rounds
        assert result.accepted > 0


def drafted_to(recipe: Recipe, k: int) -> object:
    data = recipe_data(recipe)
    return parse_recipe({**data, "draft": {**data["draft"], "k": k}}).draft


def test_seconds_are_those_of_the_cost_model(made: tuple[Path, Trace]) -> None:
    """Round by round, of requests that ended at their length: what follows a stop id is priced, but not counted."""
    costs, trace = SteepCosts(), made[1]
    player = Replayer(trace, costs)
    alone = player.run(ReplayConfig(("ngram",), k=4))
    checked = 0
    for request in alone.requests:
        if request.tokens == trace.requests[request.request].most:
            context, expected = request.context, 0.0
            for drafted, accepted in request.rounds:
                expected += costs.round_s(drafted, 1, priced_context(context))
                context += accepted + 1
            assert request.seconds == pytest.approx(expected)
            checked += 1
    assert checked
    assert alone.seconds == pytest.approx(sum(request.seconds for request in alone.requests))
    shared = player.run(ReplayConfig(("ngram",), k=4, concurrency=3))
    assert shared.counts == alone.counts
    assert shared.seconds < alone.seconds
    slowest, alone_slowest = shared.p95_latency_s, alone.p95_latency_s
    assert slowest is not None
    assert alone_slowest is not None
    assert slowest > alone_slowest

"""Lanes decide what the engine's own policies decide, round by round: random traces, options and costs."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from made_traces import Made, made_trace

from specflow.errors import DataError
from specflow.law import PointMass
from specflow.length import POLICIES, Until
from specflow.length_match import GOES_ON, best_length
from specflow.tree import chain
from specflow.types import DraftBlock, DraftBudget
from tuner import lane_match
from tuner.chances import along_text, stand_chances
from tuner.deciders import Served, Setting
from tuner.recorded import Trace
from tuner.replay import Replayer, replay
from tuner.replay_types import ReplayConfig, ReplayResult

DRAFTERS = {
    "prefix": Made(),
    "context": Made(0.7, "context"),
    "poor": Made(0.15),
    "unsure": Made(0.5, None),
    "copies": Made(0.8, None, copies=True, absent=0.5),
    "poor_copies": Made(0.2, None, copies=True, absent=0.3),
    "tree": Made(0.5, None, tree=True),
    "told": Made(0.6, "self", sampled=True),
    "drawn": Made(0.6, "prefix", sampled=True),
}
K = 9


class RandomCosts:
    """Seconds that grow with depth in steps of any size, some of them none, and with the context."""

    def __init__(self, seed: int) -> None:
        dice = random.Random(seed)
        self._draft, self._verify = [0.0], [1.0]
        for _ in range(K):
            self._draft.append(self._draft[-1] + dice.choice([0.0, 0.01, 0.1]) * dice.random())
            self._verify.append(self._verify[-1] + dice.choice([0.0, 0.1, 0.5]) * dice.random())
        self._slope = dice.choice([0.0, 1e-3])

    def draft_s(self, depth: int, batch: int, context: int) -> float:
        return self._draft[depth] * batch

    def verify_s(self, depth: int, batch: int, context: int) -> float:
        return self._verify[depth] * (1.0 + self._slope * context)

    def overhead_s(self, depth: int = 0, batch: int = 1) -> float:
        return 0.03

    def round_s(self, depth: int, batch: int, context: int) -> float:
        return self.draft_s(depth, batch, context) + self.verify_s(depth, batch, context) + self.overhead_s()


def options(policy: str, dice: random.Random) -> dict[str, Any]:
    """Any that are valid."""
    ranges: dict[str, dict[str, Any]] = {
        "additive": {"start": [None, 1, 4], "up": [0, 1, 2, 5], "down": [0, 1, 3]},
        "threshold": {"target": [0.3, 0.6, 0.9], "start": [0.0, 0.4, 0.9], "step": [0.0, 0.01, 0.5]},
        "match": {"per_match": [0.3, 1.0, 2.0, 2.5], "row_price": [0.0, 0.08, 0.5], "probe": [1, 3, 16]},
        "expected_gain": {"hysteresis": [1.0, 1.03, 1.5], "probe": [1, 2, 16], "trim": [True, True, False]},
    }
    return {name: dice.choice(values) for name, values in ranges[policy].items()}


@pytest.fixture(scope="module")
def trace() -> Trace:
    dice = random.Random(5)
    return made_trace(DRAFTERS, [2, *(dice.randrange(2, 120) for _ in range(8))], K, seed=1)


def block(length: int, sure: Any, served: Served, matched: int) -> DraftBlock:
    """One chain."""
    tokens = torch.zeros(1, length, dtype=torch.int64)
    law = PointMass(tokens, 1)
    if served.weighed:
        law = type("Drawn", (), {"is_point": False, "narrow": lambda self, width: self})()
    return DraftBlock(
        tokens,
        (length,),
        chain(length, tokens.device),
        law,
        confidence=None if sure is None else torch.from_numpy(sure[None, :length].copy()),
        confidence_from=served.kind,
        match_lengths=(matched,) if served.copies else None,
    )


class Alone:
    """Requests decoded one at a time, the engine's own policy asked for each round."""

    def __init__(self, setting: Setting, policy: Any) -> None:
        self.setting, self.policy, self.trace = setting, policy, setting.trace

    def request(self, number: int) -> list[tuple[int, int]]:
        """Nodes and accepted tokens of every round, counted as the engine counts: what a stop cuts off is not."""
        at, rounds, trace = self.trace.requests[number].first, [], self.trace
        self.policy.reset(1)
        self.policy.start(0)
        while at < trace.requests[number].end:
            left = int(trace.left[at])
            budget = self.policy.budget([int(trace.limit[at])], [int(trace.context[at])])
            depth, nodes, accepted = self.round(at, budget)
            self.policy.observe([depth], [min(accepted, left - 1)])
            seen = min(depth, left) if accepted + 1 >= left else depth
            rounds.append((nodes - (depth - seen), min(accepted, left)))
            at += accepted + 1
        return rounds

    def round(self, at: int, budget: DraftBudget) -> tuple[int, int, int]:
        """Depth verified, nodes and accepted tokens."""
        for served in self.setting.served if budget.tokens[0] else ():
            drafts, most = served.drafts, min(budget.tokens[0], served.k)
            if served.tree:
                deep, nodes, agree = (int(table[at, most - 1]) for table in (drafts.length, drafts.nodes, drafts.agree))
                return deep, nodes, min(agree, deep)
            matched = int(drafts.match[at]) if served.copies else 0
            most = min(most, int(drafts.length[at]))
            most = min(most, budget.most(0, matched)) if matched else most
            if most:
                depth, accepted = self.chain(at, served, (most, matched), budget)
                return depth, depth, accepted
        return 0, 0, 0

    def chain(self, at: int, served: Served, size: tuple[int, int], budget: DraftBudget) -> tuple[int, int]:
        """What is verified of a chain, and accepted."""
        drafts, (length, matched) = served.drafts, size
        accepted = min(int(served.agree[at]), length)
        lengths = []
        for chance, sure in ((drafts.chance, drafts.confidence), (drafts.law, drafts.law_confidence)):
            kept = length
            if budget.stop_below is not None and chance is not None:
                unsure = [place for place in range(length) if float(chance[at, place]) < budget.stop_below[0]]
                kept = min([length, *(place + 1 for place in unsure)])
            cut = self.policy.trim(block(kept, None if sure is None else sure[at], served, matched))
            lengths.append(cut.lengths[0])
            if not served.weighed:
                return lengths[0], min(accepted, lengths[0])
        accepted = min(accepted, lengths[1])
        return max(lengths[0], accepted), accepted


def expected(trace: Trace, config: ReplayConfig, costs: RandomCosts | None) -> list[tuple[tuple[int, int], ...]]:
    """Rounds of each request of each draw."""
    rounds, chance = [], np.random.default_rng(config.seed)
    each = [trace.drafts[name] for name in config.drafters]
    weighed = [drafts.info.sampled and config.rule != "match" for drafts in each]
    for _ in range(config.draws if any(weighed) else 1):
        u, served = chance.random(trace.num_positions)[:, None], []
        for drafts, k, law in zip(each, config.part_k or (config.k,), weighed, strict=True):
            agree = drafts.agree
            if law:
                p, ahead = along_text(trace.chance, trace.left, K), np.arange(K) < trace.left[:, None]
                agree = (u < stand_chances(p, np.where(ahead, drafts.law, 0.0), config.rule)).sum(axis=1)
            served.append(Served(drafts, k, agree, law))
        policy = POLICIES[config.policy].policy(k=config.k, **config.options)
        if costs is not None and POLICIES[config.policy].priced:
            policy.use(costs)
        policy = policy if config.until is None else Until(policy, config.until)
        alone = Alone(Setting(trace, tuple(served)), policy)
        wanted = config.categories or trace.info.categories
        rounds += [tuple(alone.request(n)) for n, one in enumerate(trace.requests) if one.category in wanted]
    return rounds


CASES: Mapping[str, list[tuple[str, ...]]] = {
    "additive": [("prefix",), ("copies", "context"), ("tree",), ("told",)],
    "threshold": [("prefix",), ("poor",), ("copies", "prefix"), ("told",), ("drawn",)],
    "match": [("copies",), ("poor_copies",), ("copies", "prefix"), ("poor_copies", "copies"), ("copies", "tree")],
    "expected_gain": [
        *(("prefix",), ("context",), ("poor",), ("unsure",), ("tree",), ("told",), ("drawn",)),
        *(("copies", "prefix"), ("poor", "context"), ("copies", "tree"), ("copies", "told")),
    ],
}


@pytest.mark.parametrize("priced", [True, False])
@pytest.mark.parametrize("policy", CASES)
def test_lanes_decide_what_the_engine_decides(policy: str, priced: bool, trace: Trace) -> None:
    dice, drafted, plain = random.Random(f"{policy} {priced}"), 0, 0
    for drafters in CASES[policy]:
        costs = RandomCosts(dice.randrange(10**6)) if priced else None
        rules = ["rejection", "block"] if any(DRAFTERS[name].sampled for name in drafters) else ["match"]
        configs = [
            ReplayConfig(
                drafters,
                k=(k := dice.choice([1, 2, 4, 8, K])),
                part_k=() if len(drafters) == 1 else (min(k, 3), k),
                policy=policy,
                options=options(policy, dice),
                until=dice.choice([None, 1, 60, 110, 150]),
                rule=dice.choice(rules),
                categories=dice.choice([(), (), ("kind1",)]),
                draws=2,
            )
            for _ in range(4)
        ]
        for config, result in zip(configs, Replayer(trace, costs).run_many(configs), strict=True):
            assert isinstance(result, ReplayResult)
            found = [each.rounds for each in result.requests]
            assert found == expected(trace, config, costs), config
            drafted += result.drafted
            plain += sum(not nodes for each in found for nodes, _ in each)
    assert drafted > 1000
    assert plain > 100


def test_one_at_a_time_is_as_many_at_once(trace: Trace) -> None:
    """Whatever shares the lanes, and in whatever order; requests decoded together as well as alone."""
    dice = random.Random(3)
    configs = [
        ReplayConfig(("copies", "prefix"), k=k, policy=policy, options=options(policy, dice), concurrency=rows)
        for policy in CASES
        for k in (2, 8)
        for rows in (1, 3)
    ]
    dice.shuffle(configs)
    player, costs = Replayer(trace, RandomCosts(1)), RandomCosts(1)
    for config, result in zip(configs, player.run_many(configs), strict=True):
        alone = replay(trace, config, costs)
        assert isinstance(result, ReplayResult)
        assert result == alone


def test_what_cannot_be_replayed_does_not_stop_the_others(trace: Trace) -> None:
    good = ReplayConfig(("prefix",), k=4, policy="additive")
    bad = ReplayConfig(("prefix",), k=K + 1, policy="additive")
    first, refused, last = Replayer(trace).run_many([good, bad, good])
    assert first == last
    assert isinstance(refused, DataError)
    assert "recorded at" in str(refused)


@pytest.mark.parametrize("priced", [True, False])
def test_an_unknown_policy_is_named_whatever_k_is(priced: bool, trace: Trace) -> None:
    player = Replayer(trace, RandomCosts(0) if priced else None)
    for config in (ReplayConfig(policy="guess"), ReplayConfig(("prefix",), k=4, policy="guess")):
        with pytest.raises(DataError, match=r"length\.policy.*guess"):
            player.run(config)


class Steep(RandomCosts):
    """Dear rounds: drafting pays where more than two tokens stand, and not on the whole."""

    def round_s(self, depth: int, batch: int, context: int) -> float:
        return 1.0 + (1.5 + 0.1 * depth if depth else 0.0)


def test_probes_that_paid_are_followed_by_others_at_once(trace: Trace) -> None:
    """Some pay and some do not, of a drafter that is parked most of the time."""
    for probe in (1, 2, 3):
        config = ReplayConfig(("prefix",), k=K, policy="expected_gain", options={"probe": probe, "trim": False})
        result = Replayer(trace, Steep(0)).run(config)
        found = [each.rounds for each in result.requests]
        assert found == expected(trace, config, Steep(0))
        probes = [accepted for each in found for nodes, accepted in each if nodes]
        assert any(accepted > 2 for accepted in probes)
        assert any(accepted < 2 for accepted in probes)


class Tied(RandomCosts):
    """A round of each depth costs what a long match is first believed to yield, give or take a last digit."""

    def __init__(self, nudge: int) -> None:
        super().__init__(0)
        self._yields, stands = [1.0], 1.0
        for _ in range(K):
            stands *= GOES_ON[-1]
            self._yields.append(self._yields[-1] + stands)
        self._toward = (0.0, np.inf)[nudge > 0] if nudge else None

    def round_s(self, depth: int, batch: int, context: int) -> float:
        seconds = self._yields[depth]
        return seconds if self._toward is None or depth % 2 else float(np.nextafter(seconds, self._toward))


@pytest.mark.parametrize("nudge", [-1, 0, 1])
def test_rates_too_close_to_tell_are_left_to_the_policy(nudge: int) -> None:
    """Its own rounding decides, so its own sums are asked."""
    made = made_trace({"copies": Made(0.9, None, copies=True, absent=0.2)}, [40] * 6, K, seed=4)
    copies = made.drafts["copies"]
    made = replace(made, drafts={"copies": replace(copies, match=np.where(copies.length > 0, 70, 0))})
    costs, config = Tied(nudge), ReplayConfig(("copies",), k=K, policy="match", options={"probe": 2})
    with patch.object(lane_match, "best_length", side_effect=best_length) as asked:
        found = Replayer(made, costs).run(config)
    assert asked.called
    assert [each.rounds for each in found.requests] == expected(made, config, costs)

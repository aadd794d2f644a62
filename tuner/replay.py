"""Replays: any length of draft, length policy, cascade, rule and concurrency, simulated on a trace in milliseconds.

    player = Replayer(load_trace(path), cost)        # keeps tables between configurations
    result = player.run(ReplayConfig(("dspark",), k=6))

Where the text follows from the seed (greedy decoding, or rule match) the rounds are those of a real run, one by one.
Rules that weigh p against q keep the law of the text: there acceptance is replayed in law (`tuner.chances`). A length
policy that cuts by confidence then decides how much of its own draft is verified, and along the text how far that went.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from pydantic import ValidationError

from specflow.errors import DataError
from specflow.length import POLICIES, Additive, ByMatch, ExpectedGain, Fixed, Threshold
from specflow.recipe_sections import length_sections
from specflow.rules import RULE_INFOS
from tuner.chances import along_text, stand_chances
from tuner.deciders import Served, Setting, Together, by_position, keeps_no_state
from tuner.lane_counts import AdditiveLanes, ThresholdLanes
from tuner.lane_gain import GainLanes
from tuner.lane_match import MatchLanes
from tuner.lane_prices import LanePrices
from tuner.lanes import Slot, walk_lanes
from tuner.prices import Prices
from tuner.replay_types import ReplayConfig, ReplayResult, RoundCosts
from tuner.tally import Spent, result_of
from tuner.walk import Walk, step_by_step, straight

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from specflow.length import Costs, LengthPolicy
    from tuner.lanes import MakePolicy
    from tuner.recorded import Drafts, Trace

    Numbers = NDArray[Any]

__all__ = ["Replayer", "replay"]

Costing = RoundCosts | Mapping[str, RoundCosts] | None
MOST_LANES = 512
"""Lanes of one walk: more of them no longer make one cheaper."""


@runtime_checkable
class _Priced(Protocol):
    """A length policy that weighs costs."""

    def use(self, costs: Costs) -> None: ...


def replay(trace: Trace, config: ReplayConfig, cost: Costing = None) -> ReplayResult:
    """Simulate one configuration; see `Replayer`, which is faster for many.

    Raises:
        DataError: The trace cannot tell how it would go; the reason is named.
    """
    return Replayer(trace, cost).run(config)


@dataclass(frozen=True, slots=True)
class _Job:
    """One configuration, ready to be walked."""

    config: ReplayConfig
    numbers: list[int]  # requests
    slots: list[Slot]  # one for each draw

    @property
    def key(self) -> tuple[object, ...]:
        """What jobs that are walked together share."""
        policy, served = self.slots[0].policy, self.slots[0].setting.served
        return type(policy), self.config.drafters, tuple(each.weighed for each in served)


class Replayer:
    """Simulates configurations on one trace. Many at once take less time each: see `run_many`.

    Args:
        trace: What was recorded.
        cost: Seconds of rounds: one model, or one for each drafter by its name in the trace. None: counts alone;
            policies that weigh costs go by prices of their own, and one that has none drafts all it may.
    """

    def __init__(self, trace: Trace, cost: Costing = None) -> None:
        self._trace = trace
        self._deepest = max((info.k for info in trace.info.drafters.values()), default=0)
        self._prices = None if cost is None else Prices(cost, self._deepest)
        self._lane_prices: dict[str, LanePrices] = {}  # by whose costs they are
        self._stood: dict[tuple[object, ...], list[Numbers]] = {}  # tokens that stand, as chance had it, by draw

    def run(self, config: ReplayConfig) -> ReplayResult:
        """Simulate one configuration.

        Raises:
            DataError: The trace cannot tell how it would go; the reason is named.
        """
        (found,) = self.run_many((config,))
        if isinstance(found, DataError):
            raise found
        return found

    def run_many(self, configs: Sequence[ReplayConfig]) -> list[ReplayResult | DataError]:
        """Simulate configurations, those whose length policy keeps a state together.

        Where requests are decoded one at a time, and where the policy weighs no costs, all requests of all
        configurations of one policy and the same drafters go step by step side by side. A policy that weighs costs for
        a batch of rows is driven round by round, one configuration after another.

        Returns:
            A result each, or why the trace cannot tell it.
        """
        jobs = [self._planned(config) for config in configs]
        walks: dict[int, list[Walk]] = {}
        shared: dict[tuple[object, ...], dict[int, _Job]] = {}
        for number, job in enumerate(jobs):
            if isinstance(job, DataError):
                continue
            if self._lanes(job) is None:
                walks[number] = [self._walk(slot) for slot in job.slots]
            else:
                shared.setdefault(job.key, {})[number] = job
        for group in shared.values():
            walks.update(self._walk_together(group))
        return [
            job if isinstance(job, DataError) else self._result(job, walks[number]) for number, job in enumerate(jobs)
        ]

    def _planned(self, config: ReplayConfig) -> _Job | DataError:
        """What there is to walk."""
        try:
            numbers = self._requests(config)
            parts = [self._part(config, number) for number in range(len(config.drafters))]
            policy, slots = self._policy(config), []
            for draw in range(config.draws if any(weighed for _, _, weighed in parts) else 1):
                served = tuple(
                    Served(drafts, k, self._stands(config, drafts)[draw] if weighed else drafts.agree, weighed)
                    for drafts, k, weighed in parts
                )
                slots.append(Slot(Setting(self._trace, served, config.until), policy, numbers, config.concurrency))
            return _Job(config, numbers, slots)
        except DataError as error:
            return error

    def _result(self, job: _Job, walks: Sequence[Walk]) -> ReplayResult | DataError:
        try:
            spent = [(walk, self._spent(job.config, walk)) for walk in walks]
            return result_of(job.config, self._trace, spent, job.numbers)
        except DataError as error:
            return error

    def _walk_together(self, jobs: Mapping[int, _Job]) -> dict[int, list[Walk]]:
        """Walks of jobs that share lanes, by job."""
        make = self._lanes(next(iter(jobs.values())))
        assert make is not None
        found: dict[int, list[Walk]] = {number: [] for number in jobs}
        slots = [(number, slot) for number, job in jobs.items() for slot in job.slots]
        while slots:
            lanes = np.cumsum([len(slot.numbers) for _, slot in slots])
            count = max(int(np.searchsorted(lanes, MOST_LANES, side="right")), 1)
            together, slots = slots[:count], slots[count:]
            for (number, _), walk in zip(together, walk_lanes([slot for _, slot in together], make), strict=True):
                found[number].append(walk)
        return found

    def _lanes(self, job: _Job) -> MakePolicy | None:
        """The length policy over lanes; None where requests share decisions, or it has no such form."""
        policy, priced = job.slots[0].policy, self._prices is not None and POLICIES[job.config.policy].priced
        if priced and min(job.config.concurrency, len(job.numbers)) > 1:
            return None
        if isinstance(policy, Additive):
            return AdditiveLanes
        if isinstance(policy, Threshold):
            return ThresholdLanes
        if isinstance(policy, ByMatch):
            return partial(MatchLanes, prices=self._priced(job.config) if priced else None)
        if isinstance(policy, ExpectedGain):
            return partial(GainLanes, prices=self._priced(job.config))
        return None

    def _priced(self, config: ReplayConfig) -> LanePrices:
        """What a policy that weighs costs reads of them, at every position."""
        name = config.drafters[-1]
        if name not in self._lane_prices:
            self._lane_prices[name] = LanePrices(self._trace, self._costs(config), self._deepest)
        return self._lane_prices[name]

    def _costs(self, config: ReplayConfig) -> Costs:
        """What a length policy is given.

        Raises:
            DataError: No model has them.
        """
        name = config.drafters[-1]
        costs = None if self._prices is None else self._prices.of(name)
        if costs is None:
            raise DataError("cost", f"no cost model of {name}", "one for each drafter")
        return costs

    def _requests(self, config: ReplayConfig) -> list[int]:
        """Requests that take part."""
        wanted = set(config.categories)
        if unknown := sorted(wanted - set(self._trace.info.categories)):
            known = ", ".join(self._trace.info.categories)
            raise DataError("categories", f"'{unknown[0]}', which the trace does not have", f"one of: {known}")
        if config.concurrency < 1 or config.draws < 1:
            found = f"concurrency {config.concurrency}, draws {config.draws}"
            raise DataError("replay", found, "at least 1 each")
        requests = enumerate(self._trace.requests)
        return [number for number, each in requests if not wanted or each.category in wanted]

    def _part(self, config: ReplayConfig, number: int) -> tuple[Drafts, int, bool]:
        """A drafter, how deep it is asked to go, and whether the rule weighs its law."""
        name = config.drafters[number]
        drafts = self._trace.drafts.get(name)
        if drafts is None:
            known = ", ".join(self._trace.drafts) or "none"
            raise DataError("drafters", f"'{name}', which the trace does not have", f"one of: {known}")
        info, k = drafts.info, config.part_k[number] if config.part_k else config.k
        if min(k, config.k) not in info.exact_k:
            hint = f"trace it again with k = {k}: the drafter of another k drafts otherwise, or goes deeper"
            exact = ", ".join(map(str, info.exact_k))
            raise DataError(f"draft.k of {name}", f"{k}, and it was recorded at {info.k}", f"one of: {exact}", hint)
        self._check_rule(config.rule, drafts)
        weighed = info.sampled and RULE_INFOS[config.rule].needs_law
        if weighed and drafts.law is None:
            raise DataError(name, f"no law for rule {config.rule}", "a trace of chains", "use rule match")
        return drafts, min(k, config.k, info.k), weighed

    def _check_rule(self, rule: str, drafts: Drafts) -> None:
        info = RULE_INFOS.get(rule)
        if info is None:
            raise DataError("verify.rule", f"'{rule}'", f"one of: {', '.join(RULE_INFOS)}")
        if info.lossy and not self._trace.info.greedy:
            found = f"{rule}, whose text is another one than that of the trace"
            raise DataError("verify.rule", found, "a lossless rule", "measure it: specflow bench")
        if drafts.info.tree and not info.trees:
            raise DataError("verify.rule", f"{rule}, and {drafts.info.name} drafts trees", "a rule that takes trees")
        if drafts.info.tree and drafts.info.sampled and info.needs_law:
            found = f"{rule} over sampled trees: what their siblings leave of q was not recorded"
            raise DataError("verify.rule", found, "match", "measure it: specflow bench")

    def _stands(self, config: ReplayConfig, drafts: Drafts) -> list[Numbers]:
        """Draft tokens that stand at every position, as chance had it in each draw.  # [P] each"""
        key = drafts.info.name, config.rule, config.seed, config.draws
        if key not in self._stood:
            assert drafts.law is not None
            trace, width = self._trace, drafts.law.shape[1]
            p = along_text(trace.chance, trace.left, width)
            q = np.where(np.arange(width) < trace.left[:, None], drafts.law, 0.0)
            chance, draw = stand_chances(p, q, config.rule), np.random.default_rng(config.seed)
            drawn = (draw.random(trace.num_positions)[:, None] for _ in range(config.draws))
            self._stood[key] = [(u < chance).sum(axis=1) for u in drawn]
        return self._stood[key]

    def _walk(self, slot: Slot) -> Walk:
        """Rounds of one slot whose policy has no lanes."""
        setting, policy = slot.setting, slot.policy
        if keeps_no_state(policy):
            return straight(self._trace, by_position(setting, policy), slot.numbers, slot.concurrency)
        return step_by_step(self._trace, Together(setting, policy), slot.numbers, slot.concurrency)

    def _policy(self, config: ReplayConfig) -> LengthPolicy:
        """The engine's own policy, with costs where it weighs them; one that needs them drafts all it may without."""
        if config.policy not in POLICIES:
            raise DataError("length.policy", f"'{config.policy}'", f"one of: {', '.join(POLICIES)}")
        if not config.drafters or config.k == 0:
            return POLICIES["fixed"].policy(k=0)
        try:
            options = length_sections()[config.policy].model_validate(dict(config.options)).options
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, ("length", *problem["loc"])))
            raise DataError(where, f"{problem['input']!r}", problem["msg"]) from error
        if POLICIES[config.policy].needs_costs and self._prices is None:
            return Fixed(config.k)
        policy = POLICIES[config.policy].policy(k=config.k, **options)
        if isinstance(policy, _Priced) and self._prices is not None:
            policy.use(self._costs(config))
        return policy

    def _spent(self, config: ReplayConfig, walk: Walk) -> Spent:
        """Seconds of every round: what its rows share."""
        count = len(walk.batch)
        if self._prices is None or not count:
            return Spent(*(np.zeros(count) for _ in range(3)))
        missing = [name for name in config.drafters if self._prices.of(name) is None]
        if missing:
            raise DataError("cost", f"no cost model of {missing[0]}", "one for each drafter")
        drafted, verified, served = (np.zeros(count, np.int64) for _ in range(3))
        for found, name in ((drafted, "drafted"), (verified, "verified"), (served, "served")):
            np.maximum.at(found, walk.round, walk.decided[name])
        context = np.bincount(walk.round, self._trace.context[walk.at], count) / walk.batch
        names = config.drafters or self._prices.names
        return Spent(*self._prices.seconds((names, served), drafted, verified, walk.batch, context))

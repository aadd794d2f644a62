"""Replays: any length of draft, length policy, cascade, rule and concurrency, simulated on a trace in milliseconds.

    player = Replayer(load_trace(path), cost)        # keeps tables between configurations
    result = player.run(ReplayConfig(("dspark",), k=6))

Where the text follows from the seed (greedy decoding, or rule match) the rounds are those of a real run, one by one.
Rules that weigh p against q keep the law of the text: there acceptance is replayed in law (`tuner.chances`). A length
policy that cuts by confidence then decides how much of its own draft is verified, and along the text how far that went.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from pydantic import ValidationError

from specflow.errors import DataError
from specflow.length import POLICIES, ExpectedGain
from specflow.recipe_sections import length_sections
from specflow.rules import RULE_INFOS
from tuner.chances import along_text, stand_chances
from tuner.deciders import Apart, Served, Setting, Together, by_position, keeps_no_state
from tuner.prices import Prices
from tuner.recalled import Chain, Recalled
from tuner.replay_types import ReplayConfig, ReplayResult, RoundCosts
from tuner.tally import Spent, result_of
from tuner.walk import Walk, side_by_side, step_by_step, straight

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from specflow.length import Costs, LengthPolicy
    from tuner.recorded import Drafts, Trace

    Numbers = NDArray[Any]

__all__ = ["Replayer", "replay"]

Costing = RoundCosts | Mapping[str, RoundCosts] | None


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


class Replayer:
    """Simulates configurations on one trace.

    Args:
        trace: What was recorded.
        cost: Seconds of rounds: one model, or one for each drafter by its name in the trace. None: counts alone, and
            policies that weigh costs act as they do without a profile.
    """

    def __init__(self, trace: Trace, cost: Costing = None) -> None:
        self._trace = trace
        deepest = max((info.k for info in trace.info.drafters.values()), default=0)
        self._prices = None if cost is None else Prices(cost, deepest)
        self._cuts: dict[str, dict[Chain, int]] = {}  # by whose costs were weighed

    def run(self, config: ReplayConfig) -> ReplayResult:
        """Simulate one configuration.

        Raises:
            DataError: The trace cannot tell how it would go; the reason is named.
        """
        numbers = self._requests(config)
        parts = [self._part(config, number) for number in range(len(config.drafters))]
        draws = config.draws if any(weighed for _, _, weighed in parts) else 1
        chance = np.random.default_rng(config.seed)
        walks = []
        for _ in range(draws):
            u = chance.random(self._trace.num_positions)
            served = tuple(
                Served(drafts, k, self._stands(config, drafts, u) if weighed else drafts.agree, weighed)
                for drafts, k, weighed in parts
            )
            walks.append(self._walk(config, Setting(self._trace, served), numbers))
        return result_of(config, self._trace, [(walk, self._spent(config, walk)) for walk in walks], numbers)

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

    def _stands(self, config: ReplayConfig, drafts: Drafts, u: Numbers) -> Numbers:
        """Draft tokens that stand at every position, as chance has it.  # [P]"""
        assert drafts.law is not None
        trace, width = self._trace, drafts.law.shape[1]
        p = along_text(trace.chance, trace.left, width)
        q = np.where(np.arange(width) < trace.left[:, None], drafts.law, 0.0)
        found: Numbers = (u[:, None] < stand_chances(p, q, config.rule)).sum(axis=1)
        return found

    def _walk(self, config: ReplayConfig, setting: Setting, numbers: Sequence[int]) -> Walk:
        policy = self._policy(config)
        trace, rows = self._trace, config.concurrency
        if keeps_no_state(policy):
            return straight(trace, by_position(setting, policy), numbers, rows)
        if self._prices is None or not POLICIES[config.policy].priced:
            return side_by_side(trace, Apart(setting, policy), numbers, rows)
        return step_by_step(trace, Together(setting, policy), numbers, rows)

    def _policy(self, config: ReplayConfig) -> LengthPolicy:
        """The engine's own policy, with costs where it weighs them."""
        if not config.drafters or config.k == 0:
            return POLICIES["fixed"].policy(k=0)
        if config.policy not in POLICIES:
            raise DataError("length.policy", f"'{config.policy}'", f"one of: {', '.join(POLICIES)}")
        try:
            options = length_sections()[config.policy].model_validate(dict(config.options)).options
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, ("length", *problem["loc"])))
            raise DataError(where, f"{problem['input']!r}", problem["msg"]) from error
        made = POLICIES[config.policy].policy
        policy = (Recalled if made is ExpectedGain else made)(k=config.k, **options)
        if isinstance(policy, _Priced) and self._prices is not None:
            if (costs := self._prices.of(config.drafters[-1])) is None:
                raise DataError("cost", f"no cost model of {config.drafters[-1]}", "one for each drafter")
            policy.use(costs)
        if isinstance(policy, Recalled):
            policy.remember(self._cuts.setdefault(config.drafters[-1], {}))
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

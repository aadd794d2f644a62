"""Measures methods against each other, prompt by prompt, in one process.

Methods take turns on every prompt, in an order that rotates with prompt and repetition, so that a slow minute of the
machine falls on all of them. The first repetition of a prompt always begins with the baseline, because the others are
compared with its tokens as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

from specflow.bench.data import BadRow, PromptRow
from specflow.bench.methods import Ask, Method, Outcome, first_divergence
from specflow.bench.results import RunDirectory
from specflow.errors import SpecFlowError
from specflow.measure import metrics, quantile
from specflow.provenance import PeakMemory

__all__ = ["Bench", "Explain", "Plan", "rotated"]

WARMUP_TOKENS = 32
Row = dict[str, Any]
Encode = Callable[[Sequence[dict[str, str]]], Sequence[int]]
Explain = Callable[[Ask, Sequence[int], Sequence[int]], Row]
"""(what was asked, a recipe's tokens, the baseline's) -> what the row says of their divergence."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured, and under which conditions."""

    max_new_tokens: int = 128
    repeat: int = 3
    warmup: int = 1
    ignore_eos: bool = False
    all_turns: bool = False
    seed: int = 0

    def num_measurements(self, prompts: Sequence[PromptRow], num_methods: int) -> int:
        """Measurements of a whole run, if none fails."""
        turns = sum(len(row.turns) if self.all_turns else 1 for row in prompts)
        return turns * num_methods * self.repeat


def rotated(methods: Sequence[Method], baseline: str, prompt: int, repetition: int) -> list[Method]:
    """Order of the methods for one prompt and repetition."""
    if repetition:
        shift = (prompt + repetition) % len(methods)
        return [*methods[shift:], *methods[:shift]]
    others = [method for method in methods if method.name != baseline]
    shift = prompt % len(others) if others else 0
    return [*(method for method in methods if method.name == baseline), *others[shift:], *others[:shift]]


class Bench:
    """One interleaved run.

    Args:
        methods: What to measure; names are unique.
        baseline: Name of the method all texts are compared with, and whose answers open later turns.
        encode: Messages to token ids, with the model's chat template.
        plan: How much, under which conditions.
        store: Where rows go, and what is done already.
        explain: Says why a lossless recipe's text differs from the baseline's; called outside everything timed.
    """

    def __init__(
        self,
        methods: Sequence[Method],
        baseline: str,
        encode: Encode,
        plan: Plan,
        store: RunDirectory,
        explain: Explain | None = None,
    ) -> None:
        assert baseline in {method.name for method in methods}
        self._methods = list(methods)
        self._baseline = baseline
        self._encode = encode
        self._plan = plan
        self._store = store
        self._explain = explain
        self._memory = PeakMemory()

    def run(self, prompts: Sequence[PromptRow], bad: Sequence[BadRow], advance: Callable[[str], None]) -> None:
        """Measure everything that is not measured yet.

        Args:
            prompts: Usable rows.
            bad: Unusable rows; kept in the results as failures.
            advance: Called with the name of what was done after every measurement.
        """
        for row in bad:
            self._store.append({"file": row.file, "line": row.line, "error": row.reason})
        for method in self._methods if self._plan.warmup else ():
            self._warm_up(method, prompts)
        for index, prompt in enumerate(prompts):
            answers: list[str] = []
            for _ in range(len(prompt.turns) if self._plan.all_turns else 1):
                answer = self._run_turn(index, prompt, answers, advance)
                if answer is None:
                    break
                answers.append(answer)

    def _warm_up(self, method: Method, prompts: Sequence[PromptRow]) -> None:
        """On the first prompt that works. Errors are left to the measurement, which meets and keeps them."""
        for prompt in prompts:
            with suppress(SpecFlowError):
                ids = tuple(self._encode(prompt.messages(0, ())))
                ask = Ask(ids, min(WARMUP_TOKENS, self._plan.max_new_tokens), True, self._plan.seed)
                for _ in range(self._plan.warmup):
                    method.generate(ask)
                return

    def _run_turn(
        self, index: int, prompt: PromptRow, answers: Sequence[str], advance: Callable[[str], None]
    ) -> str | None:
        """Measure one turn with every method; the baseline's answer, or None where there is none."""
        turn = len(answers)
        head = {"file": prompt.file, "line": prompt.line, "id": prompt.id, "category": prompt.category, "turn": turn}
        try:
            ids = tuple(self._encode(prompt.messages(turn, answers)))
        except SpecFlowError as error:
            self._store.append({**head, "error": str(error)})
            return None
        ask = Ask(ids, self._plan.max_new_tokens, self._plan.ignore_eos, self._plan.seed + index)
        reference: Row | None = None
        for repetition in range(self._plan.repeat):
            for method in rotated(self._methods, self._baseline, index, repetition):
                key = {**head, "method": method.name, "repetition": repetition}
                row = self._store.measured(key)
                if row is None:
                    row = self._measure(method, ask, key, reference)
                    self._store.append(row)
                if reference is None and method.name == self._baseline and "error" not in row:
                    reference = row
                advance(f"{prompt.id} · {method.name}")
        return str(reference["text"]) if reference else None

    def _measure(self, method: Method, ask: Ask, key: Row, reference: Row | None) -> Row:
        self._memory.reset()
        started = perf_counter()
        try:
            outcome = method.generate(ask)
        except SpecFlowError as error:
            return {**key, "kind": method.kind, **method.facts, "error": str(error)}
        wall_s = perf_counter() - started
        memory = self._memory.read()  # before a divergence is looked into, which allocates
        return {
            **key,
            "kind": method.kind,
            **method.facts,
            "prompt_tokens": len(ask.prompt),
            "seed": ask.seed,
            **_figures(outcome, wall_s),
            **self._compared(method, ask, outcome, reference),
            **memory,
            "text": outcome.text,
            "tokens": list(outcome.tokens),
        }

    def _compared(self, method: Method, ask: Ask, outcome: Outcome, reference: Row | None) -> Row:
        """Whether the text is the baseline's, where it is not, and why. Peers and lossy recipes owe no reason."""
        at = first_divergence(outcome.tokens, reference["tokens"]) if reference else None
        found: Row = {"equals_baseline": at is None if reference else None, "first_divergence": at, "divergence": None}
        if reference and at is not None and self._explain and method.kind == "recipe" and not method.facts["lossy"]:
            found |= self._explain(ask, outcome.tokens, reference["tokens"])
        return found


def _figures(outcome: Outcome, wall_s: float) -> Row:
    rate = outcome.output_tps
    return {
        "new_tokens": len(outcome.tokens),
        "first_tokens": outcome.first_tokens,
        "finish": outcome.finish,
        "wall_time": wall_s,
        "ttft_s": outcome.ttft_s,
        "decode_s": outcome.decode_s,
        "output_tps": rate,
        "tpot_s": 1.0 / rate if rate else None,
        "itl_median_s": quantile(outcome.waits, 0.5),
        "itl_p95_s": quantile(outcome.waits, 0.95),
        "num_deliveries": len(outcome.deliveries),
        "decoding_steps": outcome.rounds,
        "tokens_per_round": outcome.tokens_per_round,
        "timings": asdict(outcome.timings) if outcome.timings else None,
        "counts": asdict(outcome.counts) if outcome.counts else None,
        "metrics": metrics(outcome.counts) if outcome.counts else None,
    }

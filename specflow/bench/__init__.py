"""Measuring recipes and peers against each other, prompt by prompt."""

from __future__ import annotations

from specflow.bench.data import BadRow, PromptRow, load_prompts, read_prompts
from specflow.bench.methods import Ask, EngineMethod, Method, Outcome
from specflow.bench.results import RunDirectory
from specflow.bench.runner import Bench, Plan
from specflow.bench.summary import SummaryRow, acceptance_rows, summarise

__all__ = [
    "Ask",
    "BadRow",
    "Bench",
    "EngineMethod",
    "Method",
    "Outcome",
    "Plan",
    "PromptRow",
    "RunDirectory",
    "SummaryRow",
    "acceptance_rows",
    "load_prompts",
    "read_prompts",
    "summarise",
]

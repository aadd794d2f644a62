"""A tiny target with a corpus of its own answers, and training runs on them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tiny import EOS, VOCAB, NumberText, tiny_engine, tiny_model

from specflow.build import LoadedTarget
from specflow.recipe import Recipe, parse_recipe
from specflow.target.base import TargetOptions
from specflow.target.transformer import NativeTarget
from specflow.train.answers import target_of
from specflow.train.corpus import CorpusRecord
from specflow.train.options import TrainOptions
from specflow.train.processes import Processes
from specflow.train.run import RunPlan, Session, TrainingRun
from specflow.types import Sampling


class ChattyText(NumberText):
    """Number text that shows a question as it is."""

    def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        return messages[-1]["content"]

    def encode(self, prompt: str) -> list[int]:
        return [int(word) for word in prompt.split()]

    def save(self, directory: Path) -> None:
        """Nothing is written: numbers are their own tokens."""


def toy_target(layers: int = 2, sharpness: float = 32.0) -> LoadedTarget:
    """A tiny model in float32 that is sure of what it says."""
    model = tiny_model(layers=layers)
    with torch.no_grad():
        model.lm_head.weight.mul_(sharpness)
    options = TargetOptions("tiny", torch.float32, torch.device("cpu"), stop_ids=(EOS,))
    return LoadedTarget(NativeTarget(model.config, dict(model.state_dict()), options), ChattyText())


def toy_records(loaded: LoadedTarget, count: int, prompt: int = 4, answer: int = 20) -> list[CorpusRecord]:
    """Greedy answers of the target to random prompts, of several lengths."""
    generator = torch.Generator().manual_seed(1)
    engine = tiny_engine(k=0, batch=min(count, 16), target=loaded.target)
    lengths = [answer - number % 5 for number in range(count)]
    prompts = [torch.randint(3, VOCAB, (prompt,), generator=generator).tolist() for _ in range(count)]
    asks = [Sampling(max_new_tokens=length, ignore_eos=True) for length in lengths]
    made = engine.generate(prompts, asks)
    return [
        CorpusRecord(f"toy/{number}", 0.0, 1.0, each.prompt_tokens, each.tokens, "length")
        for number, each in enumerate(made)
    ]


def write_corpus(path: Path, loaded: LoadedTarget, records: Sequence[CorpusRecord]) -> Path:
    """A corpus as `specflow corpus` leaves it."""
    path.mkdir(parents=True)
    header = {"format": 1, "target": asdict(target_of(loaded)), "sampling": {}, "imports": [], "sessions": []}
    (path / "corpus.json").write_text(json.dumps(header))
    (path / "corpus.jsonl").write_text("".join(json.dumps(asdict(record)) + "\n" for record in records))
    return path


def toy_recipe(**draft: object) -> Recipe:
    """A recipe whose draft section says this."""
    return parse_recipe({"draft": draft})


TOY = {"batch_tokens": 128, "max_length": 64, "anchors": 8, "held_out": 0.1}
"""Options that suit the toy set."""
WHOLE = Session(1000, 1000)
"""Neither measured nor kept on the way."""


def toy_run(
    corpus: Path, output: Path, recipe: Recipe, loaded: LoadedTarget, options: dict[str, object], **plan: Any
) -> TrainingRun:
    """A run in this process."""
    chosen = TrainOptions.model_validate({**TOY, **options})
    return TrainingRun(RunPlan(recipe, corpus, output, chosen, **plan), loaded, Processes(on_cpu=True))


def train(run: TrainingRun, session: Session = WHOLE) -> TrainingRun:
    """Make all steps."""
    for _ in run.capture():
        pass
    for _ in run.go(session):
        pass
    run.finish()
    return run

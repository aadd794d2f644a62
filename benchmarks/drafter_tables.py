"""Tables about the shipped drafters, from their own files and from docs/figures/drafters. Nothing in them is typed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from operator import mul
from pathlib import Path
from typing import Any

from safetensors import safe_open

from specflow.cost import CostModel

__all__ = ["publish"]

BEGIN, END = "<!-- drafters:begin -->", "<!-- drafters:end -->"
SETTINGS = ("greedy", "block", "rejection")
_KEYS = ("num_layers", "num_heads", "taps", "corrector", "corrector_rank", "adapter_rank", "exit_layer", "layout")
"""Options that say what a drafter is built like."""

_POINTS = 9
"""Of a learning curve, at most."""

_HEAD = """# Drafters for smollm2-135m

Trained with `specflow train` on the target's own answers to `train_prompts`, never on an evaluation set.
`specflow run smollm2-135m/NAME` runs one; in recipes it is `weights: smollm2-135m/NAME` (a whole model `model: ...`).
Every folder holds the weights in float16, config.json, recipe.yaml, training.json (options, data, versions), log.jsonl
and curve.svg.

This page is written by `make bench-drafters` from docs/figures/drafters and the folders' own files.
"""


_ACCEPTED = """## What they accept

Over all sets, float32, chains of k. Length is 1 + accepted draft tokens a round; the draft pass makes k of them. Speed
is in that of plain decoding: these lengths at the measured costs of drafts and passes, greedy, one request.
"""


class Drafter:
    """What the files say of one drafter.

    Args:
        path: Its folder.
        figures: Folder of its measurements.
    """

    def __init__(self, path: Path, figures: Path) -> None:
        self.name, self._path = path.name, path
        self.training = json.loads((path / "training.json").read_text())
        self.config = json.loads((path / "config.json").read_text())
        self.found = {file.stem: json.loads(file.read_text()) for file in sorted(figures.glob("*.json"))}

    @property
    def result(self) -> Mapping[str, Any]:
        """How its training ended."""
        found: Mapping[str, Any] = self.training["result"]
        return found

    @property
    def earlier(self) -> list[Mapping[str, Any]]:
        """How the runs ended whose weights the last one went on from."""
        return [each["result"] for each in self.training.get("earlier", [])]

    def total(self, name: str) -> float:
        """Steps, positions or seconds of all its runs."""
        return sum(float(each[name]) for each in [*self.earlier, self.result])

    def of(self, setting: str) -> list[dict[str, Any]]:
        """Its measurements in one setting, a set each."""
        return [
            found for name, found in self.found.items() if name.startswith(f"{setting}-") and name != "greedy-fixed"
        ]

    def length(self, setting: str) -> float | None:
        """Acceptance length over all sets: tokens of rounds over rounds."""
        rounds = sum(each["num_rounds"] for each in self.of(setting))
        return 1.0 + sum(each["num_accepted_draft_tokens"] for each in self.of(setting)) / rounds if rounds else None

    def conditional(self, setting: str) -> list[float]:
        """Acceptance of every position over all sets, given that those before were accepted."""
        totals: dict[int, list[int]] = {}
        for each in self.of(setting):
            for rate in each["acceptance_by_position"]:
                counts = totals.setdefault(rate["position"], [0, 0])
                counts[0] += rate["accepted"]
                counts[1] += rate["reached"]
        return [accepted / reached for accepted, reached in totals.values() if reached]

    def cost(self) -> tuple[float, float] | None:
        """Seconds of drafting a whole block and of a plain pass, one request."""
        if "cost" not in self.found:
            return None
        found = self.found["cost"]["seconds"]
        drafts = [each for each in found["draft"] if each["batch"] == 1]
        plain = next(each for each in found["target"] if each["rows"] == 1 and each["batch"] == 1)
        return max(drafts, key=lambda each: each["depth"])["median_s"], plain["median_s"]

    def best(self) -> tuple[float, int] | None:
        """Plain decoding's speed that greedy rounds come to, by these lengths and costs, and the k that is best."""
        if "cost" not in self.found:
            return None
        costs, lengths = CostModel.from_data(self.found["cost"]["seconds"]), self.lengths()
        context = costs.target[0].context
        speeds = ((length / costs.plain_steps(k, 1, context), k) for k, length in enumerate(lengths, 1))
        return max(speeds, default=None)

    def lengths(self) -> list[float]:
        """Greedy acceptance length within 1, 2, ... draft tokens."""
        return list(accumulate(accumulate(self.conditional("greedy"), mul), initial=1.0))[1:]

    def numbers(self) -> int:
        """Weights in its file."""
        with safe_open(self._path / "model.safetensors", "pt") as file:
            return sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118

    def size(self) -> float:
        """Megabytes of its file."""
        return (self._path / "model.safetensors").stat().st_size / 1e6

    def curve(self) -> dict[float, tuple[float, float]]:
        """Agreement at position 1 and greedy length on held-out texts, by millions of positions trained on."""
        lines = [json.loads(line) for line in (self._path / "log.jsonl").read_text().splitlines()]
        held, before = {}, 0.0
        for each in self.earlier:
            before += each["positions"] / 1e6
            held[before] = each["held_out"]
        stride = self.result["positions"] / self.result["steps"] / 1e6
        held |= {before + line["step"] * stride: line["held_out"] for line in lines if line.get("held_out")}
        held |= {self.total("positions") / 1e6: self.result["held_out"]}
        return {seen: (found["agreement"][0], found["greedy_length"]) for seen, found in held.items()}

    def built(self) -> str:
        """Its architecture in a few words."""
        known = {**self.training["settings"]["draft"], **self.config}
        if not known.get("corrector"):
            known.pop("corrector_rank", None)
        said = [f"{key} {_plain(known[key])}" for key in _KEYS if known.get(key) not in (None, [], ())]
        vocabulary = known.get("draft_vocab_size") or "all"
        return ", ".join([*said, f"vocabulary {vocabulary}"])


def _plain(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, list) else str(value)


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"| --- |{' ---: |' * (len(head) - 1)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def accepted_table(drafters: Sequence[Drafter]) -> list[str]:
    """What every drafter accepts, over all sets."""
    head = ["drafter", "k", "accepted at 1, 2, ... (greedy)", "length, greedy", "T 0.7 block", "T 0.7 rejection"]
    head += ["draft / plain pass", "speed at best k", "MB"]
    rows = []
    for each in drafters:
        rates, cost, best = each.conditional("greedy"), each.cost(), each.best()
        rows.append(
            [
                each.name,
                str(len(rates) or "-"),
                " ".join(_number(rate) for rate in rates[:5]) or "-",
                *(_number(each.length(setting)) for setting in SETTINGS),
                "-" if cost is None else f"{cost[0] * 1e3:.1f} / {cost[1] * 1e3:.1f} ms",
                "-" if best is None else f"{best[0]:.2f} at {best[1]}{', does not pay' * (best[0] <= 1.0)}",
                f"{each.size():.1f}",
            ]
        )
    return list(_table(head, rows))


def _by_set(drafters: Sequence[Drafter]) -> list[str]:
    sets = sorted({found["set"] for each in drafters for found in each.of("greedy")})
    rows = []
    for each in drafters:
        lengths = {found["set"]: found["mean_acceptance_length"] for found in each.of("greedy")}
        rows.append([each.name, *(_number(lengths.get(name)) for name in sets)])
    return list(_table(["drafter", *sets], rows))


def _trained(drafters: Sequence[Drafter]) -> list[str]:
    rows = []
    for each in drafters:
        result, corpus = each.result, each.training["settings"]["corpus"]
        held, calibration = result["held_out"], result.get("calibration")
        errors = "-" if not calibration else f"{calibration['error_before']:.3f} / {calibration['error']:.3f}"
        overlaps = [_number(each["accept_rate"][0]) if each else "-" for each in (held, result.get("trained_on"))]
        rows.append(
            [
                each.name,
                each.built(),
                f"{each.numbers() / 1e6:.2f} M",
                f"{corpus['records']} texts",
                f"{each.total('steps'):.0f}",
                f"{each.total('positions') / 1e6:.1f} M",
                f"{each.total('seconds') / 60:.0f} min",
                " / ".join(overlaps),
                errors,
            ]
        )
    head = ["drafter", "built", "weights", "data of the last run", "steps", "positions", "time"]
    head.append("overlap at 1, held-out texts / texts trained on")
    return list(_table([*head, "confidence error before / after"], rows))


def _learning(drafters: Sequence[Drafter]) -> list[str]:
    """How held-out agreement grew: nine points of every training at most."""
    rows = []
    for each in drafters:
        points = list(each.curve().items())
        stride = max(1, -(-(len(points) - 1) // (_POINTS - 1)))
        shown = points[:-1:stride] + points[-1:]
        said = ", ".join(f"{seen:.1f}: {agreement:.2f} {length:.2f}" for seen, (agreement, length) in shown)
        rows.append([each.name, said])
    return list(_table(["drafter", "million positions: agreement at 1, greedy length"], rows))


def _origin(drafters: Sequence[Drafter]) -> Iterator[str]:
    """Where the figures come from."""
    for each in drafters:
        for found in each.of("greedy")[:1]:
            made = found["provenance"]
            limits = f"at most {found['limit']} prompts of each set, {found['tokens']} tokens an answer"
            changed = " with changes" * bool(made["git_dirty"])
            commit = f"commit {str(made['git_sha'])[:10]}{changed}, {made['started_at'][:10]}"
            machine = f"{made['cpu_model']}, {made['threads']} threads, torch {made['versions']['torch']}"
            sampled = ", ".join(f"{one['set']} {one['prompts']}" for one in each.of("block"))
            cost = each.found.get("cost", {}).get("provenance")
            timed = f"; costs: {cost['cpu_model']}, {cost['started_at'][:10]}" if cost else ""
            yield f"- {each.name}: {limits}, at T 0.7 prompts of {sampled or 'none'}; {machine}, {commit}{timed}"


def shipped(drafters_dir: Path, figures: Path) -> list[Drafter]:
    """All of a folder."""
    return [
        Drafter(file.parent, figures / file.parent.name) for file in sorted(drafters_dir.glob("*/model.safetensors"))
    ]


def page(drafters: Sequence[Drafter]) -> str:
    """The text of drafters/README.md."""
    parts = [
        _HEAD,
        _ACCEPTED,
        *accepted_table(drafters),
        "\n## By set, greedy\n",
        *_by_set(drafters),
        "\n## How they were trained\n",
        *_trained(drafters),
        "\n## How they learnt, on held-out texts\n",
        *_learning(drafters),
        "\n## Where the figures come from\n",
        *_origin(drafters),
    ]
    return "\n".join(parts) + "\n"


def publish(drafters_dir: Path, figures: Path, readme: Path) -> None:
    """Write drafters/README.md, and the table between the README's markers."""
    drafters = shipped(drafters_dir, figures)
    (drafters_dir.parent / "README.md").write_text(page(drafters))
    text = readme.read_text()
    if BEGIN in text:
        head, rest = text.split(BEGIN)
        table = "\n".join(accepted_table(drafters))
        readme.write_text(f"{head}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}")

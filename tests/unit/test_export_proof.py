"""The proof of an export: what it lets through as rounding, and what it does not."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import VOCAB, NumberText, tiny_target

from specflow.draft.base import Drafter, SourceContext
from specflow.draft.chain import ChainDrafter
from specflow.draft.lm_model import LanguageModel
from specflow.draft.shapes import ShapeOptions
from specflow.draft.trees import TreeDrafter
from specflow.errors import ModelError
from specflow.export.proof import check_errors, check_graphs, check_rounds, real_prompts
from specflow.export.rounds import Comparison, Decoder, Rounds, compare_rounds, first_block
from specflow.onnx.graphs import OutputError
from specflow.target.base import Target
from specflow.types import TargetOutput

PROMPTS = [[5, 9, 33, 17, 40, 41] * 3, [7, 3], [3, 4, 5, 9]]
TARGET = tiny_target(torch.float32)
DRAFT = tiny_target(torch.float32, seed=1)


class Bent:
    """A target that says something else."""

    def __init__(self, target: Target, change: Any) -> None:
        self._target, self._change, self.passes = target, change, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def forward(self, *args: Any, **options: Any) -> TargetOutput:
        out = self._target.forward(*args, **options)
        self.passes += 1
        return replace(out, logits=self._change(out.logits.clone(), self.passes))


def drafter(model: Any, k: int = 4, shape: str = "chain") -> Drafter:
    context = SourceContext(target=TARGET, k=k, dependency="ar")
    if shape == "chain":
        return ChainDrafter(LanguageModel(model, context), context)
    return TreeDrafter(LanguageModel(model, context), context, ShapeOptions(shape=shape, nodes=9, branch=3))  # type: ignore[arg-type]


def decoder(target: Any = TARGET, sources: Sequence[Drafter] = ()) -> Decoder:
    return Decoder(target, sources, lambda each: each[0] if each else None)


def compared(one: Decoder, two: Decoder, k: int = 4, rounds: int = 15, tolerance: float = 1e-4) -> Comparison:
    return compare_rounds(one, two, NumberText(), Rounds(PROMPTS, rounds, k, tolerance))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", ["chain", "beam"])
@pytest.mark.parametrize("model", [TARGET, DRAFT], ids=["right", "wrong"])
def test_the_same_decoded_twice_is_the_same(model: Any, shape: str) -> None:
    found = compared(decoder(sources=[drafter(model, shape=shape)]), decoder(sources=[drafter(model, shape=shape)]))
    assert (found.rounds, found.blocks, found.same_blocks) == (15, 15, 15)
    assert found.choices == found.same_choices >= 15
    assert found.choices == 15 or model is TARGET or shape == "beam"
    assert (found.near_ties, found.differences) == ([], [])
    assert {error.output: error.largest for error in found.errors()} == {"draft logits": 0.0, "target logits": 0.0}
    check_rounds(found, precise=True)


def test_plain_rounds_compare_the_target_alone() -> None:
    found = compared(decoder(), decoder(), k=0)
    assert (found.rounds, found.blocks, found.choices) == (15, 0, 15)
    assert [error.output for error in found.errors()] == ["target logits"]


def test_another_draft_is_a_difference_and_the_text_goes_on_to_be_compared() -> None:
    """The graphs draft worse, so they need rounds of their own to catch up."""
    found = compared(decoder(sources=[drafter(TARGET)]), decoder(sources=[drafter(DRAFT)]))
    assert found.same_blocks < found.blocks == 15
    assert len(found.differences) == found.blocks - found.same_blocks
    assert found.same_choices == found.choices > 60
    assert "prompt 1, round 1: drafted" in found.differences[0]
    with pytest.raises(ModelError, match=r"rounds: \d+ differences from torch: prompt 1, round 1"):
        check_rounds(found, precise=True)
    check_rounds(found, precise=False)


def test_another_token_is_a_difference() -> None:
    def change(logits: torch.Tensor, passes: int) -> torch.Tensor:
        return logits.flip(-1) if passes == 4 else logits

    found = compared(decoder(), decoder(Bent(TARGET, change)), k=0)
    assert found.choices - found.same_choices == len(found.differences) == 1
    assert "relative margin" in found.differences[0]


def tied(gap: float, wrong: bool) -> Any:
    """The two likeliest tokens are nearly equal; the second one wins if `wrong`."""

    def change(logits: torch.Tensor, passes: int) -> torch.Tensor:
        best = logits.topk(2, dim=-1)
        other = best.values[..., :1] * (1 + gap * (1 if wrong else -1))
        return logits.scatter(-1, best.indices[..., 1:], other)

    return change


@pytest.mark.parametrize(("gap", "ties"), [(2e-5, 6), (1e-2, 0)])
def test_a_choice_between_equals_is_a_near_tie(gap: float, ties: int) -> None:
    one, two = Bent(TARGET, tied(gap, wrong=False)), Bent(TARGET, tied(gap, wrong=True))
    found = compared(decoder(one), decoder(two), k=0, rounds=6)
    assert found.same_choices == 0
    assert (len(found.near_ties), len(found.differences)) == (ties, 6 - ties)


@pytest.mark.parametrize(("gap", "ties"), [(2e-5, True), (1e-2, False)])
def test_a_draft_between_equals_is_a_near_tie(gap: float, ties: bool) -> None:
    one, two = Bent(DRAFT, tied(gap, wrong=False)), Bent(DRAFT, tied(gap, wrong=True))
    found = compared(decoder(sources=[drafter(one)]), decoder(sources=[drafter(two)]), rounds=6)
    assert found.same_blocks == 0
    assert len(found.near_ties if ties else found.differences) == 6


@pytest.mark.parametrize(("shape", "kept"), [("chain", 0), ("beam", 0), ("beam", 1)])
def test_drafts_that_no_rounding_explains_are_differences(shape: str, kept: int) -> None:
    """As of a wrong map of a reduced vocabulary: logits agree in every bit."""
    wrong = drafter(DRAFT, shape=shape)
    right = wrong.propose

    def rolled(*given: Any) -> Any:
        block = right(*given)
        assert block is not None
        tokens = torch.cat((block.tokens[:, :kept], (block.tokens[:, kept:] + 1) % VOCAB), 1)
        return replace(block, tokens=tokens)

    wrong.propose = rolled  # type: ignore[method-assign]
    found = compared(decoder(sources=[drafter(DRAFT, shape=shape)]), decoder(sources=[wrong]), rounds=6)
    assert (found.same_blocks, found.near_ties, len(found.differences)) == (0, [], 6)
    with pytest.raises(ModelError, match="6 differences from torch"):
        check_rounds(found, precise=True)


def test_rounds_that_a_full_context_leaves_are_made_elsewhere() -> None:
    short = tiny_target(torch.float32, context=48)
    prompts = [[5, 9, 33] * 15, [7, 3], [3, 4, 5, 9]]
    found = compare_rounds(decoder(short), decoder(short), NumberText(), Rounds(prompts, 30, 0, 1e-4))  # type: ignore[arg-type]
    assert found.rounds == 30


def test_what_is_not_finite_is_infinitely_wrong() -> None:
    def change(logits: torch.Tensor, passes: int) -> torch.Tensor:
        logits[..., 0] = torch.nan
        return logits

    found = compared(decoder(), decoder(Bent(TARGET, change)), k=0, rounds=3)
    (error,) = found.errors()
    assert error.relative == float("inf")
    with pytest.raises(ModelError, match="output target logits: inf of its largest value"):
        check_errors([error], 1e-4)


@pytest.mark.parametrize(("gap", "sound"), [(2e-5, True), (1e-2, False)])
def test_logits_of_rounds_count_where_the_tokens_are_the_same(gap: float, sound: bool) -> None:
    def bend(logits: torch.Tensor, passes: int) -> torch.Tensor:
        return logits * (1 + gap)

    found = compared(decoder(), decoder(Bent(TARGET, bend)), k=0, rounds=6)
    assert (found.same_choices, found.differences) == (6, [])
    check_rounds(found, precise=False)
    with nullcontext() if sound else pytest.raises(ModelError, match="rounds: output target logits"):
        check_rounds(found, precise=True)


def test_a_round_ends_with_the_context() -> None:
    short = tiny_target(torch.float32, context=24)
    found = compare_rounds(decoder(short), decoder(short), NumberText(), Rounds([[5] * 20], 50, 0, 1e-4))  # type: ignore[arg-type]
    assert 0 < found.rounds <= 4


def test_no_rounds_prove_nothing() -> None:
    with pytest.raises(ModelError, match="no round was compared"):
        check_rounds(Comparison(), precise=True)


def test_the_first_block_is_the_drafters() -> None:
    said, drafted = first_block(decoder(sources=[drafter(TARGET)]), NumberText(), PROMPTS[0], 4)  # type: ignore[arg-type]
    cache, tokens = TARGET.new_cache(1, 40), [*PROMPTS[0]]
    for _ in range(5):
        cache.clear(0)
        positions = torch.arange(len(tokens)).unsqueeze(0)
        tokens.append(int(TARGET.forward(torch.tensor([tokens]), positions, cache).logits[0, -1].argmax()))
    assert [said, *drafted] == tokens[-5:]


def test_errors_name_the_graph_the_output_and_the_limit() -> None:
    errors = [OutputError("step", "scored", 0.5, 2e-4, "random"), OutputError("head", "logits", 9.0, 1e-6, "real")]
    assert check_errors(errors, 1e-3) == errors
    with pytest.raises(ModelError) as caught:
        check_errors(errors, 1e-4)
    assert caught.value.where == "step: output scored"
    assert (caught.value.found, caught.value.expected) == (
        "2.0e-04 of its largest value from torch's on random inputs",
        "at most 0.0001",
    )


def test_graphs_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "made.onnx").write_bytes(b"no graph")
    with pytest.raises(ModelError, match=r"made\.onnx: the checker of ONNX refuses it"):
        check_graphs(tmp_path)


def test_long_texts_become_several_prompts() -> None:
    assert real_prompts([list(range(10)), [1, 2]], 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [1, 2]]
    assert real_prompts([list(range(9))], 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert VOCAB > 10

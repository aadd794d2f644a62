"""Every shape of block through the engine: vanilla's text, rows that see their own path alone, no question asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from fake_steps import Prophet, TableCorrector, TableMarginals, TableModel, cache_of, context_of, noise_of
from tiny import VOCAB, tiny_engine, tiny_target
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specflow.draft.base import Draw
from specflow.draft.parallel import ParallelModel
from specflow.draft.shapes import ShapeOptions, make_drafter
from specflow.draft.steps import StepModel
from specflow.measure import check_counts
from specflow.target.transformer import NativeTarget
from specflow.types import DraftBudget, Generation, Sampling

TARGET = tiny_target()
PROMPTS = [[5, 9, 33, 17], [7], [11] * 20, [3, 1, 4, 1, 5, 9, 2, 6, 5]]
NUM_NEW = 20
COLD = Sampling(max_new_tokens=NUM_NEW, ignore_eos=True, seed=3)
WARM = Sampling(max_new_tokens=NUM_NEW, ignore_eos=True, seed=3, temperature=0.9)
SHAPES = ["chain", "static", "beam", "best_first", "sampled"]
WIDTHS = [(1,), (3, 2, 1, 1), (2, 2, 2, 2), (8,), (2, 1, 1, 1, 1, 1, 1, 1), (4, 3, 1)]


def options_for(shape: str, nodes: int) -> ShapeOptions:
    if shape == "sampled":
        return ShapeOptions(shape="sampled", widths=WIDTHS[nodes % len(WIDTHS)], nodes=64)
    size = {} if shape == "chain" else {"nodes": nodes}
    width = {"branch": 1 + nodes * 3 % 8} if shape in ("static", "beam") else {}
    return ShapeOptions.model_validate({"shape": shape, **size, **width})


def vanilla(sampling: Sampling) -> list[Generation]:
    return tiny_engine(batch=4, k=0, target=TARGET).generate(PROMPTS, sampling)


@pytest.mark.parametrize(
    ("shape", "sampling", "draw"),
    [(shape, sampling, "greedy") for shape in SHAPES for sampling in (COLD, WARM)]
    + [(shape, WARM, draw) for shape in ("chain", "sampled") for draw in ("coupled", "sampled")],
)
def test_every_shape_says_what_vanilla_says(shape: str, sampling: Sampling, draw: Draw) -> None:
    """All depths from 1 to 16 and all node budgets from 1 to 40, batches of 1 and of 4 ragged rows."""
    expected = [each.tokens for each in vanilla(sampling)]
    accepted = generated = 0
    for nodes in range(1, 17 if shape == "chain" else 41):
        depth, batch = 1 + nodes * 7 % 16, 4 if nodes % 3 else 1
        model = ParallelModel(Prophet(expected, VOCAB))
        drafter = make_drafter(options_for(shape, nodes), model, context_of(VOCAB, depth, draw))
        prompts = PROMPTS if batch > 1 else PROMPTS[:2]
        got = tiny_engine(drafter, depth, batch, target=TARGET).generate(prompts, sampling)
        assert [each.tokens for each in got] == expected[: len(prompts)], f"depth {depth}, nodes {nodes}, batch {batch}"
        for each in got:
            check_counts(each.counts)
            accepted += each.counts.num_accepted_draft_tokens
            generated += each.counts.num_generated_tokens
    assert accepted > 0.2 * generated


def run_rows(target: NativeTarget, tokens: Tensor, context: Sequence[int], mask: Tensor | None = None) -> Tensor:
    """Logits of the anchor and the nodes after a committed context; nodes' positions follow from the mask.

    # [1, M], [1, M, M] -> [M, V]
    """
    cache = target.new_cache(1, 128)
    target.forward(torch.tensor([context]), torch.arange(len(context)).unsqueeze(0), cache)
    cache.keep([len(context)])
    depth = torch.arange(tokens.shape[1]).unsqueeze(0) if mask is None else mask.sum(-1) - 1
    return target.forward(tokens, depth + len(context), cache, mask).logits[0].clone()


@pytest.mark.parametrize("shape", SHAPES[1:])
def test_a_pass_over_a_tree_is_a_pass_over_each_path(shape: str) -> None:
    drafter = make_drafter(options_for(shape, 23), TableModel(VOCAB), context_of(VOCAB, 6, "sampled"))
    drafter.reset(1, cache_of([4]))
    drafter.start(0, [1], WARM)
    block = drafter.propose([8], DraftBudget((6,)), noise_of([4]))
    assert block is not None
    rows = torch.tensor([[8, *block.tokens[0].tolist()]])
    together = run_rows(TARGET, rows, PROMPTS[0], block.topology.ancestors)
    for node in range(block.num_nodes + 1):
        path = block.topology.ancestors[0, node]
        alone = run_rows(TARGET, rows[:, path], PROMPTS[0])
        torch.testing.assert_close(together[node], alone[-1], rtol=0, atol=1e-11)


class NoQuestions(TorchDispatchMode):
    """Refuses operators that make a host wait for its device: shapes that follow from values, values that are read."""

    ASKING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "repeat_interleave.Tensor")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        masks = name.startswith("index") and any(getattr(each, "dtype", None) is torch.bool for each in flat(args[1:]))
        assert not masks, f"{func} by a mask asks the device"
        assert not name.startswith(self.ASKING), f"{func} asks the device"
        return func(*args, **(kwargs or {}))


def flat(args: Any) -> list[Any]:
    return [inner for each in args for inner in (flat(each) if isinstance(each, (list, tuple)) else [each])]


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("a tensor was asked for its value")


_IN_NUMPY = torch.Tensor.numpy


def numbers(tensor: torch.Tensor) -> object:
    """On CPUs numpy may compute with logits where they are; what was drafted is no float."""
    return _IN_NUMPY(tensor) if tensor.is_floating_point() else refuse()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["blind", "corrected", "conditional"])
@pytest.mark.parametrize("sampling", [COLD, Sampling(temperature=0.8, top_k=9)], ids=["T0", "T0.8"])
def test_a_round_asks_the_device_nothing(
    shape: str, kind: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: dict[str, StepModel] = {
        "blind": ParallelModel(TableMarginals(VOCAB)),
        "corrected": ParallelModel(TableMarginals(VOCAB), TableCorrector(VOCAB)),
        "conditional": TableModel(VOCAB),
    }
    drafter = make_drafter(options_for(shape, 22), models[kind], context_of(VOCAB, 5, "sampled"))
    drafter.reset(2, cache_of([4, 7]))
    for row in range(2):
        drafter.start(row, [1], sampling)
    monkeypatch.setattr("specflow.draft.chain.asking_is_free", lambda device: False)
    with monkeypatch.context() as patched, NoQuestions():
        for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "cpu"):
            patched.setattr(torch.Tensor, name, refuse)
        patched.setattr(torch.Tensor, "numpy", numbers)
        block = drafter.propose([8, 9], DraftBudget((5, 3), stop_below=(0.05, 0.05)), noise_of([4, 7]))
    assert block is not None
    assert (block.tokens >= 0).any(1).all()


@pytest.mark.parametrize("ask", [lambda each: each[each > 0], torch.nonzero, bool])
def test_questions_are_noticed(ask: Any) -> None:
    one = torch.ones(1)
    with torch.inference_mode(), NoQuestions(), pytest.raises(AssertionError, match="asks the device"):
        ask(one)

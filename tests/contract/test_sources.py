"""What every draft source owes recipes, graph and engine. Sources are found by listing `draft/sources/`."""

from __future__ import annotations

import pkgutil
import random
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from specflow.draft import sources
from specflow.draft.base import Drafter, SourceContext
from specflow.draft.dependency import DEPENDENCIES
from specflow.draft.registry import SourceInfo, discover
from specflow.types import PAD, DraftBlock, DraftBudget, Observation

VOCAB = 61
K = 5
FILES = sorted(module.name for module in pkgutil.iter_modules(sources.__path__) if not module.name.startswith("_"))
BUILDS = [
    pytest.param(info, options, id=method)
    for info in discover().values()
    for method, options in info.presets().items()
    if "features" not in info.reads and "logits" not in info.offers
]
"""Sources that draft from committed tokens alone. The others need a model and weights: their suites bring them."""


class Keyed:
    def uniform(self, stream: str, row: int, position: int) -> float:
        return random.Random(f"{stream} {row} {position}").random()


def built(info: SourceInfo, options: dict[str, object], prompts: Sequence[Sequence[int]]) -> Drafter:
    target = SimpleNamespace(info=SimpleNamespace(vocab_size=VOCAB, device=torch.device("cpu")))
    drafter = info.build(info.config(**options), SourceContext(target=target, k=K))  # type: ignore[arg-type]
    drafter.reset(len(prompts))
    for row, prompt in enumerate(prompts):
        drafter.start(row, prompt)
    return drafter


def commit(drafter: Drafter, texts: list[list[int]], new: Sequence[Sequence[int]]) -> None:
    starts = tuple(len(text) - 1 for text in texts)
    tokens = tuple(tuple(each) for each in new)
    drafter.observe(Observation(tokens, starts, tuple(map(len, new))), range(len(texts)))
    for text, each in zip(texts, new, strict=True):
        text.extend(each)


def propose(drafter: Drafter, texts: Sequence[Sequence[int]], *budget: int) -> DraftBlock | None:
    return drafter.propose([text[-1] for text in texts], DraftBudget(budget), Keyed())


def text(rng: random.Random, length: int) -> list[int]:
    """Few distinct tokens, so that things repeat."""
    return [rng.randrange(3, 7) for _ in range(length)]


def same(one: DraftBlock | None, two: DraftBlock | None) -> bool:
    if one is None or two is None:
        return one is two
    return one.lengths == two.lengths and torch.equal(one.tokens, two.tokens)


def test_every_file_of_the_folder_is_a_source() -> None:
    assert FILES
    for name in FILES:
        module = __import__(f"{sources.__name__}.{name}", fromlist=["SOURCE"])
        assert module.SOURCE in discover().values()


@pytest.mark.parametrize("info", discover().values(), ids=lambda info: info.name)
def test_a_source_says_what_recipes_and_graph_need(info: SourceInfo) -> None:
    assert info.config.model_config["frozen"]
    with pytest.raises(ValidationError):
        info.config(no_such_option=1)
    assert all(field.description for field in info.config.model_fields.values())
    assert info.dependency
    for name in info.dependency:
        assert DEPENDENCIES[name].reads in info.offers
    for options in info.presets().values():
        info.config(**options)
    assert info.remembers is None or info.remembers in info.config.model_fields


def test_sources_are_found_without_torch() -> None:
    code = (
        "import sys; from specflow.draft.registry import discover; from specflow.draft import dependency;"
        " found = discover(); heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules);"
        " print(len(found)); sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) >= len(FILES)


@pytest.mark.parametrize(("info", "options"), BUILDS)
def test_blocks_are_well_formed_and_within_budget(info: SourceInfo, options: dict[str, object]) -> None:
    rng = random.Random(1)
    texts = [text(rng, 30), text(rng, 2), [5] * 6]
    drafter = built(info, options, texts)
    drafted = 0
    for _ in range(40):
        budget = [rng.randint(0, K) for _ in texts]
        block = propose(drafter, texts, *budget)
        if block is not None:
            assert block.tokens.dtype == torch.int64
            assert block.tokens.shape == (3, max(block.lengths))
            assert block.num_nodes > 0
            for row, (length, most) in enumerate(zip(block.lengths, budget, strict=True)):
                ids = block.tokens[row].tolist()
                assert length <= most
                assert all(0 <= token < VOCAB for token in ids[:length])
                assert ids[length:] == [PAD] * (block.num_nodes - length)
            assert block.law.is_point == (info.law == "point")
            assert block.law.prob().shape == block.tokens.shape
            drafted += sum(block.lengths)
        commit(drafter, texts, [text(rng, rng.randint(1, 3)) for _ in texts])
    assert drafted


@pytest.mark.parametrize(("info", "options"), BUILDS)
def test_no_budget_no_block(info: SourceInfo, options: dict[str, object]) -> None:
    texts = [[5] * 9, [5] * 9]
    assert propose(built(info, options, texts), texts, 0, 0) is None


@pytest.mark.parametrize(("info", "options"), BUILDS)
def test_proposing_changes_nothing(info: SourceInfo, options: dict[str, object]) -> None:
    rng = random.Random(2)
    prompts = [text(rng, 20)]
    one, two = built(info, options, prompts), built(info, options, prompts)
    texts, twins = [list(prompts[0])], [list(prompts[0])]
    for _ in range(20):
        for _ in range(rng.randint(0, 3)):
            propose(one, texts, rng.randint(0, K))
        assert same(propose(one, texts, K), propose(two, twins, K))
        new = [text(rng, 2)]
        commit(one, texts, new)
        commit(two, twins, new)


@pytest.mark.parametrize(("info", "options"), BUILDS)
def test_a_row_drafts_as_if_it_were_alone(info: SourceInfo, options: dict[str, object]) -> None:
    rng = random.Random(3)
    texts = [text(rng, length) for length in (9, 25, 4)]
    singles = [[list(each)] for each in texts]
    together, alone = built(info, options, texts), [built(info, options, each) for each in singles]
    for _ in range(20):
        block = propose(together, texts, K, K, K)
        new = [text(rng, rng.randint(1, 3)) for _ in texts]
        for row, (drafter, single) in enumerate(zip(alone, singles, strict=True)):
            own = propose(drafter, single, K)
            length = block.lengths[row] if block else 0
            assert length == (own.lengths[0] if own else 0)
            if block and own:
                assert block.tokens[row, :length].tolist() == own.tokens[0].tolist()
            commit(drafter, single, [new[row]])
        commit(together, texts, new)


@pytest.mark.parametrize(("info", "options"), BUILDS)
def test_select_start_and_reset_move_rows(info: SourceInfo, options: dict[str, object]) -> None:
    rng = random.Random(4)
    texts = [text(rng, 20), text(rng, 20), text(rng, 20)]
    drafter = built(info, options, texts)
    drafter.select([2, 0])
    kept = [texts[2], texts[0]]
    assert same(propose(drafter, kept, K, K), propose(built(info, options, kept), kept, K, K))
    kept[1] = text(rng, 15)
    drafter.start(1, kept[1])
    assert same(propose(drafter, kept, K, K), propose(built(info, options, kept), kept, K, K))
    drafter.reset(1)
    drafter.start(0, texts[1])
    assert same(propose(drafter, [texts[1]], K), propose(built(info, options, [texts[1]]), [texts[1]], K))

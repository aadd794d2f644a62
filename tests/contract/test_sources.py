"""What every draft source owes recipes, graph and engine. Sources are found by listing `draft/sources/`."""

from __future__ import annotations

import pkgutil
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest
import torch
from driving import CHUNK, K, Options, Session, nodes, said, text
from pydantic import ValidationError
from tiny import VOCAB

from specflow.draft import sources
from specflow.draft.dependency import DEPENDENCIES
from specflow.draft.registry import SourceInfo, discover
from specflow.recipe import parse_recipe
from specflow.recipe_draft import SourceSection
from specflow.target.transformer import NativeTarget
from specflow.types import DraftBlock

FILES = sorted(module.name for module in pkgutil.iter_modules(sources.__path__) if not module.name.startswith("_"))


def _builds() -> Iterator[object]:
    """Every preset; one that drafts trees of its own accord as a chain, too."""
    for info in discover().values():
        for method in info.presets():
            section = parse_recipe({"draft": {"method": method}}).draft
            yield pytest.param({"method": method}, id=method)
            if getattr(section, "shape", "chain") != "chain" and "shape" not in info.presets()[method]:
                yield pytest.param({"method": method, "shape": "chain"}, id=f"{method}-chain")


FROM = ("context", "prefix", "self")
"""What a confidence may depend on; each includes the ones before it."""

every_build = pytest.mark.parametrize("options", list(_builds()))


def check_same(one: DraftBlock | None, two: DraftBlock | None, rows: Sequence[tuple[int, int]] = ((0, 0),)) -> None:
    """These pairs of rows hold the same nodes, drawn from the same law."""
    for mine, its in rows:
        assert nodes(one, mine) == nodes(two, its)
        for mine_said, its_said in zip(said(one, mine), said(two, its), strict=True):
            assert mine_said == pytest.approx(its_said, rel=1e-6)


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
    for method in info.presets():
        section = parse_recipe({"draft": {"method": method}}).draft
        assert isinstance(section, SourceSection)
        assert section.method == method
    assert info.remembers is None or info.remembers in info.config.model_fields
    assert ("features" in info.reads) <= (info.axis == "target_features")


def test_sources_are_found_without_torch() -> None:
    code = (
        "import sys; from specflow.draft.registry import discover; from specflow.draft import dependency;"
        " found = discover(); heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules);"
        " print(len(found)); sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) >= len(FILES)


@every_build
def test_blocks_are_well_formed_and_within_budget(options: Options) -> None:
    rng = random.Random(1)
    session = Session(options, [text(rng, 30), [5], [5] * 6])
    drafted = 0
    for _ in range(12):
        budget = [rng.randint(0, K) for _ in session.texts]
        block = session.propose(*budget)
        if block is not None:
            check_block(session, block, budget)
            drafted += sum(len(nodes(block, row)) for row in range(3))
        session.commit(block, [rng.randint(0, K) for _ in budget], text(rng, 3))
    assert drafted


def check_block(session: Session, block: DraftBlock, budget: Sequence[int]) -> None:
    assert block.tokens.dtype == torch.int64
    assert 0 < block.num_nodes <= session.drafter.num_nodes
    assert block.tokens.shape == block.law.prob().shape == (3, block.num_nodes)
    assert block.topology.is_chain or session.drafter.branches
    assert block.law.is_point or session.info.law != "point"
    for row, (length, most) in enumerate(zip(block.lengths, budget, strict=True)):
        paths = nodes(block, row)  # a node below PAD, or below a later node, would be missing its parent there
        assert len(paths) <= length
        assert length > 0 or most == 0 or not paths
        assert max(map(len, paths), default=0) <= min(most, block.topology.max_depth)
        assert all(0 <= token < VOCAB for path in paths for token in path)
        assert len(set(paths)) == len(paths), "two siblings with one token"
    there = block.tokens >= 0
    assert (block.law.prob()[there] > 0).all()
    if block.confidence is not None:
        assert session.info.confidence_from in FROM
        assert FROM.index(block.confidence_from) <= FROM.index(session.info.confidence_from)
        assert block.confidence.shape == block.tokens.shape
        assert ((block.confidence[there] >= 0) & (block.confidence[there] <= 1)).all()


@every_build
def test_no_budget_no_block(options: Options) -> None:
    session = Session(options, [[5] * 9, [5] * 9])
    assert session.propose(0, 0) is None
    assert nodes(session.propose(0, K), 0) == []


@every_build
def test_proposing_changes_nothing(options: Options) -> None:
    rng = random.Random(2)
    prompt = text(rng, 20)
    one, two = Session(options, [prompt]), Session(options, [prompt])
    for _ in range(5):
        lengths = tuple(one.cache.lengths)
        before = one.cache.data[:, :, :, :, : lengths[0]].clone()
        for _ in range(rng.randint(1, 2)):
            one.propose(rng.randint(0, K))
        first, second = one.propose(K), two.propose(K)
        check_same(first, second)
        assert tuple(one.cache.lengths) == lengths
        assert torch.equal(one.cache.data[:, :, :, :, : lengths[0]], before)
        accepted, new = [rng.randint(0, K)], text(rng, 1)
        one.commit(first, accepted, new)
        two.commit(second, accepted, new)


@every_build
@pytest.mark.parametrize("mode", ["all", "none", "mixed"])
def test_what_was_kept_from_round_to_round_equals_reading_it_all_anew(options: Options, mode: str) -> None:
    """The first two prompts are one token and several chunks long."""
    rng = random.Random(3)
    session = Session(options, [[5], text(rng, 3 * CHUNK + 5), text(rng, 9)])
    for _ in range(3):
        session.play(rng, 3, mode)
        expected = session.again(0, 1, 2).propose(K, K, K)
        check_same(session.propose(K, K, K), expected, [(0, 0), (1, 1), (2, 2)])


@every_build
def test_a_row_drafts_as_if_it_were_alone(options: Options) -> None:
    rng = random.Random(4)
    session = Session(options, [text(rng, length) for length in (9, 40, 1)])
    for _ in range(3):
        session.play(rng, 2)
        together = session.propose(K, K, K)
        for row in range(3):
            check_same(session.again(row).propose(K), together, [(0, row)])


@every_build
def test_select_start_and_reset_move_rows(options: Options) -> None:
    rng = random.Random(5)
    session = Session(options, [text(rng, 20), text(rng, 12), text(rng, 40)])
    both = [(0, 0), (1, 1)]
    session.play(rng, 2)
    session.propose(K, K, K)
    session.select([2, 0])
    check_same(session.propose(K, K), session.again(0, 1).propose(K, K), both)
    session.admit(1, text(rng, 15), seed=7)
    check_same(session.propose(K, K), session.again(0, 1).propose(K, K), both)
    session.play(rng, 2)
    check_same(session.propose(K, K), session.again(0, 1).propose(K, K), both)
    fresh = text(rng, 20)
    session.reset([fresh], [9])
    check_same(session.propose(K), session.again(0).propose(K))


@every_build
def test_a_text_longer_than_the_drafter_was_made_for_goes_on_undrafted(options: Options) -> None:
    config = parse_recipe({"draft": options}).draft.info.config  # type: ignore[union-attr]
    if "max_positions" not in config.model_fields:
        return
    rng = random.Random(6)
    session = Session({**options, "max_positions": 24}, [text(rng, 60), text(rng, 21)])
    for _ in range(4):
        block = session.propose(K, K)
        assert nodes(block, 0) == []
        assert max(map(len, nodes(block, 1)), default=0) <= max(0, 24 - len(session.texts[1]))
        session.commit(block, [K, K], text(rng, 2))
    assert len(session.texts[1]) > 24


@every_build
def test_a_round_asks_the_device_nothing(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(7)
    session = Session(options, [text(rng, 20), text(rng, 9)])
    for name, module in list(sys.modules.items()):
        if name.startswith("specflow") and hasattr(module, "asking_is_free"):
            monkeypatch.setattr(module, "asking_is_free", lambda device: False)

    def forbidden(*_: object, **__: object) -> object:
        raise AssertionError("host sync inside a round")

    plain = session.drafter.propose, session.drafter.observe

    def watched(call: object) -> object:
        def run(*arguments: object) -> object:
            with monkeypatch.context() as patch:
                for name in (
                    "item",
                    "tolist",
                    "__bool__",
                    "__int__",
                    "__float__",
                    "__index__",
                    "nonzero",
                    "numpy",
                    "cpu",
                ):
                    patch.setattr(torch.Tensor, name, forbidden)
                patch.setattr(torch, "nonzero", forbidden)
                return call(*arguments)  # type: ignore[operator]

        return run

    monkeypatch.setattr(session.drafter, "propose", watched(plain[0]))
    monkeypatch.setattr(session.drafter, "observe", watched(plain[1]))
    session.play(rng, 6)


def parts_of(thing: object, seen: set[int]) -> Iterator[object]:
    """Everything of ours that an object is made of, itself included; not what the target is made of."""
    if id(thing) in seen or isinstance(thing, type | str | NativeTarget):
        return
    seen.add(id(thing))
    inner: list[object] = []
    if isinstance(thing, dict):
        inner = list(thing.values())
    elif isinstance(thing, list | tuple | torch.nn.ModuleList):
        inner = list(thing)
    elif type(thing).__module__.startswith("specflow"):
        slots = [name for each in type(thing).__mro__ for name in getattr(each, "__slots__", ())]
        inner = [*getattr(thing, "__dict__", {}).values(), *(getattr(thing, name, None) for name in slots)]
    yield thing
    for each in inner:
        yield from parts_of(each, seen)


def weights_of(thing: object) -> list[torch.Tensor]:
    return [
        each
        for each in parts_of(thing, set())
        if isinstance(each, torch.Tensor) and each.ndim == 2 and each.is_floating_point() and each.numel() > 1
    ]


def test_repeated_blocks_have_parameters_of_their_own() -> None:
    """`[Block()] * n` is one block with n names."""
    compared = 0
    for info in discover().values():
        for method in info.presets():
            drafter = Session({"method": method}, []).drafter
            for group in parts_of(drafter, set()):
                if (
                    not isinstance(group, list | tuple | torch.nn.ModuleList)
                    or len(group) < 2
                    or isinstance(group[0], torch.Tensor)
                ):
                    continue
                for one, two in combinations(list(group), 2):
                    if type(one) is type(two) and weights_of(one):
                        assert one is not two, f"{method}: {type(one).__name__}"
                        for mine, its in zip(weights_of(one), weights_of(two), strict=True):
                            assert mine.shape != its.shape or not torch.equal(mine, its), (
                                f"{method}: {type(one).__name__}"
                            )
                        compared += 1
    assert compared

"""MTP and EAGLE as ONNX graphs: they compute what their torch layers compute, alone, in a model and in the engine."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
import torch
from onnx_home import graph_home
from tiny import VOCAB, tiny_engine, tiny_target
from torch import Tensor

from specflow.draft.base import Drafter, SourceContext
from specflow.draft.feature_model import FeatureModel, feature_graphs
from specflow.draft.nn.feature_step import FeatureNetwork
from specflow.draft.onnx_feature import FeatureGraphs, OnnxFeatureNetwork
from specflow.draft.sources import eagle, mtp
from specflow.draft.sources.eagle import EagleConfig
from specflow.draft.sources.mtp import MTPConfig
from specflow.draft.steps import Frontier
from specflow.errors import ModelError
from specflow.onnx.graphs import GraphFinder, GraphSet, Precision
from specflow.onnx.session import Place
from specflow.types import DraftBlock, Features, Observation, Sampling

TARGET = tiny_target(torch.float32, context=600)
WIDTH = TARGET.info.hidden_size
SIZES: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1, "head_width": 6, "mlp_size": 20, "rope_theta": 500.0}
PLACE = Place(torch.device("cpu"), threads=1)
CONTEXTS = (1, 7, 513)
Config = EagleConfig | MTPConfig
CASES: dict[str, Config] = {
    "mtp": MTPConfig(),
    "mtp-other": MTPConfig(order="hidden_first", recycle="pre_norm", hidden="pre_norm", zero_first=True),
    "mtp-modules": MTPConfig(num_modules=3, order="hidden_first", zero_first=True),
    "mtp-unrolled": MTPConfig(unrolled=9, **SIZES),
    "eagle1": EagleConfig(variant=1),
    "eagle2": EagleConfig(variant=1, bias=False, shape="beam", **SIZES),
    "eagle3": EagleConfig(taps=(-1, 0, 1)),
    "eagle3.1": EagleConfig(taps=(1, 0, -1), fc_norm=True, norm_output=True),
    "eagle3-normed": EagleConfig(taps=(-1, 0, 1), norm_before_fc=True, norm_before_residual=True),
    "eagle3-sure": EagleConfig(confidence_head=True, confidence_bias=False),
    "eagle3-calibrated": EagleConfig(confidence_head=True, temperatures=(0.5, 2.0, 3.0, 1.0)),
    "eagle3-reduced": EagleConfig(taps=(0, 1), draft_vocab_size=20, **SIZES),
}
MEMBERS = pytest.mark.parametrize("config", CASES.values(), ids=CASES)


def graphs_of(config: Config) -> FeatureGraphs:
    source: Any = mtp if isinstance(config, MTPConfig) else eagle
    made = source.SOURCE.graphs(config, SourceContext(TARGET, k=4))
    assert isinstance(made, FeatureGraphs)
    return made


def written(config: Config, folder: Path, precision: str = "float32") -> FeatureGraphs:
    folder.mkdir()
    graphs = graphs_of(config)
    with GraphSet(folder, Precision.named(precision)) as made:
        graphs.write(made)
    return graphs


def both(config: Config, folder: Path) -> tuple[FeatureModel, FeatureModel]:
    """The same network run by ONNX Runtime, and by torch."""
    graphs = written(config, folder)
    runs = OnnxFeatureNetwork(graphs._found(folder), TARGET, threads=1)
    return FeatureModel(runs, TARGET), FeatureModel(graphs._network, TARGET)


def begin(model: FeatureModel, contexts: Sequence[int], scale: float = 1.0) -> None:
    """Requests with so many known positions, the same for every model, whose features are of this size."""
    numbers = torch.Generator().manual_seed(3)
    cache = TARGET.new_cache(len(contexts), 600)
    model.reset(len(contexts), 24, cache)
    for row, count in enumerate(contexts):
        model.start(row, [3])
        tokens = torch.randint(3, VOCAB, (count,), generator=numbers).tolist()
        rows = (torch.randn(1, count, 4, WIDTH, generator=numbers) * scale).to(model._info.dtype)
        taps = {layer: rows[:, :, index] for index, layer in enumerate(model.needs.taps)}
        features = Features(taps, rows[:, :, 0], rows[:, :, 1])
        model.observe(Observation((tuple(tokens),), (0,), (count,), features), [row])


def chain(model: FeatureModel, k: int) -> Tensor:
    """Logits along a chain of k tokens.  # [B, D, Vd]"""
    batch, depth = len(model.caches[0].lengths), min(k, model.most_depth)
    tokens = torch.randint(0, VOCAB, (batch, depth), generator=torch.Generator().manual_seed(k))
    steps = model.open([3] * batch, [True] * batch)
    later = [steps.extend(tokens[:, j : j + 1]).squeeze(1) for j in range(depth - 1)]
    return torch.stack([steps.logits, *later], dim=1)


def tree(model: FeatureModel) -> Tensor:
    """Logits of two levels of three nodes, hung differently in every batch row.  # [B, 6, Vd]"""
    batch, numbers = len(model.caches[0].lengths), torch.Generator().manual_seed(5)
    steps = model.open([3] * batch, [True] * batch)
    tokens = torch.randint(0, VOCAB, (2, batch, 3), generator=numbers)
    itself = torch.eye(3, dtype=torch.bool).repeat(batch, 1, 1)
    first = steps.extend(tokens[0], Frontier(torch.zeros(batch, 3, dtype=torch.int64), itself))
    parents = torch.randint(1, 4, (batch, 3), generator=numbers)
    above = torch.nn.functional.one_hot(parents - 1, 3).bool()
    return torch.cat((first, steps.extend(tokens[1], Frontier(parents, torch.cat((above, itself), dim=2)))), dim=1)


def assert_near(found: Tensor, true: Tensor, relative: float = 1e-4) -> None:
    assert found.shape == true.shape
    assert (found - true).abs().max() <= relative * true.abs().max()


@MEMBERS
def test_every_output_of_every_graph_equals_torch(config: Config, tmp_path: Path) -> None:
    folder = tmp_path / "graphs"
    found = list(written(config, folder).compare(folder, Precision.named("float32"), PLACE))
    assert max(each.relative for each in found) <= 1e-4
    outputs = {(path.stem, each.name) for path in folder.glob("*.onnx") for each in onnx.load(path).graph.output}
    assert {(each.graph, each.output) for each in found} == outputs


@MEMBERS
def test_graphs_are_sound_and_the_same_every_time(config: Config, tmp_path: Path) -> None:
    for name in ("one", "two"):
        written(config, tmp_path / name)
    paths = sorted((tmp_path / "one").iterdir())
    assert [path.name for path in paths] == sorted(path.name for path in (tmp_path / "two").iterdir())
    for path in paths:
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
        if path.suffix == ".onnx":
            onnx.checker.check_model(path, full_check=True)
            onnx.shape_inference.infer_shapes(onnx.load(path))


def test_a_comparison_with_other_weights_fails(tmp_path: Path) -> None:
    folder = tmp_path / "graphs"
    written(CASES["eagle3"], folder)
    other = graphs_of(EagleConfig(taps=(-1, 0, 1), seed=1))
    errors = {each.output: each.relative for each in other.compare(folder, Precision.named("float32"), PLACE)}
    assert min(errors[name] for name in ("hidden", "recycled", "scored", "present_key.0")) > 0.1
    assert errors["logits"] < 1e-4  # the target's own


@MEMBERS
def test_chains_and_trees_equal_torch_at_odd_sizes(config: Config, tmp_path: Path) -> None:
    graphs, layers = both(config, tmp_path / "graphs")
    for contexts in (CONTEXTS, *((count,) for count in CONTEXTS)):
        for model in (graphs, layers):
            begin(model, contexts)
        for k in (1, 9):
            assert_near(chain(graphs, k), chain(layers, k))
        assert_near(tree(graphs), tree(layers))
        graphs.select([0])
        layers.select([0])
        assert_near(chain(graphs, 3), chain(layers, 3))


@pytest.mark.parametrize("name", ["mtp", "eagle1", "eagle3-reduced"])
def test_float16_stays_finite_on_a_long_context(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "graphs"
    graphs = written(CASES[name], folder, "float16")
    errors = list(graphs.compare(folder, Precision.named("float16"), PLACE))
    assert max(each.relative for each in errors) < 0.03
    target: Any = SimpleNamespace(info=replace(TARGET.info, dtype=torch.float16), score=lambda rows: rows)
    model = FeatureModel(OnnxFeatureNetwork(graphs._found(folder), target, threads=1), target)
    begin(model, (513,), scale=100.0)
    steps = model.open([3], [True])
    assert bool(steps.logits.isfinite().all())
    assert bool(steps.extend(torch.tensor([[5]])).isfinite().all())
    assert bool(model.caches[0].data.isfinite().all())


class Recorded:
    """A drafter that keeps what it proposed."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self.blocks = drafter, []

    def propose(self, *given: Any) -> DraftBlock | None:
        block = self._drafter.propose(*given)
        self.blocks.append(None if block is None else (block.tokens.tolist(), block.topology.parents.tolist()))
        return block

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)


def built(config: Config, runtime: str, graphs: GraphFinder | None, k: int = 4) -> Drafter:
    source: Any = mtp if isinstance(config, MTPConfig) else eagle
    context = SourceContext(TARGET, k=k, draw="coupled", graphs=graphs, threads=1)
    drafter: Drafter = source.build(config.model_copy(update={"runtime": runtime}), context)
    return drafter


@pytest.mark.parametrize("shape", ["chain", "beam"])
@pytest.mark.parametrize("name", ["mtp", "mtp-modules", "eagle1", "eagle3.1", "eagle3-reduced"])
def test_the_engine_drafts_the_same_blocks_and_says_vanillas_text(name: str, shape: str, tmp_path: Path) -> None:
    narrow = {} if shape == "chain" else {"branch": 3, "nodes": 10}
    config = CASES[name].model_copy(update={"shape": shape, **narrow})
    prompts = [[3, 4, 5], [7], list(range(5, 40))]
    for sampling in (
        Sampling(max_new_tokens=12, ignore_eos=True),
        Sampling(temperature=0.9, seed=3, max_new_tokens=12),
    ):
        plain = [done.tokens for done in tiny_engine(k=0, batch=3, target=TARGET).generate(prompts, sampling)]
        for batch in (1, 3):
            blocks = []
            for runtime in ("onnx", "torch"):
                drafter = Recorded(built(config, runtime, graph_home(tmp_path)))
                engine = tiny_engine(drafter, k=4, batch=batch, target=TARGET)
                done = engine.generate(prompts, sampling)
                assert [each.tokens for each in done] == plain
                assert sum(each.counts.num_draft_tokens for each in done)
                blocks.append(drafter.blocks)
            assert blocks[0] == blocks[1]


def networks() -> int:
    gc.collect()
    return sum(type(each) is FeatureNetwork for each in gc.get_objects())


def test_torch_layers_are_gone_once_they_are_written(tmp_path: Path) -> None:
    before = networks()
    drafter: Any = built(CASES["eagle3-reduced"], "onnx", graph_home(tmp_path))
    assert networks() == before
    assert isinstance(drafter._model.network, OnnxFeatureNetwork)
    torch_drafter: Any = built(CASES["eagle3-reduced"], "auto", graph_home(tmp_path))
    assert networks() == before + 1
    assert isinstance(torch_drafter._model.network, FeatureNetwork)


def test_graphs_are_written_again_only_for_what_changes_them(tmp_path: Path) -> None:
    find, folders = graph_home(tmp_path), []

    def note(*given: Any) -> Path:
        folders.append(find(*given))
        return folders[-1]

    changes: list[dict[str, Any]] = [{}, {"shape": "beam", "nodes": 9}, {"confidence_head": True}, {"seed": 1}, SIZES]
    for change in changes:
        built(EagleConfig(**change), "onnx", note)
    assert [folders.index(folder) for folder in folders] == [0, 0, 0, 3, 4]


def test_beside_a_quantised_target_weights_have_8_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TARGET, "info", replace(TARGET.info, weights="int4"))
    drafter: Any = built(CASES["eagle3-reduced"], "onnx", graph_home(tmp_path))
    (folder,) = (tmp_path / "graphs" / "onnx").iterdir()
    for name in ("fusion", "step", "head"):
        kinds = {node.op_type for node in onnx.load(folder / f"{name}.onnx", load_external_data=False).graph.node}
        assert "MatMulNBits" in kinds
    layers: Any = built(CASES["eagle3-reduced"], "torch", None)
    for model in (drafter._model, layers._model):
        begin(model, (7,))
    assert_near(chain(drafter._model, 1), chain(layers._model, 1), relative=0.1)


def test_graphs_need_a_place_and_a_dtype() -> None:
    with pytest.raises(ModelError, match=r"draft\.runtime.*no place"):
        built(CASES["mtp"], "onnx", None)
    context = SourceContext(tiny_target(), k=4, graphs=lambda *given: Path())
    with pytest.raises(ModelError, match="float64"):
        mtp.build(MTPConfig(runtime="onnx"), context)


class Bent:
    """A target whose logits are capped."""

    info = TARGET.info

    def __init__(self, score: Callable[[Tensor], Tensor]) -> None:
        self.score = score

    def embed(self, tokens: Tensor) -> Tensor:
        return TARGET.embed(tokens)


def test_a_head_that_bends_its_logits_is_refused(tmp_path: Path) -> None:
    capped: Any = Bent(lambda rows: (TARGET.score(rows) / 30.0).tanh() * 30.0)
    moved: Any = Bent(lambda rows: TARGET.score(rows) + torch.arange(VOCAB))
    made = [feature_graphs(MTPConfig(), SourceContext(each, k=4), mtp.read_network) for each in (capped, moved)]
    single = Precision.named("float32")
    with GraphSet(tmp_path, single) as graphs, pytest.raises(ModelError, match="more than a linear layer"):
        made[0].write(graphs)
    with GraphSet(tmp_path, single) as graphs:
        made[1].write(graphs)
    assert max(each.relative for each in made[1].compare(tmp_path, single, PLACE)) < 1e-4


@MEMBERS
def test_facts_say_how_a_round_goes(config: Config) -> None:
    facts = graphs_of(config).facts
    said = " ".join(facts.round)
    for name in ("`hidden`", "`tokens`", "`starts`", "`recycled`", "`scored`", "`head`"):
        assert name in said
    assert ("`confidence`" in said) == config.confidence_head
    assert ("`fusion`" in said) == bool(facts.taps)
    assert (facts.hidden is None) == bool(facts.taps)
    assert facts.num_layers == max(getattr(config, "num_modules", 1), getattr(config, "unrolled", None) or 1)
    assert (facts.to_target is None) == (getattr(config, "draft_vocab_size", None) is None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes_without_graphs_are_refused_before_any_is_written(dtype: torch.dtype, tmp_path: Path) -> None:
    context = SourceContext(target=tiny_target(dtype), k=3, graphs=graph_home(tmp_path))
    with pytest.raises(ModelError, match=r"draft\.runtime: onnx, with a target in"):
        eagle.build(EagleConfig(runtime="onnx"), context)
    assert not list(tmp_path.rglob("*.onnx"))

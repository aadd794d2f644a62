"""Networks that fill a block at once as ONNX graphs: torch's numbers, the engine's blocks, vanilla's text."""

from __future__ import annotations

import gc
import logging
import random
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch
from onnx_home import graph_home
from stepping import NARROW, PROMPTS
from tiny import tiny_engine, tiny_target
from torch import Tensor

from specflow.draft.backbone import ContextBackbone
from specflow.draft.base import Drafter, SourceContext
from specflow.draft.borrowed import borrowed_embedding, borrowed_head
from specflow.draft.checkpoint import open_weights
from specflow.draft.nn.context_block import BlockLayers, block_positions
from specflow.draft.onnx_backbone import OnnxBlock
from specflow.draft.onnx_parallel import ParallelGraphs
from specflow.draft.registry import SourceInfo
from specflow.draft.sources.dflash import SOURCE as DFLASH
from specflow.draft.sources.dspark import SOURCE as DSPARK
from specflow.draft.sources.medusa import SOURCE as MEDUSA
from specflow.errors import ModelError
from specflow.onnx.graphs import GraphSet, Precision
from specflow.onnx.session import OnnxSession, Place
from specflow.sampling import draw_tokens
from specflow.types import DraftBlock, DraftBudget, Features, Observation, Sampling

K = 9
TAPS = (-1, 0)
CPU = Place(torch.device("cpu"), 1)
SINGLE = Precision.named("float32")
TARGET = tiny_target(torch.float32, context=1024)
INFO = TARGET.info
HEATS = tuple(0.5 + step / K for step in range(K))

Case = tuple[SourceInfo, dict[str, object]]
BLOCK: dict[str, object] = {"taps": TAPS, "num_layers": 2}
SPARK: dict[str, object] = {**BLOCK, "corrector_rank": 6}
CASES: dict[str, Case] = {
    "medusa": (MEDUSA, {"num_heads": K}),
    "medusa-own": (
        MEDUSA,
        {"num_heads": K, "own_heads": True, "num_layers": 2, "confidence_head": True, "projection": True},
    ),
    "medusa-reduced": (MEDUSA, {"num_heads": K, "draft_vocab_size": 23, "num_layers": 0}),
    "medusa-gated": (MEDUSA, {"num_heads": K, "corrector": "gated", "corrector_rank": 5, "confidence_head": True}),
    "dflash": (DFLASH, BLOCK),
    "dflash-causal": (DFLASH, {**BLOCK, "causal": True, "num_kv_heads": 1, "num_heads": 2, "head_width": 12}),
    "dflash-window": (DFLASH, {**BLOCK, "window": 5, "confidence_head": True, "confidence_bias": False}),
    "dflash-from-anchor": (DFLASH, {**BLOCK, "window": 4, "window_from": "anchor", "causal": False}),
    "dflash-mixed": (
        DFLASH,
        {**BLOCK, "window": 4, "layer_types": ("full_attention", "sliding_attention"), "corrector": "rnn"},
    ),
    "dspark": (DSPARK, {**SPARK, "temperatures": HEATS}),
    "dspark-rnn": (DSPARK, {**SPARK, "corrector": "rnn", "logit_scale": 0.5, "logit_cap": 3.0}),
    "dspark-gated": (DSPARK, {**SPARK, "corrector": "gated", "draft_vocab_size": 20, "confidence_tokens": False}),
}
CORRECTED = ("medusa-gated", "dflash-mixed", "dspark", "dspark-rnn", "dspark-gated")


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.ERROR):
        yield


def context(case: Case, k: int = K, **more: object) -> SourceContext:
    source, options = case
    corrected = options.get("corrector", source is DSPARK)
    return SourceContext(TARGET, k, "parallel+corrector" if corrected else "parallel", **more)  # type: ignore[arg-type]


def drafter(case: Case, k: int = K, **more: object) -> Drafter:
    source, options = case
    named = {"shape": "chain", **options, **{name: more.pop(name) for name in list(more) if name not in _OF_CONTEXT}}
    return source.build(source.config(**named), context(case, k, **more))


_OF_CONTEXT = ("draw", "confidence", "graphs", "threads")


def network(case: Case, k: int = K) -> ParallelGraphs:
    source, options = case
    assert source.graphs is not None
    made = source.graphs(source.config(**options), context(case, k))
    assert isinstance(made, ParallelGraphs)
    return made


def write(made: ParallelGraphs, folder: Path, precision: Precision = SINGLE) -> list[str]:
    with GraphSet(folder, precision) as graphs:
        made.write(graphs)
    return graphs.names


@pytest.mark.parametrize("name", CASES)
def test_every_output_is_torchs(name: str, tmp_path: Path) -> None:
    made = network(CASES[name])
    names = write(made, tmp_path)
    seen = set()
    for error in made.compare(tmp_path, SINGLE, CPU):
        assert error.relative <= 1e-4, error
        seen.add((error.graph, error.output))
    expected = {(graph, output) for graph in ("draft", "draft_sampled") for output in ("tokens", "logits")}
    expected |= {(names[0] if "heads" in names else "block", output) for output in ("scored", "logits")}
    expected |= {(graph, "scored") for graph in ("block_scored", "heads_scored") if graph in names}
    assert expected <= seen
    assert ("corrector" in names) == (name in CORRECTED) == (("corrector", "bias") in seen)
    assert (("draft", "confidence") in seen) == bool(CASES[name][1].get("confidence_head", CASES[name][0] is DSPARK))


@pytest.mark.parametrize("heats", [(2.0,), (0.5, 2.0, 3.0, 1.5)])
def test_positions_behind_the_last_temperature_have_none(heats: tuple[float, ...], tmp_path: Path) -> None:
    """A block may be wider than what is drafted of it."""
    made = network((DSPARK, {**SPARK, "block_size": 8, "temperatures": heats}), k=len(heats))
    write(made, tmp_path)
    errors = {each.output: each.relative for each in made.compare(tmp_path, SINGLE, CPU)}
    assert errors["confidence"] < 1e-4


def test_a_wrong_graph_is_noticed(tmp_path: Path) -> None:
    """The comparison can fail: graphs of other weights are told, in every output."""
    source, options = CASES["dspark-rnn"]
    write(network((source, {**options, "seed": 1})), tmp_path)
    found = list(network(CASES["dspark-rnn"]).compare(tmp_path, SINGLE, CPU))
    assert min(error.relative for error in found if error.output != "tokens") > 1e-3
    assert max(error.relative for error in found if error.output == "tokens") > 1e-3


@pytest.mark.parametrize("name", ["medusa-gated", "medusa-own", "dflash-from-anchor", "dspark-rnn", "dspark-gated"])
def test_graphs_are_sound_and_written_alike(name: str, tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        names = write(network(CASES[name]), folder)
    for graph in names:
        path = folders[0] / f"{graph}.onnx"
        onnx.checker.check_model(str(path), full_check=True)
        inferred = onnx.shape_inference.infer_shapes(onnx.load(path, load_external_data=False), strict_mode=True)
        for value in (*inferred.graph.input, *inferred.graph.output):
            assert all(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim), value
    files = sorted(path.name for path in folders[0].iterdir())
    assert files == sorted([*(f"{graph}.onnx" for graph in names), "weights.bin"])
    assert all((folders[0] / file).read_bytes() == (folders[1] / file).read_bytes() for file in files)


def layers_of(options: Mapping[str, object]) -> BlockLayers:
    config = DFLASH.config(**options)
    return BlockLayers(config, TAPS, open_weights(None, 0, TARGET, packed=False), TARGET)


@pytest.mark.parametrize("slots", [1, 2, 10])
@pytest.mark.parametrize("lengths", [(1,), (7, 1, 513), (64, 448, 63)])
@pytest.mark.parametrize("name", ["dflash-causal", "dflash-mixed", "dflash-from-anchor"])
def test_any_context_batch_and_block(name: str, lengths: tuple[int, ...], slots: int, tmp_path: Path) -> None:
    """Rows written one batch row at a time and together, caches that grow, blocks of any width."""
    options = CASES[name][1]
    write(network(CASES[name]), tmp_path)
    said = {key: value for key, value in options.items() if not key.startswith(("corrector", "confidence"))}
    said |= {"layout": "fill_in" if slots > 1 else "shifted"}
    torch_layers = layers_of(said)
    graphs = OnnxBlock(tmp_path, CPU, torch_layers) if slots > 1 else shifted(CASES[name], tmp_path, torch_layers)
    numbers = torch.Generator().manual_seed(1)
    caches = graphs.new_cache(len(lengths), 1000), torch_layers.new_cache(len(lengths), 1000)
    for rows, counts in ((0, lengths), (None, (1,) * len(lengths))):
        for row in range(len(lengths)) if rows is not None else [None]:
            size = counts[row] if row is not None else 1, len(TAPS) * INFO.hidden_size
            features = torch.randn(1 if row is not None else len(lengths), *size, generator=numbers)
            for model, cache in ((graphs, caches[0]), (torch_layers, caches[1])):
                part = cache if row is None else cache.row(row)
                model.inject(features, block_positions(part.lengths, size[0], INFO.device), part)
                part.keep([size[0]] * len(part.lengths))
    tokens = torch.randint(INFO.vocab_size, (len(lengths), slots), generator=numbers)
    got, expected = graphs.fill(tokens, caches[0]), torch_layers.fill(tokens, caches[1])
    assert got.logits.shape == (len(lengths), slots - torch_layers.options.first_slot, INFO.vocab_size)
    torch.testing.assert_close(got.logits, expected.logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got.hidden, expected.hidden, atol=1e-4, rtol=1e-4)


def shifted(case: Case, folder: Path, layers: BlockLayers) -> OnnxBlock:
    write(network((case[0], {**case[1], "layout": "shifted"})), folder)
    return OnnxBlock(folder, CPU, layers)


class Keyed:
    def uniform(self, stream: str, row: int, position: int) -> float:
        return random.Random(f"{stream} {row} {position}").random()


LENGTHS = (12, 3, 1)
ANCHORS = [9, 40, 2]
ROWS = torch.randn(3, max(LENGTHS), 2, INFO.hidden_size, generator=torch.Generator().manual_seed(1))


def propose(made: Drafter, temperature: float = 0.0) -> DraftBlock:
    """A block of three ragged rows."""
    cache = TARGET.new_cache(3, 64)
    made.reset(3, cache)
    for row in range(3):
        made.start(row, [3], Sampling(temperature=temperature, seed=1))
    features = Features({tap: ROWS[:, :, i] for i, tap in enumerate(TAPS)}, hidden_post=ROWS[:, :, 0])
    made.observe(Observation(tuple((3,) * n for n in LENGTHS), (0,) * 3, LENGTHS, features), range(3))
    cache.keep(LENGTHS)
    block = made.propose(ANCHORS, DraftBudget((made.num_nodes,) * 3), Keyed())
    assert block is not None
    return block


def run_draft(name: str, folder: Path, graph: str, **more: Tensor) -> dict[str, Tensor]:
    """A round from saved features, as one feeds the graphs outside the engine."""
    session = OnnxSession(folder / f"{graph}.onnx", CPU)
    feeds: dict[str, Tensor] = {"anchors": torch.tensor(ANCHORS), **more}
    slots = None
    if "positions" in session.inputs:
        layers = [value for value in session.inputs if value.startswith("past_key.")]
        _, heads, _, width = session.inputs["past_key.0"].shape
        slots = torch.zeros(len(layers), 2, 3, int(heads), 64, int(width))
        columns = torch.arange(64)
        features = torch.cat([ROWS[:, :, i] for i in range(2)], dim=-1).contiguous()
        begin = {"positions": torch.arange(max(LENGTHS)).repeat(3, 1), "starts": torch.zeros(3, dtype=torch.int64)}
        OnnxSession(folder / "context.onnx", CPU).run({"features": features, **begin}, {}, slots)
        starts = torch.tensor(LENGTHS)
        rows = K + CASES[name][0].config(**CASES[name][1]).first_slot
        seen = columns < (starts + rows).unsqueeze(1)  # both ways in the block, all of the context
        feeds["bias"] = torch.zeros(3, rows, 64).masked_fill_(~seen.unsqueeze(1), float("-inf"))
        feeds |= {"positions": starts.unsqueeze(1) + torch.arange(rows), "starts": starts}
    else:
        feeds["hidden"] = torch.stack([ROWS[row, length - 1, 0] for row, length in enumerate(LENGTHS)])
    feeds = {each: value for each, value in feeds.items() if each in session.inputs}
    drafted = session.outputs["logits"].shape[-1]
    wanted = {"tokens": (3, K), "logits": (3, K, int(drafted))}
    if "confidence" in session.outputs:
        wanted["confidence"] = (3, K)
    return session.run(feeds, wanted, slots)


WHOLE = ("medusa", "medusa-reduced", "medusa-gated", "dflash", "dspark", "dspark-rnn", "dspark-gated")


@pytest.mark.parametrize("name", WHOLE)
def test_draft_is_the_engines_greedy_chain(name: str, tmp_path: Path) -> None:
    write(network(CASES[name]), tmp_path)
    block = propose(drafter(CASES[name], runtime="torch", confidence=True))
    found = run_draft(name, tmp_path, "draft")
    assert torch.equal(found["tokens"], block.tokens)
    assert ("confidence" in found) == (block.confidence_from == "prefix")
    if "confidence" in found:
        assert block.confidence is not None
        torch.testing.assert_close(found["confidence"], block.confidence, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", WHOLE)
def test_draft_sampled_draws_as_the_engine_does(name: str, tmp_path: Path) -> None:
    """The same numbers choose the same tokens: inverse cumulative sums of the softmax at a temperature."""
    write(network(CASES[name]), tmp_path)
    keyed = Keyed()
    numbers = [
        [keyed.uniform("draft", row, length + 1 + step) for step in range(K)] for row, length in enumerate(LENGTHS)
    ]
    uniforms = torch.tensor(numbers, dtype=torch.float64)
    found = run_draft(name, tmp_path, "draft_sampled", uniforms=uniforms, temperature=torch.tensor([0.7]))
    block = propose(drafter(CASES[name], runtime="torch", draw="sampled"), temperature=0.7)
    assert torch.equal(found["tokens"], block.tokens)
    probs = (found["logits"] / 0.7).softmax(-1)
    told = probs.gather(-1, draw_tokens(probs, uniforms).unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(told, block.law.prob(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["medusa-reduced", "dspark"])
def test_numbers_at_the_ends_choose_tokens_that_can_be(name: str, tmp_path: Path) -> None:
    """A number next to 1 must not lead past the vocabulary, nor to a token without probability; cold is greedy."""
    write(network(CASES[name]), tmp_path)
    ends = torch.full((3, K), 1.0 - 2.0**-53, dtype=torch.float64)
    cold = {"temperature": torch.tensor([1e-4])}
    greedy = run_draft(name, tmp_path, "draft")["tokens"]
    for uniforms in (torch.zeros_like(ends), ends):
        assert torch.equal(run_draft(name, tmp_path, "draft_sampled", uniforms=uniforms, **cold)["tokens"], greedy)
    last = run_draft(name, tmp_path, "draft_sampled", uniforms=ends, temperature=torch.tensor([1.0]))
    assert int(last["tokens"].max()) < INFO.vocab_size


@pytest.mark.parametrize("name", ["medusa-own", "medusa-reduced", "dspark"])
def test_the_lowest_id_of_equals_is_drafted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of 0 score all tokens alike."""
    monkeypatch.setattr("specflow.draft.nn.weights.SeededTensors.draw", lambda _, name, shape: torch.zeros(shape))
    monkeypatch.setattr(TARGET, "score", lambda rows: rows.new_zeros(*rows.shape[:-1], INFO.vocab_size))
    made = network(CASES[name])
    write(made, tmp_path)
    lowest = 0 if made.facts.to_target is None else int(made.facts.to_target[0])
    assert run_draft(name, tmp_path, "draft")["tokens"].tolist() == [[lowest] * K] * 3


@pytest.mark.parametrize("name", CASES)
def test_the_engine_drafts_the_same_blocks(name: str, tmp_path: Path) -> None:
    plain = propose(drafter(CASES[name], runtime="torch", confidence=True))
    graphs = propose(drafter(CASES[name], runtime="onnx", confidence=True, graphs=graph_home(tmp_path), threads=1))
    assert torch.equal(graphs.tokens, plain.tokens)
    assert plain.confidence is not None
    assert graphs.confidence is not None
    torch.testing.assert_close(graphs.confidence, plain.confidence, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("shape", ["chain", "beam"])
@pytest.mark.parametrize("name", ["medusa", "medusa-gated", "dflash-mixed", "dspark", "dspark-rnn", "dspark-gated"])
def test_text_is_vanillas(name: str, shape: str, tmp_path: Path) -> None:
    home, k = graph_home(tmp_path), 4
    options = {"shape": shape, **NARROW[shape], "runtime": "onnx", "temperatures": ()}
    for sampling in (Sampling(max_new_tokens=12, ignore_eos=True, temperature=T, seed=2) for T in (0.0, 0.9)):
        expected = [done.tokens for done in tiny_engine(target=TARGET).generate(PROMPTS, sampling)]
        for batch in (1, 3):
            made = drafter(CASES[name], k, draw="coupled", graphs=home, threads=1, **options)
            done = tiny_engine(made, k=k, batch=batch, target=TARGET).generate(PROMPTS, sampling)
            assert [each.tokens for each in done] == expected
            assert all(each.counts.num_draft_tokens for each in done)
    assert len(list((tmp_path / "graphs" / "onnx").iterdir())) == 1, "written once, whatever the shape"


def test_half_precision_stays_finite_far_out(tmp_path: Path) -> None:
    half, case = Precision.named("float16"), CASES["dspark-gated"]
    made = network(case)
    write(made, tmp_path, half)
    assert max(error.relative for error in made.compare(tmp_path, half, CPU)) < 0.03
    graphs = OnnxBlock(tmp_path, CPU, layers_of({**BLOCK, "layout": "shifted", "draft_vocab_size": 20}))
    large = torch.randn(1, 900, len(TAPS) * INFO.hidden_size, generator=torch.Generator().manual_seed(1)) * 300
    cache = graphs.new_cache(1, 1000)
    graphs.inject(large.half(), torch.arange(900).unsqueeze(0), cache)
    cache.keep([900])
    found = graphs.fill(torch.tensor([[5, 6, 7]]), cache)
    assert found.logits.dtype == torch.float16
    assert found.logits.isfinite().all()


def test_what_a_reader_must_know() -> None:
    facts = network(CASES["dspark-gated"]).facts
    assert (facts.block_size, facts.first_slot, facts.mask_token) == (K, 0, INFO.vocab_size - 1)
    assert (facts.taps, facts.num_layers, facts.hidden) == (TAPS, 2, None)
    assert facts.to_target is not None
    assert len(facts.to_target) == 20
    facts = network((DFLASH, {**BLOCK, "block_size": 12, "mask_token": 7})).facts
    assert (facts.block_size, facts.first_slot, facts.mask_token, facts.to_target) == (12, 1, 7, None)
    facts = network(CASES["medusa"]).facts
    assert (facts.hidden, facts.block_size, facts.num_layers) == ("hidden_post", None, 0)
    windowed = network(CASES["dflash-mixed"]).facts.round[1]
    assert "`bias`" in windowed
    assert "`bias_windowed`" in windowed


def test_layers_are_dropped_for_their_graphs(tmp_path: Path) -> None:
    write(network(CASES["dflash"]), tmp_path)
    config = DFLASH.config(**BLOCK)
    model = ContextBackbone(config, open_weights(None, 0, TARGET, packed=False), context(CASES["dflash"]))  # type: ignore[arg-type]
    layers = weakref.ref(model.layers)
    model.take_graphs(tmp_path, CPU)
    gc.collect()
    assert layers() is None


@pytest.mark.parametrize("name", ["medusa-gated", "dspark-rnn"])
def test_beside_a_quantised_target_weights_have_8_bits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TARGET, "info", replace(INFO, weights="int4"))
    plain = propose(drafter(CASES[name], runtime="torch", confidence=True))
    block = propose(drafter(CASES[name], runtime="onnx", confidence=True, graphs=graph_home(tmp_path), threads=1))
    (folder,) = (tmp_path / "graphs" / "onnx").iterdir()
    corrector = onnx.load(folder / "corrector.onnx", load_external_data=False)
    kinds = [node.op_type for node in corrector.graph.node]
    assert "MatMulNBits" in kinds
    assert "MatMul" not in kinds
    assert plain.confidence is not None
    assert block.confidence is not None
    torch.testing.assert_close(block.confidence[:, 0], plain.confidence[:, 0], atol=0.05, rtol=0.05)


def test_graphs_need_a_place() -> None:
    with pytest.raises(ModelError, match="no place to keep graphs"):
        drafter(CASES["medusa"], runtime="onnx")


def test_embedding_and_head_are_read_through_the_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.equal(borrowed_embedding(TARGET), TARGET.embedding)
    head = borrowed_head(TARGET)
    torch.testing.assert_close(head.weight, TARGET.score(torch.eye(INFO.hidden_size).unsqueeze(0))[0].T)
    assert head.bias is None
    score, bias = TARGET.score, torch.linspace(-1, 1, INFO.vocab_size)
    monkeypatch.setattr(TARGET, "score", lambda rows: score(rows) + bias)
    biased = borrowed_head(TARGET)
    torch.testing.assert_close(biased.weight, head.weight, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(biased.bias, bias)
    monkeypatch.setattr(TARGET, "score", lambda rows: score(rows).tanh())
    with pytest.raises(ModelError, match="more than a linear layer"):
        borrowed_head(TARGET)

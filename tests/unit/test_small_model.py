"""Standalone drafting: its own cache, catching up, vocabularies, limits of the draft model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_adapter, make_model, make_native
from onnx_home import graph_home
from pydantic import ValidationError
from stepping import NARROW
from tiny import VOCAB, NumberText, tiny_target

from specflow.draft.base import SourceContext
from specflow.draft.chain import ChainDrafter
from specflow.draft.lm_model import LanguageModel
from specflow.draft.lm_vocabulary import check_vocabularies
from specflow.draft.pending import TOGETHER
from specflow.draft.sources.small_model import SOURCE, SmallModelConfig, build
from specflow.draft.steps import Frontier
from specflow.engine import Engine, EngineParts, EngineSettings
from specflow.errors import ModelError
from specflow.law import PointMass, Reduced
from specflow.length import Additive, Fixed
from specflow.measure import merge_counts
from specflow.target.base import Target
from specflow.types import DraftBudget, Generation, Observation, Sampling
from specflow.verify import BlockRule, Match, Rejection, Rule

PROMPTS = [[5, 9, 33, 17, 40, 41] * 3, [7], [3, 4, 5, 9], [11] * 60]
GREEDY = Sampling(max_new_tokens=20, ignore_eos=True, seed=3)
WARM = Sampling(max_new_tokens=20, ignore_eos=True, seed=3, temperature=0.9, top_k=20)
TARGET = tiny_target()


class Keyed:
    def uniform(self, stream: str, row: int, position: int) -> float:
        return random.Random(f"{stream} {row} {position}").random()


def context_of(target: Target, k: int = 4, draw: Any = "greedy", **options: Any) -> SourceContext:
    return SourceContext(target=target, k=k, dependency="ar", draw=draw, **options)


def drafting(draft: Target, k: int = 4, draw: Any = "greedy", target: Target = TARGET) -> ChainDrafter:
    context = context_of(target, k, draw)
    return ChainDrafter(LanguageModel(draft, context), context)


def decode(drafter: Any, sampling: Sampling, k: int = 4, batch: int = 1, rule: Rule | None = None) -> list[Generation]:
    parts = EngineParts(TARGET, NumberText(), rule or Match(), Fixed(k) if drafter else Fixed(0), drafter)  # type: ignore[arg-type]
    return Engine(parts, EngineSettings(batch=batch, prefill_chunk=8)).generate(PROMPTS, sampling)


def vanilla(sampling: Sampling) -> list[tuple[int, ...]]:
    return _vanilla(warm=sampling is WARM)


@cache
def _vanilla(warm: bool) -> list[tuple[int, ...]]:
    return texts(decode(None, WARM if warm else GREEDY))


def texts(generations: Sequence[Generation]) -> list[tuple[int, ...]]:
    return [generation.tokens for generation in generations]


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("k", [1, 3, 16])
@pytest.mark.parametrize(("sampling", "draw"), [(GREEDY, "greedy"), (WARM, "coupled")])
class TestInTheLoop:
    def test_text_is_vanillas(self, sampling: Sampling, draw: str, k: int, batch: int) -> None:
        found = decode(drafting(tiny_target(seed=1), k, draw), sampling, k, batch)
        assert texts(found) == vanilla(sampling)

    def test_a_drafter_equal_to_the_target_is_always_right(
        self, sampling: Sampling, draw: str, k: int, batch: int
    ) -> None:
        found = decode(drafting(tiny_target(), k, draw), sampling, k, batch)
        assert texts(found) == vanilla(sampling)
        counts = merge_counts(generation.counts for generation in found)
        assert counts.num_accepted_draft_tokens == counts.num_draft_tokens > 0


@pytest.mark.parametrize("rule", [Rejection(), BlockRule()])
def test_an_equal_law_is_never_rejected(rule: Rule) -> None:
    counts = merge_counts(g.counts for g in decode(drafting(tiny_target(), draw="sampled"), WARM, batch=4, rule=rule))
    assert counts.num_accepted_draft_tokens == counts.num_draft_tokens > 0


@pytest.mark.parametrize("runtime", [make_native, make_adapter])
def test_the_kept_cache_equals_one_from_scratch(runtime: Any) -> None:
    """Random accepted lengths, rounds that do not draft, rows that come and go: logits are those of a fresh model."""
    rng = random.Random(0)
    target, draft = tiny_target(), runtime(make_model("llama3_rope", vocab_size=VOCAB), torch.float64)
    drafter = drafting(draft, 5, target=target)
    model = drafter._model  # type: ignore[attr-defined]
    rows = [[3, 4, 5], [rng.randrange(VOCAB) for _ in range(TOGETHER + 30)], [9]]
    drafter.reset(3, target.new_cache(3, 200))
    for row, tokens in enumerate(rows):
        drafter.start(row, tokens[:-1], GREEDY)
        drafter.observe(Observation(((tokens[-1],),), (len(tokens) - 2,), (1,)), [row])
    for round_ in range(12):
        anchors = [tokens[-1] for tokens in rows]
        drafter._cache = Lengths([len(tokens) - 1 for tokens in rows])  # type: ignore[attr-defined]
        block = None
        if round_ % 4 != 3:
            block = drafter.propose(anchors, DraftBudget(tuple(rng.choice([0, 2, 5]) for _ in rows)), Keyed())
        drafted = block.tokens.tolist() if block is not None else [[] for _ in rows]
        accepted = [rng.randint(0, sum(token >= 0 for token in each)) for each in drafted]
        new = [(*each[:count], rng.randrange(VOCAB)) for each, count in zip(drafted, accepted, strict=True)]
        starts = tuple(len(tokens) - 1 for tokens in rows)
        drafter.observe(Observation(tuple(new), starts, tuple(map(len, new)), own=tuple(accepted)), range(len(rows)))
        for tokens, each in zip(rows, new, strict=True):
            tokens.extend(each)
        if round_ == 6:
            drafter.select([2, 0])
            rows = [rows[2], rows[0]]
        logits = model.open([tokens[-1] for tokens in rows], [True] * len(rows)).logits
        again = model.open([tokens[-1] for tokens in rows], [True] * len(rows)).logits
        for row, tokens in enumerate(rows):
            whole = torch.tensor([tokens])
            fresh = draft.forward(whole, torch.arange(len(tokens)).unsqueeze(0), draft.new_cache(1, len(tokens)))
            torch.testing.assert_close(logits[row], fresh.logits[0, -1], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(again[row], logits[row], atol=1e-9, rtol=0)


class Lengths:
    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths


def test_catching_up_takes_one_or_two_tokens_a_round() -> None:
    """Two where a block was accepted whole, one after a rejection; prompts, with the first token, once."""
    draft = tiny_target(seed=1)
    widths, plain = [], draft.forward

    def forward(tokens: Any, *args: Any, **kwargs: Any) -> Any:
        widths.append(tokens.shape[1])
        return plain(tokens, *args, **kwargs)

    draft.forward = forward  # type: ignore[method-assign]
    decode(drafting(draft), GREEDY)
    assert set(widths) - {1, 2} == {5, 19, 60}
    assert all(widths.count(width) == 1 for width in (5, 19, 60))


def test_branches_equal_their_paths() -> None:
    draft = tiny_target(seed=1)
    tree = opened(draft)
    three = tree.extend(
        torch.tensor([[4, 5, 6]]), Frontier(torch.tensor([[0, 0, 0]]), torch.eye(3).bool().unsqueeze(0))
    )
    visible = torch.tensor([[[1, 0, 0, 1, 0], [0, 0, 1, 0, 1]]]).bool()
    below = tree.extend(torch.tensor([[7, 8]]), Frontier(torch.tensor([[1, 3]]), visible))
    for leaf, path in ((0, [4, 7]), (1, [6, 8])):
        chain = opened(draft)
        for token in path:
            logits = chain.extend(torch.tensor([[token]]))
        torch.testing.assert_close(below[:, leaf], logits[:, 0], atol=1e-9, rtol=0)
    assert three.shape == (1, 3, VOCAB)
    assert tree.hidden.shape[:2] == (1, 2)
    assert tree.num_chained == 0
    assert tree.entry(torch.tensor([[1]])) is None


@pytest.mark.parametrize("shape", ["beam", "sampled"])
def test_trees_over_a_cache_of_its_own(shape: str) -> None:
    options = SmallModelConfig(shape=shape, **NARROW[shape])  # type: ignore[arg-type]
    drafter = build(options.model_copy(update={"model": "itself"}), context_of(TARGET, 3, load_model=itself))
    for batch in (1, 4):
        found = decode(drafter, GREEDY, k=3, batch=batch)
        assert texts(found) == vanilla(GREEDY)
        assert merge_counts(g.counts for g in found).num_accepted_draft_tokens > 40


def itself(*_: str) -> Any:
    return tiny_target(), NumberText()


def opened(draft: Target) -> Any:
    model = LanguageModel(draft, context_of(TARGET))
    model.reset(1, 8, TARGET.new_cache(1, 64))
    model.start(0, [5, 9, 33])
    return model.open([33], [True])


class TestLimits:
    def test_rows_beyond_the_drafts_context_are_decoded_plainly(self) -> None:
        for batch in (1, 4):
            found = decode(drafting(tiny_target(context=40)), GREEDY, batch=batch)
            assert texts(found) == vanilla(GREEDY)
            long, short = found[3].counts, found[1].counts
            assert (long.num_draft_tokens, short.num_accepted_draft_tokens > 5) == (0, True)

    def test_a_draft_with_learnt_positions_stays_within_its_table(self) -> None:
        draft = make_adapter(make_model("gpt2", vocab_size=VOCAB, n_positions=24, max_position_embeddings=24))
        assert texts(decode(drafting(draft), GREEDY, batch=4)) == vanilla(GREEDY)

    def test_lengths_that_vary_from_row_to_row(self) -> None:
        drafter = drafting(tiny_target(), k=8)
        parts = EngineParts(TARGET, NumberText(), Match(), Additive(8, start=1), drafter)  # type: ignore[arg-type]
        found = Engine(parts, EngineSettings(batch=4)).generate(PROMPTS, GREEDY)
        assert texts(found) == vanilla(GREEDY)


class TestVocabularies:
    def test_padded_vocabularies_draft(self) -> None:
        """The draft's head is wider than the target's: what lies beyond is cut off."""
        wide = make_native(make_model("llama3_rope", vocab_size=VOCAB + 30), torch.float64)
        drafter = drafting(wide)
        assert drafter._model.vocabulary is None  # type: ignore[attr-defined]
        assert texts(decode(drafter, GREEDY, batch=4)) == vanilla(GREEDY)
        assert opened(wide).logits.shape == (1, VOCAB)

    @pytest.mark.parametrize(("sampling", "rule"), [(GREEDY, Match()), (WARM, BlockRule())])
    def test_a_smaller_vocabulary_is_a_reduced_law(self, sampling: Sampling, rule: Rule) -> None:
        narrow = make_native(make_model("llama3_rope", vocab_size=40), torch.float64)
        drafter = drafting(narrow, draw="sampled")
        found = decode(drafter, sampling, batch=4, rule=rule)
        assert all(len(generation.tokens) == 20 for generation in found)
        assert any(token >= 40 for generation in found for token in generation.tokens)  # the draft reads strangers
        cache = TARGET.new_cache(1, 64)
        drafter.reset(1, cache)
        drafter.start(0, [5, 9], sampling)
        drafter.observe(Observation(((50,),), (1,), (1,)), [0])
        block = drafter.propose([50], DraftBudget((3,)), Keyed())
        assert block is not None
        assert isinstance(block.law, PointMass if sampling is GREEDY else Reduced)
        assert int(block.tokens.max()) < 40

    def test_shared_ids_may_be_padded_on_either_side(self) -> None:
        check_vocabularies(Words("a b c"), Words("a b c"))
        check_vocabularies(Words("a b c"), Words("a b c d"))
        check_vocabularies(Words("a b c d"), Words("a - c"))

    def test_a_mismatch_is_named_with_both_strings(self) -> None:
        ours, theirs = Words("a b c d e f g h"), Words("a c b D E F G h")
        with pytest.raises(ModelError) as error:
            check_vocabularies(ours, theirs)
        assert "6 of 8 token ids" in str(error.value)
        assert "1 is 'b' and 'c'" in str(error.value)
        assert str(error.value).count(" is ") == 5

    def test_it_is_found_when_the_drafter_is_built(self) -> None:
        loaded: list[tuple[str, str, str]] = []

        def load(*asked: str) -> Any:
            loaded.append(asked)
            return tiny_target(), Words("a x c")

        context = context_of(TARGET, codec=Words("a b c"), load_model=load)
        with pytest.raises(ModelError, match="1 is 'b' and 'x'"):
            build(SmallModelConfig(model="some"), context)
        assert loaded == [("some", "auto", "cpu", "auto")]


class Words:
    """A vocabulary; - is an unused id."""

    def __init__(self, words: str) -> None:
        self.name, self._words = "words", words.split()
        self.num_ids = len(self._words)

    def token(self, index: int) -> str | None:
        return None if index >= self.num_ids or self._words[index] == "-" else self._words[index]


class TestRandomModel:
    def test_it_drafts_and_depends_on_its_seed(self) -> None:
        blocks = []
        for seed in (0, 0, 1):
            drafter = build(SmallModelConfig(seed=seed, width=16, heads=2), context_of(TARGET))
            drafter.reset(1, TARGET.new_cache(1, 64))
            drafter.start(0, [5], GREEDY)
            drafter.observe(Observation(((9,),), (0,), (1,)), [0])
            block = drafter.propose([9], DraftBudget((4,)), Keyed())
            assert block is not None
            blocks.append(block.tokens.tolist())
        assert blocks[0] == blocks[1] != blocks[2]

    def test_it_says_that_it_is_random(self, caplog: pytest.LogCaptureFixture) -> None:
        build(SmallModelConfig(), context_of(TARGET))
        assert "no draft.model: the draft model is random" in caplog.text

    def test_own_dtype(self) -> None:
        drafter = build(SmallModelConfig(dtype="bfloat16"), context_of(TARGET))
        assert texts(decode(drafter, GREEDY, batch=4)) == vanilla(GREEDY)

    def test_options_that_fit_no_model_are_refused(self) -> None:
        with pytest.raises(ValidationError, match="multiple of 8"):
            SOURCE.config(width=65, heads=4)
        with pytest.raises(ValidationError):
            SOURCE.config(device="somewhere")
        with pytest.raises(ValidationError, match="width, seed: options of a new draft model, and model is some"):
            SOURCE.config(model="some", width=128, seed=1)


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_a_device_that_is_not_there_is_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ModelError, match=rf"draft\.device: {device} is not available here"):
        build(SmallModelConfig(device=device), context_of(TARGET))


def test_texts_beyond_the_draft_model_say_so_once(caplog: pytest.LogCaptureFixture) -> None:
    decode(drafting(make_native(make_model("llama_linear_rope", vocab_size=VOCAB, max_position_embeddings=30))), GREEDY)
    assert [record.message for record in caplog.records if "undrafted" in record.message] == [
        "beyond 30 tokens texts go on undrafted: the drafter was made for so many"
    ]


@pytest.mark.parametrize(
    ("options", "runtime", "weights"),
    [
        ({}, "native", "float64"),
        ({"dtype": "float32", "runtime": "onnx"}, "onnx", "float32"),
        ({"dtype": "int8"}, "onnx", "int8"),
        ({"dtype": "float32", "runtime": "torch"}, "native", "float32"),
    ],
)
def test_what_computes_a_random_model(options: dict[str, Any], runtime: str, weights: str, tmp_path: Path) -> None:
    made = context_of(TARGET, graphs=graph_home(tmp_path))
    drafter = build(SmallModelConfig(**options), made)
    info = drafter._model._pass.model.info  # type: ignore[attr-defined]
    assert (info.runtime, info.weights) == (runtime, weights)
    assert texts(decode(drafter, GREEDY, k=3, batch=2)) == vanilla(GREEDY)


def test_quantised_weights_need_onnx_runtime() -> None:
    with pytest.raises(ValueError, match="quantised weights run in ONNX Runtime"):
        SmallModelConfig(dtype="int8", runtime="torch")

"""The engine against its own vanilla: same tokens whatever the drafter, K, temperature and neighbours."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import EOS, VOCAB, Adversary, Branching, Empty, Oracle, Ragged, Random, Scripted, tiny_engine, tiny_target

from specflow.engine import Engine
from specflow.errors import RequestError
from specflow.measure import acceptance_length, check_counts
from specflow.types import Generation, Sampling
from specflow.verify import BlockRule, Match, Rejection

PROMPTS = [[5, 9, 33, 5, 9], [7], [4, 8, 15, 16, 23, 42, 4, 8, 15, 16, 23, 42, 11], list(range(3, 30))]
GREEDY = Sampling(max_new_tokens=24, ignore_eos=True, seed=3)
WARM = Sampling(max_new_tokens=24, ignore_eos=True, seed=3, temperature=0.9)
TARGET = tiny_target()
DRAFTERS = [Oracle, Adversary, Empty, Ragged, Random]
TREES = [Branching]


def plain(sampling: Sampling, prompts: list[list[int]] = PROMPTS) -> list[Generation]:
    return tiny_engine(target=TARGET).generate(prompts, sampling)


def drafted(
    kind: Callable[..., Scripted], sampling: Sampling, futures: list[Generation], **options: object
) -> tuple[Engine, Scripted]:
    drafter = kind([future.tokens for future in futures])
    return tiny_engine(drafter, target=TARGET, **options), drafter  # type: ignore[arg-type]


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["T0", "T0.9"])
@pytest.mark.parametrize("kind", DRAFTERS + TREES)
@pytest.mark.parametrize("batch", [1, 4])
def test_text_equals_vanilla_for_every_k(kind: type[Scripted], sampling: Sampling, batch: int) -> None:
    expected = plain(sampling)
    for k in [*range(1, 17), 32]:
        engine, _ = drafted(kind, sampling, expected, k=k, batch=batch)
        got = engine.generate(PROMPTS, sampling)
        assert [g.tokens for g in got] == [e.tokens for e in expected], f"K = {k}"
        for generation in got:
            check_counts(generation.counts)
            assert generation.counts.num_generated_tokens == len(generation.tokens) == 24


def test_oracle_is_always_accepted_and_adversary_never() -> None:
    expected = plain(GREEDY)
    for generation in drafted(Oracle, GREEDY, expected, k=5)[0].generate(PROMPTS, GREEDY):
        assert generation.counts.num_accepted_draft_tokens == generation.counts.num_draft_tokens > 0
        assert acceptance_length(generation.counts) > 4
    for generation in drafted(Adversary, GREEDY, expected, k=5)[0].generate(PROMPTS, GREEDY):
        assert generation.counts.num_accepted_draft_tokens == 0 < generation.counts.num_draft_tokens
        assert acceptance_length(generation.counts) == 1


@pytest.mark.parametrize("rule", [Rejection(), BlockRule(), Match()])
def test_greedy_is_the_same_under_every_lossless_rule(rule: object) -> None:
    expected = plain(GREEDY)
    for kind in DRAFTERS:
        engine, _ = drafted(kind, GREEDY, expected, k=6, batch=4, rule=rule)
        assert [g.tokens for g in engine.generate(PROMPTS, GREEDY)] == [e.tokens for e in expected]


@pytest.mark.parametrize("rule", [Rejection(), BlockRule()])
def test_sampled_rules_do_not_depend_on_the_neighbours(rule: object) -> None:
    expected = plain(WARM)
    alone = [
        drafted(Ragged, WARM, [expected[i]], k=5, rule=rule)[0].generate([PROMPTS[i]], WARM)[0].tokens for i in range(4)
    ]
    together = drafted(Ragged, WARM, expected, k=5, rule=rule, batch=2)[0].generate(PROMPTS, WARM)
    # the scripted lengths depend on the row, so only row 0 drafts alike; the others check that sampling stays legal
    assert together[0].tokens == alone[0]
    assert all(len(g.tokens) == 24 for g in together)


@pytest.mark.parametrize("batch", [1, 4])
def test_refused_tokens_and_those_behind_them_were_drafted(batch: int) -> None:
    """Drafted is what was verified: only positions past a stop do not count."""
    expected = plain(GREEDY)
    engine, _ = drafted(Adversary, GREEDY, expected, k=5, batch=batch)
    for generation in engine.generate(PROMPTS, GREEDY):
        # 23 rounds of one token each; the bonus token takes one place of what is left
        lengths = [min(5, left - 1) for left in range(23, 0, -1)]
        counts = generation.counts
        assert (counts.num_rounds, counts.num_draft_tokens) == (23, sum(lengths))
        assert counts.drafted_at == [sum(length > position for length in lengths) for position in range(5)]
        assert counts.reached_at == [22, 0, 0, 0, 0]


def test_nothing_is_drafted_past_a_stop() -> None:
    full = plain(GREEDY)[3]
    stopping = GREEDY.model_copy(update={"stop_ids": (full.tokens[2],)})
    assert full.tokens.index(full.tokens[2]) == 2
    counts = drafted(Oracle, stopping, [full], k=7)[0].generate([PROMPTS[3]], stopping)[0].counts
    assert (counts.num_rounds, counts.num_draft_tokens, counts.drafted_at) == (1, 2, [1, 1])


@pytest.mark.parametrize("batch", [1, 2])
def test_a_tree_is_counted_by_depth(batch: int) -> None:
    expected = plain(GREEDY)
    engine, _ = drafted(Branching, GREEDY, expected, k=3, batch=batch)
    counts = engine.generate(PROMPTS, GREEDY)[0].counts
    assert len(counts.drafted_at) == 3
    assert counts.num_draft_tokens == 2 * sum(counts.drafted_at)
    assert counts.accepted_at == counts.drafted_at


def test_off_means_no_draft_call_and_others_are_unaffected() -> None:
    expected = plain(GREEDY)
    engine, drafter = drafted(Oracle, GREEDY, expected, k=5)
    engine.generate(PROMPTS[:1], GREEDY.model_copy(update={"speculate": False}))
    assert drafter.calls == 0
    off = GREEDY.model_copy(update={"speculate": False})
    engine, _ = drafted(Oracle, GREEDY, expected, k=5, batch=4)
    got = engine.generate(PROMPTS, [GREEDY, off, GREEDY, off])
    assert [g.tokens for g in got] == [e.tokens for e in expected]
    assert got[1].counts.num_draft_calls == got[1].counts.num_draft_tokens == 0 < got[0].counts.num_draft_tokens


@pytest.mark.parametrize("kind", [Oracle, Ragged, Adversary])
@pytest.mark.parametrize("where", range(1, 12))
def test_stop_id_inside_a_block(kind: type[Scripted], where: int) -> None:
    """A token that vanilla is known to produce is declared a stop; nothing may follow it."""
    full = plain(GREEDY)[3]
    stopping = GREEDY.model_copy(update={"stop_ids": (full.tokens[where],), "logprobs": True})
    first = full.tokens.index(full.tokens[where])
    engine, _ = drafted(kind, stopping, [full], k=7)
    got = engine.generate([PROMPTS[3]], stopping)[0]
    assert got.tokens == full.tokens[: first + 1]
    assert (got.finish, got.stopped_by) == ("stop", full.tokens[first])
    assert got.text == "".join(f"{t} " for t in full.tokens[:first])
    assert got.logprobs is not None
    assert len(got.logprobs) == len(got.tokens) == got.counts.num_generated_tokens
    # the first token is the prefill's; every other one is a committed draft or a round's own token
    assert got.counts.num_accepted_draft_tokens + got.counts.num_rounds >= len(got.tokens) - 1
    assert got.counts.num_accepted_draft_tokens <= len(got.tokens) - 1


@pytest.mark.parametrize("k", [1, 3, 7, 16])
def test_stop_string_inside_a_block(k: int) -> None:
    full = plain(GREEDY)[2]
    stop = f"{full.tokens[9]} {full.tokens[10]} "
    stopping = GREEDY.model_copy(update={"stop_strings": (stop,)})
    engine, _ = drafted(Oracle, stopping, [full], k=k)
    pieces: list[str] = []
    got = engine.generate([PROMPTS[2]], stopping, on_text=lambda _, text: pieces.append(text))[0]
    everything = "".join(f"{t} " for t in full.tokens)
    assert got.text == "".join(pieces) == everything[: everything.find(stop)]
    assert (got.finish, got.stopped_by) == ("stop", stop)
    assert got.tokens == full.tokens[: len(got.tokens)]


def test_a_stop_string_before_the_minimum_does_not_count_later() -> None:
    full = plain(GREEDY)[2]
    early = f"{full.tokens[2]} {full.tokens[3]} "
    for others in ((), ("q" * 40,)):
        waiting = GREEDY.model_copy(update={"stop_strings": (early, *others), "min_new_tokens": 10})
        got = drafted(Oracle, waiting, [full], k=5)[0].generate([PROMPTS[2]], waiting)[0]
        assert (got.tokens, got.finish) == (full.tokens, "length")


def test_stop_beats_length_in_the_same_place() -> None:
    full = plain(GREEDY)[0]
    for cap in range(1, 9):
        stopping = GREEDY.model_copy(update={"stop_ids": (full.tokens[cap - 1],), "max_new_tokens": cap})
        engine, _ = drafted(Oracle, stopping, [full], k=6)
        got = engine.generate([PROMPTS[0]], stopping)[0]
        assert got.finish == "stop"
        capped = GREEDY.model_copy(update={"max_new_tokens": cap})
        assert drafted(Oracle, capped, [full], k=6)[0].generate([PROMPTS[0]], capped)[0].finish == "length"


def test_drafted_eos_that_the_target_rejects_ends_only_the_draft() -> None:
    full = plain(GREEDY)[0]
    unused = next(token for token in range(3, VOCAB) if token not in full.tokens)
    stopping = GREEDY.model_copy(update={"stop_ids": (unused,)})
    lying = Oracle([[unused if i % 3 == 1 else token for i, token in enumerate(full.tokens)]])
    got = tiny_engine(lying, k=5, target=TARGET).generate([PROMPTS[0]], stopping)[0]
    assert got.tokens == full.tokens


def test_ignore_eos_is_honoured_and_eos_stops_otherwise() -> None:
    pushed = Sampling(max_new_tokens=12, seed=1, logit_bias={EOS: 100.0})
    assert plain(pushed)[0].tokens == (EOS,)
    ignoring = pushed.model_copy(update={"ignore_eos": True})
    expected = plain(ignoring)
    assert expected[0].tokens == (EOS,) * 12
    assert drafted(Oracle, ignoring, expected, k=5)[0].generate(PROMPTS[:1], ignoring)[0].tokens == (EOS,) * 12


@pytest.mark.parametrize("cap", range(1, 8))
def test_budget_smaller_than_k(cap: int) -> None:
    sampling = GREEDY.model_copy(update={"max_new_tokens": cap})
    expected = plain(sampling)
    got = drafted(Oracle, sampling, plain(GREEDY), k=16, batch=4)[0].generate(PROMPTS, sampling)
    assert [g.tokens for g in got] == [e.tokens for e in expected]
    assert all(len(g.tokens) == cap and g.finish == "length" for g in got)


def test_context_end_is_reached_exactly_and_never_passed() -> None:
    small = tiny_target(context=40)
    sampling = Sampling(max_new_tokens=500, ignore_eos=True)
    expected = tiny_engine(target=small).generate([PROMPTS[3]], sampling)[0]
    assert expected.finish == "context"
    assert len(expected.prompt_tokens) + len(expected.tokens) == 40
    for k in (1, 5, 16):
        got = tiny_engine(Oracle([expected.tokens]), k=k, target=small).generate([PROMPTS[3]], sampling)[0]
        assert (got.tokens, got.finish) == (expected.tokens, "context")


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([], "no tokens"),
        (list(range(50)) * 10, "500 tokens"),
        ([5, VOCAB], f"token id {VOCAB}"),
        ([-4, 9], "token id -4"),
        ("text", "a str that does not hold token ids"),
        (7, "a int that does not hold token ids"),
    ],
)
def test_prompts_that_cannot_be_decoded_are_refused(prompt: list[int], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        tiny_engine(target=TARGET).generate([[5], prompt], GREEDY)


def test_wrong_number_of_sampling_options() -> None:
    with pytest.raises(RequestError, match=r"2 sampling options \(Sampling\) for 1 prompts"):
        tiny_engine(target=TARGET).generate([[5]], [GREEDY, GREEDY])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_processors_act_at_every_verified_position(temperature: float) -> None:
    sampling = Sampling(
        temperature=temperature,
        top_k=20,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias={7: 1.5, 9: -3.0},
        min_new_tokens=10,
        max_new_tokens=24,
        stop_ids=(11, 12, 13),
        seed=11,
    )
    expected = plain(sampling)
    assert all(len(e.tokens) >= 10 for e in expected)
    assert [e.tokens for e in expected] != [p.tokens for p in plain(GREEDY)]
    for kind in (Oracle, Ragged, Adversary):
        got = drafted(kind, sampling, expected, k=6, batch=4)[0].generate(PROMPTS, sampling)
        assert [g.tokens for g in got] == [e.tokens for e in expected]


def test_logprobs_equal_the_plain_path() -> None:
    sampling = WARM.model_copy(update={"logprobs": True})
    expected = plain(sampling)
    got = drafted(Ragged, sampling, expected, k=6, batch=4)[0].generate(PROMPTS, sampling)
    for g, e in zip(got, expected, strict=True):
        assert g.logprobs is not None
        assert e.logprobs is not None
        torch.testing.assert_close(torch.tensor(g.logprobs), torch.tensor(e.logprobs), atol=1e-9, rtol=0)
        assert max(g.logprobs) < 0


def test_seeds() -> None:
    unseeded = WARM.model_copy(update={"seed": None})
    first, second = plain(unseeded, [PROMPTS[0], PROMPTS[0]])
    assert first.seed != second.seed
    assert first.tokens != second.tokens
    replayed = plain(WARM.model_copy(update={"seed": first.seed}), [PROMPTS[1], PROMPTS[0]])
    assert replayed[1].tokens == first.tokens


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_continuous_batching_changes_nothing(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 7))
    prompts = [data.draw(st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=20)) for _ in range(count)]
    caps = [data.draw(st.integers(1, 15)) for _ in range(count)]
    each = [Sampling(max_new_tokens=cap, temperature=0.7 * (i % 2), seed=i) for i, cap in enumerate(caps)]
    expected = tiny_engine(target=TARGET).generate(prompts, each)
    batch, k = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    kind = data.draw(st.sampled_from(DRAFTERS))
    engine = tiny_engine(kind([e.tokens for e in expected]), k=k, batch=batch, target=TARGET)
    assert [g.tokens for g in engine.generate(prompts, each)] == [e.tokens for e in expected]


def test_stream_gives_the_text_piece_by_piece() -> None:
    expected = plain(GREEDY)[0]
    engine, _ = drafted(Oracle, GREEDY, [expected], k=3)
    pieces = list(engine.stream(PROMPTS[0], GREEDY))
    assert "".join(pieces) == expected.text
    assert len(pieces) > 3


def test_an_abandoned_stream_leaves_the_engine_usable() -> None:
    expected = plain(GREEDY)
    engine, _ = drafted(Oracle, GREEDY, expected, k=3)
    next(engine.stream(PROMPTS[0], GREEDY))
    assert engine.generate(PROMPTS[:1], GREEDY)[0].tokens == expected[0].tokens


def test_two_streams_at_once_are_refused() -> None:
    expected = plain(GREEDY)
    engine = tiny_engine(target=TARGET)
    older, newer = engine.stream(PROMPTS[0], GREEDY), engine.stream(PROMPTS[1], GREEDY)
    next(older)
    first = next(newer)
    with pytest.raises(RequestError, match="another call began"):
        list(older)
    assert first + "".join(newer) == expected[1].text


def test_drafters_never_see_what_follows_a_stop() -> None:
    full = plain(GREEDY)[0]
    stopping = GREEDY.model_copy(update={"stop_ids": (full.tokens[3],)})
    engine, drafter = drafted(Oracle, stopping, [full], k=9)
    got = engine.generate([PROMPTS[0]], stopping)[0]
    assert drafter._done == [len(got.tokens)]


def test_no_prompts_no_work() -> None:
    assert tiny_engine(target=TARGET).generate([], GREEDY) == []


SETTINGS = {
    "greedy": GREEDY,
    "warm": WARM,
    "logprobs": WARM.model_copy(update={"logprobs": True}),
    "penalties": GREEDY.model_copy(update={"repetition_penalty": 1.2, "presence_penalty": 0.1, "min_new_tokens": 9}),
    "top_k": WARM.model_copy(update={"top_k": 9, "min_p": 0.01}),
}


@pytest.mark.parametrize("kind", [Ragged, Branching])
@pytest.mark.parametrize("name", SETTINGS)
def test_one_host_copy_a_round_and_no_other_sync(
    name: str, kind: type[Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count every way a tensor can reach the host while rounds run."""
    sampling = SETTINGS[name]
    expected = plain(sampling)
    engine, _ = drafted(kind, sampling, expected, k=5, batch=4)
    reads = {"tolist": 0}
    original = torch.Tensor.tolist
    inside = []

    def counted(tensor: torch.Tensor) -> object:
        reads["tolist"] += bool(inside)
        return original(tensor)

    def forbidden(*_: object, **__: object) -> object:
        raise AssertionError("host sync inside a round")

    in_numpy = torch.Tensor.numpy

    def numbers(tensor: torch.Tensor) -> object:
        """On CPUs numpy may compute with logits where they are; what a round decided is no float."""
        return in_numpy(tensor) if tensor.is_floating_point() else forbidden()

    rounds = 0
    plain_round = Engine._round

    def watched(self: Engine) -> None:
        nonlocal rounds
        rounds += 1
        inside.append(1)
        with monkeypatch.context() as patch:
            for name in ("item", "__bool__", "__int__", "__float__", "__index__", "nonzero", "cpu"):
                patch.setattr(torch.Tensor, name, forbidden)
            patch.setattr(torch.Tensor, "numpy", numbers)
            patch.setattr(torch, "nonzero", forbidden)
            plain_round(self)
        inside.pop()

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    monkeypatch.setattr(Engine, "_round", watched)
    watched_events = list(engine.events(PROMPTS, sampling))
    assert watched_events
    assert rounds > 0
    assert reads["tolist"] == rounds


@pytest.mark.parametrize("prompts", ["text", None, 7, iter([[5]])])
def test_prompts_of_another_kind_are_refused(prompts: object) -> None:
    with pytest.raises(RequestError, match="prompts"):
        tiny_engine(target=TARGET).generate(prompts, GREEDY)  # type: ignore[arg-type]


def test_sampling_of_another_kind_is_refused() -> None:
    with pytest.raises(RequestError, match="dict"):
        tiny_engine(target=TARGET).generate([[5]], [{"temperature": 1}])  # type: ignore[list-item]


def test_ids_of_other_integer_types_are_plain_integers() -> None:
    expected = plain(GREEDY)[2]
    import numpy as np

    for prompt in (np.array(PROMPTS[2]), torch.tensor(PROMPTS[2])):
        got = drafted(Oracle, GREEDY, [expected], k=3)[0].generate([prompt], GREEDY)[0]  # type: ignore[list-item]
        assert got.tokens == expected.tokens
        assert all(type(token) is int for token in got.prompt_tokens)

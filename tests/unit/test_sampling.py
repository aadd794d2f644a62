"""Processors against a plain reference of their definition, position by position; numbers and draws."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specflow.handover import empty_block
from specflow.law import PointMass
from specflow.noise import RoundNoise
from specflow.sampling import BatchSampler, TargetLaw, draw_tokens, lowest_argmax
from specflow.tree import chain, from_parents
from specflow.types import PAD, DraftBlock, Sampling

CPU = torch.device("cpu")
VOCAB, STOP = 13, 2
PROMPT = [1, 4, 4, 7]
ALL = Sampling(
    temperature=0.7,
    top_k=9,
    top_p=0.85,
    min_p=0.03,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.25,
    logit_bias={0: 2.0, 9: -1.5},
    min_new_tokens=6,
    stop_ids=(5,),
)


def reference(logits: list[float], sampling: Sampling, prompt: Sequence[int], text: Sequence[int]) -> list[float]:
    """Probabilities of one position by the definitions, in floats and lists."""
    scores = [score + sampling.logit_bias.get(token, 0.0) for token, score in enumerate(logits)]
    for token in {*prompt, *text}:
        factor = sampling.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token in set(text):
        scores[token] -= sampling.presence_penalty + sampling.frequency_penalty * list(text).count(token)
    if len(text) < sampling.min_new_tokens:
        for token in {*sampling.stop_ids, *(() if sampling.ignore_eos else (STOP,))}:
            scores[token] = -math.inf
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if sampling.temperature == 0:
        return [float(token == order[0]) for token in range(len(scores))]
    peak = scores[order[0]]
    weights = [math.exp((score - peak) / sampling.temperature) for score in scores]
    kept = order[: sampling.top_k or None]
    total, mass, nucleus = sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        if mass < sampling.top_p * total - 1e-12:
            nucleus.append(token)
        mass += weights[token]
    kept = [token for token in nucleus if weights[token] >= sampling.min_p]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(scores))]


def sampler_for(*settings: Sampling, prompt: Sequence[int] = PROMPT, text: Sequence[int] = ()) -> BatchSampler:
    sampler = BatchSampler(VOCAB, (STOP,), CPU)
    sampler.reset(len(settings))
    for row, sampling in enumerate(settings):
        sampler.start(row, sampling, 0, prompt)
        sampler.commit([row], [text])
    return sampler


def block_of(tokens: list[list[int]], parents: list[list[int]] | None = None) -> DraftBlock:
    ids = torch.tensor(tokens, dtype=torch.int64).view(len(tokens), len(tokens[0]))
    topology = chain(ids.shape[1], CPU) if parents is None else from_parents(torch.tensor(parents))
    return DraftBlock(ids, (ids.shape[1],) * len(tokens), topology, PointMass(ids, VOCAB))


def random_logits(seed: int, batch: int, rows: int, dtype: torch.dtype = torch.float64) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    return (torch.randn(batch, rows, VOCAB, generator=draws, dtype=torch.float64) * 2).to(dtype)


SINGLE = [
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.6),
    Sampling(temperature=1.0, top_k=3),
    Sampling(temperature=1.0, top_p=0.7),
    Sampling(temperature=1.0, top_k=5, top_p=0.7),
    Sampling(temperature=0.5, min_p=0.2),
    Sampling(repetition_penalty=1.8),
    Sampling(temperature=1.0, repetition_penalty=0.7),
    Sampling(temperature=1.0, presence_penalty=1.1),
    Sampling(temperature=1.0, frequency_penalty=-0.6),
    Sampling(temperature=1.0, logit_bias={3: 4.0, 4: -100.0}),
    Sampling(temperature=1.0, min_new_tokens=5),
    Sampling(min_new_tokens=6, stop_ids=(5, 6)),
    Sampling(temperature=1.0, min_new_tokens=9, ignore_eos=True, stop_ids=(5,)),
    ALL,
]


@pytest.mark.parametrize("sampling", SINGLE, ids=lambda s: ",".join(sorted(s.model_fields_set)) or "greedy")
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_every_position_is_processed_with_its_own_prefix(sampling: Sampling, shape: str) -> None:
    draws = random.Random(3)
    for seed in range(8):
        text = [draws.randrange(VOCAB) for _ in range(3)]
        tokens = [draws.randrange(6) for _ in range(5)]  # few values: they repeat on the path
        parents = [draws.randrange(-1, node) if shape == "tree" else node - 1 for node in range(5)]
        block = block_of([tokens], None if shape == "chain" else [parents])
        logits = random_logits(seed, 1, 6)
        probs = sampler_for(sampling, text=text).law(logits, block, [len(text)]).probs()
        paths: list[list[int]] = [[]]
        for token, parent in zip(tokens, parents, strict=True):
            paths.append([*paths[parent + 1], token])
        for row, path in enumerate(paths):
            expected = reference(logits[0, row].tolist(), sampling, PROMPT, [*text, *path])
            assert probs[0, row].tolist() == pytest.approx(expected, abs=1e-12)


def test_rows_of_a_batch_keep_their_own_settings_and_bits() -> None:
    """Sixteen settings in one batch: every row has the bits it has alone, and plain rows are not touched at all."""
    logits = random_logits(0, len(SINGLE), 4, torch.float32)
    tokens = [[1, 3, 3]] * len(SINGLE)
    law = sampler_for(*SINGLE, text=[3, 0]).law(logits, block_of(tokens), [2] * len(SINGLE))
    assert not law.greedy
    for row, sampling in enumerate(SINGLE):
        alone = sampler_for(sampling, text=[3, 0]).law(logits[row : row + 1], block_of(tokens[:1]), [2])
        assert law.probs()[row].equal(alone.probs()[0])
    assert law.logits[:2].equal(logits[:2])
    assert law.logits[12, :3].equal(logits[12, :3].index_fill(1, torch.tensor([STOP]), -torch.inf))


@pytest.mark.parametrize("sampling", [Sampling(temperature=1.0, top_p=0.9), Sampling(temperature=0.7, top_k=40), ALL])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_a_pass_of_any_number_of_rows(sampling: Sampling, dtype: torch.dtype) -> None:
    vocab, rows = 5000, 9
    sampler = BatchSampler(vocab, (STOP,), CPU)
    sampler.reset(1)
    sampler.start(0, sampling, 0, PROMPT)
    logits = torch.randn(1, rows, vocab, generator=torch.Generator().manual_seed(1)).mul(3).to(dtype)
    tokens = [9, 9, 4, 1, 0, 4, 2, 3]
    whole = sampler.law(logits, block_of([tokens]), [0]).probs()
    for row in range(rows):
        sampler.start(0, sampling, 0, PROMPT)
        sampler.commit([0], [tokens[:row]])
        assert sampler.law(logits[:, row : row + 1], block_of([[]]), [row]).probs()[0, 0].equal(whole[0, row])


def test_penalties_count_every_committed_token() -> None:
    """A round that commits three tokens counts as three rounds of one; PAD is no token."""
    sampling = Sampling(temperature=1.0, presence_penalty=0.3, frequency_penalty=0.7, repetition_penalty=1.4)
    logits = random_logits(2, 1, 1)
    at_once, one_by_one = sampler_for(sampling), sampler_for(sampling)
    at_once.commit([0], [[6, 6, 8, PAD]])
    for token in (6, 6, 8):
        one_by_one.commit([0], [[token]])
    expected = reference(logits[0, 0].tolist(), sampling, PROMPT, [6, 6, 8])
    for sampler in (at_once, one_by_one):
        assert sampler.law(logits, block_of([[]]), [3]).probs()[0, 0].tolist() == pytest.approx(expected)


def test_minimum_length_is_counted_in_tokens_at_every_position() -> None:
    law = sampler_for(Sampling(temperature=1.0, min_new_tokens=5)).law(
        random_logits(0, 1, 5), block_of([[1, 1, 1, 1]]), [3]
    )
    assert (law.probs()[0, :, STOP] > 0).tolist() == [False, False, True, True, True]


def test_ties_go_to_the_lowest_ids() -> None:
    flat = torch.zeros(1, 1, VOCAB)
    for sampling in (Sampling(temperature=1.0, top_k=4), Sampling(temperature=1.0, top_p=3.5 / VOCAB)):
        assert sampler_for(sampling).law(flat, block_of([[]]), [0]).probs()[0, 0].nonzero().flatten().tolist() == [
            0,
            1,
            2,
            3,
        ]
    stepped = flat.clone()
    stepped[..., [11, 12]] = 1.0
    law = sampler_for(Sampling(temperature=1.0, top_k=4)).law(stepped, block_of([[]]), [0])
    assert law.probs()[0, 0].nonzero().flatten().tolist() == [0, 1, 11, 12]


def test_top_p_keeps_the_token_that_reaches_the_mass_and_no_more() -> None:
    logits = torch.full((1, 1, VOCAB), -torch.inf, dtype=torch.float64)
    logits[..., :4] = torch.tensor([0.25, 0.5, 0.125, 0.125], dtype=torch.float64).log()
    for top_p, kept in ((0.4, [1]), (0.6, [0, 1]), (0.76, [0, 1, 2]), (0.999, [0, 1, 2, 3])):
        law = sampler_for(Sampling(temperature=1.0, top_p=top_p)).law(logits, block_of([[]]), [0])
        assert law.probs()[0, 0].nonzero().flatten().tolist() == kept


def test_select_moves_settings_with_their_rows() -> None:
    sampler = sampler_for(Sampling(), Sampling(temperature=1.0, logit_bias={3: 50.0}), Sampling(logit_bias={4: 50.0}))
    sampler.select([2, 1])
    law = sampler.law(random_logits(0, 2, 1), block_of([[], []]), [0, 0])
    assert law.draw(torch.full((2, 1), 0.5, dtype=torch.float64)).tolist() == [[4], [3]]
    alone = sampler.law(random_logits(0, 1, 1), block_of([[]]), [0], rows=[1])
    assert alone.draw(torch.full((1, 1), 0.5, dtype=torch.float64)).tolist() == [[3]]


def test_greedy_without_processors_touches_nothing() -> None:
    logits = random_logits(0, 1, 3, torch.bfloat16)
    law = sampler_for(Sampling(top_k=2, top_p=0.5)).law(logits, block_of([[1, 1]]), [0])
    assert law.greedy
    assert law.logits is logits
    assert law.draw().tolist() == logits.float().argmax(-1).tolist()
    assert sampler_for(Sampling(temperature=1e-6)).law(logits, block_of([[1, 1]]), [0]).greedy


def test_the_targets_own_law_is_not_copied_and_no_setting_writes_into_its_logits() -> None:
    logits = random_logits(2, 3, 3)
    plain, before = Sampling(temperature=1.0), logits.clone()
    block = block_of([[1, 1]] * 3)
    assert sampler_for(plain, Sampling(), plain).law(logits, block, [0] * 3).logits is logits
    for other in (Sampling(temperature=0.5), Sampling(temperature=1.0, top_k=2), ALL):
        assert sampler_for(plain, other, plain).law(logits, block, [0] * 3).logits is not logits
        assert logits.equal(before)


def test_narrow_logits_are_widened_before_processing() -> None:
    logits = random_logits(0, 1, 1, torch.bfloat16)
    assert sampler_for(ALL).law(logits, block_of([[]]), [0]).probs().dtype == torch.float32
    assert sampler_for(ALL).law(logits.double(), block_of([[]]), [0]).probs().dtype == torch.float64


def test_logprobs_are_those_of_the_raw_logits_at_the_verified_rows() -> None:
    logits = random_logits(1, 2, 4)
    law = sampler_for(ALL, ALL).law(logits, block_of([[1, 2, 3]] * 2), [0, 0])
    tokens, rows = torch.tensor([[5, 2, PAD], [7, PAD, PAD]]), torch.tensor([[0, 3, PAD], [0, PAD, PAD]])
    as_wide_as_the_pass = (F.pad(each, (0, 1), value=PAD) for each in (tokens, rows))
    for found in (law.logprob(tokens, rows), law.logprob(*as_wide_as_the_pass)):
        for b, i, row, token in ((0, 0, 0, 5), (0, 1, 3, 2), (1, 0, 0, 7)):
            assert float(found[b, i]) == pytest.approx(float(logits[b, row].log_softmax(-1)[token]))


@pytest.mark.parametrize("size", [1, 2, 127, 128, 129, 1000, 49152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_argmax_is_exact_with_the_lowest_of_equals(size: int, dtype: torch.dtype) -> None:
    draws = torch.Generator().manual_seed(size)
    for spread in (0.01, 3.0):  # the first makes many ties
        scores = (torch.randint(0, 9, (3, 4, size), generator=draws) * spread).to(dtype)
        peak = scores.double().amax(-1, keepdim=True)
        first = torch.where(scores.double() == peak, torch.arange(size), size).amin(-1)
        assert lowest_argmax(scores).equal(first)
    assert lowest_argmax(torch.full((1, size), -torch.inf, dtype=dtype)).tolist() == [0]


@pytest.mark.parametrize("size", [1, 3, 128, 500, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_invert_the_cumulative_distribution(size: int, dtype: torch.dtype) -> None:
    draws = torch.Generator().manual_seed(size)
    weights = torch.rand(size, generator=draws, dtype=dtype) * (torch.rand(size, generator=draws) < 0.5)
    weights[size // 2] = 1.0
    u = torch.cat((torch.rand(2000, generator=draws, dtype=torch.float64), torch.tensor([0.0, 1 - 2**-53])))
    tokens = draw_tokens(weights.expand(len(u), -1), u)
    ends = weights.double().cumsum(0) / weights.double().sum()
    slack = 1e-6 if dtype == torch.float32 else 1e-12
    assert bool((weights[tokens] > 0).all())
    assert bool((u < ends[tokens] + slack).all())
    assert bool((u > ends[tokens] - weights[tokens].double() / weights.double().sum() - slack).all())


def test_draws_follow_a_law_far_from_normalised() -> None:
    weights = torch.tensor([0.0, 3e-30, 0.0, 1e-30, 0.0])
    u = torch.tensor([0.0, 0.74, 0.76, 0.9999999])
    assert draw_tokens(weights.expand(4, -1), u.double()).tolist() == [1, 1, 3, 3]


def test_a_sampled_law_draws_with_its_probabilities() -> None:
    logits = random_logits(4, 1, 1)
    u = ((torch.arange(20000, dtype=torch.float64) + 0.5) / 20000).view(-1, 1)
    law = TargetLaw(logits, logits.expand(20000, 1, -1), [False] * 20000)
    frequencies = torch.bincount(law.draw(u).flatten(), minlength=VOCAB) / 20000
    assert torch.allclose(frequencies.double(), logits[0, 0].softmax(-1), atol=1e-4)


def test_numbers_depend_on_their_key_alone() -> None:
    """Not on neighbours, block length or tree; "target" not on the round either, all others on it."""
    alone, batch = RoundNoise([7], [10], CPU), RoundNoise([3, 7], [99, 10], CPU)
    later = RoundNoise([7], [12], CPU)
    tree = from_parents(torch.tensor([[-1, -1, 0, 1, 2]]))
    for stream in ("target", "accept", "residual", "draft"):
        rows = alone.rows(stream, chain(5, CPU))[0].tolist()
        assert batch.rows(stream, chain(2, CPU))[1].tolist() == rows[:3]
        assert batch.rows(stream, tree)[1].tolist() == [rows[depth] for depth in (0, 1, 1, 2, 2, 3)]
        assert [alone.uniform(stream, 0, position) for position in range(11, 17)] == rows
        assert alone.nodes(stream, 5)[0].tolist() == rows[:5]
        assert batch.once(stream).tolist() == [batch.uniform(stream, 0, 99), batch.uniform(stream, 1, 10)]
        assert (later.rows(stream, chain(3, CPU))[0].tolist() == rows[2:6]) == (stream == "target")


def test_numbers_are_uniform_and_unrelated() -> None:
    """Neighbouring seeds, positions and streams, the pattern of real use, share nothing."""
    seeds, size = list(range(60)), 60
    noise = RoundNoise(seeds, [0] * len(seeds), CPU)
    streams = [noise.rows(stream, chain(size - 1, CPU)) for stream in ("target", "accept", "residual", "draft")]
    everything = torch.stack(streams)  # [4, 60, 60]
    assert everything.unique().numel() == everything.numel()
    assert float(everything.min()) > 0
    assert float(everything.max()) < 1
    counts = torch.histc(everything, 16, 0.0, 1.0)
    assert float(((counts - counts.mean()) ** 2 / counts.mean()).sum()) < 40  # 15 degrees of freedom
    centred = everything - 0.5
    for left, right in (
        (centred[:, :, :-1], centred[:, :, 1:]),
        (centred[:, :-1], centred[:, 1:]),
        (centred[:-1], centred[1:]),
        (centred, centred.transpose(1, 2)),
    ):
        assert abs(float((left * right).mean() * 12)) < 0.04


def test_a_checkpoints_stop_id_outside_the_vocabulary_is_harmless() -> None:
    sampler = BatchSampler(8, (2, 999_999), torch.device("cpu"))
    sampler.reset(1)
    sampler.start(0, Sampling(min_new_tokens=3), 0, [1])
    law = sampler.law(torch.zeros(1, 1, 8), empty_block(1, 8, torch.device("cpu")), [0])
    assert law.logits[0, 0, 2] == -torch.inf
    assert law.draw()[0, 0] == 0

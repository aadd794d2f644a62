"""transformers as a peer: what it is asked, and that its times and passes are read rightly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specflow.bench.methods import Ask
from specflow.bench.peers import PeerTarget, load_peers
from specflow.errors import DataError, ModelError

PROMPT = (5, 6, 7, 8, 5, 6, 7, 8, 5, 6)
STOP = 2


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
    )
    path = tmp_path_factory.mktemp("tiny")
    model = LlamaForCausalLM(config)
    model.generation_config.temperature = 0.3  # a default of the checkpoint that must not reach the comparison
    model.generation_config.do_sample = True
    model.generation_config.max_new_tokens = 3
    model.save_pretrained(path)
    return path


def target(directory: Path, stop_ids: tuple[int, ...] = (STOP,)) -> PeerTarget:
    decode = lambda ids: " ".join(map(str, ids))  # noqa: E731
    return PeerTarget(directory, torch.float32, torch.device("cpu"), stop_ids, decode)


def greedy(directory: Path, num_tokens: int) -> list[int]:
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ids = list(PROMPT)
    with torch.inference_mode():
        for _ in range(num_tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


def test_plain_and_every_lookup_decode_greedily_and_count_passes(directory: Path) -> None:
    peers = load_peers(["transformers"], target(directory))
    assert [(peer.name, peer.kind) for peer in peers] == [
        ("transformers", "peer plain"),
        ("transformers lookup K=3", "peer speculative"),
        ("transformers lookup K=5", "peer speculative"),
        ("transformers lookup K=10", "peer speculative"),
    ]
    expected = tuple(greedy(directory, 40))
    for peer in peers:
        outcome = peer.generate(Ask(PROMPT, 40, True, 0))
        assert outcome.tokens == expected
        assert (outcome.finish, outcome.text) == ("length", " ".join(map(str, expected)))
        assert outcome.ttft_s > 0
        assert outcome.deliveries[0] == outcome.ttft_s
        assert sum(outcome.waits) == pytest.approx(outcome.decode_s)
        assert (peer.facts["exactness"], peer.facts["dtype"], peer.facts["lossy"]) == (None, "float32", False)
        assert outcome.output_tps is not None
        assert outcome.rounds is not None
        if peer.kind == "peer plain":
            assert (outcome.first_tokens, outcome.rounds, outcome.tokens_per_round) == (1, 39, 1.0)
        else:
            assert outcome.first_tokens >= 1
            assert outcome.rounds < 39  # a tiny greedy model repeats itself, so lookup must have found something


def test_stop_ids_end_the_text_unless_ignored(directory: Path) -> None:
    expected = greedy(directory, 12)
    stop = expected[4]
    (peer, *_) = load_peers(["transformers"], target(directory, (stop,)))
    stopped = peer.generate(Ask(PROMPT, 12, False, 0))
    cut = expected[: expected.index(stop) + 1]
    assert stopped.tokens == tuple(cut)
    assert (stopped.finish, stopped.text) == ("stop", " ".join(map(str, cut[:-1])))
    ignoring = peer.generate(Ask(PROMPT, 12, True, 0))
    assert (len(ignoring.tokens), ignoring.finish) == (12, "length")


def test_one_token_has_no_rate(directory: Path) -> None:
    (peer, *_) = load_peers(["transformers"], target(directory))
    outcome = peer.generate(Ask(PROMPT, 1, True, 0))
    assert (len(outcome.tokens), outcome.output_tps, outcome.tokens_per_round) == (1, None, None)


def test_unknown_peers_and_missing_weights_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'vlm' is not known"):
        load_peers(["vlm"], target(tmp_path))
    with pytest.raises(ModelError, match="cannot load"):
        load_peers(["transformers"], target(tmp_path))

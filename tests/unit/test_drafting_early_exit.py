"""Early exits over whole texts: logits of drafting, chains that lie apart, what is trained and what is saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forced import ANSWERS, judged, texts
from safetensors.torch import save_file
from tiny import VOCAB, tiny_target
from torch import Tensor

from specflow.draft.base import SourceContext
from specflow.draft.borrowed import TargetTables
from specflow.draft.lm_shared import SharedLayers
from specflow.draft.lm_steps import Shortcut
from specflow.draft.nn.weights import SeededTensors
from specflow.draft.sources.skipped_layers import SOURCE, SkippedLayersConfig, _shortcut
from specflow.draft.trainable import Trainable
from specflow.errors import GraphError
from specflow.train.batch import Batch, Drafting, Slot
from specflow.train.drafting import DraftingOptions, drafting_for
from specflow.train.drafting.windows import chains_apart
from specflow.train.output import save_drafter
from specflow.train.start import StartTensors

LAYERS, EXIT, K = 3, 2, 3
TARGET = tiny_target(torch.float32, layers=LAYERS)
TABLES = TargetTables(TARGET)
CONTEXT = SourceContext(TABLES, K, "ar")


def adapter(tensors: SeededTensors | None = None, **options: Any) -> Trainable:
    config = SkippedLayersConfig(**{"leave_out": "tail", "exit_layer": EXIT, "adapter_rank": 4, **options})
    assert SOURCE.trainable is not None
    made = SOURCE.trainable(config, CONTEXT, tensors or SeededTensors(5))
    for parameter in made.parameters():
        parameter.requires_grad_(True)
    return made


def drafting(made: Trainable, depth: int = K, anchors: int = 64) -> Drafting:
    return drafting_for(made, DraftingOptions(depth, anchors))


def batch_of(key: int = 0) -> Batch:
    """Texts with what the target's layers really make of them."""
    batch = texts(key)
    count, span = batch.tokens.shape
    positions = torch.arange(span).expand(count, -1)
    out = TARGET.forward(batch.tokens, positions, TARGET.new_cache(count, span), taps=range(LAYERS))
    taps = {layer: tap.clone() for layer, tap in out.taps.items()}
    assert out.hidden_post is not None
    return replace(batch, features=replace(batch.features, taps=taps, hidden_post=out.hidden_post.clone()))


def anchors_of(slots: list[Slot]) -> list[tuple[int, int]]:
    span = texts().tokens.shape[1]
    return [divmod(int(at), span) for at in slots[0].at]


def drafted(shortcut: Shortcut, batch: Batch, text: int, anchor: int) -> list[Tensor]:
    """What a round of decoding drafts from after a text, its drafts being the text's own.  # K of [V]"""
    tokens = batch.tokens[text : text + 1]
    cache = TARGET.new_cache(1, tokens.shape[1] + 8)
    TARGET.forward(tokens[:, :anchor], torch.arange(anchor).unsqueeze(0), cache)
    cache.keep([anchor])
    model = SharedLayers(TARGET, shortcut, K)
    model.reset(1, K, cache)
    steps = model.open([int(tokens[0, anchor])], [True])
    found = [steps.logits[0]]
    for ahead in range(1, K):
        found.append(steps.extend(tokens[:, anchor + ahead : anchor + ahead + 1])[0, 0])
    return found


def test_logits_are_those_of_drafting(tmp_path: Path) -> None:
    made, batch = adapter(), batch_of()
    slots = list(drafting(made)(batch))
    save_file(made.state(), tmp_path / "model.safetensors")
    read = SkippedLayersConfig(leave_out="tail", exit_layer=EXIT, adapter_rank=4, weights=str(tmp_path))
    shortcut = _shortcut(read, replace(CONTEXT, target=TARGET))
    compared = 0
    for chain, (text, anchor) in enumerate(anchors_of(slots)):
        if anchor + K <= ANSWERS[text][1]:
            expected = drafted(shortcut, batch, text, anchor)
            for slot, logits in zip(slots, expected, strict=True):
                if slot.known[chain]:
                    torch.testing.assert_close(slot.logits[chain], logits, atol=2e-5, rtol=1e-5)
                    compared += 1
    assert compared > 50


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_chains_lie_apart_and_cover_answers(depth: int) -> None:
    met: set[int] = set()
    for key in range(20):
        batch = texts(key)
        chains = chains_apart(batch, depth, 64)
        span = batch.tokens.shape[1]
        places = [(int(at) // span, int(at) % span) for at in chains.at[0]]
        for k in range(depth):
            assert chains.known[k].tolist() == [judged(text, anchor + k) for text, anchor in places]
        assert all(judged(text, anchor - 1) and judged(text, anchor) for text, anchor in places)
        at = chains.at[chains.known].tolist()
        assert len(at) == len(set(at))
        met.update(at)
    begins = [text * 44 + at for text, (start, end) in enumerate(ANSWERS) for at in range(start, end - 1)]
    assert met == set(begins)


def test_no_more_chains_of_a_text_than_were_asked_for() -> None:
    chosen = [tuple(chains_apart(texts(key), K, 2).at[0].tolist()) for key in range(8)]
    assert all(sum(at // 44 == text for at in each) <= 2 for each in chosen for text in range(4))
    assert len(set(chosen)) > 1
    assert chosen[3] == tuple(chains_apart(texts(3), K, 2).at[0].tolist())


def test_a_text_without_an_answer_has_no_chain() -> None:
    batch = batch_of()
    nothing = replace(batch, answer=torch.zeros_like(batch.answer))
    slots = drafting(adapter())(nothing)
    assert [tuple(slot.logits.shape) for slot in slots] == [(0, VOCAB)] * K


def test_gradients_reach_the_adapter_and_nothing_else() -> None:
    made = adapter()
    sum(slot.logits[:, 3].sum() for slot in drafting(made)(batch_of())).backward()
    assert len(list(made.parameters())) == 2
    assert all(each.grad is not None and bool(each.grad.any()) for each in made.parameters())
    assert TABLES.head.grad is None


def test_the_first_adapter_changes_nothing() -> None:
    batch = batch_of()
    slots = drafting(adapter(StartTensors(0)))(batch)
    for slot in slots:
        plain = TABLES.score(TABLES.norm(batch.features.taps[EXIT - 1].flatten(0, 1)[slot.at]))
        torch.testing.assert_close(slot.logits, plain)


def test_what_is_saved_says_which_layer_it_is_for() -> None:
    made = adapter(exit_layer=None)
    assert made.needs.taps == (1,)
    assert made.config() == {"leave_out": "tail", "exit_layer": 2, "adapter_rank": 4}


def test_a_recipe_that_leaves_the_layer_open_takes_the_checkpoint(tmp_path: Path) -> None:
    save_drafter(tmp_path, adapter(exit_layer=1))
    config = SkippedLayersConfig(leave_out="tail", exit_layer=None, adapter_rank=None, weights=str(tmp_path))
    drafter = SOURCE.build(config, replace(CONTEXT, target=TARGET))
    drafter.reset(1, TARGET.new_cache(1, 64))
    model = drafter._model  # type: ignore[attr-defined]
    assert model._pass.exit_layer == 1


@pytest.mark.parametrize("options", [{"adapter_rank": None}, {"leave_out": "sublayers", "exit_layer": None}])
def test_nothing_to_train_is_refused(options: dict[str, Any]) -> None:
    if options.get("leave_out"):
        options = {**options, "adapter_rank": None}
    with pytest.raises(GraphError, match="no adapter: nothing to train"):
        adapter(**options)


def test_a_narrow_target_is_trained_in_float32() -> None:
    narrow = TargetTables(tiny_target(torch.bfloat16))
    assert narrow.head.dtype == narrow.embedding.dtype == torch.float32
    rows = torch.randn(1, 3, 32, requires_grad=True)
    narrow.score(narrow.norm(rows)).sum().backward()
    assert rows.grad is not None
    assert bool(rows.grad.any())

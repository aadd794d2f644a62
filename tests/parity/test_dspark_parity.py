"""DSpark against `speculators`: backbone, correctors and confidence head with the same random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from dense_block import FEATURES, TAPS, Stage
from random_weights import randomise
from safetensors.torch import save_file
from test_dflash_parity import BLOCK, MASK, SHAPE, TARGET, qwen
from tiny import VOCAB

from specflow.draft.backbone import ContextBackbone
from specflow.draft.base import SourceContext
from specflow.draft.checkpoint import open_weights
from specflow.draft.corrected import read_heads
from specflow.draft.parallel import ParallelModel
from specflow.draft.sources.dspark import DSparkConfig

Foreign = Callable[[str], ModuleType]

RANK = 6
REDUCED = torch.arange(2, VOCAB, 3)
"""Target ids of a reduced draft vocabulary."""


@pytest.mark.parametrize("reduced", [False, True], ids=["full", "reduced"])
@pytest.mark.parametrize("reads_tokens", [True, False], ids=["tokens", "hidden"])
@pytest.mark.parametrize(("theirs_name", "name"), [("vanilla", "markov"), ("gated", "gated"), ("rnn", "rnn")])
def test_speculators_corrects_and_trusts_alike(
    foreign: Foreign, tmp_path: Path, theirs_name: str, name: str, reads_tokens: bool, reduced: bool
) -> None:
    theirs = foreign("speculators.models.dspark")
    num_drafts = len(REDUCED) if reduced else VOCAB
    config = theirs.DSparkSpeculatorConfig(
        transformer_layer_config=qwen({}),
        draft_vocab_size=num_drafts,
        block_size=BLOCK,
        aux_hidden_state_layer_ids=[0, 1],
        mask_token_id=MASK,
        markov_rank=RANK,
        markov_head_type=theirs_name,
        confidence_head_with_markov=reads_tokens,
    )
    model = theirs.DSparkDraftModel(config).float().eval()
    randomise(model)
    state = {key: value.contiguous() for key, value in model.state_dict().items() if not key.startswith("verifier")}
    if reduced:
        state["d2t"] = REDUCED - torch.arange(num_drafts)
        state["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, REDUCED, True)
    save_file(state, tmp_path / "model.safetensors")
    options = DSparkConfig(
        weights=str(tmp_path),
        num_layers=2,
        taps=TAPS,
        block_size=BLOCK,
        mask_token=MASK,
        corrector=name,  # type: ignore[arg-type]
        corrector_rank=RANK,
        confidence_tokens=reads_tokens,
        draft_vocab_size=num_drafts if reduced else None,
    )
    context = SourceContext(TARGET, BLOCK, "parallel+corrector", "greedy", confidence=True)
    reader = open_weights(options.weights, 0, TARGET)
    network = ContextBackbone(options, reader, context)
    heads = read_heads(network, options, reader, context)
    steps_model, head = ParallelModel(network, heads.corrector), heads.confidence
    reader.close()
    assert head is not None

    span, anchors = 60, (5, 33)
    text = torch.randint(0, VOCAB, (1, span), generator=torch.Generator().manual_seed(2))
    chosen = torch.zeros(1, span)
    chosen[0, list(anchors)] = 1
    blocks = torch.stack([text[0, anchor : anchor + BLOCK] for anchor in anchors])  # tokens before each draft position
    with torch.no_grad():
        hidden, logits, *_ = model._backbone_forward(
            FEATURES[1:2, :span].flatten(2).float(),
            text,
            chosen,
            torch.zeros(1, span, SHAPE.hidden_size),
            torch.zeros(1, span, dtype=torch.int64),
            max_anchors=len(anchors),
        )
        rows = hidden.view(len(anchors), BLOCK, -1)
        bias = model.markov_head.block_bias(prev_token_ids=blocks, hidden_states=rows)
        expected = logits.view(len(anchors), BLOCK, -1) + bias
        read = torch.cat((rows, model.markov_head.prev_embeddings(blocks)), -1) if reads_tokens else rows
        trust = model.confidence_head(read).sigmoid()
    stage = Stage(network, [1], TARGET)
    for index, anchor in enumerate(anchors):
        stage.commit([anchor - stage.lengths[0]])
        steps = steps_model.open([int(blocks[index, 0])], [True])
        scored = steps.logits
        for step in range(BLOCK):
            torch.testing.assert_close(scored[0], expected[index, step], atol=1e-4, rtol=0)
            sure = head(steps.hidden, blocks[index : index + 1, step], step)
            torch.testing.assert_close(sure, trust[index : index + 1, step], atol=1e-4, rtol=0, check_dtype=False)
            if step + 1 < BLOCK:
                scored = steps.extend(blocks[index : index + 1, step + 1 : step + 2]).squeeze(1)

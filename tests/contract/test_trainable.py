"""What every source that can be trained must keep: its tensors, and nothing of the target's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny import tiny_target

from specflow.draft.base import SourceContext
from specflow.draft.borrowed import TargetTables
from specflow.draft.registry import SourceInfo, discover
from specflow.draft.trainable import Trainable
from specflow.train.start import StartTensors, vocabulary_offsets

SOURCES = {name: info for name, info in discover().items() if info.trainable is not None}
PRESETS = {
    (name, preset): fixed
    for name, info in SOURCES.items()
    for preset, fixed in info.presets().items()
    if preset not in info.untrained
}
K, REDUCED = 3, 20


@pytest.fixture(params=PRESETS, ids="-".join)
def made(request: pytest.FixtureRequest) -> tuple[SourceInfo, SourceContext, Trainable]:
    name, _ = request.param
    info = SOURCES[name]
    target = tiny_target(torch.float32)
    fields = info.config.model_fields
    options = {**PRESETS[request.param]}
    for field, value in {"draft_vocab_size": REDUCED, "own_head": False, "num_heads": K, "adapter_rank": 4}.items():
        if field in fields and (field != "num_heads" or "own_heads" in fields):
            options[field] = value
    if options.get("variant") == 1:
        options = {key: value for key, value in options.items() if key not in ("draft_vocab_size", "own_head")}
    context = SourceContext(target=target, k=K, dependency=info.dependency[0])
    counts = torch.arange(target.info.vocab_size)
    given = {"d2t": vocabulary_offsets(counts, REDUCED)} if "draft_vocab_size" in options else {}
    tables = replace(context, target=TargetTables(target))
    assert info.trainable is not None
    return info, context, info.trainable(info.config(**options), tables, StartTensors(0, given))


def test_what_was_trained_opens_as_a_checkpoint(
    made: tuple[SourceInfo, SourceContext, Trainable], tmp_path: Path
) -> None:
    info, context, trainable = made
    with torch.no_grad():
        for parameter in trainable.parameters():
            parameter.add_(0.01)
    save_file({name: tensor.contiguous() for name, tensor in trainable.state().items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(dict(trainable.config())))
    fixed = {name: value for name, value in trainable.config().items() if name in ("leave_out", "shape", "variant")}
    assert info.build(info.config(**{info.checkpoint: str(tmp_path)}, **fixed), context) is not None


def test_state_follows_the_parameters(made: tuple[SourceInfo, SourceContext, Trainable]) -> None:
    _, _, trainable = made
    before = {name: tensor.clone() for name, tensor in trainable.state().items()}
    with torch.no_grad():
        for parameter in trainable.parameters():
            parameter.add_(1.0)
    after = trainable.state()
    still = [name for name, tensor in after.items() if tensor.is_floating_point() and torch.equal(tensor, before[name])]
    assert not still, f"{still} do not follow what is trained"
    trained = sum(parameter.numel() for parameter in trainable.parameters())
    assert trained == sum(tensor.numel() for tensor in after.values() if tensor.is_floating_point())


def test_nothing_of_the_target_is_stored(made: tuple[SourceInfo, SourceContext, Trainable]) -> None:
    _, context, trainable = made
    info = context.target.info
    borrowed = {(rows, info.hidden_size) for rows in (info.vocab_size, REDUCED)}
    assert not [name for name, tensor in trainable.state().items() if tuple(tensor.shape) in borrowed]

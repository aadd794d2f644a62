"""What is written is read back as the same drafter: the same tensors, options that say the same, the same drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from outgoing import IDS, TABLES, VERIFIER, WIDTH, K, given_ids, stored
from safetensors.torch import save_file
from tiny import VOCAB

from specflow.checkpoint.layout import read
from specflow.checkpoint.write_drafter import StoredDrafter
from specflow.checkpoint.writing import OutgoingLayout, convert, open_drafter
from specflow.draft.base import SourceContext
from specflow.draft.nn.weights import SeededTensors
from specflow.draft.registry import discover
from specflow.draft.trainable import saved_options
from specflow.errors import CheckpointError, DataError
from specflow.files import write_json_atomic
from specflow.train.batch import Batch
from specflow.train.drafting import DraftingOptions, drafting_for
from specflow.types import Features

BACKBONE = {"num_layers": 2, "taps": (1, 5), "block_size": K + 1, "mask_token": VOCAB - 3}
REDUCED = {"draft_vocab_size": len(IDS)}
HEAD_NORMS = {f"mtp.layers.0.self_attn.{part}_norm.weight": torch.full((8,), 1.5) for part in "qk"}
YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}}
CASES: dict[str, tuple[str, OutgoingLayout, dict[str, Any]]] = {
    "medusa": ("medusa", "official", {"num_heads": 3, "own_heads": True}),
    "medusa-borrowed": ("medusa", "official", {"num_heads": 3, "num_layers": 2}),
    "eagle1": ("eagle", "official", {"variant": 1}),
    "eagle3-official": ("eagle", "official", {}),
    "eagle3-official-reduced": ("eagle", "official", REDUCED),
    "eagle3-speculators": ("eagle", "speculators", {"taps": (0, 3, 5), "norm_before_residual": True, "eps": 1e-5}),
    "eagle3.1-speculators": ("eagle", "speculators", {"fc_norm": True, "norm_output": True, **REDUCED}),
    "eagle3-norm-before-fc": ("eagle", "speculators", {"norm_before_fc": True, "max_positions": 100}),
    "eagle3-scaled": ("eagle", "speculators", {"num_kv_heads": 1, **YARN}),
    "mtp": ("mtp", "speculators", {"unrolled": 3, "hidden": "pre_norm"}),
    "dflash-zlab": ("dflash", "official", {**BACKBONE, "logit_scale": 0.5, "rope_theta": 500.0}),
    "dflash-zlab-window": ("dflash", "official", {**BACKBONE, "window": 4, "causal": False}),
    "dflash-zlab-scaled": ("dflash", "official", {**BACKBONE, **YARN}),
    "dflash-speculators": ("dflash", "speculators", {**BACKBONE, **REDUCED}),
    "dflash-speculators-window": (
        "dflash",
        "speculators",
        {
            **BACKBONE,
            "window": 4,
            "window_from": "anchor",
            "layer_types": ("full_attention", "sliding_attention"),
        },
    ),
    "dflash-shifted": ("dflash", "official", {**BACKBONE, "layout": "shifted"}),
    "dspark-deepspec": ("dspark", "official", {**BACKBONE, "corrector_rank": 6, "corrector": "gated"}),
    "dspark-deepspec-rnn": ("dspark", "official", {**BACKBONE, "corrector_rank": 6, "corrector": "rnn"}),
    "dspark-speculators": ("dspark", "speculators", {**BACKBONE, "corrector_rank": 6, **REDUCED}),
    "dspark-fill-in": ("dspark", "speculators", {**BACKBONE, "corrector_rank": 6, "layout": "fill_in"}),
}


def lay_down(path: Path, drafter: StoredDrafter) -> Path:
    """The drafter as training leaves it."""
    path.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in drafter.tensors.items()}, path / "model.safetensors")
    write_json_atomic(path / "config.json", saved_options(drafter.options))
    return path


def drafts(drafter: StoredDrafter) -> list[torch.Tensor]:
    """Logits of every draft position all over a text, as target ids have them."""
    info = discover()[drafter.source]
    corrected = getattr(drafter.options, "corrector", None) is not None
    dependency = next(each for each in info.dependency if ("corrector" in each) == corrected)
    context = SourceContext(TABLES, 3, dependency)  # type: ignore[arg-type]
    assert info.trainable is not None
    made = info.trainable(drafter.options, context, SeededTensors(99, dict(drafter.tensors)))
    noise = torch.Generator().manual_seed(3)
    taps = {layer: torch.randn(1, 30, WIDTH, generator=noise) for layer in range(-1, TABLES.info.num_layers)}
    pre, post = torch.randn(2, 1, 30, WIDTH, generator=noise).unbind(0)
    tokens = torch.randint(3, VOCAB, (1, 30), generator=noise)
    valid = torch.ones(1, 30, dtype=torch.bool)
    batch = Batch(tokens, valid, valid, Features(taps, pre, post), 0)
    with torch.no_grad():
        slots = drafting_for(made, DraftingOptions(3, 100))(batch)
    return [slot.logits for slot in slots] + [slot.confidence for slot in slots if slot.confidence is not None]


@pytest.mark.parametrize(("source", "layout", "options"), CASES.values(), ids=list(CASES))
def test_it_comes_back_as_the_same_drafter(
    source: str, layout: OutgoingLayout, options: dict[str, Any], tmp_path: Path
) -> None:
    given = (given_ids() if "draft_vocab_size" in options else {}) | (HEAD_NORMS if source == "mtp" else {})
    ours = stored(source, given, **options)
    convert(ours, layout, tmp_path / "out", VERIFIER)
    read(tmp_path / "out").layout.check()
    back = open_drafter(tmp_path / "out")
    for name, tensor in ours.tensors.items():
        torch.testing.assert_close(back.tensors[name], tensor, rtol=0, atol=0)
    expected, found = drafts(ours), drafts(back)
    assert len(found) == len(expected)
    for mine, its in zip(expected, found, strict=True):
        torch.testing.assert_close(its, mine)


@pytest.mark.parametrize(
    ("source", "layout", "key"),
    [
        ("eagle", "speculators", "eagle_aux_hidden_state_layer_ids"),
        ("dflash", "speculators", "aux_hidden_state_layer_ids"),
        ("dflash", "official", "dflash_config"),
    ],
)
def test_a_layer_number_that_is_one_off_changes_the_drafts(
    source: str, layout: OutgoingLayout, key: str, tmp_path: Path
) -> None:
    """The comparison above can fail."""
    ours = stored(source, **({"taps": (1, 2, 5)} if source == "eagle" else BACKBONE))
    config = dict(convert(ours, layout, tmp_path / "out", VERIFIER).config)
    if key == "dflash_config":
        config[key] = {**config[key], "target_layer_ids": [tap + 1 for tap in config[key]["target_layer_ids"]]}
    else:
        config[key] = [tap + 1 for tap in config[key]]
    write_json_atomic(tmp_path / "out" / "config.json", config)
    assert not torch.allclose(drafts(open_drafter(tmp_path / "out"))[0], drafts(ours)[0], atol=1e-2)


@pytest.mark.parametrize("source", ["medusa", "mtp", "eagle", "dflash", "dspark"])
def test_what_training_leaves_is_opened(source: str, tmp_path: Path) -> None:
    small = {"corrector_rank": 6} if source == "dspark" else {}
    drafter = stored(source, **small)
    found = open_drafter(lay_down(tmp_path / "run", drafter))
    assert found.source == source
    assert found.options == drafter.options
    assert set(found.tensors) == set(drafter.tensors)


def test_a_published_drafter_is_converted_too(tmp_path: Path) -> None:
    convert(stored("eagle", given_ids(), **REDUCED), "official", tmp_path / "official", VERIFIER)
    official = open_drafter(tmp_path / "official")
    written = convert(official, "speculators", tmp_path / "speculators", VERIFIER)
    assert written.config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert torch.equal(open_drafter(tmp_path / "speculators").tensors["d2t"], official.tensors["d2t"])


def test_nothing_is_overwritten_and_nothing_begun_where_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("x")
    with pytest.raises(DataError, match="never overwritten"):
        convert(stored("eagle"), "official", tmp_path / "full", VERIFIER)
    with pytest.raises(CheckpointError):
        convert(stored("eagle", fc_norm=True), "official", tmp_path / "new", VERIFIER)
    assert not (tmp_path / "new").exists()


def test_what_is_no_drafter_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no drafter that is known"):
        open_drafter(tmp_path)
    save_file({"fc.weight": torch.zeros(2, 4)}, tmp_path / "model.safetensors")
    write_json_atomic(tmp_path / "config.json", {"variant": 9})
    with pytest.raises(CheckpointError, match=r"config\.json: variant"):
        open_drafter(tmp_path)

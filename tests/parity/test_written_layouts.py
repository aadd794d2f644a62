"""What we write for others is loaded by their packages, and gives the logits that our drafter gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from dense_block import FEATURES as BLOCK_FEATURES
from dense_block import Stage
from dense_steps import FEATURES, TEXT, WIDTH
from safetensors.torch import save_file
from test_dflash_parity import TARGET, ours
from test_eagle3_parity import DEPTH, LENGTH, assert_drafts_like
from tiny import VOCAB, tiny_model
from torch import Tensor

from specflow.checkpoint.write_drafter import StoredDrafter
from specflow.checkpoint.write_target import Verifier, open_verifier
from specflow.checkpoint.writing import convert
from specflow.draft.base import SourceContext
from specflow.draft.borrowed import TargetTables
from specflow.draft.nn.weights import SeededTensors
from specflow.draft.registry import discover
from specflow.draft.sources.eagle import EagleConfig
from specflow.draft.sources.mtp import MTPConfig

Foreign = Callable[[str], ModuleType]

IDS = torch.arange(2, VOCAB, 3)
BLOCK, MASK = 6, VOCAB - 3
BACKBONE = {"num_layers": 2, "taps": (-1, 0), "block_size": BLOCK, "mask_token": MASK, "rope_theta": 300.0}
REDUCED = {"draft_vocab_size": len(IDS)}
ANCHORS, LONG = (3, 4, 17, 50, 90), 120


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Verifier:
    """The tiny target as a directory."""
    path = tmp_path_factory.mktemp("target")
    tiny_model().save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return open_verifier(str(path))


def make(source: str, path: Path, **options: Any) -> StoredDrafter:
    """A drafter with random weights, ours in `path`."""
    info = discover()[source]
    config = info.config.model_validate(options)
    corrected = getattr(config, "corrector", None) is not None
    dependency = next(each for each in info.dependency if ("corrector" in each) == corrected)
    given = {"d2t": IDS - torch.arange(len(IDS))} if "draft_vocab_size" in options else {}
    if source == "mtp":
        given |= {f"mtp.layers.0.self_attn.{part}_norm.weight": torch.full((8,), 1.5) for part in "qk"}
    assert info.trainable is not None
    made = info.trainable(config, SourceContext(TargetTables(TARGET), 3, dependency), SeededTensors(5, given))  # type: ignore[arg-type]
    path.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in made.state().items()}, path / "model.safetensors")
    return StoredDrafter(source, config, made.state(), str(path), 3)


def load(package: ModuleType, kind: str, path: Path) -> Any:
    """Their model of a directory, in float32, with attention that needs no GPU."""
    settings = getattr(package, f"{kind}SpeculatorConfig").from_pretrained(str(path))
    settings.transformer_layer_config._attn_implementation = "eager"
    model = getattr(package, f"{kind}DraftModel").from_pretrained(str(path), config=settings, dtype=torch.float32)
    assert not [name for name, tensor in model.state_dict().items() if bool(tensor.isnan().any())]
    return model.float().eval()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_before_residual": True, "norm_before_fc": True, "rope_theta": 300.0},
        {"fc_norm": True, "norm_output": True, **REDUCED},
        {"eps": 1e-3, "num_kv_heads": 1, "head_width": 6, "mlp_size": 20},
    ],
    ids=["eagle3", "normed", "eagle3.1-reduced", "own-sizes"],
)
def test_speculators_loads_eagle3(
    foreign: Foreign, tmp_path: Path, verifier: Verifier, options: dict[str, Any]
) -> None:
    package = foreign("speculators.models.eagle3")
    drafter = make("eagle", tmp_path / "ours", taps=(-1, 0, 1), **options)
    convert(drafter, "speculators", tmp_path / "theirs", verifier)
    model = load(package, "Eagle3", tmp_path / "theirs")
    seen: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda _, __, logits: seen.append(logits.detach()))
    text = TEXT[:1, 1 : LENGTH + 1]
    with torch.no_grad():
        model(FEATURES[:1, :LENGTH].float(), text, torch.zeros(1, LENGTH, dtype=torch.int64), ttt_steps=DEPTH)
    ours_read = EagleConfig(weights=str(tmp_path / "ours"), taps=(-1, 0, 1), **options)
    assert_drafts_like(ours_read, torch.cat(seen))


def test_speculators_loads_mtp(foreign: Foreign, tmp_path: Path, verifier: Verifier) -> None:
    package = foreign("speculators.models.mtp")
    drafter = make("mtp", tmp_path / "ours", unrolled=DEPTH)
    convert(drafter, "speculators", tmp_path / "theirs", verifier)
    model = load(package, "MTP", tmp_path / "theirs")
    span = LENGTH + DEPTH + 1
    with torch.no_grad():
        logits, *_ = model(TEXT[:1, :span], FEATURES[:1, :span, :WIDTH].float())
    assert_drafts_like(MTPConfig(weights=str(tmp_path / "ours"), unrolled=DEPTH), torch.cat(logits)[:, :LENGTH])


def at_anchors(model: Any, text: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden rows and logits of every slot of blocks at the anchors.  # [A, slots, H], [A, slots, Vd]"""
    chosen = torch.zeros(1, LONG)
    chosen[0, list(ANCHORS)] = 1
    nothing = torch.zeros(1, LONG, WIDTH), torch.zeros(1, LONG, dtype=torch.int64)
    with torch.no_grad():
        hidden, logits, *_ = model._backbone_forward(
            BLOCK_FEATURES[1:2, :LONG].flatten(2).float(), text, chosen, *nothing, max_anchors=len(ANCHORS)
        )
    return hidden.view(len(ANCHORS), BLOCK, -1), logits.view(len(ANCHORS), BLOCK, -1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 4, "window_from": "anchor"},
        {"window": 7, "window_from": "anchor", "causal": False},
        {"window": 4, "window_from": "anchor", "layer_types": ("full_attention", "sliding_attention")},
        REDUCED,
        {**REDUCED, "own_head": False},
    ],
    ids=["full", "sliding", "both-ways", "mixed", "reduced", "borrowed-rows"],
)
def test_speculators_loads_dflash(
    foreign: Foreign, tmp_path: Path, verifier: Verifier, options: dict[str, Any]
) -> None:
    package = foreign("speculators.models.dflash")
    drafter = make("dflash", tmp_path / "ours", **BACKBONE, **options)
    convert(drafter, "speculators", tmp_path / "theirs", verifier)
    model = load(package, "DFlash", tmp_path / "theirs")
    text = torch.randint(0, VOCAB, (1, LONG), generator=torch.Generator().manual_seed(2))
    _, logits = at_anchors(model, text)
    stage = staged(drafter, tmp_path / "again", options)
    for index, anchor in enumerate(ANCHORS):
        stage.commit([anchor - stage.lengths[0]])
        torch.testing.assert_close(stage.draft([int(text[0, anchor])])[0], logits[index, 1:], atol=1e-4, rtol=0)


def staged(drafter: StoredDrafter, path: Path, options: Mapping[str, Any]) -> Stage:
    """Our backbone with the same tensors, acted out over the first request."""
    path.mkdir()
    return Stage(ours(drafter.tensors, path, BLOCK - 1, **{"rope_theta": 300.0, **options}), [1], TARGET)


@pytest.mark.parametrize("kind", ["markov", "gated", "rnn"])
def test_speculators_loads_dspark(foreign: Foreign, tmp_path: Path, verifier: Verifier, kind: str) -> None:
    package = foreign("speculators.models.dspark")
    drafter = make("dspark", tmp_path / "ours", **BACKBONE, **REDUCED, corrector=kind, corrector_rank=6)
    convert(drafter, "speculators", tmp_path / "theirs", verifier)
    model = load(package, "DSpark", tmp_path / "theirs")
    assert model.config.sample_from_anchor
    state = model.state_dict()
    for name, tensor in drafter.tensors.items():
        if name.startswith(("markov_head", "confidence_head", "d2t", "lm_head")):
            assert torch.equal(state[name].to(tensor.dtype), tensor), name
    assert torch.equal(state["t2d"].nonzero().squeeze(1), IDS)


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 4}, {"window": 9, "causal": False}, {"logit_scale": 0.7, "logit_cap": 4.0}, {"causal": True}],
    ids=["full", "sliding", "both-ways", "scaled", "causal"],
)
def test_dflash_loads_the_official_layout(
    foreign: Foreign, tmp_path: Path, verifier: Verifier, options: dict[str, Any]
) -> None:
    theirs = foreign("dflash.model")
    drafter = make("dflash", tmp_path / "ours", **BACKBONE, **options)
    convert(drafter, "official", tmp_path / "theirs", verifier)
    model = theirs.DFlashDraftModel.from_pretrained(str(tmp_path / "theirs")).float().eval()
    stage = staged(drafter, tmp_path / "again", options)
    for index, count in enumerate((9, 1, 6, 40)):
        stage.commit([count])
        anchor, start = 5 + index, stage.lengths[0]
        block = torch.tensor([[anchor, *[MASK] * (BLOCK - 1)]])
        with torch.no_grad():
            hidden = model(
                target_hidden=BLOCK_FEATURES[1:2, :start].flatten(2).float(),
                noise_embedding=TARGET.embed(block),
                position_ids=torch.arange(start + BLOCK).unsqueeze(0),
            )
            expected = model.compute_logits(hidden[:, 1:], TARGET.score)
        torch.testing.assert_close(stage.draft([anchor]), expected, atol=1e-4, rtol=0)

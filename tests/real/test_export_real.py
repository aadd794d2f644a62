"""Exports of the embedded model: a drafter on its features in float32, and the model itself in 8 bits."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from specflow.export import proof
from specflow.export.onnx import ExportPlan, export_onnx
from specflow.recipe import load_recipe

ROUNDS = 12
PASSAGES = 8
"""Of the quality text: a part of it says enough here."""


@pytest.mark.parametrize(("name", "what", "dtype"), [("mtp", "drafter", "float32"), ("vanilla", "target", "int8")])
def test_the_embedded_model_is_exported_with_its_proof(
    name: str, what: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = proof.load_quality_text()[:PASSAGES]
    monkeypatch.setattr(proof, "load_quality_text", lambda: texts)
    plan = ExportPlan(load_recipe(name, ["target.device=cpu"]), frozenset({what}), dtype, ROUNDS, force=True)
    manifest = export_onnx(plan, tmp_path / "out", lambda what: nullcontext()).manifest
    rounds = manifest.proof.rounds
    assert rounds is not None
    assert rounds.rounds == ROUNDS
    if dtype == "float32":
        assert max(error.relative for error in manifest.proof.errors) <= 1e-4
        assert rounds.same_blocks + len(rounds.near_ties) >= rounds.blocks == ROUNDS
    else:
        assert manifest.quality is not None
        assert manifest.quality.agreement >= 0.93
        assert rounds.same_choices >= 0.7 * rounds.choices
    graph = manifest.parts[0].graphs["target" if what == "target" else "step"]
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / graph.file), providers=["CPUExecutionProvider"])
    slots = {
        value.name: np.zeros((1, value.shape[1], 64, value.shape[3]), dtype=np.float32)
        for value in session.get_inputs()
        if value.name.startswith("past_")
    }
    feeds = {
        "tokens": np.array([[1, 2]]),
        "hidden": np.ones((1, 2, manifest.target.hidden_size), dtype=np.float32),
        "positions": np.array([[0, 1]]),
        "starts": np.array([0]),
        "scored": np.array([1]),
        "bias": np.triu(np.full((1, 2, 64), -np.inf, dtype=np.float32), 1),
        **slots,
    }
    wanted = "logits" if what == "target" else "scored"
    (found,) = session.run([wanted], {value.name: feeds[value.name] for value in session.get_inputs()})
    assert np.isfinite(found).all()

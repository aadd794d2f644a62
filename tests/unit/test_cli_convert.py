"""`specflow convert` as a user calls it, and what it reads of a target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from outgoing import IDS, LAYERS, WEIGHTS, given_ids, stored
from safetensors.torch import load_file, save_file
from tiny import VOCAB, tiny_model
from typer.testing import CliRunner

from specflow.checkpoint.write_target import open_verifier
from specflow.cli.app import app
from specflow.draft.trainable import saved_options
from specflow.errors import CheckpointError, DataError, ModelError
from specflow.files import write_json_atomic
from specflow.recipe import dump_recipe, parse_recipe

REDUCED = {"draft_vocab_size": len(IDS)}


def call(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["convert", *words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    tiny_model(layers=LAYERS).save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path


def run_of(path: Path, source: str, **options: object) -> Path:
    """A drafter as training leaves it, in float16."""
    given = given_ids() if "draft_vocab_size" in options else None
    drafter = stored(source, given, **options)
    path.mkdir()
    tensors = {name: t.half() if t.is_floating_point() else t for name, t in drafter.tensors.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    write_json_atomic(path / "config.json", saved_options(drafter.options))
    return path


def test_a_run_becomes_a_speculators_checkpoint(tmp_path: Path, target: Path) -> None:
    run = run_of(tmp_path / "run", "eagle", **REDUCED)
    recipe = {"target": {"model": str(target)}, "draft": {"method": "eagle3", "k": 6, "weights": str(run)}}
    (run / "recipe.yaml").write_text(dump_recipe(parse_recipe(recipe)))
    out = tmp_path / "out"
    code, said, _ = call(str(run), "--to", "speculators", "-o", str(out))  # the recipe names the target
    assert code == 0
    assert "speculators (eagle3)" in said
    assert "model.safetensors: " in said
    config = json.loads((out / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(target)
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 6
    assert config["transformer_layer_config"]["torch_dtype"] == "float16"
    tensors = load_file(out / "model.safetensors")
    assert tensors["fc.weight"].dtype == torch.float16
    assert torch.equal(tensors["embed_tokens.weight"], WEIGHTS["model.embed_tokens.weight"].half())
    with pytest.raises(DataError, match="never overwritten"):
        call(str(run), "--to", "official", "-o", str(out))


def test_the_recipe_tells_sources_apart_that_share_their_names(tmp_path: Path, target: Path) -> None:
    form = {"num_layers": 1, "taps": (1,), "block_size": 5, "corrector_rank": 6, "corrector": "markov"}
    run = run_of(tmp_path / "run", "dflash", **form)
    recipe = {
        "target": {"model": str(target)},
        "draft": {"source": "dflash", "dependency": "parallel+corrector", "k": 4, "weights": str(run)},
    }
    (run / "recipe.yaml").write_text(dump_recipe(parse_recipe(recipe)))
    code, _, _ = call(str(run), "--to", "speculators", "-o", str(tmp_path / "out"))
    assert code == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["sample_from_anchor"] is False


def test_options_and_notes(tmp_path: Path, target: Path) -> None:
    run = run_of(tmp_path / "run", "eagle", confidence_head=True)
    words = (str(run), "--to", "official", "--target", str(target))
    with pytest.raises(CheckpointError, match="--drop-confidence"):
        call(*words, "-o", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    code, _, _ = call(*words, "--drop-confidence", "-o", str(tmp_path / "out"))
    assert code == 0
    run = run_of(tmp_path / "medusa", "medusa", num_heads=2)
    code, said, _ = call(str(run), "--to", "official", "--target", str(target), "-o", str(tmp_path / "heads"))
    assert code == 0
    assert "medusa_lm_head.pt" in said
    heads = torch.load(tmp_path / "heads" / "medusa_lm_head.pt", weights_only=True)
    assert torch.equal(heads["1.1.weight"], WEIGHTS["lm_head.weight"].half())


def test_wrong_words_are_named(tmp_path: Path, target: Path) -> None:
    run = run_of(tmp_path / "run", "eagle")
    with pytest.raises(CheckpointError, match="no target is named"):
        call(str(run), "--to", "official", "-o", str(tmp_path / "a"))
    with pytest.raises(ModelError):
        call(str(run), "--to", "official", "--target", str(tmp_path / "nothing"), "-o", str(tmp_path / "b"))
    with pytest.raises(CheckpointError):
        call(str(tmp_path / "nothing"), "--to", "official", "-o", str(tmp_path / "c"))
    assert call(str(run), "--to", "gguf", "-o", str(tmp_path / "d"))[0] == 2
    assert not any((tmp_path / name).exists() for name in "abcd")


def test_a_target_is_read_without_running_it(tmp_path: Path, target: Path) -> None:
    found = open_verifier(str(target))
    assert (found.vocab_size, found.num_layers, found.context_length) == (VOCAB, LAYERS, 256)
    assert found.architectures == ("LlamaForCausalLM",)
    assert torch.equal(found.head(), WEIGHTS["lm_head.weight"])
    tied = tiny_model()
    tied.config.tie_word_embeddings = True
    tied.tie_weights()
    tied.save_pretrained(tmp_path / "tied")
    (tmp_path / "tied" / "tokenizer.json").write_text("{}")
    found = open_verifier(str(tmp_path / "tied"))
    assert torch.equal(found.head(), found.embedding())


def test_a_target_with_capped_logits_lends_no_head(tmp_path: Path, target: Path) -> None:
    for file in target.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "final_logit_softcapping": 30.0}))
    with pytest.raises(CheckpointError, match="final_logit_softcapping"):
        open_verifier(str(tmp_path)).head()

"""A small model of its own over whole texts: logits of drafting, first weights, what is trained and what is saved."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forced import ANSWERS, TABLES, TARGET, judged, reduced_ids, texts
from safetensors.torch import save_file
from tiny import VOCAB, NumberText, tiny_engine
from toy_training import toy_records, toy_run, toy_target, train, write_corpus
from transformers import AutoConfig, LlamaForCausalLM

from specflow.build import build_engine
from specflow.draft.base import SourceContext
from specflow.draft.lm_model import LanguageModel
from specflow.draft.lm_new import open_reduced, project_embedding
from specflow.draft.nn.weights import SeededTensors
from specflow.draft.sources.small_model import SOURCE, SmallModelConfig, build, graphs
from specflow.draft.trainable import Trainable
from specflow.errors import CheckpointError, GraphError, ModelError
from specflow.law import Reduced
from specflow.recipe import load_recipe, parse_recipe
from specflow.target.base import TargetOptions
from specflow.target.transformer import NativeTarget
from specflow.train.batch import Drafting
from specflow.train.drafting import DraftingOptions, drafting_for
from specflow.train.output import save_drafter
from specflow.train.start import StartTensors
from specflow.types import DraftBudget, Observation, Sampling

K = 3
SIZES = {"layers": 2, "width": 16, "heads": 2}
CONTEXT = SourceContext(TABLES, K, "ar")


def small(reduced: bool = False, tensors: type[SeededTensors] = SeededTensors, **options: Any) -> Trainable:
    size = {"draft_vocab_size": len(reduced_ids())} if reduced else {}
    given = {"d2t": torch.arange(len(reduced_ids())) * 2 + 1} if reduced else {}
    assert SOURCE.trainable is not None
    made = SOURCE.trainable(SmallModelConfig(**{**SIZES, **size, **options}), CONTEXT, tensors(5, given))
    for parameter in made.parameters():
        parameter.requires_grad_(True)
    return made


def drafting(made: Trainable) -> Drafting:
    return drafting_for(made, DraftingOptions(K))


def write(made: Trainable, path: Path) -> str:
    """The checkpoint in float32."""
    save_file({name: tensor.contiguous() for name, tensor in made.state().items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(dict(made.config())))
    return str(path)


def reopened(made: Trainable, path: Path) -> LanguageModel:
    """The drafting network made from a checkpoint."""
    name = write(made, path)
    context = replace(CONTEXT, target=TARGET, load_model=plain)
    drafter = build(SmallModelConfig(model=name, dtype="float32"), context)
    model: LanguageModel = drafter._model  # type: ignore[attr-defined]
    return model


def plain(model: str, *_: str) -> Any:
    """A folder as Hugging Face opens it, run by our decoder."""
    loaded = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    options = TargetOptions("plain", torch.float32, torch.device("cpu"))
    return NativeTarget(loaded.config, dict(loaded.state_dict()), options), NumberText()


@pytest.mark.parametrize("reduced", [False, True], ids=["", "reduced"])
@torch.no_grad()
def test_logits_are_those_of_drafting(reduced: bool, tmp_path: Path) -> None:
    made, batch = small(reduced), texts()
    slots = drafting(made)(batch)
    model = reopened(made, tmp_path)
    compared = 0
    for chain, at in enumerate(slots[0].at.tolist()):
        text, anchor = divmod(at, batch.tokens.shape[1])
        if chain % 3 or anchor + K > ANSWERS[text][1]:
            continue
        tokens = batch.tokens[text].tolist()
        model.reset(1, 8, TARGET.new_cache(1, 64))
        model.start(0, tokens[: anchor + 1])
        steps = model.open([tokens[anchor]], [True])
        logits = [steps.logits[0]]
        logits += [steps.extend(torch.tensor([[tokens[anchor + k]]]))[0, 0] for k in range(1, K)]
        for slot, expected in zip(slots, logits, strict=True):
            torch.testing.assert_close(slot.logits[chain], expected, atol=2e-5, rtol=1e-5)
            compared += 1
    assert compared > 12
    assert slots[0].logits.shape[1] == (len(reduced_ids()) if reduced else VOCAB)


@torch.no_grad()
def test_a_position_reads_the_text_before_it_alone() -> None:
    made, batch = drafting(small()), texts()
    tokens = batch.tokens.clone()
    tokens[0, 20] = (tokens[0, 20] + 1) % VOCAB
    for before, after in zip(made(batch), made(replace(batch, tokens=tokens)), strict=True):
        changed = (before.logits != after.logits).any(-1)
        assert changed.tolist() == [20 <= at < batch.tokens.shape[1] for at in before.at.tolist()]


def test_chains_know_which_positions_are_of_the_answer() -> None:
    for k, slot in enumerate(drafting(small())(texts())):
        if k == 0:
            first = slot.at
        places = [divmod(int(at), 44) for at in first]
        assert slot.known.tolist() == [judged(text, anchor + k) for text, anchor in places]


@pytest.mark.parametrize("reduced", [False, True], ids=["", "reduced"])
def test_gradients_reach_everything(reduced: bool) -> None:
    made = small(reduced)
    sum(slot.logits.log_softmax(-1)[:, 3].sum() for slot in drafting(made)(texts())).backward()
    parameters = list(made.parameters())
    assert len(parameters) == 2 + 2 * 6  # embedding, last norm, and of each layer: two norms, four fused matrices
    assert all(each.grad is not None and bool(each.grad.any()) for each in parameters)


def test_the_embedding_begins_as_the_targets() -> None:
    """In all dimensions of the target, distances of rows are kept up to one factor; blocks add little."""
    made = small(tensors=StartTensors, width=32)
    found, rows = made.state()["model.embed_tokens.weight"], TABLES.embedding
    ratio = torch.cdist(found, found) / torch.cdist(rows, rows).clamp_min(1e-6)
    off = ratio[~torch.eye(VOCAB, dtype=torch.bool)]
    torch.testing.assert_close(off, off.mean().expand_as(off), rtol=1e-3, atol=0)
    assert float(found.norm(dim=1).mean()) == pytest.approx(1.0, abs=1e-4)
    assert made.state()["model.layers.1.mlp.down_proj.weight"].std() < 0.05
    reduced = small(True, StartTensors, width=32).state()["model.embed_tokens.weight"]
    torch.testing.assert_close(reduced, project_embedding(rows[reduced_ids()], 32))
    assert not project_embedding(rows, 40)[:, 32:].any()


def test_a_full_vocabulary_is_a_plain_model(tmp_path: Path) -> None:
    write(small(), tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    assert (model.config.vocab_size, model.config.tie_word_embeddings) == (VOCAB, True)
    assert model.generation_config.eos_token_id in (2, [2])


def test_a_reduced_one_is_no_model_for_others(tmp_path: Path) -> None:
    write(small(True), tmp_path)
    with pytest.raises(ValueError, match="specflow_reduced_llama"):
        AutoConfig.from_pretrained(tmp_path)


def test_a_reduced_one_drafts_with_a_reduced_law(tmp_path: Path) -> None:
    name = write(small(True), tmp_path)
    drafter = build(SmallModelConfig(model=name), replace(CONTEXT, target=TARGET, draw="sampled"))
    warm = Sampling(temperature=0.9, seed=3)
    drafter.reset(1, TARGET.new_cache(1, 64))
    drafter.start(0, [5, 9], warm)
    drafter.observe(Observation(((50,),), (1,), (1,)), [0])
    block = drafter.propose([50], DraftBudget((3,)), Half())
    assert block is not None
    assert isinstance(block.law, Reduced)
    assert set(block.tokens.flatten().tolist()) <= set(reduced_ids().tolist())


class Half:
    def uniform(self, stream: str, row: int, position: int) -> float:
        return 0.5


def test_damage_is_named(tmp_path: Path) -> None:
    made = small(True)
    write(made, tmp_path)
    state = {name: tensor for name, tensor in made.state().items() if name != "d2t"}
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="d2t"):
        open_reduced(str(tmp_path), TARGET)
    assert open_reduced(str(tmp_path / "nowhere"), TARGET) is None
    assert open_reduced("some/model", TARGET) is None


def test_graphs_of_a_reduced_one_are_refused(tmp_path: Path) -> None:
    name = write(small(True), tmp_path)
    with pytest.raises(ModelError, match="a reduced vocabulary of 20"):
        graphs(SmallModelConfig(model=name), replace(CONTEXT, target=TARGET))


def test_what_cannot_be_trained_is_refused() -> None:
    assert SOURCE.trainable is not None
    with pytest.raises(GraphError, match="a model that is there already"):
        SOURCE.trainable(SmallModelConfig(model="some"), CONTEXT, StartTensors(0))
    with pytest.raises(GraphError, match="at most the target's 61"):
        small(draft_vocab_size=62)


class SavedText(NumberText):
    def save(self, directory: Path) -> None:
        (directory / "tokenizer.json").write_text("{}")


def test_a_tokenizer_goes_with_a_full_vocabulary_alone(tmp_path: Path) -> None:
    context = replace(CONTEXT, codec=SavedText())  # type: ignore[arg-type]
    for name, size in (("full", None), ("part", 20)):
        (tmp_path / name).mkdir()
        assert SOURCE.trainable is not None
        config = SmallModelConfig(**SIZES, draft_vocab_size=size)
        save_drafter(tmp_path / name, SOURCE.trainable(config, context, StartTensors(0)))
        assert (tmp_path / name / "tokenizer.json").exists() == (name == "full")


def test_a_run_leaves_a_recipe_that_drafts(tmp_path: Path) -> None:
    loaded = toy_target()
    corpus = write_corpus(tmp_path / "corpus", loaded, toy_records(loaded, 24))
    recipe = parse_recipe({"draft": {"method": "small_model", "k": K, "width": 32, "heads": 2, "seed": 1}})
    train(toy_run(corpus, tmp_path / "run", recipe, loaded, {"steps": 3, "draft_vocab": 40}))
    made = load_recipe(tmp_path / "run" / "recipe.yaml")
    assert made.draft is not None
    options = made.draft.parts[0].options
    assert options.model == str(tmp_path / "run")  # type: ignore[attr-defined]
    assert options.model_fields_set <= {"model", "dtype", "shape"}
    prompts, sampling = [[5, 9, 3], [7]], Sampling(max_new_tokens=12, ignore_eos=True)
    expected = tiny_engine(k=0, target=loaded.target).generate(prompts, sampling)
    found = build_engine(made, loaded).generate(prompts, sampling)
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    assert all(each.counts.num_draft_tokens for each in found)
    again = toy_run(
        corpus, tmp_path / "more", recipe, loaded, {"steps": 1, "draft_vocab": 40}, checkpoint=tmp_path / "run"
    )
    kept = again._trainee.trainable.state()["d2t"]
    assert torch.equal(kept, open_reduced(str(tmp_path / "run"), loaded.target).vocabulary.to_target - torch.arange(40))  # type: ignore[union-attr]

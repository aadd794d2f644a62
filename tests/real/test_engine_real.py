"""Shipped recipes on the embedded model: vanilla's exact tokens, drafts that pay, little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from specflow.bench.data import PromptRow, load_prompts
from specflow.build import LoadedTarget, build_engine, load_target
from specflow.measure import acceptance_length, merge_counts
from specflow.recipe import load_recipe
from specflow.recipe_sections import TargetSection
from specflow.target.load import read_tensors, resolve_model
from specflow.types import Generation, Sampling

ROOT = Path(__file__).resolve().parents[2]
NUM_TOKENS = 32
MOST_CHARACTERS = 700
"""Longer prompts are cut here: their prefill is what these tests would spend their time on."""
PLAIN_BATCH = 3
EXACT_CASES = [
    ("bfloat16", "ngram", 1, 0.0),
    ("bfloat16", "suffix", 3, 0.0),
    ("bfloat16", "suffix", 1, 0.7),
    ("float32", "suffix", 3, 0.0),
    ("float32", "ngram", 3, 0.7),
]
"""dtype, recipe, batch, temperature. Vanilla always runs in batches of three: batch sizes must not matter either."""


def shortest(name: str, count: int) -> list[PromptRow]:
    """The shortest rows of a prompt file."""
    rows, bad = load_prompts([ROOT / "benchmarks" / f"{name}.jsonl"])
    assert (bad, len(rows) >= count) == ([], True)
    return sorted(rows, key=lambda row: len(row.turns[0]))[:count]


ROWS = [*shortest("extraction", 2), *shortest("open", 3), *shortest("code_edits", 1)]


@cache
def target_of(dtype: str) -> LoadedTarget:
    return load_target(TargetSection.model_validate({"dtype": dtype, "device": "cpu"}))


@cache
def decoded(dtype: str, recipe: str, batch: int, temperature: float) -> list[Generation]:
    loaded = target_of(dtype)
    turns = [[{"role": "user", "content": row.turns[0][:MOST_CHARACTERS]}] for row in ROWS]
    prompts = [loaded.codec.encode_chat(turn) for turn in turns]
    sampling = Sampling(max_new_tokens=NUM_TOKENS, temperature=temperature, seed=11, ignore_eos=True)
    made = load_recipe(str(ROOT / "recipes" / f"{recipe}.yaml"), [f"runtime.batch={batch}"])
    return build_engine(made, loaded).generate(prompts, sampling)


@pytest.mark.parametrize(("dtype", "recipe", "batch", "temperature"), EXACT_CASES)
def test_recipes_give_the_exact_tokens_of_vanilla(dtype: str, recipe: str, batch: int, temperature: float) -> None:
    assert {row.category for row in ROWS} == {"extraction", "open", "code_edit"}
    expected = decoded(dtype, "vanilla", PLAIN_BATCH, temperature)
    found = decoded(dtype, recipe, batch, temperature)
    assert all(len(generation.tokens) == NUM_TOKENS for generation in expected)
    assert merge_counts(generation.counts for generation in found).num_accepted_draft_tokens > 0
    same = [one.tokens == other.tokens for one, other in zip(expected, found, strict=True)]
    assert all(same) or target_of(dtype).target.info.exactness != "bit-exact"


@pytest.mark.parametrize(("recipe", "batch"), [("ngram", 1), ("suffix", 3)])
def test_drafts_pay_where_the_answer_is_in_the_prompt(recipe: str, batch: int) -> None:
    """A drafter that silently finds nothing still gives the right text."""
    generations = decoded("bfloat16", recipe, batch, 0.0)
    counts = merge_counts(g.counts for g, row in zip(generations, ROWS, strict=True) if row.category == "extraction")
    length = acceptance_length(counts)
    assert length is not None
    assert length > 1.5


MEASURED = """
import json, torch, transformers
from transformers import AutoConfig, AutoTokenizer

def peak():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

torch.set_num_threads(1)
base = peak()
from specflow.build import build_engine, load_target
from specflow.recipe import load_recipe
from specflow.types import Sampling

recipe = load_recipe(RECIPE, ["target.dtype=float32", "target.device=cpu"])
loaded = load_target(recipe.target)
engine = build_engine(recipe, loaded)
done = engine.generate([loaded.codec.encode("Once upon a time")], Sampling(max_new_tokens=64, ignore_eos=True))
cache = loaded.target.new_cache(1, 64 + 8 + recipe.draft.k + 1).data
print(json.dumps([len(done[0].tokens), peak() - base, cache.numel() * cache.element_size()]))
"""


def test_memory_stays_near_that_of_the_weights() -> None:
    """Peak growth over an interpreter that has imported torch and transformers: weights, one copy of the embedding
    (it is packed as the head), the cache and 300 MB."""
    script = MEASURED.replace("RECIPE", repr(str(ROOT / "recipes" / "ngram.yaml")))
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    num_tokens, growth, cached = json.loads(run.stdout.splitlines()[-1])
    tensors = read_tensors(resolve_model("smollm2-135m").directory)
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    allowed = sum(sizes.values()) + sizes["model.embed_tokens.weight"] + cached + 300 * 10**6
    assert num_tokens == 64
    assert growth <= allowed, f"{growth / 1e6:.0f} MB, more than {allowed / 1e6:.0f} MB"
    assert growth >= sum(sizes.values())

"""Self-speculation on the embedded model: the shipped skip set drafts well, and the text is plain decoding's."""

from __future__ import annotations

from pathlib import Path

from specflow.bench.data import load_prompts
from specflow.build import build_engine, load_target
from specflow.measure import acceptance_length, merge_counts
from specflow.recipe import load_recipe
from specflow.recipe_sections import TargetSection
from specflow.types import Sampling

ROOT = Path(__file__).resolve().parents[2]
BATCH = 4
SAMPLING = Sampling(max_new_tokens=24, ignore_eos=True)


def test_the_shipped_skip_set_is_worth_verifying_and_changes_no_text() -> None:
    loaded = load_target(TargetSection.model_validate({"dtype": "bfloat16", "device": "cpu"}))
    rows, _ = load_prompts([ROOT / "benchmarks" / "open.jsonl"])
    rows = sorted(rows, key=lambda row: len(row.turns[0]))[:BATCH]
    prompts = [loaded.codec.encode_chat(row.messages(0, ())) for row in rows]
    made = {}
    for name in ("vanilla", "layer_skip"):
        recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml", [f"runtime.batch={BATCH}"])
        made[name] = build_engine(recipe, loaded).generate(prompts, SAMPLING)
    assert recipe.draft is not None
    assert recipe.draft.k <= 5
    length = acceptance_length(merge_counts(generation.counts for generation in made["layer_skip"]))
    assert length is not None
    assert length >= 1.8
    same = [one.tokens == other.tokens for one, other in zip(*made.values(), strict=True)]
    assert all(same) or loaded.target.info.exactness != "bit-exact"

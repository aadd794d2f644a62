"""Which recipes apply here, before anything is measured: weights, memory, vocabularies; each refusal with its reason.

No torch at module level. Memory is estimated for the requests that will be decoded, not for the longest that the model
could hold: a draft cache sized by the model's limit runs out of memory where the real one is small (llama.cpp 28433).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specflow.draft.shipped import drafter_path
from specflow.errors import SpecFlowError
from specflow.recipe import Recipe
from specflow.recipe_draft import SourceSection
from tuner.result import Refused

if TYPE_CHECKING:
    from specflow.target.base import TargetInfo

__all__ = [
    "Conditions",
    "MemoryNeed",
    "expected_experts",
    "free_memory",
    "memory_need",
    "missing_weights",
    "placed",
    "preflight",
    "recorded_agreement",
    "warnings_of",
]

FLOAT = 4  # bytes; logits and laws are float32 whatever the model's type
COPIES = 3  # of a row of logits: the head's output, the law, what the rule makes of it
HEADROOM = 0.9
"""Share of the free memory that may be planned for."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
ACTIVE = ("num_experts_per_tok", "moe_top_k", "num_experts_per_token")


@dataclass(frozen=True, slots=True)
class Conditions:
    """What recipes have to run under."""

    batch: int  # most requests decoded together
    context: int  # most tokens of a request, prompt and answer
    free_bytes: int | None  # None: unknown, and nothing is refused for it


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes beyond what plain decoding takes."""

    weights: int = 0
    cache: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.activations

    def __str__(self) -> str:
        parts = {"weights": self.weights, "cache": self.cache, "verification": self.activations}
        return ", ".join(f"{name} {_mb(size)}" for name, size in parts.items())


def preflight(
    recipes: Mapping[str, Recipe],
    info: TargetInfo,
    conditions: Conditions,
    build: Callable[[Recipe], object],
) -> tuple[dict[str, Recipe], list[Refused]]:
    """The recipes that apply, and why the others do not.

    Args:
        recipes: By name; all have the target that is loaded.
        info: Of the target.
        conditions: What they have to run under.
        build: Builds a recipe's drafter, or says with an error why that cannot be: its vocabulary, its shapes.
    """
    kept, refused = {}, []
    for name, recipe in recipes.items():
        reason = _refusal(recipe, info, conditions, build)
        if reason is None:
            kept[name] = recipe
        else:
            refused.append(Refused(recipe=name, phase="preflight", reason=reason))
    return kept, refused


def _refusal(recipe: Recipe, info: TargetInfo, conditions: Conditions, build: Callable[[Recipe], object]) -> str | None:
    if recipe.draft is None:
        return None
    if recipe.draft.k == 0:
        return "k is 0: that is plain decoding, which is measured anyway"
    if (lacks := missing_weights(recipe)) is not None:
        return lacks
    need = memory_need(recipe, info, conditions)
    if conditions.free_bytes is not None and need.total > HEADROOM * conditions.free_bytes:
        found = f"needs about {_mb(need.total)} more memory ({need})"
        return f"{found}, and {_mb(conditions.free_bytes)} are free; fewer requests at once or a smaller K need less"
    try:
        build(recipe)
    except SpecFlowError as error:
        return str(error)
    return None


def missing_weights(recipe: Recipe) -> str | None:
    """Which part of a recipe has a network and no trained weights: it would draft at random."""
    for part in recipe.draft.parts if recipe.draft is not None else ():
        info = part.info
        untrained = info.trainable is None or (part.method in info.untrained)
        if untrained or getattr(part, "adapter_rank", 0) is None:
            continue
        if getattr(part, info.checkpoint, None) is None:
            named = part.method or part.source
            return f"{named} has no trained weights (draft.{info.checkpoint}): it would draft at random"
    return None


def memory_need(recipe: Recipe, info: TargetInfo, conditions: Conditions) -> MemoryNeed:
    """What a recipe needs beyond plain decoding: its weights, its own cache, and the rows it verifies."""
    if recipe.draft is None:
        return MemoryNeed()
    weights = cache = 0
    for part in recipe.draft.parts:
        folder = _folder(part)
        if folder is None:
            continue
        weights += sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        cache += conditions.batch * conditions.context * _cache_bytes_a_token(_config(folder), info)
    rows = 1 + max(recipe.draft.k, *(_nodes(part) for part in recipe.draft.parts))
    activations = conditions.batch * rows * info.vocab_size * FLOAT * COPIES
    return MemoryNeed(weights, cache, activations)


def _nodes(part: SourceSection) -> int:
    """Most nodes of a block that branches."""
    branches = getattr(part, "shape", "chain") != "chain"
    return getattr(part, "nodes", None) or 0 if branches else 0


def _folder(part: SourceSection) -> Path | None:
    """Where a part's weights lie, as far as that can be told without fetching anything."""
    named = getattr(part, part.info.checkpoint, None)
    if not isinstance(named, str):
        return None
    path = drafter_path(named)
    return path if path.is_dir() else None


def _config(folder: Path) -> Mapping[str, Any]:
    from specflow.target.load import read_json

    file = folder / "config.json"
    if not file.is_file():
        return {}
    try:
        found: Mapping[str, Any] = read_json(file)
    except SpecFlowError:
        return {}  # whoever builds the drafter says what is wrong with it
    return found


def _cache_bytes_a_token(config: Mapping[str, Any], info: TargetInfo) -> int:
    """Keys and values of all layers, of the target's shape where the config does not say otherwise."""
    layers = _number(config, ("num_hidden_layers", "num_layers", "num_modules"), 1)
    heads = _number(config, ("num_key_value_heads", "num_kv_heads"), info.shape.num_kv_heads)
    width = _number(config, ("head_dim", "head_width"), info.shape.head_width)
    return 2 * layers * heads * width * info.dtype.itemsize


def _number(config: Mapping[str, Any], keys: Iterable[str], otherwise: int) -> int:
    found = next((config[key] for key in keys if isinstance(config.get(key), int)), otherwise)
    return int(found)


def free_memory(device: str) -> int | None:
    """Bytes that a new allocation could take; None where nobody says."""
    if device.startswith("cuda"):
        import torch

        free, _ = torch.cuda.mem_get_info(torch.device(device))
        return int(free)
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    found = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return int(found) * 1024 if found is not None else None


def placed(recipe: Recipe, info: TargetInfo) -> str:
    """Where a recipe's drafters compute, and in what: what no part says is the target's."""
    return "; ".join(_placed(part, info) for part in recipe.draft.parts) if recipe.draft is not None else ""


def _placed(part: SourceSection, info: TargetInfo) -> str:
    name = part.method or part.source
    if "match_lengths" in part.info.offers:
        return f"{name} on the host, no network"
    device, dtype = getattr(part, "device", None) or info.device, getattr(part, "dtype", "auto")
    runtime = getattr(part, "runtime", "auto")
    said = f"{name} on {device} in {info.weights if dtype == 'auto' else dtype}"
    return f"{said}, {info.runtime if runtime == 'auto' else runtime} runtime"


def recorded_agreement(recipe: Recipe) -> float | None:
    """How often the first draft token was the target's own when the drafter was made, as the file beside it says.

    None where nobody kept it, or where several drafters take turns.

    Raises:
        CheckpointError: The file is damaged.
    """
    from specflow.train.reference import Reference

    parts = recipe.draft.parts if recipe.draft is not None else ()
    folder = _folder(parts[0]) if len(parts) == 1 else None
    found = Reference.read(folder) if folder is not None else None
    return None if found is None else found.agreement


def expected_experts(total: int, active: int, tokens: int) -> float:
    """Distinct experts of a layer that so many tokens touch, if each token's choice is independent.

    total * (1 - (1 - active / total) ^ tokens): a pass over more rows reads more weights.
    """
    return total * (1.0 - (1.0 - active / total) ** tokens)


def warnings_of(recipes: Mapping[str, Recipe], target: Mapping[str, Any], device: str) -> list[str]:
    """What a user should know although nothing is refused.

    Args:
        recipes: That apply.
        target: The target's config.
        device: Where the target runs.
    """
    found = []
    total, active = _number(target, EXPERTS, 0), _number(target, ACTIVE, 0)
    if total > active > 0:
        one, many = (expected_experts(total, active, rows) for rows in (1, 5))
        found.append(
            f"the target is a mixture of experts ({active} of {total} a token): a pass over 5 rows touches about "
            f"{many:.0f} experts where one row touches {one:.0f}, so verification is dear; the measured prices say how"
        )
    for name, recipe in recipes.items():
        for part in recipe.draft.parts if recipe.draft is not None else ():
            place = getattr(part, "device", None)
            if place == "cpu" and not device.startswith("cpu"):
                found.append(f"{name}: the draft model runs on {place} and the target on {device}; drafts will be slow")
            found += _width_warning(name, part)
    return found


def _width_warning(name: str, part: SourceSection) -> list[str]:
    """Blocks of another width than was trained: harmless for some drafters, ruinous for others (vLLM 50012)."""
    folder = _folder(part)
    trained = _config(folder).get("block_size") if folder is not None else None
    if not isinstance(trained, int) or part.k in (trained, trained - 1):
        return []
    return [f"{name}: trained for blocks of {trained} slots, and k is {part.k}; compare K = {trained - 1}"]


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"

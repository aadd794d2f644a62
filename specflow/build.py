"""The one place where names become objects: recipe or graph in, engine out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from specflow.allocator import keep_freed_memory, return_freed_memory
from specflow.cost import find_profile
from specflow.cost_table import carried_costs
from specflow.device import find_device
from specflow.draft.base import SourceContext
from specflow.draft.combine import FirstOf, Merge, Part
from specflow.engine import Engine, EngineParts, EngineSettings
from specflow.errors import RecipeError
from specflow.graph import DecodeGraph, TargetFacts
from specflow.length import POLICIES, Fixed, Until
from specflow.onnx.store import GraphStore
from specflow.recipe_draft import CombinedSection, MergeSection
from specflow.recipe_sections import TargetSection
from specflow.target.base import TargetOptions
from specflow.target.load import load_tokenizer, read_config, resolve_model
from specflow.target.opening import Opening, open_target
from specflow.target.store import model_identity
from specflow.verify import RULES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PretrainedConfig

    from specflow.draft.base import Drafter, Draw
    from specflow.length import Costs, LengthPolicy
    from specflow.recipe import Recipe
    from specflow.recipe_draft import DraftSection, SourceSection
    from specflow.recipe_sections import VerifySection
    from specflow.target.base import Target, TargetInfo
    from specflow.target.store import ModelFiles
    from specflow.text import TextCodec
    from specflow.verify import Rule

__all__ = ["LoadedTarget", "build_drafter", "build_engine", "build_rule", "combine", "load_target", "threads_beside"]

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


@dataclass(frozen=True, slots=True)
class LoadedTarget:
    """A target with its text side, to be shared between engines."""

    target: Target
    codec: TextCodec
    files: ModelFiles | None = None  # what it was loaded from; None: made in this process

    def identity(self) -> str:
        """Tells one model from another by the content of its weights."""
        return _digest(self.target) if self.files is None else model_identity(self.files)

    @property
    def facts(self) -> TargetFacts:
        info = self.target.info
        return TargetFacts(num_layers=info.num_layers, vocab_size=info.vocab_size, hidden_size=info.hidden_size)


def _digest(target: Target) -> str:
    """Of some rows of embedding and head, which are all that drafters take over."""
    device = target.info.device
    rows = target.embed(torch.arange(min(target.info.vocab_size, 4096), device=device).unsqueeze(0))
    digest = blake2b(digest_size=16)
    for part in (rows, target.score(rows[:, :1])):
        digest.update(part.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def build_engine(recipe: Recipe | DecodeGraph, target: LoadedTarget | None = None) -> Engine:
    """Turn a recipe, or a graph made in Python, into an engine.

    Args:
        recipe: What to build; it is checked as a graph first, with the facts of the loaded target.
        target: A target that is already loaded; None loads the recipe's.

    Raises:
        GraphError: The parts do not fit together.
        ModelError: The target cannot be loaded.
        RecipeError: The length policy weighs costs, and none were measured for this recipe on this machine.
    """
    graph = recipe if isinstance(recipe, DecodeGraph) else DecodeGraph.from_recipe(recipe)
    graph.check()
    recipe = graph.to_recipe()
    rule, length = build_rule(recipe), _length(recipe)
    loaded = target or load_target(recipe.target)
    graph.check(loaded.facts)
    _price(length, recipe, loaded)
    until = recipe.length.until
    parts = EngineParts(
        target=loaded.target,
        codec=loaded.codec,
        rule=rule,
        length=length if until is None else Until(length, until),
        drafter=build_drafter(recipe, loaded),
        torch_threads=threads_beside(recipe, loaded),
    )
    runtime = recipe.runtime
    return Engine(parts, EngineSettings(runtime.batch, runtime.context, runtime.prefill_chunk))


def threads_beside(recipe: Recipe, loaded: LoadedTarget) -> int | None:
    """Threads of torch while decoding: one, where all networks are ONNX graphs; None leaves them alone."""
    parts = recipe.draft.parts if recipe.draft is not None else ()
    in_torch = any(getattr(part, "runtime", "auto") == "torch" for part in parts)
    return None if loaded.target.info.in_torch or in_torch else 1


def load_target(section: TargetSection) -> LoadedTarget:
    """Fetch, convert and load the model a recipe names.

    Raises:
        ModelError: It cannot be found, fetched or run here; the reason is named.
    """
    if section.threads is not None:
        torch.set_num_threads(section.threads)
    files = resolve_model(section.model, section.revision, section.trust_remote_code)
    config = read_config(files, section.trust_remote_code)
    codec = load_tokenizer(files, section.trust_remote_code)
    device = find_device(section.device, "target.device")
    dtype = _dtype(section.dtype, device, config)
    invariant = None if section.row_invariant == "auto" else section.row_invariant
    options = TargetOptions(files.name, dtype, device, codec.stop_ids, invariant, section.quantization)
    if device.type == "cpu":
        return_freed_memory()
    runtime, implementation = section.runtime, section.implementation
    target = open_target(Opening(files, config, options, runtime, implementation, section.trust_remote_code))
    if device.type == "cpu":
        keep_freed_memory()
    return LoadedTarget(target, codec, files)


def _dtype(name: str, device: torch.device, config: PretrainedConfig) -> torch.dtype:
    """`auto` is float32 on CPUs and the checkpoint's own type elsewhere; what is quantised computes in float32."""
    if name != "auto":
        return _DTYPES.get(name, torch.float32)
    own = getattr(config, "dtype", None)
    return own if device.type != "cpu" and isinstance(own, torch.dtype) else torch.float32


def build_rule(recipe: Recipe) -> Rule:
    """The recipe's verification rule."""
    return RULES[recipe.verify.rule](**recipe.verify.options)


def _length(recipe: Recipe) -> LengthPolicy:
    if recipe.draft is None or recipe.draft.k == 0:
        return Fixed(0)
    return POLICIES[recipe.length.policy].policy(k=recipe.draft.k, **recipe.length.options)


@runtime_checkable
class _Priced(Protocol):
    """A length policy that weighs costs."""

    def use(self, costs: Costs) -> None: ...


def _price(length: LengthPolicy, recipe: Recipe, loaded: LoadedTarget) -> None:
    """Give a policy that weighs costs what was measured on this machine: the recipe's own table, else a profile.

    Raises:
        RecipeError: There is neither, and the policy has no prices of its own to go by.
    """
    if not isinstance(length, _Priced):
        return
    costs = carried_costs(recipe, loaded) or find_profile(recipe, loaded)
    if costs is not None:
        length.use(costs)
    elif POLICIES[recipe.length.policy].needs_costs:
        raise RecipeError(
            f"{recipe.name or 'recipe'}: length.policy",
            f"{recipe.length.policy}, and no cost profile of this target and draft section on this machine",
            "measured costs, which it weighs against what is accepted",
            "`specflow profile RECIPE` measures them, with the same --set; `specflow tune` puts them into tuned.yaml; "
            "--set length.policy=fixed does without",
        )


def build_drafter(recipe: Recipe, loaded: LoadedTarget) -> Drafter | None:
    """The recipe's drafter; None where it decodes plainly."""
    draft = recipe.draft
    if draft is None or draft.k == 0:
        return None
    policy = POLICIES[recipe.length.policy]
    context = SourceContext(
        target=loaded.target,
        k=draft.k,
        draw=_draw(recipe.verify),
        confidence="confidence" in policy.needs | policy.uses,
        codec=loaded.codec,
        load_model=_load_model,
        graphs=GraphStore().find,
        identify=loaded.identity,
        threads=torch.get_num_threads(),
    )
    if isinstance(draft, MergeSection):
        context = replace(context, draw="greedy" if context.draw == "sampled" else context.draw, confidence=False)
    return combine(draft, [_part(section, context) for section in draft.parts], loaded.target.info)


def combine(draft: DraftSection, parts: Sequence[Part], info: TargetInfo) -> Drafter:
    """One drafter of a section's parts: the only one, the first of them that drafts, or one tree of all."""
    if not isinstance(draft, CombinedSection):
        return parts[0].drafter
    if isinstance(draft, MergeSection):
        return Merge(parts, draft.nodes, info.vocab_size, info.device)
    return FirstOf(parts, info.vocab_size, info.device)


def _part(section: SourceSection, context: SourceContext) -> Part:
    """One source's drafter."""
    own = replace(context, k=section.k, dependency=section.dependency)
    return Part(section.info.build(section.options, own), section.k)


def _draw(verify: VerifySection) -> Draw:
    """What the rule makes most of: laws to weigh, the target's own numbers, or the likeliest token."""
    if verify.info.needs_law:
        return "sampled"
    return "coupled" if verify.info.same_text else "greedy"


def _load_model(model: str, dtype: str, device: str, runtime: str) -> tuple[Target, TextCodec]:
    asked = {"model": model, "dtype": dtype, "device": device, "runtime": runtime}
    loaded = load_target(TargetSection.model_validate(asked))
    return loaded.target, loaded.codec

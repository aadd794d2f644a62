"""The models of an export: loaded in torch as the reference, and run as graphs that lie in its folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from specflow.build import combine, load_target
from specflow.device import find_device
from specflow.draft.base import SourceContext
from specflow.draft.combine import Part as DraftPart
from specflow.draft.onnx_lm import DRAFT_MODEL, LanguageModelGraphs, ModelWeights, graph_target, read_weights
from specflow.errors import ModelError
from specflow.export.genai import MOST_DRAFT_TOKENS, GenaiDraft, GenaiModel, GenaiText, write_genai
from specflow.export.rounds import Decoder
from specflow.onnx.decoder import DecoderPart, head_weight, write_decoder, write_head
from specflow.onnx.graphs import GraphSet
from specflow.onnx.session import Place, choose_providers
from specflow.recipe_sections import TargetSection
from specflow.target.base import TargetOptions
from specflow.target.load import resolve_model
from specflow.target.store import ModelFiles

if TYPE_CHECKING:
    from specflow.build import LoadedTarget
    from specflow.draft.base import Drafter, ModelLoader
    from specflow.onnx.graphs import GraphFinder, NetworkGraphs, Precision
    from specflow.recipe import Recipe
    from specflow.recipe_draft import SourceSection
    from specflow.target.base import Target
    from specflow.target.onnx import GraphPart, OnnxTarget
    from specflow.text import TextCodec

__all__ = [
    "TARGET",
    "Models",
    "Network",
    "decides_text",
    "first_decoder",
    "graph_decoder",
    "open_models",
    "open_networks",
    "run_target",
    "torch_decoder",
    "write_genai_folder",
]

TARGET = "target"
"""Name of the target's folder and of its graph."""


@runtime_checkable
class _OfTheTarget(Protocol):
    """Graphs that compute parts of the target."""

    @property
    def target_parts(self) -> Mapping[DecoderPart, str]: ...


@dataclass(frozen=True, slots=True)
class Network:
    """A source of the recipe that has a network."""

    section: SourceSection
    folder: Path
    graphs: NetworkGraphs


@dataclass(frozen=True, slots=True)
class Models:
    """What the export is made of.

    Args:
        recipe: What is exported.
        loaded: The target in torch, in float32: the reference.
        files: Of the target.
        weights: The target's; None where graphs do not compute it.
        refusal: Why they do not.
        precision: Of the graphs.
        place: Where they run.
        folder: Of the export while it is made.
        scratch: For graphs that are needed to prove it and are no part of it.
    """

    recipe: Recipe
    loaded: LoadedTarget
    files: ModelFiles
    weights: ModelWeights | None
    refusal: str
    precision: Precision
    place: Place
    folder: Path
    scratch: Path
    written: dict[str, Path] = field(default_factory=dict)  # label of a part of the target -> its graph

    @property
    def whole(self) -> DecoderPart:
        """The target's graph computes all of it."""
        return DecoderPart(0, self.loaded.target.info.num_layers)

    @property
    def target_weights(self) -> ModelWeights:
        """Of the target.

        Raises:
            ModelError: Graphs do not compute it.
        """
        if self.weights is None:
            expected = "a target that ONNX graphs compute, or --what drafter with a network of its own"
            raise ModelError(self.files.name, self.refusal, expected)
        return self.weights


def open_models(recipe: Recipe, precision: Precision, folder: Path, scratch: Path) -> Models:
    """Load the target in torch.

    Raises:
        ModelError: It cannot be found or run here, or graphs in this precision cannot.
        CheckpointError: Its files are damaged.
    """
    section, device = recipe.target, find_device(recipe.target.device, "target.device")
    if device.type == "cuda" and "CUDAExecutionProvider" not in choose_providers(device):
        device = torch.device("cpu")
    if precision.floats == "bfloat16" and device.type == "cpu":
        found = "ONNX Runtime has no bfloat16 on CPUs, so nothing could be proven"
        raise ModelError("dtype", found, "float32, float16, int8 or int4", "bfloat16 is for CUDA devices")
    asked = {"dtype": "float32", "device": str(device), "runtime": "torch", "row_invariant": False}
    loaded = load_target(section.model_copy(update=asked))
    files = loaded.files
    assert files is not None
    weights, refusal = None, "implementation: transformers"
    if section.implementation != "transformers":
        try:
            weights = read_weights(files, section.trust_remote_code)
        except ModelError as error:
            refusal = error.found
    place = Place(device, torch.get_num_threads())
    return Models(recipe, loaded, files, weights, refusal, precision, place, folder, scratch)


def open_networks(models: Models) -> list[Network]:
    """The sources of the recipe that have a network, unpacked for writing."""
    draft = models.recipe.draft
    sections = [] if draft is None else [section for section in draft.parts if section.info.graphs is not None]
    found = []
    for number, section in enumerate(sections, start=1):
        name = "drafter" if len(sections) == 1 else f"drafter-{number}"
        context = _context(models, section, models.loaded.target)
        assert section.info.graphs is not None
        found.append(Network(section, models.folder / name, section.info.graphs(section.options, context)))
    return found


def torch_decoder(models: Models, networks: Sequence[Network]) -> Decoder:
    """The recipe in torch, in float32; like `graph_decoder` without drafts where no network is exported."""
    target = models.loaded.target
    return Decoder(target, _sources(models, target, "torch", networks), _combined(models))


def graph_decoder(models: Models, networks: Sequence[Network], target: Target) -> Decoder:
    """The recipe over the graphs of the export."""
    return Decoder(target, _sources(models, target, "onnx", networks), _combined(models))


def first_decoder(models: Models, network: Network) -> Decoder:
    """One source of the recipe in torch, drafting chains."""
    target, section = models.loaded.target, network.section
    update = {"runtime": "torch", "shape": "chain"}
    options = section.options.model_copy(
        update={name: value for name, value in update.items() if name in type(section.options).model_fields}
    )
    drafter = section.info.build(options, _context(models, section, target))
    return Decoder(target, [drafter], lambda sources: sources[0])


def run_target(models: Models, networks: Sequence[Network]) -> OnnxTarget:
    """The target over graphs: those of the export where it has them, others in the scratch folder."""
    weights, info = models.target_weights, models.loaded.target.info
    ready = {network.folder / f"{name}.onnx": part for network in networks for part, name in _parts_of(network).items()}

    def find(part: GraphPart) -> Path:
        for path, covered in ready.items():
            if part == covered:
                return path
        label = part if isinstance(part, str) else part.label
        if label not in models.written:
            models.written[label] = _write_part(models, weights, part)
        return models.written[label]

    precision, device = models.precision, models.place.device
    options = TargetOptions(info.name, precision.dtype, device, info.stop_ids, False, precision.quantization)
    return graph_target(weights, options, find)


def write_genai_folder(models: Models, network: Network, folder: Path) -> None:
    """Target and draft model as onnxruntime-genai loads them.

    Raises:
        ModelError: It would not run them.
    """
    weights, info = models.target_weights, models.loaded.target.info
    assert isinstance(network.graphs, LanguageModelGraphs)
    draft = network.graphs.weights
    write_genai(
        folder,
        GenaiModel(info.name, weights.config, weights.tensors),
        GenaiText(models.files.directory, info.stop_ids),
        models.precision,
        GenaiDraft(GenaiModel("draft model", draft.config, draft.tensors), min(network.section.k, MOST_DRAFT_TOKENS)),
    )


def decides_text(network: Network) -> bool:
    """Whether its graphs also verify: then they decide about the text."""
    return any(part.enters for part in _parts_of(network))


def _parts_of(network: Network) -> Mapping[DecoderPart, str]:
    return network.graphs.target_parts if isinstance(network.graphs, _OfTheTarget) else {}


def _write_part(models: Models, weights: ModelWeights, part: GraphPart) -> Path:
    folder = models.scratch / str(len(models.written))
    folder.mkdir(parents=True)
    with GraphSet(folder, models.precision) as graphs, graphs.graph(TARGET) as writer:
        if isinstance(part, str):
            assert isinstance(weights.tensors, Mapping)
            write_head(writer, head_weight(weights.config, weights.tensors))
        else:
            write_decoder(writer, weights.config, weights.tensors, part)
    return folder / f"{TARGET}.onnx"


def _sources(models: Models, target: Target, runtime: str, networks: Sequence[Network]) -> list[Drafter]:
    """All sources of the recipe; none where none of their networks is exported."""
    draft = models.recipe.draft
    if draft is None or draft.k == 0 or not networks:
        return []
    made = {id(network.section): network for network in networks} if runtime == "onnx" else {}
    found = []
    for section in draft.parts:
        options = section.options
        if "runtime" in type(options).model_fields:
            options = options.model_copy(update={"runtime": runtime})
        context = _context(models, section, target, made.get(id(section)))
        found.append(section.info.build(options, context))
    return found


def _combined(models: Models) -> Callable[[Sequence[Drafter]], Drafter | None]:
    draft, info = models.recipe.draft, models.loaded.target.info

    def combined(sources: Sequence[Drafter]) -> Drafter | None:
        if draft is None or not sources:
            return None
        parts = [DraftPart(source, part.k) for source, part in zip(sources, draft.parts, strict=True)]
        return combine(draft, parts, info)

    return combined


def _context(models: Models, section: SourceSection, target: Target, network: Network | None = None) -> SourceContext:
    """What a source builds from; over its graphs where a network is given, in torch without."""
    return SourceContext(
        target=target,
        k=section.k,
        dependency=section.dependency,
        codec=models.loaded.codec,
        load_model=_torch_loader(models) if network is None else _graph_loader(models, network),
        graphs=None if network is None else _finder(network.folder),
        threads=models.place.threads,
        weights=models.weights,
    )


def _finder(folder: Path) -> GraphFinder:
    return lambda identity, precision, write: folder


def _torch_loader(models: Models) -> ModelLoader:
    def load(model: str, *_: str) -> tuple[Target, TextCodec]:
        asked = {"model": model, "dtype": "float32", "device": str(models.place.device), "runtime": "torch"}
        loaded = load_target(TargetSection.model_validate(asked))
        return loaded.target, loaded.codec

    return load


def _graph_loader(models: Models, network: Network) -> ModelLoader:
    def load(model: str, *_: str) -> tuple[Target, TextCodec]:
        precision = models.precision
        options = TargetOptions(model, precision.dtype, models.place.device, (), False, precision.quantization)
        path = network.folder / f"{DRAFT_MODEL}.onnx"
        return graph_target(read_weights(resolve_model(model)), options, lambda _: path), models.loaded.codec

    return load

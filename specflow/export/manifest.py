"""What lies in an export, for whoever reads it: graphs with their inputs and outputs, hashes, rounds, proof."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from specflow.errors import DataError
from specflow.files import file_sha256, write_json_atomic

if TYPE_CHECKING:
    from onnx import ModelProto, ValueInfoProto

__all__ = [
    "MANIFEST",
    "ErrorRow",
    "FileEntry",
    "GraphEntry",
    "Manifest",
    "Part",
    "PrecisionEntry",
    "Proof",
    "QualityEntry",
    "RoundsEntry",
    "TargetEntry",
    "ValueEntry",
    "graph_entry",
    "read_manifest",
    "write_manifest",
]

MANIFEST = "manifest.json"


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ValueEntry(_Entry):
    """An input or output of a graph."""

    name: str
    dtype: str = Field(description="as numpy spells it")
    shape: tuple[int | str, ...] = Field(description="a word is a dimension that the caller chooses")


class FileEntry(_Entry):
    """A file of the export."""

    sha256: str
    size: int = Field(description="bytes")


class GraphEntry(_Entry):
    """One `.onnx` file."""

    file: str = Field(description="beside this manifest")
    sha256: str
    opset: int = Field(description="of ai.onnx")
    weight_bytes: int = Field(description="of the weights that it reads; graphs of a folder share them")
    domains: dict[str, int] = Field(description="versions of all operator domains, by name")
    inputs: tuple[ValueEntry, ...]
    outputs: tuple[ValueEntry, ...]


class Part(_Entry):
    """A folder of graphs over one file of weights: the target, or a drafter."""

    folder: str
    kind: Literal["target", "drafter"]
    source: str | None = Field(None, description="of a drafter: where the draft gets its information")
    options: dict[str, Any] = Field(default_factory=dict, description="of the source")
    k: int | None = Field(None, description="most draft tokens of a round, the bonus token excluded")
    graphs: dict[str, GraphEntry]
    files: dict[str, FileEntry] = Field(description="all files of the folder, by name")
    round: tuple[str, ...] = Field(description="how a round feeds the graphs, step by step")
    taps: tuple[int, ...] = Field((), description="target layers whose output is read; -1 is the embedding")
    hidden: str | None = Field(None, description="last state of the target that is read: hidden_pre or hidden_post")
    num_layers: int = Field(0, description="layers with a cache")
    target_cache: bool = Field(False, description="past rows are the target's own")
    block_size: int | None = Field(None, description="slots of a block that is filled at once")
    mask_token: int | None = Field(None, description="id in the unknown slots of a block")
    window: int | None = Field(None, description="positions that layers with a sliding window see")
    window_from_anchor: bool = Field(False, description="of a block: the window ends before the anchor for all slots")
    causal: bool | None = Field(None, description="a slot of a block sees none that follow; null: where windowed")
    first_slot: int = Field(0, description="slot whose logits belong to draft position 1")
    vocab_size: int = Field(description="ids that the logits score")
    to_target: str | None = Field(None, description="npy file: target id of every draft id; null: they are the same")
    example: str | None = Field(None, description="npz file: features of a short text, for run_drafter.py")
    drafted: tuple[int, ...] = Field((), description="what the torch engine drafts from the example")


class TargetEntry(_Entry):
    """The model that drafts are made for."""

    name: str
    identity: str = Field(description="changes with the weights")
    revision: str | None
    vocab_size: int
    hidden_size: int
    num_layers: int
    context_length: int
    stop_ids: tuple[int, ...]


class PrecisionEntry(_Entry):
    """Types of the numbers."""

    name: str
    floats: str = Field(description="of activations, caches and all weights that are not quantised")
    forms: dict[str, dict[str, Any]] = Field(description="how linear layers are quantised, by kind: body or head")


class ErrorRow(_Entry):
    """How far an output is from torch's in float32."""

    folder: str = Field(description="of the graph; rounds: all of them together, decoding")
    graph: str
    output: str
    inputs: str = Field(description="random or real")
    largest: float = Field(description="largest absolute difference")
    relative: float = Field(description="that, over the largest absolute value of the output")


class RoundsEntry(_Entry):
    """Real rounds, decoded with torch and with the graphs in step."""

    rounds: int
    blocks: int = Field(description="of them, rounds that drafted")
    same_blocks: int = Field(description="drafted blocks that are the same")
    choices: int = Field(description="tokens that the target chose")
    same_choices: int = Field(description="of them, those that are the same")
    near_ties: tuple[str, ...] = Field(description="differences that the tolerance explains")


class Proof(_Entry):
    """What was compared before the export was let out."""

    tolerance: float = Field(description="most relative error of an output")
    errors: tuple[ErrorRow, ...]
    rounds: RoundsEntry | None


class QualityEntry(_Entry):
    """What the precision costs, on real text against torch in float32."""

    positions: int = Field(description="next-token predictions compared")
    agreement: float = Field(description="share of them with the same most likely token")
    reference_perplexity: float
    perplexity: float
    perplexity_change: float = Field(description="relative")
    largest_difference: float = Field(description="of the log-probability of any token")
    mean_difference: float
    least_agreement: float = Field(description="the export is refused below it, unless forced")
    most_perplexity_change: float = Field(description="the export is refused above it, unless forced")
    refusal: str = Field(description="why the quality does not pass; empty where it does")


class Manifest(_Entry):
    """`manifest.json` of an export. It holds no time: the same weights and versions give the same bytes."""

    version: Literal[1] = 1
    recipe: dict[str, Any]
    target: TargetEntry
    precision: PrecisionEntry
    parts: tuple[Part, ...]
    proof: Proof
    genai: str | None = Field(None, description="folder that onnxruntime-genai loads, where a model drafts")
    quality: QualityEntry | None = Field(None, description="of precisions other than float32")
    forced: bool = Field(False, description="let out although the quality was below its threshold")
    versions: dict[str, str]
    git_sha: str | None

    def part(self, folder: str) -> Part:
        """The part in a folder."""
        return next(part for part in self.parts if part.folder == folder)


def write_manifest(manifest: Manifest, folder: Path) -> None:
    write_json_atomic(folder / MANIFEST, manifest.model_dump(mode="json"))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of an export.

    Raises:
        DataError: It is missing or not what this version writes.
    """
    path = folder / MANIFEST
    try:
        return Manifest.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise DataError(str(path), f"cannot be read: {error}", "the manifest of `specflow export onnx`") from error


def graph_entry(path: Path, folder: Path) -> GraphEntry:
    """What an `.onnx` file says of itself.

    Args:
        path: The file.
        folder: Of the manifest.
    """
    import onnx

    model: ModelProto = onnx.load(path, load_external_data=False)
    domains = {each.domain or "ai.onnx": each.version for each in model.opset_import}
    outside = [{entry.key: entry.value for entry in each.external_data} for each in model.graph.initializer]
    places = {place["offset"]: int(place["length"]) for place in outside if place}
    return GraphEntry(
        file=path.relative_to(folder).as_posix(),
        sha256=file_sha256(path),
        opset=domains["ai.onnx"],
        weight_bytes=sum(places.values()),
        domains=domains,
        inputs=_values(model.graph.input),
        outputs=_values(model.graph.output),
    )


def _values(values: Iterable[ValueInfoProto]) -> tuple[ValueEntry, ...]:
    return tuple(
        ValueEntry(
            name=value.name,
            dtype=_dtype(value.type.tensor_type.elem_type),
            shape=tuple(each.dim_param or each.dim_value for each in value.type.tensor_type.shape.dim),
        )
        for value in values
    )


def _dtype(number: int) -> str:
    from onnx import TensorProto

    names: dict[int, str] = {TensorProto.FLOAT: "float32", TensorProto.DOUBLE: "float64"}
    return names.get(number) or TensorProto.DataType.Name(number).lower()

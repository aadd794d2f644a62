"""From a recipe to a folder of ONNX graphs that compute the same, with the proof that they do.

Everything is built in a folder of its own and let out at the end; see `folder`.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from specflow.bench.data import PromptRow, read_prompts
from specflow.draft.onnx_lm import LanguageModelGraphs, Way
from specflow.errors import ModelError
from specflow.export.folder import building, release
from specflow.export.manifest import (
    ErrorRow,
    FileEntry,
    Manifest,
    Part,
    PrecisionEntry,
    Proof,
    RoundsEntry,
    TargetEntry,
    graph_entry,
    write_manifest,
)
from specflow.export.parts import (
    TARGET,
    decides_text,
    first_decoder,
    graph_decoder,
    open_models,
    open_networks,
    run_target,
    torch_decoder,
    write_genai_folder,
)
from specflow.export.proof import (
    TOLERANCES,
    check_errors,
    check_graphs,
    check_rounds,
    compare_target,
    real_prompts,
    text_quality,
)
from specflow.export.rounds import Rounds, compare_rounds, first_block
from specflow.export.standalone import EXAMPLE, SCRIPT, script_for, write_example
from specflow.files import file_sha256
from specflow.onnx.decoder import write_decoder
from specflow.onnx.graphs import DraftFacts, GraphSet, Precision
from specflow.provenance import Provenance, package_version
from specflow.recipe import recipe_data
from specflow.recipe_draft import draft_data
from specflow.target.store import model_identity

if TYPE_CHECKING:
    from specflow.export.manifest import QualityEntry
    from specflow.export.parts import Models, Network
    from specflow.export.rounds import Comparison
    from specflow.onnx.graphs import OutputError
    from specflow.recipe import Recipe
    from specflow.recipe_draft import SourceSection
    from specflow.target.base import Target

__all__ = ["ExportPlan", "Exported", "export_onnx", "without_network"]

log = logging.getLogger(__name__)

Step = Callable[[str], AbstractContextManager[None]]
"""Says what is being done, while it is done."""

PROMPTS = Path(__file__).resolve().parents[1] / "data" / "demo.jsonl"
_PACKAGES = ("specflow-toolkit", "torch", "onnx", "onnxruntime", "onnxruntime-gpu")
GENAI = "genai"
_TO_TARGET = "to_target.npy"
_EXAMPLE_TOKENS = 32
_TARGET_ROUND = (
    "tokens are the anchor, the last committed token, and the block behind it; positions are absolute",
    "starts is the number of committed slots of each batch row; past_key and past_value are the slots of each layer, "
    "present_key and present_value the same with the new rows in them, in the same memory where the runtime binds both",
    "bias is added to the score of every slot: 0 for committed slots, for a row itself and for its ancestors in the "
    "block, -inf elsewhere; bias_windowed likewise within the window of layers that have one",
    "logits score the rows that scored lists; tap.l is the output of layer l, -1 the embedding",
    "once it is decided, accepted rows that do not follow each other are moved together, and starts goes behind them; "
    "what stands above starts is overwritten by the next pass",
)


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """What to export, and how hard to look."""

    recipe: Recipe
    what: frozenset[str]  # of "target" and "drafter"
    dtype: str
    rounds: int = 200
    force: bool = False


@dataclass
class Exported:
    """What lies in the folder now, and what it took."""

    manifest: Manifest
    folder: Path
    seconds: dict[str, float] = field(default_factory=dict)  # by step


def without_network(recipe: Recipe) -> list[SourceSection]:
    """Sources of a recipe that have nothing to export."""
    return [] if recipe.draft is None else [section for section in recipe.draft.parts if section.info.graphs is None]


def export_onnx(plan: ExportPlan, output: Path, step: Step) -> Exported:
    """Write graphs, prove them, and let them out.

    Args:
        plan: What to export.
        output: A new or empty folder.
        step: Says what is being done.

    Raises:
        DataError: The folder is taken, or cannot be written.
        ModelError: A graph cannot be made, or a proof fails; nothing is left of the export then.
        CheckpointError: Weights do not fit.
        GraphError: Options do not fit.
    """
    precision = Precision.named(plan.dtype)
    seconds: dict[str, float] = {}

    @contextmanager
    def timed(what: str) -> Iterator[None]:
        began = perf_counter()
        with step(what):
            yield
        seconds[what] = seconds.get(what, 0.0) + perf_counter() - began

    with building(output) as work:
        folder = work / "export"
        folder.mkdir()
        with timed(f"loading {plan.recipe.target.model}"):
            models = open_models(plan.recipe, precision, folder, work / "scratch")
            networks = open_networks(models) if "drafter" in plan.what else []
        manifest = _Job(plan, models, networks, timed).run()
        write_manifest(manifest, folder)
        release(folder, output)
    return Exported(manifest, output, seconds)


class _Job:
    """One export under way."""

    def __init__(self, plan: ExportPlan, models: Models, networks: Sequence[Network], step: Step) -> None:
        self._plan, self._models, self._networks, self._step = plan, models, networks, step
        self._tolerance = TOLERANCES[models.precision.name]
        self._errors: list[ErrorRow] = []
        codec = models.loaded.codec
        rows = [row for row in read_prompts(PROMPTS) if isinstance(row, PromptRow)]
        self._texts = [codec.encode_chat(row.messages(0, ())) for row in rows]

    def run(self) -> Manifest:
        """Write, check, compare.

        Raises:
            ModelError: A proof fails.
        """
        parts = []
        if TARGET in self._plan.what:
            parts.append(self._export_target())
        parts += [self._export_drafter(network) for network in self._networks]
        target = self._decoding_target()
        rounds = None if self._plan.rounds == 0 else self._prove_rounds(target)
        quality = self._judge(target)
        return self._manifest(parts, rounds, quality, self._write_genai())

    def _write_genai(self) -> str | None:
        """A folder for onnxruntime-genai, where a whole model drafts and the target is exported, too."""
        drafts = [each for each in self._networks if isinstance(each.graphs, LanguageModelGraphs)]
        if not drafts or TARGET not in self._plan.what:
            return None
        models, network, folder = self._models, drafts[0], self._models.folder / GENAI
        with self._step("writing the folder for onnxruntime-genai"):
            try:
                write_genai_folder(models, network, folder)
            except ModelError as error:
                log.warning("no folder for onnxruntime-genai: %s", error.found)
                shutil.rmtree(folder, ignore_errors=True)
                return None
            check_graphs(folder)
        return folder.name

    def _export_target(self) -> Part:
        models, weights = self._models, self._models.target_weights
        folder = models.folder / TARGET
        folder.mkdir()
        with self._step("writing the target"), GraphSet(folder, models.precision) as made, made.graph(TARGET) as graph:
            write_decoder(graph, weights.config, weights.tensors)
        models.written[models.whole.label] = folder / f"{TARGET}.onnx"
        with self._step("checking the target"):
            check_graphs(folder)
        with self._step("comparing the target"):
            target = run_target(models, self._networks)
            errors = compare_target(target, models.loaded.target, Way(TARGET), self._texts)
            self._note(TARGET, check_errors(errors, self._tolerance))
        info = models.loaded.target.info
        facts = DraftFacts(round=_TARGET_ROUND, num_layers=info.num_layers)
        return _part(models, folder, facts, None)

    def _export_drafter(self, network: Network) -> Part:
        models, name = self._models, network.folder.name
        network.folder.mkdir()
        with self._step(f"writing the {name}"), GraphSet(network.folder, models.precision) as graphs:
            network.graphs.write(graphs)
        with self._step(f"checking the {name}"):
            check_graphs(network.folder)
        with self._step(f"comparing the {name}"):
            errors = network.graphs.compare(network.folder, models.precision, models.place)
            self._note(name, check_errors(errors, self._tolerance))
        with self._step(f"drafting an example for the {name}"):
            drafted = self._write_script(network)
        return _part(models, network.folder, network.graphs.facts, network.section, drafted)

    def _write_script(self, network: Network) -> tuple[int, ...]:
        """Write the script and its example; what torch drafts from it. None where numpy lacks the type."""
        models, facts, section = self._models, network.graphs.facts, network.section
        if models.precision.floats == "bfloat16":
            return ()
        info = models.loaded.target.info
        text = self._texts[0][: max(1, min(_EXAMPLE_TOKENS, info.context_length // 4))]
        anchor, drafted = first_block(first_decoder(models, network), models.loaded.codec, text, section.k)
        write_example(network.folder, models.loaded.target, facts, [*text, anchor])
        graphs = [path.stem for path in network.folder.glob("*.onnx")]
        script = script_for(graphs, facts, models.precision.floats, section.k, info.vocab_size)
        (network.folder / SCRIPT).write_text(script, encoding="utf-8")
        return tuple(drafted)

    def _note(self, folder: str, errors: Iterable[OutputError]) -> None:
        self._errors += [ErrorRow(folder=folder, **asdict(error)) for error in errors]

    def _decoding_target(self) -> Target:
        """The target that the graphs decode with; torch's, where graphs do not compute it."""
        return self._models.loaded.target if self._models.weights is None else run_target(self._models, self._networks)

    def _prove_rounds(self, target: Target) -> Comparison:
        models = self._models
        with self._step(f"decoding {self._plan.rounds} rounds with both"):
            k = models.recipe.draft.k if models.recipe.draft is not None and self._networks else 0
            prompts = real_prompts(self._texts, max(1, models.loaded.target.info.context_length // 2))
            rounds = Rounds(prompts, self._plan.rounds, k, self._tolerance)
            one, two = torch_decoder(models, self._networks), graph_decoder(models, self._networks, target)
            found = compare_rounds(one, two, models.loaded.codec, rounds)
            check_rounds(found, models.precision.name == "float32")
        self._note("rounds", found.errors())
        return found

    def _judge(self, target: Target) -> QualityEntry | None:
        """What the precision costs; None where nothing that decides about the text is in another than float32.

        Drafts in another precision change the speed, not the text.

        Raises:
            ModelError: The quality is below its threshold, and nobody forces it.
        """
        models, precision = self._models, self._models.precision.name
        decides = TARGET in self._plan.what or any(decides_text(network) for network in self._networks)
        if precision == "float32" or not decides:
            return None
        with self._step("measuring the quality"):
            entry = text_quality(models, target)
        if entry.refusal and not self._plan.force:
            hint = "choose another dtype, or --force lets it out and says so in its manifest"
            raise ModelError(f"quality of {precision}", entry.refusal, "a model that says the same", hint)
        return entry

    def _manifest(
        self, parts: Sequence[Part], rounds: Comparison | None, quality: QualityEntry | None, genai: str | None
    ) -> Manifest:
        models, info = self._models, self._models.loaded.target.info
        return Manifest(
            recipe=json.loads(json.dumps(recipe_data(models.recipe, full=True))),
            target=TargetEntry(
                name=info.name,
                identity=model_identity(models.files),
                revision=models.files.revision,
                vocab_size=info.vocab_size,
                hidden_size=info.hidden_size,
                num_layers=info.num_layers,
                context_length=info.context_length,
                stop_ids=info.stop_ids,
            ),
            precision=_precision(models.precision),
            parts=tuple(parts),
            proof=Proof(
                tolerance=self._tolerance,
                errors=tuple(self._errors),
                rounds=None if rounds is None else _rounds_entry(rounds),
            ),
            genai=genai,
            quality=quality,
            forced=quality is not None and bool(quality.refusal),
            versions={name: version for name in _PACKAGES if (version := package_version(name)) is not None},
            git_sha=Provenance.collect(str(info.device)).git_sha,
        )


def _part(
    models: Models, folder: Path, facts: DraftFacts, section: SourceSection | None, drafted: tuple[int, ...] = ()
) -> Part:
    """What the manifest says of a folder of graphs."""
    import numpy as np

    vocab_size = models.loaded.target.info.vocab_size
    if facts.to_target is not None:
        vocab_size = len(facts.to_target)
        np.save(folder / _TO_TARGET, facts.to_target.cpu().numpy())
    graphs = {path.stem: graph_entry(path, models.folder) for path in sorted(folder.glob("*.onnx"))}
    said = {} if section is None else {"source": section.source, "options": _options(section), "k": section.k}
    return Part(
        folder=folder.name,
        kind="target" if section is None else "drafter",
        graphs=graphs,
        files={path.name: _file_entry(path) for path in sorted(folder.iterdir())},
        vocab_size=vocab_size,
        to_target=None if facts.to_target is None else f"{folder.name}/{_TO_TARGET}",
        example=f"{folder.name}/{EXAMPLE}" if drafted else None,
        drafted=drafted,
        **{name: getattr(facts, name) for name in _FACTS},
        **said,
    )


_FACTS = tuple(name for name in Part.model_fields if name in DraftFacts.__dataclass_fields__ and name != "to_target")


def _options(section: SourceSection) -> dict[str, object]:
    found: dict[str, object] = json.loads(json.dumps(draft_data(section, full=True)))
    return found


def _file_entry(path: Path) -> FileEntry:
    return FileEntry(sha256=file_sha256(path), size=path.stat().st_size)


def _precision(precision: Precision) -> PrecisionEntry:
    forms = {kind: asdict(form) for kind, form in precision.forms.items()}
    return PrecisionEntry(name=precision.name, floats=precision.floats, forms=forms)


def _rounds_entry(found: Comparison) -> RoundsEntry:
    values = {name: getattr(found, name) for name in RoundsEntry.model_fields}
    return RoundsEntry.model_validate(values | {"near_ties": tuple(found.near_ties)})

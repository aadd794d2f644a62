"""A watch on operators with which the host would wait for an accelerator."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class NoQuestions(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails on operators that make the host wait for the device."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique", "equal")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        assert name not in self.WAITING, f"{name} waits for the device"
        if name in ("index", "index_put_"):
            assert all(index is None or index.dtype != torch.bool for index in args[1]), "a mask as an index waits"
        return func(*args, **(kwargs or {}))

"""What glibc does with freed memory: back to the system while a model is loaded, kept while text is decoded.

Other C libraries are left as they are.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from contextlib import suppress

__all__ = ["keep_all_memory", "keep_freed_memory", "return_freed_memory"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # parameters of glibc's mallopt
_KEPT_BYTES = 128 * 2**20
_RETURNED_BYTES = 2**20
_MOST_BYTES = 2**31 - 1


def return_freed_memory() -> None:
    """Give every large array pages of its own, which leave with it.

    Loading makes and drops many arrays between those it keeps: from one heap, the holes they leave cost up to 100 MB.
    """
    _set_thresholds(_RETURNED_BYTES, _RETURNED_BYTES)


def keep_freed_memory() -> None:
    """Raise glibc's thresholds for returning memory.

    A sampled round frees a few arrays of [M, V]. With glibc's defaults their pages go back to the system each time:
    1.8 ms against 0.67 ms for drawing 9 rows of 49,152 tokens on one thread. The price is up
    to 128 MB that stay with the process.
    """
    _set_thresholds(_KEPT_BYTES, 32 * 2**20)  # of mmap: the largest glibc admits


def keep_all_memory() -> None:
    """Put even the largest arrays on the heap, and keep it: for training, which makes the same arrays every step.

    Logits of 2,048 chains over 8,192 tokens are 67 MB, beyond what glibc takes from the heap. With fresh pages each
    time forward and backward of a loss over them take 129 ms, with the same ones 48 (two threads).
    """
    _set({_TRIM_THRESHOLD: _MOST_BYTES, _MMAP_MAX: 0})


def _set_thresholds(trim: int, mmap: int) -> None:
    _set({_TRIM_THRESHOLD: trim, _MMAP_THRESHOLD: mmap})


def _set(parameters: Mapping[int, int]) -> None:
    if sys.platform != "linux":
        return
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        for name, value in parameters.items():
            libc.mallopt(name, value)

"""What the C library and the kernel do with memory: freed memory given back or kept, weights on huge pages."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["huge_pages", "keep_freed_memory", "return_freed_memory"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt
_KEPT_BYTES = 128 * 2**20
_RETURNED_BYTES = 2**20
_HUGE = 2**21
"""Bytes of a huge page."""
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MAPPINGS = Path("/proc/self/maps")


def return_freed_memory() -> None:
    """Give every large array pages of its own, which leave with it; does nothing with another C library.

    Loading makes and drops many arrays between those it keeps: from one heap, the holes they leave cost up to 100 MB.
    """
    _set_thresholds(_RETURNED_BYTES, _RETURNED_BYTES)


def keep_freed_memory() -> None:
    """Raise glibc's thresholds for returning memory; does nothing where the C library is another one.

    A sampled round frees a few arrays of [M, V]. With glibc's defaults their pages go back to the system each time:
    1.8 ms against 0.67 ms for drawing 9 rows of 49,152 tokens on one thread. The price is up
    to 128 MB that stay with the process.
    """
    _set_thresholds(_KEPT_BYTES, 32 * 2**20)  # of mmap: the largest glibc admits


@contextmanager
def huge_pages() -> Iterator[None]:
    """Move what is allocated inside, and is still there at the end, to huge pages, where the kernel leaves it to us.

    A pass on a CPU streams all weights from memory, and part of its time goes into finding pages of 4 KB. Most systems
    give huge pages only to memory that asks for them. Moving costs 2 to 4 ms a megabyte, once.
    """
    before = _whole_blocks()
    yield
    for first, end in _joined(_whole_blocks() - before):
        _advise(first, end, _MADV_HUGEPAGE)
        _advise(first, end, _MADV_COLLAPSE)  # what holds no page yet stays as it is


def _huge_pages_are_asked_for() -> bool:
    """Whether the kernel gives huge pages to those that ask, and to nobody else."""
    try:
        return "[madvise]" in _HUGE_PAGES.read_text(encoding="ascii")
    except OSError:
        return False


def _advise(first: int, end: int, advice: int) -> None:
    ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), advice)


def _whole_blocks() -> set[int]:
    """Addresses of all blocks of a huge page's size in private memory; none where huge pages are not to ask for."""
    blocks: set[int] = set()
    if _huge_pages_are_asked_for():
        for line in _MAPPINGS.read_text(encoding="utf-8").splitlines():
            span, mode, _, _, file, *name = line.split(maxsplit=5)
            if mode == "rw-p" and file == "0" and name in ([], ["[heap]"]):
                first, end = (int(address, 16) for address in span.split("-"))
                blocks.update(range(-(-first // _HUGE) * _HUGE, end - _HUGE + 1, _HUGE))
    return blocks


def _joined(blocks: set[int]) -> Iterator[tuple[int, int]]:
    """Begin and end of every run of blocks."""
    for first in sorted(blocks):
        if first - _HUGE not in blocks:
            end = first + _HUGE
            while end in blocks:
                end += _HUGE
            yield first, end


def _set_thresholds(trim: int, mmap: int) -> None:
    if sys.platform != "linux":
        return
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_TRIM_THRESHOLD, trim)
        libc.mallopt(_MMAP_THRESHOLD, mmap)

"""The memory that this process holds: how much, when it goes back to the system, when the collector searches it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import resource
from collections.abc import Iterator


def resident() -> int:
    """Return the bytes of memory that the process holds now, with freed memory that libraries keep."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


# A function of glibc. Other C libraries have none, and return freed memory by themselves or never.
_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)


def trim() -> None:
    """Return memory that libraries have freed to the system. They have to fault its pages in when they need it again.

    glibc keeps freed memory for each thread: after TensorStore encodes or decodes, as much again as was in use.
    """
    if _TRIM is not None:
        _TRIM(0)


def peak_bytes() -> int:
    """Return the most memory, in bytes, that this program held. `getrusage` would also count its parent's memory."""
    try:
        with open("/proc/self/status", "rb") as status:
            kilobytes = next(int(line.split()[1]) for line in status if line.startswith(b"VmHWM:"))
    except (OSError, StopIteration):
        kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes * 1024


# More objects than Python 3.12 itself has frozen when it starts, which are 375, and fewer than any caller freezes.
_FROZEN_AT_START = 1000


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Pause the cyclic garbage collector, which would search all names and shapes again and again, in vain.

    For work that makes many objects and does not wait: the pause also stops the collection of other threads' garbage.
    The first collection after the pause leaves out what is there by then; it counts as old.
    """
    enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if enabled:
            try:
                _grow_old()
            finally:
                gc.enable()


def _grow_old() -> None:
    """Let all objects that are there count as old, unless a caller has frozen some, which would thaw as well."""
    if gc.get_freeze_count() < _FROZEN_AT_START:
        try:
            gc.freeze()
        finally:
            gc.unfreeze()

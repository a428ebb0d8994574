"""Fresh memory to read into, in few large pieces, freed memory given back, and the garbage collector held."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import resource
from collections.abc import Iterator, Sequence

import numpy as np

from orbax_safetensors.errors import StorageError

# XLA's CPU client takes a NumPy buffer as it is, without a copy, where its address is a multiple of this.
ALIGNMENT = 64
# Small enough that an array that is kept alone does not pin much besides itself, large enough that 45,000 tensors make
# few mappings: Linux allows 65,530 by default.
ARENA_BYTES = 128 * 2**20


def allocate(sizes: Sequence[int]) -> list[np.ndarray]:
    """Zeroed, aligned uint8 buffers of `sizes` bytes, cut in order from few anonymous mappings.

    A mapping is given back when the last buffer cut from it is gone. Pages are huge where the system has them and
    exist only once they are written to.
    """
    out: list[np.ndarray] = []
    offsets: list[int] = []
    end = 0
    for size in (*sizes, None):
        if size is None or (offsets and end + size > ARENA_BYTES):
            arena = _map(end)
            out += [arena[offset : offset + sizes[len(out) + i]] for i, offset in enumerate(offsets)]
            offsets, end = [], 0
        if size is not None:
            offsets.append(end)
            end += -(-size // ALIGNMENT) * ALIGNMENT
    return out


def _map(nbytes: int) -> np.ndarray:
    try:
        # There are no empty mappings. Private, because shared memory, which is Python's default, has no huge pages.
        memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise StorageError(f"{nbytes} bytes of memory cannot be had: {error.strerror}") from error
    with contextlib.suppress(OSError):  # a kernel without huge pages refuses the hint
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def resident() -> int:
    """Bytes of memory that the process has by now, with what libraries keep of what was freed."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


# glibc's; other C libraries have none, and give back by themselves what is freed, or never.
_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)


def trim() -> None:
    """Gives memory that libraries have freed back to the system, which costs them its pages when they need it again.

    glibc keeps it, for each of their threads: where TensorStore encodes and decodes, as much again as was in use.
    """
    if _TRIM is not None:
        _TRIM(0)


def peak_bytes() -> int:
    """The most memory that this program had: what `getrusage` says begins with what the one had that started it."""
    try:
        with open("/proc/self/status", "rb") as status:
            kilobytes = next(int(line.split()[1]) for line in status if line.startswith(b"VmHWM:"))
    except (OSError, StopIteration):
        kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes * 1024


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Holds the cyclic garbage collector, which would look through all names and shapes again and again, in vain.

    For work that makes many objects and waits for nothing: other threads' garbage is not collected either.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

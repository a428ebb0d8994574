"""The memory that bytes are read into: buffers from few large mappings, freed memory back to the system."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import resource
from collections.abc import Iterator, Mapping, Sequence
from math import prod

import numpy as np

from orbax_safetensors.errors import StorageError, TensorMismatchError

# XLA's CPU client takes a NumPy buffer without a copy if its address is a multiple of this.
ALIGNMENT = 64
# Small enough that a single array that is kept does not pin much other memory, large enough that 45,000 tensors make
# few mappings: Linux allows 65,530 by default.
ARENA_BYTES = 128 * 2**20


# The most dimensions of a NumPy array, and its most bytes.
_MAX_RANK = 64
_MAX_BYTES = 2**63 - 1
# What direct reads are aligned to: the blocks of a disk divide it.
PAGE_BYTES = 4096
# Shorter reads are not made directly: reading their first and last pages whole would cost too much.
DIRECT_BYTES = 2**16


def allocate(sizes: Sequence[int], offsets: Mapping[int, int] | None = None) -> list[np.ndarray]:
    """Return zeroed, aligned uint8 buffers of `sizes` bytes, cut in order from few anonymous mappings.

    A mapping goes when the last buffer that was cut from it goes. Pages are huge if the system supports it, and exist
    only once they are written to.

    `offsets` are those in files of the bytes that direct reads will bring, by the buffer's number. If an offset is as
    aligned as a buffer, and the buffer is long, it begins as far from the beginning of a page as these bytes do.
    """
    out: list[np.ndarray] = []
    begins: list[int] = []
    end = 0
    for number, size in enumerate(sizes):
        offset = offsets.get(number) if offsets else None
        begin = begin_after(end, size, offset)
        if begins and begin + size > ARENA_BYTES:
            out += _cut(begins, end, sizes[len(out) :])
            begins, begin = [], begin_after(0, size, offset)
        begins.append(begin)
        end = begin + size
    return out + _cut(begins, end, sizes[len(out) :])


def begin_after(end: int, size: int, offset: int | None) -> int:
    """Return where a buffer begins in an arena whose buffers so far end at `end`; see `allocate` for its `offset`."""
    begin = -(-end // ALIGNMENT) * ALIGNMENT
    if offset is None or size < DIRECT_BYTES or offset % ALIGNMENT:
        return begin
    return begin + (offset - begin) % PAGE_BYTES


def _cut(begins: Sequence[int], end: int, sizes: Sequence[int]) -> list[np.ndarray]:
    if not begins:
        return []
    arena = arena_of(end)
    return [arena[begin : begin + size] for begin, size in zip(begins, sizes, strict=False)]


def arena_of(nbytes: int) -> np.ndarray:
    """Return an anonymous mapping: zeroed memory, whose pages exist only once they are written to."""
    try:
        # A mapping cannot be empty. Private, because shared memory, which is Python's default, has no huge pages.
        memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise StorageError(f"{nbytes} bytes of memory cannot be allocated: {error.strerror}") from error
    with contextlib.suppress(OSError):  # a kernel without huge pages refuses the hint
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def check_holdable(shape: tuple[int, ...], dtype: np.dtype, where: str) -> None:
    """Raise `TensorMismatchError`, which begins with `where`, if NumPy cannot have such an array."""
    # NumPy counts the bytes of an empty array as if its dimensions of size 0 were not there.
    if len(shape) > _MAX_RANK or prod(size for size in shape if size) * dtype.itemsize > _MAX_BYTES:
        raise TensorMismatchError(f"{where}: NumPy cannot have an array of shape {shape}")


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


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Pause the cyclic garbage collector, which would search all names and shapes again and again, in vain.

    For work that makes many objects and does not wait: the pause also stops the collection of other threads' garbage.
    The first collection after the pause leaves out what is there by then; it counts as old.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():  # what a caller has frozen would thaw as well
                gc.freeze()
                gc.unfreeze()
            gc.enable()

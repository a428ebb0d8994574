"""The memory that bytes are read into: buffers from few large mappings."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from orbax_safetensors.errors import StorageError

# XLA's CPU client takes a NumPy buffer without a copy if its address is a multiple of this.
ALIGNMENT = 64
# Small enough that a single array that is kept does not pin much other memory, large enough that 45,000 tensors make
# few mappings: Linux allows 65,530 by default.
ARENA_BYTES = 128 * 2**20
# What direct reads are aligned to: the blocks of a disk divide it.
PAGE_BYTES = 4096
# Shorter reads are not made directly: reading their first and last pages whole would cost too much.
DIRECT_BYTES = 2**16


def allocate(sizes: Sequence[int], offsets: Mapping[int, int] | None = None) -> list[np.ndarray]:
    """Return zeroed, aligned uint8 buffers of `sizes` bytes, cut in order from few anonymous mappings.

    A mapping goes when the last buffer that was cut from it goes. Pages are huge if the system supports it, and exist
    only once they are written to.

    `offsets` has, by the number of a buffer, the offset in a file from which direct reads will fill it. A long buffer
    then begins as many bytes into a page as the offset does, if the offset is a multiple of `ALIGNMENT`.
    """
    out: list[np.ndarray] = []
    begins: list[int] = []
    end = 0
    for number, size in enumerate(sizes):
        offset = offsets.get(number) if offsets else None
        begin = _begin_after(end, size, offset)
        if begins and begin + size > ARENA_BYTES:
            out += _cut(begins, end, sizes[len(out) :])
            begins, begin = [], _begin_after(0, size, offset)
        begins.append(begin)
        end = begin + size
    return out + _cut(begins, end, sizes[len(out) :])


def _begin_after(end: int, size: int, offset: int | None) -> int:
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


def memory_at(address: int, nbytes: int, owner: object = None) -> np.ndarray:
    """Return memory that is there already, as uint8. Keeps its `owner`; without one, it must not outlive its memory."""
    interface = {"version": 3, "data": (address, False), "shape": (nbytes,), "typestr": "|u1"}
    return np.asarray(SimpleNamespace(__array_interface__=interface, owner=owner))


class Taken(NamedTuple):
    """Buffers of a pool until they are given back: they lie in `[begin, end)`, or outside the pool if that is empty."""

    buffers: list[np.ndarray]
    begin: int
    end: int


def laid_out(sizes: Sequence[int], offsets: Mapping[int, int] | None = None) -> tuple[list[int], int]:
    """Return where buffers of `sizes` bytes begin in memory that begins with a page, and how many bytes all pages have.

    `offsets` are as for `allocate`.
    """
    begins, end = [], 0
    for number, size in enumerate(sizes):
        begins.append(_begin_after(end, size, offsets.get(number) if offsets else None))
        end = begins[-1] + size
    return begins, -(-end // PAGE_BYTES) * PAGE_BYTES


class Pool:
    """Buffers cut from one arena, at the lowest place that is free.

    So pages that were written to before are used first, and the system zeroes no page twice. Not safe for several
    threads at once.
    """

    def __init__(self, arena: np.ndarray) -> None:
        """Cut buffers from an arena, uint8, which begins with a page."""
        self._arena = arena
        self._taken: list[Taken] = []  # in their order in the pool

    def take(self, sizes: Sequence[int], offsets: Mapping[int, int] | None = None) -> Taken | None:
        """Return uint8 buffers of `sizes` bytes, which hold anything; None if there is no place for them now.

        `offsets` are as for `allocate`. Buffers that need more than the whole pool are fresh memory, one lot at a time.
        """
        begins, nbytes = laid_out(sizes, offsets)
        if nbytes > self._arena.nbytes:
            if self._taken:
                return None
            return self._add(0, Taken(allocate(sizes, offsets), 0, 0))
        at, number = 0, len(self._taken)
        for position, other in enumerate(self._taken):
            if at + nbytes <= other.begin:
                number = position
                break
            at = other.end
        if at + nbytes > self._arena.nbytes:
            return None
        memory = self._arena[at : at + nbytes]
        cut = [memory[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]
        return self._add(number, Taken(cut, at, at + nbytes))

    def _add(self, number: int, taken: Taken) -> Taken:
        self._taken.insert(number, taken)
        return taken

    def give_back(self, taken: Taken) -> None:
        """Free buffers that nobody uses any more."""
        self._taken = [other for other in self._taken if other is not taken]

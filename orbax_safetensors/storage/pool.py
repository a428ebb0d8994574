"""Memory that is used again: for bytes that stay only until a device has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from orbax_safetensors.storage.memory import PAGE_BYTES, allocate, arena_of, begin_after


class Taken(NamedTuple):
    """Buffers of a pool until they are given back: they lie in `[begin, end)`, or outside the pool if that is empty."""

    buffers: list[np.ndarray]
    begin: int
    end: int


class Pool:
    """Buffers cut from one mapping, at the lowest place that is free.

    So pages that were written to before are used first, and the system zeroes no page twice. Not safe for several
    threads at once.
    """

    def __init__(self, nbytes: int) -> None:
        """Make a pool of at most `nbytes`; it takes no memory before something is written into it."""
        self._arena = arena_of(nbytes)
        self._taken: list[Taken] = []  # in their order in the pool

    def take(self, sizes: Sequence[int], offsets: Mapping[int, int] | None = None) -> Taken | None:
        """Return uint8 buffers of `sizes` bytes, which hold anything; None if there is no place for them now.

        `offsets` are as for `allocate`. Buffers that need more than the whole pool are fresh memory, one lot at a time.
        """
        begins, end = [], 0
        for number, size in enumerate(sizes):
            begins.append(begin_after(end, size, offsets.get(number) if offsets else None))
            end = begins[-1] + size
        nbytes = -(-end // PAGE_BYTES) * PAGE_BYTES  # buffers then lie in pages as laid out
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

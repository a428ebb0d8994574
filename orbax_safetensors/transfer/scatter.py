"""Where the bytes of a window go if they lie in long runs: one read then puts each run into its place.

That copies every byte once; by way of a staging buffer, it would be copied twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from orbax_safetensors.geometry.strided import Copy, CopyMode

# Bytes. The kernel takes as long for each run as for copying a few hundred bytes; shorter runs are faster by way of a
# staging buffer.
_SHORTEST = 1024


def destination_runs(copies: Sequence[tuple[Copy, np.ndarray]], itemsize: int, nbytes: int) -> np.ndarray | None:
    """Return the runs of memory that `nbytes` packed bytes fill, one after the other; None unless all runs are long.

    Each of `copies` has a packed source, and the memory that it fills. The result has the address and the length in
    bytes of a run in each row. It is None also if some packed bytes go nowhere, or to several destinations.
    """
    rows_and_runs = _runs(tuple([Copy(copy.source, 0, copy.modes) for copy, _ in copies]), itemsize, nbytes)
    if rows_and_runs is None:
        return None
    number, runs = rows_and_runs
    begins = np.empty(len(copies), np.uintp)
    for at, (copy, memory) in enumerate(copies):
        begin = copy.destination * itemsize
        if not 0 <= begin <= memory.nbytes - _end(copy.modes, itemsize):  # the kernel would write elsewhere
            raise IndexError(f"{copy} does not fit {memory.nbytes} bytes")
        begins[at] = memory.ctypes.data + begin
    runs = runs.copy()
    runs[:, 0] += begins[number]
    return runs


@lru_cache(maxsize=2**6)  # a result may have 400 KiB
def _runs(copies: Sequence[Copy], itemsize: int, nbytes: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Return `destination_runs` counted from the beginning of each destination, and the number of each run's copy."""
    if not copies:  # a window of bytes that no copy needs
        return None
    begins, starts, lengths = [], [], []
    for copy in copies:
        *outer, (run, step, into) = copy.modes or [(1, 1, 1)]
        length = run * itemsize
        if (step, into) != (1, 1) or length < _SHORTEST:
            return None
        begins.append(copy.source * itemsize + _offsets(outer, 1) * itemsize)
        starts.append(_offsets(outer, 2) * itemsize)
        lengths.append(np.full(begins[-1].size, length))
    order = np.argsort(np.concatenate(begins))
    begin, size = np.concatenate(begins)[order], np.concatenate(lengths)[order]
    if begin[0] or begin[-1] + size[-1] != nbytes or (begin[1:] != begin[:-1] + size[:-1]).any():
        return None
    number = np.repeat(np.arange(len(copies)), [part.size for part in starts])
    return number[order], np.stack((np.concatenate(starts)[order], size), axis=1).astype(np.uintp)


def _offsets(modes: Sequence[CopyMode], side: int) -> np.ndarray:
    """Return the offsets of all positions of `modes` at their source (`side` 1) or destination (2)."""
    offsets = np.zeros(1, np.int64)
    for mode in modes:
        offsets = np.add.outer(offsets, np.arange(mode[0]) * mode[side])
    return offsets.reshape(-1)


def _end(modes: Sequence[CopyMode], itemsize: int) -> int:
    """Return where the last element of a copy to destination 0 ends, in bytes."""
    return (sum((size - 1) * into for size, _, into in modes) + 1) * itemsize

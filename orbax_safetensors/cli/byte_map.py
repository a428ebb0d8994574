"""Which bytes of a file were read by whom: sorted, disjoint, half-open ranges, as int64 arrays of shape (n, 2)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import islice

import numpy as np

from orbax_safetensors.transfer.plan import TransferPlan

Ranges = np.ndarray


def union(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """All bytes of `ranges`, which may be in any order, touch and overlap."""
    given = np.array(ranges, np.int64).reshape(-1, 2)
    given = given[given[:, 0] < given[:, 1]]
    if not len(given):
        return given
    given = given[np.argsort(given[:, 0], kind="stable")]
    reach = np.maximum.accumulate(given[:, 1])
    first = np.flatnonzero(np.append(True, given[1:, 0] > reach[:-1]))
    return np.stack((given[first, 0], reach[np.append(first[1:], len(given)) - 1]), axis=1)


def requested(plan: TransferPlan) -> dict[int, list[tuple[int, int]]]:
    """Every range that executing `plan` asks a file for, by the file's number, as often as it does."""
    out: dict[int, list[tuple[int, int]]] = {}
    for extent in plan.extents:
        out.setdefault(extent.file, []).append((extent.begin, extent.end))
    for part in plan.parts:
        for begin, length in part.access.runs.pieces(0, part.access.runs.nbytes):
            first = part.location.begin + begin
            out.setdefault(part.file, []).append((first, first + length))
    return out


def owners(readers: Sequence[Ranges], nbytes: int) -> list[tuple[int, int, int]]:
    """`[0, nbytes)` cut where the readers change, as `(begin, end, owner)`; bit `i` of `owner` is reader `i`."""
    cuts = np.unique(np.concatenate([np.array([0, nbytes], np.int64), *(ranges.ravel() for ranges in readers)]))
    begin, end = cuts[:-1], cuts[1:]
    owner = np.zeros(len(begin), np.int64)
    for bit, ranges in enumerate(readers):
        inside = np.searchsorted(ranges.ravel(), begin, side="right") % 2 == 1
        owner |= inside.astype(np.int64) << bit
    change = np.flatnonzero(np.append(True, owner[1:] != owner[:-1]))[: len(owner)]
    last = np.append(change[1:], len(begin)) - 1
    return list(zip(begin[change].tolist(), end[last].tolist(), owner[change].tolist(), strict=True))


def amounts(regions: Sequence[tuple[int, int, int]], begin: int, end: int) -> dict[int, int]:
    """Bytes of `[begin, end)` by owner; `regions` are in order and disjoint."""
    out: dict[int, int] = {}
    first = bisect_right(regions, begin, key=lambda region: region[1])
    for start, stop, owner in islice(regions, first, None):
        nbytes = min(stop, end) - max(start, begin)
        if nbytes <= 0:
            break
        out[owner] = out.get(owner, 0) + nbytes
    return out

"""The pieces of a view, and the copies that a box of the view makes of them.

Copies count their destination from where a piece begins in the box, so that layers of a model have equal copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np

from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.elementwise import Ops
from orbax_safetensors.geometry.strided import Copy, Modes, copy_modes, extent, row_major, subrange


class Piece(NamedTuple):
    """One box of a view's domain and where it lies in a stored tensor. Offsets and strides count elements."""

    tensor: str | None  # None: zeros that no tensor stores, with strides of 0
    start: tuple[int, ...]  # where the box begins in the view's domain
    offset: int  # of the box's first element in the tensor
    dims: tuple[Modes, ...]
    ops: Ops = ()


class Cut(NamedTuple):
    """A `TensorCopy`, with the destination of `copy` counted from the element `begin` of the box's array on."""

    tensor: str | None
    copy: Copy
    ops: Ops
    begin: int


class PieceIndex:
    """Where the pieces of a view are, as arrays: it may stack ten thousand tensors, and a box meet a few of them."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        forms: dict[tuple[int, tuple[Modes, ...]], int] = {}
        self._form = np.array([forms.setdefault((piece.offset, piece.dims), len(forms)) for piece in pieces], np.int64)
        self._forms = list(forms)
        self._origin = (0,) * len(pieces[0].start)
        self._start = np.array([piece.start for piece in pieces], np.int64)
        self._size = np.array([[extent(modes) for modes in dims] for _, dims in forms], np.int64)[self._form]

    def cut(self, box: Box, shape: tuple[int, ...]) -> Iterator[tuple[int, int, tuple[Copy, ...]]]:
        """Yield for each piece that meets `box` its number, where it begins in the box's array, and its copies."""
        low, high = np.array(box, np.int64).reshape(-1, 2).T
        first = np.maximum(low - self._start, 0)
        stop = np.minimum(high - self._start, self._size)
        met = np.flatnonzero((first < stop).all(axis=1))
        begins = np.maximum(self._start[met] - low, 0) @ np.array(row_major(shape), np.int64)
        # Pieces that are met alike have equal rows here.
        ways = np.column_stack((self._form[met], first[met], stop[met]))
        copies_of: dict[bytes, tuple[Copy, ...]] = {}
        for number, begin, way in zip(met.tolist(), begins.tolist(), ways, strict=True):
            copies = copies_of.get(key := way.tobytes())
            if copies is None:
                offset, dims = self._forms[self._form[number]]
                part = Box(zip(first[number].tolist(), stop[number].tolist(), strict=True))
                copies = copies_of[key] = cut(offset, dims, self._origin, part, shape)
            yield number, begin, copies


# Tensors of a model's layers are cut alike.
@lru_cache(maxsize=2**16)
def cut(
    offset: int, dims: tuple[Modes, ...], start: tuple[int, ...], box: Box, shape: tuple[int, ...]
) -> tuple[Copy, ...]:
    """Return the copies of `box`, from a piece that begins at `start`, into the corner of an array of `shape`."""
    cuts = []
    for (low, high), begin, modes in zip(box, start, dims, strict=True):
        # (position in the box, offset in the tensor, modes)
        dimension_cuts = [
            (begin + at - low, inside, part)
            for at, inside, part in subrange(modes, max(low - begin, 0), min(high - begin, extent(modes)))
        ]
        if not dimension_cuts:
            return ()
        cuts.append(dimension_cuts)
    strides = row_major(shape)
    return tuple(
        [
            Copy(
                offset + sum(inside for _, inside, _ in parts),
                sum(at * stride for (at, _, _), stride in zip(parts, strides, strict=True)),
                copy_modes([modes for _, _, modes in parts], strides),
            )
            for parts in product(*cuts)
        ]
    )

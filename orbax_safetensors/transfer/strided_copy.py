"""Executes a `geometry.strided.Copy` on memory with NumPy, for all bytes that do not move as plain ranges.

Memory is one-dimensional and uint8: *packed* memory is as a file has it, *dense* memory is a block.

NumPy copies element after element in the order of the destination. If the source has another innermost axis, each
element then lies in a separate cache line, and these lines displace one another: their distance is often a power of
two, so they compete for the same few places. `_pieces` explains how such copies are cut instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import product
from math import gcd
from types import EllipsisType

import numpy as np

from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.geometry.elementwise import Ops, apply, undo
from orbax_safetensors.geometry.strided import Copy

_WORDS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}

# Elements. With fewer, the second and third call would take longer than the slow call that they replace.
_SMALL = 2**13
# Shorter axes do not become the innermost loop: NumPy begins a loop in about the time that ten elements take.
_SHORT = 16
# The next three constants depend on one another: a line of 16-byte elements fits in a slab, and a slab in a piece.
# Elements of a slab that are neighbours in the source: whole cache lines, and enough that NumPy begins few loops.
_LINE = 128
# NumPy reads a slab with a stride, line after line, then again for the next element of each line: the slab has to stay
# in the first-level cache, which has 32 KiB or more. A slab of twice the size is a third slower.
_SLAB_BYTES = 32 * 2**10
# What one NumPy call moves. The buffers of a piece should fit, or nearly fit, in the private cache of a core; with
# smaller pieces, threads wait for the interpreter lock.
_PIECE_BYTES = 2**20
# Elements that are computed at a time: intermediate results are wide, and large ones would take new memory from the
# system for every operation.
_COMPUTED = 2**16


def words(copy: Copy, packed: np.ndarray, dense: np.ndarray, itemsize: int) -> tuple[np.ndarray, np.ndarray]:
    """Return both sides of a copy that moves bits, as arrays of one shape; an assignment between them is the copy."""
    shape, dtype, begin, source, into, destination = _layout(copy, itemsize)
    return (
        np.ndarray(shape, dtype, packed.data, begin, source),
        np.ndarray(shape, dtype, dense.data, into, destination),
    )


@lru_cache(maxsize=2**16)
def _layout(copy: Copy, itemsize: int) -> tuple[tuple[int, ...], np.dtype, int, tuple[int, ...], int, tuple[int, ...]]:
    """Return shape and dtype of the `words` of a copy, and for both sides offset and strides, in bytes."""
    modes = [(size, src * itemsize, dst * itemsize) for size, src, dst in copy.modes]
    # The widest words that divide the innermost contiguous elements and all strides: NumPy moves one word a step.
    run = itemsize
    if modes and modes[-1][1:] == (itemsize, itemsize):
        run *= modes.pop()[0]
    begin, into = copy.source * itemsize, copy.destination * itemsize
    word = gcd(8, run, begin, into, *(step for _, src, dst in modes for step in (src, dst)))
    return (
        (*(size for size, _, _ in modes), run // word),
        _WORDS[word],
        begin,
        (*(src for _, src, _ in modes), word),
        into,
        (*(dst for _, _, dst in modes), word),
    )


def elements(
    copy: Copy, packed: np.ndarray, stored: np.dtype, dense: np.ndarray, held: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Return both sides of a copy that casts between the dtypes `stored` and `held`, as arrays of one shape."""
    shape = tuple(size for size, _, _ in copy.modes)
    source = [src * stored.itemsize for _, src, _ in copy.modes]
    into = [dst * held.itemsize for _, _, dst in copy.modes]
    return (
        np.ndarray(shape, stored, packed.data, copy.source * stored.itemsize, source),
        np.ndarray(shape, held, dense.data, copy.destination * held.itemsize, into),
    )


def assign(destination: np.ndarray, source: np.ndarray) -> None:
    """Assign `source` to `destination[...]`: arrays of one shape and dtype that share no memory."""
    for piece, into in _pieces(source, destination, _buffers(source)):
        into[...] = piece


def copy_applying(source: np.ndarray, destination: np.ndarray, ops: Ops, *, lossless: bool) -> None:
    """Assign the result of `ops` on `source`, cast to the destination's dtype as NumPy does.

    With `lossless`, numbers that do not fit an integer and finite numbers that become infinite, or NaN if a dtype
    has no infinity, raise `TensorMismatchError`, which does not know the tensor's name. Fractions are cut, or rounded,
    silently.
    """
    _copy_through(source, destination, partial(apply, ops) if ops else None, lossless=lossless)


def copy_undoing(source: np.ndarray, destination: np.ndarray, ops: Ops) -> None:
    """Assign the numbers from which `ops` computed `source`, cast to the destination's dtype."""
    _copy_through(source, destination, partial(undo, ops) if ops else None, lossless=False)


def _copy_through(
    source: np.ndarray,
    destination: np.ndarray,
    compute: Callable[[np.ndarray], np.ndarray] | None,
    *,
    lossless: bool,
) -> None:
    with np.errstate(all="ignore"):
        for piece, into in _pieces(source, destination, _buffers(source)):
            for part in _boxes(piece.shape, _COMPUTED if compute else piece.size):
                values, cast = piece[part], into[part]
                if compute:
                    values = compute(values)
                np.copyto(cast, values, casting="unsafe")
                if lossless:
                    _check(values, cast)


def _check(values: np.ndarray, cast: np.ndarray) -> None:
    """Raise `TensorMismatchError` if the `cast` of `values` lost a number; see `copy_applying`."""
    if np.can_cast(values.dtype, cast.dtype):
        return
    if np.issubdtype(cast.dtype, np.integer):
        whole = values if np.issubdtype(values.dtype, np.integer) else np.trunc(values.astype(np.float64))
        lost = cast != whole
    else:
        # NumPy checks its built-in types several times faster.
        wide = np.promote_types(cast.dtype, np.float32)
        finite = np.isfinite(cast, signature=f"{wide.char}->?")
        if finite.all():
            return
        lost = ~finite & np.isfinite(values)
    if np.any(lost):
        raise TensorMismatchError(f"{values[lost].flat[0]!r} of {values.dtype} does not fit {cast.dtype}")


def _buffers(source: np.ndarray) -> np.ndarray:
    """Return memory for `_pieces` of an array: two buffers of words as wide as its elements.

    Copies that reorder nothing allocate them as well: the C library then keeps the freed memory for the results of ops.
    """
    size = min(source.size, _PIECE_BYTES // source.itemsize)
    return np.empty((2, size), _WORDS.get(source.itemsize, source.dtype))


def _pieces(
    source: np.ndarray, destination: np.ndarray, buffers: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Cut two arrays of one shape into pairs of arrays of one shape, between which NumPy copies fast.

    The first of a pair is a view of `source`. If the arrays have different innermost axes, it is in the second buffer
    instead, in the order of the destination, and the next pair overwrites it.

    To reorder a piece, its lines are laid side by side in slabs, which copies whole lines; each slab is transposed
    within the first-level cache; and the destination is written in runs that are long enough for full speed. Writing
    elements there directly would wait for the memory, line by line.
    """
    if not source.size:
        return
    source, destination = source.squeeze(), destination.squeeze()
    order = sorted(range(source.ndim), key=lambda axis: -destination.strides[axis])
    source, destination = source.transpose(order), destination.transpose(order)
    limit = _PIECE_BYTES // source.itemsize
    long = [axis for axis in range(source.ndim) if source.shape[axis] >= _SHORT]
    along = min(long, key=lambda axis: source.strides[axis], default=-1)
    if source.size <= _SMALL or not long or along == long[-1]:
        if source.size > _SMALL and source.shape[-1] < _SHORT:
            for index in range(source.shape[-1]):
                yield from _pieces(source[..., index], destination[..., index], buffers)
        else:
            for box in _boxes(source.shape, limit):
                yield source[box], destination[box]
        return
    # Lines lie along axis 0; the other axes are rows. Pieces are long rather than high: a piece then reads neighbouring
    # lines, and writes its runs from one stretch of the buffer.
    source, destination = np.moveaxis(source, along, 0), np.moveaxis(destination, along, 0)
    line = _even(source.shape[0], _LINE)
    fit = _SLAB_BYTES // (line * source.itemsize)
    for rows in _boxes(source.shape[1:], max(limit // source.shape[0], fit)):
        step = limit // source[0][rows].size // line * line
        for begin in range(0, source.shape[0], step):
            piece = (slice(begin, begin + step), *rows)
            yield from _reordered(source[piece], destination[piece], line, fit, buffers)


def _reordered(
    source: np.ndarray, destination: np.ndarray, line: int, fit: int, buffers: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield one piece of `_pieces`, or several if lines, or slabs of `fit` rows, do not divide it."""
    bits = source.view(buffers.dtype)
    # A slab has all rows of the axes after axis `at`, and as many rows of axis `at` as fit.
    at = source.ndim - 1
    while at > 1 and source.shape[at] <= fit:
        fit //= source.shape[at]
        at -= 1
    rows = _even(source.shape[at], fit)
    slab_axes, row_axes = range(2, at + 2), range(at + 2, source.ndim + 2)
    slabs_first, line_last = (0, *slab_axes, 1, *row_axes), (*range(at + 1), *row_axes, at + 1)
    for (lines, length), (slabs, height) in product(_cuts(source.shape[0], line), _cuts(source.shape[at], rows)):
        piece, into = (array[(lines, *[slice(None)] * (at - 1), slabs)] for array in (bits, destination))
        shape = (-1, length, *piece.shape[1:at], piece.shape[at] // height, height, *piece.shape[at + 1 :])
        # The axes of slabs come first, then the line, then the rows of a slab.
        piece, into = (array.reshape(shape).transpose(slabs_first) for array in (piece, into))
        by_line, by_row = buffers[:, : piece.size]
        by_row = by_row.reshape(piece.shape)
        piece = piece.transpose(line_last)
        by_line = by_line.reshape(piece.shape)
        by_line[...] = piece
        by_row.transpose(line_last)[...] = by_line
        yield by_row.view(source.dtype), into


def _even(size: int, limit: int) -> int:
    """Return the length of the fewest equal parts of `size` of at most `limit`; the last part may be shorter."""
    return -(-size // -(-size // limit))


def _cuts(size: int, step: int) -> Iterator[tuple[slice, int]]:
    """Yield the part of `size` that `step` divides, and the rest, if any; each with the length of its steps."""
    whole = size - size % step
    yield slice(whole), step
    if whole < size:
        yield slice(whole, size), size - whole


def _boxes(shape: Sequence[int], limit: int) -> Iterator[tuple[slice | EllipsisType, ...]]:
    """Cut `shape` into boxes of at most `limit` positions, whole along as many of the last axes as fit."""
    cuts = []
    for size in reversed(shape):
        step = max(min(size, limit), 1)
        limit //= step
        cuts.append([slice(begin, begin + step) for begin in range(0, size, step)])
    for box in product(*reversed(cuts)):
        yield (*box, ...)  # the dots make a view of an array without axes too

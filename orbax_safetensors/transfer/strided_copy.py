"""Executes `plan.strided.Copy` on memory with NumPy. Everything that is not moved as a plain range passes through here.

Memory is one-dimensional and uint8: *packed* is as a file has it, *dense* is a block.

NumPy copies element after element in the order of the destination. Where the source has another innermost axis, each
element is then in a cache line of its own, and those lines displace one another: their distance is often a power of
two, so they compete for the same few places. `_pieces` says how such copies are cut instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from math import gcd
from types import EllipsisType

import numpy as np

from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.geometry.elementwise import Ops, apply, undo
from orbax_safetensors.geometry.strided import Copy

_WORDS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}

# Elements. Of less, the second and third call would take longer than the one that they spare.
_SMALL = 2**13
# Shorter axes are no innermost loop: NumPy takes about as long to begin a loop as to copy ten elements.
_SHORT = 16
# The constants from here on are in order: a line of 16-byte elements fits in a slab, and a slab in a piece.
# Elements of a slab that are neighbours in the source: whole cache lines, and enough that few loops are begun.
_LINE = 128
# A slab is read with a stride, line after line and then again for the next element of each line: it has to stay in the
# first-level cache, which has 32 KiB or more. Twice that is a third slower.
_SLAB_BYTES = 32 * 2**10
# What one NumPy call moves. The buffers of a piece should stay in the cache that a core has for itself, or nearly so;
# with smaller pieces threads wait for one another's Python.
_PIECE_BYTES = 2**20
# Elements that are computed at a time: the results in between are wide, and memory for large ones comes from the system
# again and again.
_COMPUTED = 2**16


def words(copy: Copy, packed: np.ndarray, dense: np.ndarray, itemsize: int) -> tuple[np.ndarray, np.ndarray]:
    """Both ends of a copy that moves bits, as arrays of one shape; assigning one to the other makes the copy."""
    modes = [(size, src * itemsize, dst * itemsize) for size, src, dst in copy.modes]
    # The widest words that the innermost contiguous elements and all strides are made of: NumPy moves one a step.
    run = itemsize
    if modes and modes[-1][1:] == (itemsize, itemsize):
        run *= modes.pop()[0]
    begin, into = copy.source * itemsize, copy.destination * itemsize
    word = gcd(8, run, begin, into, *(step for _, src, dst in modes for step in (src, dst)))
    shape = (*(size for size, _, _ in modes), run // word)
    dtype = _WORDS[word]
    return (
        np.ndarray(shape, dtype, packed.data, begin, (*(src for _, src, _ in modes), word)),
        np.ndarray(shape, dtype, dense.data, into, (*(dst for _, _, dst in modes), word)),
    )


def elements(
    copy: Copy, packed: np.ndarray, stored: np.dtype, dense: np.ndarray, held: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Both ends of a copy that casts between the dtypes `stored` and `held`, as arrays of one shape."""
    shape = tuple(size for size, _, _ in copy.modes)
    source = [src * stored.itemsize for _, src, _ in copy.modes]
    into = [dst * held.itemsize for _, _, dst in copy.modes]
    return (
        np.ndarray(shape, stored, packed.data, copy.source * stored.itemsize, source),
        np.ndarray(shape, held, dense.data, copy.destination * held.itemsize, into),
    )


def assign(destination: np.ndarray, source: np.ndarray) -> None:
    """`destination[...] = source` for arrays of one shape and dtype that have no memory in common."""
    for piece, into in _pieces(source, destination, _buffers(source)):
        into[...] = piece


def copy_applying(source: np.ndarray, destination: np.ndarray, ops: Ops, *, lossless: bool) -> None:
    """Assign what `ops` make of `source`, cast to the destination's dtype as NumPy does.

    With `lossless`, numbers that do not fit an integer and finite numbers that become infinite, or NaN where a dtype
    has no infinity, raise `TensorMismatchError`, which does not know the tensor's name. Fractions are cut, or rounded,
    without a word.
    """
    _copy_through(source, destination, partial(apply, ops) if ops else None, lossless=lossless)


def copy_undoing(source: np.ndarray, destination: np.ndarray, ops: Ops) -> None:
    """Assign what `ops` made `source` of, cast to the destination's dtype."""
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
    """Raises `TensorMismatchError` as `convert` says for numbers and what a cast made of them."""
    if np.can_cast(values.dtype, cast.dtype):
        return
    if np.issubdtype(cast.dtype, np.integer):
        whole = values if np.issubdtype(values.dtype, np.integer) else np.trunc(values.astype(np.float64))
        lost = cast != whole
    else:
        # A type that NumPy knows itself is looked through several times faster.
        wide = np.promote_types(cast.dtype, np.float32)
        finite = np.isfinite(cast, signature=f"{wide.char}->?")
        if finite.all():
            return
        lost = ~finite & np.isfinite(values)
    if np.any(lost):
        raise TensorMismatchError(f"{values[lost].flat[0]!r} of {values.dtype} does not fit {cast.dtype}")


def _buffers(source: np.ndarray) -> np.ndarray:
    """Memory for `_pieces` of an array: two of them, as words of its size.

    Also where nothing is reordered: the C library then keeps as much for the results of ops as was freed here.
    """
    size = min(source.size, _PIECE_BYTES // source.itemsize)
    return np.empty((2, size), _WORDS.get(source.itemsize, source.dtype))


def _pieces(
    source: np.ndarray, destination: np.ndarray, buffers: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Cuts two arrays of one shape into pairs of arrays of one shape, between which NumPy copies fast.

    The first of a pair is a view. Where the arrays have different innermost axes, it is in the second of the buffers
    instead, in the order of the destination, and the next pair uses it again.

    To reorder a piece, lines of it are laid side by side in slabs, which is a copy of whole lines; each slab is
    transposed within the first-level cache; and the destination gets runs that are long enough to be written as fast
    as any. Writing elements there directly would wait for the memory, line by line.
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
    # Axis 0 is the one along which lines lie; the others are rows. Pieces are long rather than high: the lines that one
    # reads are neighbours then, and it writes its runs from one stretch of the buffer.
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
    """One piece of `_pieces`, or several where lines, or slabs of `fit` rows, do not divide it."""
    bits = source.view(buffers.dtype)
    # A slab has all rows of the axes after axis `at`, and of that one as many as fit.
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
    """The length of as few equal parts of `size` as are no longer than `limit`, the last of which may be shorter."""
    return -(-size // -(-size // limit))


def _cuts(size: int, step: int) -> Iterator[tuple[slice, int]]:
    """The part of `size` that `step` divides, and the rest if there is one; each with the length of its steps."""
    whole = size - size % step
    yield slice(whole), step
    if whole < size:
        yield slice(whole, size), size - whole


def _boxes(shape: Sequence[int], limit: int) -> Iterator[tuple[slice | EllipsisType, ...]]:
    """Cuts `shape` into boxes of at most `limit` positions, whole along as many of the last axes as fit."""
    cuts = []
    for size in reversed(shape):
        step = max(min(size, limit), 1)
        limit //= step
        cuts.append([slice(begin, begin + step) for begin in range(0, size, step)])
    for box in product(*reversed(cuts)):
        yield (*box, ...)  # the dots make a view of an array without axes too

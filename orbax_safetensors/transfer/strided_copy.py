"""Executes a `geometry.strided.Copy` on memory with NumPy, for all bytes that do not move as plain ranges.

Memory is one-dimensional and uint8: *packed* memory is as a file has it, *dense* memory is a block.

NumPy copies element after element in the order of the destination. If the source has another innermost axis, each
element then lies in a separate cache line, and these lines displace one another: their distance is often a power of
two, so they compete for the same few places. `_pieces` explains how such copies are made instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import product
from math import gcd, prod
from types import EllipsisType

import numpy as np

from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.geometry.elementwise import Ops, apply, undo
from orbax_safetensors.geometry.strided import Copy

_WORDS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}

# Elements. With fewer, a second call would take longer than the slow call that it replaces.
_SMALL = 2**13
# Shorter axes do not become the innermost loop: NumPy begins a loop in about the time that ten elements take.
_SHORT = 16
# Lines that are read side by side, element by element: one cache line of each has to stay in the first-level cache,
# which has 32 KiB or more. Fewer lines would make short runs of the destination, which take longer to write.
_LINES = 512
_LINE_BYTES = 64
# The buffer of a piece should fit in the private cache of a core; with smaller pieces, threads wait for the interpreter
# lock.
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


@lru_cache(maxsize=2**12)
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
    _copy_through(source, destination, np.copyto)


def copy_applying(source: np.ndarray, destination: np.ndarray, ops: Ops, *, lossless: bool) -> None:
    """Assign the result of `ops` on `source`, cast to the destination's dtype as NumPy does.

    With `lossless`, numbers that do not fit an integer and finite numbers that become infinite, or NaN if a dtype
    has no infinity, raise `TensorMismatchError`, which does not know the tensor's name. Fractions are cut, or rounded,
    silently.
    """
    compute = partial(apply, ops) if ops else None
    _copy_through(source, destination, partial(_cast, compute=compute, lossless=lossless))


def copy_undoing(source: np.ndarray, destination: np.ndarray, ops: Ops) -> None:
    """Assign the numbers from which `ops` computed `source`, cast to the destination's dtype."""
    compute = partial(undo, ops) if ops else None
    _copy_through(source, destination, partial(_cast, compute=compute, lossless=False))


def _cast(
    destination: np.ndarray, source: np.ndarray, *, compute: Callable[[np.ndarray], np.ndarray] | None, lossless: bool
) -> None:
    with np.errstate(all="ignore"):
        for part in _boxes(source.shape, _COMPUTED if compute else source.size):
            values, cast = source[part], destination[part]
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


def _copy_through(source: np.ndarray, destination: np.ndarray, copy: Callable[[np.ndarray, np.ndarray], None]) -> None:
    """Have `copy`, called with a destination and a source, move all elements, a piece at a time."""
    buffer = np.empty(0, destination.dtype)
    for piece, into, reorders in _pieces(source, destination):
        if not reorders:
            copy(into, piece)
            continue
        # Lines lie along the last axis. They begin an odd number of cache lines apart, so that none displaces others.
        *rows, length = piece.shape
        width = _LINE_BYTES // into.itemsize
        pitch = (-(-length // width) | 1) * width
        count = prod(rows)
        if buffer.size < count * pitch:
            buffer = np.empty(count * pitch, destination.dtype)
        lines = buffer[: count * pitch].reshape(*rows, pitch)[..., :length]
        copy(lines, piece)
        into[...] = lines


def _pieces(source: np.ndarray, destination: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, bool]]:
    """Cut two arrays of one shape into pairs of arrays of one shape, and tell of each whether its axes are reordered.

    To reorder a piece, its lines, along the innermost axis of the source, are copied side by side into a buffer, and
    from there, element by element, into runs of the destination. The buffer keeps the lines apart in the cache.
    """
    if not source.size:
        return
    source, destination = source.squeeze(), destination.squeeze()
    order = sorted(range(source.ndim), key=lambda axis: -destination.strides[axis])
    source, destination = source.transpose(order), destination.transpose(order)
    limit = _PIECE_BYTES // destination.itemsize
    long = [axis for axis in range(source.ndim) if source.shape[axis] >= _SHORT]
    along = min(long, key=lambda axis: source.strides[axis], default=-1)
    if source.size <= _SMALL or not long or along == long[-1]:
        if source.size > _SMALL and source.shape[-1] < _SHORT:
            for index in range(source.shape[-1]):
                yield from _pieces(source[..., index], destination[..., index])
        else:
            for box in _boxes(source.shape, limit):
                yield source[box], destination[box], False
        return
    # The axes after that of the lines count the lines: NumPy runs through them for each element of a line.
    for rows in _boxes(source.shape[along + 1 :], _LINES):
        count = source[(0,) * (along + 1)][rows].size
        for box in _boxes(source.shape[: along + 1], limit // count):
            piece = (*box[:-1], *rows)
            yield np.moveaxis(source[piece], along, -1), np.moveaxis(destination[piece], along, -1), True


def _boxes(shape: Sequence[int], limit: int) -> Iterator[tuple[slice | EllipsisType, ...]]:
    """Cut `shape` into boxes of at most `limit` positions, whole along as many of the last axes as fit."""
    cuts = []
    for size in reversed(shape):
        step = max(min(size, limit), 1)
        limit //= step
        cuts.append([slice(begin, begin + step) for begin in range(0, size, step)])
    for box in product(*reversed(cuts)):
        yield (*box, ...)  # the dots make a view of an array without axes too

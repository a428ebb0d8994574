"""Stride arithmetic: modes, and the strided copies that every view comes down to.

All arithmetic on strides in the package is in this module. It knows no names of dimensions, no dtypes and no files.

A *mode* is `(size, stride)`: `size` positions, `stride` elements apart. A dimension is a tuple of modes, outermost
first, and runs through them like the digits of an odometer; the extent of a dimension is the product of its sizes. A
dimension of extent 1 is the empty tuple. That is the hierarchical layout of CuTe, and it is closed under splitting and
merging dimensions, which plain strides are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

Mode = tuple[int, int]  # (size, stride), elements
Modes = tuple[Mode, ...]  # outermost first
CopyMode = tuple[int, int, int]  # (size, source stride, destination stride), elements


def extent(modes: Modes) -> int:
    """Return the number of positions that `modes` runs through."""
    return prod(size for size, _ in modes)


def merged(modes: Sequence[Mode]) -> Modes:
    """Return the same positions in the fewest modes: drop size 1, and join a mode to the next one that it continues."""
    out: list[Mode] = []
    for size, stride in modes:
        if size == 1:
            continue
        if out and out[-1][1] == size * stride:
            out[-1] = (out[-1][0] * size, stride)
        else:
            out.append((size, stride))
    return tuple(out)


def split(modes: Modes, extents: Sequence[int]) -> list[Modes] | None:
    """Return `modes` as one dimension for each of `extents`, outermost first; None if no modes can express that."""
    rest = list(modes)
    out: list[Modes] = []
    for wanted in reversed(extents):
        inner: list[Mode] = []
        while wanted > 1:
            size, stride = rest.pop()
            if wanted % size == 0:
                inner.append((size, stride))
                wanted //= size
            elif size % wanted == 0:
                inner.append((wanted, stride))
                rest.append((size // wanted, stride * wanted))
                wanted = 1
            else:
                return None
        out.append(merged(inner[::-1]))
    return out[::-1]


def subrange(modes: Modes, start: int, stop: int) -> Iterator[tuple[int, int, Modes]]:
    """Yield positions `[start, stop)` of a dimension as `(first position, its offset, modes)`, in order.

    A range that cuts through the digits of the odometer needs several pieces: at most `2 * len(modes) - 1`.
    """
    if start >= stop:
        return
    if not modes:
        yield 0, 0, ()
        return
    (size, stride), inner = modes[0], modes[1:]
    step = extent(inner)
    if start == 0 and stop == size * step:
        yield 0, 0, modes
        return
    if not inner:
        yield start, start * stride, merged(((stop - start, stride),))
        return
    # Digits [first, last) of the outermost mode are covered from end to end; the digits beside them in part.
    first, last = -(-start // step), stop // step
    if start % step:
        outer, end = start // step, min(stop - start // step * step, step)
        for at, offset, part in subrange(inner, start % step, end):
            yield outer * step + at, outer * stride + offset, part
    if first < last:
        yield first * step, first * stride, merged(((last - first, stride), *inner))
    if stop % step and last >= first:
        for at, offset, part in subrange(inner, 0, stop % step):
            yield last * step + at, last * stride + offset, part


def every(modes: Modes, start: int, step: int, count: int) -> Iterator[tuple[int, int, Modes]]:
    """Yield every `step`-th position of a dimension, `count` of them from `start` on, as pieces of one mode each.

    A piece is `(how many positions come before it, offset of its first position, modes)`; pieces are in order. The
    dimension `((3, 100), (4, 1))` has twelve positions in three rows of four, at the offsets 0 to 3, 100 to 103 and 200
    to 203. Every second of them makes a piece for each row: `(0, 0, ((2, 2),))`, `(2, 100, ((2, 2),))` and
    `(4, 200, ((2, 2),))`. With a `step` of 1, pieces are those of `subrange`, which may have several modes.
    """
    if step == 1:
        for at, offset, part in subrange(modes, start, start + count):
            yield at - start, offset, part
        return
    size, stride = modes[-1] if modes else (1, 0)
    done = 0
    while done < count:
        turn, digit = divmod(start + done * step, size)
        here = min(count - done, -(-(size - digit) // step))
        (_, offset, _) = next(subrange(modes[:-1], turn, turn + 1))
        yield done, offset + digit * stride, merged(((here, stride * step),))
        done += here


def offsets(modes: Modes, positions: np.ndarray) -> np.ndarray:
    """Return the offsets of `positions` of a dimension."""
    out = np.zeros_like(positions)
    for size, stride in reversed(modes):
        positions, digits = np.divmod(positions, size)
        out += digits * stride
    return out


class Copy(NamedTuple):
    """One strided copy from a stored tensor into a dense destination.

    Offsets and strides count elements: of the stored dtype at the source and of the destination's at the destination,
    because a cast changes the size of an element. `modes` is outermost first in the order of the destination.

    At the source modes nest: sorted by stride, each stride is at least as long as all inner modes. Views cannot make
    other modes, since they only split, merge, drop and reorder the digits of a row-major tensor.
    """

    source: int
    destination: int
    modes: tuple[CopyMode, ...]

    @property
    def elements(self) -> int:
        """Number of elements that are copied."""
        return prod(size for size, _, _ in self.modes)

    def shifted(self, distance: int) -> Copy:
        """Return the same copy from a source whose elements lie `distance` elements further on."""
        return Copy(self.source + distance, self.destination, self.modes)

    def onward(self, distance: int) -> Copy:
        """Return the same copy to a destination that lies `distance` elements further on."""
        return Copy(self.source, self.destination + distance, self.modes) if distance else self

    def within(self, low: int, high: int) -> Iterator[Copy]:
        """Yield the part of the copy that reads source elements `[low, high)`, at most `2 * len(modes) - 1` copies."""
        modes = sorted(self.modes, key=lambda mode: -mode[1])
        yield from _within(self.source, self.destination, modes, low, high)


def _within(source: int, destination: int, modes: list[CopyMode], low: int, high: int) -> Iterator[Copy]:
    """Yield the copies of `Copy.within`, from modes that are sorted by descending source stride."""
    last = source + sum((size - 1) * stride for size, stride, _ in modes)
    if high <= source or low > last:
        return
    if low <= source and last < high:
        yield Copy(source, destination, _by_destination(modes))
        return
    (size, stride, step), inner = modes[0], modes[1:]
    inside = last - source - (size - 1) * stride  # from the first to the last element of one position of this mode
    # Positions [first, stop) of this mode lie wholly in the range; its ends cut the positions beside them.
    first = min(max(-((source - low) // stride), 0), size)
    stop = max(min((high - 1 - inside - source) // stride + 1, size), first)
    cut_low = max((low - source) // stride, 0)
    cut_high = min((high - 1 - source) // stride + 1, size)
    for at in range(cut_low, min(first, cut_high)):
        yield from _within(source + at * stride, destination + at * step, inner, low, high)
    if stop > first:
        yield Copy(
            source + first * stride, destination + first * step, _by_destination([(stop - first, stride, step), *inner])
        )
    for at in range(max(stop, min(first, cut_high)), cut_high):
        yield from _within(source + at * stride, destination + at * step, inner, low, high)


def _by_destination(modes: Sequence[CopyMode]) -> tuple[CopyMode, ...]:
    return tuple(sorted((mode for mode in modes if mode[0] > 1), key=lambda mode: -mode[2]))


def copy_modes(dims: Sequence[Modes], strides: Sequence[int]) -> tuple[CopyMode, ...]:
    """Return source dimensions paired with the destination's stride for each, in the fewest modes."""
    out: list[CopyMode] = []
    for modes, step in zip(dims, strides, strict=True):
        inner = extent(modes)
        for size, stride in modes:
            inner //= size
            here = (size, stride, inner * step)
            if out and out[-1][1] == size * stride and out[-1][2] == size * here[2]:
                out[-1] = (out[-1][0] * size, stride, here[2])
            elif size > 1:
                out.append(here)
    return tuple(out)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a C-contiguous array of `shape`."""
    out = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        out[axis] = out[axis + 1] * shape[axis + 1]
    return tuple(out)


@dataclass(frozen=True, slots=True)
class Runs:
    """A set of bytes: runs of `length` bytes, repeated over `modes`.

    `begin` and the strides are bytes. Modes nest and are ordered by descending stride, so that runs neither touch nor
    overlap; `modes == ()` is one contiguous range. The *packed* bytes are those of all runs in order, without gaps.
    """

    begin: int
    length: int
    modes: Modes

    @property
    def count(self) -> int:
        """Number of runs."""
        return extent(self.modes)

    @property
    def nbytes(self) -> int:
        """Bytes in all runs together, gaps excluded."""
        return self.length * self.count

    @property
    def end(self) -> int:
        """The end of the last run: the set lies in `[begin, end)`."""
        return self.begin + self.length + sum((size - 1) * stride for size, stride in self.modes)

    def position(self, distance: int) -> int:
        """Return how far two bytes of the set that lie `distance` apart in the tensor are in the packed bytes.

        Runs of 4 bytes that begin every 100 bytes are packed one after the other: a byte that is 202 further on is 2
        runs and 2 bytes further on there, which are 10.
        """
        packed, step = 0, self.nbytes
        for size, stride in self.modes:
            step //= size
            digits, distance = divmod(distance, stride)
            packed += digits * step
        return packed + distance

    def pieces(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        """Yield `(begin, length)` of each run, or part of a run, that holds packed bytes `[low, high)`, in order."""
        while low < high:
            index, inside = divmod(low, self.length)
            begin = self.begin + inside
            for size, stride in reversed(self.modes):
                index, digit = divmod(index, size)
                begin += digit * stride
            length = min(self.length - inside, high - low)
            yield begin, length
            low += length


def runs_of(begin: int, length: int, modes: Sequence[Mode]) -> Runs | None:
    """Return `Runs` in normal form, from modes in any order; None if they do not nest."""
    out: list[Mode] = []
    inside = length
    for size, stride in sorted((mode for mode in modes if mode[0] > 1), key=lambda mode: mode[1]):
        if stride < inside:
            return None
        if stride == inside and not out:
            length = inside = size * stride
        else:
            out.append((size, stride))
            inside += (size - 1) * stride
    return Runs(begin, length, merged(out[::-1]))


def source_runs(copy: Copy, itemsize: int) -> Runs:
    """Return the bytes that `copy` reads, relative to the tensor's first byte."""
    runs = runs_of(copy.source * itemsize, itemsize, [(size, stride * itemsize) for size, stride, _ in copy.modes])
    assert runs is not None, copy  # the modes of a copy nest
    return runs


def packed(copy: Copy, runs: Runs, itemsize: int) -> Copy:
    """Return `copy` with the packed bytes of `runs` as its source; they hold all that it reads of the tensor."""

    def elements(distance: int) -> int:
        return runs.position(distance * itemsize) // itemsize

    source = runs.position(copy.source * itemsize - runs.begin) // itemsize
    modes = tuple((size, elements(stride), step) for size, stride, step in copy.modes)
    return Copy(source, copy.destination, modes)


def keeps_order(copy: Copy) -> bool:
    """Return whether the destination holds the elements that `copy` reads contiguously and in their stored order."""
    inside = 1
    for size, _, step in sorted(copy.modes, key=lambda mode: mode[1]):
        if step != inside:
            return False
        inside *= size
    return True

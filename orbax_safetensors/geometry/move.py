"""Strided copies as arrays move: a reshape, a transpose and one box of the destination.

Devices have no pointers; whatever they move, they move in these words.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

from orbax_safetensors.geometry.strided import Copy, CopyMode, Modes, merged, row_major


class Move(NamedTuple):
    """A strided copy in the words of NumPy, from the elements that it reads, packed in their stored order.

    With `begin = move.start(first)`, for the copy whose first element becomes element `first` of `array`, it is
    `array.reshape(into)[begin : begin + box] = packed.reshape(sizes).transpose(order).reshape(box)`. Copies that differ
    only in where they begin have equal moves.
    """

    sizes: tuple[int, ...]  # of the modes of the source, outermost first
    order: tuple[int, ...]  # of these in the destination
    box: tuple[int, ...]
    into: tuple[int, ...]  # the destination's shape, row-major, with dimensions split for the box; none has size 1

    def start(self, first: int) -> tuple[int, ...] | None:
        """Return where the box begins whose first element is element `first`; None if it does not fit there."""
        begin = []
        for size, length, stride in zip(self.into, self.box, row_major(self.into), strict=True):
            digit = first // stride % size
            if digit + length > size:
                return None
            begin.append(digit)
        return tuple(begin)

    @property
    def fills(self) -> bool:
        """Whether the box is the whole array."""
        return self.box == self.into


def move_of(copy: Copy, shape: Sequence[int]) -> Move | None:
    """Return the move of a copy into a row-major array of `shape`; None if there is none, as for a constant."""
    return _move(copy.modes, tuple(shape))


@lru_cache(maxsize=2**16)
def _move(modes: tuple[CopyMode, ...], shape: tuple[int, ...]) -> Move | None:
    by_source: list[tuple[int, int]] = []  # (size, destination stride)
    for size, stride, step in sorted(modes, key=lambda mode: -mode[1]):
        if stride == 0:
            return None
        if by_source and by_source[-1][1] == size * step:  # packed, they are one mode
            by_source[-1] = (by_source[-1][0] * size, step)
        else:
            by_source.append((size, step))
    order = sorted(range(len(by_source)), key=lambda number: -by_source[number][1])
    destination = merged([by_source[number] for number in order])
    # Without the shape's own dimensions, parts of rows fit too; devices prefer an array as it is.
    digits = _digits(destination, shape) or _digits(destination, (prod(shape),))
    return None if digits is None else Move(tuple(size for size, _ in by_source), tuple(order), *digits)


def _digits(modes: Modes, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return a box of the same positions as `modes`, and `shape` with dimensions split so that there is one.

    Modes are outermost first and do not overlap.
    """
    rest = list(modes)
    dims: list[tuple[int, int]] = []  # (length of the box, size), innermost first
    stride = 1
    for size in reversed(shape):
        end = stride * size
        while rest and rest[-1][1] < end:
            count, step = rest.pop()
            if count * step > end:  # whole dimensions, and some positions of the next one
                if count * step % end:
                    return None
                count, beyond = end // step, count * step // end
                rest.append((beyond, end))
            outer = min(rest[-1][1], end) if rest else end
            if step % stride or outer % step or end % outer:
                return None
            if step > stride:
                dims.append((1, step // stride))
            dims.append((count, outer // step))
            stride = outer
        if stride < end:
            dims.append((1, end // stride))
            stride = end
    return tuple(length for length, _ in reversed(dims)), tuple(size for _, size in reversed(dims))

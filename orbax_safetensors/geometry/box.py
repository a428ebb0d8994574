"""`Box`: a hyper-rectangle of an index domain; shards, chunks and tiles are boxes of their arrays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod


class Box(tuple[tuple[int, int], ...]):
    """For every dimension a half-open range `(start, stop)`.

    A tuple of these pairs and equal to it, so that boxes can be sorted, and are keys of dicts.
    """

    __slots__ = ()

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        """Return the box of a whole array of `shape`."""
        return _whole(tuple(shape))

    @staticmethod
    def hull(boxes: Sequence[Box]) -> Box:
        """Return the smallest box that holds all of `boxes`."""
        sides = zip(*boxes, strict=True)
        return Box((min(start for start, _ in side), max(stop for _, stop in side)) for side in sides)

    @property
    def start(self) -> tuple[int, ...]:
        """The index of the first element."""
        return tuple([start for start, _ in self])

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of every dimension."""
        return _shape(self)

    @property
    def volume(self) -> int:
        """Number of elements."""
        return prod([stop - start for start, stop in self])

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that takes the box from an array."""
        return tuple([slice(start, stop) for start, stop in self])

    def overlap(self, other: Box) -> Box:
        """Return the elements that both boxes have; the boxes must overlap."""
        return Box((max(a, c), min(b, d)) for (a, b), (c, d) in zip(self, other, strict=True))

    def inside(self, part: Box) -> Box:
        """Return a part of the box, given by its place in the box."""
        return Box((low + start, low + stop) for (low, _), (start, stop) in zip(self, part, strict=True))


# Most boxes of a model are alike.
@lru_cache(maxsize=2**16)
def _whole(shape: tuple[int, ...]) -> Box:
    return Box((0, size) for size in shape)


@lru_cache(maxsize=2**16)
def _shape(box: Box) -> tuple[int, ...]:
    return tuple([stop - start for start, stop in box])

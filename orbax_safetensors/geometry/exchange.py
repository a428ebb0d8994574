"""How devices get their shards of an array of which every byte is read once: who reads what, and what is sent then.

An array that is sharded in its inner dimensions, or replicated, lies in storage in pieces that several processes want.
So it is read in *parts* instead: blocks along the dimensions that are outermost in storage, one for each device and as
many neighbours for each process as it has devices. The devices then turn parts into shards with a few *moves*: along
some axes of the mesh, a dimension becomes whole again where another one is cut, or where all are to hold it.

The axes of the mesh are taken apart into axes of prime sizes, so that a dimension of few elements can be cut by some of
them. They are numbered in the order of the mesh.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

Axes = tuple[int, ...]

# How much longer than needed a dimension may be made, so that it can be cut evenly, before the next one is cut instead:
# the process that reads most then reads so much more than its share.
SLIGHT_PADDING = 1 / 32


@dataclass(frozen=True, slots=True)
class Move:
    """Devices along `axes` make the dimension `source`, which these cut, whole among them.

    They cut the dimension `destination` instead; where it is None, all of them hold the same afterwards.
    """

    axes: Axes
    source: int
    destination: int | None


@dataclass(frozen=True)
class Exchange:
    """The parts of one array and what makes shards of them.

    Attributes:
      sizes: of the axes.
      shape: of the array.
      shards: for every dimension the axes that cut it, the one that cuts it into the largest blocks first.
      padded: the shape that is read, which is longer where a dimension of `shape` cannot be cut evenly.
      parts: for every dimension of `padded` the axes that cut it.
      dimensions: those of the array, in the order in which parts follow one another: the outermost in storage first.
      moves: from parts to shards, one after the other.
    """

    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    shards: tuple[Axes, ...]
    padded: tuple[int, ...]
    parts: tuple[Axes, ...]
    dimensions: tuple[int, ...]
    moves: tuple[Move, ...]

    @property
    def devices(self) -> int:
        """How many there are."""
        return prod(self.sizes)

    @cached_property
    def order(self) -> Axes:
        """All axes, in the order in which devices hold parts that follow one another."""
        cutting = [axis for dimension in self.dimensions for axis in self.parts[dimension]]
        return (*cutting, *(axis for axis in range(len(self.sizes)) if axis not in cutting))

    def positions(self) -> list[int]:
        """For every part, in the order in which they follow one another, the device in the mesh that moves start at."""
        grid = np.arange(self.devices).reshape(self.sizes)
        positions: list[int] = grid.transpose(self.order).ravel().tolist()
        return positions

    def sends(self, owners: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """What devices send before the moves, as pairs of `(from, to)`, so that each process reads neighbours.

        `owners` has the process of every device. Nothing where devices have the parts that they read.
        """
        pairs = tuple(zip(by_owner(owners), self.positions(), strict=True))
        return () if all(a == b for a, b in pairs) else pairs

    def received(self, owners: Sequence[int]) -> int:
        """Elements that a device receives from others, at most."""
        block = prod(self.padded) // self._count(self.parts)
        total = block if self.sends(owners) else 0
        for move in self.moves:
            devices = prod(self.sizes[axis] for axis in move.axes)
            if move.destination is None:
                total, block = total + block * (devices - 1), block * devices
            else:
                total += block // devices * (devices - 1)
        return total

    def _count(self, cuts: tuple[Axes, ...]) -> int:
        return prod(self.sizes[axis] for axes in cuts for axis in axes)


def by_owner(owners: Sequence[int]) -> list[int]:
    """The devices, those of a process together."""
    return sorted(range(len(owners)), key=lambda device: owners[device])


def exchange(
    shape: Sequence[int], axes: Sequence[Axes], sizes: Sequence[int], order: Sequence[int], padding: float
) -> Exchange:
    """Parts for an array of `shape`, of which each dimension that `axes` cut divides evenly.

    As many axes as can be cut the dimension that is outermost in storage, and the rest the next ones. Those that fit
    nowhere have the same part, as they do where the array is a scalar.

    Args:
      shape: of the array.
      axes: for every dimension the axes of the mesh that cut it, by their number.
      sizes: of the axes of the mesh.
      order: the dimensions, the innermost in storage first, as `tiling.storage_order` has them.
      padding: by which part of its size a dimension may be made longer that no axis cuts in the end.
    """
    factors: list[int] = []
    factors_of: list[Axes] = []
    for size in sizes:
        own = tuple(_primes(size))
        factors_of.append(tuple(range(len(factors), len(factors) + len(own))))
        factors += own
    shards = tuple(tuple(factor for axis in entry for factor in factors_of[axis]) for entry in axes)
    cutting = {axis for entry in shards for axis in entry}
    # What a dimension could be cut by besides: that no dimension is cut by in the end, and what cuts a later one. Of
    # these the last axes, so that the others, which cut it into larger blocks, can stay where they are.
    spare: list[tuple[int | None, list[int]]] = [(None, [at for at in range(len(factors)) if at not in cutting])]
    dimensions = tuple(order)[::-1]
    spare += [(dimension, list(shards[dimension])) for dimension in reversed(dimensions)]
    padded = list(shape)
    parts: list[Axes] = [()] * len(shape)
    moves: list[Move] = []
    for dimension in dimensions:
        _, staying = spare.pop()
        blocks = prod(factors[axis] for axis in staying)
        size = shape[dimension] // blocks
        count = 1
        taken: list[tuple[int | None, Axes]] = []
        for destination, left in spare:
            cut: list[int] = []
            while left and _fits(size, count * factors[left[-1]], 0 if shards[dimension] else padding):
                count *= factors[left[-1]]
                cut.insert(0, left.pop())
            if cut:
                taken.append((destination, tuple(cut)))
        parts[dimension] = (*staying, *(axis for _, own in taken for axis in own))
        padded[dimension] = -(-size // count) * count * blocks
        # The dimensions after this one make whole what they are cut by for others before they are cut for good.
        moves[:0] = [Move(own, dimension, destination) for destination, own in reversed(taken)]
    return Exchange(tuple(factors), tuple(shape), shards, tuple(padded), tuple(parts), dimensions, tuple(moves))


def _fits(size: int, count: int, padding: float) -> bool:
    """Whether `size` is cut into `count` equal parts by making it longer by no more than `padding` of it."""
    return size > 0 and -(-size // count) * count - size <= padding * size


def _primes(size: int) -> Iterator[int]:
    """The prime factors of a size, the smallest first."""
    factor = 2
    while size > 1:
        while size % factor == 0:
            yield factor
            size //= factor
        factor += 1

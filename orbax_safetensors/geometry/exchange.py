"""How devices get their shards of an array while every byte is read once: which part each reads, and what it sends.

If an array is sharded in its inner dimensions, or replicated, several processes need the same stretches of storage. So
they read it in *parts* instead: blocks along the dimensions that are outermost in storage, one for each device, and for
each process as many neighbours as it has devices. The devices then turn parts into shards with a few *moves*: along
some axes of the mesh, one dimension becomes whole again as another one is cut, or as all devices come to hold it.

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

# By how much a dimension may be lengthened, so that it can be cut evenly, before the next dimension is cut instead. The
# process that reads most reads so much more than its share.
SLIGHT_PADDING = 1 / 32


@dataclass(frozen=True, slots=True)
class Move:
    """Devices along `axes` make the dimension `source`, which these axes cut, whole among them.

    They cut the dimension `destination` instead; if that is None, all of them hold the same afterwards.
    """

    axes: Axes
    source: int
    destination: int | None


@dataclass(frozen=True)
class Exchange:
    """The parts of one array and the moves that turn them into shards.

    Attributes:
      sizes: of the axes.
      shape: of the array.
      shards: for every dimension the axes that cut it; the axis that cuts the largest blocks comes first.
      padded: the shape that is read, which is longer if a dimension of `shape` cannot be cut evenly.
      parts: for every dimension of `padded` the axes that cut it.
      dimensions: of the array, in the order in which parts follow one another: the outermost in storage first.
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
        """The number of devices."""
        return prod(self.sizes)

    @cached_property
    def order(self) -> Axes:
        """All axes, in the order in which devices hold parts that follow one another."""
        cutting = [axis for dimension in self.dimensions for axis in self.parts[dimension]]
        return (*cutting, *(axis for axis in range(len(self.sizes)) if axis not in cutting))

    def positions(self) -> list[int]:
        """Return for every part, in the order of parts, the device in the mesh at which moves start."""
        grid = np.arange(self.devices).reshape(self.sizes)
        positions: list[int] = grid.transpose(self.order).ravel().tolist()
        return positions

    def sends(self, owners: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Return the sends before the moves, as pairs of `(from, to)`, so that each process can read neighbours.

        `owners` has the process of every device. The result is empty if devices have the parts that they read.
        """
        pairs = tuple(zip(by_owner(owners), self.positions(), strict=True))
        return () if all(a == b for a, b in pairs) else pairs

    def received(self, owners: Sequence[int]) -> int:
        """Return the most elements that a device receives from others."""
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
    """Return the devices, grouped by process."""
    return sorted(range(len(owners)), key=lambda device: owners[device])


def exchange(
    shape: Sequence[int], axes: Sequence[Axes], sizes: Sequence[int], order: Sequence[int], padding: float
) -> Exchange:
    """Plan the parts and moves for an array of `shape`; `axes` must cut its dimensions evenly.

    As many axes as possible cut the dimension that is outermost in storage, the rest the next ones. Devices along axes
    that fit no dimension read the same part, as all devices do if the array is a scalar.

    Args:
      shape: of the array.
      axes: for every dimension the axes of the mesh that cut it, by number.
      sizes: of the axes of the mesh.
      order: the dimensions, the innermost in storage first, as `tiling.storage_order` has them.
      padding: the part of its size by which a dimension may be lengthened if no axis cuts it in the end.
    """
    factors: list[int] = []
    factors_of: list[Axes] = []
    for size in sizes:
        primes = tuple(_primes(size))
        factors_of.append(tuple(range(len(factors), len(factors) + len(primes))))
        factors += primes
    shards = tuple(tuple(factor for axis in entry for factor in factors_of[axis]) for entry in axes)
    cutting = {axis for entry in shards for axis in entry}
    # More axes that could cut a dimension: those that cut none in the end, and those of a later one. The last of these
    # are used first, so that the others, which cut larger blocks, can stay where they are.
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
        parts[dimension] = (*staying, *(axis for _, cut_by in taken for axis in cut_by))
        padded[dimension] = -(-size // count) * count * blocks
        # Moves of later dimensions come first: these become whole along borrowed axes before their final axes cut them.
        moves[:0] = [Move(cut_by, dimension, destination) for destination, cut_by in reversed(taken)]
    return Exchange(tuple(factors), tuple(shape), shards, tuple(padded), tuple(parts), dimensions, tuple(moves))


def _fits(size: int, count: int, padding: float) -> bool:
    """Return whether `size`, lengthened by at most `padding * size`, divides into `count` equal parts."""
    return size > 0 and -(-size // count) * count - size <= padding * size


def _primes(size: int) -> Iterator[int]:
    """Yield the prime factors of a size, smallest first."""
    factor = 2
    while size > 1:
        while size % factor == 0:
            yield factor
            size //= factor
        factor += 1

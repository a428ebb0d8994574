"""Parts of leaves: which leaves processes read in parts, and how devices make their shards of these.

If a leaf is replicated, or sharded in its inner dimensions, several processes need the same stretches of storage. With
`SafetensorsOptions(cooperative=True)`, they read it in *parts*: blocks along the dimensions that are outermost in
storage, one for each device, and neighbours for each process. The parts are the shards of another `Target`. A few
*moves* turn them into the leaf's shards: along some axes of the mesh, one dimension becomes whole again as another one
is cut, or as all devices come to hold it.

Everything here follows from shapes, shardings and views, so all processes come to the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from orbax_safetensors.devices.sharding import axes_of, by_process, device_boxes, device_owners, num_processes
from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.tiling import storage_order
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.restore.leaf_request import LeafRequest
from orbax_safetensors.restore.target import Target

Axes = tuple[str, ...]

# By how much of its size a dimension may be lengthened, so that it can be cut evenly, before the next dimension is cut
# instead. The process that reads most reads so much more than its share.
_MAX_PADDING = 1 / 32


class Move(NamedTuple):
    """Devices along `axes` make the dimension `source`, which these axes cut, whole among them.

    They cut the dimension `destination` instead; if that is None, all of them hold the same afterwards.
    """

    axes: Axes
    source: int
    destination: int | None


@dataclass(frozen=True)
class Parts:
    """The parts of a leaf, and what makes its shards of them.

    Attributes:
      shape: of all parts together, which is longer than the leaf if a dimension cannot be cut evenly.
      sharding: of the parts, over the leaf's devices in the order in which they read: neighbours for each process.
      mesh: the leaf's mesh with axes of prime sizes, so that a dimension of few elements can be cut by some of them.
      before, after: the partitions over `mesh` into parts and into the leaf's shards.
      sends: which device first sends its part to which, as pairs of places in `mesh`; empty if all keep theirs.
      moves: from parts to shards, one after the other.
    """

    shape: tuple[int, ...]
    sharding: NamedSharding
    mesh: Mesh | AbstractMesh
    before: PartitionSpec
    after: PartitionSpec
    sends: tuple[tuple[int, int], ...]
    moves: tuple[Move, ...]

    def target(self, leaf: Target) -> Target:
        """Return the target whose shards are the parts of a leaf."""
        return replace(leaf, shape=self.shape, sharding=self.sharding)


def exchanges(options: SafetensorsOptions) -> bool:
    """Return whether devices exchange what processes read; with `alias`, processes map instead of read."""
    return options.cooperative and not options.alias


def exchangeable(leaf: LeafRequest | Target) -> bool:
    """Return whether the devices of a leaf can exchange parts of it."""
    sharding = leaf.sharding
    return (
        leaf.kind is jax.Array
        and not leaf.broadcast
        and isinstance(sharding, NamedSharding)
        and sharding.memory_kind in (None, "device")
    )


def parts_of(leaf: Target, process_count: int | None = None) -> Parts | None:
    """Return the parts in which processes read a leaf; None if each reads what its own devices hold.

    They read it in parts if some process would otherwise read what another one holds as well, or several stretches of
    one stored tensor. All processes need devices of the leaf, and these have to divide it almost evenly.
    `process_count` is as for `device_owners`.
    """
    if not exchangeable(leaf) or not leaf.view.tensors:
        return None
    assert isinstance(leaf.sharding, NamedSharding)
    stacking = sum(
        not any(piece.dims[dimension] for piece in leaf.view.pieces if piece.tensor is not None)
        for dimension in range(len(leaf.shape))
    )
    try:
        return _parts(leaf.shape, leaf.sharding, storage_order(leaf.view)[::-1], stacking, process_count)
    except TensorMismatchError as error:
        raise TensorMismatchError(f"{leaf.name!r}: {error}") from error


@lru_cache(maxsize=2**16)
def _parts(
    shape: tuple[int, ...],
    sharding: NamedSharding,
    dimensions: tuple[int, ...],
    stacking: int,
    process_count: int | None,
) -> Parts | None:
    """Return the parts of a leaf.

    `dimensions` has the outermost in storage first. The first `stacking` of them cut no tensor.
    """
    count = num_processes([sharding], process_count)
    owners, boxes = device_owners(sharding, shape, process_count), device_boxes(sharding, shape)
    uneven = len({box.shape for box in boxes}) > 1  # which JAX refuses
    if count == 1 or set(owners) != set(range(count)) or 0 in shape or uneven:
        return None
    if _in_stretches(by_process(boxes, owners, count), shape, dimensions[stacking:]):
        return None
    primes, sizes = _prime_axes(sharding.mesh)
    shards = [tuple(prime for axis in axes for prime in primes[axis]) for axes in axes_of(sharding, len(shape))]
    cut = _cut(shape, shards, sizes, dimensions)
    if cut is None:
        return None
    order = [axis for dimension in dimensions for axis in cut.axes[dimension]]
    grid = np.arange(len(owners)).reshape(tuple(sizes.values()))
    places: list[int] = grid.transpose([list(sizes).index(axis) for axis in order]).ravel().tolist()
    readers = sorted(places, key=owners.__getitem__)
    if not cut.moves and readers == places:
        return None
    before, after = (PartitionSpec(*(entry or None for entry in entries)) for entries in (cut.axes, shards))
    return Parts(
        cut.padded,
        NamedSharding(_mesh(sharding.mesh, readers, {axis: sizes[axis] for axis in order}), before),
        _mesh(sharding.mesh, range(len(owners)), sizes),
        before,
        after,
        () if readers == places else tuple(zip(readers, places, strict=True)),
        cut.moves,
    )


def _in_stretches(held: Sequence[Sequence[Box]], shape: tuple[int, ...], dimensions: Sequence[int]) -> bool:
    """Return whether each process holds one stretch of every tensor, and no two processes hold the same.

    `held` has the boxes of every process, `dimensions` those of the tensors, the outermost in storage first.
    """
    total = 0
    for boxes in held:
        distinct = list(set(boxes))
        hull = Box.hull(distinct)
        if hull.volume != sum(box.volume for box in distinct) or not _is_stretch(hull, shape, dimensions):
            return False
        total += hull.volume
    return total == prod(shape)


def _is_stretch(box: Box, shape: tuple[int, ...], dimensions: Sequence[int]) -> bool:
    """Return whether a box is one stretch of storage: outside the first dimension that it cuts, it is of length 1."""
    outside = False
    for dimension in reversed(dimensions):
        if outside and box.shape[dimension] > 1:
            return False
        outside = outside or box.shape[dimension] < shape[dimension]
    return True


class _Cut(NamedTuple):
    """How an array is cut into parts.

    Attributes:
      padded: its shape, lengthened so that it can be cut evenly.
      axes: for every dimension the axes that cut it; the one that cuts the largest blocks comes first.
      moves: from parts to shards.
    """

    padded: tuple[int, ...]
    axes: list[Axes]
    moves: tuple[Move, ...]


def _cut(
    shape: tuple[int, ...], shards: Sequence[Axes], sizes: dict[str, int], dimensions: Sequence[int]
) -> _Cut | None:
    """Cut an array into parts, whose shards the axes in `shards` cut evenly; None if some axes fit no dimension.

    As many axes as possible cut the dimension that is outermost in storage, the rest the next ones. Only a dimension
    that no axis cuts in the end may be lengthened.
    """
    idle = [axis for axis in sizes if not any(axis in axes for axes in shards)]
    # More axes that could cut a dimension: those that cut none in the end, and those of a later one. The last of these
    # are used first, so that the others, which cut larger blocks, can stay where they are.
    spare: list[tuple[int | None, list[str]]] = [(None, idle)]
    spare += [(dimension, list(shards[dimension])) for dimension in reversed(dimensions)]
    padded, cut = list(shape), list(shards)
    moves: list[Move] = []
    for dimension in dimensions:
        _, staying = spare.pop()
        blocks = prod(sizes[axis] for axis in staying)
        size, count = shape[dimension] // blocks, 1
        taken: list[Move] = []
        for destination, free in spare:
            axes: list[str] = []
            while free and _fits(size, count * sizes[free[-1]], 0 if shards[dimension] else _MAX_PADDING):
                count *= sizes[free[-1]]
                axes.insert(0, free.pop())
            if axes:
                taken.append(Move(tuple(axes), dimension, destination))
        cut[dimension] = (*staying, *(axis for move in taken for axis in move.axes))
        padded[dimension] = -(-size // count) * count * blocks
        # Moves of later dimensions come first: these become whole along borrowed axes before their final axes cut them.
        moves[:0] = reversed(taken)
    # Axes that were not taken fit no dimension.
    return None if idle else _Cut(tuple(padded), cut, tuple(moves))


def _fits(size: int, count: int, padding: float) -> bool:
    """Return whether `size`, lengthened by at most `padding * size`, divides into `count` equal parts."""
    return -(-size // count) * count - size <= padding * size


def _prime_axes(mesh: Mesh | AbstractMesh) -> tuple[dict[str, list[str]], dict[str, int]]:
    """Return the axes of prime sizes that make up each axis of a mesh, and their sizes; their names are numbers."""
    primes: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
    for axis, size in mesh.shape.items():
        primes[axis] = []
        factor = 2
        while size > 1:
            if size % factor:
                factor += 1
                continue
            primes[axis].append(str(len(sizes)))
            sizes[primes[axis][-1]] = factor
            size //= factor
    return primes, sizes


def _mesh(mesh: Mesh | AbstractMesh, places: Iterable[int], sizes: dict[str, int]) -> Mesh | AbstractMesh:
    """Return the devices at `places` of a mesh as a mesh with axes of these sizes."""
    shape, names = tuple(sizes.values()), tuple(sizes)
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(shape, names)
    return Mesh(mesh.devices.ravel()[list(places)].reshape(shape), names)

"""Plan one leaf with other partitions: sharding other dimensions may make processes read less."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from jax.sharding import NamedSharding, PartitionSpec

from orbax_safetensors.devices.sharding import Axes, axes_of
from orbax_safetensors.geometry.view import View
from orbax_safetensors.restore.target import Target
from orbax_safetensors.transfer.figures import REPORTED_OVER_READ, OverRead, Reads
from orbax_safetensors.transfer.plan import Location

# Partitions to plan for a leaf if no single dimension is good enough: three axes over four dimensions.
_MAX_PARTITIONS = 64


@dataclass(frozen=True)
class CheaperSharding(OverRead):
    """What processes would read of a leaf if these mesh axes sharded its dimensions."""

    axes: Axes
    needed_bytes: int
    read_bytes: int


def cheaper_shardings(target: Target, reads: Callable[[Target], Reads]) -> tuple[CheaperSharding, ...]:
    """Return what a leaf's mesh axes would cost on other dimensions, the partition that reads least first.

    Only dimensions that the axes divide evenly count. First, all axes together shard one dimension, in the order of the
    mesh. If no such partition is possible, or all of them read far too much, the axes shard several dimensions as well.
    The leaf's current partition is left out. A sharding without a mesh has no other partition. `reads` returns what
    processes read of a leaf.
    """
    sharding = target.sharding
    if not isinstance(sharding, NamedSharding):
        return ()

    def planned(axes: Axes) -> CheaperSharding:
        other = NamedSharding(sharding.mesh, PartitionSpec(*(entry or None for entry in axes)))
        cost = reads(replace(target, sharding=other))
        return CheaperSharding(axes, cost.needed_bytes, cost.read_bytes)

    one_dimension, several = _partitions(sharding, target.shape)
    plans = [planned(axes) for axes in one_dimension]
    if not any(plan.over_read <= REPORTED_OVER_READ for plan in plans):
        plans += [planned(axes) for axes in several[:_MAX_PARTITIONS]]
    return tuple(sorted(plans, key=lambda plan: plan.read_bytes))


def _partitions(sharding: NamedSharding, shape: tuple[int, ...]) -> tuple[list[Axes], list[Axes]]:
    """Return the other partitions of a leaf by the same axes: with all axes on one dimension, and on several."""
    current, sizes = axes_of(sharding, len(shape)), dict(sharding.mesh.shape)
    used = [axis for axis in sizes if any(axis in entry for entry in current)]
    one_dimension: list[Axes] = []
    several: list[Axes] = []
    for dimensions in product(range(len(shape)), repeat=len(used)):
        axes = tuple(
            tuple(axis for axis, at in zip(used, dimensions, strict=True) if at == dimension)
            for dimension in range(len(shape))
        )
        counts = (prod(sizes[axis] for axis in entry) for entry in axes)
        if axes != current and all(size % count == 0 for size, count in zip(shape, counts, strict=True)):
            (one_dimension if len(set(dimensions)) == 1 else several).append(axes)
    return one_dimension, several


def form(target: Target, locate: Callable[[str], Location]) -> tuple[object, ...]:
    """Return what decides about the reads of a leaf: its sharding, and its pieces without the names of tensors."""
    return (target.sharding, target.shape, target.dtype, target.broadcast, *pieces(target.view, locate))


def pieces(view: View, locate: Callable[[str], Location]) -> Iterator[object]:
    """Yield what a view is made of, without the names of tensors: what is read of views with the same is alike."""
    numbers: dict[str | None, int] = {None: 0}
    for piece in view.pieces:
        number = numbers.setdefault(piece.tensor, len(numbers))
        stored = None if piece.tensor is None else locate(piece.tensor)
        yield number, piece.start, piece.offset, piece.dims, piece.ops
        yield None if stored is None else (stored.dtype, stored.encoding)

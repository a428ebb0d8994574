"""Plan one leaf with other partitions: sharding other dimensions may make processes read less."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from orbax_safetensors.cost.counter import Counter, ShardedLeaf
from orbax_safetensors.cost.figures import OverRead
from orbax_safetensors.cost.restore import REPORTED_OVER_READ
from orbax_safetensors.devices.sharding import Axes, axes_of, by_process, device_boxes
from orbax_safetensors.transfer.plan import Location

# Partitions to plan for a leaf if no single dimension is good enough: three axes over four dimensions.
_MAX_PARTITIONS = 64


@dataclass(frozen=True)
class Instead(OverRead):
    """What all processes together would read of a leaf if these mesh axes sharded its dimensions."""

    axes: Axes
    needed_bytes: int
    read_bytes: int


class Advisor:
    """Plans leaves with other partitions, and leaves of equal geometry only once."""

    def __init__(
        self, locate: Callable[[str], Location], num_files: int, *, process_count: int, max_gap_bytes: int
    ) -> None:
        """Take the arguments of `Counter` and of `restore_plan`."""
        self._locate = locate
        self._num_files = num_files
        self._process_count = process_count
        self._max_gap_bytes = max_gap_bytes
        self._known: dict[tuple[object, ...], tuple[Instead, ...]] = {}

    def instead(self, leaf: ShardedLeaf, sharding: Sharding, owners: Sequence[int]) -> tuple[Instead, ...]:
        """Return what a leaf's mesh axes would cost on other dimensions, the partition that reads least first.

        Only dimensions that the axes divide evenly count. First, all axes together shard one dimension, in the order of
        the mesh. If no such partition is possible, or all of them read far too much, the axes shard several dimensions
        as well. The leaf's current partition is left out. A sharding without a mesh has no other partition. `owners`
        has the process of every device.
        """
        if not isinstance(sharding, NamedSharding):
            return ()
        key = (leaf.view.shape, leaf.shape, leaf.dtype, id(leaf.boxes), leaf.readers, form(leaf, self._locate))
        if key not in self._known:
            current, sizes = axes_of(sharding, len(leaf.shape)), dict(sharding.mesh.shape)
            used = [axis for axis in sizes if any(axis in entry for entry in current)]
            on_one_dimension: list[Axes] = []
            on_several: list[Axes] = []
            for to in product(range(len(leaf.shape)), repeat=len(used)):
                axes = tuple(
                    tuple(axis for axis, at in zip(used, to, strict=True) if at == dimension)
                    for dimension in range(len(leaf.shape))
                )
                counts = (prod(sizes[axis] for axis in entry) for entry in axes)
                if axes != current and all(size % count == 0 for size, count in zip(leaf.shape, counts, strict=True)):
                    (on_one_dimension if len(set(to)) == 1 else on_several).append(axes)
            plans = [self._planned(leaf, sharding, axes, owners) for axes in on_one_dimension]
            if not any(plan.over_read <= REPORTED_OVER_READ for plan in plans):
                plans += [self._planned(leaf, sharding, axes, owners) for axes in on_several[:_MAX_PARTITIONS]]
            self._known[key] = tuple(sorted(plans, key=lambda plan: plan.read_bytes))
        return self._known[key]

    def _planned(self, leaf: ShardedLeaf, sharding: NamedSharding, axes: Axes, owners: Sequence[int]) -> Instead:
        other = NamedSharding(sharding.mesh, PartitionSpec(*(entry or None for entry in axes)))
        other_leaf = leaf._replace(boxes=by_process(device_boxes(other, leaf.shape), owners, self._process_count))
        counter = Counter([other_leaf], self._locate, self._num_files, max_gap_bytes=self._max_gap_bytes)
        totals = [(count.needed_bytes.sum(), count.moved_bytes.sum()) for count in counter.counts(self._process_count)]
        needed, read = np.sum(totals, axis=0).tolist()
        return Instead(axes, needed, read)


def form(leaf: ShardedLeaf, locate: Callable[[str], Location]) -> tuple[object, ...]:
    """Return the pieces of a leaf without tensor names: for leaves of equal form, equal boxes read equally much."""
    numbers: dict[str | None, int] = {None: 0}
    out: list[object] = []
    for piece in leaf.view.pieces:
        number = numbers.setdefault(piece.tensor, len(numbers))
        stored = None if piece.tensor is None else locate(piece.tensor)
        kind = None if stored is None else (stored.dtype, stored.encoding)
        out.append((number, kind, piece.start, piece.offset, piece.dims, piece.ops))
    return tuple(out)

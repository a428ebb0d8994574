"""Which dimensions of a leaf its mesh axes had better shard, so that less is read: what-if plans of one leaf alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from orbax_safetensors.cost.counter import Counter, ShardedLeaf
from orbax_safetensors.cost.figures import OverRead
from orbax_safetensors.cost.restore import REPORTED_OVER_READ
from orbax_safetensors.devices.sharding import Axes, axes_of, by_process, device_boxes
from orbax_safetensors.transfer.plan import Location

# Partitions to try of a leaf for which no single dimension will do: three axes over four dimensions.
_TRIED = 64


@dataclass(frozen=True)
class Instead(OverRead):
    """What processes would read of a leaf if these mesh axes sharded its dimensions; the figures are sums over all."""

    axes: Axes
    needed_bytes: int
    read_bytes: int


class Advisor:
    """Plans leaves with other partitions. Leaves of equal geometry are planned once."""

    def __init__(
        self, locate: Callable[[str], Location], num_files: int, *, process_count: int, max_gap_bytes: int
    ) -> None:
        """The arguments are those of `Counter` and of `restore_plan`."""
        self._locate = locate
        self._num_files = num_files
        self._process_count = process_count
        self._max_gap_bytes = max_gap_bytes
        self._known: dict[tuple[object, ...], tuple[Instead, ...]] = {}

    def instead(self, leaf: ShardedLeaf, sharding: Sharding, owners: Sequence[int]) -> tuple[Instead, ...]:
        """What the axes of a leaf's sharding would cost on other dimensions, evenly, the one that reads least first.

        First all axes together, in the order of the mesh, on every dimension that they divide. Where all of these read
        far too much, or there is none, apart as well. The leaf's own partition is not among them, and a sharding
        without a mesh has no other. `owners` has the process of every device.
        """
        if not isinstance(sharding, NamedSharding):
            return ()
        key = (leaf.view.shape, leaf.shape, leaf.dtype, id(leaf.boxes), leaf.readers, form(leaf, self._locate))
        if key not in self._known:
            own, sizes = axes_of(sharding, len(leaf.shape)), dict(sharding.mesh.shape)
            used = [axis for axis in sizes if any(axis in entry for entry in own)]
            alone: list[Axes] = []
            mixed: list[Axes] = []
            for to in product(range(len(leaf.shape)), repeat=len(used)):
                axes = tuple(
                    tuple(axis for axis, at in zip(used, to, strict=True) if at == dimension)
                    for dimension in range(len(leaf.shape))
                )
                counts = (prod(sizes[axis] for axis in entry) for entry in axes)
                if axes != own and all(size % count == 0 for size, count in zip(leaf.shape, counts, strict=True)):
                    (alone if len(set(to)) == 1 else mixed).append(axes)
            found = [self._planned(leaf, sharding, axes, owners) for axes in alone]
            if not any(one.over_read <= REPORTED_OVER_READ for one in found):
                found += [self._planned(leaf, sharding, axes, owners) for axes in mixed[:_TRIED]]
            self._known[key] = tuple(sorted(found, key=lambda one: one.read_bytes))
        return self._known[key]

    def _planned(self, leaf: ShardedLeaf, sharding: NamedSharding, axes: Axes, owners: Sequence[int]) -> Instead:
        other = NamedSharding(sharding.mesh, PartitionSpec(*(entry or None for entry in axes)))
        other_leaf = replace(leaf, boxes=by_process(device_boxes(other, leaf.shape), owners, self._process_count))
        counter = Counter([other_leaf], self._locate, self._num_files, max_gap_bytes=self._max_gap_bytes)
        totals = [(count.needed_bytes.sum(), count.moved_bytes.sum()) for count in counter.counts(self._process_count)]
        needed, read = np.sum(totals, axis=0).tolist()
        return Instead(axes, needed, read)


def form(leaf: ShardedLeaf, locate: Callable[[str], Location]) -> tuple[object, ...]:
    """Equal for leaves of which equal boxes read equally much: the pieces without the names of their tensors."""
    numbers: dict[str | None, int] = {None: 0}
    out: list[object] = []
    for piece in leaf.view.pieces:
        number = numbers.setdefault(piece.tensor, len(numbers))
        stored = None if piece.tensor is None else locate(piece.tensor)
        kind = None if stored is None else (stored.dtype, stored.encoding)
        out.append((number, kind, piece.start, piece.offset, piece.dims, piece.ops))
    return tuple(out)

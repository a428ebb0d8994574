"""Choose the leaves that processes read in parts, which their devices exchange, because that saves bytes.

All processes choose alike, because they choose by facts that all of them have: shardings, headers, options.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import inf

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from orbax_safetensors.cost.advice import form
from orbax_safetensors.cost.counter import Counter, ShardedLeaf
from orbax_safetensors.devices.sharding import axes_of, by_process, device_boxes
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.exchange import SLIGHT_PADDING, Axes, Exchange, exchange
from orbax_safetensors.geometry.groups import by_tensors
from orbax_safetensors.geometry.tiling import storage_order
from orbax_safetensors.restore.target import LeafRequest, Target
from orbax_safetensors.storage.store import Pace
from orbax_safetensors.transfer.plan import Location

# Processes whose reads are planned to choose an exchange, spread from the first to the last; others are alike.
SOME_PROCESSES = 16

Boxes = Sequence[tuple[Box, ...]]  # for every process


@dataclass(frozen=True, eq=False)
class Swap:
    """An exchange between devices that makes shards of parts, for leaves of one shape and sharding.

    Attributes:
      exchange: the parts, and the moves that make shards of them.
      owners: the process of every device, in the order of the mesh.
      boxes: for every process the boxes of its parts, in the padded shape.
      received: the most elements that a device receives from others.
    """

    exchange: Exchange
    owners: tuple[int, ...]
    boxes: Boxes
    received: int

    @staticmethod
    def of(exchange: Exchange, owners: tuple[int, ...], process_count: int) -> Swap:
        """Return an exchange between devices of `process_count` processes."""
        boxes = by_process(device_boxes(reading(exchange), exchange.padded), sorted(owners), process_count)
        return Swap(exchange, owners, boxes, exchange.received(owners))


def exchangeable(leaf: LeafRequest | Target) -> bool:
    """Return whether the devices of a leaf can exchange parts of it."""
    sharding = leaf.sharding
    return (
        leaf.kind is jax.Array
        and not leaf.broadcast
        and isinstance(sharding, NamedSharding)
        and sharding.memory_kind in (None, "device")
    )


class Chooser:
    """Chooses the leaves of a restore whose exchange saves bytes read."""

    def __init__(self, locate: Callable[[str], Location], num_files: int, *, process_count: int, pace: Pace) -> None:
        """Take the `pace` of the store; the other arguments are those of `Counter` and of `restore_plan`."""
        self._locate = locate
        self._num_files = num_files
        self._process_count = process_count
        self._pace = pace
        self._swaps: dict[Hashable, list[Swap]] = {}
        count = min(process_count, SOME_PROCESSES)
        self._some = [number * (process_count - 1) // max(count - 1, 1) for number in range(count)]

    def choose(
        self,
        leaves: Sequence[ShardedLeaf],
        shardings: Sequence[Sharding | None],
        owners: Sequence[tuple[int, ...] | None],
    ) -> list[Swap | None]:
        """Return the exchange of each leaf, None if an exchange saves no bytes.

        `owners` has the processes of a leaf's devices, None if the leaf cannot be exchanged. Leaves that are made of
        the same tensors are exchanged together or not at all.
        """
        kinds: dict[Hashable, list[list[int]]] = {}
        for group in by_tensors([leaf.view for leaf in leaves]):
            if all(set(owners[at] or ()) == set(range(self._process_count)) for at in group):
                key = tuple(
                    (leaf.shape, leaf.dtype, id(leaf.boxes), shardings[at], owners[at], form(leaf, self._locate))
                    for at in group
                    for leaf in (leaves[at],)
                )
                kinds.setdefault(key, []).append(group)
        out: list[Swap | None] = [None] * len(leaves)
        for groups in kinds.values():
            swaps = [self._of_leaf(leaves[at], shardings[at], owners[at]) for at in groups[0]]
            best = self._best([leaves[at] for at in groups[0]], swaps)
            for group in groups if best else ():
                for at, swap in zip(group, best, strict=True):
                    out[at] = swap
        return out

    def _of_leaf(self, leaf: ShardedLeaf, sharding: Sharding | None, owners: tuple[int, ...] | None) -> list[Swap]:
        """Return the exchanges that are possible for a leaf."""
        assert isinstance(sharding, NamedSharding)
        assert owners is not None
        order = storage_order(leaf.view)
        key = (leaf.shape, sharding, owners, order)
        if key not in self._swaps:
            names = list(sharding.mesh.shape)
            axes = tuple(tuple(map(names.index, entry)) for entry in axes_of(sharding, len(leaf.shape)))
            sizes = tuple(sharding.mesh.shape.values())
            possible = dict.fromkeys(
                exchange(leaf.shape, axes, sizes, order, padding) for padding in (SLIGHT_PADDING, inf)
            )
            self._swaps[key] = [Swap.of(parts, owners, self._process_count) for parts in possible]
        return self._swaps[key]

    def _best(self, leaves: list[ShardedLeaf], swaps: list[list[Swap]]) -> list[Swap]:
        """Return the exchanges with which the slowest process reads least; empty if none saves bytes."""
        direct = sum(self._read_bytes(leaves, [None] * len(leaves)))
        least = inf
        out: list[Swap] = []
        for number in range(max(map(len, swaps))):
            tried = [of_leaf[min(number, len(of_leaf) - 1)] for of_leaf in swaps]
            read = self._read_bytes(leaves, [swap.boxes for swap in tried])
            if sum(read) < direct and max(read) < least:
                least, out = max(read), tried
        return out

    def _read_bytes(self, leaves: Sequence[ShardedLeaf], parts: Sequence[Boxes | None]) -> list[int]:
        """Return the bytes that each of some processes reads of leaves, directly or in parts."""
        leaves = [
            leaf._replace(boxes=self._of_some(leaf.boxes), parts=None if boxes is None else self._of_some(boxes))
            for leaf, boxes in zip(leaves, parts, strict=True)
        ]
        counter = Counter(leaves, self._locate, self._num_files, max_gap_bytes=self._pace.max_gap_bytes)
        return [int(count.moved_bytes.sum()) for count in counter.counts(len(self._some))]

    def _of_some(self, boxes: Boxes) -> Boxes:
        return [boxes[process] for process in self._some]


def reading(exchange: Exchange, devices: np.ndarray | None = None) -> NamedSharding:
    """Return the sharding of the parts over `devices`, in the order of the reads; without them an abstract one."""
    sizes = tuple(exchange.sizes[axis] for axis in exchange.order)
    names = tuple(map(str, exchange.order))
    mesh = AbstractMesh(sizes, names) if devices is None else Mesh(devices.reshape(sizes), names)
    return NamedSharding(mesh, spec(exchange.parts))


def spec(axes: Sequence[Axes]) -> PartitionSpec:
    """Return the partition in which the axes of each dimension are named by their numbers."""
    return PartitionSpec(*(tuple(map(str, entry)) or None for entry in axes))

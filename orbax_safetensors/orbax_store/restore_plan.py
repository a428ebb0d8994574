"""What a restore of an Orbax checkpoint on a mesh costs, in chunks, counted from metadata alone.

Orbax restores each distinct shard of a process separately. For each shard, it reads and decodes every chunk that the
shard touches, always whole. The encoded size of a chunk is not known before the read.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from math import prod

import numpy as np

from orbax_safetensors.devices.partition import Partition
from orbax_safetensors.devices.sharding import by_process
from orbax_safetensors.format.amounts import human_bytes
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.orbax_store import OrbaxCheckpoint, OrbaxLeaf
from orbax_safetensors.orbax_store.leaf import ARRAYS, STRING, num_chunks, touched_nbytes
from orbax_safetensors.transfer.figures import REPORTED_OVER_READ, OverRead, restore_plan_json


@dataclass(frozen=True)
class OrbaxProcessCost(OverRead):
    """What a restore costs one process: decoded bytes of its distinct shards and of the chunks that they touch."""

    needed_bytes: int
    read_bytes: int
    num_chunks: int


@dataclass(frozen=True)
class OrbaxLeafOverRead(OverRead):
    """A leaf whose chunks make processes read far more than they need; the figures are sums over all processes.

    With chunks of `shard_shape`, or of even parts of it, processes would read only what they need.
    """

    name: str
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    needed_bytes: int
    read_bytes: int
    num_chunks: int


@dataclass(frozen=True)
class OrbaxRestorePlan:
    """What a restore will cost.

    Attributes:
      total_bytes, total_chunks: decoded bytes and chunks of all arrays.
      num_arrays: the number of arrays, including scalars.
      file_bytes: of all files of the checkpoint, as stored; None on an object store.
      processes: the cost for each process.
      over_reads: the leaves of which processes read more than 1.1 times the needed bytes, the most wasteful first.
    """

    total_bytes: int
    total_chunks: int
    num_arrays: int
    file_bytes: int | None
    processes: tuple[OrbaxProcessCost, ...]
    over_reads: tuple[OrbaxLeafOverRead, ...]

    def __str__(self) -> str:
        number, most = max(enumerate(self.processes), key=lambda process: process[1].read_bytes)
        return (
            f"restore of {human_bytes(self.total_bytes)}: arrays {self.num_arrays:,}, chunks {self.total_chunks:,}, "
            f"processes {len(self.processes):,}\nprocess {number} reads most: {human_bytes(most.read_bytes)}, chunks "
            f"{most.num_chunks:,}, over-read {most.over_read:.2f}"
        )

    def to_json(self) -> str:
        """Return the plan as a JSON object with the names of the attributes."""
        return restore_plan_json(self)


def plan_orbax_restore(checkpoint: OrbaxCheckpoint, sharding: Partition, process_count: int) -> OrbaxRestorePlan:
    """Count what each of `process_count` processes reads to restore all arrays of a checkpoint.

    Processes share the devices of the mesh evenly and in order. Raises `TensorMismatchError` if the partition does not
    fit the arrays: each of its patterns must match an array whose dimensions its axes divide.
    """
    leaves = {name: leaf for name, leaf in checkpoint.leaves.items() if leaf.kind != STRING}
    sharding.check((name, leaf.shape) for name, leaf in leaves.items() if leaf.kind in ARRAYS)
    return plan_arrays(leaves, sharding, process_count, checkpoint.stored_bytes())


def plan_arrays(
    leaves: Mapping[str, OrbaxLeaf], sharding: Partition, process_count: int, file_bytes: int | None
) -> OrbaxRestorePlan:
    """Plan a restore of arrays by name, which fit `sharding`, in files of `file_bytes`; see `plan_orbax_restore`."""
    devices = prod(sharding.mesh.values())
    owners = [device * process_count // devices for device in range(devices)]
    known: dict[tuple[object, ...], np.ndarray] = {}
    totals = np.zeros((process_count, 3), np.int64)
    over_reads = []
    for name, leaf in leaves.items():
        key = (leaf.shape, leaf.chunk_shape, leaf.dtype, sharding.spec(name, leaf.shape))
        if key not in known:
            boxes = by_process(sharding.boxes(name, leaf.shape), owners, process_count)
            known[key] = np.array([_costs(leaf, distinct) for distinct in map(set, boxes)], np.int64)
        totals += known[key]
        needed, read, chunks = known[key].sum(axis=0).tolist()
        if read > REPORTED_OVER_READ * needed:
            shard = sharding.shard(name, leaf.shape)
            over_reads.append(OrbaxLeafOverRead(name, leaf.shape, leaf.chunk_shape, shard, needed, read, chunks))
    return OrbaxRestorePlan(
        total_bytes=sum(prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves.values()),
        total_chunks=sum(prod(leaf.grid) for leaf in leaves.values()),
        num_arrays=len(leaves),
        file_bytes=file_bytes,
        processes=tuple(OrbaxProcessCost(*figures) for figures in totals.tolist()),
        over_reads=tuple(sorted(over_reads, key=lambda leaf: leaf.needed_bytes - leaf.read_bytes)),
    )


def _costs(leaf: OrbaxLeaf, boxes: Set[Box]) -> tuple[int, int, int]:
    """Return the figures of `OrbaxProcessCost` for one leaf of which a process holds these boxes."""
    return (
        sum(box.volume for box in boxes) * leaf.dtype.itemsize,
        sum(touched_nbytes(box, leaf) for box in boxes),
        sum(num_chunks(box, leaf) for box in boxes),
    )

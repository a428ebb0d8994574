"""What a restore of an Orbax checkpoint on a mesh costs, in chunks: counted from metadata, nothing of an array is read.

Orbax restores each distinct shard that a process has by itself. Every chunk that a shard touches is read and decoded
whole, once more for each further shard. How many bytes a chunk has encoded is not known before it is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from orbax_safetensors.cost.figures import OverRead
from orbax_safetensors.cost.restore import REPORTED_OVER_READ
from orbax_safetensors.devices.partition import Partition
from orbax_safetensors.devices.sharding import by_process
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.orbax_store import OrbaxCheckpoint, OrbaxLeaf
from orbax_safetensors.orbax_store.leaf import ARRAYS, STRING, num_chunks, touched_nbytes


@dataclass(frozen=True)
class OrbaxProcessCost(OverRead):
    """What a restore costs one process: decoded bytes of its distinct shards, and of the chunks that these touch."""

    needed_bytes: int
    read_bytes: int
    num_chunks: int


@dataclass(frozen=True)
class OrbaxLeafOverRead(OverRead):
    """A leaf whose chunks make processes read far more than they need; the figures are sums over all of them.

    With chunks of `shard_shape`, or with even parts of it, nothing but what is needed would be read.
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
      total_bytes, total_chunks: of all arrays, decoded.
      num_arrays: how many there are, scalars among them.
      file_bytes: of all files of the checkpoint, encoded as they are; None on an object store.
      processes: the cost for each process.
      over_reads: the leaves for which more than 1.1 times the needed bytes are read, those first that waste the most.
    """

    total_bytes: int
    total_chunks: int
    num_arrays: int
    file_bytes: int | None
    processes: tuple[OrbaxProcessCost, ...]
    over_reads: tuple[OrbaxLeafOverRead, ...]

    def to_json(self) -> str:
        """The plan as a JSON object with the names of the attributes."""
        plan: dict[str, Any] = asdict(self)
        described = zip(self.processes + self.over_reads, plan["processes"] + plan["over_reads"], strict=True)
        for cost, one in described:
            one["over_read"] = cost.over_read
        return json.dumps(plan)


def plan_orbax_restore(checkpoint: OrbaxCheckpoint, sharding: Partition, process_count: int) -> OrbaxRestorePlan:
    """Counts what each of `process_count` processes reads to restore all arrays of a checkpoint.

    The devices of the mesh are dealt to processes evenly and in order. Raises `TensorMismatchError` where the partition
    does not fit the arrays: each of its patterns has to count for one whose dimensions its axes divide.
    """
    leaves = {name: leaf for name, leaf in checkpoint.leaves.items() if leaf.kind != STRING}
    return plan_arrays(leaves, sharding, process_count, checkpoint.stored_bytes())


def plan_arrays(
    leaves: Mapping[str, OrbaxLeaf], sharding: Partition, process_count: int, file_bytes: int | None
) -> OrbaxRestorePlan:
    """`plan_orbax_restore` of arrays by name, which are in files of `file_bytes`."""
    sharding.check((name, leaf.shape) for name, leaf in leaves.items() if leaf.kind in ARRAYS)
    devices = prod(sharding.mesh.values())
    owners = [device * process_count // devices for device in range(devices)]
    known: dict[tuple[object, ...], tuple[OrbaxProcessCost, ...]] = {}
    totals = [(0, 0, 0)] * process_count
    over_reads = []
    for name, leaf in leaves.items():
        key = (leaf.shape, leaf.chunk_shape, leaf.dtype, sharding.spec(name, leaf.shape))
        if key not in known:
            known[key] = _costs(leaf, by_process(sharding.boxes(name, leaf.shape), owners, process_count))
        costs = [(cost.needed_bytes, cost.read_bytes, cost.num_chunks) for cost in known[key]]
        totals = [_sum(both) for both in zip(totals, costs, strict=True)]
        needed, read, chunks = _sum(costs)
        if read > REPORTED_OVER_READ * needed:
            shard = sharding.shard(name, leaf.shape)
            over_reads.append(OrbaxLeafOverRead(name, leaf.shape, leaf.chunk_shape, shard, needed, read, chunks))
    return OrbaxRestorePlan(
        total_bytes=sum(prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves.values()),
        total_chunks=sum(prod(leaf.grid) for leaf in leaves.values()),
        num_arrays=len(leaves),
        file_bytes=file_bytes,
        processes=tuple(OrbaxProcessCost(*figures) for figures in totals),
        over_reads=tuple(sorted(over_reads, key=lambda leaf: leaf.needed_bytes - leaf.read_bytes)),
    )


def _costs(leaf: OrbaxLeaf, boxes: Sequence[Sequence[Box]]) -> tuple[OrbaxProcessCost, ...]:
    """What processes with the devices' `boxes` read of one leaf."""
    out = []
    for own in boxes:
        distinct = dict.fromkeys(own)
        elements = sum(box.volume for box in distinct)
        out.append(
            OrbaxProcessCost(
                elements * leaf.dtype.itemsize,
                sum(touched_nbytes(box, leaf) for box in distinct),
                sum(num_chunks(box, leaf) for box in distinct),
            )
        )
    return tuple(out)


def _sum(figures: Sequence[tuple[int, int, int]]) -> tuple[int, int, int]:
    needed, read, chunks = zip(*figures, strict=True)
    return sum(needed), sum(read), sum(chunks)

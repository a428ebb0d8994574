"""What a restore costs every process: `RestorePlan`, counted from the leaves and from where their tensors lie."""

from __future__ import annotations

import json
from collections import Counter as Multiset
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import prod

import numpy as np

from orbax_safetensors.cost.alike import Slicing
from orbax_safetensors.cost.counter import Count, Counter, ShardedLeaf, summed
from orbax_safetensors.cost.figures import FileReads, OverRead
from orbax_safetensors.geometry.coalesce import MAX_REQUEST_BYTES
from orbax_safetensors.transfer.plan import Location

# From which ratio of bytes read to bytes needed on a leaf is reported; below it, another sharding would gain little.
REPORTED_OVER_READ = 1.1


@dataclass(frozen=True)
class ProcessCost(OverRead):
    """What a restore costs one process.

    Attributes:
      needed_bytes: bytes of the files that its shards hold, each counted once.
      read_bytes: bytes that it asks storage for.
      num_requests: storage operations.
      staging_bytes: memory that its threads copy through.
      destination_bytes: memory of its distinct shards. On CPU devices that is all there is, and devices with the same
        shard share it; an accelerator holds a copy for each device.
      files: the same figures for each file that it reads from.
    """

    needed_bytes: int
    read_bytes: int
    num_requests: int
    staging_bytes: int
    destination_bytes: int
    files: tuple[FileReads, ...]


@dataclass(frozen=True)
class ShardSize:
    """What one device holds of the whole tree: elements and bytes."""

    params: int
    nbytes: int


@dataclass(frozen=True)
class LeafOverRead(OverRead):
    """A leaf whose sharding makes processes read far more than they need; the figures are sums over all of them.

    What is read of a tensor that several leaves use counts for the first of them.
    """

    name: str
    needed_bytes: int
    read_bytes: int


@dataclass(frozen=True)
class ProcessReads:
    """What one way to restore costs one process.

    Attributes:
      read_bytes, num_requests: as in `ProcessCost`.
      received_bytes: what its devices receive from other devices, of this process or of another.
    """

    read_bytes: int
    num_requests: int
    received_bytes: int


@dataclass(frozen=True)
class Cooperation:
    """What several processes save when each reads a part of what they all need, and their devices exchange the parts.

    Attributes:
      num_arrays: how many leaves fewer bytes are read of in that way.
      direct, cooperative: what every process reads if none of these leaves are exchanged, and if all are.
    """

    num_arrays: int
    direct: tuple[ProcessReads, ...]
    cooperative: tuple[ProcessReads, ...]


@dataclass(frozen=True)
class RestorePlan:
    """What a restore will cost.

    Attributes:
      total_params: elements of the whole tree.
      total_bytes: bytes of the whole tree in the dtypes that it is restored to.
      num_arrays: leaves of the tree.
      largest_shard, smallest_shard: what the device with the most and the one with the least holds. They are equal
        if every dimension divides evenly. Devices are told apart by their place in the mesh; all leaves are taken
        to be sharded over the same.
      processes: the cost for each process.
      over_reads: the leaves for which more than 1.1 times the needed bytes are read, those first that waste the most.
      cooperation: what is read directly and what in cooperation; None with one process, and without
        `SafetensorsOptions(cooperative=True)`.
    """

    total_params: int
    total_bytes: int
    num_arrays: int
    largest_shard: ShardSize
    smallest_shard: ShardSize
    processes: tuple[ProcessCost, ...]
    over_reads: tuple[LeafOverRead, ...]
    cooperation: Cooperation | None = None

    def to_json(self) -> str:
        """The plan as a JSON object with the names of the attributes."""
        plan = asdict(self)
        described = zip(self.processes + self.over_reads, plan["processes"] + plan["over_reads"], strict=True)
        for cost, document in described:
            document["over_read"] = cost.over_read
        return json.dumps(plan)


def restore_plan(
    leaves: Sequence[ShardedLeaf],
    locate: Callable[[str], Location],
    files: Sequence[str],
    *,
    process_count: int,
    max_gap_bytes: int,
    threads: int,
    max_request_bytes: int = MAX_REQUEST_BYTES,
) -> RestorePlan:
    """Count what every process reads to fill its boxes of `leaves`.

    `locate` knows the stored tensors of their views; `files` has the names of the files.
    """
    counter = Counter(leaves, locate, len(files), max_gap_bytes=max_gap_bytes, max_request_bytes=max_request_bytes)
    counts = counter.counts(process_count)
    processes = list(zip(counts, map(counter.held, range(process_count)), strict=True))
    costs = {
        (count, held): _process_cost(count, files, threads, counter.held_bytes(held))
        for count, held in dict.fromkeys(processes)
    }
    needed_and_read = np.zeros((2, counter.tensors.groups), np.int64)  # of one tensor of every group, by all processes
    for count, times in Multiset(counts).items():
        needed_and_read += times * count.by_group
    largest, smallest = _shard_sizes(counter.slicings, counter.leaf_counts)
    return RestorePlan(
        total_params=sum(prod(leaf.shape) for leaf in leaves),
        total_bytes=sum(prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves),
        num_arrays=len(leaves),
        largest_shard=largest,
        smallest_shard=smallest,
        processes=tuple(costs[process] for process in processes),
        over_reads=_over_reads(leaves, counter, needed_and_read),
    )


def _process_cost(count: Count, files: Sequence[str], threads: int, destination_bytes: int) -> ProcessCost:
    return ProcessCost(
        needed_bytes=int(count.needed_bytes.sum()),
        read_bytes=int(count.moved_bytes.sum()),
        num_requests=int(count.num_requests.sum()),
        staging_bytes=threads * count.window_bytes,
        destination_bytes=destination_bytes,
        files=tuple(FileReads(files[number], *figures) for number, *figures in count.files()),
    )


def _over_reads(
    leaves: Sequence[ShardedLeaf], counter: Counter, needed_and_read: np.ndarray
) -> tuple[LeafOverRead, ...]:
    """Leaves for which far more is read than needed, given what is read of one tensor of each group."""
    tensors = counter.tensors
    needed, read = (summed(tensors.leaf, figures[tensors.group], len(leaves)) for figures in needed_and_read)
    wasted = read - needed
    worst = np.argsort(-wasted, kind="stable")
    worst = worst[read[worst] > REPORTED_OVER_READ * needed[worst]]
    return tuple(LeafOverRead(leaves[leaf].name, int(needed[leaf]), int(read[leaf])) for leaf in worst.tolist())


def _shard_sizes(slicings: Sequence[Slicing], counts: Sequence[int]) -> tuple[ShardSize, ShardSize]:
    """What the device with the most and the one with the least bytes hold of all leaves together."""
    devices = max((sum(map(len, slicing.boxes)) for slicing in slicings), default=0)
    params, nbytes = np.zeros((2, max(devices, 1)), np.int64)
    for slicing, count in zip(slicings, counts, strict=True):
        elements = np.array([box.volume for of_process in slicing.boxes for box in of_process], np.int64) * count
        params[: len(elements)] += elements
        nbytes[: len(elements)] += elements * slicing.dtype.itemsize
    most, least = int(np.argmax(nbytes)), int(np.argmin(nbytes))
    return (
        ShardSize(int(params[most]), int(nbytes[most])),
        ShardSize(int(params[least]), int(nbytes[least])),
    )

"""`RestorePlan`: what a restore costs every process, counted from the leaves and the locations of their tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from math import prod

import numpy as np

from orbax_safetensors.cost.alike import Slicing
from orbax_safetensors.cost.counter import Count, Counter, ShardedLeaf, summed
from orbax_safetensors.cost.figures import FileReads, OverRead
from orbax_safetensors.geometry.coalesce import MAX_REQUEST_BYTES
from orbax_safetensors.transfer.plan import Location

# Plans report leaves with a higher ratio of read to needed bytes; below it, another sharding would gain little.
REPORTED_OVER_READ = 1.1


@dataclass(frozen=True)
class ProcessCost(OverRead):
    """What a restore costs one process.

    Attributes:
      needed_bytes: bytes of the files that its shards hold, each counted once.
      read_bytes: bytes that its requests cover.
      num_requests: storage operations.
      staging_bytes: memory that its threads copy through.
      destination_bytes: memory of its distinct shards. CPU devices with the same shard share this memory; each
        accelerator holds a copy.
      files: the first three figures for each file that it reads.
    """

    needed_bytes: int
    read_bytes: int
    num_requests: int
    staging_bytes: int
    destination_bytes: int
    files: tuple[FileReads, ...]


@dataclass(frozen=True)
class ShardSize:
    """Elements and bytes of the whole tree that one device holds."""

    params: int
    nbytes: int


@dataclass(frozen=True)
class LeafOverRead(OverRead):
    """A leaf whose sharding makes processes read far more than they need; the figures are sums over all processes.

    If several leaves use a tensor, its bytes count for the first of them.
    """

    name: str
    needed_bytes: int
    read_bytes: int


@dataclass(frozen=True)
class ProcessReads:
    """What one process reads, and what its devices receive.

    Attributes:
      read_bytes, num_requests: as in `ProcessCost`.
      received_bytes: bytes that its devices receive from other devices, of this process or of another.
    """

    read_bytes: int
    num_requests: int
    received_bytes: int


@dataclass(frozen=True)
class Cooperation:
    """What several processes save if each reads a part of what they all need, and their devices exchange the parts.

    Attributes:
      num_arrays: the number of leaves of which processes then read fewer bytes.
      direct, cooperative: what every process reads if devices exchange none of these leaves, and if they exchange all.
    """

    num_arrays: int
    direct: tuple[ProcessReads, ...]
    cooperative: tuple[ProcessReads, ...]


@dataclass(frozen=True)
class RestorePlan:
    """What a restore will cost.

    Attributes:
      total_params: elements of the whole tree.
      total_bytes: bytes of the whole tree in the dtypes of the restore.
      num_arrays: leaves of the tree.
      largest_shard, smallest_shard: what the device with the most bytes and the one with the fewest holds. They are
        equal if every dimension divides evenly. Devices count by their place in the mesh, as if all leaves were
        sharded over the same mesh.
      processes: the cost for each process.
      over_reads: the leaves of which processes read more than 1.1 times the needed bytes, the most wasteful first.
      open_requests: what each process requests to open the checkpoint, before any of its `num_requests`: the listing,
        the index and the headers, or a record of these if the directory has one.
      open_requests_without_record: the same if there were no record.
      cooperation: what processes read directly and in cooperation; None with one process, and without
        `SafetensorsOptions(cooperative=True)`.
    """

    total_params: int
    total_bytes: int
    num_arrays: int
    largest_shard: ShardSize
    smallest_shard: ShardSize
    processes: tuple[ProcessCost, ...]
    over_reads: tuple[LeafOverRead, ...]
    open_requests: int = 0
    open_requests_without_record: int = 0
    cooperation: Cooperation | None = None

    def to_json(self) -> str:
        """Return the plan as a JSON object with the names of the attributes."""
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

    `locate` finds the stored tensors of their views; `files` has the names of the files.
    """
    counter = Counter(leaves, locate, len(files), max_gap_bytes=max_gap_bytes, max_request_bytes=max_request_bytes)
    counts = counter.counts(process_count)
    processes = list(zip(counts, map(counter.held, range(process_count)), strict=True))

    @cache  # most processes read equally much of every file
    def file_reads(figures: tuple[tuple[int, ...], ...]) -> tuple[FileReads, ...]:
        return tuple([FileReads(files[number], *of_file) for number, *of_file in figures])

    costs = {
        (count, held): _process_cost(count, file_reads(count.files()), threads, counter.held_bytes(held))
        for count, held in dict.fromkeys(processes)
    }
    largest, smallest = _shard_sizes(counter.slicings, counter.leaf_counts)
    sizes = [
        (prod(slicing.shape) * count, slicing.dtype.itemsize)
        for slicing, count in zip(counter.slicings, counter.leaf_counts, strict=True)
    ]
    return RestorePlan(
        total_params=sum(elements for elements, _ in sizes),
        total_bytes=sum(elements * itemsize for elements, itemsize in sizes),
        num_arrays=len(leaves),
        largest_shard=largest,
        smallest_shard=smallest,
        processes=tuple(costs[process] for process in processes),
        over_reads=_over_reads(leaves, counter),
    )


def _process_cost(count: Count, files: tuple[FileReads, ...], threads: int, destination_bytes: int) -> ProcessCost:
    return ProcessCost(
        needed_bytes=int(count.needed_bytes.sum()),
        read_bytes=int(count.moved_bytes.sum()),
        num_requests=int(count.num_requests.sum()),
        staging_bytes=threads * count.window_bytes,
        destination_bytes=destination_bytes,
        files=files,
    )


def _over_reads(leaves: Sequence[ShardedLeaf], counter: Counter) -> tuple[LeafOverRead, ...]:
    """Return the leaves of which far more is read than needed, after `counter` has counted."""
    tensors = counter.tensors
    needed, read = (summed(tensors.leaf, figures[tensors.group], len(leaves)) for figures in counter.by_group)
    wasted = read - needed
    worst = np.argsort(-wasted, kind="stable")
    worst = worst[read[worst] > REPORTED_OVER_READ * needed[worst]]
    figures = zip(worst.tolist(), needed[worst].tolist(), read[worst].tolist(), strict=True)
    return tuple([LeafOverRead(leaves[leaf].name, *of_leaf) for leaf, *of_leaf in figures])


def _shard_sizes(slicings: Sequence[Slicing], counts: Sequence[int]) -> tuple[ShardSize, ShardSize]:
    """Return what the device with the most bytes and the one with the fewest hold of all leaves together."""
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

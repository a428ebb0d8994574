"""What a restore will cost, for every process: the same plan as `plan.transfer_plan` makes, but only counted.

Tensors that a process reads alike are planned once and counted together (see `alike`), so that 45,000 tensors on 512
devices take a second, be they as many leaves or stacked in a few. No devices, no files and no threads are needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import TypeVar

import numpy as np

from orbax_safetensors.cost.alike import Layout, Tensors
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.coalesce import MAX_REQUEST_BYTES, Direct, Gather, touching
from orbax_safetensors.geometry.view import View
from orbax_safetensors.transfer.plan import Location, gather_at

# From which ratio of bytes read to bytes needed on a leaf is reported; below it, another sharding would gain little.
REPORTED_OVER_READ = 1.1

Boxes = tuple[tuple[Box, ...], ...]  # of each layout
_Number = TypeVar("_Number", int, np.ndarray)
_NOTHING = Gather((), (), needed_bytes=0, read_bytes=0, num_requests=0, window_bytes=0)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of the tree.

    Attributes:
      name: where it is in the tree.
      view: what is stored for it; what lies outside the view is zeros and costs no read.
      shape, dtype: of the array. Elements that are stored in another dtype are cast on the way.
      boxes: for every process those of its devices, in a list that leaves which are sharded alike share.
      readers: the processes that read their boxes; others receive them from these. None where all read.
      parts: for every process the boxes that it reads instead, where devices exchange what was read. They may reach
        over the end of the array. A list that leaves which are sharded alike share.
    """

    name: str
    view: View
    shape: tuple[int, ...]
    dtype: np.dtype
    boxes: Sequence[tuple[Box, ...]]
    readers: frozenset[int] | None = None
    parts: Sequence[tuple[Box, ...]] | None = None


@dataclass(frozen=True)
class FileCost:
    """What one process reads of one file. A request is one storage operation."""

    file: str
    needed_bytes: int
    read_bytes: int
    num_requests: int


@dataclass(frozen=True)
class PlannedFile:
    """A file that will be made, its name and its size."""

    file: str
    nbytes: int


@dataclass(frozen=True)
class ProcessCost:
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
    files: tuple[FileCost, ...]

    @property
    def over_read(self) -> float:
        """Bytes read for each byte needed; 1.0 where nothing is needed."""
        return self.read_bytes / self.needed_bytes if self.needed_bytes else 1.0


@dataclass(frozen=True)
class ShardSize:
    """What one device holds of the whole tree: elements and bytes."""

    params: int
    nbytes: int


@dataclass(frozen=True)
class LeafOverRead:
    """A leaf whose sharding makes processes read far more than they need; the figures are sums over all of them.

    What is read of a tensor that several leaves use counts for the first of them.
    """

    name: str
    needed_bytes: int
    read_bytes: int

    @property
    def over_read(self) -> float:
        """Bytes read for each byte needed."""
        return self.read_bytes / self.needed_bytes


@dataclass(frozen=True)
class WayCost:
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
      direct, cooperative: what every process reads where none of these leaves are exchanged, and where all are.
    """

    num_arrays: int
    direct: tuple[WayCost, ...]
    cooperative: tuple[WayCost, ...]


@dataclass(frozen=True)
class RestorePlan:
    """What a restore will cost.

    Attributes:
      total_params: elements of the whole tree.
      total_bytes: bytes of the whole tree in the dtypes that it is restored to.
      num_arrays: leaves of the tree.
      largest_shard, smallest_shard: what the device with the most and the one with the least holds. They are equal
        where every dimension divides evenly. Devices are told apart by their place in the mesh; all leaves are taken
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
        for cost, one in described:
            one["over_read"] = cost.over_read
        return json.dumps(plan)


def restore_plan(
    leaves: Sequence[Leaf],
    locate: Callable[[str], Location],
    files: Sequence[str],
    *,
    process_count: int,
    max_gap_bytes: int,
    threads: int,
    max_request_bytes: int = MAX_REQUEST_BYTES,
) -> RestorePlan:
    """Counts what every process reads to fill its boxes of `leaves`.

    `locate` knows the stored tensors of their views; `files` has the names of the files.
    """
    layouts, layout_of = layouts_of(leaves)
    leaf_counts = np.bincount(layout_of, minlength=len(layouts)).tolist()
    tensors = Tensors([leaf.view for leaf in leaves], layout_of, layouts, locate)
    counter = _Counter(tensors, files, max_gap_bytes, threads, max_request_bytes)
    alike: dict[tuple[Boxes, Boxes], list[int]] = {}  # processes by what they hold and read of each layout
    for process in range(process_count):
        held = tuple(layout.held(process) for layout in layouts)
        read = tuple(layout.read(process) for layout in layouts)
        alike.setdefault((held, read), []).append(process)
    costs: dict[int, ProcessCost] = {}
    needed_and_read = np.zeros((2, tensors.groups), np.int64)  # of one tensor of every group, by all processes
    for (held, read), processes in alike.items():
        destination_bytes = sum(
            count * layout.dtype.itemsize * sum(box.volume for box in own)
            for layout, count, own in zip(layouts, leaf_counts, held, strict=True)
        )
        cost, by_group = counter.count(read, destination_bytes)
        costs |= dict.fromkeys(processes, cost)
        needed_and_read += len(processes) * by_group
    largest, smallest = _shard_sizes(layouts, leaf_counts)
    return RestorePlan(
        total_params=sum(prod(leaf.shape) for leaf in leaves),
        total_bytes=sum(prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves),
        num_arrays=len(leaves),
        largest_shard=largest,
        smallest_shard=smallest,
        processes=tuple(costs[process] for process in range(process_count)),
        over_reads=_over_reads(leaves, tensors, needed_and_read),
    )


def layouts_of(leaves: Sequence[Leaf]) -> tuple[list[Layout], list[int]]:
    """The distinct layouts of leaves, and the position among them of each leaf's."""
    numbers: dict[Hashable, int] = {}
    layouts: list[Layout] = []
    layout_of = []
    for leaf in leaves:
        key = (leaf.view.shape, leaf.shape, leaf.dtype, id(leaf.boxes), leaf.readers, id(leaf.parts))
        layout_of.append(numbers.setdefault(key, len(layouts)))
        if layout_of[-1] == len(layouts):
            layouts.append(Layout(leaf.view.shape, leaf.shape, leaf.dtype, leaf.boxes, leaf.readers, leaf.parts))
    return layouts, layout_of


class _Counter:
    """Counts what processes read of `tensors`."""

    def __init__(
        self, tensors: Tensors, files: Sequence[str], max_gap_bytes: int, threads: int, max_request_bytes: int
    ) -> None:
        self._tensors = tensors
        self._files = files
        self._max_gap_bytes = max_gap_bytes
        self._threads = threads
        self._max_request_bytes = max_request_bytes
        # How many tensors of which group are in which file.
        pairs, self._pair_count = np.unique(tensors.group * len(files) + tensors.file, return_counts=True)
        self._pair_group, self._pair_file = np.divmod(pairs, max(len(files), 1))

    def count(self, boxes: Boxes, destination_bytes: int) -> tuple[ProcessCost, np.ndarray]:
        """The cost for a process that reads `boxes` of each layout, and needed and read bytes by group of tensors."""
        signature, wanted = self._tensors.signatures(boxes)
        gathers = [
            gather_at(one.location, one.copies, self._max_gap_bytes) if one.copies else _NOTHING for one in wanted
        ]
        ranges = [_joined(gathered.ranges, one.begin) for gathered, one in zip(gathers, wanted, strict=True)]
        needed = np.array([gathered.needed_bytes for gathered in gathers], np.int64)
        read = np.array([gathered.read_bytes for gathered in gathers], np.int64)
        requests = np.array([gathered.num_requests for gathered in gathers], np.int64)
        # Only a range that begins where its tensor does can follow one of another tensor.
        apart = all(begin > 0 for own in ranges for begin, _ in own)
        if apart:
            requests += np.array([sum(self._requests(end - begin) for begin, end in own) for own in ranges], np.int64)
        in_pair = signature[self._pair_group]
        by_file = [
            _summed(self._pair_file, figures[in_pair] * self._pair_count, len(self._files))
            for figures in (needed, read, requests)
        ]
        if not apart:
            by_file[2] += self._range_requests(signature, ranges)
        costs = zip(self._files, *(figures.tolist() for figures in by_file), strict=True)
        cost = ProcessCost(
            needed_bytes=int(by_file[0].sum()),
            read_bytes=int(by_file[1].sum()),
            num_requests=int(by_file[2].sum()),
            staging_bytes=self._threads * max((gathered.window_bytes for gathered in gathers), default=0),
            destination_bytes=destination_bytes,
            files=tuple(FileCost(*cost) for cost in costs if cost[-1]),
        )
        return cost, np.stack([needed[signature], read[signature]])

    def _range_requests(self, signature: np.ndarray, ranges: Sequence[list[tuple[int, int]]]) -> np.ndarray:
        """For each file the requests that ranges, given by signature, take once those that touch are joined."""
        counts = np.array([len(own) for own in ranges], np.int64)
        signature_of = signature[self._tensors.group]
        reading = np.flatnonzero(counts[signature_of])  # tensors that have ranges
        signature_of = signature_of[reading]
        per_tensor = counts[signature_of]
        # Ranges are numbered in the order of the tensors here, and in the order of the signatures in `ranges`.
        tensor = np.repeat(reading, per_tensor)
        first_here, first = np.cumsum(per_tensor) - per_tensor, np.cumsum(counts) - counts
        which = np.arange(len(tensor)) + np.repeat(first[signature_of] - first_here, per_tensor)
        begin, end = np.array([one for own in ranges for one in own], np.int64).reshape(-1, 2).T
        begin, end = self._tensors.begin[tensor] + begin[which], self._tensors.begin[tensor] + end[which]
        file = self._tensors.file[tensor]
        start = touching(file, begin, end)
        last = np.append(start[1:], len(begin))[: len(start)] - 1
        return _summed(file[start], self._requests(end[last] - begin[start]), len(self._files))

    def _requests(self, nbytes: _Number) -> _Number:
        """How many requests it takes to read ranges of `nbytes`."""
        return -(-nbytes // self._max_request_bytes)


def _joined(ranges: Sequence[Direct], origin: int) -> list[tuple[int, int]]:
    """Ranges of a tensor, which count from `origin`, as `(begin, end)`; those that touch are one."""
    out: list[tuple[int, int]] = []
    for reads in ranges:
        begin, end = origin + reads.runs.begin, origin + reads.runs.end
        if out and out[-1][1] == begin:
            begin, _ = out.pop()
        out.append((begin, end))
    return out


def _summed(index: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    """For each of `count` indices the sum of its values."""
    # In float64, which is exact up to 2**53: 9 PB.
    return np.bincount(index, weights=values, minlength=count).astype(np.int64)


def _over_reads(leaves: Sequence[Leaf], tensors: Tensors, needed_and_read: np.ndarray) -> tuple[LeafOverRead, ...]:
    """Leaves for which far more is read than needed, given what is read of one tensor of each group."""
    needed, read = (_summed(tensors.leaf, figures[tensors.group], len(leaves)) for figures in needed_and_read)
    wasted = read - needed
    worst = np.argsort(-wasted, kind="stable")
    worst = worst[read[worst] > REPORTED_OVER_READ * needed[worst]]
    return tuple(LeafOverRead(leaves[leaf].name, int(needed[leaf]), int(read[leaf])) for leaf in worst.tolist())


def _shard_sizes(layouts: Sequence[Layout], counts: Sequence[int]) -> tuple[ShardSize, ShardSize]:
    """What the device with the most and the one with the least bytes hold of all leaves together."""
    devices = max((sum(map(len, layout.boxes)) for layout in layouts), default=0)
    params, nbytes = np.zeros((2, max(devices, 1)), np.int64)
    for layout, count in zip(layouts, counts, strict=True):
        elements = np.array([box.volume for own in layout.boxes for box in own], np.int64) * count
        params[: len(elements)] += elements
        nbytes[: len(elements)] += elements * layout.dtype.itemsize
    most, least = int(np.argmax(nbytes)), int(np.argmin(nbytes))
    return (
        ShardSize(int(params[most]), int(nbytes[most])),
        ShardSize(int(params[least]), int(nbytes[least])),
    )

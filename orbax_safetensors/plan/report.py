"""What a restore will cost, for every process: the same plan as `plan.transfer_plan` makes, but only counted.

Leaves of one geometry are planned once and counted together, so that 45,000 tensors on 512 devices take a second. No
devices, no files and no threads are needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from math import prod

import numpy as np

from orbax_safetensors.plan.coalesce import MAX_REQUEST_BYTES, Direct, Gather, gather, touching
from orbax_safetensors.plan.strided import Copy
from orbax_safetensors.plan.view import Box, View


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of the tree.

    Attributes:
      view: what is stored for it; what lies outside the view is zeros and costs no read.
      shape, dtype: of the array.
      boxes: for every process those of its devices, in a list that leaves which are sharded alike share.
      readers: the processes that read their boxes; others receive them from these. None where all read.
    """

    view: View
    shape: tuple[int, ...]
    dtype: np.dtype
    boxes: Sequence[tuple[Box, ...]]
    readers: frozenset[int] | None = None


@dataclass(frozen=True)
class FileCost:
    """What one process reads of one file. A request is one storage operation."""

    file: str
    needed_bytes: int
    read_bytes: int
    num_requests: int


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
    """

    total_params: int
    total_bytes: int
    num_arrays: int
    largest_shard: ShardSize
    smallest_shard: ShardSize
    processes: tuple[ProcessCost, ...]

    def to_json(self) -> str:
        """The plan as a JSON object with the names of the attributes."""
        plan = asdict(self)
        for cost, process in zip(self.processes, plan["processes"], strict=True):
            process["over_read"] = cost.over_read
        return json.dumps(plan)


def restore_plan(
    leaves: Sequence[Leaf],
    locate: Callable[[str], tuple[int, int]],
    files: Sequence[str],
    *,
    process_count: int,
    max_gap_bytes: int,
    threads: int,
) -> RestorePlan:
    """Counts what every process reads to fill its boxes of `leaves`.

    `locate` gives the number of a tensor's file, a position in `files`, and the file offset of its first byte.
    """
    kinds: dict[Hashable, int] = {}
    kind_of = [kinds.setdefault(_geometry(leaf), len(kinds)) for leaf in leaves]
    example: dict[int, Leaf] = {}
    for leaf, kind in zip(leaves, kind_of, strict=True):
        example.setdefault(kind, leaf)
    leaf_counts = np.bincount(kind_of, minlength=len(kinds)).tolist()
    tensors = _Tensors(leaves, kind_of, locate, len(files))

    costs: dict[Hashable, ProcessCost] = {}
    processes = []
    for process in range(process_count):
        held = tuple(tuple(dict.fromkeys(leaf.boxes[process])) for leaf in example.values())
        read = tuple(
            boxes if leaf.readers is None or process in leaf.readers else ()
            for leaf, boxes in zip(example.values(), held, strict=True)
        )
        if (held, read) not in costs:
            costs[held, read] = _process_cost(
                tuple(example.values()), leaf_counts, held, read, tensors, files, max_gap_bytes, threads
            )
        processes.append(costs[held, read])
    largest, smallest = _shard_sizes(tuple(example.values()), leaf_counts)
    return RestorePlan(
        total_params=sum(prod(leaf.shape) for leaf in leaves),
        total_bytes=sum(prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves),
        num_arrays=len(leaves),
        largest_shard=largest,
        smallest_shard=smallest,
        processes=tuple(processes),
    )


def _geometry(leaf: Leaf) -> Hashable:
    """Equal for leaves whose plans differ only in which tensors they read."""
    number = {name: at for at, name in enumerate(leaf.view.tensors)}
    pieces = tuple((number[piece.tensor], piece.start, piece.offset, piece.dims) for piece in leaf.view.pieces)
    return pieces, leaf.view.shape, leaf.view.dtype, leaf.shape, leaf.dtype, id(leaf.boxes), leaf.readers


class _Tensors:
    """The stored tensors, numbered in file order, and those that are used alike together."""

    def __init__(
        self, leaves: Sequence[Leaf], kind_of: Sequence[int], locate: Callable[[str], tuple[int, int]], files: int
    ) -> None:
        uses: dict[str, list[tuple[int, int]]] = {}  # for every tensor the kinds of its leaves, and its place in them
        itemsizes: dict[str, int] = {}
        for leaf, kind in zip(leaves, kind_of, strict=True):
            for place, name in enumerate(leaf.view.tensors):
                uses.setdefault(name, []).append((kind, place))
                itemsizes[name] = leaf.view.dtype.itemsize
        ordered = sorted((*locate(name), name) for name in uses)
        self.file = np.array([file for file, _, _ in ordered], np.int64)
        self.begin = np.array([begin for _, begin, _ in ordered], np.int64)
        alike: dict[tuple[int, tuple[tuple[int, int], ...]], list[int]] = {}
        for number, (_, _, name) in enumerate(ordered):
            alike.setdefault((itemsizes[name], tuple(uses[name])), []).append(number)
        # (itemsize, uses, numbers of the tensors, how many of them are in each file)
        self.alike = [
            (itemsize, used, np.array(numbers), np.bincount(self.file[numbers], minlength=files))
            for (itemsize, used), numbers in alike.items()
        ]


def _process_cost(
    leaves: Sequence[Leaf],
    counts: Sequence[int],
    held: Sequence[tuple[Box, ...]],
    read_boxes: Sequence[tuple[Box, ...]],
    tensors: _Tensors,
    files: Sequence[str],
    max_gap_bytes: int,
    threads: int,
) -> ProcessCost:
    """The cost for a process that holds and reads boxes of each kind of leaf, of which there are `counts`."""
    copies = [_copies(leaf, own) for leaf, own in zip(leaves, read_boxes, strict=True)]
    needed, read, requests = (np.zeros(len(files), np.int64) for _ in range(3))
    window_bytes = 0
    ranges: list[tuple[np.ndarray, tuple[Direct, ...]]] = []
    for itemsize, uses, numbers, in_file in tensors.alike:
        wanted = tuple(copy for kind, place in uses for copy in copies[kind].get(place, ()))
        gathered: Gather = gather(wanted, itemsize, max_gap_bytes)
        needed += in_file * gathered.needed_bytes
        read += in_file * gathered.read_bytes
        requests += in_file * gathered.num_requests
        window_bytes = max(window_bytes, gathered.window_bytes)
        if gathered.ranges:
            ranges.append((numbers, gathered.ranges))
    requests += _range_requests(tensors, ranges, len(files))
    destination_bytes = sum(
        count * leaf.dtype.itemsize * sum(prod(stop - start for start, stop in box) for box in own)
        for leaf, count, own in zip(leaves, counts, held, strict=True)
    )
    costs = (
        FileCost(file, *figures)
        for file, *figures in zip(files, needed.tolist(), read.tolist(), requests.tolist(), strict=True)
    )
    return ProcessCost(
        needed_bytes=int(needed.sum()),
        read_bytes=int(read.sum()),
        num_requests=int(requests.sum()),
        staging_bytes=threads * window_bytes,
        destination_bytes=destination_bytes,
        files=tuple(cost for cost in costs if cost.num_requests),
    )


def _copies(leaf: Leaf, boxes: tuple[Box, ...]) -> dict[int, tuple[tuple[Copy, bool], ...]]:
    """By the place of a tensor in the leaf's view, the copies that fill `boxes` from it."""
    place = {name: at for at, name in enumerate(leaf.view.tensors)}
    out: dict[int, list[tuple[Copy, bool]]] = {}
    for box in boxes:
        for name, copy, _ in leaf.view.copies(leaf.view.clipped(box), [stop - start for start, stop in box]):
            out.setdefault(place[name], []).append((copy, leaf.dtype == leaf.view.dtype))
    return {at: tuple(copies) for at, copies in out.items()}


def _range_requests(
    tensors: _Tensors, ranges: Sequence[tuple[np.ndarray, tuple[Direct, ...]]], files: int
) -> np.ndarray:
    """For each file the requests that plain ranges take once those that touch are joined."""
    per_tensor = np.zeros(len(tensors.begin), np.int64)
    for numbers, own in ranges:
        per_tensor[numbers] = len(own)
    first = np.cumsum(per_tensor) - per_tensor
    begin, end = np.zeros((2, int(per_tensor.sum())), np.int64)
    for numbers, own in ranges:
        for at, reads in enumerate(own):
            begin[first[numbers] + at] = tensors.begin[numbers] + reads.runs.begin
            end[first[numbers] + at] = tensors.begin[numbers] + reads.runs.end
    file = np.repeat(tensors.file, per_tensor)
    start = touching(file, begin, end)
    last = np.append(start[1:], len(begin)) - 1
    requests = -(-(end[last] - begin[start]) // MAX_REQUEST_BYTES) if start.size else np.zeros(0, np.int64)
    return np.bincount(file[start], weights=requests, minlength=files).astype(np.int64)


def _shard_sizes(leaves: Sequence[Leaf], counts: Sequence[int]) -> tuple[ShardSize, ShardSize]:
    """What the device with the most and the one with the least bytes hold of all leaves together."""
    devices = max((sum(len(own) for own in leaf.boxes) for leaf in leaves), default=0)
    params, nbytes = np.zeros((2, max(devices, 1)), np.int64)
    for leaf, count in zip(leaves, counts, strict=True):
        elements = [prod(stop - start for start, stop in box) for own in leaf.boxes for box in own]
        params[: len(elements)] += np.array(elements, np.int64) * count
        nbytes[: len(elements)] += np.array(elements, np.int64) * count * leaf.dtype.itemsize
    most, least = int(np.argmax(nbytes)), int(np.argmin(nbytes))
    return (
        ShardSize(int(params[most]), int(nbytes[most])),
        ShardSize(int(params[least]), int(nbytes[least])),
    )

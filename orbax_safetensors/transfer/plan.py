"""What one process moves between files and memory: plain data, computed before the first byte moves.

A plan has no direction. Its requests are reads that fill memory for a restore, and writes from memory for a save.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np

from orbax_safetensors.format.layout import Layout
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.coalesce import (
    MAX_REQUEST_BYTES,
    Direct,
    ReadPlan,
    Staged,
    plan_encoded_reads,
    plan_reads,
    touching,
)
from orbax_safetensors.geometry.elementwise import Ops
from orbax_safetensors.geometry.encoding import Encoding
from orbax_safetensors.geometry.pieces import Cut
from orbax_safetensors.geometry.strided import Copy
from orbax_safetensors.geometry.view import View


class Location(NamedTuple):
    """Where the elements of a stored tensor are.

    Attributes:
      file: the number of the file.
      begin: the file offset of the tensor's first byte.
      dtype: of an element; float32 if the tensor is encoded.
      encoding: how the elements are encoded, if they are; `file` and `begin` are then those of the codes.
      parameters: file and offset of each of the encoding's parameters.
    """

    file: int
    begin: int
    dtype: np.dtype
    encoding: Encoding | None = None
    parameters: tuple[tuple[int, int], ...] = ()


def locations(layout: Layout) -> dict[str, Location]:
    """Return the location of each tensor of a layout."""
    return {
        name: Location(number, header.data_start + entry.begin, entry.dtype.in_memory)
        for number, (_, header) in enumerate(layout.files)
        for name, entry in header.tensors.items()
    }


class Block(NamedTuple):
    """Memory at one end of a transfer: a dense row-major array whose leading corner is `box` of `view`.

    `shape` is that of the box, or larger; elements outside the box do not take part. If `dtype` is not the stored
    dtype, elements are cast; if the block is `lossless`, a cast into it that loses a value is an error.
    """

    view: View
    box: Box
    shape: tuple[int, ...]
    dtype: np.dtype
    lossless: bool = False

    @property
    def nbytes(self) -> int:
        """Size of the memory."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Extent:
    """One request for file bytes `[begin, end)`, which lie at each `(block, offset, nbytes)`, one after the other."""

    file: int
    begin: int
    end: int
    parts: tuple[tuple[int, int, int], ...]


class Destination(NamedTuple):
    """The block that a restore fills with some copies, by number, and the operations on the elements on their way.

    A copy that goes to element 3 of its destination goes to element `begin + 3` of the block. The copies of two layers
    of a stack, which differ only in where they go, are so the same copies with two destinations. A save moves from
    here to the file.
    """

    block: int
    ops: Ops
    begin: int


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of a tensor that move in windows. `destinations` has one for each buffer of `access`."""

    tensor: str
    location: Location
    access: Direct | Staged
    destinations: tuple[Destination, ...]

    @property
    def file(self) -> int:
        """The number of the tensor's file."""
        return self.location.file


class Constant(NamedTuple):
    """Elements of a block that no tensor stores: where `copy` goes, the result of `destination.ops` on zero."""

    destination: Destination
    copy: Copy


class Traffic(NamedTuple):
    """What moves of one tensor, or of all that belongs to one file or block, by number.

    `needed_bytes` are the bytes that some block holds, each counted once; `moved_bytes` are the bytes of all requests,
    `num_requests` in number. Scales and the like count for the file of the codes.
    """

    number: int
    needed_bytes: int
    moved_bytes: int
    num_requests: int


class TensorReads(NamedTuple):
    """The requests for one stored tensor, which figures count: for the file with this number, and for this block.

    `plan` is relative to the tensor, whichever file and blocks it is for. The block is the first that holds some of the
    tensor. Requests for `plan.ranges` are not counted here, as they may be joined with those of a neighbouring tensor:
    they are `TransferPlan.extents`.
    """

    file: int
    block: int
    plan: ReadPlan


@dataclass(frozen=True)
class TransferPlan:
    """Everything that one process moves between files and its blocks, which also hold `constants`.

    `tensors` has what moves of each tensor, in the order of the files.
    """

    extents: tuple[Extent, ...]
    parts: tuple[Part, ...]
    constants: tuple[Constant, ...]
    tensors: tuple[TensorReads, ...]

    @property
    def needed_bytes(self) -> int:
        """Of all files."""
        return sum([moved.plan.needed_bytes for moved in self.tensors])

    @cached_property
    def moved_bytes(self) -> int:
        """Of all files."""
        return sum([moved.plan.read_bytes for moved in self.tensors])

    @property
    def num_requests(self) -> int:
        """Of all files."""
        return len(self.extents) + sum([moved.plan.num_requests for moved in self.tensors])

    @cached_property
    def window_bytes(self) -> int:
        """The most memory that a staged window takes."""
        return max([moved.plan.window_bytes for moved in self.tensors], default=0)

    @cached_property
    def files(self) -> tuple[Traffic, ...]:
        """The traffic of each file that takes part, in order."""
        return self._traffic(lambda moved: moved.file, lambda extent: extent.file)

    def blocks(self) -> tuple[Traffic, ...]:
        """Return the traffic of blocks, in order. What moves for several of them counts for one of them."""
        return self._traffic(lambda moved: moved.block, lambda extent: extent.parts[0][0])

    def _traffic(
        self, of_tensor: Callable[[TensorReads], int], of_extent: Callable[[Extent], int]
    ) -> tuple[Traffic, ...]:
        requests = Counter(map(of_extent, self.extents))
        needed, read = Counter[int](), Counter[int]()
        for moved in self.tensors:
            number = of_tensor(moved)
            needed[number] += moved.plan.needed_bytes
            read[number] += moved.plan.read_bytes
            requests[number] += moved.plan.num_requests
        numbers = sorted(read.keys() | requests.keys())
        return tuple([Traffic(number, needed[number], read[number], requests[number]) for number in numbers])


def transfer_plan(
    blocks: Sequence[Block],
    locate: Callable[[str], Location],
    max_gap_bytes: int,
    max_request_bytes: int = MAX_REQUEST_BYTES,
) -> TransferPlan:
    """Plan the transfer of `blocks`.

    `locate` returns where the stored tensors of their views are. With `max_gap_bytes` above 0, requests include some
    bytes that no block holds; only reads may do that. Bytes that are not staged move in requests of at most
    `max_request_bytes`.
    """
    uses: dict[str, list[tuple[int, Cut]]] = {}  # of every tensor, by the number of the block
    constants = []
    for number, block in enumerate(blocks):
        for cut in block.view.cuts(block.box, block.shape):
            if cut.tensor is None:
                constants.append(Constant(Destination(number, cut.ops, cut.begin), cut.copy))
            else:
                uses.setdefault(cut.tensor, []).append((number, cut))
    located = in_file_order(uses, locate)
    ranges: list[_DirectRange] = []
    parts: list[Part] = []
    tensors: list[TensorReads] = []
    for location, name in located:
        users = uses[name]
        # Lists first: a generator costs as much as all other work for a small tensor.
        copies = tuple([(cut.copy, same_bits(cut.ops, location.dtype, blocks[number].dtype)) for number, cut in users])
        planned = plan_reads_at(location, copies, max_gap_bytes)
        tensors.append(TensorReads(location.file, users[0][0], planned))
        for direct in planned.ranges:
            number, cut = users[direct.buffer]
            offset = cut.begin * location.dtype.itemsize + direct.offset
            runs = direct.runs
            ranges.append(_DirectRange(location.file, location.begin + runs.begin, runs.length, number, offset))
        if planned.windowed:
            destinations = tuple([Destination(number, cut.ops, cut.begin) for number, cut in users])
            parts += [Part(name, location, reads, destinations) for reads in planned.windowed]
    return TransferPlan(tuple(_extents(ranges, max_request_bytes)), tuple(parts), tuple(constants), tuple(tensors))


def in_file_order(names: Iterable[str], locate: Callable[[str], Location]) -> list[tuple[Location, str]]:
    """Return tensors with their locations, in the order of the files and of the tensors in them."""
    located = sorted([(at.file, at.begin, name, at) for name in names for at in [locate(name)]])
    return [(at, name) for _, _, name, at in located]


def plan_reads_at(location: Location, copies: tuple[tuple[Copy, bool], ...], max_gap_bytes: int) -> ReadPlan:
    """Plan the reading of one tensor, encoded or not; see `coalesce.plan_reads`."""
    if location.encoding is None:
        return plan_reads(copies, location.dtype.itemsize, max_gap_bytes)
    return plan_encoded_reads(copies, location.encoding, max_gap_bytes)


def same_bits(ops: Ops, stored: np.dtype, held: np.dtype) -> bool:
    """Return whether elements move unchanged between the dtypes `stored` and `held`."""
    return not ops and stored == held


class _DirectRange(NamedTuple):
    """Bytes of a file, and the block and offset in it where they lie."""

    file: int
    begin: int
    nbytes: int
    block: int
    offset: int


def _extents(ranges: Sequence[_DirectRange], max_request_bytes: int) -> Iterator[Extent]:
    """Yield ranges, which are in file order, as requests: join those that touch, and cut at `max_request_bytes`."""
    files, begin, nbytes, _, _ = np.array(ranges, np.int64).reshape(-1, 5).T
    end = begin + nbytes
    for start, stop in pairwise([*touching(files, begin, end), len(ranges)]):
        at, group_end = int(begin[start]), int(end[stop - 1])
        number, done = int(start), 0  # the current range, and how much of it earlier parts have taken
        while at < group_end:
            cut = min(at + max_request_bytes, group_end)
            parts, here = [], at
            while here < cut:
                moved = ranges[number]
                taken = min(moved.nbytes - done, cut - here)
                parts.append((moved.block, moved.offset + done, taken))
                here, done = here + taken, done + taken
                if done == moved.nbytes:
                    number, done = number + 1, 0
            yield Extent(int(files[start]), at, cut, tuple(parts))
            at = cut

"""What one process moves between files and memory: plain data, computed before the first byte moves.

A plan has no direction. Its requests are reads that fill memory for a restore, and writes from memory for a save.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise
from math import prod
from typing import NamedTuple

import numpy as np

from orbax_safetensors.format.dtypes import held
from orbax_safetensors.format.layout import Layout
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.coalesce import (
    MAX_REQUEST_BYTES,
    Direct,
    Gather,
    Staged,
    gather,
    gather_encoded,
    touching,
)
from orbax_safetensors.geometry.elementwise import Ops
from orbax_safetensors.geometry.encoding import Encoding
from orbax_safetensors.geometry.strided import Copy, split
from orbax_safetensors.geometry.view import View


class Location(NamedTuple):
    """Where the elements of a stored tensor are.

    Attributes:
      file: the number of the file.
      begin: the file offset of the tensor's first byte.
      dtype: of an element; float32 if the tensor is encoded.
      encoding: how the elements are encoded, if they are; `file` and `begin` are then those of the codes.
      scales: file and offset of the encoding's scales.
    """

    file: int
    begin: int
    dtype: np.dtype
    encoding: Encoding | None = None
    scales: tuple[int, int] = (0, 0)


def locations(layout: Layout) -> dict[str, Location]:
    """Return the location of each tensor of a layout."""
    return {
        name: Location(number, header.data_start + entry.begin, held(entry.dtype, entry.shape)[1])
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


class End(NamedTuple):
    """The number of the block at one end of a copy, and the operations on the elements on their way there."""

    block: int
    ops: Ops


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of a tensor that move in windows. `ends` has the end for each buffer of `access`."""

    tensor: str
    location: Location
    access: Direct | Staged
    ends: tuple[End, ...]

    @property
    def file(self) -> int:
        """The number of the tensor's file."""
        return self.location.file


class Constant(NamedTuple):
    """Elements of a block that no tensor stores: at the destination of `copy`, the result of `end.ops` on zero."""

    end: End
    copy: Copy


class FileTraffic(NamedTuple):
    """What moves from or to one file, by number.

    `needed_bytes` are the bytes that some block holds, each counted once; `moved_bytes` are the bytes of all requests,
    `num_requests` in number. Scales count for the file of the tensor that they decode.
    """

    file: int
    needed_bytes: int
    moved_bytes: int
    num_requests: int


@dataclass(frozen=True)
class TransferPlan:
    """Everything that one process moves between files and its blocks, which also hold `constants`.

    `files` has the traffic of each file that takes part, in order; `window_bytes` is the most memory that a staged
    window takes.
    """

    extents: tuple[Extent, ...]
    parts: tuple[Part, ...]
    constants: tuple[Constant, ...]
    files: tuple[FileTraffic, ...]
    window_bytes: int

    @property
    def needed_bytes(self) -> int:
        """Of all files."""
        return sum(file.needed_bytes for file in self.files)

    @property
    def moved_bytes(self) -> int:
        """Of all files."""
        return sum(file.moved_bytes for file in self.files)

    @property
    def num_requests(self) -> int:
        """Of all files."""
        return sum(file.num_requests for file in self.files)


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
    uses: dict[str, list[tuple[int, Ops, Copy]]] = {}  # of every tensor: block, operations, copy
    constants = []
    for number, block in enumerate(blocks):
        for name, copy, ops in block.view.copies(block.box, block.shape):
            if name is None:
                constants.append(Constant(End(number, ops), copy))
            else:
                uses.setdefault(name, []).append((number, ops, copy))
    located = in_file_order(uses, locate)
    ranges: list[tuple[int, int, Direct, int]] = []  # file, offset in it, range, block
    parts: list[Part] = []
    gathers: list[Gather] = []
    for location, name in located:
        users = uses[name]
        # Lists first: a generator costs as much as all other work for a small tensor.
        copies = tuple([(copy, same_bits(ops, location.dtype, blocks[number].dtype)) for number, ops, copy in users])
        gathered = gather_at(location, copies, max_gap_bytes)
        gathers.append(gathered)
        for reads in gathered.ranges:
            ranges.append((location.file, location.begin + reads.runs.begin, reads, users[reads.buffer][0]))
        if gathered.windowed:
            ends = tuple([End(number, ops) for number, ops, _ in users])
            parts += [Part(name, location, reads, ends) for reads in gathered.windowed]
    extents = tuple(_extents(ranges, max_request_bytes))
    joined = Counter(extent.file for extent in extents)
    files = []
    for number, of_file in groupby(zip(located, gathers, strict=True), key=lambda pair: pair[0][0].file):
        of_tensors = [gathered for _, gathered in of_file]
        files.append(
            FileTraffic(
                number,
                sum(gathered.needed_bytes for gathered in of_tensors),
                sum(gathered.read_bytes for gathered in of_tensors),
                joined[number] + sum(gathered.num_requests for gathered in of_tensors),
            )
        )
    return TransferPlan(
        extents,
        tuple(parts),
        tuple(constants),
        tuple(files),
        window_bytes=max((gathered.window_bytes for gathered in gathers), default=0),
    )


class Rows(NamedTuple):
    """Where a file has all elements of a block, in their order: in `[begin, end)`, with `strides` in bytes."""

    file: int
    begin: int
    end: int
    strides: tuple[int, ...]


def rows_of(block: Block, locate: Callable[[str], Location]) -> Rows | None:
    """Return where a block lies in a file, None if it does not, and would have to be put together, reordered or cast.

    Its innermost elements lie side by side, as in a row of a matrix.
    """
    copies = block.view.copies(block.box, block.shape)
    if len(copies) != 1:
        return None
    ((name, copy, ops),) = copies
    if name is None:
        return None
    location = locate(name)
    if location.encoding is not None or not same_bits(ops, location.dtype, block.dtype):
        return None
    itemsize = block.dtype.itemsize
    rows = _rows(copy, block.shape)
    begin = location.begin + copy.source * itemsize
    if rows is None or begin % block.dtype.alignment:
        return None
    elements, strides = rows
    return Rows(location.file, begin, begin + elements * itemsize, tuple([stride * itemsize for stride in strides]))


@lru_cache(maxsize=2**12)  # layers of a model have the same
def _rows(copy: Copy, shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]] | None:
    """Return from the first to behind the last source element how far it is, and the stride of each dimension.

    None if the copy does not fill an array of `shape` in the order of its source, with the innermost stride 1.
    """
    if copy.elements != prod(shape):  # the rest is padding
        return None
    steps = [stride for _, stride, _ in copy.modes]
    dims = split(tuple([(size, stride) for size, stride, _ in copy.modes]), shape)
    if dims is None or any(len(modes) > 1 for modes in dims) or steps != sorted(steps, reverse=True):
        return None
    if steps and steps[-1] != 1:
        return None
    last = sum((size - 1) * stride for size, stride, _ in copy.modes)
    return last + 1, tuple([modes[0][1] if modes else 1 for modes in dims])


def in_file_order(names: Iterable[str], locate: Callable[[str], Location]) -> list[tuple[Location, str]]:
    """Return tensors with their locations, in the order of the files and of the tensors in them."""
    located = sorted([(at.file, at.begin, name, at) for name in names for at in [locate(name)]])
    return [(at, name) for _, _, name, at in located]


def gather_at(location: Location, copies: tuple[tuple[Copy, bool], ...], max_gap_bytes: int) -> Gather:
    """Plan the reading of one tensor, encoded or not; see `coalesce.gather`."""
    if location.encoding is None:
        return gather(copies, location.dtype.itemsize, max_gap_bytes)
    return gather_encoded(copies, location.encoding, max_gap_bytes)


def same_bits(ops: Ops, stored: np.dtype, held: np.dtype) -> bool:
    """Return whether elements move unchanged between the dtypes `stored` and `held`."""
    return not ops and stored == held


def _extents(ranges: Sequence[tuple[int, int, Direct, int]], max_request_bytes: int) -> Iterator[Extent]:
    """Yield ranges, which are in file order, as requests: join those that touch, and cut at `max_request_bytes`."""
    begin = np.array([begin for _, begin, _, _ in ranges], np.int64)
    end = begin + np.array([reads.runs.length for _, _, reads, _ in ranges], np.int64)
    files = np.array([file for file, _, _, _ in ranges], np.int64)
    for start, stop in pairwise([*touching(files, begin, end), len(ranges)]):
        at, group_end = int(begin[start]), int(end[stop - 1])
        number, done = int(start), 0  # the current range, and how much of it earlier parts have taken
        while at < group_end:
            cut = min(at + max_request_bytes, group_end)
            parts, here = [], at
            while here < cut:
                _, _, reads, block = ranges[number]
                nbytes = min(reads.runs.length - done, cut - here)
                parts.append((block, reads.offset + done, nbytes))
                here, done = here + nbytes, done + nbytes
                if done == reads.runs.length:
                    number, done = number + 1, 0
            yield Extent(int(files[start]), at, cut, tuple(parts))
            at = cut

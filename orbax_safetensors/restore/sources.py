"""Where the bytes of a batch come from: a mapping of a local file, the answer of a server, or reads into memory.

A mapping and an answer go to the device as they are. Everything else is read into memory of a pool, which is used again
once the device has it, or into memory that arrays on CPU devices keep.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from math import prod
from typing import NamedTuple

import jax
import numpy as np

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.geometry.strided import Copy, split
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.restore.batches import Batch, Fill
from orbax_safetensors.restore.in_flight import InFlight
from orbax_safetensors.restore.leases import Leases, Range
from orbax_safetensors.storage.leased_mapping import LeasedMapping
from orbax_safetensors.storage.memory import ALIGNMENT, allocate
from orbax_safetensors.storage.process_memory import no_collection
from orbax_safetensors.storage.store import Pace
from orbax_safetensors.transfer.plan import Block, Location, TransferPlan, same_bits
from orbax_safetensors.transfer.reader import Reader, direct_offsets
from orbax_safetensors.transfer.sums import Sums

# What a thread brings in of a mapping at a time. Two threads take a disk's and a page cache's full speed with that.
_MAPPED_BYTES = 16 * 2**20
# Shorter rows are not handed to a runtime, which copies them one by one.
_ROW_BYTES = 64
# Of the bytes that would be brought in. If fewer are, those that are needed are read, each run of them by itself.
_LEAST_NEEDED = 0.9


class Rows(NamedTuple):
    """Where a file has all elements of a block, in their order: in `[begin, end)`, with `strides` in bytes."""

    file: int
    begin: int
    end: int
    strides: tuple[int, ...]


class Sources:
    """The files of a restore, open or leased, which tasks fill batches from.

    `num_reads` and `needed_bytes` are those of the tasks so far.
    """

    def __init__(
        self, checkpoint: Checkpoint, options: SafetensorsOptions, pace: Pace, sums: Sums | None, in_flight: InFlight
    ) -> None:
        """Open no file yet; `sums` get what is read."""
        self.num_reads = self.needed_bytes = 0
        self.reader = Reader(checkpoint.open_file, pace.requests, sums)
        self.leases = Leases()
        self._checkpoint, self._options, self._pace, self._in_flight = checkpoint, options, pace, in_flight
        self._mappings: dict[int, memoryview] = {}  # of files that arrays alias, by number
        self._staying_bytes = 0, 1  # that were read before, and that are to be read

    def close(self) -> None:
        """End all leases, and close all files."""
        with contextlib.closing(self.reader):
            self.leases.close()

    @property
    def share(self) -> float:
        """Return the share of the bytes that stay in host memory which has been read."""
        before, nbytes = self._staying_bytes
        return min((self.reader.counters.nbytes - before) / max(nbytes, 1), 1)

    def tasks(self, batches: Iterable[Batch]) -> Iterator[Callable[[], object]]:
        """Yield what threads have to call to fill `batches`, in order. Waits until a batch may be in flight."""
        for batch in batches:
            make = self._leaving if batch.leaves_host else self._staying
            yield from batch.filled.of(make(batch))

    def _staying(self, batch: Batch) -> Iterator[Callable[[], object]]:
        with no_collection():
            if self._options.alias:
                self._alias(batch)
            left, blocks, plan = self._planned(batch)
            memory = allocate([block.nbytes for block in blocks], direct_offsets(plan, self._checkpoint.store))
            self._place(batch, left, memory)
        self._staying_bytes = self.reader.counters.nbytes, plan.moved_bytes
        yield from self.reader.tasks(plan, blocks, memory)

    def _leaving(self, batch: Batch) -> Iterator[Callable[[], object]]:
        if wanted := self.leases.wanted:
            self.leases.refuse(wanted)
            self._in_flight.drain()  # which lets them go
        leases: dict[int, LeasedMapping] = {}
        with no_collection():
            ranges = self._map(batch, leases)
            answers = self._answered(batch)
            answered = {number for number, _ in answers}
            left, blocks, plan = self._planned(batch, answered)
            offsets = direct_offsets(plan, self._checkpoint.store)
        memory = self._in_flight.take(batch, [block.nbytes for block in blocks], offsets)
        if leases:
            batch.arrived = partial(self.leases.let_go, [*leases], ranges)  # by number: it must not hold the memory
        empty = {constant.end.block for constant in plan.constants}
        for number, block in enumerate(blocks):
            if number in empty or prod(block.shape) != block.box.volume:  # elements over the end of its view
                memory[number][:] = 0
        self._place(batch, left, memory)
        self.num_reads += len(ranges) + len(answers)
        for range_ in ranges:
            yield partial(self._populate, *range_)
        for number, rows in answers:
            yield partial(self._answer, batch, number, rows)
        yield from self.reader.tasks(plan, blocks, memory)

    def _planned(self, batch: Batch, without: Iterable[int] = ()) -> tuple[list[int], list[Block], TransferPlan]:
        """Return the blocks that have no bytes from elsewhere, their numbers first, and the plan of their requests."""
        left = [at for at in range(len(batch.blocks)) if at not in batch.arrays and at not in without]
        blocks = [batch.blocks[at] for at in left]
        plan = self._checkpoint.transfer(blocks, self._pace)
        self.num_reads += plan.num_requests
        self.needed_bytes += plan.needed_bytes
        return left, blocks, plan

    @staticmethod
    def _place(batch: Batch, numbers: Sequence[int], memory: Sequence[np.ndarray]) -> None:
        for number, data in zip(numbers, memory, strict=True):
            block = batch.blocks[number]
            batch.arrays[number] = np.ndarray(block.shape, block.dtype, data)

    def _alias(self, batch: Batch) -> None:
        """Let blocks of CPU arrays be mapped files, if they lie there as memory needs them."""
        at = 0
        for fill in batch.fills:
            can_share = fill.target.kind is jax.Array
            for block in fill.blocks:
                rows = _rows_of(block, self._checkpoint.location) if can_share else None
                if rows is not None and rows.end - rows.begin == block.nbytes and rows.begin % ALIGNMENT == 0:
                    batch.arrays[at] = np.ndarray(block.shape, block.dtype, self._mapped(rows.file), rows.begin)
                at += 1

    def _mapped(self, number: int) -> memoryview:
        """Return a whole file as memory, the same memory for every caller."""
        if number not in self._mappings:
            self._mappings[number] = self.reader.file(number).map()
        return self._mappings[number]

    def _populate(self, number: int, begin: int, end: int) -> None:
        """Bring bytes of a leased file into memory."""
        self.leases.populate(number, begin, end)
        self.reader.count(1, end - begin)

    def _map(self, batch: Batch, leases: dict[int, LeasedMapping]) -> list[Range]:
        """Let blocks be rows of mapped files, if these hold little else; return the ranges to bring in.

        Files that are leased for the batch are added to `leases`.
        """
        if not self._options.map_files or self._options.checksums or not self._checkpoint.store.is_local:
            return []
        ranges: list[Range] = []
        first = 0
        for fill in batch.fills:
            mappable = self._mappable(fill, leases)
            brought = joined((rows.file, rows.begin, rows.end) for rows in mappable.values())
            needed = sum(fill.blocks[at].nbytes for at in mappable)
            if needed >= _LEAST_NEEDED * sum(end - begin for _, begin, end in brought):
                ranges += brought
                self.needed_bytes += needed
                for at, rows in mappable.items():
                    block, memory = fill.blocks[at], leases[rows.file].memory
                    batch.arrays[first + at] = np.ndarray(block.shape, block.dtype, memory, rows.begin, rows.strides)
            first += len(fill.blocks)
        return [
            (file, at, min(at + _MAPPED_BYTES, end))
            for file, begin, end in joined(ranges)
            for at in range(begin, end, _MAPPED_BYTES)
        ]

    def _mappable(self, fill: Fill, leases: dict[int, LeasedMapping]) -> dict[int, Rows]:
        """Return where blocks lie in files that can be mapped, by their number in the fill. Add to `leases`."""
        mappable = {}
        for number, block in enumerate(fill.blocks):
            rows = _rows_of(block, self._checkpoint.location)
            if rows is None or _row_bytes(block, rows) < _ROW_BYTES:
                continue
            if rows.file not in leases:
                if (mapping := self.leases.hold(rows.file, self.reader.file(rows.file))) is None:
                    continue
                leases[rows.file] = mapping
            if leases[rows.file].serves(rows.begin, rows.end):
                mappable[number] = rows
        return mappable

    def _answered(self, batch: Batch) -> list[tuple[int, Rows]]:
        """Return the blocks that are one long request to a server, by number."""
        if self._checkpoint.store.is_local:
            return []
        most = self._pace.max_request_bytes
        out = []
        for number, block in enumerate(batch.blocks):
            if most // 2 <= block.nbytes <= most:
                rows = _rows_of(block, self._checkpoint.location)
                if rows is not None and rows.end - rows.begin == block.nbytes:
                    out.append((number, rows))
                    self.needed_bytes += block.nbytes
        return out

    def _answer(self, batch: Batch, number: int, rows: Rows) -> None:
        block = batch.blocks[number]
        answer = self.reader.fetch(rows.file, rows.begin, block.nbytes)
        assert answer is not None, "a store that is not local answers"
        if answer.ctypes.data % block.dtype.alignment:
            answer = answer.copy()
        batch.arrays[number] = np.ndarray(block.shape, block.dtype, answer)


def _rows_of(block: Block, locate: Callable[[str], Location]) -> Rows | None:
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
    rows = _strides(copy, block.shape)
    begin = location.begin + copy.source * itemsize
    if rows is None or begin % block.dtype.alignment:
        return None
    elements, strides = rows
    return Rows(location.file, begin, begin + elements * itemsize, tuple([stride * itemsize for stride in strides]))


@lru_cache(maxsize=2**12)  # layers of a model have the same
def _strides(copy: Copy, shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]] | None:
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


def _row_bytes(block: Block, rows: Rows) -> int:
    """Return how many bytes of a block lie side by side at least."""
    nbytes = block.dtype.itemsize
    for size, stride in zip(reversed(block.shape), reversed(rows.strides), strict=True):
        if size > 1:
            if stride != nbytes:
                break
            nbytes *= size
    return nbytes


def joined(ranges: Iterable[Range]) -> list[Range]:
    """Return the ranges, sorted, with those of a file as one that touch or overlap."""
    out: list[Range] = []
    for file, begin, end in sorted(ranges):
        if out and out[-1][0] == file and begin <= out[-1][2]:
            out[-1] = (file, out[-1][1], max(out[-1][2], end))
        else:
            out.append((file, begin, end))
    return out

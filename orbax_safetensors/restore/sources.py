"""Where the bytes of a batch come from: the answer of a server, or reads into memory.

An answer goes to the device as it is. Everything else is read into memory of a pool, which is used again once the
device has it, or into memory that arrays on CPU devices keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import prod

import jax
import numpy as np

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.geometry.strided import keeps_order, source_runs
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.restore.batches import Batch
from orbax_safetensors.restore.in_flight import InFlight
from orbax_safetensors.storage.memory import ALIGNMENT, allocate
from orbax_safetensors.storage.process_memory import no_collection
from orbax_safetensors.storage.store import RequestLimits
from orbax_safetensors.transfer.plan import Block, Location, TransferPlan, same_bits
from orbax_safetensors.transfer.reader import Reader, direct_offsets
from orbax_safetensors.transfer.sums import Sums


class Sources:
    """The open files of a restore, which tasks fill batches from.

    `num_reads` and `needed_bytes` are those of the tasks so far.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        options: SafetensorsOptions,
        limits: RequestLimits,
        sums: Sums | None,
        in_flight: InFlight,
    ) -> None:
        """Open no file yet; `sums` get what is read."""
        self.num_reads = self.needed_bytes = 0
        self.reader = Reader(checkpoint.open_file, limits.requests, sums)
        self._checkpoint, self._options, self._limits, self._in_flight = checkpoint, options, limits, in_flight
        self._mappings: dict[int, memoryview] = {}  # of files that arrays alias, by number
        self._staying_bytes = 0, 1  # that were read before, and that are to be read

    def close(self) -> None:
        """Close all files."""
        self.reader.close()

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
        with no_collection():
            answers = self._answered(batch)
            left, blocks, plan = self._planned(batch, answers)
            offsets = direct_offsets(plan, self._checkpoint.store)
        memory = self._in_flight.take(batch, [block.nbytes for block in blocks], offsets)
        empty = {constant.destination.block for constant in plan.constants}
        for number, block in enumerate(blocks):
            if number in empty or prod(block.shape) != block.box.volume:  # elements over the end of its view
                memory[number][:] = 0
        self._place(batch, left, memory)
        self.num_reads += len(answers)
        for number, place in answers.items():
            yield partial(self._answer, batch, number, *place)
        yield from self.reader.tasks(plan, blocks, memory)

    def _planned(self, batch: Batch, without: Iterable[int] = ()) -> tuple[list[int], list[Block], TransferPlan]:
        """Return the blocks that have no bytes from elsewhere, their numbers first, and the plan of their requests."""
        left = [at for at in range(len(batch.blocks)) if at not in batch.arrays and at not in without]
        blocks = [batch.blocks[at] for at in left]
        plan = self._checkpoint.transfer(blocks, self._limits)
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
                place = _contiguous(block, self._checkpoint.location) if can_share else None
                if place is not None and place[1] % ALIGNMENT == 0:
                    file, begin = place
                    batch.arrays[at] = np.ndarray(block.shape, block.dtype, self._mapped(file), begin)
                at += 1

    def _mapped(self, number: int) -> memoryview:
        """Return a whole file as memory, the same memory for every caller."""
        if number not in self._mappings:
            self._mappings[number] = self.reader.file(number).map()
        return self._mappings[number]

    def _answered(self, batch: Batch) -> dict[int, tuple[int, int]]:
        """Return the blocks that are one long request to a server, by number, with the file and the offset."""
        if self._checkpoint.store.is_local:
            return {}
        most = self._limits.max_request_bytes
        out = {}
        for number, block in enumerate(batch.blocks):
            if most // 2 <= block.nbytes <= most and (place := _contiguous(block, self._checkpoint.location)):
                out[number] = place
                self.needed_bytes += block.nbytes
        return out

    def _answer(self, batch: Batch, number: int, file: int, begin: int) -> None:
        block = batch.blocks[number]
        answer = self.reader.fetch(file, begin, block.nbytes)
        assert answer is not None, "a store that is not local answers"
        if answer.ctypes.data % block.dtype.alignment:
            answer = answer.copy()
        batch.arrays[number] = np.ndarray(block.shape, block.dtype, answer)


def _contiguous(block: Block, locate: Callable[[str], Location]) -> tuple[int, int] | None:
    """Return the file, and the offset in it, at which a block lies as it is in memory.

    None if it lies nowhere so, and has to be put together, reordered or cast.
    """
    copies = block.view.copies(block.box, block.shape)
    if len(copies) != 1:
        return None
    ((name, copy, ops),) = copies
    if name is None or copy.elements != prod(block.shape) or not keeps_order(copy):
        return None
    location = locate(name)
    if location.encoding is not None or not same_bits(ops, location.dtype, block.dtype):
        return None
    runs = source_runs(copy, block.dtype.itemsize)
    begin = location.begin + runs.begin
    return None if runs.modes or begin % block.dtype.alignment else (location.file, begin)

"""The way of all bytes of a restore: for each batch take memory, read, hand over, and give the memory back.

One thread, the caller's, plans and drives; others only read. Batches pass through it in order. Arrays in host memory
keep theirs; what leaves the host goes through memory that is used again once devices have the bytes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from math import prod
from queue import SimpleQueue
from typing import Any, NamedTuple

import jax
import numpy as np

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.checkpoint.checksums import RestoreChecksums
from orbax_safetensors.devices.arrays import are_ready, assemble, wait
from orbax_safetensors.devices.assembly import Assembly, Programs
from orbax_safetensors.devices.reported_progress import reported_progress
from orbax_safetensors.devices.sharding import plain
from orbax_safetensors.devices.staging import kind_for, staging_memory
from orbax_safetensors.errors import SafetensorsError, TensorMismatchError
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.restore.batches import Batch, batches_for, devices_of
from orbax_safetensors.restore.target import Target
from orbax_safetensors.restore.ways import LeafPart
from orbax_safetensors.storage.direct import reading
from orbax_safetensors.storage.interrupts import plain_interrupts
from orbax_safetensors.storage.memory import Pool, Taken, allocate
from orbax_safetensors.storage.process_memory import no_collection
from orbax_safetensors.transfer.decode import GROUPS_PERMUTED
from orbax_safetensors.transfer.engine import Counters
from orbax_safetensors.transfer.progress import SECONDS, Meter
from orbax_safetensors.transfer.reader import Reader
from orbax_safetensors.transfer.threads import Countdown, working

logger = logging.getLogger(__name__)

# jax.monitoring scalars, one of each for a restore and process; the names are those of Orbax's own loader.
EVENT_BYTES_READ = "/jax/orbax/read/safetensors/bytes_read"
EVENT_NUM_READS = "/jax/orbax/read/safetensors/num_reads"
EVENT_STORAGE_READS = "/jax/orbax/read/safetensors/storage_reads"
# Beside those of Orbax's loader: the bytes of `bytes_read` that some array holds, and how long the restore took.
EVENT_BYTES_NEEDED = "/jax/orbax/read/safetensors/bytes_needed"
EVENT_DURATION = "/jax/orbax/read/safetensors/duration_secs"


def fill(
    checkpoint: Checkpoint,
    targets: Sequence[Target],
    *,
    checksums: RestoreChecksums | None,
    options: SafetensorsOptions,
) -> list[Any]:
    """Return the values of `targets`, with the shards of this process. Devices have them on return.

    Arrays in host memory are read straight into place. Bytes on their way to accelerators take at most
    `options.in_flight_bytes` of host memory, because devices put longer leaves together. If they cannot, such a leaf
    takes as much as it has, as does one of up to 16 MiB. No file stays open, and no thread runs on.

    Raises:
      TensorMismatchError: a cast that the caller did not request would change values.
      StorageError: bytes cannot be read, or a file has changed since it was opened.
      ChecksumError: bytes are not those that were saved.
    """
    started = time.perf_counter()
    if options.alias and not checkpoint.store.is_local:
        raise SafetensorsError(
            f"{checkpoint.path}: SafetensorsOptions(alias=True) maps local files into memory; this is not a local file"
        )
    limits = checkpoint.request_limits(options)
    with no_collection():
        nbytes = sum([target.local_nbytes for target in targets])
        checkpoint = replace(checkpoint, store=reading(checkpoint.store, options.direct, nbytes))
        devices = devices_of(targets)
        kind = kind_for(devices)
        most = int(min(options.in_flight_bytes, kind.most_bytes))
        batches, shared = batches_for(checkpoint, targets, limits, most, alias=options.alias)
    total = max(sum(batch.plan.moved_bytes for batch in batches), 1)
    # Without an `ExitStack`: what fails in its exit is in a cycle with it, and keeps memory until it is collected.
    with (
        plain_interrupts(),
        reported_progress(options.progress, "load") as progress,
        contextlib.closing(Programs()) as programs,
    ):
        meter = Meter(progress or (lambda done, total: None), nbytes)
        _compile(programs, batches, targets)
        sums = None if checksums is None else checksums.sums
        with (
            staging_memory(kind, devices, shared, limits.requests) if shared else contextlib.nullcontext() as memory,
            contextlib.closing(Reader(checkpoint.open_file, limits.requests, sums)) as reader,
        ):
            meter.begin(nbytes)

            def report() -> None:
                meter.moved(min(reader.counters.nbytes / total, 1))

            pool = None if memory is None else Pool(memory)
            values = _Pipeline(checkpoint.path, targets, reader, pool, programs, report).run(batches, limits.requests)
            reader.check()
            if checksums is not None:
                checksums.check()
            meter.end()
    _record(checkpoint.path, len(targets), batches, reader.counters, time.perf_counter() - started)
    return values


def _compile(programs: Programs, batches: Sequence[Batch], targets: Sequence[Target]) -> None:
    """Begin to compile all programs of a restore."""
    for batch in batches:
        for part in batch.parts:
            sharding = targets[part.leaf].sharding
            if part.recipe is not None and sharding is not None:
                programs.compile(part.recipe, plain(sharding))


class _Reading(NamedTuple):
    """A batch that threads read into `memory`, until `read` has ended."""

    batch: Batch
    memory: Sequence[np.ndarray]
    taken: Taken | None  # of the pool
    read: Countdown


class _Sent(NamedTuple):
    """Memory of the pool, and the arrays on their way to devices that are made of it."""

    taken: Taken
    arrays: list[jax.Array]


class _Pipeline:
    """The batches under way, oldest first: first they are read, then they are on their way to devices."""

    def __init__(
        self,
        path: str,
        targets: Sequence[Target],
        reader: Reader,
        pool: Pool | None,
        programs: Programs,
        report: Callable[[], None],
    ) -> None:
        self._path, self._targets, self._reader = path, targets, reader
        self._pool, self._programs, self._report = pool, programs, report
        self._values: list[Any] = [None] * len(targets)
        self._assemblies: dict[int, Assembly] = {}  # by the number of the leaf
        self._mapped: dict[int, memoryview] = {}  # files that arrays alias, by number
        self._tasks: SimpleQueue[Iterator[Callable[[], object]] | None] = SimpleQueue()  # of each batch
        self._reading: deque[_Reading] = deque()
        self._sent: deque[_Sent] = deque()
        self._failed = threading.Event()

    def run(self, batches: Sequence[Batch], threads: int) -> list[Any]:
        """Return the values of all targets."""
        try:
            with working(chain.from_iterable(iter(self._tasks.get, None)), threads, self._cancel):
                try:
                    for batch in batches:
                        self._read(batch)
                finally:
                    self._tasks.put(None)
                while self._reading and not self._failed.is_set():
                    self._hand_over()
            while self._sent:
                self._arrive()
            for number, assembly in self._assemblies.items():
                self._values[number] = assembly.array()
            wait([self._values[number] for number in self._assemblies])
            return self._values
        finally:
            self._tasks.put(None)  # for a thread that an interrupt has left behind, which would wait for ever
            for sent in self._sent:  # no device may read memory that is about to go, also if something has failed
                for array in sent.arrays:
                    with contextlib.suppress(Exception):
                        wait([array])

    def _cancel(self) -> None:
        self._failed.set()
        self._reader.cancel()
        self._tasks.put(None)

    def _read(self, batch: Batch) -> None:
        """Let threads read a batch, as soon as there is memory for it."""
        taken = self._take(batch) if batch.leaves_host else None
        if self._failed.is_set():
            return
        memory = allocate(batch.sizes, batch.offsets) if taken is None else taken.buffers
        read = Countdown()
        self._reading.append(_Reading(batch, memory, taken, read))
        self._tasks.put(read.of(_tasks(self._reader, batch, memory)))

    def _take(self, batch: Batch) -> Taken | None:
        """Return memory for a batch; None if something has failed, which `working` raises."""
        assert self._pool is not None
        while not self._failed.is_set():
            while self._reading and self._reading[0].read.ended.is_set():
                self._hand_over()
            while self._sent and are_ready(self._sent[0].arrays):
                self._arrive()
            taken = self._pool.take(batch.sizes, batch.offsets)
            if taken is not None:
                return taken
            if self._sent:
                self._arrive()
            else:
                self._hand_over()
        return None

    @no_collection()
    def _hand_over(self) -> None:
        """Wait until the oldest batch is read, and make leaves of it, or of parts of them, unless something fails."""
        batch, memory, taken, read = self._reading[0]
        while not read.ended.wait(SECONDS):
            self._report()
            if self._failed.is_set():  # an error of this thread would hold memory beside the one that `working` raises
                return
        del self._reading[0]
        sent: list[jax.Array] = []
        if taken is not None:
            self._sent.append(_Sent(taken, sent))
        buffers = iter(memory)
        for part in batch.parts:
            sent += self._make(part, buffers)
        self._report()

    def _make(self, part: LeafPart, buffers: Iterator[np.ndarray]) -> list[jax.Array]:
        """Make a leaf, or a part of it, and return what is on its way to devices."""
        target, number = self._targets[part.leaf], part.leaf
        if part.recipe is not None:
            assert target.sharding is not None
            packed = []
            for order in part.orders:
                packed.append([next(buffers) for _ in part.recipe.inputs])
                if order is not None and not np.array_equal(next(buffers).view(order.dtype), order):
                    raise TensorMismatchError(f"{self._path}: {target.name!r}: {GROUPS_PERMUTED}")
            if number not in self._assemblies:
                self._assemblies[number] = Assembly(self._programs, plain(target.sharding), target.shape, target.dtype)
            return self._assemblies[number].put(part.recipe, part.starts, packed)
        if part.mapped:
            shards = [
                np.ndarray(block.shape, block.dtype, self._map(file), begin)
                for block, (file, begin) in zip(part.blocks, part.mapped, strict=True)
            ]
        else:
            shards = [np.ndarray(block.shape, block.dtype, next(buffers)) for block in part.blocks]
        if target.sharding is None:
            self._values[number] = _value(target, *shards)
            return []
        held = dict(zip(target.local_boxes(), shards, strict=True))
        self._values[number] = assemble(target.sharding, target.shape, target.dtype, held)
        return [self._values[number]]

    def _map(self, number: int) -> memoryview:
        """Return a whole file as memory, the same memory for every leaf."""
        if number not in self._mapped:
            self._mapped[number] = self._reader.file(number).map()
        return self._mapped[number]

    def _arrive(self) -> None:
        """Wait until devices have what was sent first, and give its memory back."""
        assert self._pool is not None
        wait(self._sent[0].arrays)
        self._pool.give_back(self._sent.popleft().taken)


def _tasks(reader: Reader, batch: Batch, memory: Sequence[np.ndarray]) -> Iterator[Callable[[], None]]:
    """Yield what threads have to call to fill `memory`, which holds anything if the batch leaves the host."""
    if batch.leaves_host:
        with_constants = {constant.destination.block for constant in batch.plan.constants}
        for number, block in enumerate(batch.blocks):
            if number in with_constants or prod(block.shape) != block.box.volume:  # elements over the end of its view
                memory[number][:] = 0
    yield from reader.tasks(batch.plan, batch.blocks, memory)


def _record(path: str, leaves: int, batches: Sequence[Batch], counters: Counters, seconds: float) -> None:
    """Tell `jax.monitoring` and the log what a restore has read."""
    needed = sum(batch.plan.needed_bytes for batch in batches)
    requests = sum(batch.plan.num_requests for batch in batches)
    jax.monitoring.record_scalar(EVENT_BYTES_READ, float(counters.nbytes))
    jax.monitoring.record_scalar(EVENT_NUM_READS, float(requests))
    jax.monitoring.record_scalar(EVENT_STORAGE_READS, float(counters.num_requests))
    jax.monitoring.record_scalar(EVENT_BYTES_NEEDED, float(needed))
    jax.monitoring.record_event_duration_secs(EVENT_DURATION, seconds)
    logger.info(
        "Restored %d arrays from %s: %d bytes read in %d requests, over-read %.3f, %.2f s, %.2f GB/s",
        leaves,
        path,
        counters.nbytes,
        counters.num_requests,
        counters.nbytes / max(needed, 1),
        seconds,
        counters.nbytes / max(seconds, 1e-9) / 1e9,
    )


def _value(target: Target, array: np.ndarray) -> Any:
    """Return a leaf without devices."""
    if issubclass(target.kind, np.generic):
        return array[()]
    return array if target.kind is np.ndarray else _scalar(target, array.item())


def _scalar(target: Target, value: Any) -> Any:
    try:
        converted = target.kind(value)
    except (ValueError, OverflowError):  # an infinity or NaN as an integer
        converted = None
    unchanged = converted == value or (target.kind is float and value != value)  # a NaN is a float
    if not unchanged:
        raise TensorMismatchError(f"{target.name!r}: {value!r} cannot be restored as {target.kind.__name__}")
    return converted

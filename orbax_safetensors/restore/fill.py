"""Fill targets: make a plan of them, read its bytes into memory, make leaves of the memory."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, islice
from typing import Any, NamedTuple

import jax
import numpy as np

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.checkpoint.checksums import RestoreChecksums
from orbax_safetensors.devices.arrays import assemble, wait
from orbax_safetensors.devices.growing import Growing
from orbax_safetensors.devices.reported_progress import reported_progress
from orbax_safetensors.devices.sharding import no_mesh, plain
from orbax_safetensors.devices.staging import fetches_pinned, pinned_arena
from orbax_safetensors.errors import SafetensorsError, TensorMismatchError
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.restore.batches import Batch, batches_of, stays_on_host
from orbax_safetensors.restore.in_flight import InFlight
from orbax_safetensors.restore.sources import Sources
from orbax_safetensors.restore.target import Target
from orbax_safetensors.storage.direct import reading
from orbax_safetensors.storage.memory import ALIGNMENT, DIRECT_BYTES, PAGE_BYTES
from orbax_safetensors.storage.process_memory import no_collection
from orbax_safetensors.transfer.progress import SECONDS, Meter
from orbax_safetensors.transfer.sums import Sums
from orbax_safetensors.transfer.threads import working

logger = logging.getLogger(__name__)

# jax.monitoring scalars, one of each for a restore and process; the names are those of Orbax's own loader.
EVENT_BYTES_READ = "/jax/orbax/read/safetensors/bytes_read"
EVENT_NUM_READS = "/jax/orbax/read/safetensors/num_reads"
EVENT_STORAGE_READS = "/jax/orbax/read/safetensors/storage_reads"
# Beside those of Orbax's loader: the bytes of `bytes_read` that some array holds, and how long the restore took.
EVENT_BYTES_NEEDED = "/jax/orbax/read/safetensors/bytes_needed"
EVENT_DURATION = "/jax/orbax/read/safetensors/duration_secs"

# The most that goes at once to a device whose runtime copies it. XLA's client of GPUs copies less than 1 GiB into
# memory that the card reads itself, and leaves more to the driver, which is slow. Others may do the same.
_MOST_BYTES = 2**30 - 1
# Batches on their way at once. More would hide more of what takes time now and then.
_BATCHES = 8
# Of pinned memory, which is slow to get, and which a device empties faster than this process fills it. XLA gets a power
# of two in which it fits, with a few pages around it.
_PINNED_BYTES = 512 * 2**20 - 32 * PAGE_BYTES


class Pinned(NamedTuple):
    """Pinned memory: `arena` gets so many bytes of it, and buffers for all that leaves the host take `nbytes`."""

    nbytes: int
    arena: Callable[[int], np.ndarray]


class Filling:
    """A restore under way, which fills targets from the open files of one checkpoint."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        options: SafetensorsOptions,
        sums: Sums | None,
        meter: Meter | None,
        pinned: Pinned | None,
    ) -> None:
        """Open no file yet; `sources` opens them, and has to be closed. Bytes for devices go into `pinned`, if any."""
        limits = checkpoint.request_limits(options)
        self.num_arrays = 0
        self._checkpoint = checkpoint
        self._meter = meter
        self._threads = limits.requests
        if pinned is None:
            self._most = self._part_bytes = min(options.in_flight_bytes // 2, _MOST_BYTES)
            self._batch_bytes = min(self._most, limits.requests * limits.max_request_bytes)
            self.in_flight = InFlight(
                min(options.in_flight_bytes, _BATCHES * self._batch_bytes),
                # Enough to read while others are on their way. The less it is, the sooner it is used again.
                _BATCHES // 2 * self._batch_bytes,
                2 * self._most,
            )
        else:
            self._most = room = min(options.in_flight_bytes, _PINNED_BYTES)
            self._part_bytes, self._batch_bytes = room // 2, room // _BATCHES
            self.in_flight = InFlight(options.in_flight_bytes, room, min(room, pinned.nbytes), pinned.arena)
        self.sources = Sources(checkpoint, options, limits, sums, self.in_flight)

    def fill(self, targets: Sequence[Target]) -> list[Any]:
        """Return the values of `targets`, with the shards of this process. Devices have them on return.

        Arrays in host memory are read straight into place. Bytes on their way to accelerators take at most
        `options.in_flight_bytes` of host memory, because devices put longer leaves together. If they cannot, such a
        leaf takes as much as it has.

        Raises:
          TensorMismatchError: a cast that the caller did not request would change values.
          StorageError: bytes cannot be read.
        """
        batched = batches_of(self._checkpoint, targets, self._most, self._part_bytes, self._batch_bytes)
        values: list[Any] = [None] * len(targets)
        growing: dict[int, Growing] = {}
        arrived = self.in_flight.arrived
        staying = 0  # bytes of batches that stay in host memory and are filled

        def report(more: float = 0) -> None:
            if self._meter is not None:
                self._meter.moved((staying + more + self.in_flight.arrived - arrived) / total)

        failed = threading.Event()

        def cancel() -> None:
            failed.set()
            self.sources.reader.cancel()
            self.in_flight.end()
            for batch in batched:
                batch.filled.ended.set()

        total = max(sum(batch.nbytes for batch in batched), 1)
        if self._meter is not None:
            self._meter.begin(total)
        with working(self.sources.tasks(batched), self._threads, cancel):
            for batch in batched:
                while not batch.filled.ended.wait(SECONDS):
                    report(0 if batch.leaves_host else self.sources.share * batch.nbytes)
                if failed.is_set():
                    break
                _make_arrays(batch, values, growing)
                if batch.leaves_host:
                    self.in_flight.send(batch)
                else:
                    staying += batch.nbytes
                batch.arrays.clear()
                report()
        while self.in_flight.wait_for_one():
            report()
        for number, array in growing.items():
            values[number] = array.array()
            wait([values[number]])
        self.num_arrays += len(targets)
        return values

    def check(self) -> None:
        """Raise `StorageError` if a file has changed since it was opened."""
        self.sources.reader.check()


@no_collection()
def _make_arrays(batch: Batch, values: list[Any], growing: dict[int, Growing]) -> None:
    """Make leaves, or parts of them, of the filled arrays of a batch."""
    arrays = map(batch.arrays.__getitem__, count())
    for fill in batch.fills:
        target = fill.target
        shards = list(islice(arrays, len(fill.blocks)))
        if target.sharding is None:
            values[fill.number] = _value(target, *shards)
            continue
        held = dict(zip(target.local_boxes(), shards, strict=True))
        if fill.start is None:
            values[fill.number] = assemble(target.sharding, target.shape, target.dtype, held)
            batch.sent.append(values[fill.number])
        else:
            if fill.number not in growing:
                growing[fill.number] = Growing(plain(target.sharding), target.shape, target.dtype)
            batch.sent.append(growing[fill.number].put(fill.start, held))


@contextlib.contextmanager
def filling(
    checkpoint: Checkpoint, targets: Sequence[Target], checksums: RestoreChecksums | None, options: SafetensorsOptions
) -> Iterator[Filling]:
    """Yield a restore of `targets` from `checkpoint`, which opens files when it needs them, and checks them in the end.

    Raises `StorageError` if a file changed meanwhile. No file stays open, and no thread runs on.
    """
    started = time.perf_counter()
    alike = _group_identical(targets)
    nbytes = sum(count * target.local_nbytes for target, count in alike)
    checkpoint = replace(checkpoint, store=reading(checkpoint.store, options.direct, nbytes))
    if options.alias and not checkpoint.store.is_local:
        raise SafetensorsError(
            f"{checkpoint.path}: SafetensorsOptions(alias=True) maps local files into memory; this is not a local file"
        )
    sums = None if checksums is None else checksums.sums
    with no_mesh(), reported_progress(options.progress, "load") as progress:
        meter = None if progress is None else Meter(progress, nbytes)
        under_way = Filling(checkpoint, options, sums, meter, _pinned(alike))
        with contextlib.closing(under_way.sources) as sources:
            try:
                yield under_way
            finally:
                # No device reads host memory any more, whether the restore went well or not.
                under_way.in_flight.settle()
            under_way.check()
            if checksums is not None:
                checksums.check()
            if meter is not None:
                meter.end()
    counters = sources.reader.counters
    seconds = time.perf_counter() - started
    jax.monitoring.record_scalar(EVENT_BYTES_READ, float(counters.nbytes))
    jax.monitoring.record_scalar(EVENT_NUM_READS, float(sources.num_reads))
    jax.monitoring.record_scalar(EVENT_STORAGE_READS, float(counters.num_requests))
    jax.monitoring.record_scalar(EVENT_BYTES_NEEDED, float(sources.needed_bytes))
    jax.monitoring.record_event_duration_secs(EVENT_DURATION, seconds)
    logger.info(
        "Restored %d arrays from %s: %d bytes read in %d requests, over-read %.3f, %.2f s, %.2f GB/s",
        under_way.num_arrays,
        checkpoint.path,
        counters.nbytes,
        counters.num_requests,
        counters.nbytes / max(sources.needed_bytes, 1),
        seconds,
        counters.nbytes / max(seconds, 1e-9) / 1e9,
    )


@no_collection()
def _group_identical(targets: Sequence[Target]) -> list[tuple[Target, int]]:
    """Return one target of each sharding, shape and dtype, and how many have these."""
    alike = [(target.sharding, target.shape, target.dtype) for target in targets]
    one_of = dict(zip(alike, targets, strict=True))
    return [(one_of[key], count) for key, count in Counter(alike).items()]


def _pinned(alike: Sequence[tuple[Target, int]]) -> Pinned | None:
    """Return the pinned memory for targets, if all of their devices that are not the host fetch bytes from it."""
    leaving = [(target, count) for target, count in alike if not stays_on_host(target)]
    devices: set[Any] = set()
    for target, _ in leaving:
        assert target.sharding is not None
        devices |= plain(target.sharding).addressable_devices
    if not devices or not all(map(fetches_pinned, devices)):
        return None
    nbytes = sum(count * target.local_nbytes for target, count in leaving)
    # Each buffer is aligned, and one that is read directly begins anywhere in a page.
    nbytes += nbytes // DIRECT_BYTES * PAGE_BYTES + ALIGNMENT * sum(
        count * len(target.local_boxes()) for target, count in leaving
    )
    return Pinned(nbytes, partial(pinned_arena, min(devices, key=lambda device: device.id)))


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

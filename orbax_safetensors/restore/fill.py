"""Fill targets: make a plan of them, read its bytes into memory, make leaves of the memory."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import jax
import numpy as np

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.checkpoint.checksums import Comparison
from orbax_safetensors.devices.arrays import assemble, on_host
from orbax_safetensors.devices.sharding import plain
from orbax_safetensors.errors import SafetensorsError, TensorMismatchError
from orbax_safetensors.geometry.groups import by_tensors
from orbax_safetensors.geometry.strided import keeps_order
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.restore.target import Target
from orbax_safetensors.storage.direct import reading
from orbax_safetensors.storage.memory import ALIGNMENT, no_collection
from orbax_safetensors.storage.store import Pace
from orbax_safetensors.transfer.engine import batches
from orbax_safetensors.transfer.plan import Block, same_bits, transfer_plan
from orbax_safetensors.transfer.progress import Meter, passing
from orbax_safetensors.transfer.reader import Reader, memory_for

logger = logging.getLogger(__name__)

# jax.monitoring scalars, one of each for a restore and process; the names are those of Orbax's own loader.
EVENT_BYTES_READ = "/jax/orbax/read/safetensors/bytes_read"
EVENT_NUM_READS = "/jax/orbax/read/safetensors/num_reads"
EVENT_STORAGE_READS = "/jax/orbax/read/safetensors/storage_reads"
# Beside those of Orbax's loader: the bytes of `bytes_read` that some array holds, and how long the restore took.
EVENT_BYTES_NEEDED = "/jax/orbax/read/safetensors/bytes_needed"
EVENT_DURATION = "/jax/orbax/read/safetensors/duration_secs"


class _Fill(NamedTuple):
    """A target, and the blocks that this process fills of it."""

    target: Target
    blocks: tuple[Block, ...]

    @property
    def on_host(self) -> bool:
        return self.target.sharding is None or on_host(plain(self.target.sharding))

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    @property
    def leaving(self) -> int:
        """Return the bytes that do not stay in host memory."""
        return 0 if self.on_host else self.nbytes


def blocks(target: Target) -> tuple[Block, ...]:
    """Return the blocks that this process fills for a target, one for each distinct box."""
    view = target.view
    padded = target.shape != view.shape
    return tuple(
        [Block(view, view.clipped(box) if padded else box, box.shape, target.dtype) for box in target.local_boxes()]
    )


class Filling:
    """A restore under way, which fills targets from the open files of one checkpoint."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        options: SafetensorsOptions,
        pace: Pace,
        reader: Reader,
        meter: Meter | None,
    ) -> None:
        self.checkpoint = checkpoint
        self.options = options
        self.num_arrays = self.num_reads = self.needed_bytes = 0
        self._pace = pace
        self._reader = reader
        self._meter = meter

    def fill(self, targets: Sequence[Target], counted: Sequence[int] | None = None) -> list[Any]:
        """Return the values of `targets`, with the shards of this process.

        `counted` are the bytes that each target counts for progress, by default those that are filled.

        Bytes on their way to accelerators take at most `options.in_flight_bytes` of host memory, or as much as one
        group of leaves that are made of the same tensors, if that is more. Arrays in host memory are read straight
        into place.

        Raises:
          TensorMismatchError: a cast that the caller did not request would change values.
          StorageError: bytes cannot be read.
        """
        with no_collection():
            fills = [_Fill(target, blocks(target)) for target in targets]
            groups = in_file_order(self.checkpoint, targets)
            leaving_of = [fill.leaving for fill in fills]
            sized = [(group, sum(map(leaving_of.__getitem__, group))) for group in groups]
            batched = list(batches(sized, self.options.in_flight_bytes // 2))
        values: list[Any] = [None] * len(fills)
        in_flight: deque[tuple[list[jax.Array], int]] = deque()
        held = 0
        for batch_groups in batched:
            batch = [at for group in batch_groups for at in group]
            leaving = sum(map(leaving_of.__getitem__, batch))
            while in_flight and held + leaving > self.options.in_flight_bytes:
                transferred, nbytes = in_flight.popleft()
                jax.block_until_ready(transferred)
                held -= nbytes
            if self._meter is not None:
                self._meter.begin(sum(fills[at].nbytes if counted is None else counted[at] for at in batch))
            memory = self._read([fills[at] for at in batch])
            buffers = iter(memory)
            with no_collection():
                for at in batch:
                    values[at] = _value(fills[at], list(islice(buffers, len(fills[at].blocks))))
            if leaving:
                in_flight.append(([values[at] for at in batch if not fills[at].on_host], leaving))
                held += leaving
        self.num_arrays += len(targets)
        return values

    def check(self) -> None:
        """Raise `StorageError` if a file changed after its header was read."""
        self._reader.check({number: file.stamp for number, file in enumerate(self.checkpoint.files)})

    def _read(self, fills: Sequence[_Fill]) -> list[np.ndarray]:
        """Return filled memory for every block of `fills`."""
        all_blocks = [block for fill in fills for block in fill.blocks]
        memory: list[np.ndarray | None] = [None] * len(all_blocks)
        if self.options.alias:
            can_share = [fill.on_host and fill.target.kind is jax.Array for fill in fills for _ in fill.blocks]
            memory = [
                _mapped(self.checkpoint, self._reader, block) if share else None
                for block, share in zip(all_blocks, can_share, strict=True)
            ]
        left = [at for at, mapped in enumerate(memory) if mapped is None]
        with no_collection():
            blocks = [all_blocks[at] for at in left]
            plan = transfer_plan(
                blocks, self.checkpoint.location, self._pace.max_gap_bytes, self._pace.max_request_bytes
            )
            fresh = memory_for(plan, blocks, self.checkpoint.store)
        lossless = [fill.target.lossless for fill in fills for _ in fill.blocks]
        report = None if self._meter is None else self._meter.moved
        self._reader.read(plan, blocks, fresh, [lossless[at] for at in left], report)
        self.num_reads += plan.num_requests
        self.needed_bytes += plan.needed_bytes
        rest = iter(fresh)
        return [next(rest) if mapped is None else mapped for mapped in memory]


@contextlib.contextmanager
def filling(checkpoint: Checkpoint, targets: Sequence[Target], options: SafetensorsOptions) -> Iterator[Filling]:
    """Yield a restore of `targets` from `checkpoint`, which opens files when it needs them, and checks them in the end.

    Raises `StorageError` if a file changed meanwhile. No file stays open, and no thread runs on.
    """
    started = time.perf_counter()
    nbytes = _local_bytes(targets)
    checkpoint = replace(checkpoint, store=reading(checkpoint.store, options.direct, nbytes))
    store = checkpoint.store
    if options.alias and not store.is_local:
        raise SafetensorsError(
            f"{checkpoint.path}: SafetensorsOptions(alias=True) maps local files into memory; this is not a local file"
        )
    pace = store.cost.pace(options.threads, options.max_gap_bytes, options.in_flight_bytes)
    comparison = Comparison(checkpoint) if options.checksums else None
    sums = None if comparison is None else comparison.sums
    with passing(options.progress) as progress, Reader(checkpoint.open_file, pace.requests, sums) as reader:
        meter = None if progress is None else Meter(progress, nbytes)
        under_way = Filling(checkpoint, options, pace, reader, meter)
        yield under_way
        under_way.check()
        if comparison is not None:
            comparison.check()
        if meter is not None:
            meter.end()
        counters = reader.counters
    seconds = time.perf_counter() - started
    jax.monitoring.record_scalar(EVENT_BYTES_READ, float(counters.nbytes))
    jax.monitoring.record_scalar(EVENT_NUM_READS, float(under_way.num_reads))
    jax.monitoring.record_scalar(EVENT_STORAGE_READS, float(counters.num_requests))
    jax.monitoring.record_scalar(EVENT_BYTES_NEEDED, float(under_way.needed_bytes))
    jax.monitoring.record_event_duration_secs(EVENT_DURATION, seconds)
    logger.info(
        "Restored %d arrays from %s: %d bytes read in %d requests, over-read %.3f, %.2f s, %.2f GB/s",
        under_way.num_arrays,
        checkpoint.path,
        counters.nbytes,
        counters.num_requests,
        counters.nbytes / max(under_way.needed_bytes, 1),
        seconds,
        counters.nbytes / max(seconds, 1e-9) / 1e9,
    )


def _local_bytes(targets: Sequence[Target]) -> int:
    """Return the bytes that this process holds of `targets`."""
    with no_collection():
        alike = [(target.sharding, target.shape, target.dtype) for target in targets]
        one_of = dict(zip(alike, targets, strict=True))
        return sum(count * one_of[key].local_nbytes for key, count in Counter(alike).items())


def in_file_order(checkpoint: Checkpoint, targets: Sequence[Target]) -> list[list[int]]:
    """Return the positions of `targets`, in one group those that are made of the same tensors.

    Groups are in the order of the files, so that a disk reads forward and each batch is one stretch of it.
    """
    groups = by_tensors([target.view for target in targets])

    def begin(group: list[int]) -> tuple[int, int]:
        names = [name for at in group for name in targets[at].view.tensors]
        return checkpoint.begin(names[0]) if len(names) == 1 else min(map(checkpoint.begin, names), default=(0, 0))

    return sorted(groups, key=begin)


def _mapped(checkpoint: Checkpoint, reader: Reader, block: Block) -> np.ndarray | None:
    """Return the block's bytes mapped from the file, None if they do not lie there as memory needs them."""
    copies = block.view.copies(block.box, block.shape)
    if len(copies) != 1:
        return None
    ((name, copy, ops),) = copies
    if name is None:
        return None
    location = checkpoint.location(name)
    if location.encoding is not None or not same_bits(ops, location.dtype, block.dtype):
        return None
    dense = tuple((size, stride) for size, stride, _ in copy.modes) in ((), ((copy.elements, 1),))
    begin = location.begin + copy.source * block.dtype.itemsize
    nbytes = copy.elements * block.dtype.itemsize
    if not dense or not keeps_order(copy) or nbytes != block.nbytes or begin % ALIGNMENT:
        return None
    return np.frombuffer(reader.map(location.file), np.uint8, nbytes, begin)


def _value(fill: _Fill, memory: Sequence[np.ndarray]) -> Any:
    """Return the leaf that is made of its filled memory."""
    target = fill.target
    shards = [np.ndarray(block.shape, target.dtype, data) for data, block in zip(memory, fill.blocks, strict=True)]
    if target.sharding is not None:
        boxes = dict(zip(target.local_boxes(), shards, strict=True))
        return assemble(target.sharding, target.shape, target.dtype, boxes)
    (array,) = shards
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

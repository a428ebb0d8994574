"""Host memory of arrays on their way to devices, which is used again as soon as they have arrived."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from functools import cached_property

import numpy as np

from orbax_safetensors.devices import arrays
from orbax_safetensors.restore.batches import Batch
from orbax_safetensors.storage.memory import PAGE_BYTES, Pool, Taken, arena_of

# Of the pool, for batches that begin in their pages as the bytes do in files.
_PAGES = 16


class InFlight:
    """Batches of at most `limit` bytes that are read or transferred, or one larger batch.

    Safe for several threads: one takes memory for a batch and fills it, another makes arrays of it, adds each to
    `Batch.sent` at once, and calls `send`. The memory is free again once the devices have the arrays, in the order of
    `send`.
    """

    def __init__(
        self, limit: int, most_memory: int, pool_bytes: int, arena: Callable[[int], np.ndarray] = arena_of
    ) -> None:
        """Take no memory yet. At most `most_memory` will be ours, or one larger batch.

        `arena` makes the pool's memory. What is longer than `pool_bytes` has memory that is not used again.
        """
        self.arrived = 0  # bytes
        self._limit, self._most_memory, self._pool_bytes, self._arena = limit, most_memory, pool_bytes, arena
        # Not taken through the condition, which an interrupt can leave locked: its `__exit__` is Python.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._batches: dict[Batch, Taken | None] = {}  # with the memory of those that need memory of ours
        self._sent: deque[Batch] = deque()
        self._ended = False

    @cached_property
    def _pool(self) -> Pool:
        return Pool(self._arena(self._pool_bytes + _PAGES * PAGE_BYTES))

    def take(
        self, batch: Batch, sizes: Sequence[int] = (), offsets: Mapping[int, int] | None = None
    ) -> list[np.ndarray]:
        """Return buffers of `sizes` bytes for a batch, which hold anything; wait until it has room.

        `offsets` are as for `allocate`. Raises `CancelledError` once `end` has been called.
        """
        pool = self._pool if sizes else None  # not under the lock, because pinned memory takes its time
        with self._lock:
            while True:
                self._collect()
                if self._ended:
                    raise CancelledError
                if self._has_room(batch.nbytes, sum(sizes)):
                    taken = None if pool is None else pool.take(sizes, offsets)
                    if taken is not None or pool is None:
                        self._batches[batch] = taken
                        return [] if taken is None else taken.buffers
                self._wait()

    def _has_room(self, nbytes: int, memory_bytes: int) -> bool:
        held = sum(batch.nbytes for batch in self._batches)
        memory = sum(buffer.nbytes for taken in self._batches.values() if taken for buffer in taken.buffers)
        return (not held or held + nbytes <= self._limit) and (not memory or memory + memory_bytes <= self._most_memory)

    def send(self, batch: Batch) -> None:
        """Free the memory of a batch when the devices have its arrays, which are all in `sent`."""
        with self._lock:
            self._sent.append(batch)
            self._collect()
            self._changed.notify_all()

    def wait_for_one(self) -> bool:
        """Wait until one more batch has arrived; return whether there was one that had not."""
        with self._lock:
            self._collect()
            if not self._batches:
                return False
            if self._ended:
                raise CancelledError
            self._wait()
            self._collect()
            return True

    def end(self) -> None:
        """Make threads fail that wait for room, or for batches to arrive."""
        with self._lock:
            self._ended = True
            self._changed.notify_all()

    def settle(self) -> None:
        """Wait until no device reads any batch, whether or not it got what was there."""
        for batch in list(self._batches):  # an interrupt can leave a thread behind
            for array in batch.sent:
                with contextlib.suppress(Exception):
                    arrays.wait([array])

    def _collect(self) -> None:
        while self._sent and arrays.are_ready(self._sent[0].sent):
            arrays.wait(self._sent[0].sent)  # raises if a transfer has failed: it is ready then, too
            batch = self._sent.popleft()
            batch.sent.clear()
            taken = self._batches.pop(batch)
            self.arrived += batch.nbytes
            if taken is not None:
                self._pool.give_back(taken)
            self._changed.notify_all()

    def _wait(self) -> None:
        """Wait until what was sent first has arrived, or if nothing was sent, until something changes."""
        if not self._sent:
            self._changed.wait()
            return
        first = self._sent[0].sent
        self._changed.release()
        try:
            arrays.wait(first)
        finally:
            self._changed.acquire()

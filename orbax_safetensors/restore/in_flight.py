"""Host memory of arrays on their way to devices, which is used again as soon as they have arrived."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from functools import cached_property

import jax
import numpy as np

from orbax_safetensors.devices import arrays
from orbax_safetensors.storage.memory import PAGE_BYTES, Pool, Taken

# Of the pool, for batches that begin in their pages as the bytes do in files.
_PAGES = 16


@dataclass(eq=False)
class Slot:
    """A place for `nbytes` in flight, with memory if the bytes need memory of ours.

    `sent` are the arrays that are made of the memory. Once they have arrived, `arrived` is called.
    """

    nbytes: int
    taken: Taken | None
    sent: list[jax.Array] = field(default_factory=list)
    arrived: Callable[[], None] | None = None

    @property
    def memory(self) -> list[np.ndarray]:
        """Return the buffers, which hold anything."""
        return [] if self.taken is None else self.taken.buffers


class InFlight:
    """At most `limit` bytes that are read or transferred, or one larger batch.

    Safe for several threads: one takes a slot and fills its memory, another makes arrays of it, adds each to the slot
    at once, and calls `send`. The slot is free again once the devices have the arrays, in the order of `send`.
    """

    def __init__(self, limit: int, most_memory: int, pool_bytes: int) -> None:
        """Take no memory yet. At most `most_memory` will be ours, or one larger batch.

        What is longer than `pool_bytes` has memory that is not used again.
        """
        self.arrived = 0  # bytes
        self._limit, self._most_memory, self._pool_bytes = limit, most_memory, pool_bytes
        # Not taken through the condition, which an interrupt can leave locked: its `__exit__` is Python.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._slots: list[Slot] = []
        self._sent: deque[Slot] = deque()
        self._ended = False

    @cached_property
    def _pool(self) -> Pool:
        return Pool(self._pool_bytes + _PAGES * PAGE_BYTES)

    def take(self, nbytes: int, sizes: Sequence[int] = (), offsets: Mapping[int, int] | None = None) -> Slot:
        """Return a slot for `nbytes`, with memory for buffers of `sizes`; wait for it if necessary.

        `offsets` are as for `allocate`. Raises `CancelledError` once `end` has been called.
        """
        with self._lock:
            while True:
                self._collect()
                if self._ended:
                    raise CancelledError
                if self._has_room(nbytes, sum(sizes)):
                    taken = self._pool.take(sizes, offsets) if sizes else None
                    if taken is not None or not sizes:
                        self._slots.append(slot := Slot(nbytes, taken))
                        return slot
                self._wait()

    def _has_room(self, nbytes: int, memory_bytes: int) -> bool:
        held = sum(slot.nbytes for slot in self._slots)
        memory = sum(buffer.nbytes for slot in self._slots for buffer in slot.memory)
        return (not held or held + nbytes <= self._limit) and (not memory or memory + memory_bytes <= self._most_memory)

    def send(self, slot: Slot) -> None:
        """Free `slot` when the devices have its arrays, which are all."""
        with self._lock:
            self._sent.append(slot)
            self._collect()
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until all slots are free, also those that another thread has still to send."""
        while self.wait_for_one():
            pass

    def wait_for_one(self) -> bool:
        """Wait until one more slot is free; return whether there was one that was not."""
        with self._lock:
            self._collect()
            if not self._slots:
                return False
            if self._ended:
                raise CancelledError
            self._wait()
            self._collect()
            return True

    def end(self) -> None:
        """Make threads fail that wait for a slot, or for slots to be free."""
        with self._lock:
            self._ended = True
            self._changed.notify_all()

    def settle(self) -> None:
        """Wait until no device reads any slot, whether or not it got what was there."""
        for slot in self._slots:
            for array in slot.sent:
                with contextlib.suppress(Exception):
                    arrays.wait([array])

    def _collect(self) -> None:
        while self._sent and arrays.are_ready(self._sent[0].sent):
            arrays.wait(self._sent[0].sent)  # raises if a transfer has failed: it is ready then, too
            slot = self._sent.popleft()
            slot.sent.clear()
            self._slots.remove(slot)
            self.arrived += slot.nbytes
            if slot.arrived is not None:
                slot.arrived()
            if slot.taken is not None:
                self._pool.give_back(slot.taken)
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

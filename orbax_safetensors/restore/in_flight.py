"""Host memory of arrays on their way to devices, which is used again as soon as they have arrived."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np

from orbax_safetensors.devices import arrays
from orbax_safetensors.storage.pool import Pool, Taken

# Batches in flight: one is read, one is on its way, one is between, and one is a reserve.
_ROOMS = 4


@dataclass(eq=False)
class Room:
    """Room for `nbytes` in flight, of which `counted` count for progress, with memory if that has to be ours."""

    nbytes: int
    counted: int
    taken: Taken | None
    sent: Sequence[jax.Array] = ()

    @property
    def memory(self) -> list[np.ndarray]:
        """Return the buffers, which hold anything."""
        return [] if self.taken is None else self.taken.buffers


class InFlight:
    """At most `limit` bytes that are read or transferred, in few batches, or one larger batch.

    Safe for several threads: one takes room, and fills its memory; another makes arrays of it and passes them to
    `send`. The room is free again once the devices have the arrays, in the order of `send`.
    """

    def __init__(self, limit: int) -> None:
        """Take no memory yet."""
        self.arrived = 0  # counted bytes
        self._limit = limit
        self._changed = threading.Condition()
        self._rooms: list[Room] = []
        self._sent: deque[Room] = deque()
        self._ended = False

    @cached_property
    def _pool(self) -> Pool:
        return Pool(self._limit)

    def take(
        self, nbytes: int, counted: int, sizes: Sequence[int] = (), offsets: Mapping[int, int] | None = None
    ) -> Room:
        """Return room for `nbytes`, with memory for buffers of `sizes`; wait for it if necessary.

        `offsets` are as for `allocate`. Raises `CancelledError` once `end` has been called.
        """
        with self._changed:
            while True:
                self._collect()
                if self._ended:
                    raise CancelledError
                if not self._rooms or (
                    len(self._rooms) < _ROOMS and sum(room.nbytes for room in self._rooms) + nbytes <= self._limit
                ):
                    taken = self._pool.take(sizes, offsets) if sizes else None
                    if taken is not None or not sizes:
                        self._rooms.append(room := Room(nbytes, counted, taken))
                        return room
                self._wait()

    def send(self, room: Room, sent: Sequence[jax.Array]) -> None:
        """Free `room` when the devices have `sent`, which was made of its memory."""
        with self._changed:
            room.sent = sent
            self._sent.append(room)
            self._collect()
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until all rooms are free, also those that another thread has still to send."""
        while self.wait_for_one():
            pass

    def wait_for_one(self) -> bool:
        """Wait until one more room is free; return whether there was one that was not."""
        with self._changed:
            self._collect()
            if not self._rooms:
                return False
            if self._ended:
                raise CancelledError
            self._wait()
            self._collect()
            return True

    def end(self) -> None:
        """Make threads fail that wait for room, or for rooms to be free."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def settle(self) -> None:
        """Wait until no device reads any room, whether or not it got what was there."""
        for room in self._sent:
            with contextlib.suppress(Exception):
                arrays.wait(room.sent)

    def _collect(self) -> None:
        while self._sent and arrays.are_ready(self._sent[0].sent):
            room = self._sent.popleft()
            room.sent = ()
            self._rooms.remove(room)
            self.arrived += room.counted
            if room.taken is not None:
                self._pool.give_back(room.taken)
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

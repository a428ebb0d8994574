"""Objects that are being written: parts go out in order while the next ones are made, and the object appears whole.

Nobody sees an unfinished object. An upload that is given up is aborted, so that the store deletes its parts. Parts that
a killed process leaves behind may cost money until a rule of the bucket removes them. An object can also wait with its
last part until it is synced: an object that is a checkpoint by itself appears once its config is there.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import obstore
from obstore.exceptions import BaseError

from orbax_safetensors.errors import StorageError
from orbax_safetensors.storage.event_loop import Requests
from orbax_safetensors.storage.memory import allocate
from orbax_safetensors.storage.retries import explain

if TYPE_CHECKING:
    from obstore.store import ObjectStore

# Long enough that a part spends most of its time on bytes rather than on the request.
PART_BYTES = 8 * 2**20
# Parts of one object in memory besides the parts in flight: one is next, and one is being filled.
_PARTS_WAITING = 2
# More would not be faster: with eight parts in flight, one object fills a link of several Gbit/s.
PARTS = 8 + _PARTS_WAITING
# The most parts that stores accept for one object.
_MAX_PARTS = 10_000
_MIB = 2**20
# How long giving up may take, in seconds. Parts that stay behind are not worth a longer wait.
_ABORT_SECONDS = 30.0


_NOTHING = np.empty(0, np.uint8)


def num_parts(nbytes: int) -> int:
    """Return how many parts an object of `nbytes` bytes has; each is one request.

    Does not count the two requests that begin and end an upload of several parts.
    """
    return max(1, -(-nbytes // _part_bytes(nbytes)))


def files_at_once(requests: int) -> tuple[int, int]:
    """Return how many objects to write at once, and how many of all `requests` each may use."""
    files = max(1, requests // PARTS)
    return files, requests // files


def _in_flight(nbytes: int, requests: int) -> int:
    parts_in_memory = min(requests, PARTS) * PART_BYTES // _part_bytes(nbytes)
    return max(1, parts_in_memory - _PARTS_WAITING)


def _part_bytes(nbytes: int) -> int:
    return max(PART_BYTES, -(-nbytes // _MAX_PARTS // _MIB) * _MIB)


class _AbortedError(Exception):
    pass


class NewRemoteFile:
    """An object that one process writes; see `store.NewFile`.

    Bytes that come too early are kept until the bytes before them come. The object appears with its last byte.
    """

    def __init__(
        self, path: str, key: str, objects: ObjectStore, nbytes: int, requests: int, *, waits: bool = False
    ) -> None:
        """Begin an object of `nbytes` bytes. `objects` retries requests after temporary failures.

        At most `requests` parts of `PART_BYTES` are in memory, or three parts if these are more. An object that `waits`
        keeps its last part in memory, and appears when `sync` is called.
        """
        self.path = path
        self._key = key
        self._objects = objects
        self._nbytes = nbytes
        self._part_bytes = _part_bytes(nbytes)
        self._in_flight = _in_flight(nbytes, requests)
        self._part = _NOTHING
        self._filled = 0  # of the part
        self._received = 0  # of the object
        self._waits = waits
        self._last_part: np.ndarray | None = None
        self._ahead: dict[int, np.ndarray] = {}
        self._parts: asyncio.Queue[np.ndarray | None] = asyncio.Queue(1)
        self._upload: asyncio.Task[None] | None = None
        self._requests = Requests()
        self._lock = threading.Lock()
        if nbytes == 0:
            self._take(self._part)

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Copy `buffers`, which the caller may then reuse, and wait while many parts are in flight.

        Raises `StorageError` if an earlier part could not be written.
        """
        with self._lock:
            for buffer in buffers:
                data = np.frombuffer(buffer, np.uint8)
                if offset == self._received:
                    self._append(data)
                    while self._received in self._ahead:
                        self._append(self._ahead.pop(self._received))
                elif data.size:
                    self._ahead[offset] = data.copy()
                offset += data.size

    def _append(self, data: np.ndarray) -> None:
        if self._received + data.size > self._nbytes:
            raise StorageError(f"{self.path}: expected {self._nbytes} bytes, got {self._received + data.size}")
        while data.size:
            if not self._part.size:
                (self._part,) = allocate([min(self._part_bytes, self._nbytes - self._received)])
            count = min(data.size, self._part.size - self._filled)
            np.copyto(self._part[self._filled : self._filled + count], data[:count])
            self._filled, self._received, data = self._filled + count, self._received + count, data[count:]
            if self._filled == self._part.size:
                part, self._part, self._filled = self._part, _NOTHING, 0
                self._take(part)

    def _take(self, part: np.ndarray) -> None:
        last = self._received == self._nbytes
        if last and self._waits:
            self._last_part = part
        else:
            self._send(part, last=last)

    def _send(self, part: np.ndarray, *, last: bool) -> None:
        try:
            self._requests.run(f"{self.path}: writing", self._enqueue(part, last=last))
            return
        except StorageError:
            raise
        except (BaseError, OSError) as error:
            fault = explain(self.path, error)
        # Raised outside the handler: the error may hold the query of a URL.
        raise StorageError(f"{self.path}: writing failed: {fault}")

    async def _enqueue(self, part: np.ndarray, *, last: bool) -> None:
        """Wait until the upload takes a part or fails; after the last part, wait until the upload ends."""
        queued: list[np.ndarray | None] = [part, None] if last else [part]
        if self._upload is None:
            self._upload = asyncio.create_task(self._put(part if last else None))
            if last:
                queued.clear()
        del part
        while queued:
            await self._hand_over(queued.pop(0), self._upload)
        if last:
            await asyncio.shield(self._upload)  # `close` ends it: nobody knows what a cancelled request still does

    async def _hand_over(self, part: np.ndarray | None, upload: asyncio.Task[None]) -> None:
        """Wait until the upload takes a part; if the upload has ended, raise its error."""

        async def taken(part: np.ndarray | None) -> None:
            await self._parts.put(part)
            await self._parts.join()

        task = asyncio.ensure_future(taken(part))
        del part
        try:
            await asyncio.wait((task, upload), return_when=asyncio.FIRST_COMPLETED)
        finally:
            task.cancel()
        if upload.done():
            upload.result()

    async def _put(self, whole: np.ndarray | None) -> None:
        if whole is not None:  # as one request
            await obstore.put_async(self._objects, self._key, whole.data, use_multipart=False)
            return
        await obstore.put_async(
            self._objects,
            self._key,
            self._queued_parts(),
            use_multipart=True,
            chunk_size=self._part_bytes,
            max_concurrency=self._in_flight,
        )

    async def _queued_parts(self) -> AsyncIterator[memoryview]:
        while (part := await self._parts.get()) is not None:
            self._parts.task_done()
            if not part.size:
                raise _AbortedError  # obstore then aborts the upload
            data = [part.data]
            del part
            yield data.pop()  # which is then obstore's alone

    def sync(self) -> None:
        """Return when the object is there; raise `StorageError` if bytes are missing.

        The write of the last byte has waited for the whole upload, unless the object itself waits.
        """
        if self._received < self._nbytes:
            raise StorageError(f"{self.path}: expected {self._nbytes} bytes, got {self._received}")
        with self._lock:
            if self._last_part is not None:
                part, self._last_part = self._last_part, None
                self._send(part, last=True)

    def cancel(self) -> None:
        """Make pending writes of other threads fail soon, and all later writes."""
        self._requests.cancel()

    def close(self) -> None:
        """Abort the upload if bytes are missing, and wait for its end; there is no object then."""
        self._requests.cancel()
        with self._lock:
            self._part, self._last_part = _NOTHING, None
            self._ahead.clear()
        Requests().run(f"{self.path}: giving up", self._abort())

    async def _abort(self) -> None:
        upload, self._upload = self._upload, None  # on the loop, where a cancelled write may just have begun one
        if upload is None:
            return
        while not self._parts.empty():
            self._parts.get_nowait()
        self._parts.put_nowait(_NOTHING)
        await asyncio.wait((upload,), timeout=_ABORT_SECONDS)
        upload.cancel()
        await asyncio.wait((upload,))
        if not upload.cancelled():
            upload.exception()  # already raised by a write, or of no interest any more

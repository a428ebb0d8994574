"""Objects of a store behind a network, read by many range requests at once.

Opening an object pins its version: every answer has to be of this version, and to have exactly the requested bytes.
Answers are collected in memory and then copied to their destinations.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import obstore
from obstore import Bytes
from obstore.exceptions import PreconditionError

from orbax_safetensors.errors import MissingError, StorageError
from orbax_safetensors.storage.event_loop import Requests
from orbax_safetensors.storage.links import Ranged
from orbax_safetensors.storage.retries import ChangedError, Retries, WrongAnswerError, status_of
from orbax_safetensors.storage.store import UNKNOWN, Cost, File, NewFile, Stamp

if TYPE_CHECKING:  # obstore has these for type checkers only
    from obstore import GetOptions, ObjectMeta
    from obstore.store import ObjectStore

_T = TypeVar("_T")

# Bytes that opening an object reads, in the hope that nothing else is needed: an index, a config and most headers are
# shorter. They take no longer than the request itself.
HEAD_BYTES = 512 * 2**10
# Short requests of one `read` in flight at once. Together they hold no more than one long request.
_SHORT_REQUESTS = 16
# Short requests of all reads of this process, besides one of each read. Each has a connection, of which a process may
# open about a thousand; and as each takes half a millisecond of processor time, more would not be faster.
_more = asyncio.Semaphore(64)

# A request takes about 30 ms until its first byte comes, and then about 33 MB/s come: gaps of 1 MiB are read along. A
# request of 8 MiB spends most of its time on bytes; as many as 64 of them fill a link of 20 Gbit/s.
COST = Cost(
    request_seconds=2**-5,
    bytes_per_second=2**25,
    requests=64,
    max_request_bytes=8 * 2**20,
    held_in_flight=True,
)

# Error if somebody writes to a read-only server.
READ_ONLY = "is on a server that files can only be read from"

NO_DATE = datetime.fromtimestamp(0, UTC)  # obstore's date for an object without a date


# Requests bytes of an object by offset and length, perhaps several times. Returns exactly these bytes or raises
# `StorageError`.
Request = Callable[[int, int], Coroutine[Any, Any, Bytes | bytes]]


class RemoteFile:
    """An object that is open for reading; see `store.File`."""

    def __init__(self, path: str, stamp: Stamp, head: Bytes | None, request: Request, cost: Cost) -> None:
        """Open an object; `head` is its first bytes, or None if they have not been read."""
        self.path = path
        self.stamp = stamp
        self._head = head
        self._request = request
        self._cost = cost
        self._requests = Requests()

    def read(self, ranges: Iterable[tuple[int, Sequence[memoryview]]]) -> None:
        """Fill buffers, with short requests at once: together they hold no more bytes than one long request."""
        waiting: deque[tuple[Future[Bytes | bytes], Sequence[memoryview], int]] = deque()
        held = 0
        try:
            for offset, buffers in ranges:
                nbytes = sum(buffer.nbytes for buffer in buffers)
                if not nbytes:
                    continue
                if (known := self._known(offset, nbytes)) is not None:
                    _scatter(known, buffers)
                    continue
                while waiting and (held + nbytes > self._cost.max_request_bytes or len(waiting) >= _SHORT_REQUESTS):
                    held -= self._take(*waiting.popleft())
                request = self._request_in_turn if waiting else self._request
                waiting.append((self._requests.start(request(offset, nbytes)), buffers, nbytes))
                held += nbytes
            while waiting:
                self._take(*waiting.popleft())
        except CancelledError:
            raise StorageError(f"{self.path}: reading was cancelled") from None
        finally:
            for future, _, _ in waiting:
                future.cancel()

    def fetch(self, offset: int, nbytes: int) -> memoryview:
        """Return the answer to a request."""
        if (known := self._known(offset, nbytes)) is not None:
            return known
        return memoryview(self._requests.run(f"{self.path}: reading", self._request(offset, nbytes)))

    def scatter(self, offset: int, runs: np.ndarray) -> bool:
        """Return False: an answer is copied anyway."""
        return False

    def _known(self, offset: int, nbytes: int) -> memoryview | None:
        """Return bytes that came when the object was opened; `StorageError` if the object has fewer."""
        if offset + nbytes > self.stamp.nbytes:
            raise StorageError(
                f"{self.path}: expected {nbytes} bytes at offset {offset}, found the file's end at {self.stamp.nbytes}"
            )
        if self._head is None or offset + nbytes > len(self._head):
            return None
        return memoryview(self._head)[offset : offset + nbytes]

    async def _request_in_turn(self, offset: int, nbytes: int) -> Bytes | bytes:
        async with _more:
            return await self._request(offset, nbytes)

    def _take(self, future: Future[Bytes | bytes], buffers: Sequence[memoryview], nbytes: int) -> int:
        try:
            _scatter(memoryview(future.result()), buffers)
        finally:
            future.cancel()
        return nbytes

    def map(self) -> memoryview:
        """Raise `StorageError`, see `RemoteStore.is_local`."""
        raise StorageError(f"{self.path}: is not on a local file system, and cannot be mapped into memory")

    def check(self, stamp: Stamp) -> None:
        """Raise `StorageError` if this is another state than `stamp`. Each answer has been checked already."""
        if stamp != self.stamp:
            raise changed(self.path, stamp, f"{self.stamp.nbytes} bytes of version {self.stamp.version}")

    def cancel(self) -> None:
        """End the requests in flight."""
        self._requests.cancel()

    def close(self) -> None:
        """End the requests in flight; connections belong to the store."""
        self._requests.cancel()
        self._head = None


def _scatter(source: memoryview, buffers: Sequence[memoryview]) -> None:
    """Copy bytes into one buffer after the other. NumPy lets other threads run meanwhile, a memoryview does not."""
    done = 0
    for buffer in buffers:
        np.copyto(np.frombuffer(buffer, np.uint8), np.frombuffer(source[done : done + buffer.nbytes], np.uint8))
        done += buffer.nbytes


def stamp_of(meta: ObjectMeta) -> Stamp:
    """Return the state of an object: its ETag, or else the date of its last change, if the server sends either.

    A generation is not part of it: listings do not have it, and a copy of an object has another one.
    """
    tag, modified = meta["e_tag"], meta["last_modified"]
    if tag:
        return Stamp(meta["size"], tag)
    return Stamp(meta["size"], UNKNOWN if modified == NO_DATE else f"modified {modified.isoformat()}")


def changed(path: str, stamp: Stamp, found: str) -> StorageError:
    """Return the error for a file that is no longer in the state of `stamp`."""
    return StorageError(
        f"{path}: changed while it was in use: expected {stamp.nbytes} bytes of version {stamp.version}, found {found}"
    )


async def body(answer: Ranged, offset: int, nbytes: int) -> Bytes:
    """Return the body of an answer; `WrongAnswerError` if it is not the requested range."""
    if tuple(answer.range) != (offset, offset + nbytes):
        raise WrongAnswerError(f"the server sent bytes {answer.range[0]} to {answer.range[1]} instead")
    content = await answer.bytes_async()
    if len(content) != nbytes:
        raise WrongAnswerError(f"the server sent {len(content)} bytes instead")
    return content


class ServerStore:
    """What all stores behind a network have in common; see `store.Store`. `BucketStore` also writes.

    A path is the URL of a file without a query, user or password, as users see it.
    """

    is_local = False
    lists = True
    writes = False

    def __init__(self, root: str, retries: Retries) -> None:
        """Describe the files below `root`, a URL without a slash at its end."""
        self.root = root
        self.retries = retries
        self.cost = COST
        self._requests = Requests()

    def _key(self, path: str) -> str:
        if path != self.root and not path.startswith(self.root + "/"):
            raise StorageError(f"{path}: is not below {self.root}")
        return path[len(self.root) + 1 :].strip("/")

    def _run(self, path: str, verb: str, attempt: Callable[[], Awaitable[_T]]) -> _T:
        """Return the result of a request, with retries."""
        return self._requests.run(f"{path}: {verb}", self.retries.run(path, verb, attempt))

    def list(self, path: str) -> Mapping[str, Stamp | None] | None:
        """See `Store.list`. Nobody asks a store that has no `lists`."""
        raise NotImplementedError

    def open(self, path: str, stamp: Stamp | None = None) -> File:
        """See `Store.open`. Subclasses raise `MissingError` if there is no such file."""
        raise NotImplementedError

    def find(self, path: str) -> File | None:
        """Return `open`, or None if there is no such file."""
        try:
            return self.open(path)
        except MissingError:
            return None

    def sha256(self, path: str) -> str | None:
        """Return None: a server's names for contents are not digests."""
        return None

    def cancel(self) -> None:
        """End requests that list and open files."""
        self._requests.cancel()

    def create(self, path: str, nbytes: int | None = None, requests: int = 1, *, sync: bool = False) -> NewFile:
        """Refuse."""
        raise StorageError(f"{path}: {READ_ONLY}")

    def below(self, path: str) -> dict[str, Stamp]:
        """Refuse: the caller is about to write."""
        raise StorageError(f"{path}: {READ_ONLY}")

    def delete(self, path: str, names: Iterable[str]) -> None:
        """Refuse."""
        raise StorageError(f"{path}: {READ_ONLY}")

    def sync(self, path: str) -> None:
        """Do nothing: a file is durable when the server has answered."""


class RemoteStore(ServerStore):
    """Objects that obstore reads: of an HTTP server, unless a subclass can do more; see `store.Store`."""

    lists = False

    def __init__(self, root: str, objects: ObjectStore, retries: Retries) -> None:
        """Describe the objects below `root`, which is where keys of `objects` begin.

        `objects` makes each request once, and knows the secrets that are not in paths.
        """
        super().__init__(root, retries)
        self.objects = objects

    def open(self, path: str, stamp: Stamp | None = None) -> RemoteFile:
        """Open an object with a request for its first bytes, or without a request if its state is known."""
        if stamp is not None:
            return self._file(path, stamp, None)
        key = self._key(path)
        try:
            found, head = self._run(path, "opening", lambda: self._head(key))
        except FileNotFoundError:
            raise MissingError(f"{path}: cannot be opened: there is no such object") from None
        return self._file(path, found, head)

    def _file(self, path: str, stamp: Stamp, head: Bytes | None) -> RemoteFile:
        return RemoteFile(path, stamp, head, partial(self._fetch, path, stamp), self.cost)

    async def _fetch(self, path: str, stamp: Stamp, offset: int, nbytes: int) -> Bytes:
        key = self._key(path)

        async def attempt() -> Bytes:
            options: GetOptions = {"range": (offset, offset + nbytes)}
            tag, end, _ = stamp.version.rpartition('"')
            if tag.startswith('"'):  # a strong tag: servers never match weak tags
                options["if_match"] = tag + end
            try:
                answer = await self._get(key, options)
            except PreconditionError:
                raise ChangedError("another") from None
            found = stamp_of(answer.meta)
            if found != stamp:
                raise ChangedError(f"{found.nbytes} bytes of version {found.version}")
            return await body(answer, offset, nbytes)

        try:
            return await self.retries.run(path, f"reading {nbytes} bytes at offset {offset}", attempt)
        except ChangedError as error:
            raise changed(path, stamp, str(error)) from None
        except FileNotFoundError:
            raise changed(path, stamp, "that it is gone") from None

    async def _head(self, key: str) -> tuple[Stamp, Bytes]:
        """Return an object's state and first bytes."""
        try:
            answer = await self._get(key, {"range": (0, HEAD_BYTES)})
        except Exception as error:
            if status_of(error) != 416:
                raise
            # A server cannot satisfy any range of an empty object.
            return stamp_of((await self._get(key, {})).meta), Bytes()
        found = stamp_of(answer.meta)
        return found, await body(answer, 0, min(HEAD_BYTES, found.nbytes))

    async def _get(self, key: str, options: GetOptions) -> Ranged:
        return await obstore.get_async(self.objects, key, options=options)

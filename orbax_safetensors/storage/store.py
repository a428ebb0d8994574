"""The protocols of storage, which `local`, `remote` (object stores), `web` (HTTP servers) and `hub` implement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from orbax_safetensors.errors import StorageError

# The version of all states of a file if its server sends none.
UNKNOWN = "unknown"


class Stamp(NamedTuple):
    """A state of a file, to notice that the file changed while it was read.

    `version` is text that differs between states: a file system's record of the last change, or a server's name for the
    content. If it is `UNKNOWN`, only another size shows a change.
    """

    nbytes: int
    version: str


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What requests to a store cost, and how many of them it accepts.

    Attributes:
      request_seconds: time of a request without its bytes.
      bytes_per_second: of one request.
      requests: reads or writes in flight at once.
      max_request_bytes: the longest read that goes straight to its destination.
      held_in_flight: whether the bytes of a request are held in memory before they reach their destination.
    """

    request_seconds: float
    bytes_per_second: float
    requests: int
    max_request_bytes: int
    held_in_flight: bool

    @property
    def max_gap_bytes(self) -> int:
        """Return the longest gap between two ranges that is faster to read than to leave out by a further request."""
        return round(self.request_seconds * self.bytes_per_second)

    @property
    def held_request_bytes(self) -> int:
        """Return the most bytes that a request holds in memory besides its destination."""
        return self.max_request_bytes if self.held_in_flight else 0

    def affordable(self, requests: int, in_flight_bytes: int) -> int:
        """Return how many of `requests` hold at most a quarter of `in_flight_bytes`; at least one."""
        if not self.held_request_bytes:
            return requests
        return max(1, min(requests, in_flight_bytes // 4 // self.held_request_bytes))

    def request_limits(self, requests: int | None, max_gap_bytes: int | None, in_flight_bytes: int) -> RequestLimits:
        """Return the limits of a transfer, with defaults for None.

        By default, the bytes that requests hold take at most a quarter of `in_flight_bytes`.
        """
        return RequestLimits(
            self.affordable(self.requests, in_flight_bytes) if requests is None else requests,
            self.max_gap_bytes if max_gap_bytes is None else max_gap_bytes,
            self.max_request_bytes,
        )


class RequestLimits(NamedTuple):
    """How a transfer uses a store: requests at once, the longest gap and the longest request, both in bytes."""

    requests: int
    max_gap_bytes: int
    max_request_bytes: int


class File(Protocol):
    """A file that is open for reading, and safe to use from several threads. Close it once none of them uses it."""

    path: str
    stamp: Stamp  # when it was opened

    def read(self, ranges: Iterable[tuple[int, Sequence[memoryview]]]) -> None:
        """Fill the buffers of each range with the bytes from its offset on, one buffer after the other.

        Each range is one request. Raises `StorageError` unless all buffers are filled.
        """

    def fetch(self, offset: int, nbytes: int) -> memoryview | None:
        """Return `nbytes` bytes from `offset` on, in new memory; None if this file only reads into buffers.

        Raises `StorageError` if there are fewer.
        """

    def scatter(self, offset: int, runs: np.ndarray) -> bool:
        """Fill runs of memory with the bytes from `offset` on, one after the other, as one request.

        `runs` has the address and the length in bytes of one run in each row, as `uintp`. The caller keeps the memory.
        Returns False, and reads nothing, if `read` into one buffer and a copy are faster.
        """

    def map(self) -> memoryview:
        """Return the whole file as read-only memory. It is read when it is touched, and lives as long as it is used."""

    def check(self, stamp: Stamp) -> None:
        """Raise `StorageError` if bytes that were read may be of another state than `stamp`."""

    def cancel(self) -> None:
        """Make pending reads of other threads fail soon, and all later reads."""

    def close(self) -> None:
        """Release the file's resources."""


class NewFile(Protocol):
    """A file that is being written. In a local store, several processes may write different ranges."""

    path: str

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write `buffers` one after the other from `offset` on; `StorageError` unless all bytes are written."""

    def sync(self) -> None:
        """Wait until all written bytes are on the disk."""

    def cancel(self) -> None:
        """Make pending writes of other threads fail soon, and all later writes."""

    def close(self) -> None:
        """Release the file's resources."""


class Store(Protocol):
    """A place where files are."""

    cost: Cost
    # Whether files are on a file system of this machine: they can be mapped into memory, and several processes write
    # ranges of them in any order. Elsewhere one process writes a new file, best in order, and the file appears after
    # its last byte.
    is_local: bool
    lists: bool  # whether the store can list the names in a directory
    writes: bool  # whether files can be made and deleted

    def list(self, path: str) -> Mapping[str, Stamp | None] | None:
        """Return the names of the files in the directory `path`, sorted; None if `path` is a file.

        Each has the state in which `open` finds it, or None if the listing does not tell that.
        """

    def open(self, path: str, stamp: Stamp | None = None) -> File:
        """Open a file for reading; `StorageError` if it cannot be opened.

        Raises `StorageError` also if the file is not in the state of `stamp`, unless its reads check the state.
        """

    def find(self, path: str) -> File | None:
        """Return `open`, or None if there is no such file."""

    def sha256(self, path: str) -> str | None:
        """Return the SHA-256, in lower-case hexadecimal, that the Hugging Face Hub has of a file; None if unknown."""

    def cancel(self) -> None:
        """Make pending calls of `open` in other threads fail soon, and all later calls."""

    def create(self, path: str, nbytes: int | None = None, requests: int = 1, *, sync: bool = False) -> NewFile:
        """Open a file for writing, and create it if it does not exist; `StorageError` if it cannot be opened.

        `nbytes` is the final size, which only a local store can do without; a longer local file is cut there. In other
        stores, at most `requests` requests may hold bytes of the file in memory. `sync` says that `NewFile.sync` will
        be called: in a local store, bytes then begin to go to the disk as they are written; in others, the file does
        not appear before.
        """

    def below(self, path: str) -> dict[str, Stamp]:
        """Return the states of all files in the directory `path` and in its subdirectories, by their paths below it."""

    def delete(self, path: str, names: Iterable[str]) -> None:
        """Delete files by their paths below the directory `path`, and subdirectories that they leave empty.

        Files that do not exist are no error. Raises `StorageError` on failure, or if `path` is a whole bucket.
        """

    def sync(self, path: str) -> None:
        """Wait until the names of new files in the directory `path` are on the disk."""


def write_small(store: Store, path: str, content: bytes, *, sync: bool = True, nbytes: int | None = None) -> None:
    """Write a file, or the beginning of a file of `nbytes`; with `sync`, return when it is on the disk."""
    file = store.create(path, len(content) if nbytes is None else nbytes)
    try:
        file.write(0, [memoryview(content)])
        if sync:
            file.sync()
    finally:
        file.close()


def read_small(file: File, most: int) -> bytes:
    """Return the content of a file, and close the file; `StorageError` if it has more than `most` bytes."""
    try:
        if file.stamp.nbytes > most:
            raise StorageError(f"{file.path}: expected at most {most} bytes, found {file.stamp.nbytes}")
        content = bytearray(file.stamp.nbytes)
        file.read([(0, [memoryview(content)])])
        return bytes(content)
    finally:
        file.close()


def find_small(store: Store, path: str, most: int) -> bytes | None:
    """Return `read_small` of the file at `path`; None if there is no such file."""
    file = store.find(path)
    return None if file is None else read_small(file, most)


def is_there(store: Store, path: str) -> bool:
    """Return whether there is a file at `path`."""
    if (file := store.find(path)) is None:
        return False
    file.close()
    return True

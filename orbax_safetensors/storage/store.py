"""What the package asks of storage: `local` implements it for file systems, `remote` for object stores and HTTP."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from orbax_safetensors.errors import StorageError

# The version of every state of a file whose server tells none.
UNKNOWN = "unknown"


class Stamp(NamedTuple):
    """Identifies one state of a file, to notice that it changed while it was read.

    `version` is text that differs between states: what a file system says of a file's last change, or a server's name
    for the content; or `UNKNOWN`, with which only another size tells of a change.
    """

    nbytes: int
    version: str


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What requests to a store cost, and how many of them it takes.

    Attributes:
      request_seconds: that a request takes besides those for its bytes.
      bytes_per_second: of one request.
      requests: reads or writes that are in flight at once.
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
        """The longest gap between two ranges that is read along rather than left out by a further request."""
        return round(self.request_seconds * self.bytes_per_second)

    def affordable(self, requests: int, in_flight_bytes: int) -> int:
        """As many of `requests` as hold at most a quarter of `in_flight_bytes`, and one at least."""
        if not self.held_in_flight:
            return requests
        return max(1, min(requests, in_flight_bytes // 4 // self.max_request_bytes))

    def pace(self, requests: int | None, max_gap_bytes: int | None, in_flight_bytes: int) -> Pace:
        """How to ask, where somebody has asked for some of it.

        Bytes that requests hold take at most a quarter of `in_flight_bytes`, where nobody says how many there are.
        """
        return Pace(
            self.affordable(self.requests, in_flight_bytes) if requests is None else requests,
            self.max_gap_bytes if max_gap_bytes is None else max_gap_bytes,
            self.max_request_bytes,
        )


class Pace(NamedTuple):
    """How a transfer asks a store: requests at once, the longest gap and the longest request, both in bytes."""

    requests: int
    max_gap_bytes: int
    max_request_bytes: int


class File(Protocol):
    """A file that is open for reading. Safe to use from several threads; close it once none uses it."""

    path: str
    stamp: Stamp  # when it was opened

    def read(self, ranges: Iterable[tuple[int, Sequence[memoryview]]]) -> None:
        """Fills the buffers of each range one after the other with the bytes from its offset on.

        Each range is one request. All of them are filled, or `StorageError`.
        """

    def map(self) -> memoryview:
        """The whole file as read-only memory that is filled when it is touched, and lives as long as it is used."""

    def check(self, stamp: Stamp) -> None:
        """Raises `StorageError` where what was read may be of another state than that which `stamp` was taken in."""

    def cancel(self) -> None:
        """Makes reads that other threads wait for fail soon, and all later ones."""

    def close(self) -> None:
        """Gives back what the file holds."""


class NewFile(Protocol):
    """A file that is being written: perhaps by several processes, each its own ranges, unless its store is `whole`."""

    path: str

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Writes `buffers` one after the other from `offset` on; all of them or `StorageError`."""

    def sync(self) -> None:
        """Waits until what was written is on the disk."""

    def cancel(self) -> None:
        """Makes writes that other threads wait for fail soon, and all later ones."""

    def close(self) -> None:
        """Gives back what the file holds."""


class Store(Protocol):
    """A place where files are."""

    cost: Cost
    maps: bool  # whether files can be mapped into memory
    lists: bool  # whether the names in a directory can be had
    # Whether a new file appears at once, when all of its bytes have come, from one process; best in their order.
    whole: bool
    writes: bool  # whether files can be made and deleted

    def list(self, path: str) -> list[str] | None:
        """Names of the files in the directory `path`, sorted; None where `path` is one file."""

    def open(self, path: str, stamp: Stamp | None = None) -> File:
        """Opens a file for reading; `StorageError` where that is not possible.

        So it is where the file is not in the state that `stamp` was taken in, unless its reads will say so.
        """

    def find(self, path: str) -> File | None:
        """`open`, or None where there is no such file."""

    def cancel(self) -> None:
        """Makes files that other threads wait for fail to open soon, and all that are opened later."""

    def create(self, path: str, nbytes: int | None = None, requests: int = 1) -> NewFile:
        """Opens a file for writing, and makes it where it is not there; `StorageError` where that is not possible.

        `nbytes` is the size that it will have, which a store that is `whole` has to know. There, `requests` are those
        that may hold bytes of it in memory.
        """

    def make(self, path: str) -> None:
        """Makes the directory `path`, if this store has directories that are not there by the files in them."""

    def delete(self, path: str) -> None:
        """Deletes everything in the directory `path`, and in the directories in it; `StorageError` where that fails.

        So it does with what is no directory but a whole bucket.
        """

    def sync(self, path: str) -> None:
        """Waits until the names of new files in the directory `path` are on the disk."""


def write_small(store: Store, path: str, content: bytes, *, sync: bool = True) -> None:
    """Writes the beginning of a file, or all of it; with `sync`, returns when the file is on the disk."""
    file = store.create(path, len(content))
    try:
        file.write(0, [memoryview(content)])
        if sync:
            file.sync()
    finally:
        file.close()


def read_small(file: File, most: int) -> bytes:
    """All that a file holds, which is closed; `StorageError` where it has more than `most` bytes."""
    try:
        if file.stamp.nbytes > most:
            raise StorageError(f"{file.path}: expected at most {most} bytes, found {file.stamp.nbytes}")
        content = bytearray(file.stamp.nbytes)
        file.read([(0, [memoryview(content)])])
        return bytes(content)
    finally:
        file.close()

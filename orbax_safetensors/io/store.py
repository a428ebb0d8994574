"""What the package asks of storage. `local` is the implementation for file systems."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Stamp(NamedTuple):
    """Identifies one state of a file, to notice that it changed while it was read."""

    nbytes: int
    mtime_ns: int
    inode: int


class File(Protocol):
    """A file that is open for reading. Safe to use from several threads; close it once none uses it."""

    path: str
    stamp: Stamp  # when it was opened

    def read(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fills `buffers` one after the other with the bytes from `offset` on; all of them or `StorageError`."""

    def map(self) -> memoryview:
        """The whole file as read-only memory that is filled when it is touched, and lives as long as it is used."""

    def check(self, stamp: Stamp) -> None:
        """Raises `StorageError` where the file is no longer in the state that `stamp` was taken in."""

    def close(self) -> None:
        """Gives back what the file holds."""


class NewFile(Protocol):
    """A file that is being written, perhaps by several processes, each its own ranges."""

    path: str

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Writes `buffers` one after the other from `offset` on; all of them or `StorageError`."""

    def sync(self) -> None:
        """Waits until what was written is on the disk."""

    def close(self) -> None:
        """Gives back what the file holds."""


class Store(Protocol):
    """A place where files are."""

    def list(self, path: str) -> list[str] | None:
        """Names of the files in the directory `path`, sorted; None where `path` is one file."""

    def open(self, path: str) -> File:
        """Opens a file for reading; `StorageError` where that is not possible."""

    def create(self, path: str) -> NewFile:
        """Opens a file for writing, and makes it where it is not there; `StorageError` where that is not possible."""

    def sync(self, path: str) -> None:
        """Waits until the names of new files in the directory `path` are on the disk."""

"""The figures that plans have in common.

*Needed* bytes are those that shards hold, each counted once; *read* and *written* bytes are those that storage is asked
for, in so many requests. A request is one storage operation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


class NeededAndRead(Protocol):
    """What has these two figures."""

    @property
    def needed_bytes(self) -> int:
        """Bytes that are needed."""

    @property
    def read_bytes(self) -> int:
        """Bytes that are read."""


class OverRead:
    """Adds the over-read to what has needed and read bytes."""

    __slots__ = ()

    @property
    def over_read(self: NeededAndRead) -> float:
        """Bytes read for each byte needed; 1.0 if nothing is needed."""
        return self.read_bytes / self.needed_bytes if self.needed_bytes else 1.0


@dataclass(frozen=True)
class Reads(OverRead):
    """What is needed and what is read, of anything."""

    needed_bytes: int
    read_bytes: int

    @staticmethod
    def total(costs: Iterable[NeededAndRead]) -> Reads:
        """Return the sums over `costs`."""
        figures = [(cost.needed_bytes, cost.read_bytes) for cost in costs]
        return Reads(sum(needed for needed, _ in figures), sum(read for _, read in figures))


@dataclass(frozen=True)
class FileReads(OverRead):
    """What one process reads of one file."""

    file: str
    needed_bytes: int
    read_bytes: int
    num_requests: int


@dataclass(frozen=True)
class FileWrites:
    """What one process writes into one file."""

    file: str
    written_bytes: int
    num_requests: int


@dataclass(frozen=True)
class PlannedFile:
    """A file that will be made, its name and its size."""

    file: str
    nbytes: int

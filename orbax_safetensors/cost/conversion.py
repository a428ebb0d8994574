"""What a conversion will cost every process: plain data, of the batches of tiles that it will move, and nothing moved.

Bytes of safetensors files are those that storage is asked for. Bytes of an Orbax checkpoint are those of its chunks as
they are decoded: what compression makes of a chunk is known once it has been read or written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

from orbax_safetensors.cost.estimate import TimeEstimate, estimate
from orbax_safetensors.cost.figures import FileReads, FileWrites, OverRead, PlannedFile
from orbax_safetensors.transfer.plan import TransferPlan

# Of a `ConversionCost`, as JSON has them.
_FIGURES = (
    "nbytes",
    "needed_bytes",
    "read_bytes",
    "over_read",
    "read_requests",
    "written_bytes",
    "write_requests",
    "num_tiles",
    "staging_bytes",
)


class FileTraffic(NamedTuple):
    """The traffic of one file; see `Traffic`."""

    file: str
    needed_bytes: int
    moved_bytes: int
    num_requests: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the tiles of one batch ask of storage, on one side.

    Attributes:
      needed_bytes: bytes that are stored for the tiles, each counted once.
      moved_bytes: bytes that storage is asked for; of Orbax, those of all chunks that the tiles touch.
      num_requests: storage operations; of Orbax, chunks.
      staging_bytes: memory on the way between storage and the tiles, at most.
      streams: requests in flight at once, at most.
      files: the same of each file, where the files of what is moved are known.
    """

    needed_bytes: int
    moved_bytes: int
    num_requests: int
    staging_bytes: int
    streams: int
    files: tuple[FileTraffic, ...] = ()


def traffic_of(plan: TransferPlan, files: Sequence[str], streams: int, held_bytes: int = 0) -> Traffic:
    """What a plan comes to that `streams` threads execute, whose requests hold at most `held_bytes` each.

    `files` are the names of the files, by number.
    """
    at_once = min(streams, plan.num_requests)
    return Traffic(
        plan.needed_bytes,
        plan.moved_bytes,
        plan.num_requests,
        staging_bytes=at_once * plan.window_bytes + min(at_once * held_bytes, plan.moved_bytes),
        streams=streams,
        files=tuple(FileTraffic(files[number], *figures) for number, *figures in plan.files),
    )


@dataclass(frozen=True, slots=True)
class Batch:
    """Tiles that are read at once, and then written while the next ones are read; `nbytes` is their memory."""

    num_tiles: int
    nbytes: int
    read: Traffic
    write: Traffic


@dataclass(frozen=True)
class ConversionCost(OverRead):
    """What a conversion costs one process: `batches` are all that it moves, one after the other."""

    batches: tuple[Batch, ...]

    @property
    def num_tiles(self) -> int:
        """Boxes of arrays that it moves."""
        return sum(batch.num_tiles for batch in self.batches)

    @property
    def nbytes(self) -> int:
        """Bytes of arrays that it writes, as the destination has them: `Conversion.nbytes`."""
        return sum(batch.write.needed_bytes for batch in self.batches)

    @property
    def needed_bytes(self) -> int:
        """Bytes that the source stores for that; what several batches need counts for each."""
        return sum(batch.read.needed_bytes for batch in self.batches)

    @property
    def read_bytes(self) -> int:
        """Bytes that it asks the source for."""
        return sum(batch.read.moved_bytes for batch in self.batches)

    @property
    def read_requests(self) -> int:
        """Storage operations for that; of an Orbax source, chunks."""
        return sum(batch.read.num_requests for batch in self.batches)

    @property
    def written_bytes(self) -> int:
        """Bytes that it writes, without headers and metadata."""
        return sum(batch.write.moved_bytes for batch in self.batches)

    @property
    def write_requests(self) -> int:
        """Storage operations for that; to Orbax, chunks. An object store gets what they write in parts of its own."""
        return sum(batch.write.num_requests for batch in self.batches)

    @cached_property
    def staging_bytes(self) -> int:
        """The most memory for tiles, a batch that is read and one that is written, and for what is made of both.

        To an object store, with the parts that are on their way there, but not what comes early.
        """
        most = written = 0
        for batch in self.batches:
            most = max(most, written + batch.nbytes + batch.read.staging_bytes)
            written = batch.nbytes + batch.write.staging_bytes
        return max(most, written)

    @property
    def reads(self) -> tuple[FileReads, ...]:
        """What it reads of each file; empty if the source is of Orbax."""
        return tuple(FileReads(*figures) for figures in _by_file(batch.read for batch in self.batches))

    @property
    def writes(self) -> tuple[FileWrites, ...]:
        """What it writes into each file; empty if the destination is of Orbax."""
        by_file = _by_file(batch.write for batch in self.batches)
        return tuple(FileWrites(file.file, file.moved_bytes, file.num_requests) for file in by_file)

    def to_json(self) -> dict[str, Any]:
        """The figures as a dict: of all batches together."""
        figures = {name: getattr(self, name) for name in _FIGURES}
        return figures | {
            "num_batches": len(self.batches),
            "reads": [asdict(file) for file in self.reads],
            "writes": [asdict(file) for file in self.writes],
        }


@dataclass(frozen=True)
class PlannedArray:
    """An array of an Orbax checkpoint that will be made.

    Attributes:
      name: that by which the rules of a call find it, as `spec`: a family's own, or that in its item.
      item: that it is in, where there are several.
      chunk_bytes: what a whole chunk has, decoded.
    """

    name: str
    item: str | None
    dtype: str
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    num_chunks: int
    chunk_bytes: int


@dataclass(frozen=True)
class ConversionPlan:
    """What a conversion or reshard will cost.

    Attributes:
      path: what will be made.
      processes: the cost for each process.
      files: the safetensors files that will be made.
      arrays: the arrays of the Orbax checkpoint that will be made.
      source_bytes: of all files of the source, encoded as they are; None where an object store was not asked for it.
      from_orbax: whether bytes read, and bytes needed, are decoded ones.
    """

    path: str
    processes: tuple[ConversionCost, ...]
    files: tuple[PlannedFile, ...]
    arrays: tuple[PlannedArray, ...]
    source_bytes: int | None
    from_orbax: bool

    @property
    def to_orbax(self) -> bool:
        """Whether bytes written are decoded ones."""
        return not self.files

    @property
    def total_bytes(self) -> int:
        """Bytes of arrays that all processes write, as the destination has them."""
        return sum(cost.nbytes for cost in self.processes)

    @property
    def num_chunks(self) -> int:
        """Chunks that will be made."""
        return sum(array.num_chunks for array in self.arrays)

    def estimate(
        self,
        *,
        bandwidth: float,
        latency: float = 0.0,
        write_bandwidth: float | None = None,
        write_latency: float | None = None,
    ) -> TimeEstimate:
        """How long it takes from and to storage that gives every process the same; see `estimate_time`.

        Each batch is read while the one before is written, and the next is read once that one is. `bandwidth` (bytes
        per second) and `latency` (seconds) are those of reads, and of writes as well where these have none of their
        own. Of Orbax, decoded bytes are taken to be moved: with compression it is faster. Raises `SafetensorsError`
        where a number is out of range.
        """
        write_bandwidth = bandwidth if write_bandwidth is None else write_bandwidth
        write_latency = latency if write_latency is None else write_latency
        estimate([], bandwidth, latency, 1)  # which checks the numbers, also where nothing is moved
        estimate([], write_bandwidth, write_latency, 1)
        seconds = tuple(
            _one_while_another(
                cost.batches,
                lambda batch: _seconds(batch.read, bandwidth, latency),
                lambda batch: _seconds(batch.write, write_bandwidth, write_latency),
            )
            for cost in self.processes
        )
        longest = max(seconds, default=0.0)
        return TimeEstimate(longest, seconds.index(longest) if seconds else 0, seconds)

    def to_json(self) -> str:
        """The plan as a JSON object with the names of the attributes, without single batches."""
        return json.dumps(
            {
                "path": self.path,
                "total_bytes": self.total_bytes,
                "source_bytes": self.source_bytes,
                "from_orbax": self.from_orbax,
                "to_orbax": self.to_orbax,
                "processes": [cost.to_json() for cost in self.processes],
                "files": [asdict(file) for file in self.files],
                "arrays": [asdict(array) for array in self.arrays],
            }
        )


def _by_file(traffic: Iterable[Traffic]) -> list[FileTraffic]:
    """The traffic of each file, all batches together, in the order of the names."""
    totals: dict[str, tuple[int, int, int]] = {}
    for of_batch in traffic:
        for name, *figures in of_batch.files:
            needed, moved, requests = map(sum, zip(totals.get(name, (0, 0, 0)), figures, strict=True))
            totals[name] = needed, moved, requests
    return [FileTraffic(name, *figures) for name, figures in sorted(totals.items())]


def _seconds(traffic: Traffic, bandwidth: float, latency: float) -> float:
    return estimate([(traffic.moved_bytes, traffic.num_requests)], bandwidth, latency, traffic.streams).seconds


def _one_while_another(
    batches: Sequence[Batch], reading: Callable[[Batch], float], writing: Callable[[Batch], float]
) -> float:
    """When the last batch is written: one is read while another is written, as `streaming.pipeline.stream` does."""
    read = written = before = 0.0  # `before` is when the batch before the last was written
    for batch in batches:
        read = max(read, before) + reading(batch)
        before, written = written, max(read, written) + writing(batch)
    return written

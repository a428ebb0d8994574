"""What a conversion will cost every process: plain data about the batches of tiles, counted before any byte moves.

Bytes of safetensors files are those that requests cover. Bytes of an Orbax checkpoint are those of its decoded chunks:
the compressed size of a chunk is known only after a read or a write.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from orbax_safetensors.transfer.estimate import TimeEstimate, estimate
from orbax_safetensors.transfer.figures import FileReads, FileWrites, OverRead, PlannedFile
from orbax_safetensors.transfer.plan import TransferPlan

# The figures of a `ConversionCost` in its JSON object.
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


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one batch of tiles reads, or what it writes.

    Attributes:
      needed_bytes: stored bytes of the tiles, each counted once.
      moved_bytes: bytes that requests cover; for Orbax, bytes of all chunks that the tiles touch.
      num_requests: storage operations; for Orbax, chunks.
      staging_bytes: the most memory between storage and the tiles.
      streams: the most requests in flight at once.
      files: needed bytes, moved bytes and requests of each file, if the files are known.
    """

    needed_bytes: int
    moved_bytes: int
    num_requests: int
    staging_bytes: int
    streams: int
    files: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)


def traffic_of(
    plan: TransferPlan, files: Sequence[str], threads: int, held_bytes: int = 0, *, streams: int | None = None
) -> Traffic:
    """Return the traffic of a plan that `threads` execute; each request holds at most `held_bytes` besides.

    `files` has the names of the files, by number. Of the threads, `streams` move bytes at once, by default all.
    """
    at_once = min(threads, plan.num_requests)
    return Traffic(
        plan.needed_bytes,
        plan.moved_bytes,
        plan.num_requests,
        staging_bytes=at_once * plan.window_bytes + min(at_once * held_bytes, plan.moved_bytes),
        streams=threads if streams is None else streams,
        files={files[number]: (needed, moved, requests) for number, needed, moved, requests in plan.files},
    )


@dataclass(frozen=True, slots=True)
class Batch:
    """Tiles that are read together, and then written together.

    Attributes:
      num_tiles: their number.
      nbytes: their memory.
      read, write: what they read and write.
      overlap: how many of the batches before may still be written while this one is read. One less of them are still
        written when this one begins to be written.
    """

    num_tiles: int
    nbytes: int
    read: Traffic
    write: Traffic
    overlap: int


@dataclass(frozen=True)
class ConversionCost(OverRead):
    """What a conversion costs one process, by its number, which moves `batches` one after the other."""

    process: int
    batches: tuple[Batch, ...]

    @property
    def num_tiles(self) -> int:
        """Return the number of tiles that the process moves."""
        return sum(batch.num_tiles for batch in self.batches)

    @property
    def nbytes(self) -> int:
        """Return the bytes of arrays that the process writes, as the destination stores them: `Conversion.nbytes`."""
        return sum(batch.write.needed_bytes for batch in self.batches)

    @property
    def needed_bytes(self) -> int:
        """Return the bytes that the source stores for these; bytes that several batches need count for each batch."""
        return sum(batch.read.needed_bytes for batch in self.batches)

    @property
    def read_bytes(self) -> int:
        """Return the bytes that the process reads from the source."""
        return sum(batch.read.moved_bytes for batch in self.batches)

    @property
    def read_requests(self) -> int:
        """Return the storage operations of the reads; for an Orbax source, chunks."""
        return sum(batch.read.num_requests for batch in self.batches)

    @property
    def written_bytes(self) -> int:
        """Return the bytes that the process writes, without headers and metadata."""
        return sum(batch.write.moved_bytes for batch in self.batches)

    @property
    def write_requests(self) -> int:
        """Return the storage operations of the writes; to Orbax, chunks. Parts of uploads are not counted."""
        return sum(batch.write.num_requests for batch in self.batches)

    @cached_property
    def staging_bytes(self) -> int:
        """Return the most memory for tiles: of a batch that is read and those that are written, with staging memory.

        For an object store, parts in flight are counted, but not parts that wait for earlier ones.
        """
        written = [batch.nbytes + batch.write.staging_bytes for batch in self.batches]
        most = 0
        for number, batch in enumerate(self.batches):
            before = sum(written[max(number - batch.overlap, 0) : number])
            most = max(most, before + batch.nbytes + batch.read.staging_bytes)
            most = max(most, sum(written[max(number - batch.overlap + 1, 0) : number + 1]))
        return most

    @property
    def reads(self) -> tuple[FileReads, ...]:
        """Return what the process reads of each file; empty if the source is an Orbax checkpoint."""
        files = _by_file(batch.read for batch in self.batches)
        return tuple(FileReads(name, *figures) for name, figures in files.items())

    @property
    def writes(self) -> tuple[FileWrites, ...]:
        """Return what the process writes into each file; empty if the destination is an Orbax checkpoint."""
        files = _by_file(batch.write for batch in self.batches)
        return tuple(FileWrites(name, moved, requests) for name, (_, moved, requests) in files.items())

    def to_json(self) -> dict[str, Any]:
        """Return the figures of all batches together as a dict."""
        figures = {name: getattr(self, name) for name in _FIGURES}
        return (
            {"process": self.process}
            | figures
            | {
                "num_batches": len(self.batches),
                "reads": [asdict(file) for file in self.reads],
                "writes": [asdict(file) for file in self.writes],
            }
        )


@dataclass(frozen=True)
class PlannedArray:
    """An array of the Orbax checkpoint to write.

    Attributes:
      name: the name that rules such as `spec` match: the family's name, or the name in the item.
      item: the item of the array, None if there is only one.
      chunk_bytes: decoded bytes of a whole chunk.
    """

    name: str
    item: str | None
    dtype: str
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    num_chunks: int
    chunk_bytes: int

    @property
    def nbytes(self) -> int:
        """Return the decoded bytes of the array."""
        return self.chunk_bytes // max(prod(self.chunk_shape), 1) * prod(self.shape)


@dataclass(frozen=True)
class ConversionPlan:
    """What a conversion or reshard will cost.

    ```python
    plan = ost.plan_convert("/models/qwen3", "/models/maxtext", to="orbax", family="maxtext")
    print(plan.num_chunks, plan.estimate(bandwidth=2e9, latency=0.01).seconds)
    ```

    Attributes:
      path: what will be made, as in `Conversion`.
      process_count: how many processes convert.
      processes: the cost for each process that the plan looks at; see `plan_restore`.
      files: the safetensors files to write.
      arrays: the arrays of the Orbax checkpoint to write.
      source_bytes: of all files of the source, as stored; None if an object store was not asked for the sizes.
      from_orbax: whether needed and read bytes are decoded bytes.
    """

    path: str
    process_count: int
    processes: tuple[ConversionCost, ...]
    files: tuple[PlannedFile, ...]
    arrays: tuple[PlannedArray, ...]
    source_bytes: int | None
    from_orbax: bool

    @property
    def to_orbax(self) -> bool:
        """Return whether written bytes are decoded bytes."""
        return not self.files

    @property
    def total_bytes(self) -> int:
        """Return the bytes of arrays that all processes write, as the destination stores them."""
        return sum(file.data_bytes for file in self.files) + sum(array.nbytes for array in self.arrays)

    @property
    def num_chunks(self) -> int:
        """Return the number of chunks to write."""
        return sum(array.num_chunks for array in self.arrays)

    def estimate(
        self,
        *,
        bandwidth: float,
        latency: float = 0.0,
        write_bandwidth: float | None = None,
        write_latency: float | None = None,
    ) -> TimeEstimate:
        """Return how long the conversion takes if storage serves every process equally; see `estimate_time`.

        A process reads a batch while it writes previous ones, one after the other.
        `bandwidth` (bytes per second) and `latency` (seconds) are those of reads, and by default of writes. For Orbax,
        the estimate moves decoded bytes; compression makes it faster. Raises `SafetensorsError` if a number is out of
        range.
        """
        write_bandwidth = bandwidth if write_bandwidth is None else write_bandwidth
        write_latency = latency if write_latency is None else write_latency
        estimate({}, bandwidth, latency, 1)  # checks the numbers even if nothing moves
        estimate({}, write_bandwidth, write_latency, 1)
        return TimeEstimate.of(
            {
                cost.process: _overlapped(
                    [_seconds(batch.read, bandwidth, latency) for batch in cost.batches],
                    [_seconds(batch.write, write_bandwidth, write_latency) for batch in cost.batches],
                )
                for cost in self.processes
            }
        )

    def to_json(self) -> str:
        """Return the plan as a JSON object with the names of the attributes, without single batches."""
        return json.dumps(
            {
                "path": self.path,
                "process_count": self.process_count,
                "total_bytes": self.total_bytes,
                "source_bytes": self.source_bytes,
                "from_orbax": self.from_orbax,
                "to_orbax": self.to_orbax,
                "processes": [cost.to_json() for cost in self.processes],
                "files": [asdict(file) for file in self.files],
                "arrays": [asdict(array) for array in self.arrays],
            }
        )


def _by_file(batches: Iterable[Traffic]) -> dict[str, tuple[int, int, int]]:
    """Return the figures of each file, all batches together, in the order of the names."""
    totals: dict[str, tuple[int, int, int]] = {}
    for traffic in batches:
        for name, figures in traffic.files.items():
            needed, moved, requests = map(sum, zip(totals.get(name, (0, 0, 0)), figures, strict=True))
            totals[name] = needed, moved, requests
    return dict(sorted(totals.items()))


def _seconds(traffic: Traffic, bandwidth: float, latency: float) -> float:
    return estimate({0: (traffic.moved_bytes, traffic.num_requests)}, bandwidth, latency, traffic.streams).seconds


def _overlapped(reads: Sequence[float], writes: Sequence[float]) -> float:
    """Return how long batches take, in seconds, if each is written while the next ones are read."""
    return max(sum(reads) + writes[-1], reads[0] + sum(writes)) if reads else 0.0

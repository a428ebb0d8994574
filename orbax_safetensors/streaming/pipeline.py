"""Tiles on their way from a source to a sink: the protocols of both, and the loop that keeps both busy."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from orbax_safetensors.cost.conversion import Batch, Traffic
from orbax_safetensors.errors import SafetensorsError
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.coalesce import MAX_STAGED_BYTES
from orbax_safetensors.options import Progress
from orbax_safetensors.storage.memory import resident, trim
from orbax_safetensors.storage.store import Cost, Pace
from orbax_safetensors.transfer.engine import batches

_T = TypeVar("_T")

MEMORY_BYTES = 2 * 2**30  # all that a conversion or link takes unless the caller says
_BUNDLES = 4  # that have to fit into memory
BATCHES = 8  # likewise, each as large as a tile can be
# Tiles may be as short as a page, as a row, or as this part of their array. Each costs a request and a write to the
# disk: with shorter tiles, a large array would take for ever.
_PAGE_BYTES = 4096
_SHORT_TILES = 1000


class Tile(NamedTuple):
    """A box of one leaf."""

    name: str
    box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the box."""
        return self.box.shape


class Fact(NamedTuple):
    """Shape of a leaf, and the dtype that its tiles are read with."""

    shape: tuple[int, ...]
    dtype: np.dtype


class TileSource(Protocol):
    """Leaves that are read in tiles."""

    @property
    def leaves(self) -> Mapping[str, Fact]:
        """The shape and dtype of each leaf, by name."""

    @property
    def path(self) -> str:
        """The file or directory of the leaves."""

    @property
    def identity(self) -> str:
        """A digest of these leaves, of what they are made of and of its state."""

    @property
    def decoded(self) -> bool:
        """Whether `traffic` counts decoded bytes."""

    @property
    def stored_bytes(self) -> int | None:
        """Bytes of all files that hold the leaves, None if that is not known."""

    @property
    def requests(self) -> int:
        """The number of reads so far."""

    def order(self, name: str) -> tuple[int, ...]:
        """Return the axes of a leaf, innermost in storage first."""

    def grain(self, name: str) -> tuple[int, ...]:
        """Return the shape of the boxes that are best read whole; they begin at multiples of it."""

    def read(self, tiles: Sequence[Tile]) -> list[np.ndarray]:
        """Return the elements of tiles, each as a new row-major array."""

    def traffic(self, tiles: Sequence[Tile]) -> Traffic:
        """Return the cost in storage of a `read` of the same tiles; read nothing."""

    def check(self) -> None:
        """Raise `StorageError` if the stored files have changed since they were opened."""

    def close(self) -> None:
        """Close all files."""


class TileSink(Protocol):
    """A checkpoint that is written in tiles, by as many threads as `Output.writers`."""

    @property
    def requests(self) -> int:
        """The number of writes so far."""

    def write(self, tiles: Sequence[Tile], arrays: Sequence[np.ndarray]) -> None:
        """Write tiles; when it returns, a later run that resumes will find them written."""


class PlannedSink(Protocol):
    """A checkpoint that tiles would be written to."""

    def traffic(self, tiles: Sequence[Tile], dtypes: Sequence[np.dtype]) -> Traffic:
        """Return the cost in storage of a `TileSink.write` of the same tiles with these dtypes; write nothing."""


def check_memory(memory_bytes: int) -> None:
    """Raise `SafetensorsError` unless `memory_bytes` is an integer of which each bundle has at least a byte."""
    if type(memory_bytes) is not int or memory_bytes < _BUNDLES:
        raise SafetensorsError(f"memory_bytes is {memory_bytes!r}, must be an integer of at least {_BUNDLES}")


def bundle_bytes(memory_bytes: int) -> int:
    """Return the part of all memory that the largest bundle may have.

    A bundle is read while another is written, and each needs as much memory again on its way.
    """
    return max(memory_bytes // _BUNDLES, 1)


def batch_bytes(memory_bytes: int) -> int:
    """Return the part of all memory for one batch; a larger bundle moves alone.

    Three batches, and as much again on their way, leave a quarter for freed memory that libraries keep.
    """
    return max(memory_bytes // BATCHES, 1)


def tile_bytes(source: TileSource, names: Sequence[str], memory_bytes: int) -> int:
    """Return the most bytes of a tile of each of `names`, which move together.

    That is their part of a batch, or of the largest bundle if a grain that is decoded as a whole has more.
    """
    grain = max(prod(source.grain(name)) * source.leaves[name].dtype.itemsize for name in names)
    part = batch_bytes(memory_bytes) // len(names)
    return max(part if grain <= part or not source.decoded else bundle_bytes(memory_bytes) // len(names), 1)


def pace(cost: Cost, memory_bytes: int) -> Pace:
    """Return a pace of requests whose memory, staging included, is at most a batch."""
    held = MAX_STAGED_BYTES + (cost.max_request_bytes if cost.held_in_flight else 0)
    return cost.pace(max(1, min(cost.requests, batch_bytes(memory_bytes) // held)), None, memory_bytes)


def check_fits(name: str, nbytes: int, memory_bytes: int) -> None:
    """Raise `SafetensorsError` if the smallest unit in which a leaf moves, of `nbytes`, exceeds the largest bundle."""
    if nbytes > bundle_bytes(memory_bytes):
        raise SafetensorsError(
            f"memory_bytes is {memory_bytes}: {name!r} is moved in chunks of {nbytes} bytes, for which at least "
            f"{_BUNDLES * nbytes} are needed"
        )


def check_tiles(source: TileSource, groups: Iterable[Sequence[str]], memory_bytes: int) -> None:
    """Raise `SafetensorsError` if memory does not suffice for the shortest tiles of a source's leaves.

    The leaves of each of the `groups` move together. The error has the memory that all of them need.
    """
    needed = {name: BATCHES * len(names) * _least_tile_bytes(source, name) for names in groups for name in names}
    name = max(needed, key=needed.__getitem__, default="")
    if needed and needed[name] > memory_bytes:
        raise SafetensorsError(
            f"memory_bytes is {memory_bytes}: {name!r} is moved in tiles of at least {_least_tile_bytes(source, name)} "
            f"bytes, for which at least {needed[name]} are needed"
        )


def _least_tile_bytes(source: TileSource, name: str) -> int:
    shape, dtype = source.leaves[name]
    row = shape[source.order(name)[0]] if shape else 1
    return max(min(row * dtype.itemsize, _PAGE_BYTES, prod(shape) * dtype.itemsize // _SHORT_TILES), dtype.itemsize)


def is_below(path: str, directory: str) -> bool:
    """Return whether `path` is `directory` or in it, whatever links lead there."""
    inner, outer = os.path.realpath(path), os.path.realpath(directory)
    return os.path.commonpath([inner, outer]) == outer


Bundle = tuple[Tile, ...]  # tiles that interleave in storage, and are best moved at once


def nbytes(tiles: Iterable[Tile], leaves: Mapping[str, Fact]) -> int:
    """Return the bytes of tiles in memory."""
    return sum(prod(tile.shape) * leaves[tile.name].dtype.itemsize for tile in tiles)


def share(items: Sequence[_T], size: Callable[[_T], int], process: int, count: int) -> list[_T]:
    """Return the share of one of `count` processes: consecutive items, in bytes about as many as each other share."""
    sizes = [size(item) for item in items]
    total, before = sum(sizes), 0
    shared = []
    for item, nbytes in zip(items, sizes, strict=True):
        # An item belongs to the process in whose part of all bytes its middle lies.
        if min((2 * before + nbytes) * count // max(2 * total, 1), count - 1) == process:
            shared.append(item)
        before += nbytes
    return shared


class _Step(NamedTuple):
    """Tiles that move at once, their bytes, and the most batches before them that are written while they are read."""

    tiles: list[Tile]
    nbytes: int
    overlap: int


def _steps(source: TileSource, bundles: Sequence[Bundle], batch_bytes: int, writers: int) -> Iterator[_Step]:
    """Yield all tiles in batches of at most `batch_bytes`, or of one larger bundle.

    Next to a larger bundle, fewer batches are written, so that all have the memory of `writers` and one more; at least
    one is.
    """
    before: deque[int] = deque([0] * writers, writers)
    for batch in batches([(bundle, nbytes(bundle, source.leaves)) for bundle in bundles], batch_bytes):
        tiles = [tile for bundle in batch for tile in bundle]
        size, overlap = nbytes(tiles, source.leaves), writers
        while overlap > 1 and size + sum(list(before)[-overlap:]) > (writers + 1) * batch_bytes:
            overlap -= 1
        yield _Step(tiles, size, overlap)
        before.append(size)


def planned(
    source: TileSource, sink: PlannedSink, bundles: Sequence[Bundle], batch_bytes: int, writers: int
) -> tuple[Batch, ...]:
    """Return the cost in storage of `stream` with the same arguments, batch by batch."""
    out = []
    for tiles, size, overlap in _steps(source, bundles, batch_bytes, writers):
        dtypes = [source.leaves[tile.name].dtype for tile in tiles]
        out.append(Batch(len(tiles), size, source.traffic(tiles), sink.traffic(tiles, dtypes), overlap))
    return tuple(out)


def stream(
    source: TileSource,
    sink: TileSink,
    bundles: Sequence[Bundle],
    batch_bytes: int,
    writers: int,
    progress: Progress | None,
) -> int:
    """Move all tiles; return their bytes. A batch is read while up to `writers` batches are written, each by a thread.

    With two, one batch is encoded or copied while another waits for the disk. `progress` is called after each batch
    that has been written, with the bytes so far and those of all `bundles`.
    """
    steps = list(_steps(source, bundles, batch_bytes, writers))
    total = sum(step.nbytes for step in steps)
    done = 0
    # Freed memory that libraries keep serves the next batch, as long as the process stays below its limit.
    most = resident() + 6 * batch_bytes
    if progress is not None:
        progress(0, total)
    with ThreadPoolExecutor(writers, "writer") as pool:
        writing: deque[tuple[Future[None], int]] = deque()

        def finish(left: int) -> None:
            """Wait until at most `left` batches are being written."""
            nonlocal done
            while len(writing) > left:
                written, size = writing.popleft()
                written.result()
                done += size
                if progress is not None:
                    progress(done, total)

        for tiles, size, overlap in steps:
            finish(overlap)
            arrays = source.read(tiles)
            finish(overlap - 1)
            if resident() > most:
                trim()
            # The list passes to the writer with its arrays, so that their memory is free once they are written.
            writing.append((pool.submit(sink.write, tiles, arrays), size))
            del arrays
        finish(0)
    return done

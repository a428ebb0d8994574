"""Tiles on their way from a source to a sink: what both have to offer, and the loop that keeps both busy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from orbax_safetensors.cost.conversion import Batch, Traffic
from orbax_safetensors.errors import SafetensorsError
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.coalesce import MAX_STAGED_BYTES
from orbax_safetensors.storage.memory import resident, trim
from orbax_safetensors.storage.store import Cost, Pace
from orbax_safetensors.transfer.engine import batches

_T = TypeVar("_T")

Progress = Callable[[int, int], None]

_BUNDLES = 4  # for which there has to be memory


class Tile(NamedTuple):
    """A box of one leaf."""

    name: str
    box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        """Its own shape."""
        return self.box.shape


class Fact(NamedTuple):
    """Shape of a leaf, and the dtype that its tiles are read with."""

    shape: tuple[int, ...]
    dtype: np.dtype


class TileSource(Protocol):
    """Leaves that are read in tiles."""

    @property
    def leaves(self) -> Mapping[str, Fact]:
        """What there is, by name."""

    @property
    def path(self) -> str:
        """The file or directory that they are in."""

    @property
    def identity(self) -> str:
        """Tells these leaves, what they are made of and the state that it is in apart from all others."""

    @property
    def decoded(self) -> bool:
        """Whether what `traffic` says of bytes is what they are once they are decoded."""

    @property
    def stored_bytes(self) -> int | None:
        """Bytes of all files that they are in, None where that is not known."""

    @property
    def requests(self) -> int:
        """How many reads there were so far."""

    def order(self, name: str) -> tuple[int, ...]:
        """The axes of a leaf, that which is innermost in storage first."""

    def grain(self, name: str) -> tuple[int, ...]:
        """The shape of what is better read as a whole; boxes begin at multiples of it."""

    def read(self, tiles: Sequence[Tile]) -> list[np.ndarray]:
        """The elements of tiles, each row-major in memory of its own."""

    def traffic(self, tiles: Sequence[Tile]) -> Traffic:
        """What `read` of the same tiles asks of storage. Nothing is read."""

    def check(self) -> None:
        """Raises `StorageError` where what is stored has changed since it was opened."""

    def close(self) -> None:
        """Closes what is open."""


class TileSink(Protocol):
    """A checkpoint that is written in tiles, by one thread."""

    @property
    def requests(self) -> int:
        """How many writes there were so far."""

    def write(self, tiles: Sequence[Tile], arrays: Sequence[np.ndarray]) -> None:
        """Writes tiles; when it returns, a later run that resumes will find them written."""


class PlannedSink(Protocol):
    """A checkpoint that tiles would be written to."""

    def traffic(self, tiles: Sequence[Tile], dtypes: Sequence[np.dtype]) -> Traffic:
        """What `TileSink.write` of the same tiles, of these dtypes, asks of storage. Nothing is written."""


def bundle_bytes(memory_bytes: int) -> int:
    """Of all memory, what may have to be moved at once.

    It is read while something else is written, and each needs as much again on its way.
    """
    return max(memory_bytes // _BUNDLES, 1)


def batch_bytes(memory_bytes: int) -> int:
    """Of all memory, what is moved at once where nothing needs more: libraries keep some of what they have freed."""
    return max(memory_bytes // 6, 1)


def tile_bytes(source: TileSource, names: Sequence[str], memory_bytes: int) -> int:
    """What a tile may have of each of `names`, which are moved together.

    That is their part of a batch; or, where what is decoded as one has more, what may have to be moved at once.
    """
    grain = max(prod(source.grain(name)) * source.leaves[name].dtype.itemsize for name in names)
    part = batch_bytes(memory_bytes) // len(names)
    return max(part if grain <= part or not source.decoded else bundle_bytes(memory_bytes) // len(names), 1)


def pace(cost: Cost, memory_bytes: int) -> Pace:
    """How to ask a store, so that what requests hold, and what is staged for them, is no more than a batch."""
    held = MAX_STAGED_BYTES + (cost.max_request_bytes if cost.held_in_flight else 0)
    return cost.pace(max(1, min(cost.requests, batch_bytes(memory_bytes) // held)), None, memory_bytes)


def check_fits(name: str, nbytes: int, memory_bytes: int) -> None:
    """Raises `SafetensorsError` where what a leaf is moved in at least is more than may be moved at once."""
    if nbytes > bundle_bytes(memory_bytes):
        raise SafetensorsError(
            f"memory_bytes is {memory_bytes}: {name!r} is moved in chunks of {nbytes} bytes, for which at least "
            f"{_BUNDLES * nbytes} are needed"
        )


def is_below(path: str, directory: str) -> bool:
    """Whether `path` is `directory` or in it, whatever links lead there."""
    inner, outer = os.path.realpath(path), os.path.realpath(directory)
    return os.path.commonpath([inner, outer]) == outer


Bundle = tuple[Tile, ...]  # tiles that interleave in storage, and are best moved at once


def nbytes(tiles: Iterable[Tile], leaves: Mapping[str, Fact]) -> int:
    """Bytes of tiles in memory."""
    return sum(prod(tile.shape) * leaves[tile.name].dtype.itemsize for tile in tiles)


def share(items: Sequence[_T], size: Callable[[_T], int], process: int, count: int) -> list[_T]:
    """What one of `count` processes moves: items that follow one another, of about as many bytes as the others'."""
    sizes = [size(item) for item in items]
    total, before = sum(sizes), 0
    shared = []
    for item, nbytes in zip(items, sizes, strict=True):
        # The process in whose part of all bytes the middle of the item is.
        if min((2 * before + nbytes) * count // max(2 * total, 1), count - 1) == process:
            shared.append(item)
        before += nbytes
    return shared


def planned(source: TileSource, sink: PlannedSink, bundles: Sequence[Bundle], batch_bytes: int) -> tuple[Batch, ...]:
    """What `stream` of the same asks of storage, batch by batch."""
    out = []
    for batch in batches(_sized(source, bundles), batch_bytes):
        tiles = [tile for bundle in batch for tile in bundle]
        dtypes = [source.leaves[tile.name].dtype for tile in tiles]
        read, write = source.traffic(tiles), sink.traffic(tiles, dtypes)
        out.append(Batch(len(tiles), nbytes(tiles, source.leaves), read, write))
    return tuple(out)


def _sized(source: TileSource, bundles: Sequence[Bundle]) -> list[tuple[Bundle, int]]:
    return [(bundle, nbytes(bundle, source.leaves)) for bundle in bundles]


def stream(
    source: TileSource, sink: TileSink, bundles: Sequence[Bundle], batch_bytes: int, progress: Progress | None
) -> int:
    """Moves all tiles; returns their bytes. At most `batch_bytes`, or one bundle, are read while as many are written.

    `progress` is called after each batch that has been written, with the bytes so far and those of all `bundles`.
    """
    sized = _sized(source, bundles)
    total = sum(size for _, size in sized)
    done = 0
    # Freed memory that libraries keep serves the next batch, until all there is would be more than may be used.
    most = resident() + 5 * batch_bytes
    if progress is not None:
        progress(0, total)
    with ThreadPoolExecutor(1, "writer") as writer:
        writing: tuple[Future[None], int] | None = None

        def finish() -> None:
            nonlocal done, writing
            if writing is not None:
                (written, size), writing = writing, None
                written.result()
                done += size
                if progress is not None:
                    progress(done, total)

        for batch in batches(sized, batch_bytes):
            tiles = [tile for bundle in batch for tile in bundle]
            arrays = source.read(tiles)
            finish()
            if resident() > most:
                trim()
            # The list passes to the writer with its arrays, so that their memory is free once they are written.
            writing = writer.submit(sink.write, tiles, arrays), nbytes(tiles, source.leaves)
            del arrays
        finish()
    return done

"""Orbax checkpoints as a source and as a sink of tiles."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any, Self

import numpy as np

from orbax_safetensors.cost.conversion import Traffic
from orbax_safetensors.errors import StorageError
from orbax_safetensors.orbax_store import OrbaxCheckpoint, OrbaxLayout, OrbaxSink, OrbaxStep
from orbax_safetensors.orbax_store.directories import requests_at_once
from orbax_safetensors.orbax_store.leaf import num_chunks, touched_nbytes
from orbax_safetensors.storage.memory import allocate
from orbax_safetensors.streaming.pipeline import Fact, Tile, check_fits, nbytes
from orbax_safetensors.streaming.work import Unit

Stored = tuple[OrbaxCheckpoint, str]  # an item, and the name of one of its arrays


class OrbaxSource:
    """The arrays of a checkpoint, of one item or of several."""

    decoded = True

    def __init__(
        self, checkpoint: OrbaxCheckpoint | OrbaxStep, stored: Mapping[str, Stored], memory_bytes: int
    ) -> None:
        """`stored` has the array of each leaf. A chunk has to fit a batch of `memory_bytes`.

        That nothing changes is asked of all that is in `checkpoint`.
        """
        self.path = checkpoint.path
        self._checkpoint, self._stored = checkpoint, stored
        self._of = {name: item.leaves[own] for name, (item, own) in stored.items()}
        self.leaves = {name: Fact(leaf.shape, leaf.dtype) for name, leaf in self._of.items()}
        for name, leaf in self._of.items():
            check_fits(name, leaf.chunk_nbytes, memory_bytes)
        self._state = checkpoint.state()
        arrays = sorted((name, item.path, own) for name, (item, own) in stored.items())
        moved = (checkpoint.path, sorted(self._state.items()), arrays)
        self.identity = hashlib.sha256(repr(moved).encode("utf-8", "backslashreplace")).hexdigest()
        self.requests = 0

    @property
    def stored_bytes(self) -> int | None:
        """See `TileSource`."""
        return self._checkpoint.stored_bytes()

    def order(self, name: str) -> tuple[int, ...]:
        """Axes along which there are few chunks first."""
        grid = self._of[name].grid
        return tuple(sorted(range(len(grid)), key=lambda axis: (grid[axis], -axis)))

    def grain(self, name: str) -> tuple[int, ...]:
        """A chunk."""
        leaf = self._of[name]
        return tuple(min(chunk, size) for chunk, size in zip(leaf.chunk_shape, leaf.shape, strict=True))

    def read(self, tiles: Sequence[Tile]) -> list[np.ndarray]:
        """See `TileSource`."""
        dtypes = [self.leaves[tile.name].dtype for tile in tiles]
        memory = allocate([prod(tile.shape) * dtype.itemsize for tile, dtype in zip(tiles, dtypes, strict=True)])
        arrays = [own.view(dtype).reshape(tile.shape) for own, dtype, tile in zip(memory, dtypes, tiles, strict=True)]
        reading = []
        try:
            for tile, array in zip(tiles, arrays, strict=True):
                item, own = self._stored[tile.name]
                reading.append(item.read(own, tile.box, array))
        finally:
            failures = [future.exception() for future in reading]
        for failure in failures:
            if failure is not None:
                raise failure
        self.requests += sum(num_chunks(tile.box, self._of[tile.name]) for tile in tiles)
        return arrays

    def traffic(self, tiles: Sequence[Tile]) -> Traffic:
        """See `TileSource`. Bytes are decoded ones, and of chunks that a tile touches in part all of them are read."""
        touched = sum(touched_nbytes(tile.box, self._of[tile.name]) for tile in tiles)
        largest = max((self._of[tile.name].chunk_nbytes for tile in tiles), default=0)
        return Traffic(
            nbytes(tiles, self.leaves),
            touched,
            sum(num_chunks(tile.box, self._of[tile.name]) for tile in tiles),
            staging_bytes=self._in_flight_bytes(touched, largest),
            streams=requests_at_once(self.path),
        )

    def _in_flight_bytes(self, nbytes: int, chunk_nbytes: int) -> int:
        items = {item.path: item for item, _ in self._stored.values()}.values()  # which share their memory
        return max((item.in_flight_bytes(nbytes, chunk_nbytes) for item in items), default=0)

    def check(self) -> None:
        """See `TileSource`."""
        found = self._checkpoint.state()
        if found != self._state:
            changed = sorted(set(found.items()) ^ set(self._state.items()))[0][0]
            raise StorageError(f"{self._checkpoint.path}: {changed} changed while the checkpoint was in use")

    def close(self) -> None:
        """See `TileSource`."""


class OrbaxTiles:
    """A checkpoint under way that is written in tiles; see `OutputSink`."""

    def __init__(self, sink: OrbaxSink, units: Sequence[Unit]) -> None:
        """Tiles, those of `units`, have the names of the sink's arrays."""
        self._sink, self._units = sink, units
        self.requests = self.nbytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._sink.abort(error)

    def has(self, unit: int) -> bool:
        """See `OutputSink`."""
        return all(self._sink.written(tile.name, tile.box) for tile in chain(*self._units[unit]))

    def expect(self, units: Sequence[int]) -> None:
        """See `OutputSink`. They may come in any order."""

    def commit(self, last: Callable[[], None]) -> None:
        """See `JointSink`."""
        self._sink.commit(last)

    def write(self, tiles: Sequence[Tile], arrays: Sequence[np.ndarray]) -> None:
        """See `TileSink`."""
        writing = []
        try:
            for tile, array in zip(tiles, arrays, strict=True):
                writing.append(self._sink.write(tile.name, tile.box, array))
        finally:
            failures = [future.exception() for future in writing]
        for failure in failures:
            if failure is not None:
                raise failure
        self.requests += sum(num_chunks(tile.box, self._sink.leaves[tile.name]) for tile in tiles)
        self.nbytes += sum(array.nbytes for array in arrays)


class PlannedOrbaxTiles:
    """A checkpoint that tiles would be written to."""

    def __init__(self, layout: OrbaxLayout) -> None:
        """Tiles have the names of its arrays."""
        self._layout = layout

    def traffic(self, tiles: Sequence[Tile], dtypes: Sequence[np.dtype]) -> Traffic:
        """See `PlannedSink`. Bytes are those before they are encoded, which takes as much memory again at most."""
        leaves = self._layout.leaves
        written = sum(touched_nbytes(tile.box, leaves[tile.name]) for tile in tiles)
        return Traffic(
            written,
            written,
            sum(num_chunks(tile.box, leaves[tile.name]) for tile in tiles),
            staging_bytes=written if self._layout.compression else 0,
            streams=requests_at_once(self._layout.path),
        )

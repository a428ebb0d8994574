"""A checkpoint of Orbax as a sink of tiles, which are whole chunks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Self

import numpy as np

from orbax_safetensors.cost.conversion import Traffic
from orbax_safetensors.orbax_store import OrbaxLayout, OrbaxSink
from orbax_safetensors.orbax_store.directories import requests_at_once
from orbax_safetensors.orbax_store.leaf import num_chunks, touched_nbytes
from orbax_safetensors.streaming.pipeline import Tile
from orbax_safetensors.streaming.work import Unit


class OrbaxTileSink:
    """An unfinished checkpoint that is written in tiles; see `OutputSink`."""

    def __init__(self, sink: OrbaxSink, units: Sequence[Unit]) -> None:
        """Take the tiles of `units`, which have the names of the sink's arrays."""
        self._sink, self._units = sink, units
        self.requests = self.nbytes = 0
        self._lock = threading.Lock()

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
        with self._lock:
            self.requests += sum(num_chunks(tile.box, self._sink.leaves[tile.name]) for tile in tiles)
            self.nbytes += sum(array.nbytes for array in arrays)


class PlannedOrbaxTileSink:
    """A checkpoint that tiles would be written to."""

    def __init__(self, layout: OrbaxLayout) -> None:
        """Take tiles that have the names of the arrays of `layout`."""
        self._layout = layout

    def traffic(self, tiles: Sequence[Tile], dtypes: Sequence[np.dtype]) -> Traffic:
        """See `PlannedSink`. Bytes count before the encoding, which takes at most as much memory again."""
        leaves = self._layout.leaves
        written = sum(touched_nbytes(tile.box, leaves[tile.name]) for tile in tiles)
        return Traffic(
            written,
            written,
            sum(num_chunks(tile.box, leaves[tile.name]) for tile in tiles),
            staging_bytes=written if self._layout.compression else 0,
            streams=requests_at_once(self._layout.path),
        )

"""A checkpoint of Orbax as a sink of tiles, which are whole chunks."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from math import prod
from typing import Any

import jax
import numpy as np

from orbax_safetensors.geometry.tiling import chunk_shape
from orbax_safetensors.orbax_store import OrbaxItem, OrbaxLeaf, OrbaxSink, UnfinishedCheckpoint, array_name
from orbax_safetensors.orbax_store.directories import requests_at_once
from orbax_safetensors.orbax_store.leaf import num_chunks, touched_nbytes
from orbax_safetensors.orbax_store.operations import finish_all
from orbax_safetensors.streaming.cost import PlannedArray, Traffic
from orbax_safetensors.streaming.cutting import batch_bytes, bundles, check_fits, check_tiles, tile_bytes
from orbax_safetensors.streaming.tiles import Tile, TileSource, Unit
from orbax_safetensors.transfer.engine import Counters
from orbax_safetensors.transfer.figures import PlannedFile


class OrbaxTileSink(OrbaxSink):
    """A checkpoint of Orbax that takes its content in the tiles of a source; see `Sink`."""

    last = None
    writers = 2
    files: tuple[PlannedFile, ...] = ()

    def __init__(
        self,
        source: TileSource,
        path: str,
        items: Mapping[str, OrbaxItem],
        names: Mapping[str, tuple[str, str]],
        groups: Iterable[tuple[str, ...]],
        *,
        memory_bytes: int,
        chunk_bytes: int,
        **options: Any,
    ) -> None:
        """Cut arrays into chunks and tiles.

        Args:
          source: has the name that `UnfinishedCheckpoint` gives a leaf.
          path: the checkpoint's directory.
          items: by name, with an `OrbaxLeaf` for each leaf of the source, whose chunks are its shards. Chunks that are
            too large are cut.
          names: for each leaf of the source, its item and the name by which a caller's rules find it.
          groups: leaves that interleave in the source.
          memory_bytes: all that the conversion takes.
          chunk_bytes: the most bytes of a chunk.
          options: `metadata`, `others` and `compression`, as for `UnfinishedCheckpoint`.

        Raises the errors of `UnfinishedCheckpoint` for a tree that it cannot store, and `SafetensorsError` if memory
        does not suffice.
        """
        self._names = names
        groups = list(groups)
        check_tiles(source, groups, memory_bytes)
        self.batch_bytes = batch_bytes(memory_bytes)
        tile_limits = {name: tile_bytes(source, names, memory_bytes) for names in groups for name in names}

        def cut(item: str, path: Any, leaf: Any) -> Any:
            if not isinstance(leaf, OrbaxLeaf):
                return leaf
            name = array_name(items, item, jax.tree_util.keystr(path, simple=True, separator="."))
            chunk = chunk_shape(
                leaf.shape,
                leaf.chunk_shape,
                source.grain(name),
                source.order(name),
                max(min(chunk_bytes, tile_limits[name]) // leaf.dtype.itemsize, 1),
                max(tile_limits[name] // leaf.dtype.itemsize, 1),
            )
            return replace(leaf, chunk_shape=chunk)

        cut_items = {
            name: replace(item, tree=jax.tree_util.tree_map_with_path(partial(cut, name), item.tree))
            for name, item in items.items()
        }
        checkpoint = UnfinishedCheckpoint(path, cut_items, source=source.identity, **options)
        super().__init__(checkpoint, memory_bytes=2 * self.writers * self.batch_bytes)
        # What Orbax restores: the item if it is the only one.
        item = next(iter(items)) if len(items) == 1 else ""
        self.path = posixpath.join(self.path, item) if item else self.path
        for name, leaf in self.leaves.items():
            check_fits(name, leaf.chunk_nbytes, memory_bytes)
        grains = {name: leaf.chunk_shape for name, leaf in self.leaves.items()}
        self.units: Sequence[Unit] = [(bundle,) for bundle in bundles(source, grains, {}, groups, memory_bytes)]
        self.counters = Counters()

    @property
    def arrays(self) -> tuple[PlannedArray, ...]:
        """See `Sink`."""
        return tuple(
            PlannedArray(
                self._names[name][1],
                self._names[name][0] if len(self.workspace.items) > 1 else None,
                leaf.dtype.name,
                leaf.shape,
                leaf.chunk_shape,
                prod(leaf.grid),
                leaf.chunk_nbytes,
            )
            for name, leaf in self.leaves.items()
        )

    def check_place(self) -> None:
        """See `Sink`."""
        self.workspace.check_place()

    def has(self, unit: int) -> bool:
        """See `Sink`."""
        return all(self.written(tile.name, tile.box) for tile in chain(*self.units[unit]))

    def expect(self, units: Sequence[int]) -> None:
        """See `Sink`. They may come in any order."""

    def write(self, tiles: Sequence[Tile], arrays: Sequence[np.ndarray]) -> None:
        """See `Sink`."""
        finish_all(self.write_box(tile.name, tile.box, array) for tile, array in zip(tiles, arrays, strict=True))
        with self._lock:
            self.counters.num_requests += sum(num_chunks(tile.box, self.leaves[tile.name]) for tile in tiles)
            self.counters.nbytes += sum(array.nbytes for array in arrays)

    def traffic(self, tiles: Sequence[Tile], dtypes: Sequence[np.dtype]) -> Traffic:
        """See `Sink`. Bytes count before the encoding, which takes at most as much memory again."""
        written = sum(touched_nbytes(tile.box, self.leaves[tile.name]) for tile in tiles)
        return Traffic(
            written,
            written,
            sum(num_chunks(tile.box, self.leaves[tile.name]) for tile in tiles),
            staging_bytes=written if self.workspace.compression else 0,
            streams=requests_at_once(self.workspace.destination),
        )

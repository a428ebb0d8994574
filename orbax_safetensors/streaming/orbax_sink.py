"""A checkpoint of Orbax as a sink of tiles, which are whole chunks."""

from __future__ import annotations

import posixpath
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import jax
import numpy as np

from orbax_safetensors.geometry.tiling import chunk_shape
from orbax_safetensors.orbax_store import OrbaxItem, OrbaxLeaf, UnfinishedCheckpoint, array_name
from orbax_safetensors.orbax_store.item_writer import ItemWriter
from orbax_safetensors.orbax_store.leaf import chunks_of, num_chunks
from orbax_safetensors.orbax_store.operations import Budget, begin_write, finish_all
from orbax_safetensors.streaming.cutting import batch_bytes, bundles, check_fits, check_tiles, tile_bytes
from orbax_safetensors.streaming.sink import Sink
from orbax_safetensors.streaming.tiles import Tile, TileSource, Unit
from orbax_safetensors.transfer.engine import Counters


class OrbaxSink(Sink):
    """A directory of items, as Orbax's `CheckpointManager` makes for each step, or one item.

    What is unfinished is in Orbax's temporary directory, which nothing opens.
    """

    workspace: UnfinishedCheckpoint

    def __init__(self, checkpoint: UnfinishedCheckpoint, units: Sequence[Unit], batch_bytes: int) -> None:
        """Write nothing."""
        self.workspace, self.units, self.batch_bytes = checkpoint, units, batch_bytes
        # What Orbax restores: the item if it is the only one.
        item = next(iter(checkpoint.items)) if len(checkpoint.items) == 1 else ""
        self.path = posixpath.join(checkpoint.destination, item) if item else checkpoint.destination
        self.counters = Counters()
        self._leaves = checkpoint.leaves
        # For tiles, and for what is made of them.
        self._budget = Budget(2 * self.writers * batch_bytes)
        self._counting = threading.Lock()
        self._moved_bytes = 0

    @property
    def moved_bytes(self) -> int:
        """See `Sink`."""
        return self._moved_bytes

    def _open(self) -> None:
        self._stores = self.workspace.named(lambda item: item.open(self._process == 0))

    def _see(self) -> str:
        self._present = self.workspace.named(ItemWriter.chunks)
        return ""

    def has(self, unit: int) -> bool:
        """See `Sink`."""
        return all(
            self._present[tile.name][chunks_of(tile.box, self._leaves[tile.name]).slices].all()
            for tile in chain(*self.units[unit])
        )

    def write(self, tiles: Sequence[Tile], arrays: Sequence[np.ndarray]) -> None:
        """See `Sink`. Each tile is stored when this returns: no kill of the process can undo it."""
        self.check_others()
        finish_all(map(self._begin, tiles, arrays))
        with self._counting:
            self.counters.num_requests += sum(num_chunks(tile.box, self._leaves[tile.name]) for tile in tiles)
            self.counters.nbytes += sum(array.nbytes for array in arrays)

    def _begin(self, tile: Tile, array: np.ndarray) -> Future[None]:
        writing = begin_write(
            self._stores[tile.name][tile.box.slices],
            array,
            self._budget,
            # Encoded, a tile is in memory a second time.
            copies=2 if self.workspace.compression else 1,
            where=f"{self.workspace.destination}: {tile.name!r}",
        )
        nbytes = array.nbytes

        def count(_: Future[None]) -> None:
            with self._counting:
                self._moved_bytes += nbytes

        # Good enough for progress only: a future wakes those who wait for it before it calls this.
        writing.add_done_callback(count)
        return writing

    def _flush(self) -> None:
        self._stores = {}

    _stop = _flush


def orbax_sink(
    source: TileSource,
    path: str,
    items: Mapping[str, OrbaxItem],
    groups: Iterable[tuple[str, ...]],
    *,
    memory_bytes: int,
    chunk_bytes: int,
    **options: Any,
) -> OrbaxSink:
    """Return a sink of the leaves of a source, cut into chunks and tiles.

    Args:
      source: has the name that `UnfinishedCheckpoint` gives a leaf.
      path: the checkpoint's directory.
      items: by name, with an `OrbaxLeaf` for each leaf of the source, whose chunks are its shards. Chunks that are too
        large are cut.
      groups: leaves that interleave in the source.
      memory_bytes: all that the conversion takes.
      chunk_bytes: the most bytes of a chunk.
      options: `metadata`, `others` and `compression`, as for `UnfinishedCheckpoint`.

    Raises the errors of `UnfinishedCheckpoint` for a tree that it cannot store, and `SafetensorsError` if memory does
    not suffice.
    """
    groups = list(groups)
    check_tiles(source, groups, memory_bytes)
    tile_limits = {name: tile_bytes(source, together, memory_bytes) for together in groups for name in together}

    def cut(item: str, path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, OrbaxLeaf):
            return leaf
        name = array_name(items, item, jax.tree_util.keystr(path, simple=True, separator="."))
        chunk = chunk_shape(
            leaf.shape,
            leaf.chunk_shape,
            source.atomic_tile(name),
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
    for name, leaf in checkpoint.leaves.items():
        check_fits(name, leaf.chunk_nbytes, memory_bytes)
    atomic_tiles = {name: leaf.chunk_shape for name, leaf in checkpoint.leaves.items()}
    units = [(bundle,) for bundle in bundles(source, atomic_tiles, {}, groups, memory_bytes)]
    return OrbaxSink(checkpoint, units, batch_bytes(memory_bytes))

"""A checkpoint of Orbax as the output of a conversion."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax

from orbax_safetensors.cost.conversion import PlannedArray
from orbax_safetensors.cost.figures import PlannedFile
from orbax_safetensors.geometry.tiling import chunk_shape
from orbax_safetensors.orbax_store import OrbaxItem, OrbaxLayout, OrbaxLeaf, OrbaxSink, array_name
from orbax_safetensors.streaming.bundles import bundles
from orbax_safetensors.streaming.orbax_tile_sink import OrbaxTileSink, PlannedOrbaxTileSink
from orbax_safetensors.streaming.pipeline import TileSource, batch_bytes, check_fits, check_tiles, tile_bytes
from orbax_safetensors.streaming.work import Unit


@dataclass(frozen=True)
class OrbaxContent:
    """The content and place of a checkpoint.

    Attributes:
      path: the checkpoint's directory.
      items: by name, as for `OrbaxSink`, with an `OrbaxLeaf` for each leaf of the source, which has the sink's name for
        the leaf. Its chunks are its shards; `OrbaxOutput` cuts chunks that are too large.
      names: for each leaf of the source, its item and the name by which a caller's rules find it.
      metadata, others, compression: as for `OrbaxSink`.
      chunk_bytes: the most bytes of a chunk.
    """

    path: str
    items: Mapping[str, OrbaxItem]
    names: Mapping[str, tuple[str, str]]
    metadata: Mapping[str, Any]
    others: Mapping[str, str]
    compression: bool
    chunk_bytes: int


class OrbaxOutput:
    """A checkpoint of Orbax; see `Output`."""

    last = None
    writers = 2
    files: tuple[PlannedFile, ...] = ()

    def __init__(
        self, source: TileSource, content: OrbaxContent, groups: Iterable[tuple[str, ...]], memory_bytes: int
    ) -> None:
        """Cut arrays into chunks and tiles. `groups` are leaves that interleave in the source.

        Raises the errors of `OrbaxSink` for a tree that it cannot store, and `SafetensorsError` if memory does not
        suffice.
        """
        self._content, self._identity = content, source.identity
        # What Orbax restores: the item if it is the only one.
        item = next(iter(content.items)) if len(content.items) == 1 else ""
        self.path = posixpath.join(content.path, item) if item else content.path
        groups = list(groups)
        check_tiles(source, groups, memory_bytes)
        self.batch_bytes = batch_bytes(memory_bytes)
        of_group = {name: tile_bytes(source, names, memory_bytes) for names in groups for name in names}

        def cut(item: str, path: Any, leaf: Any) -> Any:
            if not isinstance(leaf, OrbaxLeaf):
                return leaf
            name = array_name(content.items, item, jax.tree_util.keystr(path, simple=True, separator="."))
            chunk = chunk_shape(
                leaf.shape,
                leaf.chunk_shape,
                source.grain(name),
                source.order(name),
                max(min(content.chunk_bytes, of_group[name]) // leaf.dtype.itemsize, 1),
                max(of_group[name] // leaf.dtype.itemsize, 1),
            )
            return replace(leaf, chunk_shape=chunk)

        self._items = {
            name: replace(item, tree=jax.tree_util.tree_map_with_path(partial(cut, name), item.tree))
            for name, item in content.items.items()
        }
        self._layout = OrbaxLayout(
            content.path,
            self._items,
            metadata=content.metadata,
            others=content.others,
            compression=content.compression,
        )
        leaves = self._layout.leaves
        for name, leaf in leaves.items():
            check_fits(name, leaf.chunk_nbytes, memory_bytes)
        grains = {name: leaf.chunk_shape for name, leaf in leaves.items()}
        self.units: Sequence[Unit] = [(bundle,) for bundle in bundles(source, grains, {}, groups, memory_bytes)]

    @property
    def leaves(self) -> Mapping[str, OrbaxLeaf]:
        """The arrays of the checkpoint, with their chunks, by name."""
        return self._layout.leaves

    @property
    def arrays(self) -> tuple[PlannedArray, ...]:
        """See `Output`."""
        return tuple(self._planned_array(leaf, *self._content.names[name]) for name, leaf in self.leaves.items())

    def _planned_array(self, leaf: OrbaxLeaf, item: str, name: str) -> PlannedArray:
        return PlannedArray(
            name,
            item if len(self._items) > 1 else None,
            leaf.dtype.name,
            leaf.shape,
            leaf.chunk_shape,
            prod(leaf.grid),
            leaf.chunk_nbytes,
        )

    def check_place(self) -> None:
        """See `Output`."""
        self._layout.unfinished.check_place()

    def planned(self, units: Sequence[int]) -> PlannedOrbaxTileSink:
        """See `Output`."""
        return PlannedOrbaxTileSink(self._layout)

    def begin(self, *, resume: bool) -> OrbaxTileSink:
        """See `Output`."""
        content = self._content
        sink = OrbaxSink(
            content.path,
            self._items,
            metadata=content.metadata,
            others=content.others,
            compression=content.compression,
            memory_bytes=2 * self.writers * self.batch_bytes,
            resume=resume,
            source=self._identity,
        )
        return OrbaxTileSink(sink, self.units)

"""From any source of tiles into a checkpoint that Orbax reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax

from orbax_safetensors.cost.conversion import ConversionCost, ConversionPlan, PlannedArray
from orbax_safetensors.geometry.tiling import chunk_shape
from orbax_safetensors.orbax_store import OrbaxItem, OrbaxLayout, OrbaxLeaf, OrbaxSink, array_name
from orbax_safetensors.streaming.bundles import bundles
from orbax_safetensors.streaming.orbax_tiles import OrbaxTiles, PlannedOrbaxTiles
from orbax_safetensors.streaming.pipeline import (
    Bundle,
    Moved,
    Progress,
    TileSource,
    batch_bytes,
    check_fits,
    nbytes,
    planned,
    share,
    stream,
    tile_bytes,
)


@dataclass(frozen=True)
class OrbaxTarget:
    """A checkpoint to write.

    Attributes:
      path: its directory.
      items: by name, as `OrbaxSink` has them, with an `OrbaxLeaf` for each leaf of the source, which has the name that
        the sink gives it, and whose chunks are its shards; they are cut where they are too large.
      names: of each leaf of the source, the item that it is in and the name by which a caller's rules find it.
      metadata, others, compression: as `OrbaxSink` has them.
      chunk_bytes: a chunk has at most this many bytes.
    """

    path: str
    items: Mapping[str, OrbaxItem]
    names: Mapping[str, tuple[str, str]]
    metadata: Mapping[str, Any]
    others: Mapping[str, str]
    compression: bool
    chunk_bytes: int


class ToOrbax:
    """All leaves of a source become a checkpoint of Orbax; see `Work`."""

    def __init__(
        self, source: TileSource, target: OrbaxTarget, groups: Iterable[tuple[str, ...]], memory_bytes: int
    ) -> None:
        """Decides on chunks and tiles. `groups` are leaves that interleave in the source.

        Raises what `OrbaxSink` raises of what cannot be stored, and `SafetensorsError` where memory does not suffice.
        """
        self.source, self._target = source, target
        groups = list(groups)
        self._limit = batch_bytes(memory_bytes)
        of_group = {name: tile_bytes(source, names, memory_bytes) for names in groups for name in names}

        def cut(item: str, path: Any, leaf: Any) -> Any:
            if not isinstance(leaf, OrbaxLeaf):
                return leaf
            name = array_name(target.items, item, jax.tree_util.keystr(path, simple=True, separator="."))
            chunk = chunk_shape(
                leaf.shape,
                leaf.chunk_shape,
                source.grain(name),
                source.order(name),
                max(min(target.chunk_bytes, of_group[name]) // leaf.dtype.itemsize, 1),
                max(of_group[name] // leaf.dtype.itemsize, 1),
            )
            return replace(leaf, chunk_shape=chunk)

        self._items = {
            name: replace(item, tree=jax.tree_util.tree_map_with_path(partial(cut, name), item.tree))
            for name, item in target.items.items()
        }
        self._layout = OrbaxLayout(
            target.path,
            self._items,
            metadata=target.metadata,
            others=target.others,
            compression=target.compression,
        )
        leaves = self._layout.leaves
        for name, leaf in leaves.items():
            check_fits(name, leaf.chunk_nbytes, memory_bytes)
        self._cuts = bundles(
            source, {name: leaf.chunk_shape for name, leaf in leaves.items()}, {}, groups, memory_bytes
        )

    @property
    def leaves(self) -> Mapping[str, OrbaxLeaf]:
        """The arrays that are made, with their chunks, by name."""
        return self._layout.leaves

    def _share(self, cuts: Sequence[Bundle], process: int, count: int) -> list[Bundle]:
        return share(cuts, lambda bundle: nbytes(bundle, self.source.leaves), process, count)

    def plan(self, process_count: int) -> ConversionPlan:
        """See `Work`."""
        self._layout.draft.check_place()
        sink = PlannedOrbaxTiles(self._layout)

        def array(leaf: OrbaxLeaf, item: str, name: str) -> PlannedArray:
            return PlannedArray(
                name,
                item if len(self._items) > 1 else None,
                leaf.dtype.name,
                leaf.shape,
                leaf.chunk_shape,
                prod(leaf.grid),
                leaf.chunk_nbytes,
            )

        return ConversionPlan(
            self._target.path,
            tuple(
                ConversionCost(planned(self.source, sink, self._share(self._cuts, process, process_count), self._limit))
                for process in range(process_count)
            ),
            files=(),
            arrays=tuple(array(leaf, *self._target.names[name]) for name, leaf in self._layout.leaves.items()),
            source_bytes=self.source.stored_bytes,
            from_orbax=self.source.decoded,
        )

    def run(self, *, resume: bool, progress: Progress | None) -> Moved:
        """See `Work`."""
        source = self.source
        with OrbaxSink(
            self._target.path,
            self._items,
            metadata=self._target.metadata,
            others=self._target.others,
            compression=self._target.compression,
            memory_bytes=2 * self._limit,
            resume=resume,
            source=source.identity,
        ) as sink:
            # Every process sees the same as written, and then begins to write.
            left = [bundle for bundle in self._cuts if not all(sink.written(tile.name, tile.box) for tile in bundle)]
            tiles = OrbaxTiles(sink)
            own = self._share(left, jax.process_index(), jax.process_count())
            moved = stream(source, tiles, own, self._limit, progress)
            source.check()
            sink.commit()
        return Moved(self._target.path, moved, source.requests + tiles.requests)

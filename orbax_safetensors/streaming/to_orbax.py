"""From any source of tiles into a checkpoint that Orbax reads."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax

from orbax_safetensors.orbax_store import OrbaxLayout, OrbaxLeaf, OrbaxSink
from orbax_safetensors.plan.conversion import ConversionCost, ConversionPlan, PlannedArray
from orbax_safetensors.plan.tiling import chunk_shape
from orbax_safetensors.streaming.cutting import bundles
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
)


@dataclass(frozen=True)
class OrbaxTarget:
    """A checkpoint to write: one step with one item.

    Attributes:
      destination: the directory of steps.
      tree: with an `OrbaxLeaf` for each leaf of the source, of its name, whose chunks are its shards; they are cut
        where they are too large.
      chunk_bytes: a chunk has at most this many bytes.
      others: as `OrbaxSink` has them.
    """

    destination: str
    tree: Any
    chunk_bytes: int
    step: int
    item: str
    custom_metadata: Mapping[str, Any] | None
    tree_custom_metadata: Any
    ocdbt: bool
    zarr3: bool
    compression: bool

    @property
    def path(self) -> str:
        """The directory of the step."""
        return os.path.join(self.destination, str(self.step))


class ToOrbax:
    """All leaves of a source become a checkpoint of Orbax; see `Work`."""

    def __init__(
        self, source: TileSource, target: OrbaxTarget, groups: Iterable[tuple[str, ...]], memory_bytes: int
    ) -> None:
        """Decides on chunks and tiles. `groups` are leaves that interleave in the source.

        Raises what `OrbaxSink` raises of what cannot be stored, and `SafetensorsError` where memory does not suffice.
        """
        self.source, self._target, self._memory_bytes = source, target, memory_bytes
        groups = list(groups)
        self._limit = limit = batch_bytes(memory_bytes)
        of_group = {name: limit // len(names) for names in groups for name in names}

        def cut(path: Any, leaf: Any) -> Any:
            if not isinstance(leaf, OrbaxLeaf):
                return leaf
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            chunk = chunk_shape(
                leaf.shape,
                leaf.chunk_shape,
                source.grain(name),
                source.order(name),
                max(min(target.chunk_bytes, of_group[name]) // leaf.dtype.itemsize, 1),
                max(of_group[name] // leaf.dtype.itemsize, 1),
            )
            return replace(leaf, chunk_shape=chunk)

        self._tree = jax.tree_util.tree_map_with_path(cut, target.tree)
        self._layout = OrbaxLayout(target.destination, self._tree, **self._stored)
        leaves = self._layout.leaves
        for name, leaf in leaves.items():
            check_fits(name, leaf.chunk_nbytes, memory_bytes)
        self._cuts = bundles(source, {name: leaf.chunk_shape for name, leaf in leaves.items()}, {}, groups, limit)

    @property
    def _stored(self) -> dict[str, Any]:
        """How the tree is stored, as `OrbaxLayout` and `OrbaxSink` take it."""
        names = ("step", "item", "custom_metadata", "tree_custom_metadata", "ocdbt", "zarr3", "compression")
        return {name: getattr(self._target, name) for name in names}

    def _share(self, cuts: Sequence[Bundle], process: int, count: int) -> list[Bundle]:
        return share(cuts, lambda bundle: nbytes(bundle, self.source.leaves), process, count)

    def plan(self, process_count: int) -> ConversionPlan:
        """See `Work`."""
        self._layout.draft.check()
        sink = PlannedOrbaxTiles(self._layout)
        return ConversionPlan(
            self._target.path,
            tuple(
                ConversionCost(planned(self.source, sink, self._share(self._cuts, process, process_count), self._limit))
                for process in range(process_count)
            ),
            files=(),
            arrays=tuple(
                PlannedArray(name, leaf.dtype.name, leaf.shape, leaf.chunk_shape, prod(leaf.grid), leaf.chunk_nbytes)
                for name, leaf in self._layout.leaves.items()
            ),
            source_bytes=self.source.stored_bytes,
            from_orbax=self.source.decoded,
        )

    def run(self, *, resume: bool, progress: Progress | None) -> Moved:
        """See `Work`."""
        source = self.source
        with OrbaxSink(
            self._target.destination,
            self._tree,
            **self._stored,
            memory_bytes=self._memory_bytes // 2,
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

"""From any source of tiles into a checkpoint that Orbax reads."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from orbax_safetensors.orbax_store import OrbaxLeaf, OrbaxSink
from orbax_safetensors.plan.tiling import chunk_shape
from orbax_safetensors.streaming.cutting import bundles
from orbax_safetensors.streaming.orbax_tiles import OrbaxTiles
from orbax_safetensors.streaming.pipeline import (
    Moved,
    Progress,
    TileSource,
    batch_bytes,
    check_fits,
    nbytes,
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


def write_orbax(
    source: TileSource,
    target: OrbaxTarget,
    groups: Iterable[tuple[str, ...]],
    *,
    memory_bytes: int,
    resume: bool,
    progress: Progress | None,
) -> Moved:
    """Writes all leaves of `source`, together with all other processes.

    `groups` are leaves that interleave in the source. Raises what `OrbaxSink` raises; what has been written stays, for
    a run that resumes.
    """
    groups = list(groups)
    limit = batch_bytes(memory_bytes)
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

    with OrbaxSink(
        target.destination,
        jax.tree_util.tree_map_with_path(cut, target.tree),
        step=target.step,
        item=target.item,
        custom_metadata=target.custom_metadata,
        tree_custom_metadata=target.tree_custom_metadata,
        ocdbt=target.ocdbt,
        zarr3=target.zarr3,
        compression=target.compression,
        memory_bytes=memory_bytes // 2,
        resume=resume,
        source=source.identity,
    ) as sink:
        grains = {name: leaf.chunk_shape for name, leaf in sink.leaves.items()}
        for name, leaf in sink.leaves.items():
            check_fits(name, leaf.chunk_nbytes, memory_bytes)
        cuts = bundles(source, grains, {}, groups, limit)
        # Every process sees the same as written, and then begins to write.
        left = [bundle for bundle in cuts if not all(sink.written(tile.name, tile.box) for tile in bundle)]
        tiles = OrbaxTiles(sink)
        own = share(left, lambda bundle: nbytes(bundle, source.leaves), jax.process_index(), jax.process_count())
        moved = stream(source, tiles, own, limit, progress)
        source.check()
        sink.commit()
    return Moved(target.path, moved, source.requests + tiles.requests)

"""From any source of tiles into a checkpoint that Orbax reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from orbax_safetensors.orbax_store import OrbaxItem, OrbaxLeaf, OrbaxSink, array_name
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
    """A checkpoint to write.

    Attributes:
      path: its directory.
      items: by name, as `OrbaxSink` has them, with an `OrbaxLeaf` for each leaf of the source, which has the name that
        the sink gives it, and whose chunks are its shards; they are cut where they are too large.
      metadata, others, compression: as `OrbaxSink` has them.
      chunk_bytes: a chunk has at most this many bytes.
    """

    path: str
    items: Mapping[str, OrbaxItem]
    metadata: Mapping[str, Any]
    others: Mapping[str, str]
    compression: bool
    chunk_bytes: int


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

    with OrbaxSink(
        target.path,
        {
            name: replace(item, tree=jax.tree_util.tree_map_with_path(partial(cut, name), item.tree))
            for name, item in target.items.items()
        },
        metadata=target.metadata,
        others=target.others,
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

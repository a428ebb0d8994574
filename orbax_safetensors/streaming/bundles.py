"""Bundles: how leaves are cut into tiles that pass from a source to a sink."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod

from orbax_safetensors.errors import SafetensorsError
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.groups import by_tensors
from orbax_safetensors.geometry.tiling import common, tile_shape, tiles
from orbax_safetensors.geometry.view import View
from orbax_safetensors.streaming.pipeline import BATCHES, Bundle, Tile, TileSource, tile_bytes

# Each bundle takes some hundred bytes of memory.
_MAX_BUNDLES = 1_000_000


def bundles(
    source: TileSource,
    grains: Mapping[str, tuple[int, ...]],
    orders: Mapping[str, tuple[int, ...]],
    together: Iterable[tuple[str, ...]],
    memory_bytes: int,
) -> list[Bundle]:
    """Return all tiles of a source's leaves: boxes of whole `grains` of the sink, and of the source if these fit.

    Tiles are longest along the axes that come first in `orders`, or in the source's order. Tiles of leaves that are
    `together` make one bundle, box by box, if the leaves are cut alike. Tiles have at most `tile_bytes`, unless one
    grain has more. Raises `SafetensorsError` if that makes more tiles than a process can keep.
    """
    out: list[Bundle] = []
    for names in together:
        limit = tile_bytes(source, names, memory_bytes)
        cuts = [
            [Tile(name, box) for box in _boxes(source, name, grains[name], orders.get(name), limit)] for name in names
        ]
        if len({tuple(tile.box for tile in of_leaf) for of_leaf in cuts}) == 1:
            out += list(zip(*cuts, strict=True))
        else:
            out += [(tile,) for of_leaf in cuts for tile in of_leaf]
        if len(out) > _MAX_BUNDLES:
            total = sum(prod(fact.shape) * fact.dtype.itemsize for fact in source.leaves.values())
            raise SafetensorsError(
                f"memory_bytes is {memory_bytes}, too little: arrays would move in more than {_MAX_BUNDLES} parts, and "
                f"for fewer, more than {BATCHES * total // _MAX_BUNDLES} are needed"
            )
    return out


def _boxes(
    source: TileSource, name: str, grain: tuple[int, ...], order: tuple[int, ...] | None, limit: int
) -> Iterator[Box]:
    shape, dtype = source.leaves[name]
    order = order or source.order(name)
    elements = max(limit // dtype.itemsize, 1)
    both = common(grain, source.grain(name), shape)
    return tiles(shape, tile_shape(shape, both if prod(both) <= elements else grain, order, elements), order)


def interleaved(views: Mapping[str, View]) -> list[tuple[str, ...]]:
    """Return the names of views in groups that are made of the same tensors, in their order."""
    names = list(views)
    return [tuple(names[at] for at in group) for group in by_tensors(list(views.values()))]

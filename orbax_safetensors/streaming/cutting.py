"""How leaves are cut into tiles, and the memory that tiles may have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

from orbax_safetensors.errors import SafetensorsError
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.coalesce import MAX_STAGED_BYTES
from orbax_safetensors.geometry.tiling import common, tile_shape, tiles
from orbax_safetensors.geometry.view import View, by_tensors
from orbax_safetensors.storage.store import Cost, RequestLimits
from orbax_safetensors.streaming.tiles import Bundle, Tile, TileSource

MEMORY_BYTES = 2 * 2**30  # all that a conversion or link takes unless the caller says
_BUNDLES = 4  # that have to fit into memory
_BATCHES = 8  # likewise, each as large as a tile can be
_STEPS, _SMALL_BYTES = 16, 32 * 2**20
# Tiles may be as short as a page, as a row, or as this part of their array. Each costs a request and a write to the
# disk: with shorter tiles, a large array would take for ever.
_PAGE_BYTES = 4096
_SHORT_TILES = 1000
# Each bundle takes some hundred bytes of memory.
_MAX_BUNDLES = 1_000_000


def check_memory(memory_bytes: int) -> None:
    """Raise `SafetensorsError` unless `memory_bytes` is an integer of which each bundle has at least a byte."""
    if type(memory_bytes) is not int or memory_bytes < _BUNDLES:
        raise SafetensorsError(f"memory_bytes is {memory_bytes!r}, must be an integer of at least {_BUNDLES}")


def bundle_bytes(memory_bytes: int) -> int:
    """Return the most bytes of a bundle, a quarter of all memory.

    A bundle is read while another is written, and each needs as much memory again in the libraries that move it.
    """
    return max(memory_bytes // _BUNDLES, 1)


def batch_bytes(memory_bytes: int) -> int:
    """Return the most bytes of a batch of bundles, an eighth of all memory; a larger bundle is a batch of its own.

    One batch is read while two are written, and each needs as much memory again in the libraries that move it. Those
    are six eighths; two are left for memory that libraries have freed and the process keeps.
    """
    return max(memory_bytes // _BATCHES, 1)


def step_bytes(total: int, most: int) -> int:
    """Return how many of `total` bytes move at once: at most so many, and less of few, so that several steps overlap.

    Each step is also one of the progress. Requests for less than 32 MiB would be too few at once.
    """
    return min(most, max(total // _STEPS, _SMALL_BYTES))


def tile_bytes(source: TileSource, names: Sequence[str], memory_bytes: int) -> int:
    """Return the most bytes of a tile of each of `names`, which move together.

    That is their part of a batch, or of the largest bundle if an atomic tile that is decoded as a whole has more.
    """
    atomic_bytes = max(prod(source.atomic_tile(name)) * source.leaves[name].dtype.itemsize for name in names)
    part = batch_bytes(memory_bytes) // len(names)
    return max(part if atomic_bytes <= part or not source.decoded else bundle_bytes(memory_bytes) // len(names), 1)


def request_limits(cost: Cost, memory_bytes: int) -> RequestLimits:
    """Return limits of requests whose memory, staging included, is at most a batch."""
    held = MAX_STAGED_BYTES + cost.held_request_bytes
    return cost.request_limits(max(1, min(cost.requests, batch_bytes(memory_bytes) // held)), None, memory_bytes)


def memory_for(nbytes: int) -> int:
    """Return the least memory with which a chunk of `nbytes` can be moved."""
    return _BUNDLES * nbytes


def check_fits(name: str, nbytes: int, memory_bytes: int) -> None:
    """Raise `SafetensorsError` if the smallest unit in which a leaf moves, of `nbytes`, exceeds the largest bundle."""
    if nbytes > bundle_bytes(memory_bytes):
        raise SafetensorsError(
            f"memory_bytes is {memory_bytes}: {name!r} is moved in chunks of {nbytes} bytes, for which at least "
            f"{memory_for(nbytes)} are needed"
        )


def check_tiles(source: TileSource, groups: Iterable[Sequence[str]], memory_bytes: int) -> None:
    """Raise `SafetensorsError` if memory does not suffice for the shortest tiles of a source's leaves.

    The leaves of each of the `groups` move together. The error has the memory that all of them need.
    """
    needed = {name: _BATCHES * len(names) * _least_tile_bytes(source, name) for names in groups for name in names}
    name = max(needed, key=needed.__getitem__, default="")
    if needed and needed[name] > memory_bytes:
        raise SafetensorsError(
            f"memory_bytes is {memory_bytes}: {name!r} is moved in tiles of at least {_least_tile_bytes(source, name)} "
            f"bytes, for which at least {needed[name]} are needed"
        )


def _least_tile_bytes(source: TileSource, name: str) -> int:
    leaf = source.leaves[name]
    itemsize = leaf.dtype.itemsize
    row = leaf.shape[source.order(name)[0]] if leaf.shape else 1
    return int(max(min(row * itemsize, _PAGE_BYTES, prod(leaf.shape) * itemsize // _SHORT_TILES), itemsize))


def bundles(
    source: TileSource,
    atomic_tiles: Mapping[str, tuple[int, ...]],
    orders: Mapping[str, tuple[int, ...]],
    together: Iterable[tuple[str, ...]],
    memory_bytes: int,
) -> list[Bundle]:
    """Return all tiles of a source's leaves: boxes of whole `atomic_tiles` of the sink, and of the source if they fit.

    Tiles are longest along the axes that come first in `orders`, or in the source's order. Tiles of leaves that are
    `together` make one bundle, box by box, if the leaves are cut alike. Tiles have at most `tile_bytes`, unless one
    atomic tile has more. Raises `SafetensorsError` if that makes more tiles than a process can keep.
    """
    out: list[Bundle] = []
    for names in together:
        limit = tile_bytes(source, names, memory_bytes)
        out += bundled(
            {name: list(_boxes(source, name, atomic_tiles[name], orders.get(name), limit)) for name in names}
        )
        if len(out) > _MAX_BUNDLES:
            total = sum(prod(leaf.shape) * leaf.dtype.itemsize for leaf in source.leaves.values())
            raise SafetensorsError(
                f"memory_bytes is {memory_bytes}, too little: arrays would move in more than {_MAX_BUNDLES} parts, and "
                f"for fewer, more than {_BATCHES * total // _MAX_BUNDLES} are needed"
            )
    return out


def bundled(boxes: Mapping[str, Sequence[Box]]) -> list[Bundle]:
    """Return the tiles of leaves that move together: one bundle for each box, if the leaves are cut alike."""
    leaf_tiles = [[Tile(name, box) for box in leaf_boxes] for name, leaf_boxes in boxes.items()]
    if len(set(map(tuple, boxes.values()))) == 1:
        return list(zip(*leaf_tiles, strict=True))
    return [(tile,) for alone in leaf_tiles for tile in alone]


def _boxes(
    source: TileSource, name: str, atomic_tile: tuple[int, ...], order: tuple[int, ...] | None, limit: int
) -> Iterator[Box]:
    shape = source.leaves[name].shape
    order = order or source.order(name)
    elements = max(limit // source.leaves[name].dtype.itemsize, 1)
    both = common(atomic_tile, source.atomic_tile(name), shape)
    return tiles(shape, tile_shape(shape, both if prod(both) <= elements else atomic_tile, order, elements), order)


def interleaved(views: Mapping[str, View]) -> list[tuple[str, ...]]:
    """Return the names of views in groups that are made of the same tensors, in their order."""
    names = list(views)
    return [tuple(names[at] for at in group) for group in by_tensors([view.tensors for view in views.values()])]

"""Boxes that fit a byte budget: how to cut a whole array, so that it can pass through memory piece by piece.

A cut through a contiguous stretch of storage costs requests. So this module cuts along the axis that is outermost in
storage first. The axes of an array, innermost in storage first, are an *order*.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import inf, isqrt, lcm, prod

from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.view import View


def storage_order(view: View) -> tuple[int, ...]:
    """Return the axes of a view, innermost in its stored tensors first, and the axes along which it stacks last."""
    distance = [inf] * len(view.shape)
    for piece in view.pieces:
        if piece.tensor is not None:
            for axis, modes in enumerate(piece.dims):
                distance[axis] = min([distance[axis], *(stride for _, stride in modes)])
    return tuple(sorted(range(len(view.shape)), key=lambda axis: (distance[axis], -axis)))


# Chunks below this part of their limit are avoided: each chunk costs a request, whatever its size.
_CRUMBS = 8


@lru_cache
def chunk_shape(
    shape: tuple[int, ...],
    shard: tuple[int, ...],
    atomic_tile: tuple[int, ...],
    order: tuple[int, ...],
    limit: int,
    tile_limit: int,
) -> tuple[int, ...]:
    """Return the shape of chunks of an array that is sharded into shards of the shape `shard`.

    Chunks are even cuts of a shard, along the outermost axes of the source first. They have at most `limit` elements,
    and a tile of `tile_limit` elements can hold whole chunks and whole atomic tiles of the source, unless one such tile
    alone is too large. Along an axis that is not sharded, the last chunk may be shorter.
    """
    sharded = tuple(length < size for length, size in zip(shard, shape, strict=True))
    chunk = _cut(shard, sharded, shape, (1,) * len(shape), order, min(limit, tile_limit))
    meeting = _cut(chunk, sharded, shape, atomic_tile, order, tile_limit)
    return meeting if prod(common(meeting, atomic_tile, shape)) <= tile_limit else chunk


def _cut(
    chunk: tuple[int, ...],
    sharded: tuple[bool, ...],
    shape: tuple[int, ...],
    atomic_tile: tuple[int, ...],
    order: tuple[int, ...],
    limit: int,
) -> tuple[int, ...]:
    """Return `chunk`, cut until a tile of whole chunks and whole atomic tiles has at most `limit` elements.

    An axis whose fitting divisors all leave crumbs is cut less than the limit needs, and the next axes more, if that
    suffices.
    """
    cut = chunk

    def elements(axis: int, size: int) -> int:
        return prod(common((*cut[:axis], size, *cut[axis + 1 :]), atomic_tile, shape))

    for least in (limit // _CRUMBS, 0):
        cut = chunk
        for axis in reversed(order):
            if elements(axis, cut[axis]) <= limit:
                break
            sizes = divisors(cut[axis]) if sharded[axis] else _even_cuts(cut[axis])
            fitting = [size for size in sizes if elements(axis, size) <= limit]
            best = max(fitting) if fitting else min(sizes, key=lambda size: (elements(axis, size), -size))
            if fitting and elements(axis, best) < least:
                best = min(size for size in sizes if size not in fitting)
            cut = (*cut[:axis], best, *cut[axis + 1 :])
        if prod(common(cut, atomic_tile, shape)) <= limit:
            break
    return cut


@lru_cache
def divisors(size: int) -> list[int]:
    """Return the divisors of a positive integer, in order."""
    small = [factor for factor in range(1, isqrt(size) + 1) if size % factor == 0]
    return sorted({*small, *(size // factor for factor in small)})


@lru_cache
def _even_cuts(size: int) -> list[int]:
    """Return, for every possible number of parts of as equal a length as possible, the length of the longest."""
    return sorted({-(-size // parts) for parts in range(1, isqrt(size) + 1)} | set(range(1, isqrt(size) + 1)))


def common(chunk: Sequence[int], atomic_tile: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the smallest tile of whole chunks and of whole atomic tiles."""
    return tuple(
        min(lcm(*steps) if all(step < size for step in steps) else size, size)
        for *steps, size in zip(chunk, atomic_tile, shape, strict=True)
    )


def tile_shape(shape: Sequence[int], atomic_tile: Sequence[int], order: Sequence[int], limit: int) -> tuple[int, ...]:
    """Return the shape of tiles: multiples of `atomic_tile`, of at most `limit` elements or one such tile.

    Tiles are longest along the axes that come first in `order`.
    """
    out = [min(step, size) for step, size in zip(atomic_tile, shape, strict=True)]
    for axis in order:
        count = limit // max(prod(out), 1)
        if count > 1:
            out[axis] = min(shape[axis], out[axis] * count)
    return tuple(out)


def tiles(shape: Sequence[int], tile: Sequence[int], order: Sequence[int]) -> Iterator[Box]:
    """Yield boxes of at most the shape `tile` that make up `shape`, neighbours in storage one after the other."""
    if prod(shape) == 0:
        return
    outermost_first = list(reversed(order))
    cuts = [
        [(low, min(low + tile[axis], shape[axis])) for low in range(0, shape[axis], tile[axis])]
        for axis in outermost_first
    ]
    for ranges in product(*cuts):
        box = dict(zip(outermost_first, ranges, strict=True))
        yield Box(box[axis] for axis in range(len(shape)))

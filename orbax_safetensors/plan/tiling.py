"""Boxes that fit a byte budget: how a whole array is cut, so that it can pass through memory piece by piece.

Cutting costs where it goes across what lies together in storage. So whatever is cut here is cut along the axis that is
outermost in storage first. The axes of an array in that sense, innermost first, are an *order*.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import inf, prod

from orbax_safetensors.plan.view import Box, View


def storage_order(view: View) -> tuple[int, ...]:
    """The axes of a view, that which is innermost in its stored tensors first, and those that it stacks last."""
    distance = [inf] * len(view.shape)
    for piece in view.pieces:
        if piece.tensor is not None:
            for axis, modes in enumerate(piece.dims):
                distance[axis] = min([distance[axis], *(stride for _, stride in modes)])
    return tuple(sorted(range(len(view.shape)), key=lambda axis: (distance[axis], -axis)))


def row_major_order(shape: Sequence[int]) -> tuple[int, ...]:
    """The order of an array that is stored as it is."""
    return tuple(range(len(shape)))[::-1]


def chunk_shape(shape: Sequence[int], order: Sequence[int], limit: int) -> tuple[int, ...]:
    """The shape of the largest even cuts of `shape` that have at most `limit` elements.

    Each axis is divided by a factor of its size, so that whole chunks make `shape`.
    """
    out = list(shape)
    for axis in reversed(order):
        others = prod(out) // max(out[axis], 1)
        fitting = max(limit // max(others, 1), 1)
        if out[axis] > fitting:
            out[axis] = next(size for size in range(fitting, 0, -1) if out[axis] % size == 0)
    return tuple(out)


def tile_shape(shape: Sequence[int], grain: Sequence[int], order: Sequence[int], limit: int) -> tuple[int, ...]:
    """The shape of tiles of at most `limit` elements, or of one `grain`, of which they are multiples.

    Tiles are made longest along the axes that come first in `order`.
    """
    out = [min(step, size) for step, size in zip(grain, shape, strict=True)]
    for axis in order:
        grains = limit // max(prod(out), 1)
        if grains > 1:
            out[axis] = min(shape[axis], out[axis] * grains)
    return tuple(out)


def tiles(shape: Sequence[int], tile: Sequence[int], order: Sequence[int]) -> Iterator[Box]:
    """Boxes of at most the shape `tile` that make up `shape`, neighbours in storage one after the other."""
    if prod(shape) == 0:
        return
    outermost_first = list(reversed(order))
    cuts = [
        [(low, min(low + tile[axis], shape[axis])) for low in range(0, shape[axis], tile[axis])]
        for axis in outermost_first
    ]
    for ranges in product(*cuts):
        box = dict(zip(outermost_first, ranges, strict=True))
        yield tuple(box[axis] for axis in range(len(shape)))

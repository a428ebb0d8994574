"""The scales or zero points of a view of quantised tensors: an array of the view's rank, with one for each tile.

A tile is a box of elements that share a scale. All tiles of a view have one shape, whose sizes divide the view's, and
they are as large as that allows: where a view cuts a block, or splits it over dimensions, a scale stands more than
once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache, reduce
from math import gcd, prod
from operator import add

import numpy as np

from orbax_safetensors.geometry.encoding import Parameter
from orbax_safetensors.geometry.pieces import Piece
from orbax_safetensors.geometry.strided import Modes, extent, merged, runs_of
from orbax_safetensors.geometry.view import View

Shape = tuple[int, ...]


def scales_view(view: View, described: Mapping[str, tuple[str, Parameter, Shape]], dtype: np.dtype) -> View:
    """Return the scales of `view`, of `dtype` and of a shape whose sizes divide the view's.

    The scale of element `i` is that at `i // (view.shape / scales.shape)`, dimension by dimension. All pieces of `view`
    are of the codes of quantised tensors; `described` has for each the name of its scales, the parameter that they are,
    and the shape of the tensor in the order of the codes. Entries that share a word count in the order of the words.
    """
    pieces = [(piece, *described[str(piece.tensor)]) for piece in view.pieces]
    tile = view.shape
    for piece, _, parameter, shape in pieces:
        shared = _tile(piece.dims, piece.offset, shape, parameter.block)
        # A tile also has to divide where each piece begins, and how far it goes.
        tile = tuple(map(gcd, tile, shared, piece.start, map(extent, piece.dims)))
    out = []
    for piece, name, parameter, shape in pieces:
        start = tuple(begin // size for begin, size in zip(piece.start, tile, strict=True))
        for first, offset, dims in _boxes(piece.dims, piece.offset, shape, parameter, tile):
            out.append(Piece(name, tuple(map(add, start, first)), offset, dims))
    return View(tuple(size // part for size, part in zip(view.shape, tile, strict=True)), dtype, tuple(out))


@lru_cache
def _tile(dims: tuple[Modes, ...], offset: int, shape: Shape, blocks: tuple[int, int]) -> Shape:
    """Return the largest tile of a piece of a tensor whose elements share a scale."""
    *leading, rows, columns = shape
    height, width = blocks
    cut = [_cut(modes, (columns, rows * columns)) for modes in dims]
    # The digits of all dimensions as (stride, size, dimension, extent of the dimension's digits inside).
    digits = sorted(
        (stride, size, number, extent(modes[position + 1 :]))
        for number, modes in enumerate(cut)
        for position, (size, stride) in enumerate(modes)
    )
    tile = [1] * len(dims)
    for unit, length, block in ((1, columns, width), (columns, rows, height), (rows * columns, prod(leading), 1)):
        along = [digit for digit in digits if unit <= digit[0] < unit * length]
        begin = offset // unit % length
        reach = sum((size - 1) * stride for stride, size, _, _ in along) // unit
        if begin + reach >= length or any(stride % unit for stride, *_ in along):
            return (1,) * len(dims)  # the piece runs over the ends of rows or matrices
        covered = 1  # positions that the digits so far run through without a gap, all of them in one block
        for stride, size, number, inside in along:
            if stride != unit * covered or block % covered or begin % covered or tile[number] != inside:
                break
            share = gcd(block // covered, size, begin // covered)
            tile[number] *= share
            if share < size:
                break
            covered *= size
    return tuple(tile)


def _cut(modes: Modes, bounds: Shape) -> Modes:
    """Return `modes` with those cut that run over the end of a row or a matrix, if they run over it evenly."""
    out = list(modes)
    for bound in bounds:
        for position, (size, stride) in enumerate(out):
            inner = bound // stride
            if stride < bound < stride * size and bound % stride == 0 == size % inner:
                out[position : position + 1] = [(size // inner, bound), (inner, stride)]
                break
    return tuple(out)


@lru_cache
def _boxes(
    dims: tuple[Modes, ...], offset: int, shape: Shape, parameter: Parameter, tile: Shape
) -> tuple[tuple[Shape, int, tuple[Modes, ...]], ...]:
    """Return boxes of the scales of a piece that are affine in the stored scales, as (start, offset, dims)."""
    *_, rows, columns = shape
    height, width = parameter.block
    along = [_positions(modes)[::step] for modes, step in zip(dims, tile, strict=True)]
    elements = offset + reduce(np.add.outer, along, np.zeros((), np.int64))
    matrix, inside = np.divmod(elements, rows * columns)
    row, column = np.divmod(inside, columns)
    grid, high = parameter.grid, parameter.per_word[0]
    word_row, field = np.divmod(row // height, high)
    scales = matrix * prod(grid) + (word_row * grid[1] + column // width) * high + field
    return tuple(_affine(scales, (0,) * len(dims)))


def _positions(modes: Modes) -> np.ndarray:
    """Return the offsets of all positions of a dimension."""
    return reduce(np.add.outer, (np.arange(size) * stride for size, stride in modes), np.zeros((), np.int64)).reshape(
        -1
    )


def _affine(scales: np.ndarray, start: Shape) -> Iterator[tuple[Shape, int, tuple[Modes, ...]]]:
    """Yield boxes that tile `scales`, the offsets of scales, and are affine; `start` is where `scales` begins."""
    found = [_modes(scales, axis) for axis in range(scales.ndim)]
    modes = tuple([dim for dim in found if dim is not None])
    if len(modes) == scales.ndim and runs_of(0, 1, [mode for dim in modes for mode in dim]) is not None:
        yield start, int(scales.flat[0]), modes
        return
    axis = found.index(None) if None in found else int(np.argmax(scales.shape))
    half = scales.shape[axis] // 2
    for first, part in zip((0, half), np.split(scales, [half], axis), strict=True):
        yield from _affine(part, (*start[:axis], start[axis] + first, *start[axis + 1 :]))


def _modes(scales: np.ndarray, axis: int) -> Modes | None:
    """Return the steps along a dimension, of one size or of two that alternate evenly; None if it has others."""
    lines = np.moveaxis(scales, axis, -1).reshape(-1, scales.shape[axis])
    line = lines[0] - lines[0, 0]
    steps = np.diff(line)
    changes = np.flatnonzero(steps != steps[:1])
    inner = int(changes[0]) + 1 if changes.size else len(line)
    strides = (int(line[inner]) if changes.size else 0, int(steps[0]) if steps.size else 0)
    modes = ((len(line) // inner, strides[0]), (inner, strides[1]))
    if len(line) % inner or any(stride < 1 for size, stride in modes if size > 1):
        return None
    return merged(modes) if (lines - lines[:, :1] == _positions(modes)).all() else None

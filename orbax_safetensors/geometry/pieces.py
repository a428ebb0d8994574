"""Tensors that are stored in pieces: the boxes of them that some views cover, and views with a tensor for each box.

A view that cuts a tensor into boxes, as shardings do, covers boxes. Boxes that touch become one piece; so do copies
that alternate in one box, as the two halves of a head do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from orbax_safetensors.errors import MappingError
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.strided import Modes, merged, row_major
from orbax_safetensors.geometry.view import Piece, View

# (axis of the tensor, size, step): `size` positions, `step` apart along the axis; outermost first in every dimension.
_Digits = tuple[tuple[int, int, int], ...]


class TensorPiece(NamedTuple):
    """A box of a stored tensor."""

    tensor: str
    box: Box


class _Region(NamedTuple):
    """Where a piece of a view lies in its tensor: from `start` on, along the digits of each of its dimensions."""

    start: tuple[int, ...]
    dims: tuple[_Digits, ...]

    @property
    def box(self) -> Box:
        """The smallest box that holds the region."""
        stop = [start + 1 for start in self.start]
        for digits in self.dims:
            for axis, size, step in digits:
                stop[axis] += (size - 1) * step
        return Box(zip(self.start, stop, strict=True))


def in_pieces(
    views: Sequence[View], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[list[View], dict[str, TensorPiece]]:
    """Return `views` of tensors of `shapes` as views of the pieces that they cover together, and the pieces by name.

    Raises `MappingError` if the part of a tensor that they cover is not a set of boxes.
    """
    regions: dict[str, list[_Region]] = {}
    for view in views:
        for piece in view.pieces:
            if piece.tensor is not None:
                regions.setdefault(piece.tensor, []).append(_region(piece, shapes[piece.tensor]))
    pieces: dict[str, TensorPiece] = {}
    names: dict[str, dict[Box, str]] = {}
    for tensor, covering in regions.items():
        boxes = _joined([region.box for region in covering])
        covered = sum(prod(size for digits in region.dims for _, size, _ in digits) for region in covering)
        if sum(box.volume for box in boxes) != covered:
            raise MappingError(f"{tensor!r}: the part that one process holds is not made of rectangular blocks")
        names[tensor] = {box: f"{number}/{tensor}" for number, box in enumerate(boxes)}
        pieces |= {name: TensorPiece(tensor, box) for box, name in names[tensor].items()}
    return [
        replace(view, pieces=tuple(_rebased(piece, shapes, names) if piece.tensor else piece for piece in view.pieces))
        for view in views
    ], pieces


def _region(piece: Piece, shape: tuple[int, ...]) -> _Region:
    strides = row_major(shape)
    start = tuple(piece.offset // stride % size for stride, size in zip(strides, shape, strict=True))
    region = _Region(start, tuple(_digits(piece, modes, shape, strides) for modes in piece.dims))
    if any(stop > size for (_, stop), size in zip(region.box, shape, strict=True)):
        raise MappingError(f"{piece.tensor!r}: the part that one process holds ends in the middle of rows")
    return region


def _digits(piece: Piece, modes: Modes, shape: tuple[int, ...], strides: tuple[int, ...]) -> _Digits:
    """Return one dimension of a piece in steps along the axes of its tensor."""
    out: list[tuple[int, int, int]] = []
    for size, stride in modes:
        inner = []
        while size > 1:
            axis = next(axis for axis in range(len(shape)) if strides[axis] <= stride and shape[axis] > 1)
            step, rest = divmod(stride, strides[axis])
            # More positions than this axis has go on into the axis outside.
            fits = size if (size - 1) * step < shape[axis] else shape[axis] // step
            if rest or size % fits or (fits < size and fits * step != shape[axis]):
                raise MappingError(
                    f"{piece.tensor!r}: the part that one process holds is not made of rectangular blocks"
                    f": {size} elements, {stride} apart, do not lie along an axis"
                )
            inner.append((axis, fits, step))
            size, stride = size // fits, stride * fits
        out += inner[::-1]
    return tuple(out)


def _rebased(piece: Piece, shapes: Mapping[str, tuple[int, ...]], names: Mapping[str, Mapping[Box, str]]) -> Piece:
    assert piece.tensor is not None
    region = _region(piece, shapes[piece.tensor])
    box, name = next((box, name) for box, name in names[piece.tensor].items() if _within(region.box, box))
    strides = row_major(box.shape)
    offset = sum((at - start) * stride for at, start, stride in zip(region.start, box.start, strides, strict=True))
    dims = tuple(tuple((size, step * strides[axis]) for axis, size, step in digits) for digits in region.dims)
    return piece._replace(tensor=name, offset=offset, dims=tuple(merged(modes) for modes in dims))


def _within(inner: Box, outer: Box) -> bool:
    return all(low <= start and stop <= high for (start, stop), (low, high) in zip(inner, outer, strict=True))


def _joined(boxes: Sequence[Box]) -> list[Box]:
    """Return disjoint boxes, as few as it can find, that hold all elements of `boxes`; more if boxes overlap."""
    todo, out = list(dict.fromkeys(boxes)), list[Box]()
    while todo:
        box = todo.pop()
        for other in out:
            if _joins(box, other):
                out.remove(other)
                todo.append(Box.hull([box, other]))
                break
        else:
            out.append(box)
    return sorted(out)


def _joins(box: Box, other: Box) -> bool:
    """Return whether two boxes overlap, or make up one."""
    pairs = list(zip(box, other, strict=True))
    apart = sum(b <= c or d <= a for (a, b), (c, d) in pairs)
    touching = sum(b == c or d == a for (a, b), (c, d) in pairs)
    return apart == 0 or (apart == touching == 1 and sum(side != other_side for side, other_side in pairs) == 1)

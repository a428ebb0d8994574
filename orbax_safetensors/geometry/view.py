"""`View`: stored tensors through NumPy's operations, in one normal form.

This module reads nothing. A view is composed lazily; `copies` returns the copies that fill any box of it.

The normal form is a list of pieces: boxes that tile the view's index domain, each an affine map into one stored tensor
(an offset and, for every dimension, its modes; see `strided`). Every operation maps pieces to pieces, so the
copies of a composition cost no more than those of a plain tensor.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, TypeVar

import numpy as np

from orbax_safetensors.errors import MappingError
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.elementwise import Cast, Offset, Op, Ops, Scale
from orbax_safetensors.geometry.pieces import Cut, Piece, PieceIndex, cut
from orbax_safetensors.geometry.reshape import boxes_of_range, dimension_groups, ranges_of_box
from orbax_safetensors.geometry.strided import (
    Copy,
    Modes,
    every,
    extent,
    merged,
    row_major,
    split,
    subrange,
)

_T = TypeVar("_T")

# The dtype of a view of tensors whose dtype is not known: in a description, before it meets a checkpoint or a tree.
UNKNOWN = np.dtype(np.void)

# What an error says of views if a family's function does with one what only arrays can.
VIEW_OPERATIONS = (
    "views have .T, .transpose, .reshape, slices, .pad, .cast, .scale and .offset, and ost.mapping has stack and "
    "concatenate"
)


class TensorCopy(NamedTuple):
    """A copy from the stored tensor `tensor` into a box of a view, and the operations on its elements."""

    tensor: str | None
    copy: Copy
    ops: Ops


@dataclass(slots=True)  # frozen, it would take four times as long to make, and a model has 45,000
class View:
    """A lazily composed array over stored tensors. Nothing changes a view.

    ```python
    import numpy as np

    view = ost.mapping.View.tensor("a.weight", (48, 32), np.dtype("float32"))
    print(view.T.reshape((32, 3, 16)).shape)  # (32, 3, 16)
    ```

    `shape` and `dtype` are those of the array that the view stands for. Operations return new views and follow NumPy's
    function of the same name. They raise `MappingError` if NumPy's function fails, and for a reshape that is not affine
    in the stored tensors.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: tuple[Piece, ...]
    _piece_index: PieceIndex | None = field(default=None, init=False, repr=False, compare=False)

    @staticmethod
    def tensor(name: str, shape: Sequence[int], dtype: np.dtype) -> View:
        """Return the stored tensor `name` as it is."""
        shape = tuple(shape)
        start, dims = _contiguous(shape)
        return View(shape, dtype, (Piece(name, start, 0, dims),) if dims is not None else ())

    @staticmethod
    def full(shape: Sequence[int], value: float, dtype: np.dtype = UNKNOWN) -> View:
        """Return a constant that no tensor stores; a save leaves it out. Joined with others, it has their dtype.

        ```python
        bias = ost.mapping.full((64,), 0.0)
        ```
        """
        shape = _integers(shape, "full")
        dims = tuple(merged(((size, 0),)) for size in shape)
        pieces = (Piece(None, (0,) * len(shape), 0, dims, (Offset(float(value)),)),) if prod(shape) else ()
        return View(shape, dtype, pieces)

    @staticmethod
    def tile(shape: Sequence[int], parts: Sequence[tuple[tuple[int, ...], View]]) -> View:
        """Join views at their `(start, view)`. They must tile `shape`; this is not checked."""
        pieces = [
            piece._replace(start=tuple(a + b for a, b in zip(start, piece.start, strict=True)))
            for start, view in parts
            for piece in view.pieces
        ]
        return View(tuple(shape), parts[0][1].dtype, tuple(pieces))

    def transpose(self, axes: Sequence[int] | None = None) -> View:
        """Permute the dimensions; without `axes`, reverse them."""
        rank = len(self.shape)
        axes = tuple(range(rank))[::-1] if axes is None else tuple(axes)
        order = tuple(axis + rank if axis < 0 else axis for axis in axes)
        if sorted(order) != list(range(rank)):
            raise MappingError(f"{self}: transpose{axes} is not a permutation of its {rank} dimensions")
        pieces = (
            Piece(p.tensor, tuple(p.start[a] for a in order), p.offset, tuple(p.dims[a] for a in order), p.ops)
            for p in self.pieces
        )
        return View(tuple(self.shape[a] for a in order), self.dtype, tuple(pieces))

    @property
    def T(self) -> View:
        """`transpose()`."""
        return self.transpose()

    def slice(self, *slices: builtins.slice) -> View:
        """Take `slices` of the leading dimensions. Steps are positive; ranges are clipped as NumPy clips them."""
        if len(slices) > len(self.shape):
            raise MappingError(f"{self}: {len(slices)} slices for {len(self.shape)} dimensions")
        view = self
        for axis, taken in enumerate(slices):
            view = view._slice_axis(axis, taken)
        return view

    def __getitem__(self, index: Any) -> View:
        """Return `view[index]` for slices and integers of the leading dimensions, as NumPy does."""
        taken = index if isinstance(index, tuple) else (index,)
        if not all(isinstance(at, builtins.slice | int) for at in taken):
            raise MappingError(f"{self}: expected slices and integers as index, found {index!r:.80}")
        slices = [at if isinstance(at, builtins.slice) else builtins.slice(at, at + 1 or None) for at in taken]
        view = self.slice(*slices)
        removed = [axis for axis, at in enumerate(taken) if isinstance(at, int)]
        if any(view.shape[axis] != 1 for axis in removed):
            raise IndexError(f"{self}: {index!r} is out of range")
        return _squeezed(view, removed) if removed else view

    def __array_function__(
        self, function: Callable[..., Any], types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Apply a function of NumPy, so that code for arrays takes views; TypeError if it is not in `_OF_NUMPY`."""
        operation = _OF_NUMPY.get(function)
        return NotImplemented if operation is None else operation(*args, **kwargs)

    def _slice_axis(self, axis: int, taken: builtins.slice) -> View:
        start, stop, step = taken.indices(self.shape[axis])
        if step < 1:
            raise MappingError(f"{self}: slice step {step} on dimension {axis}; a step must be positive")
        count = len(range(start, stop, step))
        pieces = []
        for piece in self.pieces:
            begin = piece.start[axis]
            end = begin + extent(piece.dims[axis])
            first = max(0, -(-(begin - start) // step))  # the first taken position that lies in the piece
            here = min(count, -(-(end - start) // step)) - first
            for done, offset, modes in every(piece.dims[axis], start + first * step - begin, step, max(0, here)):
                pieces.append(
                    piece._replace(
                        start=_with(piece.start, axis, first + done),
                        offset=piece.offset + offset,
                        dims=_with(piece.dims, axis, modes),
                    )
                )
        return View(_with(self.shape, axis, count), self.dtype, tuple(pieces))

    def reshape(self, shape: Sequence[int]) -> View:
        """Split and merge dimensions in row-major order; one size may be -1.

        Raises `MappingError` if the sizes do not match, or if a new dimension would have to run through a stored tensor
        in steps that are not constant.
        """
        shape = self._complete(tuple(shape))
        pieces = self.pieces
        for old, new in dimension_groups(self.shape, shape):
            before, after = old.start, len(shape) - new.stop
            regrouped = []
            for piece in pieces:
                for start, offset, dims in self._regroup(piece, before, self.shape[old], shape[new], shape):
                    regrouped.append(
                        Piece(
                            piece.tensor,
                            piece.start[:before] + start + piece.start[len(piece.start) - after :],
                            piece.offset + offset,
                            piece.dims[:before] + dims + piece.dims[len(piece.dims) - after :],
                            piece.ops,
                        )
                    )
            pieces = tuple(regrouped)
        return View(shape, self.dtype, pieces)

    def _complete(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return `shape` with its -1 filled in; raise `MappingError` if it holds other than the view's elements."""
        shape = _integers(shape, "reshape")
        elements, known = prod(self.shape), prod(size for size in shape if size != -1)
        if shape.count(-1) == 1 and known and elements % known == 0:
            shape = tuple(elements // known if size == -1 else size for size in shape)
        if min(shape, default=0) < 0 or prod(shape) != elements:
            raise MappingError(f"{self}: {elements} elements cannot be reshaped to {shape}")
        return shape

    def _regroup(
        self, piece: Piece, axis: int, old: tuple[int, ...], new: tuple[int, ...], shape: tuple[int, ...]
    ) -> Iterator[tuple[tuple[int, ...], int, tuple[Modes, ...]]]:
        """Yield `(start, offset, dims)` of boxes over the dimensions `new`: of `old` of a piece, which begin at `axis`.

        `old` and `new` have the same number of elements.
        """
        dims = piece.dims[axis : axis + len(old)]
        for first, offset, modes in ranges_of_box(piece.start[axis : axis + len(old)], dims, old):
            todo = [(first, offset, modes)]
            while todo:
                first, offset, modes = todo.pop()
                boxes = list(boxes_of_range(first, first + extent(modes), new))
                if len(boxes) == 1:
                    ((start, box_shape),) = boxes
                    parts = split(modes, box_shape)
                    if parts is None:
                        raise MappingError(
                            f"{self}: reshape to {shape} is not affine in {piece.tensor!r}: dimensions of sizes {old} "
                            f"run through it as (size, stride) = {modes}, which sizes {new} cut across"
                        )
                    yield start, offset, tuple(parts)
                    continue
                done = 0
                for _, box_shape in boxes:
                    end = done + prod(box_shape)
                    todo += [(first + at, offset + o, part) for at, o, part in subrange(modes, done, end)]
                    done = end

    @staticmethod
    def stack(views: Sequence[View], axis: int = 0) -> View:
        """Join views of one shape along a new dimension at `axis`.

        ```python
        norms = [ost.mapping.tensor(f"model.layers.{i}.input_layernorm.weight", (64,)) for i in range(2)]
        print(ost.mapping.stack(norms).shape)  # (2, 64)
        ```
        """
        _check_alike(views, "stack", [view.shape for view in views])
        axis = _check_axis(views[0], axis, len(views[0].shape) + 1)
        pieces = tuple(
            Piece(
                p.tensor,
                (*p.start[:axis], number, *p.start[axis:]),
                p.offset,
                (*p.dims[:axis], (), *p.dims[axis:]),
                p.ops,
            )
            for number, view in enumerate(views)
            for p in view.pieces
        )
        shape = views[0].shape
        return View((*shape[:axis], len(views), *shape[axis:]), _common_dtype(views), pieces)

    @staticmethod
    def concatenate(views: Sequence[View], axis: int = 0) -> View:
        """Join views along the existing dimension `axis`; their other dimensions agree.

        ```python
        gate, up = (ost.mapping.tensor(f"mlp.{part}_proj.weight", (96, 64)) for part in ("gate", "up"))
        print(ost.mapping.concatenate([gate, up]).shape)  # (192, 64)
        ```
        """
        if views:
            axis = _check_axis(views[0], axis, len(views[0].shape))
        _check_alike(views, "concatenate", [(*view.shape[:axis], -1, *view.shape[axis + 1 :]) for view in views])
        pieces, at = [], 0
        for view in views:
            for piece in view.pieces:
                pieces.append(piece._replace(start=_with(piece.start, axis, piece.start[axis] + at)))
            at += view.shape[axis]
        return View(_with(views[0].shape, axis, at), _common_dtype(views), tuple(pieces))

    def pad(self, shape: Sequence[int]) -> View:
        """Return the view with zeros at the end of its dimensions, up to `shape`; a save leaves out the padding."""
        shape = tuple(shape)
        if len(shape) != len(self.shape) or any(new < old for new, old in zip(shape, self.shape, strict=True)):
            raise MappingError(f"{self}: cannot be padded to {shape}")
        view = self
        for axis, size in enumerate(shape):
            if missing := size - view.shape[axis]:
                view = View.concatenate([view, View.full(_with(view.shape, axis, missing), 0)], axis)
        return view

    def cast(self, dtype: np.dtype | type) -> View:
        """Round every element to `dtype`, the dtype of the new view."""
        dtype = np.dtype(dtype)
        return replace(self._with_op(Cast(dtype)), dtype=dtype)

    def scale(self, factor: float) -> View:
        """Multiply every element by `factor`, in float32 or wider; a save divides."""
        return self._with_op(Scale(float(factor)))

    def offset(self, term: float) -> View:
        """Add `term` to every element, in float32 or wider; a save subtracts."""
        return self._with_op(Offset(float(term)))

    def _with_op(self, op: Op) -> View:
        return replace(self, pieces=tuple(piece._replace(ops=(*piece.ops, op)) for piece in self.pieces))

    def copies(self, box: Box, shape: Sequence[int]) -> list[TensorCopy]:
        """Return the copies that fill the leading corner of a row-major array of `shape` with `box` of the view.

        A plan of many boxes takes `cuts` instead, to compute only once what is alike.
        """
        return [TensorCopy(name, copy.onward(begin), ops) for name, copy, ops, begin in self.cuts(box, shape)]

    def cuts(self, box: Box, shape: Sequence[int]) -> list[Cut]:
        """Return the `copies` of a box apart from where they begin in its array: those of like pieces are equal."""
        shape = tuple(shape)
        if len(self.pieces) <= 1:  # as of most parameters of a model
            return [
                Cut(piece.tensor, copy, piece.ops, 0)
                for piece in self.pieces
                for copy in cut(piece.offset, piece.dims, piece.start, box, shape)
            ]
        if self._piece_index is None:
            self._piece_index = PieceIndex(self.pieces)
        return [
            Cut(self.pieces[number].tensor, copy, self.pieces[number].ops, begin)
            for number, begin, copies in self._piece_index.cut(box, shape)
            for copy in copies
        ]

    def clipped(self, box: Box) -> Box:
        """Return the part of `box` that lies in the view; the box may reach over the end."""
        return Box((min(start, size), min(stop, size)) for (start, stop), size in zip(box, self.shape, strict=True))

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the stored tensors, in the order in which the view first meets them."""
        if len(self.pieces) == 1 and (name := self.pieces[0].tensor) is not None:
            return (name,)
        return tuple(dict.fromkeys(piece.tensor for piece in self.pieces if piece.tensor is not None))

    def __str__(self) -> str:
        shown = ", ".join(repr(name) for name in self.tensors[:3]) + (", ..." if len(self.tensors) > 3 else "")
        return f"view {self.shape} of [{shown}]"


def _squeezed(view: View, axis: int | Sequence[int] | None = None) -> View:
    """Return the view without the dimensions `axis`, which have size 1; without `axis`, without all that do."""
    rank = len(view.shape)
    if axis is None:
        axis = [at for at, size in enumerate(view.shape) if size == 1]
    removed = {_check_axis(view, at, rank) for at in ([axis] if isinstance(axis, int) else axis)}
    if any(view.shape[at] != 1 for at in removed):
        raise MappingError(f"{view}: dimensions {sorted(removed)} are not all of size 1")
    return view.reshape([size for at, size in enumerate(view.shape) if at not in removed])


# What views have of NumPy's functions.
_OF_NUMPY: dict[Callable[..., Any], Callable[..., View]] = {
    np.transpose: View.transpose,
    np.reshape: View.reshape,
    np.squeeze: _squeezed,
    np.stack: View.stack,
    np.concatenate: View.concatenate,
}


@lru_cache
def _contiguous(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[Modes, ...] | None]:
    """Return where a row-major tensor begins, and its dimensions; None if it has no elements."""
    dims = tuple(merged(((size, stride),)) for size, stride in zip(shape, row_major(shape), strict=True))
    return (0,) * len(shape), dims if prod(shape) else None


def _integers(shape: Sequence[int], operation: str) -> tuple[int, ...]:
    """Return a shape whose sizes are integers; `MappingError` if one is something else, such as an infinity."""
    try:
        return tuple(map(operator.index, shape))
    except TypeError:
        raise MappingError(f"{operation}: expected integers as sizes, found {tuple(shape)!s:.200}") from None


def _with(values: tuple[_T, ...], axis: int, value: _T) -> tuple[_T, ...]:
    """Return `values` with `value` at `axis`."""
    out = list(values)
    out[axis] = value
    return tuple(out)


def _check_alike(views: Sequence[View], operation: str, shapes: Sequence[tuple[int, ...]]) -> None:
    if not views:
        raise MappingError(f"{operation}: expected one view or more, found none")
    dtype = _common_dtype(views)
    for view, shape in zip(views, shapes, strict=True):
        if shape != shapes[0] or view.dtype not in (dtype, UNKNOWN):
            raise MappingError(f"{operation}: {view} of {view.dtype} does not fit {views[0]} of {dtype}")


def _common_dtype(views: Sequence[View]) -> np.dtype:
    """Return the dtype of the first view that has one."""
    return next((view.dtype for view in views if view.dtype != UNKNOWN), UNKNOWN)


def _check_axis(view: View, axis: int, rank: int) -> int:
    if not -rank <= axis < rank:
        raise MappingError(f"{view}: axis {axis} is out of range")
    return axis % rank


def by_tensors(tensors: Sequence[Sequence[str]]) -> list[list[int]]:
    """Return the positions of `tensors`, the names that each of several users has, in groups that share some of them.

    Users of a group share tensors directly or through other users.
    """
    names = [name for used in tensors for name in used]
    if len(set(names)) == len(names):
        return [[number] for number in range(len(tensors))]
    group_of: dict[str, int] = {}
    groups: dict[int, list[int]] = {}
    for number, used in enumerate(tensors):
        groups[number] = [number]
        if not group_of.keys().isdisjoint(used):
            for other in sorted({group_of[name] for name in used if name in group_of}):
                groups[number] = groups.pop(other) + groups[number]
                group_of |= {name: number for member in groups[number] for name in tensors[member]}
        for name in used:
            group_of[name] = number
    return [sorted(group) for group in groups.values()]

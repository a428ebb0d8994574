"""What a row-major reshape does to dimensions: which it joins and splits, and which boxes are which ranges.

Shapes here are parts of a view's old and new shape; `view` applies this to the pieces of a view.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

from orbax_safetensors.geometry.strided import Modes, extent, merged, row_major, subrange


def dimension_groups(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[slice, slice]]:
    """Return the shortest runs of old and new dimensions that hold the same number of elements, innermost first.

    Both shapes hold the same number of elements. With the innermost group first, the dimensions before a group still
    have their old positions when `reshape` replaces the group.
    """
    if prod(old) == 0:
        return [(slice(0, len(old)), slice(0, len(new)))]
    groups = []
    old_end, new_end = len(old), len(new)
    while old_end or new_end:
        old_begin, new_begin = max(old_end - 1, 0), max(new_end - 1, 0)
        while (a := prod(old[old_begin:old_end])) != (b := prod(new[new_begin:new_end])):
            if a < b:
                old_begin -= 1
            else:
                new_begin -= 1
        groups.append((slice(old_begin, old_end), slice(new_begin, new_end)))
        old_end, new_end = old_begin, new_begin
    return groups


def ranges_of_box(
    start: tuple[int, ...], dims: tuple[Modes, ...], shape: tuple[int, ...]
) -> Iterator[tuple[int, int, Modes]]:
    """Yield a box of `shape` as ranges of the flattened `shape`: `(first position, offset, modes)` for each.

    The box is one range if it covers from end to end all dimensions after the first in which it has several positions.
    """
    strides = row_major(shape)
    inner = len(shape)
    while inner and extent(dims[inner - 1]) == shape[inner - 1]:
        inner -= 1
    inner = max(inner - 1, 0)
    modes = merged([mode for dim in dims[inner:] for mode in dim])
    first = sum(at * stride for at, stride in zip(start, strides, strict=True))
    for index in product(*(range(extent(dim)) for dim in dims[:inner])):
        flat, offset = first, 0
        for at, dim, stride in zip(index, dims[:inner], strides, strict=False):
            ((_, step, _),) = subrange(dim, at, at + 1)
            flat, offset = flat + at * stride, offset + step
        yield flat, offset, modes


def boxes_of_range(first: int, last: int, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield positions `[first, last)` of the flattened `shape` as boxes, in order: `(start, shape)` for each."""
    if not shape:
        yield (), ()
        return
    inner = prod(shape[1:])
    head, tail = first // inner, (last - 1) // inner
    if head == tail:
        for start, box in boxes_of_range(first - head * inner, last - head * inner, shape[1:]):
            yield (head, *start), (1, *box)
        return
    if first % inner:
        for start, box in boxes_of_range(first % inner, inner, shape[1:]):
            yield (head, *start), (1, *box)
        head += 1
    if head < last // inner:
        yield (head, *(0 for _ in shape[1:])), (last // inner - head, *shape[1:])
    if last % inner:
        for start, box in boxes_of_range(0, last % inner, shape[1:]):
            yield (tail, *start), (1, *box)

"""`Decoding`: how the elements of a box of a quantised tensor come from exactly the codes and parameters that it needs.

The host decodes any part of any tensor (`geometry.encoding`, `transfer.decode`). A device decodes boxes of rows and of
neighbouring columns, if words and scales are for elements by their place alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from orbax_safetensors.geometry.encoding import Encoding, Order, Parameter, Role
from orbax_safetensors.geometry.strided import Copy, Mode, Runs, merged, offsets, runs_of


class Span(NamedTuple):
    """`size` positions on an axis, `step` apart, and the blocks of `block` positions that they are in.

    The first position is `start` after the begin of the first block. If there are more blocks, `step` divides `block`.
    """

    size: int
    step: int
    start: int
    block: int

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return (self.start + (self.size - 1) * self.step) // self.block + 1


class Spread(NamedTuple):
    """The words of a parameter that a box needs, and the elements of the box that each word is for.

    Words have the shape `(outer, rows.blocks, columns.blocks)`, and elements `(outer, rows.size, inner, columns.size)`:
    a word is for all elements of a block, and for all of `inner`.
    """

    parameter: Parameter
    outer: int
    rows: Span
    inner: int
    columns: Span

    @property
    def input(self) -> tuple[tuple[int, ...], np.dtype]:
        """Shape and dtype of the words."""
        dtype = self.parameter.dtype
        words = np.dtype(dtype.numpy if dtype.name in ("F32", "F16", "BF16") else f"<u{dtype.bits // 8}")
        return (self.outer, self.rows.blocks, self.columns.blocks), words


@dataclass(frozen=True, slots=True)
class Decoding:
    """How codes and parameters, packed as they are read, become `rows` of `width` elements, in the order of the codes.

    It is equal for boxes of tensors that are stored and cut alike, such as those of all layers.

    Attributes:
      rows: of all matrices.
      width: elements of a row.
      bits: of a code.
      values: what codes mean, as in `Encoding`.
      order: of the codes in a byte, or in a word of 32 bits.
      final: what a scaled element is multiplied by.
      parameters: those that the box needs, by their words.
    """

    rows: int
    width: int
    bits: int
    values: str
    order: Order
    final: float
    parameters: tuple[Spread, ...]

    @property
    def inputs(self) -> tuple[tuple[tuple[int, ...], np.dtype], ...]:
        """Shape and dtype of each packed array as a program takes it: of the codes, then of each of `parameters`."""
        word = np.dtype("<u4" if self.order is Order.EVEN_FIRST else np.uint8)
        codes = (self.rows, self.width * self.bits // 8 // word.itemsize), word
        return codes, *[spread.input for spread in self.parameters]


@lru_cache(maxsize=2**14)
def decoding_of(copy: Copy, encoding: Encoding) -> tuple[Decoding, tuple[Runs, ...]] | str:
    """Return how a device decodes what `copy` reads of a decoded tensor, and the bytes of each of its `inputs`.

    Bytes count from the begin of each stored tensor. Each byte is needed, and none is read twice. If only the host can
    decode it, return why, in a few words. A caller also has to check the group index, see `group_order`.
    """
    by_role = {parameter.role: parameter for parameter in encoding.parameters}
    if Role.VALUES in by_role or encoding.padding:
        return "blocks that run over the ends of rows"
    if Role.SCALE not in by_role or encoding.word_added:
        return "codes without scales"
    if Role.GROUP in by_role and 0 in by_role[Role.SCALE].block:
        return "group index of act-order"
    if Role.BIAS in by_role and by_role[Role.SCALE].dtype.name == "F32":
        return "products that are rounded before a sum"
    if len(encoding.shape) > 2 and by_role.keys() & {Role.FACTOR, Role.DIVISOR}:
        return "second scales of several matrices"
    if any(parameter.divided != 1 for parameter in encoding.parameters):
        return "scales that are divided"
    box = _box(copy, encoding)
    if isinstance(box, str):
        return box
    row = encoding.bytes_of(encoding.shape[-1])
    begin = box.row * row + encoding.bytes_of(box.column)
    codes = runs_of(begin, encoding.bytes_of(box.width), [(size, stride * row) for size, stride in box.rows])
    assert codes is not None, copy  # the modes of a copy nest
    spreads, reads = [], [codes]
    for parameter in encoding.parameters:
        if parameter.role is not Role.GROUP:
            spread = _spread(parameter, box, encoding)
            if spread is None:
                return "rows and columns that lie across blocks"
            spreads.append(spread[0])
            reads.append(spread[1])
    rows = prod([size for size, _ in box.rows])
    values = encoding.bits, encoding.values, encoding.order, encoding.final
    return Decoding(rows, box.width, *values, tuple(spreads)), tuple(reads)


@lru_cache(maxsize=2**12)
def group_order(copy: Copy, encoding: Encoding) -> tuple[Runs, np.ndarray] | None:
    """Return the bytes of a group index for what `copy` reads, and what they have to be, as int32; None if it has none.

    If the config says that groups are in the order of the inputs, a device decodes without the index, which then has to
    say the same. `decoding_of` has to return a `Decoding` for these arguments.
    """
    by_role = {parameter.role: parameter for parameter in encoding.parameters}
    if Role.GROUP not in by_role:
        return None
    box, row = _box(copy, encoding), by_role[Role.GROUP].nbytes // encoding.shape[-2]
    assert isinstance(box, _CodeBox), box
    runs = runs_of(box.row * row, row, [(size, stride * row) for size, stride in box.rows])
    assert runs is not None, copy
    rows = box.row + offsets(tuple(box.rows), np.arange(prod([size for size, _ in box.rows])))
    groups = rows // by_role[Role.SCALE].block[0]
    return runs, np.repeat(groups.astype(np.int32), row // 4)


class _CodeBox(NamedTuple):
    """Some rows, counted through all matrices, and a range of their columns; modes are outermost first."""

    row: int
    rows: Sequence[Mode]
    column: int
    width: int


def _box(copy: Copy, encoding: Encoding) -> _CodeBox | str:
    """Return the rows and columns that a copy reads, or why they cannot be decoded by themselves."""
    *_, columns = encoding.shape
    modes = merged(sorted([(size, stride) for size, stride, _ in copy.modes], key=lambda mode: -mode[1]))
    row, column = divmod(copy.source, columns)
    cut = _cut(modes, column, columns)
    if cut is None:
        return "elements that run over the ends of rows"
    rows, across = cut
    if across and (len(across) > 1 or across[0][1] != 1):
        return "columns that are not neighbours"
    width = across[0][0] if across else 1
    if column % encoding.word or width % encoding.word:
        return "a shard that cuts through words"
    return _CodeBox(row, rows, column, width)


def _cut(modes: Sequence[Mode], start: int, length: int) -> tuple[list[Mode], list[Mode]] | None:
    """Cut modes at the ends of pieces of `length`, the first of which has `start`: into modes over pieces and inside.

    Returns None if something goes over the end of a piece without being all of it.
    """
    pieces: list[Mode] = []
    inside: list[Mode] = []
    last = start
    for size, stride in reversed(modes):
        if stride % length == 0:
            pieces.append((size, stride // length))
        elif last + (size - 1) * stride < length:
            inside.append((size, stride))
            last += (size - 1) * stride
        else:
            count = length // stride
            if last >= stride or length % stride or size % count:
                return None
            inside.append((count, stride))
            pieces.append((size // count, 1))
    return pieces[::-1], inside[::-1]


def _spread(parameter: Parameter, box: _CodeBox, encoding: Encoding) -> tuple[Spread, Runs] | None:
    """Return the words of a parameter for a box, and their bytes; None if they are for rows in no simple order."""
    (height, width), (down, across), (high, wide) = parameter.block, parameter.per_word, parameter.words
    matrix, row = divmod(box.row, encoding.shape[-2])
    cut = _cut(box.rows, row, encoding.shape[-2])
    blocks = _blocks(cut[1], row, height, height * down) if cut else None
    if cut is None or blocks is None or (box.column + box.width - 1) // width >= parameter.grid[1]:
        return None
    outer, rows, inner = [(size, stride * high) for size, stride in cut[0]] + blocks[0], *blocks[1:]
    width *= across
    columns = Span(box.width, 1, box.column % width, width)
    # It does not matter where in its only block an element is, unless its entry is found by that.
    if rows.size == down == 1:
        rows = Span(1, 1, 0, 1)
    if columns.blocks == across == 1:
        columns = Span(box.width, 1, 0, box.width)
    word = parameter.word_bytes
    begin = (matrix * high + row // (height * down)) * wide + box.column // width
    modes = [(size, stride * wide * word) for size, stride in [*outer, (rows.blocks, 1)]]
    runs = runs_of(begin * word, columns.blocks * word, modes)
    return None if runs is None else (Spread(parameter, prod([size for size, _ in outer]), rows, inner, columns), runs)


def _blocks(rows: Sequence[Mode], start: int, height: int, block: int) -> tuple[list[Mode], Span, int] | None:
    """Cut rows, from `start` on, into modes over blocks, a span over blocks, and how many of the others share an entry.

    A block has the rows of a word; each of its entries is for `height` rows. Returns None if rows cannot be cut so.
    """
    outer: list[Mode] = []
    span, inner, reach = None, 1, 0
    for size, stride in reversed(rows):
        if stride % block == 0:
            outer.append((size, stride // block))
        elif span:
            return None
        elif start % height + reach + (size - 1) * stride < height:
            inner, reach = inner * size, reach + (size - 1) * stride
        elif block % stride or (height % stride and stride % height) or start % stride + reach >= stride:
            return None
        else:
            span = Span(size, stride, start % block, block)
    return outer[::-1], span or Span(1, 1, start % block, block), inner

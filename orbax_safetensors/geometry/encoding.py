"""`Encoding`: where the codes of a quantised tensor lie, and what is stored beside them for any of its elements.

A quantised tensor is stored as *codes*, a few bits for each element, and *parameters*, which say what codes mean:
scales, zero points, and others, each one for a block of elements. To views, a quantised tensor is a row-major tensor of
elements in the order of the codes. This module is geometry only: it reads and decodes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from itertools import pairwise
from math import gcd, lcm, prod
from typing import NamedTuple

import numpy as np

from orbax_safetensors.format.dtypes import DType
from orbax_safetensors.geometry.strided import Copy, Mode, Runs, runs_of

# Elements that share a scale are decoded together, unless they are so many that most of them may not be needed.
_LONGEST_UNIT = 256


class Role(Enum):
    """What a parameter says of the elements of a block, in the order in which it is applied; see `transfer.decode`."""

    VALUES = "what each code means, in place of `Encoding.values`"
    GROUP = "which of the other parameters' groups an element is in"
    ZERO = "what is subtracted from a code"
    SCALE = "what the result is multiplied by"
    SCALE_VALUES = "what each code of a scale means"
    FACTOR = "what the scale is multiplied by before"
    DIVISOR = "what the scale is divided by before"
    BIAS = "what is added to a scaled element"
    INPUT_FACTOR = "what a scaled element is multiplied by after, as its layer multiplies its inputs"


class Order(Enum):
    """Which field of a byte, or of a word of 32 bits, has the first of the codes in it."""

    LOW_FIRST = "the lowest"
    HIGH_FIRST = "the highest, of each byte"
    EVEN_FIRST = "the lowest four have the codes 0, 2, 4, 6 of a word of eight, and the others 1, 3, 5, 7"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A stored tensor that says something of blocks of elements.

    Attributes:
      role: what it says.
      dtype: of an entry, or of a word of several.
      grid: rows and columns of entries for one matrix of elements.
      block: rows and columns of elements that share an entry. 0 is for all entries of a row or a column of the grid,
        among which a `GROUP` selects.
      bits: of an entry that shares a word with others, 0 if none does.
      order: of the entries in a word.
      down: whether the entries of a word are neighbours in a column of the grid, not in a row.
      added: to each word, modulo 2**32, before its entries are taken.
      divided: what each entry is divided by in float32.
    """

    role: Role
    dtype: DType
    grid: tuple[int, int]
    block: tuple[int, int]
    bits: int = 0
    order: Order = Order.LOW_FIRST
    down: bool = False
    added: int = 0
    divided: float = 1

    @property
    def word_bytes(self) -> int:
        """Size of a word, or of an entry."""
        return self.dtype.bits // 8

    @property
    def per_word(self) -> tuple[int, int]:
        """Rows and columns of entries in a word."""
        count = self.dtype.bits // self.bits if self.bits else 1
        return (count, 1) if self.down else (1, count)

    @property
    def words(self) -> tuple[int, int]:
        """Rows and columns of words for one matrix."""
        (rows, columns), (high, wide) = self.grid, self.per_word
        return -(-rows // high), -(-columns // wide)

    @property
    def nbytes(self) -> int:
        """Bytes of all words for one matrix."""
        return prod(self.words) * self.word_bytes

    def alone(self) -> Encoding:
        """Return entries that share words as the unsigned codes of a tensor, in the order of the words."""
        (rows, columns), (high, wide) = self.words, self.per_word
        shape = rows, columns * high * wide
        return Encoding(
            shape, self.bits, f"unsigned{self.bits}", (), self.order, rows_in_word=high, word_added=self.added
        )


class Area(NamedTuple):
    """Decoded elements that lie one after the other, row by row: some columns of some rows.

    `rows` ascend, and count through all matrices; `columns` has `[begin, end)` of stretches, in order.
    """

    rows: np.ndarray
    columns: tuple[tuple[int, int], ...]

    @property
    def width(self) -> int:
        """Elements of a row."""
        return sum(end - begin for begin, end in self.columns)

    def block_columns(self, width: int) -> tuple[np.ndarray, int]:
        """Return the columns of blocks of `width`, and how many elements of a row each of them has: 1 if not all do."""
        if len({(end - 1) // width for _, end in self.columns} | {begin // width for begin, _ in self.columns}) == 1:
            return np.array([self.columns[0][0] // width]), self.width
        if all(begin % width == end % width == 0 for begin, end in self.columns):
            return np.concatenate([np.arange(begin // width, end // width) for begin, end in self.columns]), width
        return np.concatenate([np.arange(begin, end) // width for begin, end in self.columns]), 1


def _of_range(begin: int, end: int, columns: int) -> Iterator[Area]:
    """Yield elements `[begin, end)` of rows: the last part of a row, whole rows, and the first part of a row."""
    while begin < end:
        row, at = divmod(begin, columns)
        count = (end - begin) // columns if at == 0 else 0
        until = min(end, (row + max(count, 1)) * columns)
        yield Area(np.arange(row, row + max(count, 1)), ((at, columns if count else until - row * columns),))
        begin = until


class Patch(NamedTuple):
    """Words of a parameter that are read together.

    Attributes:
      ranges: `(begin, nbytes)` in the stored tensor.
      rows: which rows of words, counted through all matrices, in order.
      columns: `[begin, end)` of words.
      row_bytes: from one row to the next, in the bytes read.
    """

    ranges: tuple[tuple[int, int], ...]
    rows: np.ndarray
    columns: tuple[int, int]
    row_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of all ranges."""
        return sum([nbytes for _, nbytes in self.ranges])


@lru_cache(maxsize=2**12)
def fields_apart(copy: Copy, fields: int, width: int) -> Copy | None:
    """Return a copy from elements whose words have `fields` as the same copy from rows of fields; None if it has none.

    Its source is rows of `width` words, and element `word * fields + field` of a row becomes `field * width + word`.
    """
    row = fields * width
    first, rest = divmod(copy.source, row)
    word, field = divmod(rest, fields)
    last_word, last_field, modes = word, field, []
    for size, source, destination in copy.modes:
        if source % row == 0:
            modes.append((size, source, destination))
        elif source % fields == 0:
            last_word += (size - 1) * (source // fields)
            modes.append((size, source // fields, destination))
        else:
            last_field += (size - 1) * source
            modes.append((size, source * width, destination))
    if last_word >= width or last_field >= fields:
        return None
    return Copy(first * row + field * width + word, copy.destination, tuple(modes))


@dataclass(frozen=True)
class Encoding:
    """How the elements of one quantised tensor are stored.

    Attributes:
      shape: of the decoded tensor in the order of the codes, rank 2 or more. The last two dimensions are rows and
        columns; a row begins with a new word.
      bits: of a code. Each row fills whole bytes.
      values: the name of what codes mean, a table of `transfer.code_values`.
      parameters: what is stored beside the codes.
      order: of the codes in a byte or a word.
      rows_in_word: rows of a logical matrix whose codes share a word, if they do: an element of column `c` is then in
        column `c // rows_in_word` of that matrix, and its groups are counted by the rows of that matrix.
      word_added: to each word of 32 bits, modulo 2**32, before its codes are taken.
      added: to each scale.
      final: what a scaled element is multiplied by.
      padding: elements at the end that are not stored.
    """

    shape: tuple[int, ...]
    bits: int
    values: str
    parameters: tuple[Parameter, ...]
    order: Order = Order.LOW_FIRST
    rows_in_word: int = 1
    word_added: int = 0
    added: float = 0
    final: float = 1
    padding: int = 0

    @property
    def word(self) -> int:
        """Elements whose codes can only be taken together: those of a byte, or of a word of 32 bits."""
        if self.order is Order.EVEN_FIRST or self.word_added:
            return 32 // self.bits
        return max(self.rows_in_word, lcm(self.bits, 8) // self.bits)

    @cached_property
    def unit(self) -> int:
        """Elements that are decoded together: ranges of elements begin and end at multiples of this."""
        columns, word = self.shape[-1], self.word
        for parameter in self.parameters:
            height, width = parameter.block
            if self.bits == 8 or height != 1 or not 0 < width <= _LONGEST_UNIT:
                continue
            if columns % width == width % word == self.padding % width == 0:
                return width
        return gcd(word, columns)

    def elements_in(self, nbytes: int) -> int:
        """Return how many elements `nbytes` of codes are."""
        return nbytes * 8 // self.bits

    def bytes_of(self, elements: int) -> int:
        """Return the bytes of the codes of so many elements."""
        return elements * self.bits // 8

    @property
    def nbytes(self) -> int:
        """Bytes of all codes."""
        return self.bytes_of(prod(self.shape) - self.padding)

    def units(self, copy: Copy) -> Runs:
        """Return the bytes of all codes that have to be decoded for `copy`, whose source is the decoded tensor.

        Only whole units can be decoded. With 4 bits for an element and units of 32, which are 16 bytes, a copy of the
        elements 40 to 55 needs the second unit: the 16 bytes from 16 on.
        """
        unit, unit_bytes = self.unit, self.bytes_of(self.unit)
        first, last = copy.source // unit, copy.source // unit  # the units of a run
        modes: list[Mode] = []  # in units
        reach = 0  # elements from the first to the last of all modes so far
        inside = 0  # units from the first to the last run of `modes`
        for size, stride, _ in sorted(copy.modes, key=lambda mode: mode[1]):
            reach += (size - 1) * stride
            if stride % unit == 0 and stride // unit > last - first + inside:
                modes.append((size, stride // unit))
                inside += (size - 1) * (stride // unit)
            else:  # units would be cut or read twice: all within becomes one run
                last, modes, inside = (copy.source + reach) // unit, [], 0
        runs = runs_of(
            first * unit_bytes, (last - first + 1) * unit_bytes, [(size, stride * unit_bytes) for size, stride in modes]
        )
        assert runs is not None, copy
        return runs

    def areas(self, codes: Runs, low: int, high: int) -> Iterator[Area]:
        """Yield the decoded elements of packed bytes `[low, high)` of `codes`, in order, in as few areas as it can."""
        columns = self.shape[-1]
        begin, end = self._elements(codes, low, high)
        first, last = begin // columns, (end - 1) // columns
        if len(begin) == 1:
            yield from _of_range(int(begin[0]), int(end[0]), columns)
            return
        rows, counts = first, last - first + 1
        if counts.max() > 1:  # runs that go over the ends of rows are cut there
            begin, end, rows = (np.repeat(at, counts) for at in (begin, end, first))
            rows = rows + np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        begin, end = np.maximum(begin - rows * columns, 0), np.minimum(end - rows * columns, columns)
        heads = np.flatnonzero(np.diff(rows, prepend=-1))  # the first stretch of each row
        stretches = np.diff(heads, append=len(rows))
        for top, bottom in pairwise([0, *(np.flatnonzero(np.diff(stretches)) + 1).tolist(), len(heads)]):
            count = int(stretches[top])
            here = slice(int(heads[top]), int(heads[top]) + count * (bottom - top))
            edges = np.stack([begin[here], end[here]], axis=-1).reshape(-1, count, 2)
            changes = np.flatnonzero((edges[1:] != edges[:-1]).any(axis=(1, 2))) + 1
            for start, stop in pairwise([0, *changes.tolist(), bottom - top]):
                yield Area(rows[heads[top + start : top + stop]], tuple(map(tuple, edges[start].tolist())))

    def entries(self, parameter: Parameter, area: Area) -> tuple[np.ndarray, tuple[int, int]]:
        """Return where a parameter has entries for an area: a row for each of its rows, and columns of words.

        Rows are those of all matrices, each of whole words. A row of 0 in `block` returns all rows of the first matrix.
        """
        (height, width), (down, across) = parameter.block, parameter.per_word
        rows, columns = parameter.words
        matrix = area.rows // self.shape[-2]
        if height:
            needed = (area.rows - matrix * self.shape[-2]) // height + matrix * (rows * down)
        else:
            needed = np.arange(rows * down) + matrix[0] * (rows * down)
        if not width:
            return needed, (0, columns)
        # The last word of a row may have more elements than the grid has.
        first, last = (min(at // width, parameter.grid[1] - 1) for at in (area.columns[0][0], area.columns[-1][1] - 1))
        return needed, (first // across, last // across + 1)

    def patch(self, parameter: Parameter, areas: Sequence[Area], max_gap_bytes: int) -> Patch:
        """Return what to read of a parameter for all elements of some areas.

        It is read in one range for each row of words, or, if what lies between the rows is at most `max_gap_bytes`, in
        one range.
        """
        rows, columns = zip(*[self.entries(parameter, area) for area in areas], strict=True)
        low, high = min([low for low, _ in columns]), max([high for _, high in columns])
        # Neighbours are mostly equal; what is left is short to sort.
        at = np.concatenate([needed[np.flatnonzero(np.diff(needed, prepend=-1))] for needed in rows])
        at = np.unique(at // parameter.per_word[0])
        whole, row_bytes = parameter.words[1] * parameter.word_bytes, (high - low) * parameter.word_bytes
        begin = at * whole + low * parameter.word_bytes
        if len(at) == 1 or int(np.diff(begin).max()) - row_bytes <= max_gap_bytes:
            at = np.arange(at[0], at[-1] + 1)
            return Patch(((int(begin[0]), (len(at) - 1) * whole + row_bytes),), at, (low, high), whole)
        return Patch(tuple([(offset, row_bytes) for offset in begin.tolist()]), at, (low, high), row_bytes)

    def _elements(self, codes: Runs, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
        """Return packed bytes `[low, high)` of `codes` as `[begin, end)` in elements for each run, in order."""
        cuts = np.append(np.arange(low // codes.length, -(-high // codes.length)) * codes.length, high)
        cuts[0] = low
        index = cuts[:-1] // codes.length  # divmod is many times slower
        begin = codes.begin + cuts[:-1] - index * codes.length
        for size, stride in reversed(codes.modes):
            outer = index // size
            begin += (index - outer * size) * stride
            index = outer
        return begin * 8 // self.bits, (begin + np.diff(cuts)) * 8 // self.bits

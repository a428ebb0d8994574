"""`Encoding`: where the codes and the scales of a quantised tensor lie for any elements of what it decodes to.

A quantised tensor is stored as two: *codes*, a few bits for each element, and *scales*, one for each block of elements;
an element is the value of its code times the scale of its block. To views it is a tensor of the decoded elements, in
row-major order. Here is the geometry only: nothing is read and nothing is decoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from orbax_safetensors.format.dtypes import DType


class Segments(NamedTuple):
    """Decoded elements cut into runs that share a scale, and the scale of each by its position in the scales tensor."""

    lengths: np.ndarray
    scales: np.ndarray


@dataclass(frozen=True, slots=True)
class Encoding:
    """How the elements of one quantised tensor are stored.

    Attributes:
      shape: of the decoded tensor, rank 2 or more. The last two dimensions are rows and columns.
      block: rows and columns that share a scale; the last block of a row or a column may be smaller. The scales are a
        row-major grid with an entry for each block, in every matrix of the leading dimensions.
      codes: element type of the codes, F8_E4M3 or F4. Of those of 4 bits the first is in the low half of a byte, and
        blocks divide the columns evenly.
      scales: element type of the scales: floats for F8_E4M3, and for F4 U8, which are exponents of 2 plus 127.
    """

    shape: tuple[int, ...]
    block: tuple[int, int]
    codes: DType
    scales: DType

    @property
    def unit(self) -> int:
        """Elements that are decoded together: ranges of elements begin and end at multiples of it."""
        return 1 if self.codes.bits == 8 else self.block[1]

    @property
    def elements_per_byte(self) -> int:
        """Elements in one byte of codes."""
        return 8 // self.codes.bits

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the scales of one matrix."""
        (rows, columns), (height, width) = self.shape[-2:], self.block
        return -(-rows // height), -(-columns // width)

    @property
    def num_scales(self) -> int:
        """Elements of the scales tensor."""
        return prod(self.shape[:-2]) * prod(self.grid)

    @property
    def scale_bytes(self) -> int:
        """Size of one scale."""
        return self.scales.bits // 8

    def scale_ranges(self, begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Half-open ranges of the scales tensor, in scales, for each range `[begin, end)` of elements, none empty.

        A range goes from the first scale that some element needs to the last.
        """
        columns, last = self.shape[-1], end - 1
        # Of the rows that a range runs through, the first may begin, and the last may end, within the row.
        second = (begin // columns + 1) * columns
        before_last = last // columns * columns - 1
        low = np.minimum(self._scale_of(begin), self._scale_of(np.where(second < end, second, begin)))
        high = np.maximum(self._scale_of(last), self._scale_of(np.where(before_last >= begin, before_last, last)))
        return low, high + 1

    def segments(self, begin: np.ndarray, end: np.ndarray) -> Segments:
        """The elements of the ranges `[begin, end)`, one range after the other, none empty."""
        columns, (height, width), across = self.shape[-1], self.block, self.grid[1]
        # Every row is cut at its blocks: segment number n is number n % across of row n // across.
        first, last = ((at // columns * across + at % columns // width) for at in (begin, end - 1))
        counts = last - first + 1
        done = np.cumsum(counts)
        segment = np.arange(done[-1]) + np.repeat(last + 1 - done, counts)
        lengths = np.full(segment.shape, width)
        if columns % width:
            lengths[segment % across == across - 1] = columns % width
        lengths[done - counts] -= begin - (first // across * columns + first % across * width)
        lengths[done - 1] -= np.minimum(last % across * width + width, columns) + last // across * columns - end
        if height == 1:
            return Segments(lengths, segment)
        row = segment // across  # and not divmod, which is many times slower
        return Segments(lengths, self._grid_row(row) * across + (segment - row * across))

    def _scale_of(self, element: np.ndarray) -> np.ndarray:
        """The position in the scales tensor of each element's scale."""
        row = element // self.shape[-1]
        scale: np.ndarray = self._grid_row(row) * self.grid[1] + (element - row * self.shape[-1]) // self.block[1]
        return scale

    def _grid_row(self, row: np.ndarray) -> np.ndarray:
        """The row of scales for each row of elements, both counted through all matrices."""
        if len(self.shape) == 2:
            return row // self.block[0]
        matrix = row // self.shape[-2]
        of_grid: np.ndarray = matrix * self.grid[0] + (row - matrix * self.shape[-2]) // self.block[0]
        return of_grid

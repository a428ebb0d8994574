"""`Encoding`: where the codes and the scales for any decoded elements of a quantised tensor lie.

A quantised tensor is stored as two: *codes*, a few bits for each element, and *scales*, one for each block of elements;
an element is the value of its code times the scale of its block. To views, a quantised tensor is a row-major tensor of
the decoded elements. This module is geometry only: it reads and decodes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from orbax_safetensors.format.dtypes import DType
from orbax_safetensors.geometry.strided import Copy, Mode, Runs, runs_of


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
      codes: element type of the codes, F8_E4M3 or F4. The first of two 4-bit codes is in the low half of its byte, and
        blocks of such codes divide the columns evenly.
      scales: element type of the scales: floats for F8_E4M3, and for F4 U8, whose values are exponents of 2 plus 127.
    """

    shape: tuple[int, ...]
    block: tuple[int, int]
    codes: DType
    scales: DType

    @property
    def unit(self) -> int:
        """Elements that are decoded together: ranges of elements begin and end at multiples of this."""
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

    def units(self, copy: Copy) -> Runs:
        """Return the codes, in bytes, of the units that `copy` reads from; its source is the decoded tensor."""
        unit, unit_bytes = self.unit, self.unit // self.elements_per_byte
        first, last = copy.source // unit, copy.source // unit  # the units of a run
        modes: list[Mode] = []  # in units
        reach = inside = (
            0  # from the first to the last element of all modes so far, and to the last unit of the modes kept
        )
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

    def elements(
        self, codes: Runs, pitch: int, low: int = 0, high: int | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return packed bytes `[low, high)` of `codes`, by default all, as `[begin, end)` in elements for each run.

        Runs are cut at the edges of windows of `pitch` bytes; the third array has the number of each run's window.
        """
        high = codes.nbytes if high is None else high
        windows = np.arange(low, high, pitch)
        within = np.arange(-(-low // codes.length) * codes.length, high, codes.length)
        cuts = np.sort(np.concatenate((windows[windows % codes.length != 0], within)), kind="stable")
        index = cuts // codes.length  # divmod is many times slower
        begin = codes.begin + cuts - index * codes.length
        for size, stride in reversed(codes.modes):
            outer = index // size
            begin += (index - outer * size) * stride
            index = outer
        begin *= self.elements_per_byte
        return begin, begin + np.diff(cuts, append=high) * self.elements_per_byte, (cuts - low) // pitch

    def scale_ranges(
        self, begin: np.ndarray, end: np.ndarray, window: np.ndarray, max_gap_bytes: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the scales to read for ranges of `elements`: `[first, last)` in scales, and their window; all ascend.

        For every range of elements they reach from its first scale to its last. Ranges of scales in one window are
        joined across gaps of `max_gap_bytes`.
        """
        low, high = self._spans(begin, end)
        gap = min(max_gap_bytes // self.scale_bytes, self.num_scales)
        apart = self.num_scales + gap + 1  # between the scales of two windows, more than any gap
        order = np.argsort(low + window * apart, kind="stable")
        low, high, window = low[order], high[order], window[order]
        reach = np.maximum.accumulate(high + window * apart)
        starts = np.flatnonzero(np.concatenate(([True], low[1:] + window[1:] * apart > reach[:-1] + gap)))
        last = np.append(starts[1:], len(order)) - 1
        window = window[starts]
        return low[starts], reach[last] - window * apart, window

    def scales_needed(self, codes: Sequence[Runs]) -> int:
        """Return the bytes of the scales of `codes`, each counted once."""
        if self.block == (1, self.unit):  # one for each unit
            return sum(runs.nbytes for runs in codes) * self.elements_per_byte // self.unit * self.scale_bytes
        thinned = [part for runs in codes for part in self._thinned(runs)]
        begin, end = np.concatenate([self.elements(runs, runs.nbytes)[:2] for runs in thinned], axis=1)
        first, last, _ = self.scale_ranges(begin, end, np.zeros_like(begin), 0)
        return int((last - first).sum()) * self.scale_bytes

    def segments(self, begin: np.ndarray, end: np.ndarray) -> Segments:
        """Return the segments of the ranges `[begin, end)` of elements, in order; no range is empty."""
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
        row = segment // across
        return Segments(lengths, self._grid_row(row) * across + (segment - row * across))

    def _thinned(self, codes: Runs) -> Iterator[Runs]:
        """Yield runs that need all scales of `codes`: if these are rows of a matrix, one run for each row of blocks."""
        if len(self.shape) == 2 and len(codes.modes) == 1:
            row_bytes = self.shape[-1] // self.elements_per_byte
            ((size, stride),) = codes.modes
            step = self.block[0] * row_bytes // stride  # no row of blocks lies between runs that are so far apart
            if step > 1 and stride % row_bytes == 0 and codes.begin % row_bytes + codes.length <= row_bytes:
                yield Runs(codes.begin, codes.length, ((-(-size // step), step * stride),))
                yield Runs(codes.begin + (size - 1) * stride, codes.length, ())
                return
        yield codes

    def _spans(self, begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return `[first, last)` in scales for each range `[begin, end)` of elements; no range is empty."""
        columns, last = self.shape[-1], end - 1
        # Of the rows that a range runs through, the first may begin, and the last may end, within the row.
        second = (begin // columns + 1) * columns
        before_last = last // columns * columns - 1
        low = np.minimum(self._scale_of(begin), self._scale_of(np.where(second < end, second, begin)))
        high = np.maximum(self._scale_of(last), self._scale_of(np.where(before_last >= begin, before_last, last)))
        return low, high + 1

    def _scale_of(self, element: np.ndarray) -> np.ndarray:
        """Return the position in the scales tensor of each element's scale."""
        row = element // self.shape[-1]
        scale: np.ndarray = self._grid_row(row) * self.grid[1] + (element - row * self.shape[-1]) // self.block[1]
        return scale

    def _grid_row(self, row: np.ndarray) -> np.ndarray:
        """Return the row of scales for each row of elements, both counted through all matrices."""
        if len(self.shape) == 2:
            return row // self.block[0]
        matrix = row // self.shape[-2]
        of_grid: np.ndarray = matrix * self.grid[0] + (row - matrix * self.shape[-2]) // self.block[0]
        return of_grid

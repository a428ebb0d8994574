"""Which process reads which bytes: each leaf as a band of cells, with a row for each process.

The bytes are those that `TransferPlan`s request. Headers, which each process reads first, are left out. Leaves whose
names differ in numbers alone, as those of layers, are one band.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import accumulate, pairwise
from math import log, prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from orbax_safetensors.cli.braces import in_braces
from orbax_safetensors.cli.drawing import MOST_CELLS, Band, CellRow, Drawing, DrawnCell
from orbax_safetensors.errors import printable
from orbax_safetensors.format.amounts import human_bytes
from orbax_safetensors.geometry.coalesce import Direct
from orbax_safetensors.geometry.strided import Runs
from orbax_safetensors.transfer.plan import Part, TransferPlan

if TYPE_CHECKING:
    from orbax_safetensors import Checkpoint

# The most bands. If there would be more, the smallest leaves share one, as those do that do not fill a cell.
_MOST_BANDS = 24

# What a process needs of what it reads, at least, unless the cell says that it reads too much.
_NEEDED = 0.9


class Stretches(NamedTuple):
    """The stored bytes of all leaves, cut into stretches.

    A position is the offset of a byte if the data of all files are one after the other.

    Attributes:
      begin: what to add to the offset of a byte in each file for its position.
      cuts: the positions between which the stretches lie, ascending.
      cells: the cell of each stretch, -1 for bytes that no leaf has. A cell has a stretch in each of several tensors if
        these are short.
      bands: the caption of each band, how many stored tensors it has, and how many cells.
    """

    begin: list[int]
    cuts: np.ndarray
    cells: np.ndarray
    bands: list[tuple[str, int, int]]

    def sums(self, of_stretches: np.ndarray) -> np.ndarray:
        """Return the sum over the stretches of each cell."""
        inside, count = self.cells >= 0, sum(cells for *_, cells in self.bands)
        return np.bincount(self.cells[inside], of_stretches[inside], count)


class _TensorSpan(NamedTuple):
    """The positions of a stored tensor, or of a piece of it."""

    begin: int
    end: int


def stretches(checkpoint: Checkpoint) -> Stretches:
    """Cut the stored bytes of a checkpoint's leaves for a picture."""
    headers = [file.header for file in checkpoint.files]
    ends = list(accumulate(header.file_bytes - header.data_start for header in headers))
    begin = [end - header.file_bytes for end, header in zip(ends, headers, strict=True)]
    bands = _bands(checkpoint, begin)
    longest = max((_nbytes(ranges) for _, ranges in bands), default=0)
    pieces: list[tuple[int, int, int]] = []
    captions: list[tuple[str, int, int]] = []
    first = 0
    for text, ranges in bands:
        size = _nbytes(ranges)
        cells = _cells(size / longest, len(ranges), size)
        edges = np.linspace(0, size, cells + 1).astype(np.int64).tolist()
        before = 0
        for low, high in ranges:
            inner = edges[bisect_right(edges, before) : bisect_left(edges, before + high - low)]
            cuts = [low, *(low + edge - before for edge in inner), high]
            pieces += [
                (start, stop, first + bisect_right(edges, start - low + before) - 1) for start, stop in pairwise(cuts)
            ]
            before += high - low
        caption = f"{printable(text)}, {human_bytes(size)}"
        captions.append((f"{caption} in {len(ranges):,} tensors" if len(ranges) > 1 else caption, len(ranges), cells))
        first += cells
    pieces.sort()
    positions = np.array(sorted({position for start, stop, _ in pieces for position in (start, stop)} or {0}), np.int64)
    numbers = np.full(len(positions) - 1, -1)
    numbers[np.searchsorted(positions, [start for start, _, _ in pieces])] = [cell for _, _, cell in pieces]
    return Stretches(begin, positions, numbers, captions)


def _cells(share: float, tensors: int, nbytes: int) -> int:
    """Return how many cells a band has that holds this share of the bytes of the longest.

    A band that is not much too short for it has cells of their own for the halves of equal tensors.
    """
    cells, halves = max(round(MOST_CELLS * share), 1), 2 * tensors
    if halves <= min(4 * cells, MOST_CELLS):
        cells = min(max(round(cells / halves), 1), MOST_CELLS // halves) * halves
    return min(cells, nbytes)


def _bands(checkpoint: Checkpoint, begin: list[int]) -> list[tuple[str, list[_TensorSpan]]]:
    """Return the names of leaves, those that differ in numbers alone as one, with what is stored of them, in order."""
    drawn: set[str] = set()  # a tensor of several leaves is drawn with the first
    bands = []
    for text, names in in_braces(checkpoint.leaves):
        tensors = {checkpoint.whole(tensor) for name in names for tensor in checkpoint.leaves[name].tensors}
        stored = {part for tensor in tensors for part in _stored(checkpoint, tensor)} - drawn
        drawn |= stored
        ranges = []
        for name in stored:
            for piece in checkpoint[name].pieces:
                start = begin[piece.file] + checkpoint.files[piece.file].header.data_start + piece.entry.begin
                ranges.append(_TensorSpan(start, start + piece.entry.nbytes))
        bands.append((text, sorted(one for one in ranges if one.end > one.begin)))
    bands = [band for band in bands if band[1]]
    by_size = sorted(bands, key=lambda band: -_nbytes(band[1]))
    least = _nbytes(by_size[0][1]) / MOST_CELLS if bands else 0
    large = {text for text, ranges in by_size[: _MOST_BANDS - 1] if _nbytes(ranges) >= least}
    small = [band for band in bands if band[0] not in large]
    if len(small) > 1:
        ranges = sorted(one for _, ranges in small for one in ranges)
        bands = [*(band for band in bands if band[0] in large), (f"{len(small):,} others", ranges)]
    return bands


def _stored(checkpoint: Checkpoint, tensor: str) -> Sequence[str]:
    quantized = checkpoint.quantized.get(tensor)
    return (tensor,) if quantized is None else quantized.stored


def _nbytes(ranges: Sequence[_TensorSpan]) -> int:
    return sum(end - begin for begin, end in ranges)


def amounts(plan: TransferPlan, drawn: Stretches) -> np.ndarray:
    """Return the bytes that a process needs (first row) and reads (second row) of each cell.

    What is read is exact, except that scales are spread evenly over those of their tensor. What is needed of a part is
    spread evenly over what is read of it.
    """
    cuts: list[int] = drawn.cuts.tolist()
    out = np.zeros((2, len(cuts) - 1))
    for file, begin, runs, weights in _reads(plan):
        begin += drawn.begin[file]
        first, stop = max(bisect_right(cuts, begin + runs.begin) - 1, 0), bisect_left(cuts, begin + runs.end)
        inside = np.diff(_below(runs, drawn.cuts[first : stop + 1] - begin))
        for row, weight in zip(out, weights, strict=True):
            row[first:stop] += weight * inside
    return np.stack([drawn.sums(row) for row in out])


def _reads(plan: TransferPlan) -> Iterator[tuple[int, int, Runs, tuple[float, float]]]:
    """Yield all that a plan reads: a file, an offset in it, runs from there on, how much of them is needed and read."""
    for extent in plan.extents:
        yield extent.file, extent.begin, Runs(0, extent.end - extent.begin, ()), (1, 1)
    for part in plan.parts:
        location, runs, needed = part.location, part.access.runs, _needed(part)
        yield part.file, location.begin, runs, (needed, 1)
        if (encoding := location.encoding) is not None:
            share = runs.nbytes / encoding.nbytes
            for (file, begin), parameter in zip(location.parameters, encoding.parameters, strict=True):
                stored = Runs(0, prod(encoding.shape[:-2]) * parameter.nbytes, ())
                yield file, begin, stored, (needed * share, share)


def _needed(part: Part) -> float:
    """Return how much of the bytes of a part some block holds."""
    access, location = part.access, part.location
    if isinstance(access, Direct):
        return 1
    if location.encoding is None:
        read_elements = access.runs.nbytes // location.dtype.itemsize
    else:
        read_elements = location.encoding.elements_in(access.runs.nbytes)
    return min(sum(use.copy.elements for use in access.uses) / read_elements, 1)  # several blocks may hold the same


def _below(runs: Runs, offsets: np.ndarray) -> np.ndarray:
    """Return how many of the bytes of `runs` lie before each of `offsets`."""
    inside, out, step = offsets - runs.begin, np.zeros(len(offsets), np.int64), runs.nbytes
    for size, stride in runs.modes:
        step //= size
        at = np.clip(inside // stride, 0, size - 1)
        out += at * step
        inside = inside - at * stride
    out += np.clip(inside, 0, runs.length)
    return out


def picture(drawn: Stretches, reads: Mapping[int, np.ndarray], process_count: int) -> Drawing:
    """Return the picture of what some processes read: their `amounts`, by number, of `process_count` processes."""
    bands, first = [], 0
    rows = _rows(drawn, reads, process_count)
    for caption, _, count in drawn.bands:
        bands.append(Band(caption, [CellRow(name, cells[first : first + count]) for name, cells in rows]))
        first += count
    several = any(tensors > 1 for _, tensors, _ in drawn.bands)
    drawn_meanings = {cell.meaning for _, cells in rows for cell in cells}
    return Drawing(bands, _legend(drawn_meanings), _notes(process_count, several_tensors=several))


def _rows(drawn: Stretches, reads: Mapping[int, np.ndarray], process_count: int) -> list[CellRow]:
    """Return the name of each process, and all its cells."""
    nbytes = drawn.sums(np.diff(drawn.cuts))
    least, digits = _least(process_count), len(str(max(reads)))
    return [
        CellRow(
            f"process {process:>{digits}}",
            [_cell(needed, read, least) for needed, read in zip(*(amount / nbytes), strict=True)],
        )
        for process, amount in reads.items()
    ]


def _legend(drawn: Set[str]) -> list[CellRow]:
    """Return what the meanings of cells that are drawn are in words."""
    meanings = {
        "moved": "read and needed",
        "over": "read, but more than a tenth of it is not needed",
        "stored": "not read by this process",
    }
    strengths = (0.0, 0.25, 0.5, 1.0)
    return [
        CellRow(text, [DrawnCell(name, part) for part in strengths]) for name, text in meanings.items() if name in drawn
    ]


def _notes(process_count: int, *, several_tensors: bool) -> list[str]:
    """Return what else the picture needs to be understood, in lines of at most 78 columns."""
    notes = [
        "A band has the bytes of an array as they lie in the files.",
        f"Full colour: the whole cell is read. Palest: 1/{2 * process_count:,} of it or less.",
    ]
    if several_tensors:
        notes += [
            "Layers share a band, in which their tensors follow one another.",
            "Each process reads its part of every tensor: that makes the chessboard.",
        ]
    return notes


def _least(process_count: int) -> float:
    """Return the share of a cell with the palest colour: half of what each process has if all share evenly."""
    return 1 / (2 * process_count)


def _cell(needed: float, read: float, least: float) -> DrawnCell:
    """Return the cell for the needed and the read part of its stretch: its strength is logarithmic from `least` on."""
    if not read:
        return DrawnCell("stored")
    strength = min(max(1 - log(read) / log(least), 0), 1)
    return DrawnCell("over" if needed < _NEEDED * read else "moved", round(strength, 2))

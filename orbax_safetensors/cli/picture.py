"""Which process reads which bytes: the files as bands of cells, with a row for each process, drawn with rich.

The bytes are those that `TransferPlan`s request. Headers, which each process reads first, are left out.
"""

from __future__ import annotations

import posixpath
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from itertools import accumulate
from math import log, prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from orbax_safetensors import Checkpoint
from orbax_safetensors.cli.tables import human_bytes
from orbax_safetensors.errors import printable
from orbax_safetensors.geometry.coalesce import Direct
from orbax_safetensors.geometry.strided import Runs
from orbax_safetensors.transfer.plan import Part, TransferPlan

if TYPE_CHECKING:
    from rich.text import Text

# Cells of the longest band, which fit a terminal of 80 columns beside the names of processes.
_CELLS = 64
# If each file had a band of its own and there were more rows than these, all files are one band.
_MOST_ROWS = 32
_CELL = "█"

# From little to much, in red, green and blue.
_READ = (207, 224, 247), (13, 63, 143)
_OVER_READ = (251, 220, 184), (163, 60, 0)
_NOTHING = "rgb(233,235,238)"
# What a process needs of what it reads, at least, unless the cell says that it reads too much.
_NEEDED = 0.9


class Stretches(NamedTuple):
    """The data of all files, one after the other, cut into stretches of about equal length.

    Attributes:
      begin: what to add to the offset of a byte in each file for its place.
      cuts: the places between which the stretches lie, ascending.
      bands: the caption of each band, and how many stretches it has.
    """

    begin: list[int]
    cuts: np.ndarray
    bands: list[tuple[str, int]]


def stretches(checkpoint: Checkpoint, rows: int) -> Stretches:
    """Cut the data of a checkpoint for a picture of as many rows in each band."""
    headers = [file.header for file in checkpoint.files]
    names = [printable(posixpath.basename(file.path)) for file in checkpoint.files]
    sizes = [header.file_bytes - header.data_start for header in headers]
    ends = list(accumulate(sizes))
    begin = [end - header.file_bytes for end, header in zip(ends, headers, strict=True)]
    if len(sizes) > 1 and len(sizes) * rows > _MOST_ROWS:
        names = [f"{len(names):,} files, {names[0]} to {names[-1]}"]
        sizes, ends = [ends[-1]], [ends[-1]]
    longest = max(1, *sizes)
    cuts, bands = [], []
    for name, size, end in zip(names, sizes, ends, strict=True):
        cells = min(max(round(_CELLS * size / longest), 1), size)
        cuts.append(np.linspace(end - size, end, cells, endpoint=False).astype(np.int64))
        bands.append((f"{name}, {human_bytes(size)}", cells))
    return Stretches(begin, np.append(np.concatenate(cuts), ends[-1]), bands)


def amounts(plan: TransferPlan, drawn: Stretches) -> np.ndarray:
    """Return the bytes that a process needs (first row) and reads (second row) of each stretch.

    What is read is exact, except that scales are spread evenly over those of their tensor. What is needed of a part is
    spread evenly over what is read of it.
    """
    cuts: list[int] = drawn.cuts.tolist()
    out = np.zeros((2, len(cuts) - 1))
    for file, begin, runs, weights in _reads(plan):
        begin += drawn.begin[file]
        first, stop = bisect_right(cuts, begin + runs.begin) - 1, bisect_left(cuts, begin + runs.end)
        # Most lie in one stretch, and a sum is cheaper.
        inside = np.diff(_below(runs, drawn.cuts[first : stop + 1] - begin)) if stop - first > 1 else runs.nbytes
        for row, weight in zip(out, weights, strict=True):
            row[first:stop] += weight * inside
    return out


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


def picture(drawn: Stretches, reads: Mapping[int, np.ndarray], process_count: int) -> Text:
    """Return the picture of what some processes read: their `amounts`, by number, of `process_count` processes."""
    from rich.text import Text

    least = 1 / (2 * process_count)  # half of what each process has if all share evenly
    nbytes = np.diff(drawn.cuts)
    rows = {
        f" process {process:>{len(str(max(reads)))}} ": [
            _colour(needed, read, least) for needed, read in zip(*(amount / nbytes), strict=True)
        ]
        for process, amount in reads.items()
    }
    out, first = Text(), 0
    for caption, cells in drawn.bands:
        out.append(f" {caption}\n")
        for name, colours in rows.items():
            out.append(name, "dim")
            for colour in colours[first : first + cells]:
                out.append(_CELL, colour)
            out.append("\n")
        out.append("\n")
        first += cells
    ramp = np.geomspace(least, 1, 8)
    out.append(" A cell is a stretch of a file.\n ").append(_CELL, _NOTHING).append(" the process does not read it\n ")
    for share in ramp:
        out.append(_CELL, _colour(share, share, least))
    out.append(f" it reads and needs 1/{2 * process_count:,} of it or less ... all of it\n ")
    for share in ramp:
        out.append(_CELL, _colour(0, share, least))
    return out.append(" over-read: it reads as much, and needs less than nine tenths of that")


def _colour(needed: float, read: float, least: float) -> str:
    """Return the colour of a cell for the needed and the read part of its stretch: logarithmic from `least` on."""
    if not read:
        return _NOTHING
    part = min(max(1 - log(read) / log(least), 0), 1)
    low, high = _OVER_READ if needed < _NEEDED * read else _READ
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(low, high, strict=True))
    return f"rgb({red},{green},{blue})"

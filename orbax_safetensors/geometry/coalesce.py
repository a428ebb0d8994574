"""From the copies that read one stored tensor to the byte ranges that the requests to its file name.

Pure arithmetic on sets of bytes. Nothing enumerates single runs: a shard of the inner dimension is one `Runs`,
however many rows it has, unless sets may overlap. Many tensors have the same geometry, so `plan_reads` caches its
results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from math import lcm

import numpy as np

from orbax_safetensors.geometry.encoding import Area, Encoding, Patch
from orbax_safetensors.geometry.strided import Copy, Modes, Runs, keeps_order, packed, runs_of, source_runs

# The longest read that goes straight to its destination. A pool of threads shares a large tensor in such pieces; below
# about 4 MiB the work per call begins to show, above 16 MiB threads wait for one another.
MAX_REQUEST_BYTES = 16 * 2**20
# The longest read into a staging buffer. A buffer of this size is still in a core's cache when its elements are copied
# out, so that the second copy is cheap; with smaller buffers, Python's work for each copy costs more than that saves.
MAX_STAGED_BYTES = 4 * 2**20
# Rows of a window that is transposed. The destination is then written in runs of as many elements: shorter runs take
# long to write, and runs that begin and end within a cache line take longer.
_TRANSPOSED_ROWS = 128
_TALLEST = 4  # times as long as other windows
_LINE_BYTES = 64
# Runs of one tensor that are looked at one by one to see if sets overlap: in a tenth of a second.
_COUNTED = 2**20
# The longest part of a parameter that is read once for all windows, and kept while they are read: about as much as
# decoded elements in a core's cache. Most are shorter, and would be read again for each window.
_MAX_SHARED_BYTES = 2**20
_DECODED_BYTES = np.dtype(np.float32).itemsize  # of one decoded element in a staging buffer


@dataclass(frozen=True, slots=True)
class Use:
    """A copy and where its elements go: `buffer` is the position of the copy among the requested copies."""

    buffer: int
    copy: Copy


@dataclass(frozen=True, slots=True)
class Direct:
    """Bytes of a tensor that are exactly the bytes of a destination from byte `offset` on."""

    runs: Runs
    buffer: int
    offset: int

    @property
    def pitch(self) -> int:
        """Size in bytes of the windows in which the packed bytes are read if they are not one range."""
        return _pitch(self.runs, (), MAX_STAGED_BYTES)


@dataclass(frozen=True, slots=True)
class Staged:
    """Bytes of a tensor that several copies read from, or one copy that reorders or casts.

    The copies of `uses` read from the packed bytes of `runs`. `pitch` is the size in bytes of the windows in which
    the packed bytes are read and copied.
    """

    runs: Runs
    pitch: int
    uses: tuple[Use, ...]


@dataclass(frozen=True, slots=True)
class Encoded(Staged):
    """Codes of a quantised tensor that are read in windows; copies read from the elements that they decode to.

    A window is read, decoded into a buffer of float32 and copied from there. Scales and other parameters of its
    elements are read as well. If a parameter is short for all windows together, it is read once.

    Attributes:
      runs, pitch: as of `Staged`, in bytes of the codes, and in whole units of `encoding`.
      uses: copies from the decoded elements of the packed codes, counted in elements.
      shared: the patches of parameters that are read once for all windows, by the number of the parameter. `patches`
        returns those that a window reads for itself.
      max_gap_bytes: the longest gap between rows of a parameter that is read along with them.
    """

    encoding: Encoding
    shared: Mapping[int, Patch] = field(compare=False)
    max_gap_bytes: int

    def patches(self, areas: Sequence[Area]) -> dict[int, Patch]:
        """Return what a window that consists of `areas` reads of parameters, by their numbers."""
        return {
            number: self.encoding.patch(parameter, areas, self.max_gap_bytes)
            for number, parameter in enumerate(self.encoding.parameters)
            if number not in self.shared
        }


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """All reads of one tensor for one process; offsets are relative to the tensor's first byte.

    Attributes:
      ranges: contiguous, in order; they may be joined with those of a neighbouring tensor.
      windowed: reads in windows of their pitch.
      needed_bytes: the bytes that some copy reads, each counted once.
      read_bytes: bytes that are read, `ranges` included.
      num_requests: requests, without those for `ranges`.
      window_bytes: memory that the longest staged window takes.
    """

    ranges: tuple[Direct, ...]
    windowed: tuple[Direct | Staged, ...]
    needed_bytes: int
    read_bytes: int
    num_requests: int
    window_bytes: int


@lru_cache(maxsize=2**16)
def plan_reads(copies: tuple[tuple[Copy, bool], ...], itemsize: int, max_gap_bytes: int) -> ReadPlan:
    """Plan the reading of one tensor.

    `copies` has all copies that one process makes from the tensor, and for each whether it moves bits unchanged (False
    if it casts). `itemsize` is the stored dtype's. Runs of one copy, and runs of different copies that alternate, are
    read as one if the gap between them is at most `max_gap_bytes`. Contiguous ranges are joined only if they touch, so
    that shards of the leading dimension cost exactly their bytes.
    """
    exact = _union([(source_runs(copy, itemsize), (index,)) for index, (copy, _) in enumerate(copies)], 0)
    needed_bytes = _distinct_bytes([runs for runs, _ in exact])
    joined = _with_gaps(exact, max_gap_bytes)
    ranges: list[Direct] = []
    windowed: list[Direct | Staged] = []
    for runs, members in joined:
        direct = _direct(runs, members, copies, itemsize)
        if direct is None:
            uses = tuple(Use(index, packed(copies[index][0], runs, itemsize)) for index in members)
            rows = [stride * itemsize for use in uses for _, stride, _ in use.copy.modes]
            transposed = not all(keeps_order(use.copy) for use in uses)
            pitch = (_tall if transposed else _pitch)(runs, rows, MAX_STAGED_BYTES)
            windowed.append(Staged(runs, pitch, uses))
        elif runs.modes:
            windowed += direct
        else:
            ranges += direct
    ranges.sort(key=lambda part: part.runs.begin)
    staged = (reads for reads in windowed if isinstance(reads, Staged))
    return ReadPlan(
        tuple(ranges),
        tuple(windowed),
        needed_bytes=needed_bytes,
        read_bytes=sum(runs.nbytes for runs, _ in joined),
        num_requests=sum(_requests(reads.runs, reads.pitch) for reads in windowed),
        window_bytes=max((min(reads.pitch, reads.runs.nbytes) for reads in staged), default=0),
    )


@lru_cache(maxsize=2**16)
def plan_encoded_reads(copies: tuple[tuple[Copy, bool], ...], encoding: Encoding, max_gap_bytes: int) -> ReadPlan:
    """Plan the reading of one quantised tensor: `windowed`, with offsets in the codes tensor, is all `Encoded`.

    `copies` is as for `plan_reads`, and counts decoded elements; whether they keep bits does not matter. Gaps between
    runs of codes, and between the parameters for one window, are read as `plan_reads` reads them. Bytes and requests
    are those of all stored tensors. `needed_bytes` counts, each once, the whole units that hold some element, and their
    parameters. A staged window holds codes, parameters and float32 elements.
    """
    longest = MAX_STAGED_BYTES // (encoding.unit * _DECODED_BYTES) * encoding.bytes_of(encoding.unit)
    exact = _union([(encoding.units(copy), (index,)) for index, (copy, _) in enumerate(copies)], 0)
    windowed: list[Encoded] = []
    read_bytes = num_requests = window_bytes = 0
    for runs, members in _with_gaps(exact, max_gap_bytes):
        decoded = Runs(
            encoding.elements_in(runs.begin),
            encoding.elements_in(runs.length),
            tuple((size, encoding.elements_in(stride)) for size, stride in runs.modes),
        )
        uses = tuple(Use(index, packed(copies[index][0], decoded, 1)) for index in members)
        # A window of whole rows of codes is one area.
        row = encoding.shape[-1]
        strides = [row] if row % encoding.unit == 0 else []
        strides += [stride for use in uses for _, stride, _ in use.copy.modes if stride % encoding.unit == 0]
        rows = [encoding.bytes_of(stride) for stride in strides]
        transposed = not all(keeps_order(use.copy) for use in uses)
        pitch = (_tall if transposed else _pitch)(runs, rows, longest)
        areas = list(encoding.areas(runs, 0, runs.nbytes))
        patches = [encoding.patch(parameter, areas, max_gap_bytes) for parameter in encoding.parameters]
        shared = {number: patch for number, patch in enumerate(patches) if patch.nbytes <= _MAX_SHARED_BYTES}
        access = Encoded(runs, pitch, uses, encoding, shared, max_gap_bytes)
        windowed.append(access)
        reads = [shared]
        if len(shared) < len(patches):
            lows = range(0, runs.nbytes, pitch)
            reads += [access.patches(list(encoding.areas(runs, low, min(low + pitch, runs.nbytes)))) for low in lows]
        sizes = [sum([patch.nbytes for patch in read.values()]) for read in reads]
        read_bytes += runs.nbytes + sum(sizes)
        num_requests += _requests(runs, pitch) + sum([len(patch.ranges) for read in reads for patch in read.values()])
        code_bytes = min(pitch, runs.nbytes)
        decoded_bytes = encoding.elements_in(code_bytes) * _DECODED_BYTES
        staged = sizes[0] + max(sizes[1:], default=0) + code_bytes + decoded_bytes
        window_bytes = max(window_bytes, staged)
    codes = [runs for runs, _ in exact]
    return ReadPlan(
        (),
        tuple(windowed),
        needed_bytes=_distinct_bytes(codes) + _parameter_bytes(codes, encoding),
        read_bytes=read_bytes,
        num_requests=num_requests,
        window_bytes=window_bytes,
    )


def _parameter_bytes(codes: Sequence[Runs], encoding: Encoding) -> int:
    """Return the bytes of the parameters for `codes`, each counted once."""
    areas = [
        Area(area.rows, (stretch,))  # what lies between stretches is not needed
        for runs in codes
        for area in encoding.areas(runs, 0, runs.nbytes)
        for stretch in area.columns
    ]
    return sum(
        _distinct_bytes([Runs(*piece, ()) for area in areas for piece in encoding.patch(parameter, [area], 0).ranges])
        for parameter in encoding.parameters
    )


def _requests(runs: Runs, pitch: int) -> int:
    """Return how many requests read `runs` in windows of `pitch` packed bytes."""
    cuts = -(-runs.nbytes // pitch) - 1
    between_runs = (runs.nbytes - 1) // lcm(pitch, runs.length)
    return runs.count + cuts - between_runs


def _pitch(runs: Runs, rows: Iterable[int], longest: int) -> int:
    """Return how many bytes of `runs` to move at a time: whole rows or runs, as many as fit in `longest`.

    `rows` are the strides in bytes of the copies that read the packed bytes.
    """
    row = max((row for row in (*rows, runs.length) if row <= longest), default=longest)
    return longest // row * row


def _tall(runs: Runs, rows: Sequence[int], longest: int) -> int:
    """Return the `_pitch` of a transposing copy: many rows, which become whole cache lines of the destination."""
    pitch = _pitch(runs, rows, longest)
    row = max((row for row in (*rows, runs.length) if row <= longest), default=pitch)
    count = max(pitch // row, min(_TRANSPOSED_ROWS, _TALLEST * longest // row))
    return (count - count % _LINE_BYTES if count > _LINE_BYTES else count) * row


def touching(files: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return the first index of every group of ranges that follow one another in a file without a gap.

    The ranges are in the order of the files and of their offsets, and disjoint.
    """
    if not begin.size:
        return np.zeros(0, np.intp)
    return np.flatnonzero(np.concatenate(([True], (begin[1:] != end[:-1]) | (files[1:] != files[:-1]))))


def _direct(
    runs: Runs, members: tuple[int, ...], copies: Sequence[tuple[Copy, bool]], itemsize: int
) -> list[Direct] | None:
    """Return `runs` as bytes that go straight to the destinations of their `members`; None if they cannot."""
    out = []
    for index in members:
        copy, same_bits = copies[index]
        read = source_runs(copy, itemsize)
        if not same_bits or not keeps_order(copy) or (read != runs and (read.modes or runs.modes)):
            return None
        out.append(Direct(read, index, copy.destination * itemsize))
    # Members may overlap, or a joined gap may belong to none of them.
    return out if sum(part.runs.nbytes for part in out) == runs.nbytes else None


_Member = tuple[Runs, tuple[int, ...]]


def _union(items: list[_Member], max_gap_bytes: int) -> list[_Member]:
    """Return the same bytes in as few sets as it can find, each with the members of all sets that it joins.

    Joins sets of runs across gaps of `max_gap_bytes`, plain ranges only if they touch.
    """
    items = list(items)
    while True:
        before = len(items)
        for key in _ORDERS:
            items.sort(key=lambda item: key(item[0]))
            out: list[_Member] = []
            for runs, members in items:
                if out and (both := _adjoin(out[-1][0], runs, max_gap_bytes)) is not None:
                    out[-1] = (both, out[-1][1] + members)
                else:
                    out.append((runs, members))
            items = out
        if len(items) == before:
            return items


# Orders that bring sets that can be joined side by side: along the run, then along each of the outer modes.
_ORDERS: tuple[Callable[[Runs], tuple[object, ...]], ...] = (
    lambda runs: (runs.begin, runs.end),
    lambda runs: (runs.modes, runs.begin),
    *(lambda runs, at=at: (runs.length, _without(runs.modes, at), runs.begin) for at in range(3)),
)


def _without(modes: Modes, at: int) -> Modes:
    return modes[:at] + modes[at + 1 :]


def _adjoin(a: Runs, b: Runs, max_gap_bytes: int) -> Runs | None:
    """Return the union of two sets, None if it is not one set; `max_gap_bytes` may lie between their runs."""
    for outer, inner in ((a, b), (b, a)):
        if outer == inner or (not outer.modes and outer.begin <= inner.begin and inner.end <= outer.end):
            return outer
    if not a.modes and not b.modes:
        return Runs(a.begin, b.end - a.begin, ()) if a.begin <= b.begin <= a.end else None
    if a.modes == b.modes and a.begin <= b.begin <= a.begin + a.length + max_gap_bytes:
        return runs_of(a.begin, max(b.begin - a.begin + b.length, a.length), a.modes)
    if a.length == b.length and len(a.modes) == len(b.modes):
        differing = [at for at, (x, y) in enumerate(zip(a.modes, b.modes, strict=True)) if x != y]
        for at in differing if differing else range(len(a.modes)):
            (size, stride), (more, other) = a.modes[at], b.modes[at]
            if len(differing) <= 1 and stride == other and b.begin == a.begin + size * stride:
                return runs_of(a.begin, a.length, (*a.modes[:at], (size + more, stride), *a.modes[at + 1 :]))
    return None


def _distinct_bytes(sets: Sequence[Runs]) -> int:
    """Return the `distinct_bytes` of sets; of very many runs, how many bytes all sets hold."""
    found = distinct_bytes(sets, _COUNTED)
    return sum(runs.nbytes for runs in sets) if found is None else found


def distinct_bytes(sets: Sequence[Runs], most: int) -> int | None:
    """Return how many bytes some set holds, each counted once; None if that takes a look at more than `most` runs."""
    sets = [runs for runs, _ in _union([(runs, ()) for runs in sets], 0)]
    if _are_apart(sorted(sets, key=lambda runs: runs.begin)):
        return sum(runs.nbytes for runs in sets)
    counts = [runs.count for runs in sets]
    if sum(counts) > most:
        return None
    begin = np.concatenate([_begins(runs) for runs in sets])
    end = begin + np.repeat([runs.length for runs in sets], counts)
    order = np.argsort(begin)
    begin, end = begin[order], end[order]
    reached = np.maximum.accumulate(end)
    return int(reached[0] - begin[0] + np.maximum(end[1:] - np.maximum(begin[1:], reached[:-1]), 0).sum())


def _are_apart(sets: Sequence[Runs]) -> bool:
    """Return whether sets, in the order of their begins, follow one another, or lie in gaps of the same rows."""
    if not sets:
        return True
    first = sets[0]  # of those whose rows are the same
    for before, runs in pairwise(sets):
        if before.end <= runs.begin:
            first = runs
        elif before.modes != runs.modes or runs.begin < before.begin + before.length or not _in_gaps(runs, first):
            return False
    return True


def _in_gaps(runs: Runs, rows: Runs) -> bool:
    """Return whether each of `runs` ends in the gap after a run of `rows`, which have the same modes.

    The last gap of an inner mode has to end before the outer mode's next step: else it has other runs in it.
    """
    nested = all(outer >= size * inner for (_, outer), (size, inner) in pairwise(rows.modes))
    return nested and runs.begin + runs.length <= rows.begin + rows.modes[-1][1]


def _begins(runs: Runs) -> np.ndarray:
    """Return where each run begins."""
    begins = np.array([runs.begin], np.int64)
    for size, stride in runs.modes:
        begins = np.add.outer(begins, np.arange(size) * stride).reshape(-1)
    return begins


def _with_gaps(items: list[_Member], max_gap_bytes: int) -> list[_Member]:
    """Return sets that hold all of `items`, with gaps of at most `max_gap_bytes` included.

    Each byte is in one set: sets that have bytes in common become one range with all that lies between them. Of more
    runs than `_COUNTED`, nobody knows if sets have bytes in common, and they stay as they are.
    """
    widened = _union([(_widen(runs, max_gap_bytes), to) for runs, to in _union(items, max_gap_bytes)], max_gap_bytes)
    sets = [runs for runs, _ in widened]
    if _distinct_bytes(sets) == sum(runs.nbytes for runs in sets):
        return widened
    out: list[_Member] = []
    for runs, members in sorted(widened, key=lambda item: item[0].begin):
        if out and runs.begin < (before := out[-1][0]).end:
            end = max(before.end, runs.end)
            out[-1] = Runs(before.begin, end - before.begin, ()), out[-1][1] + members
        else:
            out.append((runs, members))
    return out


def _widen(runs: Runs, max_gap_bytes: int) -> Runs:
    """Return `runs` with every gap of at most `max_gap_bytes` between neighbouring runs included."""
    length, modes = runs.length, list(runs.modes)
    while modes and modes[-1][1] - length <= max_gap_bytes:
        size, stride = modes.pop()
        length += (size - 1) * stride
    return Runs(runs.begin, length, tuple(modes))

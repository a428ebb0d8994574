"""Group the stored tensors that a process reads alike, so that one plan serves for all tensors of a group.

A leaf may be a stack of ten thousand tensors, and there may be a thousand processes, so no Python code here runs for
each tensor and each process. The bytes that a box takes from a piece depend on the piece's *form* (its modes, first
element and ops) and on how the box cuts it, relative to the piece's start, but not on their place in the box. So the
pieces of all leaves come down to few cases, which arrays of small numbers tell apart:

- a *slicing* says how leaves of one kind are cut: leaves of one slicing have the same boxes;
- a *site* is a place in a slicing where a piece of some form begins, in any number of leaves;
- a *group* has the tensors that are used at the same sites; a *pattern* has the groups whose sites have the same forms;
- the *signature* of a group for one process is its pattern and how the process's boxes cut each of its sites.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.encoding import Encoding
from orbax_safetensors.geometry.strided import Copy, extent
from orbax_safetensors.geometry.view import Piece, View
from orbax_safetensors.transfer.plan import Location, in_file_order, same_bits


@dataclass(frozen=True, slots=True)
class Slicing:
    """How leaves of one kind are cut.

    Attributes:
      stored_shape: of their views; elements outside are zeros and are not stored.
      shape, dtype: of the leaves.
      boxes: for every process the boxes of its devices.
      readers: the processes that read their boxes; the others receive theirs from these. None if all read.
      parts: for every process the boxes that it reads instead, if devices exchange parts.
    """

    stored_shape: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    boxes: Sequence[tuple[Box, ...]]
    readers: frozenset[int] | None
    parts: Sequence[tuple[Box, ...]] | None = None

    @property
    def clips(self) -> bool:
        """Return whether boxes may reach over the end of what is stored."""
        return self.stored_shape != self.shape or self.parts is not None

    def held(self, process: int) -> tuple[Box, ...]:
        """Return the distinct boxes that a process holds of each leaf."""
        return tuple(dict.fromkeys(self.boxes[process]))

    def moved(self, process: int) -> tuple[Box, ...]:
        """Return the distinct boxes that a process moves of each leaf: those that it holds, or its parts."""
        if self.parts is not None:
            return tuple(dict.fromkeys(self.parts[process]))
        return self.held(process) if self.readers is None or process in self.readers else ()


@dataclass(frozen=True, slots=True)
class TensorCopies:
    """What a process takes from each tensor of one signature.

    Attributes:
      location: of one of the tensors.
      copies: each with whether it moves bits unchanged. Source offsets count from `begin`, and destination offsets are
        0, so that equal copies compare equal.
      begin: offset in the tensor, in bytes; if the tensor is encoded, in bytes of its decoded elements.
    """

    location: Location
    copies: tuple[tuple[Copy, bool], ...]
    begin: int


_Uses = tuple[tuple[int, ...], ...]  # for each leaf that uses a tensor, the sites


class TensorGroups:
    """The stored tensors of a tree's views, in the order of the files and of their offsets.

    Attributes:
      file, begin: for every tensor the number of its file, and its offset in the file in bytes.
      leaf: for every tensor the number of the first leaf that uses it.
      group: for every tensor the number of its group, of which there are `groups`.
    """

    def __init__(
        self,
        views: Sequence[View],
        slicing_of: Sequence[int],
        slicings: Sequence[Slicing],
        locate: Callable[[str], Location],
    ) -> None:
        """Group the tensors of `views`; `slicing_of` has the position in `slicings` for each view."""
        self._slicings = slicings
        self._sites: list[tuple[int, Piece]] = []  # for every site its slicing and a piece there
        uses, first_leaf = self._find_uses(views, slicing_of)
        located = in_file_order(uses, locate)
        self.file = np.array([location.file for location, _ in located], np.int64)
        self.begin = np.array([location.begin for location, _ in located], np.int64)
        self.leaf = np.array([first_leaf[name] for _, name in located], np.int64)
        members: dict[tuple[np.dtype, Encoding | None, _Uses], list[int]] = {}
        for number, (location, name) in enumerate(located):
            members.setdefault((location.dtype, location.encoding, tuple(uses[name])), []).append(number)
        # Groups with the most uses come first, so that the groups with at least n uses are the leading ones.
        groups = sorted(members.items(), key=lambda item: -sum(map(len, item[0][2])))
        self.groups = len(groups)
        self.group = np.zeros(len(located), np.int64)
        for number, (_, tensors) in enumerate(groups):
            self.group[tensors] = number
        # For every group the location of one of its tensors, and their uses.
        self._groups = [(located[tensors[0]][0], key[2]) for key, tensors in groups]
        self._views: dict[int, list[tuple[int, View]]] = {}
        self._pattern, self._patterns = self._find_patterns()
        self._nth_sites = _by_position([[site for sites in used for site in sites] for _, used in self._groups])
        self._cuts = _cuts_by_slicing(self._sites, len(slicings))

    def _find_uses(
        self, views: Sequence[View], slicing_of: Sequence[int]
    ) -> tuple[dict[str, list[tuple[int, ...]]], dict[str, int]]:
        """Return for every tensor its uses and the first leaf that uses it; fill `_sites`."""
        uses: dict[str, list[tuple[int, ...]]] = {}
        first_leaf: dict[str, int] = {}
        numbers: dict[tuple[object, ...], int] = {}
        for leaf, (view, slicing) in enumerate(zip(views, slicing_of, strict=True)):
            sites_of: dict[str, list[int]] = {}
            for piece in view.pieces:
                if piece.tensor is not None:
                    site = numbers.setdefault((slicing, piece[1:]), len(numbers))
                    if site == len(self._sites):
                        self._sites.append((slicing, piece))
                    sites_of.setdefault(piece.tensor, []).append(site)
            for name, sites in sites_of.items():
                uses.setdefault(name, []).append(tuple(sites))
                first_leaf.setdefault(name, leaf)
        return uses, first_leaf

    def _find_patterns(self) -> tuple[np.ndarray, int]:
        """Return the pattern of every group, as a number, and the number of patterns.

        Groups of one pattern differ only in the places where their pieces begin.
        """
        forms: dict[tuple[object, ...], int] = {}
        form = [
            forms.setdefault((slicing, piece.offset, piece.dims, piece.ops), len(forms))
            for slicing, piece in self._sites
        ]
        patterns: dict[tuple[object, ...], int] = {}
        numbers = [
            patterns.setdefault(
                (location.dtype, location.encoding, *(tuple(form[site] for site in sites) for sites in used)),
                len(patterns),
            )
            for location, used in self._groups
        ]
        return np.array(numbers, np.int64), len(patterns)

    def signatures(self, boxes: Sequence[tuple[Box, ...]]) -> tuple[np.ndarray, list[TensorCopies]]:
        """Return the signature of every group for a process that reads `boxes` of each slicing, and what each takes."""
        cut, cuts = np.zeros(len(self._sites), np.int64), 1
        for boxes_of_slicing, (sites, axes) in zip(boxes, self._cuts, strict=True):
            numbers, count = _cut_by_all(axes, boxes_of_slicing) if sites.size else (None, 1)
            if numbers is not None:
                cut[sites] = numbers
                cuts = max(cuts, count)
        signature, count = self._pattern, self._patterns
        if cuts > 1:
            rest, rests = np.zeros(0, np.int64), 1  # how the sites from the nth on are cut
            for nth in reversed(self._nth_sites):
                both = cut[nth] * rests
                both[: len(rest)] += rest
                rest, rests = _renumbered(both, cuts * rests)
            signature, count = _renumbered(signature * rests + rest, count * rests)
        example = np.zeros(count, np.int64)
        example[signature] = np.arange(self.groups)
        return signature, [self._copies(number, boxes) for number in example.tolist()]

    def _copies(self, group: int, boxes: Sequence[tuple[Box, ...]]) -> TensorCopies:
        """Return what the boxes of each slicing take from a tensor of a group, in the order of `transfer_plan`."""
        location, _ = self._groups[group]
        if group not in self._views:
            self._views[group] = self._viewed(group)
        copies = []
        for number, view in self._views[group]:
            clips = self._slicings[number].clips
            for box in boxes[number]:
                for _, copy, ops in view.copies(view.clipped(box) if clips else box, box.shape):
                    copies.append((copy, same_bits(ops, location.dtype, view.dtype)))
        step = _step(location)
        first = min((copy.source for copy, _ in copies), default=0) // step * step
        return TensorCopies(
            location,
            tuple((Copy(copy.source - first, 0, copy.modes), same) for copy, same in copies),
            first * location.dtype.itemsize,
        )

    def _viewed(self, group: int) -> list[tuple[int, View]]:
        """Return what each leaf that uses a tensor of a group has of it: the leaf's slicing, and a view."""
        out = []
        for sites in self._groups[group][1]:
            number = self._sites[sites[0]][0]
            slicing = self._slicings[number]
            pieces = tuple(self._sites[site][1] for site in sites)
            out.append((number, View(slicing.stored_shape, slicing.dtype, pieces)))
        return out


def _step(location: Location) -> int:
    """Return by how many elements copies can shift in a tensor so that they read equally much."""
    if location.encoding is None:
        return 1
    # All rows of blocks have equally many scales, unless the last row is smaller and the next matrix begins early.
    (rows, columns), (height, _) = location.encoding.shape[-2:], location.encoding.block
    return columns * (height if rows % height == 0 else rows)


class _Axis:
    """Where the pieces at the sites of one slicing lie along one dimension."""

    def __init__(self, begin: np.ndarray, size: np.ndarray) -> None:
        distinct, self._which = _unique_pairs(begin, size)
        self._begin, self._size = distinct
        self._known: dict[tuple[int, int], np.ndarray | bool] = {}

    def cut(self, low: int, high: int) -> np.ndarray | bool:
        """Return a number for every site, equal if `[low, high)` cuts equal pieces alike, 0 if it misses the piece.

        Return False if the range misses all pieces, and True if it cuts all alike.
        """
        numbers = self._known.get((low, high))
        if numbers is None:
            numbers = self._known[low, high] = self._cut(low, high)
        return numbers if isinstance(numbers, bool) else numbers[self._which]

    def _cut(self, low: int, high: int) -> np.ndarray | bool:
        if len(self._begin) == 1:  # the most common case, without NumPy's cost per call
            begin = int(self._begin[0])
            return max(low, begin) < min(high, begin + int(self._size[0]))
        start = np.maximum(low - self._begin, 0)
        stop = np.minimum(high - self._begin, self._size)
        hit = start < stop
        whole = hit & (stop - start == self._size)
        numbers = whole.astype(np.int64)  # all whole pieces are cut alike
        partly = hit & ~whole
        if partly.any():
            numbers[partly] = 2 + _unique_pairs(start[partly], stop[partly])[1]
        return bool(numbers[0]) if (numbers == numbers[0]).all() else numbers


def _unique_pairs(a: np.ndarray, b: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """Return the distinct pairs of two arrays of non-negative numbers, and which pair is at each position."""
    # By its rank, because `a` times the largest `b` may take more than 64 bits.
    values, rank = np.unique(b, return_inverse=True)
    distinct, which = np.unique(a * len(values) + rank, return_inverse=True)
    begin, rank = np.divmod(distinct, len(values))
    return (begin, values[rank]), which


def _by_position(rows: list[list[int]]) -> list[np.ndarray]:
    """Return for n = 0, 1, ... the nth number of each row that has one; rows come with the longest first."""
    out = []
    for n in range(len(rows[0]) if rows else 0):
        while len(rows[-1]) <= n:
            rows.pop()
        out.append(np.array([row[n] for row in rows], np.int64))
    return out


def _cuts_by_slicing(sites: Sequence[tuple[int, Piece]], slicings: int) -> list[tuple[np.ndarray, list[_Axis]]]:
    """Return for every slicing the numbers of its sites, and its dimensions."""
    numbers_of: list[list[int]] = [[] for _ in range(slicings)]
    for number, (slicing, _) in enumerate(sites):
        numbers_of[slicing].append(number)
    out = []
    for numbers in numbers_of:
        pieces = [sites[number][1] for number in numbers]
        starts = np.array([piece.start for piece in pieces], np.int64)
        sizes: dict[object, tuple[int, ...]] = {}
        for piece in pieces:
            if piece.dims not in sizes:
                sizes[piece.dims] = tuple(extent(modes) for modes in piece.dims)
        extents = np.array([sizes[piece.dims] for piece in pieces], np.int64)
        axes = [_Axis(*columns) for columns in zip(starts.T, extents.T, strict=True)] if pieces else []
        out.append((np.array(numbers, np.int64), axes))
    return out


def _cut_by_all(axes: Sequence[_Axis], boxes: Sequence[Box]) -> tuple[np.ndarray | None, int]:
    """Return a number for every site, equal if all of `boxes` cut equal pieces alike, and a bound of the numbers.

    Return None instead of numbers if all sites are alike.
    """
    numbers, count = None, 1
    for box in boxes:
        cut = _cut_by_box(axes, box)
        if cut is not None:
            cuts = int(cut.max()) + 1
            both = cut if numbers is None else numbers * cuts + cut
            numbers, count = _renumbered(both, count * cuts)
    return numbers, count


def _cut_by_box(axes: Sequence[_Axis], box: Box) -> np.ndarray | None:
    """Return a number for every site, 0 if `box` misses its piece; None if the box cuts all alike or misses all."""
    numbers = None
    for axis, (low, high) in zip(axes, box, strict=True):
        cut = axis.cut(low, high)
        if cut is False:
            return None
        if cut is True:
            continue
        if numbers is None:
            numbers = cut
        else:
            cuts = int(cut.max()) + 1
            both = np.where((numbers > 0) & (cut > 0), numbers * cuts + cut, 0)
            numbers, _ = _renumbered(both, (int(numbers.max()) + 1) * cuts)
    return numbers


def _renumbered(numbers: np.ndarray, bound: int) -> tuple[np.ndarray, int]:
    """Return numbers below `bound` renumbered without gaps, and how many distinct ones there are; 0 stays 0."""
    if bound > 4 * len(numbers) + 1024:  # too many for a table
        distinct, out = np.unique(np.append(0, numbers), return_inverse=True)
        return out[1:], len(distinct)
    seen = np.zeros(bound, bool)
    seen[0] = True
    seen[numbers] = True
    rank = np.cumsum(seen) - 1
    return rank[numbers], int(rank[-1]) + 1

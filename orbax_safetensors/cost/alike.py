"""Which stored tensors a process reads alike, so that one of them is planned for all of them.

A leaf may be a stack of ten thousand tensors, and there may be a thousand processes: nothing here is done in Python for
each tensor and each process. What a box takes from a piece depends on the piece's *form* (its modes, first element and
ops) and on how the box cuts it, relative to where the piece begins. Where in the box it goes makes no difference to
what is read. So the pieces of all leaves come down to few cases, which arrays of small numbers tell apart:

- a *slicing* is how leaves of one kind are cut: leaves of one slicing have the same boxes;
- a *site* is a place in a slicing where a piece of some form begins, in any number of leaves;
- a *group* has the tensors that are used at the same sites; a *pattern* has the groups whose sites have the same forms;
- the *signature* of a group for one process: its pattern, and how the process's boxes cut each of its sites.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.encoding import Encoding
from orbax_safetensors.geometry.strided import Copy, extent
from orbax_safetensors.geometry.view import Piece, View
from orbax_safetensors.transfer.plan import Location, same_bits


@dataclass(frozen=True, slots=True)
class Slicing:
    """How leaves of one kind are cut.

    Attributes:
      stored_shape: of their views; what lies outside is zeros and is stored nowhere.
      shape, dtype: of the leaves.
      boxes: for every process those of its devices.
      readers: the processes that read their boxes; others receive them from these. None where all read.
      parts: for every process the boxes that it reads instead, where devices exchange what was read.
    """

    stored_shape: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    boxes: Sequence[tuple[Box, ...]]
    readers: frozenset[int] | None
    parts: Sequence[tuple[Box, ...]] | None = None

    def held(self, process: int) -> tuple[Box, ...]:
        """The distinct boxes that a process holds of each leaf."""
        return tuple(dict.fromkeys(self.boxes[process]))

    def moved(self, process: int) -> tuple[Box, ...]:
        """Those of them that it moves, or its parts instead."""
        if self.parts is not None:
            return tuple(dict.fromkeys(self.parts[process]))
        return self.held(process) if self.readers is None or process in self.readers else ()


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a process takes from each tensor of one signature.

    Attributes:
      location: of one of the tensors.
      copies: for each also whether it moves bits unchanged. So that equal copies are found equal, they count from
        `begin`, and where their destinations begin is left out.
      begin: offset in the tensor, in bytes; where it is encoded, in those of its decoded elements.
    """

    location: Location
    copies: tuple[tuple[Copy, bool], ...]
    begin: int


_Uses = tuple[tuple[int, ...], ...]  # for each leaf that uses a tensor, the sites


class TensorGroups:
    """The stored tensors of a tree's views, in the order of the files and of their offsets.

    Attributes:
      file, begin: the number of the file of every tensor, and its offset in it.
      leaf: the number of the first leaf that uses it.
      group: the number of its group; there are `groups` of them.
    """

    def __init__(
        self,
        views: Sequence[View],
        slicing_of: Sequence[int],
        slicings: Sequence[Slicing],
        locate: Callable[[str], Location],
    ) -> None:
        """`slicing_of` has the position in `slicings` for each of `views`; `locate` knows their tensors."""
        self._slicings = slicings
        self._sites: list[tuple[int, Piece]] = []  # the slicing of every site, and one of the pieces there
        uses, first_leaf = self._find_uses(views, slicing_of)
        located = sorted(((locate(name), name) for name in uses), key=lambda at: (at[0].file, at[0].begin, at[1]))
        self.file = np.array([location.file for location, _ in located], np.int64)
        self.begin = np.array([location.begin for location, _ in located], np.int64)
        self.leaf = np.array([first_leaf[name] for _, name in located], np.int64)
        members: dict[tuple[np.dtype, Encoding | None, _Uses], list[int]] = {}
        for number, (location, name) in enumerate(located):
            members.setdefault((location.dtype, location.encoding, tuple(uses[name])), []).append(number)
        # Groups with the most uses first, so that those that have a certain number of them are the leading ones.
        groups = sorted(members.items(), key=lambda item: -sum(map(len, item[0][2])))
        self.groups = len(groups)
        self.group = np.zeros(len(located), np.int64)
        for number, (_, own) in enumerate(groups):
            self.group[own] = number
        # For every group the location of one of its tensors, and their uses.
        self._groups = [(located[own[0]][0], key[2]) for key, own in groups]
        self._pattern, self._patterns = self._find_patterns()
        self._nth_sites = _by_position([[site for sites in used for site in sites] for _, used in self._groups])
        self._cuts = _cuts_by_slicing(self._sites, len(slicings))

    def _find_uses(
        self, views: Sequence[View], slicing_of: Sequence[int]
    ) -> tuple[dict[str, list[tuple[int, ...]]], dict[str, int]]:
        """For every tensor its uses, and the first leaf that has one. Fills `_sites`."""
        uses: dict[str, list[tuple[int, ...]]] = {}
        first_leaf: dict[str, int] = {}
        numbers: dict[tuple[object, ...], int] = {}
        for leaf, (view, slicing) in enumerate(zip(views, slicing_of, strict=True)):
            own: dict[str, list[int]] = {}
            for piece in view.pieces:
                if piece.tensor is not None:
                    key = (slicing, piece.start, piece.offset, piece.dims, piece.ops)
                    site = numbers.setdefault(key, len(numbers))
                    if site == len(self._sites):
                        self._sites.append((slicing, piece))
                    own.setdefault(piece.tensor, []).append(site)
            for name, sites in own.items():
                uses.setdefault(name, []).append(tuple(sites))
                first_leaf.setdefault(name, leaf)
        return uses, first_leaf

    def _find_patterns(self) -> tuple[np.ndarray, int]:
        """A number for every group, the same for groups that differ in nothing but where their pieces begin."""
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

    def signatures(self, boxes: Sequence[tuple[Box, ...]]) -> tuple[np.ndarray, list[Wanted]]:
        """The signature of every group for a process that reads `boxes` of each slicing, and what each one takes."""
        cut, cuts = np.zeros(len(self._sites), np.int64), 1
        for own, (sites, axes) in zip(boxes, self._cuts, strict=True):
            numbers, count = _cut_by_all(axes, own) if sites.size else (None, 1)
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
        return signature, [self._wanted(number, boxes) for number in example.tolist()]

    def _wanted(self, group: int, boxes: Sequence[tuple[Box, ...]]) -> Wanted:
        """What the boxes of each slicing take from a tensor of a group, in the order of `plan.transfer_plan`."""
        location, used = self._groups[group]
        copies = []
        for sites in used:
            number = self._sites[sites[0]][0]
            slicing = self._slicings[number]
            view = View(slicing.stored_shape, slicing.dtype, tuple(self._sites[site][1] for site in sites))
            for box in boxes[number]:
                for _, copy, ops in view.copies(view.clipped(box), box.shape):
                    copies.append((copy, same_bits(ops, location.dtype, slicing.dtype)))
        step = _step(location)
        first = min((copy.source for copy, _ in copies), default=0) // step * step
        return Wanted(
            location,
            tuple((Copy(copy.source - first, 0, copy.modes), same) for copy, same in copies),
            first * location.dtype.itemsize,
        )


def _step(location: Location) -> int:
    """As many elements further on, the same is read of a tensor for the same copies."""
    if location.encoding is None:
        return 1
    # Rows of blocks have as many scales each, unless the last one is smaller and the next matrix begins early.
    (rows, columns), (height, _) = location.encoding.shape[-2:], location.encoding.block
    return columns * (height if rows % height == 0 else rows)


class _Axis:
    """Where the pieces at the sites of one slicing lie along one dimension."""

    def __init__(self, begin: np.ndarray, size: np.ndarray) -> None:
        distinct, self._which = _unique_pairs(begin, size)
        self._begin, self._size = distinct
        self._known: dict[tuple[int, int], np.ndarray | bool] = {}

    def cut(self, low: int, high: int) -> np.ndarray | bool:
        """A number for every site, equal where `[low, high)` cuts equal pieces alike; 0 where it misses them.

        False where it misses all, True where it cuts all alike.
        """
        found = self._known.get((low, high))
        if found is None:
            found = self._known[low, high] = self._cut(low, high)
        return found if isinstance(found, bool) else found[self._which]

    def _cut(self, low: int, high: int) -> np.ndarray | bool:
        if len(self._begin) == 1:  # spares the commonest case NumPy's work per call
            begin = int(self._begin[0])
            return max(low, begin) < min(high, begin + int(self._size[0]))
        start = np.maximum(low - self._begin, 0)
        stop = np.minimum(high - self._begin, self._size)
        hit = start < stop
        whole = hit & (stop - start == self._size)
        numbers = whole.astype(np.int64)  # a whole piece is cut like any other whole one
        partly = hit & ~whole
        if partly.any():
            numbers[partly] = 2 + _unique_pairs(start[partly], stop[partly])[1]
        return bool(numbers[0]) if (numbers == numbers[0]).all() else numbers


def _unique_pairs(a: np.ndarray, b: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """The distinct pairs of numbers of two arrays, none of them negative, and which of them is at each position."""
    radix = int(b.max()) + 1
    distinct, which = np.unique(a * radix + b, return_inverse=True)
    return np.divmod(distinct, radix), which


def _by_position(rows: list[list[int]]) -> list[np.ndarray]:
    """For n = 0, 1, ... the nth numbers of the leading rows, those that have so many; the longest row is the first."""
    out = []
    for n in range(len(rows[0]) if rows else 0):
        while len(rows[-1]) <= n:
            rows.pop()
        out.append(np.array([row[n] for row in rows], np.int64))
    return out


def _cuts_by_slicing(sites: Sequence[tuple[int, Piece]], slicings: int) -> list[tuple[np.ndarray, list[_Axis]]]:
    """For every slicing the numbers of its sites, and its dimensions."""
    own: list[list[int]] = [[] for _ in range(slicings)]
    for number, (slicing, _) in enumerate(sites):
        own[slicing].append(number)
    out = []
    for numbers in own:
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
    """A number for every site, equal where all of `boxes` cut equal pieces alike, and how many there are.

    None where that is so at all sites.
    """
    numbers, count = None, 1
    for box in boxes:
        cut = _cut_by_one(axes, box)
        if cut is not None:
            cuts = int(cut.max()) + 1
            both = cut if numbers is None else numbers * cuts + cut
            numbers, count = _renumbered(both, count * cuts)
    return numbers, count


def _cut_by_one(axes: Sequence[_Axis], box: Box) -> np.ndarray | None:
    """A number for every site, 0 where `box` misses the piece there; None where it cuts all alike or misses all."""
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
    """Numbers below `bound` as others that are equal where they are and without gaps, and how many; 0 stays 0."""
    if bound > 4 * len(numbers) + 1024:  # too many for a table
        distinct, out = np.unique(np.append(0, numbers), return_inverse=True)
        return out[1:], len(distinct)
    seen = np.zeros(bound, bool)
    seen[0] = True
    seen[numbers] = True
    rank = np.cumsum(seen) - 1
    return rank[numbers], int(rank[-1]) + 1

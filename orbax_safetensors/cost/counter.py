"""Count what processes move of a tree's stored tensors: the figures of `transfer.plan.transfer_plan`, without the plan.

Tensors that a process moves alike are planned once and counted together (see `alike`), so that 45,000 tensors on 512
devices take a second, whether each is a leaf or they are stacked in a few. This needs no devices, files or threads.
Like a `TransferPlan`, a count has no direction: a restore reads the bytes, a save writes them.
"""

from __future__ import annotations

from collections import Counter as Multiset
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from orbax_safetensors.cost.alike import Slicing, TensorGroups
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.coalesce import MAX_REQUEST_BYTES, Direct, Gather, touching
from orbax_safetensors.geometry.view import View
from orbax_safetensors.transfer.plan import Location, gather_at

Boxes = tuple[tuple[Box, ...], ...]  # of each slicing
_Number = TypeVar("_Number", int, np.ndarray)
_NOTHING = Gather((), (), needed_bytes=0, read_bytes=0, num_requests=0, window_bytes=0)


class ShardedLeaf(NamedTuple):
    """One array of a tree, and the boxes of it that each process holds.

    Attributes:
      name: key path in the tree.
      view: of the stored tensors; elements of the array outside the view are zeros and move nothing.
      shape, dtype: of the array. Elements that are stored in another dtype are cast.
      boxes: for every process the boxes of its devices. Leaves that are sharded alike share one list.
      readers: the processes that read their boxes; the others receive theirs from these. None if all read.
      parts: for every process the boxes that it reads instead, if devices exchange parts. Parts may reach over the end
        of the array. Leaves that are sharded alike share one list.
    """

    name: str
    view: View
    shape: tuple[int, ...]
    dtype: np.dtype
    boxes: Sequence[tuple[Box, ...]]
    readers: frozenset[int] | None = None
    parts: Sequence[tuple[Box, ...]] | None = None


@dataclass(frozen=True, eq=False)
class Count:
    """What one process moves.

    Attributes:
      needed_bytes, moved_bytes, num_requests: of every file, by its number. Needed bytes are those of the boxes, each
        counted once; moved bytes are those that the requests cover.
      window_bytes: memory of the longest staged window.
    """

    needed_bytes: np.ndarray
    moved_bytes: np.ndarray
    num_requests: np.ndarray
    window_bytes: int

    def files(self) -> tuple[tuple[int, int, int, int], ...]:
        """Return number, needed bytes, moved bytes and requests of each file that the process reads or writes."""
        numbers = np.flatnonzero(self.num_requests)
        figures = (self.needed_bytes, self.moved_bytes, self.num_requests)
        return tuple(zip(numbers.tolist(), *(of_files[numbers].tolist() for of_files in figures), strict=True))


class Counter:
    """Counts what processes move of `leaves`.

    Attributes:
      slicings, leaf_counts: the distinct slicings, and the number of leaves of each.
      tensors: the stored tensors of the leaves.
      by_group: needed and moved bytes of one tensor of every group, over all processes, once `counts` has returned.
    """

    def __init__(
        self,
        leaves: Sequence[ShardedLeaf],
        locate: Callable[[str], Location],
        num_files: int,
        *,
        max_gap_bytes: int,
        max_request_bytes: int = MAX_REQUEST_BYTES,
    ) -> None:
        """Take leaves whose stored tensors lie in `num_files` files, where `locate` finds them."""
        self.slicings, slicing_of = slicings_of(leaves)
        self.leaf_counts: list[int] = np.bincount(slicing_of, minlength=len(self.slicings)).tolist()
        self.tensors = TensorGroups([leaf.view for leaf in leaves], slicing_of, self.slicings, locate)
        self._num_files = num_files
        self._max_gap_bytes = max_gap_bytes
        self._max_request_bytes = max_request_bytes
        # The number of tensors of each group in each file.
        pairs, self._pair_count = np.unique(self.tensors.group * num_files + self.tensors.file, return_counts=True)
        self._pair_group, self._pair_file = np.divmod(pairs, max(num_files, 1))

    def held(self, process: int) -> Boxes:
        """Return the distinct boxes that a process holds of each slicing."""
        return tuple(slicing.held(process) for slicing in self.slicings)

    def held_bytes(self, boxes: Boxes) -> int:
        """Return the memory of the boxes that a process holds of each slicing."""
        return sum(
            count * slicing.dtype.itemsize * sum(box.volume for box in of_slicing)
            for slicing, count, of_slicing in zip(self.slicings, self.leaf_counts, boxes, strict=True)
        )

    def counts(self, process_count: int) -> list[Count]:
        """Return what each process moves; those that move the same boxes share one count."""
        moved = [tuple(slicing.moved(process) for slicing in self.slicings) for process in range(process_count)]
        self.by_group = np.zeros((2, self.tensors.groups), np.int64)
        known = {boxes: self._count(boxes, times) for boxes, times in Multiset(moved).items()}
        return [known[boxes] for boxes in moved]

    def _count(self, boxes: Boxes, times: int) -> Count:
        """Return what a process moves that moves `boxes` of each slicing; add it to `by_group` so many times."""
        signature, taken = self.tensors.signatures(boxes)
        gathers = [
            gather_at(tensor.location, tensor.copies, self._max_gap_bytes) if tensor.copies else _NOTHING
            for tensor in taken
        ]
        ranges = [_joined(gathered.ranges, tensor.begin) for gathered, tensor in zip(gathers, taken, strict=True)]
        needed = np.array([gathered.needed_bytes for gathered in gathers], np.int64)
        moved = np.array([gathered.read_bytes for gathered in gathers], np.int64)
        requests = np.array([gathered.num_requests for gathered in gathers], np.int64)
        # Only a range at the beginning of its tensor can continue a range of another tensor.
        apart = all(begin > 0 for of_tensor in ranges for begin, _ in of_tensor)
        if apart:
            in_ranges = [sum(self._requests(end - begin) for begin, end in of_tensor) for of_tensor in ranges]
            requests += np.array(in_ranges, np.int64)
        in_pair = signature[self._pair_group]
        needed_of, moved_of, requests_of = (
            summed(self._pair_file, figures[in_pair] * self._pair_count, self._num_files)
            for figures in (needed, moved, requests)
        )
        if not apart:
            requests_of += self._range_requests(signature, ranges)
        self.by_group += times * np.stack([needed[signature], moved[signature]])
        return Count(
            needed_of,
            moved_of,
            requests_of,
            window_bytes=max((gathered.window_bytes for gathered in gathers), default=0),
        )

    def _range_requests(self, signature: np.ndarray, ranges: Sequence[list[tuple[int, int]]]) -> np.ndarray:
        """Return for each file the requests for ranges, given by signature, after joining those that touch."""
        counts = np.array([len(of_tensor) for of_tensor in ranges], np.int64)
        signature_of = signature[self.tensors.group]
        moving = np.flatnonzero(counts[signature_of])  # tensors that have ranges
        signature_of = signature_of[moving]
        per_tensor = counts[signature_of]
        # Ranges are numbered in the order of the tensors here, and in the order of the signatures in `ranges`.
        tensor = np.repeat(moving, per_tensor)
        first_here, first = np.cumsum(per_tensor) - per_tensor, np.cumsum(counts) - counts
        which = np.arange(len(tensor)) + np.repeat(first[signature_of] - first_here, per_tensor)
        begin, end = np.array([ends for of_tensor in ranges for ends in of_tensor], np.int64).reshape(-1, 2).T
        begin, end = self.tensors.begin[tensor] + begin[which], self.tensors.begin[tensor] + end[which]
        file = self.tensors.file[tensor]
        start = touching(file, begin, end)
        last = np.append(start[1:], len(begin))[: len(start)] - 1
        return summed(file[start], self._requests(end[last] - begin[start]), self._num_files)

    def _requests(self, nbytes: _Number) -> _Number:
        """Return the number of requests for a range of `nbytes`."""
        return -(-nbytes // self._max_request_bytes)


def slicings_of(leaves: Sequence[ShardedLeaf]) -> tuple[list[Slicing], list[int]]:
    """Return the distinct slicings of leaves, and the position of each leaf's slicing among them."""
    numbers: dict[Hashable, int] = {}
    slicings: list[Slicing] = []
    slicing_of = []
    for leaf in leaves:
        key = (leaf.view.shape, leaf.shape, leaf.dtype, id(leaf.boxes), leaf.readers, id(leaf.parts))
        slicing_of.append(numbers.setdefault(key, len(slicings)))
        if slicing_of[-1] == len(slicings):
            slicings.append(Slicing(leaf.view.shape, leaf.shape, leaf.dtype, leaf.boxes, leaf.readers, leaf.parts))
    return slicings, slicing_of


def summed(index: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    """Return for each of `count` indices the sum of its values."""
    # In float64, which is exact up to 2**53: 9 PB.
    return np.bincount(index, weights=values, minlength=count).astype(np.int64)


def _joined(ranges: Sequence[Direct], origin: int) -> list[tuple[int, int]]:
    """Return ranges of a tensor, which count from `origin`, as `(begin, end)`, with touching ranges joined."""
    out: list[tuple[int, int]] = []
    for moved in ranges:
        begin, end = origin + moved.runs.begin, origin + moved.runs.end
        if out and out[-1][1] == begin:
            begin, _ = out.pop()
        out.append((begin, end))
    return out

"""Which process reads how much of each stretch of the files: a plan as a table, to be drawn.

The bytes are those of `restore.restore_plan`, laid out over the files instead of summed up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from orbax_safetensors.cost.alike import TensorCopies, TensorGroups
from orbax_safetensors.cost.counter import ShardedLeaf, slicings_of
from orbax_safetensors.geometry.coalesce import Gather
from orbax_safetensors.geometry.strided import Runs
from orbax_safetensors.transfer.plan import Location, gather_at


@dataclass(frozen=True)
class Heat:
    """What processes need and read, in bytes: arrays of a row for each process and a column for each stretch.

    Exact for what is read, except the scales of encoded tensors, which are spread evenly over those of the tensor. Of
    a tensor that is read with gaps, what is needed is spread evenly over what is read.
    """

    needed: np.ndarray
    read: np.ndarray


def heat(
    leaves: Sequence[ShardedLeaf],
    locate: Callable[[str], Location],
    cuts: Sequence[np.ndarray],
    *,
    process_count: int,
    max_gap_bytes: int,
) -> Heat:
    """Lay out what every process reads over stretches of the files.

    `cuts` has for each file the ascending offsets between which its stretches lie; all that is read lies between the
    first and the last. The columns are in the order of the files. The other arguments are those of `restore_plan`.
    """
    slicings, slicing_of = slicings_of(leaves)
    tensors = TensorGroups([leaf.view for leaf in leaves], slicing_of, slicings, locate)
    ruler = _Ruler(leaves, tensors, locate, cuts)
    columns: dict[object, np.ndarray] = {}
    out = np.zeros((2, process_count, sum(len(cut) - 1 for cut in cuts)))
    for process in range(process_count):
        boxes = tuple(slicing.moved(process) for slicing in slicings)
        if boxes not in columns:
            signature, wanted = tensors.signatures(boxes)
            gathers = [gather_at(want.location, want.copies, max_gap_bytes) if want.copies else None for want in wanted]
            reads = [_Read.of(gathered, want) for gathered, want in zip(gathers, wanted, strict=True)]
            columns[boxes] = ruler.measure(signature[tensors.group], reads)
        out[:, process] = columns[boxes]
    return Heat(*out)


@dataclass(frozen=True)
class _Read:
    """What a process reads of a tensor: `runs` of it, and `scale_bytes`. `needed` is the part that it needs."""

    runs: tuple[Runs, ...]
    begin: int
    scale_bytes: int
    needed: float

    @staticmethod
    def of(gathered: Gather | None, wanted: TensorCopies) -> _Read:
        if gathered is None:
            return _Read((), 0, 0, 1.0)
        begin, stored = wanted.begin, wanted.location
        if stored.encoding is not None:  # from decoded elements to bytes of codes
            begin = begin // stored.dtype.itemsize // stored.encoding.elements_per_byte
        runs = tuple(reads.runs for reads in (*gathered.ranges, *gathered.windowed))
        scale_bytes = gathered.read_bytes - sum(part.nbytes for part in runs)
        return _Read(runs, begin, scale_bytes, gathered.needed_bytes / gathered.read_bytes)

    @property
    def nbytes(self) -> int:
        """Of the tensor itself."""
        return sum(runs.nbytes for runs in self.runs)

    def below(self, offsets: np.ndarray) -> np.ndarray:
        """Return how many of the bytes lie before each of `offsets` in the tensor."""
        out = np.zeros(len(offsets), np.int64)
        for runs in self.runs:
            out += below(runs, offsets - self.begin)
        return out


def below(runs: Runs, offsets: np.ndarray) -> np.ndarray:
    """Return how many of the bytes of `runs` lie before each of `offsets`."""
    inside, out, step = offsets - runs.begin, np.zeros(len(offsets), np.int64), runs.nbytes
    for size, stride in runs.modes:
        step //= size
        at = np.clip(inside // stride, 0, size - 1)
        out += at * step
        inside = inside - at * stride
    out += np.clip(inside, 0, runs.length)
    return out


class _Ruler:
    """Where the ends of the stretches lie among the tensors."""

    def __init__(
        self,
        leaves: Sequence[ShardedLeaf],
        tensors: TensorGroups,
        locate: Callable[[str], Location],
        cuts: Sequence[np.ndarray],
    ) -> None:
        self._cuts = cuts
        self._places = _Places(tensors.file, tensors.begin, cuts)
        names = dict.fromkeys(piece.tensor for leaf in leaves for piece in leaf.view.pieces if piece.tensor is not None)
        located = sorted((locate(name).file, locate(name).begin, name) for name in names)  # as in `tensors`
        encoded = [(number, locate(name)) for number, (_, _, name) in enumerate(located) if locate(name).encoding]
        encoded.sort(key=lambda entry: entry[1].scales)
        self._encoded = np.array([number for number, _ in encoded], np.int64)
        scales = np.array([location.scales for _, location in encoded], np.int64).reshape(-1, 2)
        self._scales = _Places(scales[:, 0], scales[:, 1], cuts)
        sizes = [
            location.encoding.num_scales * location.encoding.scale_bytes
            for _, location in encoded
            if location.encoding is not None
        ]
        # Which part of the scales lies before each cut, of those that the cut is in.
        if sizes:
            self._inside_scales = np.minimum(self._scales.inside / np.array(sizes)[self._scales.last], 1)

    def measure(self, signature: np.ndarray, reads: Sequence[_Read]) -> np.ndarray:
        """Return needed and read bytes of each stretch, by the signature of every tensor and what it reads."""
        if not signature.size:
            return np.zeros((2, self._places.stretches))
        last = self._places.last
        part = np.zeros(len(last))
        inside = np.flatnonzero(last >= 0)
        for number in np.unique(signature[last[inside]]).tolist():
            alike = inside[signature[last[inside]] == number]
            part[alike] = reads[number].below(self._places.inside[alike])
        nbytes = np.array([read.nbytes for read in reads])[signature]
        scale_bytes = np.array([read.scale_bytes for read in reads])[signature[self._encoded]]
        out = []
        for share in (np.array([read.needed for read in reads])[signature], np.ones(len(signature))):
            row = self._places.between(nbytes * share, part * share[last])
            if self._encoded.size:
                of_scales = scale_bytes * share[self._encoded]
                row = row + self._scales.between(of_scales, of_scales[self._scales.last] * self._inside_scales)
            out.append(row)
        return np.stack(out)


class _Places:
    """Things in the order of the files and of their offsets, and for every cut the last one that begins before it.

    Attributes:
      last: its number, -1 if there is none in the file.
      inside: how far behind its beginning the cut is.
      stretches: how many there are between the cuts of all files.
    """

    def __init__(self, file: np.ndarray, begin: np.ndarray, cuts: Sequence[np.ndarray]) -> None:
        first = np.searchsorted(file, np.arange(len(cuts) + 1))
        last, inside, start, keep = [], [], [], []
        for number, cut in enumerate(cuts):
            low, high = first[number], first[number + 1]
            at = low + np.searchsorted(begin[low:high], cut, "left") - 1
            any_before = at >= low
            last.append(np.where(any_before, at, -1))
            inside.append(np.where(any_before, cut - (begin[np.maximum(at, 0)] if len(begin) else 0), 0))
            start.append(np.full(len(cut), low))
            keep.append(np.append(np.ones(len(cut) - 1, bool), False))  # not from one file to the next
        self.last = np.concatenate(last)
        self.inside = np.concatenate(inside)
        self._start = np.concatenate(start)
        self._keep = np.concatenate(keep)[:-1]
        self.stretches = int(self._keep.sum())

    def between(self, amounts: np.ndarray, part: np.ndarray) -> np.ndarray:
        """Return what lies between cuts, of things of `amounts`, of the last of which `part` lies before each cut."""
        total = np.append(0, np.cumsum(amounts))
        before = np.where(self.last >= 0, total[np.maximum(self.last, 0)] - total[self._start] + part, 0)
        out: np.ndarray = np.diff(before)[self._keep]
        return out

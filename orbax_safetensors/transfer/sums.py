"""What a transfer adds to the checksums of tensors: the remainders of the bytes that it moves."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import NamedTuple

import numpy as np

from orbax_safetensors.format.header import Header
from orbax_safetensors.geometry.crc import combined, moved, remainder


class _PartRemainder(NamedTuple):
    """The remainder of bytes of one tensor in `[begin, end)` of a file, seen from `end`. There are `nbytes` of them."""

    begin: int
    end: int
    nbytes: int
    remainder: int


class Sums:
    """Remainders of parts of files, from many threads."""

    def __init__(self, *, with_gaps: bool) -> None:
        """With `with_gaps`, take pieces with other bytes between them; without, only what may make up a whole."""
        self._with_gaps = with_gaps
        self._of_files: dict[int, list[_PartRemainder]] = {}
        self._lock = threading.Lock()

    def add_buffers(self, file: int, begin: int, buffers: Sequence[memoryview]) -> None:
        """Sum and add `buffers`, each of one tensor, which lie in a file one after the other from `begin` on."""
        for buffer in buffers:
            end = begin + buffer.nbytes
            if buffer.nbytes:
                self._add(file, _PartRemainder(begin, end, buffer.nbytes, remainder(buffer)))
            begin = end

    def add_pieces(self, file: int, pieces: Sequence[tuple[int, int]], memory: memoryview) -> None:
        """Sum and add `pieces` `(offset, nbytes)` of one tensor, which lie in `memory` one after the other."""
        if not pieces or (len(pieces) > 1 and not self._with_gaps):
            return
        parts, ends, done = [], [], 0
        for offset, nbytes in pieces:
            parts.append(remainder(memory[done : done + nbytes]))
            ends.append(offset + nbytes)
            done += nbytes
        self._add(file, _PartRemainder(pieces[0][0], ends[-1], done, combined(parts, ends)))

    def _add(self, file: int, part: _PartRemainder) -> None:
        with self._lock:
            self._of_files.setdefault(file, []).append(part)

    def of_tensors(self, file: int, header: Header) -> tuple[np.ndarray, np.ndarray]:
        """Return the remainder of each tensor of a file, in the order of `header`, and whether it is of all its bytes.

        The bytes of others count as zero. Bytes that moved in several pieces with gaps are not taken for all.
        """
        entries = sorted(enumerate(header.tensors.values()), key=lambda item: (item[1].end, item[1].begin))
        ends = np.array([header.data_start + entry.end for _, entry in entries], np.int64)
        remainders = np.zeros(len(entries), np.uint32)
        whole = np.array([entry.nbytes == 0 for entry in header.tensors.values()], np.bool_)
        file_parts = sorted(self._of_files.get(file, ()), key=attrgetter("end"))
        positions = np.searchsorted(ends, [part.end for part in file_parts]).tolist()
        for position, pairs in groupby(zip(positions, file_parts, strict=True), key=itemgetter(0)):
            number, entry = entries[position]
            parts, end = [part for _, part in pairs], int(ends[position])
            together = combined([part.remainder for part in parts], [part.end for part in parts])
            remainders[number] = moved(together, end - parts[-1].end)
            whole[number] = _are_all(parts, end - entry.nbytes, end)
        return remainders, whole


def _are_all(parts: Sequence[_PartRemainder], begin: int, end: int) -> bool:
    """Return whether parts, which are in order, are the bytes `[begin, end)`, each once."""
    for part in parts:
        if part.begin != begin or part.nbytes != part.end - part.begin:
            return False
        begin = part.end
    return begin == end

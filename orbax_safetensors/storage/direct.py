"""Local files that are read past the page cache, except for what is in it: for more bytes than the cache should hold.

The kernel then takes no pages for the bytes, and the disk writes them into the reader's memory (`O_DIRECT`). It can do
so only in whole blocks, at addresses that are multiples of a block wherever the offsets are. Other memory is filled
from a buffer of the thread, which stays in the core's cache; and whatever a direct read refuses, a usual one reads.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from orbax_safetensors.storage.local import COST, LocalFile, LocalStore
from orbax_safetensors.storage.memory import DIRECT_BYTES, PAGE_BYTES, allocate, memory_at
from orbax_safetensors.storage.store import Store

# What a thread reads at a time into its buffer: long enough for the full speed of a disk, and still in the cache of a
# core when it is copied out.
_BUFFER_BYTES = 2 * 2**20

_thread = threading.local()


def reading(store: Store, direct: bool | Literal["auto"], nbytes: int) -> Store:
    """Return the store from which to read `nbytes` of the files of `store`.

    "auto" reads past the page cache if `nbytes` are more than a quarter of the machine's memory.
    """
    if not isinstance(store, LocalStore):
        return store
    if direct == "auto":
        direct = nbytes > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    return DirectStore() if direct else store


class DirectFile(LocalFile):
    """A local file that is read past the page cache; see `store.File`."""

    def __init__(self, path: str) -> None:
        """Open `path` as `LocalFile` does. If its file system refuses direct reads, all reads are the usual ones."""
        super().__init__(path)
        self._is_direct = False
        with contextlib.suppress(OSError), self._opened_directly():
            # The usual reads are few then, and the kernel would read ahead even of those that only ask the cache.
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            self._is_direct = True

    @contextlib.contextmanager
    def _opened_directly(self) -> Iterator[int]:
        """Yield a further descriptor of this file, whatever its path names by now, for direct reads.

        Each read has a descriptor of its own: a checkpoint can have as many files as a process may have open.
        """
        descriptor = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def read(self, ranges: Iterable[tuple[int, Sequence[memoryview]]]) -> None:
        """Fill the buffers of each range in turn, from the page cache if the range is in it."""
        for offset, buffers in ranges:
            nbytes = sum(buffer.nbytes for buffer in buffers)
            if nbytes < DIRECT_BYTES or self._is_usual(offset, nbytes):
                super().read([(offset, buffers)])
            else:
                self._read_directly(offset, buffers)

    def scatter(self, offset: int, runs: np.ndarray) -> bool:
        """Fill runs of memory in turn, and return True, if the range is in the page cache."""
        return self._is_usual(offset, int(runs[:, 1].sum())) and super().scatter(offset, runs)

    def _is_usual(self, offset: int, nbytes: int) -> bool:
        """Return whether a range is in the page cache, by its first and its middle byte, or cannot be read directly."""
        try:
            return not self._is_direct or all(
                os.preadv(self._descriptor, [bytearray(1)], at, os.RWF_NOWAIT) for at in (offset, offset + nbytes // 2)
            )
        except OSError as error:
            # The file system cannot tell, or the bytes are not there. A usual read reports other errors.
            return error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP)

    def _read_directly(self, offset: int, buffers: Sequence[memoryview]) -> None:
        at = begin = offset
        rest: list[np.ndarray] = []
        for memory in _joined(buffers):
            # Other memory shares its pages with what other threads write, even if the disk could reach it.
            if memory.nbytes >= DIRECT_BYTES and (memory.ctypes.data - at) % PAGE_BYTES == 0:
                self._read_through_buffer(begin, rest)
                self._read_straight(at, memory)
                begin, rest = at + memory.nbytes, []
            else:
                rest.append(memory)
            at += memory.nbytes
        self._read_through_buffer(begin, rest)

    def _read_straight(self, offset: int, memory: np.ndarray) -> None:
        """Fill whole pages of `memory`, which lie in it as in the file, directly, and its ends by usual reads."""
        first = -offset % PAGE_BYTES
        blocks = memory[first : memory.nbytes - (offset + memory.nbytes) % PAGE_BYTES]
        done = first + self._read_blocks(offset + first, blocks)
        super().read([(offset, [memory[:first].data]), (offset + done, [memory[done:].data])])

    def _read_through_buffer(self, offset: int, parts: Sequence[np.ndarray]) -> None:
        """Fill `parts`, one after the other, by way of this thread's buffer."""
        buffer: np.ndarray | None = getattr(_thread, "buffer", None)
        if buffer is None:
            (buffer,) = allocate([_BUFFER_BYTES])
            _thread.buffer = buffer
        unfilled = deque(parts)
        end = offset + sum(part.nbytes for part in parts)
        while offset < end:
            begin = offset // PAGE_BYTES * PAGE_BYTES
            blocks = -(-(end - begin) // PAGE_BYTES) * PAGE_BYTES
            found = buffer[offset - begin : self._read_blocks(begin, buffer[:blocks])][: end - offset]
            if not found.size:
                super().read([(offset, [part.data for part in unfilled])])
                return
            offset += found.size
            while found.size:
                part = unfilled.popleft()
                size = min(part.size, found.size)
                np.copyto(part[:size], found[:size])
                found = found[size:]
                if size < part.size:
                    unfilled.appendleft(part[size:])

    def _read_blocks(self, offset: int, memory: np.ndarray) -> int:
        """Return how many bytes a direct read into `memory` has filled; 0 if it was refused, or failed."""
        try:
            with self._opened_directly() as descriptor:
                return os.preadv(descriptor, [memory.data], offset)
        except OSError:
            return 0


def _joined(buffers: Sequence[memoryview]) -> list[np.ndarray]:
    """Return the memory of `buffers`, as one array if buffers follow one another. `buffers` have to outlive it."""
    spans: list[tuple[int, int]] = []
    for buffer in buffers:
        if not buffer.nbytes:
            continue
        begin = np.frombuffer(buffer, np.uint8).ctypes.data
        end = begin + buffer.nbytes
        if spans and begin == spans[-1][1]:
            begin, _ = spans.pop()
        spans.append((begin, end))
    return [memory_at(begin, end - begin) for begin, end in spans]


class DirectStore(LocalStore):
    """The file systems of this machine, read past the page cache."""

    # A disk takes so many requests at once, however few cores there are.
    cost = replace(COST, requests=max(8, COST.requests))
    opened = DirectFile

"""The loop that moves bytes: it executes a plan on open files and memory with a pool of threads."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np

from orbax_safetensors.geometry.coalesce import Direct, Staged
from orbax_safetensors.geometry.strided import Copy
from orbax_safetensors.storage.memory import PAGE_BYTES, allocate
from orbax_safetensors.storage.store import File, NewFile
from orbax_safetensors.transfer.plan import Block, Destination, Extent, Part, TransferPlan, same_bits
from orbax_safetensors.transfer.strided_copy import elements, words
from orbax_safetensors.transfer.sums import Sums
from orbax_safetensors.transfer.threads import run_tasks

_T = TypeVar("_T")
_F = TypeVar("_F", bound=File | NewFile)


@dataclass
class Counters:
    """Requests that were made, and the bytes that they moved."""

    num_requests: int = 0
    nbytes: int = 0


class Lazy:
    """What the first thread that needs it makes, while others wait; it is kept as long as something needs it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: Any = None

    def get(self, make: Callable[[], _T]) -> _T:
        """Return what `make` returned to the first caller."""
        with self._lock:
            if self._made is None:
                self._made = make()
            made: _T = self._made
            return made


class Window(NamedTuple):
    """What one thread moves of a part at a time: a few MiB, so that they stay in its core's cache.

    The window is the bytes `[low, high)` of the part's runs if these lie one after the other. Of runs of 1 MiB, with
    gaps, the window `[3 MiB, 5 MiB)` is the fourth and the fifth run, which are two requests.

    Attributes:
      part: the runs of a tensor, and what is made of them.
      low, high: of the window, in packed bytes.
      offset, first_nbytes: of its first request, in the file.
      blocks, memory: of the plan.
      shared: what is read once for all windows of the part; the first thread that needs it reads it.
    """

    part: Part
    low: int
    high: int
    offset: int
    first_nbytes: int
    blocks: Sequence[Block]
    memory: Sequence[np.ndarray]
    shared: Lazy


class Task(NamedTuple):
    """Requests to a file that one thread makes without a pause; the first of them begins at `offset`."""

    file: int
    offset: int
    run: Callable[[], None]


class _ArrayCopy(NamedTuple):
    """Both sides of a strided copy as arrays of one shape, its destination in the plan, and whether it moves bits."""

    destination: Destination
    same_bits: bool
    packed: np.ndarray
    dense: np.ndarray


class Transfer(ABC, Generic[_F]):
    """Open files and threads for the plans of one restore or save; `counters` are final once `run` has returned.

    `sums`, if set, get what moves.
    """

    def __init__(self, open_file: Callable[[int], _F], threads: int, sums: Sums | None = None) -> None:
        """Open no file yet: `open_file` opens each, by number, when it is first needed, and `close` closes all."""
        self.counters = Counters()
        self.sums = sums
        self._open_file = open_file
        self._threads = threads
        self._files: dict[int, _F] = {}
        self._lock = threading.Lock()
        self._local = threading.local()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files, even if one of them fails to close."""
        failures: list[BaseException] = []
        while self._files:
            try:
                self._files.popitem()[1].close()
            except BaseException as error:
                failures.append(error)
        try:
            if failures:
                raise failures[0]
        finally:
            failures.clear()  # the traceback holds this frame, and with it the failure

    def run(
        self,
        plan: TransferPlan,
        blocks: Sequence[Block],
        memory: Sequence[np.ndarray],
        report: Callable[[float], None] | None = None,
    ) -> None:
        """Execute `plan`: all of it is done when this returns, and none of it goes on when this raises.

        `memory` are one-dimensional uint8 arrays, one for each of `blocks`. Meanwhile this thread calls `report` with
        the share of the bytes that has moved; if that raises, the plan fails.
        """
        tasks = self.tasks(plan, blocks, memory)
        before = self.counters.nbytes
        share = None if report is None else lambda: report((self.counters.nbytes - before) / max(plan.moved_bytes, 1))
        run_tasks(tasks, self._threads, self.cancel, share)

    @abstractmethod
    def tasks(
        self, plan: TransferPlan, blocks: Sequence[Block], memory: Sequence[np.ndarray]
    ) -> Iterator[Callable[[], None]]:
        """Yield what threads have to call for `run`, in the order in which they should take it."""

    def _requests(self, plan: TransferPlan, blocks: Sequence[Block], memory: Sequence[np.ndarray]) -> Iterator[Task]:
        """Yield the requests of a plan, in the order of the files."""
        for extent in plan.extents:
            buffers = [memory[number].data[offset : offset + nbytes] for number, offset, nbytes in extent.parts]
            yield Task(extent.file, extent.begin, partial(self._extent, extent, buffers))
        for part in plan.parts:
            runs, pitch, shared = part.access.runs, part.access.pitch, Lazy()
            for low in range(0, runs.nbytes, pitch):
                high = min(low + pitch, runs.nbytes)
                begin, nbytes = next(iter(runs.pieces(low, high)))
                window = Window(part, low, high, part.location.begin + begin, nbytes, blocks, memory, shared)
                yield Task(part.file, window.offset, partial(self._window, window))

    def _window(self, window: Window) -> None:
        access = window.part.access
        if isinstance(access, Direct):
            destination = window.part.destinations[access.buffer]
            offset = destination.begin * window.part.location.dtype.itemsize + access.offset
            self._runs(window, window.memory[destination.block][offset + window.low : offset + window.high])
        else:
            self._staged(window, access)

    @abstractmethod
    def _staged(self, window: Window, access: Staged) -> None:
        """Move the bytes of a window through a buffer."""

    @abstractmethod
    def _move(self, file: _F, ranges: Iterable[tuple[int, Sequence[memoryview]]]) -> None:
        """Make a request for each range of a file: `(offset, buffers)`, as long as its buffers together."""

    def cancel(self) -> None:
        """Cancel requests, so that no thread waits for those of a plan that has failed."""
        with self._lock:
            files = list(self._files.values())
        for file in files:
            file.cancel()

    def _copies(
        self,
        window: Window,
        access: Staged,
        packed: np.ndarray,
        stored: np.dtype,
        copies: Sequence[Sequence[Copy]],
    ) -> Iterator[_ArrayCopy]:
        """Yield the copies of a window, between `packed` and the memory of its blocks.

        `packed` has elements of the dtype `stored`, and `copies` what each use makes of them.
        """
        for use, parts in zip(access.uses, copies, strict=True):
            destination = window.part.destinations[use.buffer]
            dtype, memory = window.blocks[destination.block].dtype, window.memory[destination.block]
            same = same_bits(destination.ops, stored, dtype)
            for part in parts:
                copy = part.onward(destination.begin)
                if same:
                    yield _ArrayCopy(destination, True, *words(copy, packed, memory, stored.itemsize))
                else:
                    yield _ArrayCopy(destination, False, *elements(copy, packed, stored, memory, dtype))

    def _runs(self, window: Window, packed: np.ndarray) -> None:
        """Move the bytes of a window, which `packed` holds, with one request for each run."""
        begin = window.part.location.begin
        pieces = ((begin + at, length) for at, length in window.part.access.runs.pieces(window.low, window.high))
        self._pieces(window.part.file, pieces, packed)

    def _pieces(self, number: int, pieces: Iterable[tuple[int, int]], packed: np.ndarray) -> None:
        """Move the `pieces` `(offset, nbytes)` of a file, which lie in `packed` one after the other."""
        memory = packed.data
        if self.sums is not None:
            pieces = list(pieces)  # to sum what has moved
        done = requests = 0

        def ranges() -> Iterator[tuple[int, Sequence[memoryview]]]:
            nonlocal done, requests
            for offset, nbytes in pieces:
                yield offset, [memory[done : done + nbytes]]
                done, requests = done + nbytes, requests + 1

        self._move(self.file(number), ranges())
        self.count(requests, done)
        if self.sums is not None:
            self.sums.add_pieces(number, list(pieces), memory)

    def _extent(self, extent: Extent, buffers: Sequence[memoryview]) -> None:
        self._move(self.file(extent.file), [(extent.begin, buffers)])
        self.count(1, extent.end - extent.begin)
        if self.sums is not None:
            self.sums.add_buffers(extent.file, extent.begin, buffers)

    def count(self, requests: int, nbytes: int) -> None:
        """Add requests to the counters."""
        with self._lock:
            self.counters.num_requests += requests
            self.counters.nbytes += nbytes

    def _staging(self, nbytes: int, offset: int = 0) -> np.ndarray:
        """Return `nbytes` of memory of this thread, reused for every window so that it stays in the core's cache.

        It begins as far into a page of memory as the byte at `offset` of a file is into a page of the file: for offset
        8,200, the second page of the file and 8 bytes, it begins 8 bytes into a page. A direct read can then fill it
        without another buffer. The distance is rounded down to a multiple of 8, for elements have to be aligned.
        """
        buffer: np.ndarray | None = getattr(self._local, "buffer", None)
        if buffer is None or buffer.nbytes < nbytes + PAGE_BYTES:
            (buffer,) = allocate([nbytes + PAGE_BYTES])
            self._local.buffer = buffer
        return buffer[offset % PAGE_BYTES // 8 * 8 :][:nbytes]

    def file(self, number: int) -> _F:
        """Return the open file of a number."""
        file = self._files.get(number)
        if file is None:
            with self._lock:
                file = self._files.get(number)
                if file is None:
                    file = self._files[number] = self._open_file(number)
        return file


def within(access: Staged, low: int, high: int) -> list[tuple[Copy, ...]]:
    """Return the part of each copy of `access` that reads packed elements `[low, high)`; see `of_window`."""
    return [of_window(use.copy, low, high) for use in access.uses]


# Layers of a model have the same windows.
@lru_cache(maxsize=2**12)
def of_window(copy: Copy, low: int, high: int) -> tuple[Copy, ...]:
    """Return the part of a copy that reads packed elements `[low, high)`, from a source that begins with them."""
    return tuple([part.shifted(-low) for part in copy.within(low, high)])


def batches(sized: Iterable[tuple[_T, int]], limit: int) -> Iterator[list[_T]]:
    """Yield the items of `(item, size)` in order, in lists of at most `limit` altogether, or of one larger item."""
    batch: list[_T] = []
    total = 0
    for item, size in sized:
        if batch and total + size > limit:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch

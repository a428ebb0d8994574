"""The one loop that moves bytes: executes a plan on open files and memory with a pool of threads."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Generic, NamedTuple, Self, TypeVar

import numpy as np

from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.io.arena import allocate
from orbax_safetensors.io.store import File, NewFile, Stamp
from orbax_safetensors.plan.coalesce import Direct, Staged
from orbax_safetensors.plan.plan import Block, Extent, Part, TransferPlan
from orbax_safetensors.strided_copy import cast, elements, words

_T = TypeVar("_T")
_F = TypeVar("_F", bound=File | NewFile)


@dataclass
class Counters:
    """What was really asked of storage: requests and the bytes that they moved."""

    num_requests: int = 0
    nbytes: int = 0


class _Window(NamedTuple):
    """Packed bytes `[low, high)` of a part, and the blocks and memory of the plan that it is of."""

    part: Part
    low: int
    high: int
    blocks: Sequence[Block]
    memory: Sequence[np.ndarray]


class _Transfer(ABC, Generic[_F]):
    """Open files and threads for the plans of one restore or save; `counters` are right once `run` has returned."""

    def __init__(self, open_file: Callable[[int], _F], threads: int) -> None:
        """Files are opened when they are first needed, by their number, and closed by `close`."""
        self.counters = Counters()
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
        """Closes all files, also after one has said that it failed."""
        with contextlib.ExitStack() as closing:
            while self._files:
                closing.callback(self._files.popitem()[1].close)

    def run(self, plan: TransferPlan, blocks: Sequence[Block], memory: Sequence[np.ndarray]) -> None:
        """Executes `plan`; all of it has happened when this returns, and none of it goes on when it raises.

        `memory` are one-dimensional uint8 arrays, one for each of `blocks`.
        """
        tasks = self._ordered(self._tasks(plan, blocks, memory))
        files = {extent.file for extent in plan.extents} | {part.file for part in plan.parts}
        failures: list[BaseException] = []

        def work() -> None:
            try:
                while not failures:
                    with self._lock:
                        task = next(tasks, None)
                    if task is None:
                        return
                    task()
            except BaseException as error:
                failures.append(error)

        with ThreadPoolExecutor(self._threads, "safetensors") as pool:
            try:
                wait([pool.submit(work) for _ in range(self._useful_threads(len(files)))])
            except BaseException as error:  # an interrupt; the workers stop at their next task
                failures.append(error)
                raise
        try:
            if failures:
                raise failures[0]
        finally:
            failures.clear()  # its traceback holds the memory of the transfer, and this frame, which holds it

    def _tasks(
        self, plan: TransferPlan, blocks: Sequence[Block], memory: Sequence[np.ndarray]
    ) -> Iterator[tuple[int, Callable[[], None]]]:
        """The requests of a plan, each with the number of its file, in file order."""
        for extent in plan.extents:
            buffers = [memory[number].data[offset : offset + nbytes] for number, offset, nbytes in extent.parts]
            yield extent.file, partial(self._extent, extent, buffers)
        for part in plan.parts:
            for low, high in part.windows():
                yield part.file, partial(self._window, _Window(part, low, high, blocks, memory))

    def _ordered(self, tasks: Iterator[tuple[int, Callable[[], None]]]) -> Iterator[Callable[[], None]]:
        """The order in which requests are made."""
        return (task for _, task in tasks)

    def _useful_threads(self, files: int) -> int:
        """How many threads have something to do at once."""
        return self._threads

    def _window(self, window: _Window) -> None:
        access = window.part.access
        if isinstance(access, Direct):
            own = window.memory[window.part.blocks[access.buffer]]
            self._runs(window, own[access.offset + window.low : access.offset + window.high])
        else:
            self._staged(window, access, self._staging(window.high - window.low))

    @abstractmethod
    def _staged(self, window: _Window, access: Staged, packed: np.ndarray) -> None:
        """Moves the bytes of a window through `packed`, a buffer of their size."""

    @abstractmethod
    def _move(self, file: _F, offset: int, buffers: Sequence[memoryview]) -> None:
        """Makes one request."""

    def _ends(
        self, window: _Window, access: Staged, packed: np.ndarray
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """For every copy of a window its block's number, and both ends of the copy, in `packed` and in the block."""
        for use in access.uses:
            number = window.part.blocks[use.buffer]
            block, memory = window.blocks[number], window.memory[number]
            stored = block.view.dtype
            first = window.low // stored.itemsize
            for copy in use.copy.within(first, window.high // stored.itemsize):
                own = copy.shifted(-first)
                if block.same_bits:
                    yield number, *words(own, packed, memory, stored.itemsize)
                else:
                    yield number, *elements(own, packed, stored, memory, block.dtype)

    def _runs(self, window: _Window, packed: np.ndarray) -> None:
        """Moves the bytes of a window, which `packed` holds, with one request for each run."""
        file, memory = self._file(window.part.file), packed.data
        done = requests = 0
        for begin, length in window.part.access.runs.pieces(window.low, window.high):
            self._move(file, window.part.begin + begin, [memory[done : done + length]])
            done, requests = done + length, requests + 1
        self._count(requests, done)

    def _extent(self, extent: Extent, buffers: Sequence[memoryview]) -> None:
        self._move(self._file(extent.file), extent.begin, buffers)
        self._count(1, extent.end - extent.begin)

    def _count(self, requests: int, nbytes: int) -> None:
        with self._lock:
            self.counters.num_requests += requests
            self.counters.nbytes += nbytes

    def _staging(self, nbytes: int) -> np.ndarray:
        """Memory of this thread, used again for every window so that it stays in the core's cache."""
        buffer: np.ndarray | None = getattr(self._local, "buffer", None)
        if buffer is None or buffer.nbytes < nbytes:
            (buffer,) = allocate([nbytes])
            self._local.buffer = buffer
        return buffer[:nbytes]

    def _file(self, number: int) -> _F:
        file = self._files.get(number)
        if file is None:
            with self._lock:
                file = self._files.get(number)
                if file is None:
                    file = self._files[number] = self._open_file(number)
        return file


class Reader(_Transfer[File]):
    """Fills memory from files."""

    def __init__(self, open_file: Callable[[int], File], threads: int) -> None:
        """See `_Transfer`."""
        super().__init__(open_file, threads)
        self._lossless: Sequence[bool] = ()
        self._mappings: dict[int, memoryview] = {}

    def read(
        self, plan: TransferPlan, blocks: Sequence[Block], memory: Sequence[np.ndarray], lossless: Sequence[bool]
    ) -> None:
        """`run`, in which a cast that changes a value raises `TensorMismatchError` where `lossless` is set."""
        self._lossless = lossless
        self.run(plan, blocks, memory)

    def map(self, number: int) -> memoryview:
        """A whole file as memory, the same for every caller."""
        mapping = self._mappings.get(number)
        if mapping is None:
            mapping = self._mappings[number] = self._file(number).map()
        return mapping

    def check(self, stamps: Mapping[int, Stamp]) -> None:
        """Raises `StorageError` where a file that was opened is no longer in the state that its stamp was taken in."""
        for number, file in self._files.items():
            file.check(stamps[number])

    def _move(self, file: File, offset: int, buffers: Sequence[memoryview]) -> None:
        file.read(offset, buffers)

    def _staged(self, window: _Window, access: Staged, packed: np.ndarray) -> None:
        self._runs(window, packed)
        for number, source, destination in self._ends(window, access, packed):
            if window.blocks[number].same_bits:
                destination[...] = source
                continue
            try:
                cast(source, destination, lossless=self._lossless[number])
            except TensorMismatchError as error:
                path = self._file(window.part.file).path
                raise TensorMismatchError(f"{path}: {window.part.tensor!r}: {error}") from None


class Writer(_Transfer[NewFile]):
    """Writes memory into files. Its plans have no gaps: every byte that is written is one of a block."""

    def sync(self) -> None:
        """Waits until what was written is on the disk."""
        for file in self._files.values():
            file.sync()

    # File systems let one thread at a time write into a file, and the others wait at a price. So each has its own.

    def _ordered(self, tasks: Iterator[tuple[int, Callable[[], None]]]) -> Iterator[Callable[[], None]]:
        by_file: dict[int, list[Callable[[], None]]] = {}
        for file, task in tasks:
            by_file.setdefault(file, []).append(task)
        in_turn = zip_longest(*by_file.values())
        return (task for tasks_in_turn in in_turn for task in tasks_in_turn if task is not None)

    def _useful_threads(self, files: int) -> int:
        return max(1, min(self._threads, files))

    def _move(self, file: NewFile, offset: int, buffers: Sequence[memoryview]) -> None:
        file.write(offset, buffers)

    def _staged(self, window: _Window, access: Staged, packed: np.ndarray) -> None:
        for number, destination, source in self._ends(window, access, packed):
            if window.blocks[number].same_bits:
                destination[...] = source
            else:
                cast(source, destination, lossless=False)
        self._runs(window, packed)


def batches(sized: Iterable[tuple[_T, int]], limit: int) -> Iterator[list[_T]]:
    """The first of each pair, in order, in lists whose second sum up to at most `limit`, or that are one item."""
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

"""The loop that moves bytes: it executes a plan on open files and memory with a pool of threads."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Generic, NamedTuple, Self, TypeVar

import ml_dtypes
import numpy as np

from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.geometry.coalesce import Direct, Encoded, Staged
from orbax_safetensors.geometry.elementwise import apply
from orbax_safetensors.geometry.strided import Copy
from orbax_safetensors.storage.memory import allocate, no_collection
from orbax_safetensors.storage.store import File, NewFile, Stamp
from orbax_safetensors.storage.upload import files_at_once
from orbax_safetensors.transfer.decode import decode
from orbax_safetensors.transfer.plan import Block, Constant, End, Extent, Part, TransferPlan, same_bits
from orbax_safetensors.transfer.scatter import places
from orbax_safetensors.transfer.strided_copy import assign, copy_applying, copy_undoing, elements, words

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

_T = TypeVar("_T")
_F = TypeVar("_F", bound=File | NewFile)


@dataclass
class Counters:
    """Requests that were made, and the bytes that they moved."""

    num_requests: int = 0
    nbytes: int = 0


class _Window(NamedTuple):
    """Packed bytes `[low, high)` of a part, with the blocks and memory of its plan."""

    part: Part
    low: int
    high: int
    blocks: Sequence[Block]
    memory: Sequence[np.ndarray]


class _Task(NamedTuple):
    """Requests to a file that one thread makes without a pause; the first of them begins at `offset`."""

    file: int
    offset: int
    run: Callable[[], None]


class _Copy(NamedTuple):
    """Both sides of a strided copy as arrays of one shape, its end in the plan, and whether it moves bits."""

    end: End
    same_bits: bool
    packed: np.ndarray
    dense: np.ndarray


class _Transfer(ABC, Generic[_F]):
    """Open files and threads for the plans of one restore or save; `counters` are final once `run` has returned."""

    def __init__(self, open_file: Callable[[int], _F], threads: int) -> None:
        """Open no file yet: `open_file` opens each, by number, when it is first needed, and `close` closes all."""
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
        """Close all files, even if one of them fails to close."""
        with contextlib.ExitStack() as closing:
            while self._files:
                closing.callback(self._files.popitem()[1].close)

    def run(self, plan: TransferPlan, blocks: Sequence[Block], memory: Sequence[np.ndarray]) -> None:
        """Execute `plan`: all of it is done when this returns, and none of it goes on when this raises.

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
                self._cancel()

        with ThreadPoolExecutor(self._threads, "safetensors") as pool:
            try:
                wait([pool.submit(work) for _ in range(self.useful_threads(len(files)))])
            except BaseException as error:  # an interrupt; the workers stop at their next task
                failures.append(error)
                self._cancel()
                raise
        try:
            if failures:
                raise failures[0]
        finally:
            failures.clear()  # the traceback holds the memory of the transfer, and this frame, which holds the failure

    def _tasks(self, plan: TransferPlan, blocks: Sequence[Block], memory: Sequence[np.ndarray]) -> Iterator[_Task]:
        """Yield the requests of a plan, in the order of the files."""
        for extent in plan.extents:
            with no_collection():
                buffers = [memory[number].data[offset : offset + nbytes] for number, offset, nbytes in extent.parts]
            yield _Task(extent.file, extent.begin, partial(self._extent, extent, buffers))
        for part in plan.parts:
            for low, high in part.windows():
                begin, _ = next(iter(part.access.runs.pieces(low, high)))
                window = _Window(part, low, high, blocks, memory)
                yield _Task(part.file, part.location.begin + begin, partial(self._window, window))

    def _ordered(self, tasks: Iterator[_Task]) -> Iterator[Callable[[], None]]:
        """Return what to run, in the order in which threads take it."""
        return (task.run for task in tasks)

    def useful_threads(self, files: int) -> int:
        """Return how many threads can work at once on so many files."""
        return self._threads

    def _window(self, window: _Window) -> None:
        access = window.part.access
        if isinstance(access, Direct):
            memory = window.memory[window.part.ends[access.buffer].block]
            self._runs(window, memory[access.offset + window.low : access.offset + window.high])
        else:
            self._staged(window, access)

    @abstractmethod
    def _staged(self, window: _Window, access: Staged) -> None:
        """Move the bytes of a window through a buffer."""

    @abstractmethod
    def _move(self, file: _F, ranges: Iterable[tuple[int, Sequence[memoryview]]]) -> None:
        """Make a request for each range of a file: `(offset, buffers)`, as long as its buffers together."""

    def _cancel(self) -> None:
        """Cancel the requests of a plan that has failed, so that no thread waits for them."""
        with self._lock:
            files = list(self._files.values())
        for file in files:
            file.cancel()

    def _copies(
        self, window: _Window, access: Staged, packed: np.ndarray, stored: np.dtype, low: int, high: int
    ) -> Iterator[_Copy]:
        """Yield the copies of a window, between `packed` and the memory of its blocks.

        `packed` has the packed elements `[low, high)` of `access`, of the dtype `stored`.
        """
        for use in access.uses:
            end = window.part.ends[use.buffer]
            held, memory = window.blocks[end.block].dtype, window.memory[end.block]
            same = same_bits(end.ops, stored, held)
            for copy in _of_window(use.copy, low, high):
                if same:
                    yield _Copy(end, True, *words(copy, packed, memory, stored.itemsize))
                else:
                    yield _Copy(end, False, *elements(copy, packed, stored, memory, held))

    def _runs(self, window: _Window, packed: np.ndarray) -> None:
        """Move the bytes of a window, which `packed` holds, with one request for each run."""
        begin = window.part.location.begin
        self._pieces(
            self._file(window.part.file),
            ((begin + at, length) for at, length in window.part.access.runs.pieces(window.low, window.high)),
            packed,
        )

    def _pieces(self, file: _F, pieces: Iterable[tuple[int, int]], packed: np.ndarray) -> None:
        """Move the `pieces` `(offset, nbytes)` of a file, which lie in `packed` one after the other."""
        memory = packed.data
        done = requests = 0

        def ranges() -> Iterator[tuple[int, Sequence[memoryview]]]:
            nonlocal done, requests
            for offset, nbytes in pieces:
                yield offset, [memory[done : done + nbytes]]
                done, requests = done + nbytes, requests + 1

        self._move(file, ranges())
        self._count(requests, done)

    def _extent(self, extent: Extent, buffers: Sequence[memoryview]) -> None:
        self._move(self._file(extent.file), [(extent.begin, buffers)])
        self._count(1, extent.end - extent.begin)

    def _count(self, requests: int, nbytes: int) -> None:
        with self._lock:
            self.counters.num_requests += requests
            self.counters.nbytes += nbytes

    def _staging(self, nbytes: int) -> np.ndarray:
        """Return memory of this thread, reused for every window so that it stays in the core's cache."""
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


# Layers of a model have the same windows.
@lru_cache(maxsize=2**16)
def _of_window(copy: Copy, low: int, high: int) -> tuple[Copy, ...]:
    """Return the part of a copy that reads packed elements `[low, high)`, from a source that begins with them."""
    return tuple([part.shifted(-low) for part in copy.within(low, high)])


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
        """Execute `plan`; if `lossless` is set for a block, a cast that loses a value raises `TensorMismatchError`."""
        self._lossless = lossless
        for constant in plan.constants:
            _fill(constant, blocks[constant.end.block], memory[constant.end.block])
        self.run(plan, blocks, memory)

    def map(self, number: int) -> memoryview:
        """Return a whole file as memory, the same memory for every caller."""
        mapping = self._mappings.get(number)
        if mapping is None:
            mapping = self._mappings[number] = self._file(number).map()
        return mapping

    def check(self, stamps: Mapping[int, Stamp]) -> None:
        """Raise `StorageError` if a file that was opened has changed since its stamp was taken."""
        for number, file in self._files.items():
            file.check(stamps[number])

    def _move(self, file: File, ranges: Iterable[tuple[int, Sequence[memoryview]]]) -> None:
        file.read(ranges)

    def _staged(self, window: _Window, access: Staged) -> None:
        if isinstance(access, Encoded):
            decoded, stored = self._decoded(window, access)
            per_byte = access.encoding.elements_per_byte
            copies = self._copies(window, access, decoded, stored, window.low * per_byte, window.high * per_byte)
        elif self._scattered(window, access):
            return
        else:
            stored = window.part.location.dtype
            packed = self._packed(window)
            low, high = window.low // stored.itemsize, window.high // stored.itemsize
            copies = self._copies(window, access, packed, stored, low, high)
        for copy in copies:
            if copy.same_bits:
                assign(copy.dense, copy.packed)
                continue
            try:
                copy_applying(copy.packed, copy.dense, copy.end.ops, lossless=self._lossless[copy.end.block])
            except TensorMismatchError as error:
                path = self._file(window.part.file).path
                raise TensorMismatchError(f"{path}: {window.part.tensor!r}: {error}") from None

    def _scattered(self, window: _Window, access: Staged) -> bool:
        """Read a window straight into place; return False, and read nothing, if that is not possible or not faster."""
        location = window.part.location
        ends = [window.part.ends[use.buffer] for use in access.uses]
        if access.runs.modes or not all(
            same_bits(end.ops, location.dtype, window.blocks[end.block].dtype) for end in ends
        ):
            return False
        itemsize = location.dtype.itemsize
        low, high = window.low // itemsize, window.high // itemsize
        copies = [
            (copy, window.memory[end.block])
            for use, end in zip(access.uses, ends, strict=True)
            for copy in _of_window(use.copy, low, high)
        ]
        runs = places(copies, itemsize, window.high - window.low)
        begin = location.begin + access.runs.begin + window.low
        if runs is None or not self._file(window.part.file).scatter(begin, runs):
            return False
        self._count(1, window.high - window.low)
        return True

    def _packed(self, window: _Window) -> np.ndarray:
        """Return the bytes of a window, in the memory of a store if it has them there anyway after one request."""
        begin, nbytes = next(iter(window.part.access.runs.pieces(window.low, window.high)))
        if nbytes == window.high - window.low:
            answer = self._file(window.part.file).answer(window.part.location.begin + begin, nbytes)
            if answer is not None:
                self._count(1, nbytes)
                return np.frombuffer(answer, np.uint8)
        packed = self._staging(window.high - window.low)
        self._runs(window, packed)
        return packed

    def _decoded(self, window: _Window, access: Encoded) -> tuple[np.ndarray, np.dtype]:
        """Return the elements of a window, as bytes, and their dtype: bfloat16 if all of its blocks have that dtype."""
        ends = [window.part.ends[use.buffer] for use in access.uses]
        wanted = {window.blocks[end.block].dtype if not end.ops else None for end in ends}
        dtype = _BFLOAT16 if wanted == {_BFLOAT16} else np.dtype(np.float32)
        scales = access.scales(window.low, window.high)
        code_bytes = window.high - window.low
        scale_bytes = sum(length for _, length in scales.ranges)
        buffer = self._staging(
            code_bytes * access.encoding.elements_per_byte * dtype.itemsize + scale_bytes + code_bytes
        )
        decoded, factors, codes = np.split(buffer, [buffer.size - scale_bytes - code_bytes, buffer.size - code_bytes])
        self._runs(window, codes)
        number, begin = window.part.location.scales
        self._pieces(self._file(number), ((begin + offset, length) for offset, length in scales.ranges), factors)
        decode(access.encoding, scales.segments, codes, factors, decoded.view(dtype))
        return decoded, dtype


def _fill(constant: Constant, block: Block, memory: np.ndarray) -> None:
    """Write elements that no tensor stores into memory that is all zeros."""
    zero = np.zeros(1, np.float64)
    if np.any(value := apply(constant.end.ops, zero)):
        _, dense = elements(constant.copy, zero.view(np.uint8), zero.dtype, memory, block.dtype)
        np.copyto(dense, value, casting="unsafe")


class Writer(_Transfer[NewFile]):
    """Writes memory into files. Its plans have no gaps: every written byte is a byte of a block."""

    def sync(self, files: Iterable[int] | None = None) -> None:
        """Wait until all bytes that were written into `files`, or into all files, are on the disk."""
        numbers = sorted(self._files if files is None else files)
        with ThreadPoolExecutor(self.useful_threads(len(numbers)), "safetensors") as pool:
            list(pool.map(lambda number: self._files[number].sync(), numbers))

    def _ordered(self, tasks: Iterator[_Task]) -> Iterator[Callable[[], None]]:
        """See `_Transfer`. A thread goes to the file at which fewest are: a file system lets them write in turn."""
        waiting = {file: deque(of_file) for file, of_file in _by_file(tasks).items()}
        threads_at: Counter[int] = Counter()

        def work(task: _Task) -> None:
            try:
                task.run()
            finally:
                with self._lock:
                    threads_at[task.file] -= 1

        while waiting:
            number = min(waiting, key=lambda file: (threads_at[file], -len(waiting[file])))
            task = waiting[number].popleft()
            if not waiting[number]:
                del waiting[number]
            threads_at[number] += 1
            yield partial(work, task)

    def _move(self, file: NewFile, ranges: Iterable[tuple[int, Sequence[memoryview]]]) -> None:
        for offset, buffers in ranges:
            file.write(offset, buffers)

    def _staged(self, window: _Window, access: Staged) -> None:
        stored = window.part.location.dtype
        packed = self._staging(window.high - window.low)
        low, high = window.low // stored.itemsize, window.high // stored.itemsize
        for copy in self._copies(window, access, packed, stored, low, high):
            if copy.same_bits:
                assign(copy.packed, copy.dense)
            else:
                copy_undoing(copy.dense, copy.packed, copy.end.ops)
        self._runs(window, packed)


class WholeFileWriter(Writer):
    """Writes every file from its first byte to its last, a few at a time: for stores that are not local."""

    def __init__(self, open_file: Callable[[int], NewFile], requests: int) -> None:
        """See `_Transfer`; `files_at_once` divides all `requests` among the open files."""
        super().__init__(open_file, requests)
        self._at_once, _ = files_at_once(requests)

    def _ordered(self, tasks: Iterator[_Task]) -> Iterator[Callable[[], None]]:
        return (partial(_in_turn, of_file) for _, of_file in sorted(_by_file(tasks).items()))

    def useful_threads(self, files: int) -> int:
        """See `_Transfer`."""
        return max(1, min(self._at_once, files))

    def finish(self, files: Iterable[int]) -> None:
        """Wait until all of `files` are complete; those without a write so far are created."""
        for number in files:
            self._file(number)
        self.sync()


def _by_file(tasks: Iterable[_Task]) -> dict[int, list[_Task]]:
    by_file: dict[int, list[_Task]] = {}
    for task in tasks:
        by_file.setdefault(task.file, []).append(task)
    return by_file


def _in_turn(tasks: list[_Task]) -> None:
    for task in sorted(tasks, key=lambda task: task.offset):
        task.run()


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

"""The one loop that moves bytes: executes a plan on open files and memory with a pool of threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np

from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.io.arena import allocate
from orbax_safetensors.io.store import File, Stamp
from orbax_safetensors.plan.coalesce import Direct
from orbax_safetensors.plan.plan import Destination, Part, ReadPlan, Scatter
from orbax_safetensors.strided_copy import cast, move

_Task = Callable[[], None]


@dataclass
class Counters:
    """What was really asked of storage: requests and the bytes they returned."""

    num_requests: int = 0
    read_bytes: int = 0


class Reader:
    """Fills memory from open files. One for each restore; `counters` may be read once `run` has returned."""

    def __init__(self, open_file: Callable[[int], File], threads: int) -> None:
        """Files are opened when they are first needed, by their number, and closed by `close`."""
        self.counters = Counters()
        self._open_file = open_file
        self._threads = threads
        self._files: dict[int, File] = {}
        self._mappings: dict[int, memoryview] = {}
        self._lock = threading.Lock()
        self._local = threading.local()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        plan: ReadPlan,
        destinations: Sequence[Destination],
        memory: Sequence[np.ndarray],
        lossless: Sequence[bool],
    ) -> None:
        """Executes `plan`; all of it has happened when this returns, and none of it goes on when it raises.

        `memory` are one-dimensional uint8 arrays, one for each of `destinations`. Where `lossless` is set, a cast that
        changes a value raises `TensorMismatchError`.
        """

        def scatter(request: Scatter) -> _Task:
            return lambda: self._read(
                request.file,
                request.begin,
                [memory[number].data[offset : offset + nbytes] for number, offset, nbytes in request.parts],
            )

        def window(part: Part, low: int, high: int) -> _Task:
            return lambda: self._window(part, low, high, destinations, memory, lossless)

        def tasks() -> Iterator[_Task]:
            for request in plan.scatters:
                yield scatter(request)
            for part in plan.parts:
                for low, high in part.windows():
                    yield window(part, low, high)

        self._run(tasks())

    def _run(self, tasks: Iterator[_Task]) -> None:
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

        with ThreadPoolExecutor(self._threads, "safetensors-read") as pool:
            workers = [pool.submit(work) for _ in range(self._threads)]
            try:
                wait(workers)
            except BaseException as error:  # an interrupt; the workers stop at their next task
                failures.append(error)
                raise
        if failures:
            raise failures[0]

    def _read(self, file: int, offset: int, buffers: Sequence[memoryview]) -> None:
        self.file(file).read(offset, buffers)
        with self._lock:
            self.counters.num_requests += 1
            self.counters.read_bytes += sum(buffer.nbytes for buffer in buffers)

    def _window(
        self,
        part: Part,
        low: int,
        high: int,
        destinations: Sequence[Destination],
        memory: Sequence[np.ndarray],
        lossless: Sequence[bool],
    ) -> None:
        reads = part.reads
        if isinstance(reads, Direct):
            into = memory[part.destinations[reads.buffer]][reads.offset + low : reads.offset + high]
        else:
            into = self._staging(high - low)
        done = 0
        for begin, length in reads.runs.pieces(low, high):
            self._read(part.file, part.begin + begin, [into.data[done : done + length]])
            done += length
        if isinstance(reads, Direct):
            return
        for use in reads.uses:
            number = part.destinations[use.buffer]
            destination = destinations[number]
            stored = destination.view.dtype
            for copy in use.copy.within(low // stored.itemsize, high // stored.itemsize):
                copy = copy.shifted(-(low // stored.itemsize))
                if destination.same_bits:
                    move(copy, into, memory[number], stored.itemsize)
                else:
                    try:
                        cast(copy, into, stored, memory[number], destination.dtype, lossless=lossless[number])
                    except TensorMismatchError as error:
                        raise TensorMismatchError(f"{self.file(part.file).path}: {part.tensor!r}: {error}") from None

    def _staging(self, nbytes: int) -> np.ndarray:
        """Memory of this thread, used again for every window so that it stays in the core's cache."""
        buffer: np.ndarray | None = getattr(self._local, "buffer", None)
        if buffer is None or buffer.nbytes < nbytes:
            (buffer,) = allocate([nbytes])
            self._local.buffer = buffer
        return buffer[:nbytes]

    def map(self, number: int) -> memoryview:
        """A whole file as memory, the same for every caller."""
        mapping = self._mappings.get(number)
        if mapping is None:
            mapping = self._mappings[number] = self.file(number).map()
        return mapping

    def check(self, stamps: Mapping[int, Stamp]) -> None:
        """Raises `StorageError` where a file that was opened is no longer in the state that its stamp was taken in."""
        for number, file in self._files.items():
            file.check(stamps[number])

    def file(self, number: int) -> File:
        """The open file of that number."""
        file = self._files.get(number)
        if file is None:
            with self._lock:
                file = self._files.get(number)
                if file is None:
                    file = self._files[number] = self._open_file(number)
        return file

    def close(self) -> None:
        """Closes all files."""
        while self._files:
            self._files.popitem()[1].close()

"""Writing: blocks become bytes of files, in the order that suits the store."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np

from orbax_safetensors.geometry.coalesce import Staged
from orbax_safetensors.storage.store import NewFile
from orbax_safetensors.storage.upload import files_at_once
from orbax_safetensors.transfer.engine import Task, Transfer, Window, within
from orbax_safetensors.transfer.plan import Block, TransferPlan
from orbax_safetensors.transfer.strided_copy import assign, copy_undoing
from orbax_safetensors.transfer.sums import Sums
from orbax_safetensors.transfer.threads import run_tasks


class Writer(Transfer[NewFile]):
    """Writes memory into files. Its plans have no gaps: every written byte is a byte of a block."""

    def sync(self, files: Iterable[int] | None = None) -> None:
        """Wait until all bytes that were written into `files`, or into all files, are on the disk."""
        numbers = sorted(self._files if files is None else files)
        syncs = (self._files[number].sync for number in numbers)
        run_tasks(syncs, self._threads, self.cancel)

    def tasks(
        self, plan: TransferPlan, blocks: Sequence[Block], memory: Sequence[np.ndarray]
    ) -> Iterator[Callable[[], None]]:
        """See `Transfer`. A thread goes to the file at which fewest are: a file system lets them write in turn."""
        by_file = _by_file(self._requests(plan, blocks, memory))
        waiting = {number: deque(requests) for number, requests in by_file.items()}
        threads_at: Counter[int] = Counter()

        def work(task: Task) -> None:
            try:
                task.run()
            finally:
                with self._lock:
                    threads_at[task.file] -= 1

        while waiting:
            with self._lock:
                number = min(waiting, key=lambda file: (threads_at[file], -len(waiting[file])))
                threads_at[number] += 1
            task = waiting[number].popleft()
            if not waiting[number]:
                del waiting[number]
            yield partial(work, task)

    def _move(self, file: NewFile, ranges: Iterable[tuple[int, Sequence[memoryview]]]) -> None:
        for offset, buffers in ranges:
            file.write(offset, buffers)

    def _staged(self, window: Window, access: Staged) -> None:
        stored = window.part.location.dtype
        packed = self._staging(window.high - window.low)
        low, high = window.low // stored.itemsize, window.high // stored.itemsize
        for copy in self._copies(window, access, packed, stored, within(access, low, high)):
            if copy.same_bits:
                assign(copy.packed, copy.dense)
            else:
                copy_undoing(copy.dense, copy.packed, copy.destination.ops)
        self._runs(window, packed)


class WholeFileWriter(Writer):
    """Writes every file from its first byte to its last, a few at a time: for stores that are not local."""

    def __init__(self, open_file: Callable[[int], NewFile], requests: int, sums: Sums | None = None) -> None:
        """See `Transfer`; `files_at_once` divides all `requests` among the open files."""
        super().__init__(open_file, files_at_once(requests)[0], sums)

    def tasks(
        self, plan: TransferPlan, blocks: Sequence[Block], memory: Sequence[np.ndarray]
    ) -> Iterator[Callable[[], None]]:
        """See `Transfer`."""
        by_file = _by_file(self._requests(plan, blocks, memory))
        return (partial(_in_turn, requests) for _, requests in sorted(by_file.items()))

    def finish(self, files: Iterable[int]) -> None:
        """Wait until all of `files` are complete; those without a write so far are created."""
        for number in files:
            self.file(number)
        self.sync()


def _by_file(tasks: Iterable[Task]) -> dict[int, list[Task]]:
    by_file: dict[int, list[Task]] = {}
    for task in tasks:
        by_file.setdefault(task.file, []).append(task)
    return by_file


def _in_turn(tasks: list[Task]) -> None:
    for task in sorted(tasks, key=lambda task: task.offset):
        task.run()

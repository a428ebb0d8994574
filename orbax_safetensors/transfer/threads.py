"""Run tasks on several threads, and stop them all at the first failure."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import wait
from functools import partial

from orbax_safetensors.storage.interrupts import plain_interrupts
from orbax_safetensors.storage.threads import Threads
from orbax_safetensors.transfer.progress import SECONDS


def run_tasks(
    tasks: Iterator[Callable[[], object]],
    threads: int,
    cancel: Callable[[], object],
    report: Callable[[], object] | None = None,
) -> None:
    """Call all of `tasks`, as `working` does. Meanwhile this thread calls `report`, which may raise."""
    with working(tasks, threads, cancel) as ended:
        while not ended(None if report is None else SECONDS):
            if report is not None:
                report()


@contextlib.contextmanager
def working(
    tasks: Iterator[Callable[[], object]], threads: int, cancel: Callable[[], object]
) -> Iterator[Callable[[float | None], bool]]:
    """Have threads call all of `tasks` while the body runs; they take them one by one, in order.

    Yields a function that waits for so many seconds, and returns whether the threads have ended. At the end of the
    body, wait for them. At an interrupt, or when a task, `tasks` or the body raises, call `cancel` so that no thread
    waits for requests, let tasks that have begun end and begin no other, and raise the first failure.
    """
    failures: list[BaseException] = []
    failed = threading.Event()  # for good: an interrupt can leave a thread behind, and `failures` is cleared
    lock = threading.Lock()

    def fail(error: BaseException) -> None:
        failures.append(error)
        failed.set()
        cancel()

    def work() -> None:
        try:
            while not failed.is_set():
                with lock:
                    task = next(tasks, None)
                if task is None:
                    return
                task()
                del task  # and the memory that it has filled, before the next one waits for room
        except BaseException as error:
            fail(error)

    try:
        with plain_interrupts():
            with Threads(threads, "safetensors") as pool:
                try:
                    workers = [pool.submit(work) for _ in range(threads)]
                    yield lambda seconds: not wait(workers, seconds).not_done
                    wait(workers)
                except BaseException as error:
                    fail(error)
            if failures:
                raise failures[0]
    finally:
        failures.clear()  # the traceback holds the memory of the tasks, and this frame, which holds the failure


class Countdown:
    """Knows when all of some tasks have ended, whichever threads call them. If one raises, that is never."""

    def __init__(self) -> None:
        """Begin without a task."""
        self.ended = threading.Event()
        self._lock = threading.Lock()
        self._left = 1  # until there are no more tasks to come

    def of(self, tasks: Iterable[Callable[[], object]]) -> Iterator[Callable[[], object]]:
        """Yield `tasks`, which are all."""
        for task in tasks:
            with self._lock:
                self._left += 1
            yield partial(self._run, task)
        self._count()

    def _run(self, task: Callable[[], object]) -> None:
        task()
        self._count()

    def _count(self) -> None:
        with self._lock:
            self._left -= 1
            if not self._left:
                self.ended.set()

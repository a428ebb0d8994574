"""Run tasks on several threads, and stop them all at the first failure."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait

from orbax_safetensors.transfer.progress import SECONDS


def run_tasks(
    tasks: Iterator[Callable[[], object]],
    threads: int,
    cancel: Callable[[], object],
    report: Callable[[], object] | None = None,
) -> None:
    """Call all of `tasks`, which the threads take one by one, in order. Meanwhile this thread calls `report`.

    At an interrupt, or when a task, `tasks` or `report` raises, call `cancel` so that no thread waits for requests, let
    tasks that have begun end and begin no other, and raise the first failure.
    """
    failures: list[BaseException] = []
    lock = threading.Lock()

    def fail(error: BaseException) -> None:
        failures.append(error)
        cancel()

    def work() -> None:
        try:
            while not failures:
                with lock:
                    task = next(tasks, None)
                if task is None:
                    return
                task()
        except BaseException as error:
            fail(error)

    try:
        with ThreadPoolExecutor(threads, "safetensors") as pool:
            try:
                workers = [pool.submit(work) for _ in range(threads)]
                while wait(workers, None if report is None else SECONDS).not_done:
                    if report is not None:
                        report()
            except BaseException as error:
                fail(error)
        if failures:
            raise failures[0]
    finally:
        failures.clear()  # the traceback holds the memory of the tasks, and this frame, which holds the failure

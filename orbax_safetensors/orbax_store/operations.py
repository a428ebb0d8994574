"""Traffic with TensorStore: a budget of bytes in flight, and operations that end together."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

import numpy as np

from orbax_safetensors.errors import SafetensorsError, StorageError, storage_errors


def finish_all(begun: Iterable[Future[Any]]) -> None:
    """Begin operations and wait for all that have begun, also if one cannot begin; raise the first error."""
    futures = []
    try:
        for future in begun:
            futures.append(future)
    finally:
        failures = [future.exception() for future in futures]
    for failure in failures:
        if failure is not None:
            raise failure


def results(begun: Iterable[tuple[str, Any]], where: str) -> dict[str, Any]:
    """Begin operations of TensorStore, and return their results by name; errors begin with `where` and the name.

    None of them is under way when this returns or raises, also at an interrupt: what is written later would meet the
    files of the next run.
    """
    futures: dict[str, Any] = {}
    try:
        with storage_errors(where):
            for name, future in begun:
                futures[name] = future
        found = {}
        for name, future in futures.items():
            with storage_errors(f"{where}: {name!r}"):
                found[name] = future.result()
        return found
    finally:
        for future in futures.values():
            with contextlib.suppress(Exception):
                future.exception()


class Budget:
    """Bytes that may be in flight. A request for more than are free waits, and later requests wait behind it."""

    def __init__(self, nbytes: int) -> None:
        """Start with `nbytes` free. A request for more is granted when nothing else is in flight."""
        if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 1:
            raise SafetensorsError(f"memory_bytes is {nbytes!r}, must be an integer of at least 1")
        self.nbytes = self._free = nbytes
        self._turn = threading.Lock()
        self._changed = threading.Condition()

    def acquire(self, nbytes: int) -> int:
        """Take `nbytes`, or the whole budget if that is less; return the bytes to release later."""
        nbytes = min(nbytes, self.nbytes)
        with self._turn, self._changed:
            self._changed.wait_for(lambda: self._free >= nbytes)
            self._free -= nbytes
        return nbytes

    def release(self, nbytes: int) -> None:
        """Give bytes back."""
        with self._changed:
            self._free += nbytes
            self._changed.notify_all()


# What a write costs besides its bytes: what TensorStore and Python keep of it, as measured.
_WRITE_OVERHEAD = 32 << 10


def begin_write(store: Any, array: np.ndarray, budget: Budget, *, copies: int, where: str) -> Future[None]:
    """Begin to write an array into a `TensorStore` of its shape, once the budget has the bytes of `copies` of it.

    `array` is not copied: it must not change before the future is done, which is when no kill of the process can undo
    the write. Raises, or the future does, a `StorageError` that begins with `where`.
    """
    operations = Operations(where)
    acquired_bytes = budget.acquire(copies * array.nbytes + _WRITE_OVERHEAD)
    try:
        with storage_errors(where):
            operation = store.write(array, can_reference_source_data_indefinitely=True).commit
    except BaseException:
        budget.release(acquired_bytes)
        raise
    operations.add(operation, budget, acquired_bytes)
    operations.close()
    return operations.future


class Operations:
    """TensorStore operations that are one operation to the caller: `future` is done once all of them are."""

    def __init__(self, where: str) -> None:
        """Begin with one operation under way, which `close` ends."""
        self.future: Future[None] = Future()
        self.future.set_running_or_notify_cancel()
        self._where = where
        self._under_way = 1
        self._failure: BaseException | None = None
        self._lock = threading.Lock()

    @property
    def failed(self) -> bool:
        """Return whether one of them has failed, so that no other need begin."""
        return self._failure is not None

    def add(self, operation: Any, budget: Budget, acquired_bytes: int) -> None:
        """Start a TensorStore future; when it is done, its `acquired_bytes` go back to `budget`."""
        with self._lock:
            self._under_way += 1

        def done(ended: Any) -> None:
            try:
                self._end(ended.exception())
            finally:  # last, so that callbacks have run once the budget is free
                budget.release(acquired_bytes)

        operation.add_done_callback(done)
        operation.force()  # otherwise it begins only when somebody waits for it

    def close(self, failure: BaseException | None = None) -> None:
        """Add no further operation; with a `failure`, the future has it once those under way have ended."""
        self._end(failure)

    def _end(self, failure: BaseException | None) -> None:
        with self._lock:
            self._failure = self._failure or failure
            self._under_way -= 1
            if self._under_way:
                return
        if self._failure is None:
            self.future.set_result(None)
        elif isinstance(self._failure, SafetensorsError):
            self.future.set_exception(self._failure)
        else:
            error = StorageError(f"{self._where}: {self._failure}")
            error.__cause__ = self._failure
            self.future.set_exception(error)

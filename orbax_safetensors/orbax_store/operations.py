"""Traffic with TensorStore: a budget of bytes in flight, and operations that end together."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

from orbax_safetensors.errors import SafetensorsError, StorageError


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

    def drain(self) -> None:
        """Wait until nothing is in flight."""
        self.release(self.acquire(self.nbytes))


class Operations:
    """TensorStore operations that are one operation to the caller: `future` is done once all of them are."""

    def __init__(self, where: str) -> None:
        """Begin with one operation under way, which `close` ends."""
        self.future: Future[int] = Future()
        self.future.set_running_or_notify_cancel()
        self._where = where
        self._under_way = 1
        self._result = 0
        self._failure: BaseException | None = None
        self._lock = threading.Lock()

    @property
    def failed(self) -> bool:
        """Return whether one of them has failed, so that no other need begin."""
        return self._failure is not None

    def add(self, operation: Any, budget: Budget, taken: int) -> None:
        """Start a TensorStore future; when it is done, the bytes that it has `taken` of `budget` are released."""
        with self._lock:
            self._under_way += 1

        def done(ended: Any) -> None:
            try:
                self._end(ended.exception())
            finally:  # last, so that callbacks have run once the budget is free
                budget.release(taken)

        operation.add_done_callback(done)
        operation.force()  # otherwise it begins only when somebody waits for it

    def close(self, result: int, failure: BaseException | None = None) -> None:
        """Add no further operation, and set the result, or the reason why there is none."""
        self._result = result
        self._end(failure)

    def _end(self, failure: BaseException | None) -> None:
        with self._lock:
            self._failure = self._failure or failure
            self._under_way -= 1
            if self._under_way:
                return
        if self._failure is None:
            self.future.set_result(self._result)
        elif isinstance(self._failure, SafetensorsError):
            self.future.set_exception(self._failure)
        else:
            error = StorageError(f"{self._where}: {self._failure}")
            error.__cause__ = self._failure
            self.future.set_exception(error)

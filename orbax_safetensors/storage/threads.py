"""Threads of a system that may refuse to start more of them, as a container with a limit does."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from orbax_safetensors.errors import StorageError

_T = TypeVar("_T")

# What Python says, with no class of its own, when the system refuses.
_REFUSED = "start new thread"


class Threads(ThreadPoolExecutor):
    """A pool that goes on with the threads that it has if the system starts no more.

    `submit` and `map` raise `StorageError` if there is none at all.
    """

    _any = False

    def submit(self, function: Callable[..., _T], /, *args: Any, **more: Any) -> Future[_T]:
        """Have a thread call `function`; see `ThreadPoolExecutor`."""
        future: Future[_T] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*args, **more))
                except BaseException as error:
                    future.set_exception(error)

        try:
            with refusals():
                super().submit(work)
                self._any = True
        except StorageError:
            # The pool has queued the call before it failed to start a thread for it: another one takes it.
            if not self._any:
                raise
        return future


def start(work: Callable[[], object], name: str) -> threading.Thread:
    """Return a new daemon thread that calls `work`; raises `StorageError` if the system starts no more threads."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    with refusals():
        thread.start()
    return thread


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Raise a `StorageError` if a thread cannot be started."""
    try:
        yield
    except RuntimeError as error:
        if _REFUSED not in str(error):
            raise
        raise StorageError(
            "the system starts no more threads for this process: raise its limit of processes and threads (`ulimit -u`,"
            " a container's `pids.max`)"
        ) from error

"""Threads of a system that may refuse to start more of them, as a container with a limit does."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from orbax_safetensors.errors import StorageError

# What Python says, with no class of its own, when the system refuses.
_REFUSED = "start new thread"


class Threads(ThreadPoolExecutor):
    """A pool that goes on with the threads that it has if the system starts no more.

    `submit` and `map` raise `StorageError` if there is none at all.
    """

    # Private to Python, alike in 3.11 to 3.13: `submit` calls it once it has queued the call, which a running thread
    # takes if no other starts. No public method lies between the two.
    def _adjust_thread_count(self) -> None:
        try:
            with refusals():
                super()._adjust_thread_count()
        except StorageError:
            if not self._threads:
                raise


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

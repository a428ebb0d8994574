"""A thread with an event loop that runs the requests of all remote stores, and ways to wait for them."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

from orbax_safetensors.errors import StorageError
from orbax_safetensors.storage.interrupts import plain_interrupts
from orbax_safetensors.storage.threads import start

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

_lock = threading.Lock()
_loops: dict[int, _Loop] = {}  # of this process, or of the process that it was forked from
_stopping: set[_Loop] = set()


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that holds a lock while a thread gives it an answer."""

    def __init__(self) -> None:
        super().__init__()
        self.answering = threading.RLock()

    def call_soon_threadsafe(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        with self.answering:
            return super().call_soon_threadsafe(callback, *args, context=context)


class Requests:
    """Requests that belong together: a thread waits for each, and `cancel` ends all of them."""

    def __init__(self) -> None:
        self._waiting: set[Future[Any]] = set()
        self._cancelled = False
        self._lock = threading.Lock()

    def start(self, request: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Start a request and return its future; a caller that stops waiting cancels it.

        After `cancel`, no request is made, and the future is cancelled.
        """
        if self._cancelled:
            request.close()
            ended: Future[_T] = Future()
            ended.cancel()
            return ended
        try:
            future = _begin(request)
        except BaseException:
            request.close()
            raise
        with self._lock:
            self._waiting.add(future)
            cancelled = self._cancelled
        future.add_done_callback(self._forget)
        if cancelled:
            future.cancel()
        return future

    def run(self, what: str, request: Coroutine[Any, Any, _T]) -> _T:
        """Return the result of a request; an interrupt ends it.

        Raises `StorageError`, which begins with `what`, after `cancel`.
        """
        future = self.start(request)
        try:
            with plain_interrupts():
                return future.result()
        except CancelledError:
            raise StorageError(f"{what} was cancelled") from None
        finally:
            future.cancel()

    def cancel(self) -> None:
        """End all requests; later requests end at once."""
        with self._lock:
            self._cancelled = True
            waiting = list(self._waiting)
        for future in waiting:
            future.cancel()

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._waiting.discard(future)


async def in_thread(function: Callable[[], _T], seconds: float | None = None) -> _T:
    """Return the result of a function that blocks; `TimeoutError` if it takes more than `seconds`.

    It goes on if nobody waits any more, until the program ends.
    """
    ended: Future[_T] = Future()
    ended.set_running_or_notify_cancel()  # a caller that stops waiting must not cancel it, because it goes on

    def work() -> None:
        try:
            ended.set_result(function())
        except BaseException as error:
            ended.set_exception(error)

    start(work, "remote_stores_blocking")
    return await asyncio.wait_for(asyncio.wrap_future(ended), seconds)


def _begin(request: Coroutine[Any, Any, _T]) -> Future[_T]:
    """Start a request on the loop of this process.

    Raises `StorageError` if the process is ending, or was forked from a process with a loop: no thread of the loop or
    of obstore survives a fork, and the request would wait for them forever.
    """
    with _lock:
        loop = _loops.get(os.getpid())
        if loop is None:
            if _loops:
                raise StorageError(
                    "this process was forked from a process that has used object stores or HTTP servers, and cannot "
                    "use them: have multiprocessing start it with 'spawn' or 'forkserver'"
                )
            loop = _Loop()
            try:
                thread = start(loop.run_forever, "remote_stores")
            except BaseException:
                loop.close()
                raise
            _loops[os.getpid()] = loop
            atexit.register(_stop, loop, thread)
        if loop in _stopping:
            raise StorageError("the program is ending: it makes no more requests to object stores and HTTP servers")
        return asyncio.run_coroutine_threadsafe(request, loop)


def _stop(loop: _Loop, thread: threading.Thread) -> None:
    """End the loop and all requests while the interpreter still exists, because their last answers go to it."""
    if _loops.get(os.getpid()) is not loop:  # the loop of the process that this process was forked from
        return
    with _lock:
        _stopping.add(loop)

    async def end() -> None:
        while requests := asyncio.all_tasks() - {asyncio.current_task()}:
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)
        loop.call_soon(loop.stop)

    asyncio.run_coroutine_threadsafe(end(), loop)
    thread.join()
    # A thread of obstore may still be giving the loop its answer. The lock has it finish with the loop first, but is
    # free before the thread has returned to obstore, which nothing can wait for. The thread needs moments for that; if
    # the interpreter ends before, the program ends with SIGABRT.
    with loop.answering:
        loop.close()

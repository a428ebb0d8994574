"""A thread with an event loop, on which the requests of all remote stores run, and what waits for them."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar, cast

from orbax_safetensors.errors import StorageError

_T = TypeVar("_T")

# How long a program that ends waits for threads that have answers: they take microseconds, if the system lets them run.
_LEAVE_SECONDS = 5.0

_lock = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}  # of this process, or of the one that it was forked from
_stopping: set[asyncio.AbstractEventLoop] = set()


class Requests:
    """Requests that belong together; each is waited for by a thread, and `cancel` ends all of them."""

    def __init__(self) -> None:
        self._waiting: set[Future[Any]] = set()
        self._cancelled = False
        self._lock = threading.Lock()

    def start(self, request: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Starts a request. Its result comes with `wait`; whoever stops waiting cancels it."""
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

    def run(self, request: Coroutine[Any, Any, _T]) -> _T:
        """Waits for a request; an interrupt ends it. Raises `CancelledError` of `concurrent.futures` after `cancel`."""
        future = self.start(request)
        try:
            return future.result()
        finally:
            future.cancel()

    def cancel(self) -> None:
        """Ends all requests, and those that are still to be started."""
        with self._lock:
            self._cancelled = True
            waiting = list(self._waiting)
        for future in waiting:
            future.cancel()

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._waiting.discard(future)


async def in_thread(function: Callable[[], _T]) -> _T:
    """The result of a function that blocks. Who stops waiting, or a program that ends, leaves it alone."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[_T] = loop.create_future()

    def end(result: _T | None, error: BaseException | None) -> None:
        if ended.cancelled():
            return
        if error is None:
            ended.set_result(cast(_T, result))
        else:
            ended.set_exception(error)

    def work() -> None:
        result, failure = None, None
        try:
            result = function()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it who waited
            loop.call_soon_threadsafe(end, result, failure)

    threading.Thread(target=work, name="remote_stores_blocking", daemon=True).start()
    return await ended


def _begin(request: Coroutine[Any, Any, _T]) -> Future[_T]:
    """Starts a request on the loop of this process.

    Raises `StorageError` where the process is ending, or was forked from one that has a loop: neither our thread nor
    those of obstore survive a fork, and what waits for them would wait forever.
    """
    with _lock:
        loop = _loops.get(os.getpid())
        if loop is None:
            if _loops:
                raise StorageError(
                    "this process was forked from one that has used object stores or HTTP servers, and cannot: have "
                    "multiprocessing start it with 'spawn' or 'forkserver'"
                )
            loop = _loops[os.getpid()] = asyncio.new_event_loop()
            thread = threading.Thread(target=loop.run_forever, name="remote_stores", daemon=True)
            thread.start()
            atexit.register(_stop, loop, thread)
        if loop in _stopping:
            raise StorageError("the program is ending: object stores and HTTP servers are not asked any more")
        return asyncio.run_coroutine_threadsafe(request, loop)


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Ends the loop and all requests, while there still is an interpreter that their last answers can come to."""
    if _loops.get(os.getpid()) is not loop:  # it is that of the process that this one was forked from
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
    # A thread of obstore may still be on its way back from the call that told the loop its answer. If the interpreter
    # is gone before it has come back, that ends the program with SIGABRT.
    until = time.monotonic() + _LEAVE_SECONDS
    while _is_told() and time.monotonic() < until:
        time.sleep(0.001)
    loop.close()


def _is_told() -> bool:
    """Whether a thread is in the call with which it tells a loop of something."""
    call = asyncio.BaseEventLoop.call_soon_threadsafe.__code__
    return any(frame.f_code is call for top in sys._current_frames().values() for frame, _ in traceback.walk_stack(top))

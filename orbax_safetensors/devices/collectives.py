"""Programs that devices of several processes run together: how many may be in flight, and how SIGTERM ends a wait."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
from collections.abc import Callable, Iterable, Iterator

import jax

# XLA's CPU client lets 32 programs be in flight on a device (`CpuClientOptions::max_inflight_computations_per_device`).
# It starts programs on a pool of as many threads as there are cores, or devices where these are more. One too many
# waits in such a thread; once all threads do, none is left to run the programs that these wait for, and all processes
# hang. Half of the 32 leaves room for what the caller has in flight. Accelerators run them one after the other anyway.
MAX_IN_FLIGHT = 16

# Longer than `struct sigaction` of any system, in bytes.
_SIGACTION_BYTES = 1024

_lock = threading.Lock()
_waiting = 0
_caught = ctypes.create_string_buffer(_SIGACTION_BYTES)


def start(programs: Iterable[Callable[[], jax.Array]]) -> list[jax.Array]:
    """Starts programs in order, which must be the same in all processes; all but the last few have run on return."""
    results: list[jax.Array] = []
    for program in programs:
        results.append(program())
        if len(results) % MAX_IN_FLIGHT == 0:
            jax.block_until_ready(results[-MAX_IN_FLIGHT:])
    return results


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Lets SIGTERM end the process, as it does by default, while it waits for other processes.

    `jax.distributed` catches the signal in C++, so that the program can save and end at its next step. A process that
    waits for others may never come to one. What catches it is put back afterwards. A handler of Python's is left alone.
    """
    global _waiting
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # Python knows nothing of handlers in C
        yield
        return
    libc = ctypes.CDLL(None)
    with _lock:
        if _waiting == 0:
            libc.sigaction(int(signal.SIGTERM), None, _caught)
            libc.signal(int(signal.SIGTERM), None)
        _waiting += 1
    try:
        yield
    finally:
        with _lock:
            _waiting -= 1
            if _waiting == 0:
                libc.sigaction(int(signal.SIGTERM), _caught, None)

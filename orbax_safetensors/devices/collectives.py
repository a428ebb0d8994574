"""Programs that devices of several processes run together: how many may be in flight, and how SIGTERM ends a wait."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
from collections.abc import Callable, Iterable, Iterator

import jax

# XLA's CPU client lets 32 programs be in flight on a device (`CpuClientOptions::max_inflight_computations_per_device`).
# It starts programs on a pool with a thread for each core, or for each device if there are more devices. A further
# program waits in such a thread; once all threads wait, none is left to run the programs before, and all processes
# hang. Half of the 32 leaves room for the caller's programs. Accelerators run programs one after the other anyway.
MAX_IN_FLIGHT = 16

# Longer than `struct sigaction` of any system, in bytes.
_SIGACTION_BYTES = 1024

_lock = threading.Lock()
_waiting = 0
_caught = ctypes.create_string_buffer(_SIGACTION_BYTES)


def start(programs: Iterable[Callable[[], jax.Array]]) -> list[jax.Array]:
    """Start programs in order, which must be the same in all processes; on return, only the last few may still run."""
    results: list[jax.Array] = []
    for program in programs:
        results.append(program())
        if len(results) % MAX_IN_FLIGHT == 0:
            jax.block_until_ready(results[-MAX_IN_FLIGHT:])
    return results


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the process, as it does by default, while it waits for other processes.

    `jax.distributed` catches the signal in C++, so that the program can save and end at its next step. A process that
    waits for others may never come to a next step. The C++ handler is put back afterwards. A Python handler stays.
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

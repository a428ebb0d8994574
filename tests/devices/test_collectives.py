"""What SIGTERM does in a process that waits for others; `tests/multiprocess` has real waits."""

import contextlib
import faulthandler
import os
import signal
import threading
from pathlib import Path

import pytest

from orbax_safetensors.devices.collectives import ended_by_sigterm


@pytest.fixture
def caught(tmp_path):
    """What a handler in C wrote that Python knows nothing of, as that of `jax.distributed`."""
    with open(tmp_path / "caught", "w") as file:
        faulthandler.register(signal.SIGTERM, file=file)
        yield tmp_path / "caught"
        faulthandler.unregister(signal.SIGTERM)


def catches() -> bool:
    """Whether anything catches SIGTERM, as the kernel has it."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def test_what_catches_it_in_c_is_put_back(caught):
    assert catches()
    with contextlib.suppress(ZeroDivisionError), ended_by_sigterm():
        assert not catches()
        _ = 1 // 0
    os.kill(os.getpid(), signal.SIGTERM)
    assert "test_collectives.py" in caught.read_text()


def test_threads_that_wait_at_once(caught):
    entered, leave = threading.Event(), threading.Event()

    def wait() -> None:
        with ended_by_sigterm():
            entered.set()
            leave.wait()

    other = threading.Thread(target=wait)
    with ended_by_sigterm():
        other.start()
        entered.wait()
    assert not catches()
    leave.set()
    other.join()
    assert catches()


def test_a_handler_of_python_stays():
    found: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: found.append(number))
    try:
        with ended_by_sigterm():
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert found == [signal.SIGTERM]

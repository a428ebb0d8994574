"""Servers that are processes of their own, which end when the one that started them does, however it ends."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO

from tests.support import hang
from tests.support.roots import ROOT

# Bytes of what a server says that are read: its start.
_SHOWN = 1 << 16
# Asks the kernel to kill this process when its parent's thread ends (PR_SET_PDEATHSIG is 1), and becomes the server.
# Done by the child itself: a `preexec_fn` would fork a process that has threads.
_BECOME = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


@contextlib.contextmanager
def serving(command: Sequence[str], ready: str, environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """Runs `command`; gives what the group of the pattern `ready` matches in its output, such as the port it has.

    Enter it in a thread that lives as long as the server shall.
    """
    with tempfile.TemporaryFile("w+b") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", _BECOME, str(os.getpid()), *command],
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            deadline = time.monotonic() + hang.SECONDS
            while (matched := re.search(ready, _said(output))) is None:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{' '.join(command)} does not serve; it said:\n{_said(output)}")
                time.sleep(0.02)
            yield matched[1]
        finally:
            process.kill()
            process.wait()


def _said(output: BinaryIO) -> str:
    return os.pread(output.fileno(), _SHOWN, 0).decode(errors="replace")

"""Which process is at the other end of a loopback connection; from Linux's /proc, so clients need not tell."""

from __future__ import annotations

import os
from pathlib import Path

# Processes found before: the next connection is most likely from one of them.
_known: list[int] = []


def process_at(port: int, server_port: int) -> int | None:
    """The process whose socket is bound to `port` of 127.0.0.1 and connected to `server_port`.

    None if it has closed the socket, or if it belongs to somebody else.
    """
    ends = [f"0100007F:{port:04X}", f"0100007F:{server_port:04X}"]
    for line in Path("/proc/net/tcp").read_text().splitlines():
        fields = line.split()
        if fields[1:3] == ends:
            return _owner(f"socket:[{fields[9]}]")
    return None


def _owner(name: str) -> int | None:
    others = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    for process in [*_known, *others]:
        if _has(process, name):
            if process not in _known:
                _known.append(process)
            return process
    return None


def _has(process: int, name: str) -> bool:
    try:
        with os.scandir(f"/proc/{process}/fd") as files:
            return any(_link(file.path) == name for file in files)
    except OSError:
        return False


def _link(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None

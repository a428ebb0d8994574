"""Which process is at the other end of a loopback connection; from Linux's /proc, so clients need not tell."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

# Processes found before: the next connection is most likely from one of them.
_known: list[int] = []


def client_of(connection: socket.socket) -> int | None:
    """The process that made a connection to this one over IPv4.

    None if it has closed its end, or if it belongs to somebody else.
    """
    try:
        ends = [_as_listed(*connection.getpeername()), _as_listed(*connection.getsockname())]
    except OSError:
        return None
    for line in Path("/proc/net/tcp").read_text().splitlines():
        fields = line.split()
        if fields[1:3] == ends:
            return _owner(f"socket:[{fields[9]}]")
    return None


def _as_listed(host: str, port: int) -> str:
    (address,) = struct.unpack("=I", socket.inet_aton(host))
    return f"{address:08X}:{port:04X}"


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

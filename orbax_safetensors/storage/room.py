"""How much room a file system has, and how much of it something takes."""

from __future__ import annotations

import contextlib
import os

_BLOCK_BYTES = 512  # of `st_blocks`, whatever the file system


def free_bytes(path: str) -> int | None:
    """Return the bytes that can be written where `path` is or will be; None if the file system does not say."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    try:
        facts = os.statvfs(path)
    except OSError:
        return None
    if not facts.f_blocks:  # of file systems that do not count, as some on a network
        return None
    # Only root may fill the blocks that a file system keeps in reserve.
    blocks = facts.f_bavail if os.geteuid() else facts.f_bfree
    return blocks * facts.f_frsize


def taken_bytes(directory: str) -> int:
    """Return the bytes on the disk of all files below a directory; 0 if there is no such directory."""
    total = 0
    for above, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):  # a file that is being deleted
                facts = os.lstat(os.path.join(above, name))
                # Holes of sparse files take nothing. Some file systems say of no file how many blocks it has.
                total += facts.st_blocks * _BLOCK_BYTES or facts.st_size
    return total

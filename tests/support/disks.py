"""File systems that are soon full, and files that are not in the page cache."""

import contextlib
import os
import subprocess
import time

import pytest


def chill(*paths):
    """Drop files from the page cache."""
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # what is not on the disk yet cannot be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def skip_if_refused(path):
    """Skip the test if the file system of `path` refuses direct reads, or cannot tell what is in the page cache."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
        with open(path, "rb") as file, contextlib.suppress(BlockingIOError):
            os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
    except OSError as error:
        pytest.skip(f"the file system has no direct reads, or no look into the page cache: {error}")


@contextlib.contextmanager
def file_system(directory, size):
    """Mount a new `directory` as a file system of a size ("64k"). The test is skipped where nothing may be mounted."""
    directory.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", directory], capture_output=True, text=True, check=False
    )
    if mount.returncode:
        pytest.skip(f"cannot mount a file system: {mount.stderr.strip()}")
    try:
        yield directory
    finally:
        _unmount(directory)


def _unmount(directory):
    # TensorStore closes files in threads of its own, perhaps a moment later.
    for _ in range(100):
        unmounted = subprocess.run(["umount", directory], capture_output=True, text=True, check=False)
        if not unmounted.returncode:
            return
        time.sleep(0.1)
    raise AssertionError(unmounted.stderr)

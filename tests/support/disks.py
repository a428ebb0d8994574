"""File systems that are soon full, and files that are not in the page cache."""

import contextlib
import ctypes
import mmap
import os
import subprocess
import time

import numpy as np
import pytest


def chill(*paths):
    """Drop files from the page cache: until they are gone, because the kernel keeps pages that it is at work on."""
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # what is not on the disk yet cannot be dropped
            for _ in range(100):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                if not _is_cached(file.fileno()):
                    break
                time.sleep(0.01)


def _is_cached(descriptor):
    """Return whether any page of a file is in the page cache. A read that only asks would bring pages there."""
    pages = np.frombuffer(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ), np.uint8)
    cached = np.zeros(-(-pages.size // mmap.PAGESIZE), np.uint8)
    size, vector = ctypes.c_size_t(pages.size), ctypes.c_void_p(cached.ctypes.data)
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(pages.ctypes.data), size, vector) == 0
    return bool(np.any(cached & 1))


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

"""File systems that are soon full."""

import contextlib
import subprocess
import time

import pytest


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

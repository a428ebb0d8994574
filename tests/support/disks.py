"""File systems that are soon full, and what the page cache says that it holds."""

import contextlib
import errno
import os
import subprocess
import time

import pytest


def page_cache(monkeypatch, full):
    """Make reads that must not wait find all bytes, or none: what the page cache holds, no test can know."""
    real = os.preadv

    def preadv(descriptor, buffers, offset, *flags):
        if flags != (os.RWF_NOWAIT,):
            return real(descriptor, buffers, offset, *flags)
        if full:
            return real(descriptor, buffers, offset)
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "preadv", preadv)


def skip_if_refused(path):
    """Skip the test if the file system of `path` refuses direct reads."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"the file system has no direct reads: {error}")


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


@contextlib.contextmanager
def broken_file(directory, content):
    """Yield a file of a new disk at `directory` that cannot read its second half. Skips the test if there are no disks.

    The disk is an image, which is cut behind the file system's back.
    """
    directory.mkdir()
    image = directory.with_suffix(".image")
    path = directory / "model.safetensors"
    image.write_bytes(b"")
    os.truncate(image, 4 * len(content))
    # One block group with its lists in front, so that the file lies in one piece behind them.
    for command in (
        ["mkfs.ext4", "-q", "-b", "4096", "-m", "0", "-O", "^has_journal", image],
        ["mount", "-o", "loop", image, directory],
    ):
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            pytest.skip(f"cannot make a disk: {error}")
        if done.returncode:
            pytest.skip(f"cannot make a disk: {done.stderr.strip()}")
    try:
        with open(path, "wb") as file:
            file.write(content)
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begin = image.read_bytes().index(content[: 2**16])
        os.truncate(image, begin + len(content) // 2)
        yield path
    finally:
        _unmount(directory)

"""File systems that are soon full, and what the page cache says that it holds."""

import contextlib
import errno
import os
import subprocess
import time

import pytest

from tests.support import hang


def page_cache(monkeypatch, full):
    """Make the page cache seem to have all bytes, or none: what it holds, no test can know."""
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


@contextlib.contextmanager
def broken_file(directory, content):
    """Yield a file of a new disk at `directory` that cannot read its second half. Skips the test if there are no disks.

    The disk is an image, which is cut behind the file system's back.
    """
    directory.mkdir()
    path, image = directory / "model.safetensors", directory.with_suffix(".image")
    with open(image, "wb") as file:
        file.truncate(2**24)
    mount = ("mount", "-o", "loop", image, directory)
    _tried("mkfs.ext4", "-q", "-b", "4096", image)
    _tried(*mount)
    try:
        path.write_bytes(content)
    finally:
        _unmount(directory)
    _tried(*mount)  # nothing of the file is in the page cache
    try:
        os.truncate(image, image.read_bytes().index(content[:4096]) + len(content) // 8192 * 4096)
        yield path
    finally:
        _unmount(directory)


def _tried(*command):
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        pytest.skip(f"cannot make a disk: {error}")
    if done.returncode:
        pytest.skip(f"cannot make a disk: {done.stderr.strip()}")


def _unmount(directory):
    # TensorStore closes files in threads of its own, perhaps a moment later.
    until = time.monotonic() + hang.SECONDS
    while subprocess.run(["umount", directory], capture_output=True, check=False).returncode:
        assert time.monotonic() < until, f"{directory} stays in use"
        time.sleep(0.1)

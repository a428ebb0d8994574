"""Local files as memory, from which the runtime of a device copies bytes straight to the device.

A file that is truncated while it is mapped ends the process (`SIGBUS`) as soon as somebody touches a page that is gone.
So a file is mapped only under a *read lease*: the kernel lets other programs that want to change the file wait until
the lease is given up, or for `/proc/sys/fs/lease-break-time`, 45 seconds by default.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import signal
from collections.abc import Callable

import numpy as np

from orbax_safetensors.errors import StorageError

_MADV_POPULATE_READ = 22  # of Linux since 5.14; Python does not know it

_CACHESTAT = 451  # the number of a system call, on every machine; of Linux since 6.5
_MAPPED_AT_ONCE = 2**16  # bytes that Linux maps around one that is touched, by default
_MOST_VECTORS = 1024  # that Linux takes in one call

# File systems of this machine, by the magic numbers of `statfs`. Elsewhere, a program on another machine can truncate a
# file in spite of a lease, and each page may be a request to a server.
_LOCAL_FILE_SYSTEMS = {
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0xF2F52010: "f2fs",
    0x2FC12FC1: "zfs",
    0xCA451A4E: "bcachefs",
    0x01021994: "tmpfs",
    0x794C7630: "overlayfs",
}

# What is in flight has to arrive within that time if another program wants to change the file.
_LEAST_BREAK_SECONDS = 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.syscall.argtypes = (ctypes.c_long, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
_libc.process_vm_readv.argtypes = (
    *(ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong),
    *(ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong),
)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_libc.fstatfs.argtypes = (ctypes.c_int, ctypes.c_void_p)


class LeasedMapping:
    """A whole local file as read-only memory, under a read lease.

    Nothing may touch a byte before `populate` was called for it, or after `close`.
    """

    _descriptor = -1

    def __init__(
        self, descriptor: int, path: str, read: Callable[[int, int], None], *, only_cached: bool = False
    ) -> None:
        """Map the file that is open at `descriptor`; `only_cached` if only what is in the page cache should be used.

        `read` reads a range, `(offset, nbytes)`, as usual, and raises its error if that fails. Raises `OSError` if the
        file cannot be leased or mapped, as many cannot: of another user, open for writing, on a network file system.
        """
        if _file_system(descriptor) not in _LOCAL_FILE_SYSTEMS or _break_seconds() < _LEAST_BREAK_SECONDS:
            raise OSError(errno.EOPNOTSUPP, "not a local file system, or leases do not last")
        self._path, self._read, self._only_cached = path, read, only_cached
        # A separate open file, because the lease belongs to it.
        self._descriptor = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            # The kernel reports a waiting writer by a signal: not by SIGIO, which would end the process.
            fcntl.fcntl(self._descriptor, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(self._descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            memory = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
            self.memory: np.ndarray = np.frombuffer(memory, np.uint8)
            self._populate(0, 1)
        except (OSError, ValueError) as error:
            self.close()
            raise OSError(getattr(error, "errno", errno.EINVAL), str(error)) from error

    @property
    def is_wanted(self) -> bool:
        """Return whether another program waits to change the file."""
        return fcntl.fcntl(self._descriptor, fcntl.F_GETLEASE) != fcntl.F_RDLCK

    def serves(self, begin: int, end: int) -> bool:
        """Return whether the bytes `[begin, end)` should be taken from here, rather than read."""
        # If the file was cut before it was leased, reading it says so.
        return end <= self.memory.nbytes and (not self._only_cached or self._seems_cached(begin, end))

    def populate(self, begin: int, end: int) -> None:
        """Bring the pages of the bytes `[begin, end)` in; `StorageError` if that fails."""
        if self._seems_cached(begin, end):
            self._touch(begin, end)
            if self._is_cached(begin, end):
                return
        try:
            self._populate(begin, end)
        except OSError:
            self._read(begin, end - begin)  # says what is wrong, or has brought the pages in
            try:
                self._populate(begin, end)
            except OSError as error:
                raise StorageError(
                    f"{self._path}: mapping {end - begin} bytes at offset {begin} failed: {error.strerror}"
                ) from error

    def _seems_cached(self, begin: int, end: int) -> bool:
        """Return whether the page cache has all pages of a range, or has failed to read them."""
        first = begin // mmap.PAGESIZE
        facts = (ctypes.c_uint64 * 5)()  # the first is the number of pages
        range_ = (ctypes.c_uint64 * 2)(begin, end - begin)
        if _libc.syscall(_CACHESTAT, self._descriptor, range_, facts, 0):
            return self._is_cached(begin, end)
        return facts[0] >= -(-end // mmap.PAGESIZE) - first

    def _touch(self, begin: int, end: int) -> None:
        """Let the kernel map cached pages, many at a time, in half the time of `_populate`.

        By a call that reads a byte of each stretch: it ends early at a page that cannot be read, and ends no process.
        """
        address = self.memory.ctypes.data
        bytes_ = np.arange(address + begin, address + end, _MAPPED_AT_ONCE, dtype=np.uint64)
        for stretch in (bytes_[at : at + _MOST_VECTORS] for at in range(0, len(bytes_), _MOST_VECTORS)):
            remote = np.stack((stretch, np.ones_like(stretch)), axis=1)
            sink = np.empty(len(stretch), np.uint8)
            local = np.array([sink.ctypes.data, sink.nbytes], np.uint64)
            _libc.process_vm_readv(os.getpid(), local.ctypes.data, 1, remote.ctypes.data, len(remote), 0)

    def _is_cached(self, begin: int, end: int) -> bool:
        """Return whether the page cache has the bytes of all pages of a range, which is quick if they are mapped."""
        begin -= begin % mmap.PAGESIZE
        pages = bytearray(-(-(end - begin) // mmap.PAGESIZE))
        vector = (ctypes.c_char * len(pages)).from_buffer(pages)
        failed = _libc.mincore(self.memory.ctypes.data + begin, end - begin, vector)
        return not failed and pages.count(1) == len(pages)

    def _populate(self, begin: int, end: int) -> None:
        begin -= begin % mmap.PAGESIZE
        if _libc.madvise(self.memory.ctypes.data + begin, end - begin, _MADV_POPULATE_READ):
            raise OSError(code := ctypes.get_errno(), os.strerror(code))

    def release(self, begin: int, end: int) -> None:
        """Take whole pages of the bytes `[begin, end)` out of this process's memory; they stay in the page cache.

        That takes as long as bringing them in, and for a whole file at once, nobody could do anything else meanwhile.
        """
        begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:
            _libc.madvise(self.memory.ctypes.data + begin, end - begin, mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Give up the lease. The memory goes with the last array over it."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            # Not by closing: the mapping keeps the open file.
            with contextlib.suppress(OSError):  # there is no lease
                fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            os.close(descriptor)

    def __del__(self) -> None:
        """Close the file if nobody has called `close`; the lease then ends with the last array over the memory."""
        if self._descriptor >= 0:
            os.close(self._descriptor)


def _break_seconds() -> int:
    """Return how long others that want to change a leased file wait; 0 if it is not known."""
    try:
        with open("/proc/sys/fs/lease-break-time") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0


def _file_system(descriptor: int) -> int:
    """Return the magic number of a file's file system; 0 if it is not known."""
    facts = ctypes.create_string_buffer(512)  # longer than `struct statfs`, which begins with it
    if _libc.fstatfs(descriptor, facts):
        return 0
    return ctypes.c_uint32.from_buffer(facts).value

"""Files on a local or mounted file system, read with `preadv`: without a shared position, a copy or a mapping."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import stat
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn, TypeVar

import numpy as np

from orbax_safetensors.errors import MissingError, StorageError
from orbax_safetensors.storage.hub_digests import downloaded_sha256
from orbax_safetensors.storage.paths import missing
from orbax_safetensors.storage.store import Cost, Stamp

# Two threads saturate memory if the page cache is warm; a cold disk needs more requests in flight. It reads 16 KiB in
# the time that a request takes. A pool of threads shares a large tensor in pieces of 16 MiB: below about 4 MiB the work
# per call begins to show, above 16 MiB threads wait for one another.
COST = Cost(
    request_seconds=2**-16,
    bytes_per_second=2**30,
    requests=min(16, 2 * (os.cpu_count() or 1)),
    max_request_bytes=16 * 2**20,
    held_in_flight=False,
)
_Buffers = TypeVar("_Buffers", Sequence[memoryview], np.ndarray)

# Linux refuses more buffers in one call.
_MAX_BUFFERS = 1024
# Python's own `os.preadv` takes longer to look at each of its buffers than the kernel to fill it, if it is short.
_preadv = ctypes.CDLL(None, use_errno=True).preadv
_preadv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
_preadv.restype = ctypes.c_ssize_t
_access = ctypes.CDLL(None, use_errno=True).access
# Errors of file systems that do not flush directories, such as some network and FUSE file systems.
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP)
# Linux has it, Python does not.
_SYNC_FILE_RANGE = getattr(ctypes.CDLL(None), "sync_file_range", None)
_SYNC_FILE_RANGE_WRITE = 2
# Many shorter writes may share a page, which would go to the disk as often.
_MIN_BEGIN_BYTES = 2**20


class LocalFile:
    """A local file that is open for reading; see `store.File`."""

    _descriptor = -1

    def __init__(self, path: str) -> None:
        """Open `path`; raise `StorageError` if it cannot be read or is not a regular file."""
        self.path = path
        try:
            # Without O_NONBLOCK, opening a pipe would wait for its writer.
            # An interrupt comes before this one call, or once the descriptor is kept.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
            vars(self).update(zip(["_descriptor"], map(os.open, [path], [flags]), strict=False))
        except (OSError, ValueError) as error:  # a ValueError if there is a NUL in the path
            is_gone = isinstance(error, FileNotFoundError) and os.path.islink(path)
            reason = missing(path) if is_gone else f"cannot be opened: {_reason(error)}"
            raise _error(error)(f"{path}: {reason}") from error
        try:
            self.stamp = self._stamp()
        except BaseException:
            self.close()
            raise

    def __del__(self) -> None:
        """Close the descriptor after an interrupt that has come before `close`."""
        if self._descriptor >= 0:
            self.close()

    def _stamp(self) -> Stamp:
        try:
            facts = os.fstat(self._descriptor)
        except OSError as error:  # of a network file system whose file is gone
            raise StorageError(f"{self.path}: its state cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(facts.st_mode):
            raise StorageError(f"{self.path}: is not a regular file")
        return _stamp_of(facts)

    def read(self, ranges: Iterable[tuple[int, Sequence[memoryview]]]) -> None:
        """Fill the buffers of each range in turn. Continues a short read; the file's end is an error."""
        for offset, buffers in ranges:
            _move_all(os.preadv, "reading", self._descriptor, self.path, offset, buffers, _nbytes, _after)

    def scatter(self, offset: int, runs: np.ndarray) -> bool:
        """Fill runs of memory in turn, and return True. Continues a short read."""
        _move_all(_read_runs, "reading", self._descriptor, self.path, offset, runs, _nbytes_of_runs, _runs_after)
        return True

    def fetch(self, offset: int, nbytes: int) -> None:
        """Return None: the kernel copies bytes to their destination."""

    def map(self) -> memoryview:
        """Return the file as read-only memory."""
        try:
            return memoryview(mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:
            raise StorageError(f"{self.path}: cannot be mapped into memory: {error}") from error

    def check(self, stamp: Stamp) -> None:
        """Raise `StorageError` if size, modification time or inode differ from those in `stamp`."""
        found = self._stamp()
        if found != stamp:
            raise StorageError(
                f"{self.path}: changed while it was in use: expected {stamp.nbytes} bytes {stamp.version}, found "
                f"{found.nbytes} bytes {found.version}"
            )

    def cancel(self) -> None:
        """Do nothing: a call to a file system cannot be interrupted."""

    def close(self) -> None:
        """Close the descriptor. Mappings stay valid: each has its separate descriptor."""
        _close(self)


def _move_all(
    call: Callable[[int, _Buffers, int], int],
    verb: str,
    descriptor: int,
    path: str,
    offset: int,
    buffers: _Buffers,
    nbytes: Callable[[_Buffers], int],
    after: Callable[[_Buffers, int], _Buffers],
) -> None:
    """Call `preadv` or `pwritev` until all bytes are moved: each call may move fewer.

    `nbytes` returns the size of buffers, and `after` what is left of them behind a number of bytes.
    """
    for first in range(0, len(buffers), _MAX_BUFFERS):
        here = buffers[first : first + _MAX_BUFFERS]
        missing = nbytes(here)
        while missing:
            try:
                count = call(descriptor, here, offset)
            except OSError as error:
                raise StorageError(
                    f"{path}: {verb} {missing} bytes at offset {offset} failed: {error.strerror}"
                ) from error
            if count == 0:
                raise StorageError(f"{path}: expected {missing} more bytes at offset {offset}, found the file's end")
            offset, missing = offset + count, missing - count
            if missing:
                here = after(here, count)


def _stamp_of(facts: os.stat_result) -> Stamp:
    return Stamp(facts.st_size, f"modified at {facts.st_mtime_ns} ns (inode {facts.st_ino})")


def _error(error: OSError | ValueError) -> type[StorageError]:
    return MissingError if isinstance(error, FileNotFoundError) else StorageError


def _reason(error: OSError | ValueError) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _nbytes(buffers: Sequence[memoryview]) -> int:
    return sum(buffer.nbytes for buffer in buffers)


def _after(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return the rest of `buffers` behind their first `count` bytes."""
    rest = []
    for buffer in buffers:
        if count < buffer.nbytes:
            rest.append(buffer[count:] if count else buffer)
        count = max(0, count - buffer.nbytes)
    return rest


def _read_runs(descriptor: int, runs: np.ndarray, offset: int) -> int:
    """Do for the runs of `LocalFile.scatter` what `os.preadv` does for buffers."""
    while (count := _preadv(descriptor, runs.ctypes.data, len(runs), offset)) < 0:
        if (code := ctypes.get_errno()) != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return int(count)


def _nbytes_of_runs(runs: np.ndarray) -> int:
    return int(runs[:, 1].sum())


def _runs_after(runs: np.ndarray, count: int) -> np.ndarray:
    """Return runs without their first `count` bytes, which are fewer than all."""
    ends = np.cumsum(runs[:, 1])
    first = int(np.searchsorted(ends, count, "right"))
    rest = runs[first:].copy()
    left = int(ends[first]) - count
    rest[0] = rest[0, 0] + rest[0, 1] - left, left
    return rest


class NewLocalFile:
    """A local file that is being written; see `store.NewFile`."""

    def __init__(self, path: str, nbytes: int | None = None, *, sync: bool = False) -> None:
        """Open `path`; create the file, with the mode that the umask leaves, if it does not exist.

        A file that has more than `nbytes` is cut there.
        With `sync`, bytes begin to go to the disk as they are written, so that the method `sync` has less to wait for.
        """
        self.path = path
        self._sync = sync
        # A file system lets one thread at a time write into a file. Others would wait for it at the price of a core.
        self._turn = threading.Lock()
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            if nbytes is not None and os.fstat(self._descriptor).st_size > nbytes:
                os.ftruncate(self._descriptor, nbytes)
        except OSError as error:
            raise StorageError(f"{path}: cannot be created: {error.strerror}") from error

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write `buffers` from `offset` on. Continues a short write."""
        with self._turn:
            _move_all(os.pwritev, "writing", self._descriptor, self.path, offset, buffers, _nbytes, _after)
        if self._sync:
            _begin_sync(self._descriptor, offset, _nbytes(buffers))

    def sync(self) -> None:
        """Flush the file to the disk."""
        _sync(self._descriptor, self.path)

    def cancel(self) -> None:
        """Do nothing, see `LocalFile.cancel`."""

    def close(self) -> None:
        """Close the descriptor. Some file systems report a failed write only now."""
        try:
            _close(self)
        except OSError as error:
            raise StorageError(f"{self.path}: closing failed: {error.strerror}") from error


def _close(file: LocalFile | NewLocalFile) -> None:
    # The number may soon be another file's, and a thread that an interrupt has left must not begin to write there.
    descriptor, file._descriptor = file._descriptor, -1
    os.close(descriptor)


def rename(path: str, new: str) -> None:
    """Rename a file, and replace a file of the new name."""
    try:
        os.replace(path, new)
    except OSError as error:
        raise StorageError(f"{path}: cannot be renamed to {new}: {error.strerror}") from error


def _begin_sync(descriptor: int, offset: int, nbytes: int) -> None:
    """Make the system begin to write a long range to the disk, if it can. What fails, it reports to `_sync`."""
    if _SYNC_FILE_RANGE is not None and nbytes >= _MIN_BEGIN_BYTES:
        _SYNC_FILE_RANGE(descriptor, ctypes.c_int64(offset), ctypes.c_int64(nbytes), _SYNC_FILE_RANGE_WRITE)


def _sync(descriptor: int, path: str) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise StorageError(f"{path}: flushing to the disk failed: {error.strerror}") from error


class LocalStore:
    """The file systems of this machine; see `store.Store`."""

    cost = COST
    is_local = True
    lists = True
    writes = True
    opened: type[LocalFile] = LocalFile

    def list(self, path: str) -> dict[str, None] | None:
        """Return the names in the directory `path`, sorted and without states; None if it is a file."""
        try:
            return dict.fromkeys(sorted(os.listdir(path)))
        except NotADirectoryError:
            return None
        except FileNotFoundError as error:
            raise MissingError(f"{path}: {missing(path)}") from error
        except (OSError, ValueError) as error:
            raise StorageError(f"{path}: cannot list the directory: {_reason(error)}") from error

    def open(self, path: str, stamp: Stamp | None = None) -> LocalFile:
        """Open the file `path` for reading; `StorageError` if it is not in the state of `stamp`."""
        file = self.opened(path)
        if stamp is not None:
            try:
                file.check(stamp)
            except BaseException:
                file.close()
                raise
        return file

    def find(self, path: str) -> LocalFile | None:
        """Return `open`, or None if nothing has that name."""
        return self.open(path) if os.path.lexists(path) else None

    def sha256(self, path: str) -> str | None:
        """Return the Hub's digest of a file that came from there, as far as the download left it."""
        return downloaded_sha256(path)

    def cancel(self) -> None:
        """Do nothing, see `LocalFile.cancel`."""

    def create(self, path: str, nbytes: int | None = None, requests: int = 1, *, sync: bool = False) -> NewLocalFile:
        """Open the file `path` for writing; create it if it does not exist."""
        return NewLocalFile(path, nbytes, sync=sync)

    def below(self, path: str) -> dict[str, Stamp]:
        """Return the states of all files in the directory `path` and in its subdirectories."""
        states = {}
        try:
            for at, _, names in os.walk(path, onerror=_raise):
                for file in (os.path.join(at, name) for name in names):
                    with contextlib.suppress(FileNotFoundError):  # another program has deleted it meanwhile
                        states[os.path.relpath(file, path)] = _stamp_of(os.lstat(file))
            return states
        except OSError as error:
            raise _error(error)(f"{path}: cannot list the directory: {_reason(error)}") from error

    def delete(self, path: str, names: Iterable[str]) -> None:
        """Delete files below the directory `path`, and subdirectories that they leave empty."""
        try:
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(path, name))
                    while (name := os.path.dirname(name)) and not os.listdir(os.path.join(path, name)):
                        os.rmdir(os.path.join(path, name))
        except OSError as error:
            raise StorageError(f"{error.filename or path}: cannot be deleted: {error.strerror}") from error

    def sync(self, path: str) -> None:
        """Flush the directory `path` to the disk, if it is readable and its file system flushes directories."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except PermissionError:
            return
        except OSError as error:
            raise StorageError(f"{path}: cannot be opened: {error.strerror}") from error
        try:
            _sync(descriptor, path)
        except StorageError as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno not in _NO_SYNC:
                raise
        finally:
            os.close(descriptor)


def _raise(error: OSError) -> NoReturn:
    raise error


def write_whole(path: str, text: str) -> None:
    """Write a small file of a file system, which appears as a whole and is on the disk when this returns."""
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.new", path)
    LocalStore().sync(os.path.dirname(path))


def make_directory(path: str) -> None:
    """Make a directory of a file system and its parents; their names are on the disk when this returns."""
    if not os.path.isdir(path):
        make_directory(os.path.dirname(path))
        os.makedirs(path, exist_ok=True)
        LocalStore().sync(os.path.dirname(path))


def missing_directories(path: str) -> list[str]:
    """Return which of a directory and its parents `make_directory` would make, the innermost first."""
    missing = []
    while not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    return missing


def check_makeable(path: str) -> None:
    """Raise `StorageError` if nothing can be made at an absolute path, such as a path below a file."""
    above = os.path.dirname(path)
    while not os.path.lexists(above):
        above = os.path.dirname(above)
    # With `/.` what is not a directory has an error, too. `os.access` would not say why.
    if _access(os.fsencode(f"{above}/."), os.W_OK | os.X_OK):
        raise StorageError(f"{path}: cannot be made: {above}: {os.strerror(ctypes.get_errno())}")

"""Files on a local or mounted file system, read with `preadv`: no shared position, no copy, no mapping unless asked."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence

from orbax_safetensors.errors import MissingError, StorageError
from orbax_safetensors.storage.store import Cost, Stamp

# Two threads saturate memory with a warm page cache; a cold disk wants more requests in flight than that. What it reads
# in the time that a request takes is 16 KiB. A pool of threads shares a large tensor in pieces of 16 MiB: below about
# 4 MiB the work per call begins to show, above these threads wait for one another.
COST = Cost(
    request_seconds=2**-16,
    bytes_per_second=2**30,
    requests=min(16, 2 * (os.cpu_count() or 1)),
    max_request_bytes=16 * 2**20,
    held_in_flight=False,
)
# Linux refuses more buffers in one call.
_MAX_BUFFERS = 1024
# What file systems say that do not flush directories, as some network and FUSE ones.
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP)


class LocalFile:
    """A local file that is open for reading; see `store.File`."""

    def __init__(self, path: str) -> None:
        """Opens `path`; raises `StorageError` where it cannot be read or is not a regular file."""
        self.path = path
        try:
            # Without O_NONBLOCK, opening a pipe would wait for its writer.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:  # a ValueError where there is a NUL in the path
            raise _error(error)(f"{path}: cannot be opened: {_reason(error)}") from error
        try:
            self.stamp = self._stamp()
        except BaseException:
            self.close()
            raise

    def _stamp(self) -> Stamp:
        facts = os.fstat(self._descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise StorageError(f"{self.path}: is not a regular file")
        return Stamp(facts.st_size, f"modified at {facts.st_mtime_ns} ns (inode {facts.st_ino})")

    def read(self, ranges: Iterable[tuple[int, Sequence[memoryview]]]) -> None:
        """Fills the buffers of one range after the other. A short read is continued; the file's end is an error."""
        for offset, buffers in ranges:
            _move_all(os.preadv, "reading", self._descriptor, self.path, offset, buffers)

    def map(self) -> memoryview:
        """The file as read-only memory."""
        try:
            return memoryview(mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:
            raise StorageError(f"{self.path}: cannot be mapped into memory: {error}") from error

    def check(self, stamp: Stamp) -> None:
        """Raises `StorageError` where size, modification time or inode differ from those in `stamp`."""
        found = self._stamp()
        if found != stamp:
            raise StorageError(
                f"{self.path}: changed while it was in use: expected {stamp.nbytes} bytes {stamp.version}, found "
                f"{found.nbytes} bytes {found.version}"
            )

    def cancel(self) -> None:
        """Nothing to do: a file system answers, or nothing can be done about it."""

    def close(self) -> None:
        """Closes the descriptor. Mappings stay, and each holds a descriptor of its own."""
        os.close(self._descriptor)


def _move_all(
    call: Callable[[int, Sequence[memoryview], int], int],
    verb: str,
    descriptor: int,
    path: str,
    offset: int,
    buffers: Sequence[memoryview],
) -> None:
    """`preadv` or `pwritev` for as often as it takes: either may move less than was asked for."""
    for first in range(0, len(buffers), _MAX_BUFFERS):
        here = buffers[first : first + _MAX_BUFFERS]
        missing = sum(buffer.nbytes for buffer in here)
        while missing:
            try:
                count = call(descriptor, here, offset)
            except OSError as error:
                raise StorageError(
                    f"{path}: {verb} {missing} bytes at offset {offset} failed: {error.strerror}"
                ) from error
            if count == 0:
                raise StorageError(f"{path}: expected {missing} more bytes at offset {offset}, found its end")
            offset, missing = offset + count, missing - count
            if missing:
                here = list(_after(here, count))


def _error(error: OSError | ValueError) -> type[StorageError]:
    return MissingError if isinstance(error, FileNotFoundError) else StorageError


def _reason(error: OSError | ValueError) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _after(buffers: Sequence[memoryview], count: int) -> Iterator[memoryview]:
    """What is left of `buffers` once their first `count` bytes are filled."""
    for buffer in buffers:
        if count < buffer.nbytes:
            yield buffer[count:] if count else buffer
        count = max(0, count - buffer.nbytes)


class NewLocalFile:
    """A local file that is being written; see `store.NewFile`."""

    def __init__(self, path: str) -> None:
        """Opens `path` and makes the file, with the mode that the umask leaves, where it is not there."""
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise StorageError(f"{path}: cannot be created: {error.strerror}") from error

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Writes `buffers` from `offset` on. A short write is continued."""
        _move_all(os.pwritev, "writing", self._descriptor, self.path, offset, buffers)

    def sync(self) -> None:
        """Flushes the file to the disk."""
        _sync(self._descriptor, self.path)

    def cancel(self) -> None:
        """Nothing to do, see `LocalFile.cancel`."""

    def close(self) -> None:
        """Closes the descriptor. Some file systems only now tell that a write failed."""
        try:
            os.close(self._descriptor)
        except OSError as error:
            raise StorageError(f"{self.path}: closing failed: {error.strerror}") from error


def rename(path: str, new: str) -> None:
    """Gives a file another name, in the place of a file that has it."""
    try:
        os.replace(path, new)
    except OSError as error:
        raise StorageError(f"{path}: cannot be renamed to {new}: {error.strerror}") from error


def _sync(descriptor: int, path: str) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise StorageError(f"{path}: flushing to the disk failed: {error.strerror}") from error


class LocalStore:
    """The file systems of this machine; see `store.Store`."""

    cost = COST
    maps = True
    lists = True
    whole = False
    writes = True

    def list(self, path: str) -> list[str] | None:
        """Names in the directory `path`, sorted; None where it is a file."""
        try:
            with os.scandir(path) as entries:
                return sorted(entry.name for entry in entries)
        except NotADirectoryError:
            return None
        except (OSError, ValueError) as error:
            raise _error(error)(f"{path}: cannot be listed: {_reason(error)}") from error

    def open(self, path: str, stamp: Stamp | None = None) -> LocalFile:
        """Opens the file `path` for reading, in the state of `stamp` where that is given."""
        file = LocalFile(path)
        if stamp is not None:
            try:
                file.check(stamp)
            except BaseException:
                file.close()
                raise
        return file

    def find(self, path: str) -> LocalFile | None:
        """`open`, or None where there is nothing of that name."""
        return self.open(path) if os.path.lexists(path) else None

    def cancel(self) -> None:
        """Nothing to do, see `LocalFile.cancel`."""

    def create(self, path: str, nbytes: int | None = None, requests: int = 1) -> NewLocalFile:
        """Opens the file `path` for writing, and makes it where it is not there."""
        return NewLocalFile(path)

    def make(self, path: str) -> None:
        """Makes the directory `path`, and those that it is in."""
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{path}: cannot be made: {error.strerror}") from error

    def delete(self, path: str) -> None:
        """Deletes all that is in the directory `path`, and leaves it there."""
        try:
            with os.scandir(path) as entries:
                for entry in list(entries):
                    if entry.is_dir(follow_symlinks=False):
                        shutil.rmtree(entry.path)
                    else:
                        os.unlink(entry.path)
        except OSError as error:
            raise StorageError(f"{error.filename or path}: cannot be deleted: {error.strerror}") from error

    def sync(self, path: str) -> None:
        """Flushes the directory `path` to the disk, where it may be read and its file system flushes directories."""
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


def check_makeable(path: str) -> None:
    """Raises `StorageError` where nothing can be made at an absolute path, as where it is below a file."""
    above = os.path.dirname(path)
    while not os.path.lexists(above):
        above = os.path.dirname(above)
    if not os.path.isdir(above):
        why = errno.ENOTDIR
    elif not os.access(above, os.W_OK | os.X_OK):
        why = errno.EACCES
    else:
        return
    raise StorageError(f"{path}: cannot be made: {above}: {os.strerror(why)}")

"""A lock that one program at a time holds, on this machine and on all machines that share a file system with locks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import weakref

from orbax_safetensors.errors import StorageError

logger = logging.getLogger(__name__)

# Errors of file systems without locks, such as some network and FUSE file systems.
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


class Lock:
    """A locked file. It exists as long as the lock is held; after a kill the file stays, but the lock is free."""

    def __init__(self, path: str, what: str) -> None:
        """Take the lock without waiting. The directory of `path` must exist; error messages begin with `what`.

        Raises `StorageError` if another program holds the lock, and `OSError` if the file cannot be made. On a file
        system without locks, always succeeds.
        """
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            try:
                _lock(descriptor, path, what)
                is_there = _is_at(descriptor, path)
            except BaseException:
                os.close(descriptor)
                raise
            if is_there:
                break
            os.close(descriptor)  # the last holder of the lock has deleted the file in the meantime
        self._release = weakref.finalize(self, _release, descriptor, path, os.getpid())
        self._release.atexit = False

    def release(self) -> None:
        """Release the lock and delete the file; further calls do nothing."""
        self._release()


def _lock(descriptor: int, path: str, what: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        raise StorageError(f"{what}: another save or conversion is writing here") from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.info("%s: cannot be locked: %s", path, error.strerror)


def _is_at(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _release(descriptor: int, path: str, process: int) -> None:
    try:
        # Under the lock, so that nobody locks a file that is about to go. A child has the descriptor, not the lock.
        if os.getpid() == process and _is_at(descriptor, path):
            with contextlib.suppress(OSError):  # a file that stays does no harm
                os.unlink(path)
    finally:
        os.close(descriptor)

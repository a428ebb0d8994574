"""A lock that one program at a time has, on this machine and on all that mount a file system which passes locks on."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import weakref

from orbax_safetensors.errors import StorageError

logger = logging.getLogger(__name__)

# What file systems say that have no locks, as some network and FUSE ones.
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


class Lock:
    """A file that is there as long as the lock is held, or after a kill, which gives the lock back."""

    def __init__(self, path: str, what: str) -> None:
        """Takes it without waiting; `what` it is of is what an error names. The directory of `path` must be there.

        Raises `StorageError` where another has it, and `OSError` where the file cannot be made. Where there are no
        locks it is taken always.
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
            os.close(descriptor)  # whoever had it has deleted it in the meantime
        self._release = weakref.finalize(self, _release, descriptor, path, os.getpid())
        self._release.atexit = False

    def release(self) -> None:
        """Lets others have it; the first time only."""
        self._release()


def _lock(descriptor: int, path: str, what: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        raise StorageError(f"{what}: another conversion is writing here") from error
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
        # While it is held, so that nobody takes a file that is about to go. A child has the descriptor, not the lock.
        if os.getpid() == process and _is_at(descriptor, path):
            with contextlib.suppress(OSError):  # a file that stays is in nobody's way
                os.unlink(path)
    finally:
        os.close(descriptor)

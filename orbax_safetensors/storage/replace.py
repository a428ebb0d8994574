"""A complete directory takes the place of another one, whose name is there at every moment, also after a kill.

Linux exchanges two names in one step. If the file system cannot (NFS, say), two renames take its place. If the process
is killed between them, the next reader or save restores the old name.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import shutil

from orbax_safetensors.errors import StorageError
from orbax_safetensors.storage.interrupts import plain_interrupts

logger = logging.getLogger(__name__)

# Linux has it, Python does not.
_RENAMEAT2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# Errors of kernels and file systems that do not exchange names.
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


def replace(new: str, path: str) -> None:
    """Give the directory `new` the name `path`, and what had that name, if anything, the name `new`.

    Both lie in one directory. Raises `StorageError`, with all as it was, if the file system refuses. An interrupt can
    leave what had the name where `remove_aside` deletes it.
    """
    try:
        if not os.path.lexists(path):
            os.rename(new, path)
            return
        try:
            _exchange(new, path)
        except OSError as error:
            if error.errno not in _NO_EXCHANGE:
                raise
            _rename_in_turn(new, path)
    except OSError as error:
        raise StorageError(f"{path}: cannot be replaced: {error.strerror}") from error


def recover(path: str) -> None:
    """Put back what a killed `replace` has left aside, if nothing has the name `path`. Several processes may call this.

    Raises `StorageError` if the file system refuses.
    """
    if "\0" in path or os.path.exists(path):
        return
    path = os.path.realpath(path)
    if not os.path.lexists(aside := _aside(path)):
        return
    try:
        os.rename(aside, path)
    except OSError as error:
        if not os.path.lexists(path):  # neither another reader nor the save itself was faster
            raise StorageError(f"{aside}: cannot be renamed to {path}: {error.strerror}") from error
    else:
        logger.warning("%s: was put back, after a save that replaced it was killed", path)


def remove(path: str) -> None:
    """Delete a directory, a link or a file that nobody needs any more; a warning if that fails."""
    try:
        with plain_interrupts():
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            elif os.path.lexists(path):
                os.unlink(path)
    except OSError as error:
        logger.warning("%s is not needed any more and cannot be deleted: %s", path, error)


def remove_aside(path: str) -> None:
    """Delete what `replace` has left aside if it was killed or interrupted when `path` was complete already."""
    if os.path.lexists(path):
        remove(_aside(path))


def _exchange(one: str, other: str) -> None:
    if _RENAMEAT2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if _RENAMEAT2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        raise OSError(code := ctypes.get_errno(), os.strerror(code))


def _rename_in_turn(new: str, path: str) -> None:
    aside = _aside(path)
    try:
        os.rename(path, aside)
        while True:
            try:
                os.rename(new, path)
                break
            except OSError:
                if os.path.lexists(aside):
                    raise
            os.rename(path, aside)  # again, because a reader has put it back
    except BaseException:
        if not os.path.lexists(path):
            os.rename(aside, path)
        raise
    try:
        os.rename(aside, new)
    except OSError:  # `new` has the name, and nobody needs the old directory
        remove(aside)


def _aside(path: str) -> str:
    """Return a name that neither Orbax nor a program that lists steps takes for a checkpoint, or for rubbish."""
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}.replaced")

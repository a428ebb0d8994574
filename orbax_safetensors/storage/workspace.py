"""`Workspace`: what is being written, from its beginning until it is there as a whole or given up.

A file system renames. There, what is unfinished lies beside its destination, which it becomes at the end, and a lock
keeps other runs away. An object store renames nothing. There, objects have their final names, the one that makes them a
whole is written last, and the run that began last wins. Both have a record of what was begun, by which a run resumes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from orbax_safetensors.errors import SafetensorsError, StorageError, TensorMismatchError
from orbax_safetensors.storage.interrupts import to_the_end
from orbax_safetensors.storage.local import LocalStore, check_makeable, make_directory, missing_directories
from orbax_safetensors.storage.room import free_bytes, taken_bytes

logger = logging.getLogger(__name__)

# Errors of file systems without locks, such as some network and FUSE file systems.
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


class Workspace:
    """The life cycle: `begin`; `check` at any time; `finish`, the one change that readers see; in any case `release`.

    One process calls these. Until `finish`, nobody can open what is written; what is unfinished stays for a later run.
    Subclasses say what lies there, by the methods that begin with an underscore.

    Attributes:
      destination: where it will be.
      path: where it is until then.
      locked: the file to lock; None on an object store.
      record: JSON by which a later run knows what was begun.
      nbytes: bytes that will lie there, without small files such as indexes and configs; 0 if only a bound is known.
    """

    destination: str
    path: str
    locked: str | None = None
    record: Mapping[str, Any]
    nbytes: int = 0
    # For messages: what is written, and from what else it may have been begun.
    kind = "conversion"
    other = "another source, or with other arguments"
    _lock: Lock | None = None
    _parents: Sequence[str] = ()
    _resumes = False
    _ours = False  # whether what lies in the place is known to be of such a run

    @cached_property
    def run(self) -> str:
        """Distinguishes this run from all others. Processes that write together set the same before they begin."""
        return secrets.token_hex(8)

    def begin(self, *, resume: bool) -> None:
        """Begin anew, or with `resume` go on with what was begun with the same `record`, if there is such.

        No other run can begin until `release`. Raises `StorageError` if another run is at work, something else is in
        the place or room is lacking, and `TensorMismatchError` if something else was begun there.
        """
        self._resumes = resume
        try:
            if self.locked is not None:
                if not os.path.lexists(self.locked):  # a killed run may have left it beside what is complete
                    Workspace.check_destination(self)  # before anything is made; subclasses look further under the lock
                self._parents = missing_directories(os.path.dirname(self.locked))
                make_directory(os.path.dirname(self.locked))
                self._lock = Lock(self.locked, self.destination)
            self.check_destination()
            self._check_room()
            self._ours = True
            begun = self._begun() if resume else None
            if begun is not None:
                self._check_same(begun)
                self._take_up()
            else:
                if resume and os.path.lexists(self.path):
                    logger.warning("%s has no record of what it was begun for and is deleted", self.path)
                self._make()
        except BaseException as error:
            self.release()
            if isinstance(error, OSError) and not isinstance(error, SafetensorsError):
                raise StorageError(f"{self.path}: cannot be made: {error}") from error
            raise

    def check_free(self) -> None:
        """Raise `StorageError` if the destination is there; write nothing."""
        if os.path.lexists(self.destination):
            raise self._exists()

    def _exists(self) -> StorageError:
        ended = "if a run of this with --resume has ended, this is its result; otherwise " if self._resumes else ""
        return StorageError(f"{self.destination}: already exists; {ended}choose another destination")

    def check_destination(self) -> None:
        """Raise the `StorageError` of `begin` if something is in the way, also of what is unfinished; write nothing."""
        if self.locked is not None:
            check_makeable(self.path)
        self.check_free()

    def _check_room(self) -> None:
        """Raise `StorageError` if the file system has too little room for `nbytes`. An object store has enough."""
        if not self.nbytes or self.locked is None or (free := free_bytes(self.path)) is None:
            return
        needed = self.nbytes - taken_bytes(self.path)  # what was begun is taken up or deleted
        if needed > free:
            raise StorageError(f"{self.destination}: needs {needed} bytes, and its file system has {free} bytes free")

    def check(self) -> None:
        """Raise `StorageError` if another run has begun since, as far as that can be seen."""

    def finish(self) -> None:
        """Make what is complete what readers find at the destination."""
        raise NotImplementedError

    def release(self) -> None:
        """Let other runs begin; delete the directories that `begin` made if nothing came into them."""
        with contextlib.ExitStack() as last_first:
            last_first.callback(to_the_end, self._remove_parents)
            if self._lock is not None:
                last_first.callback(self._lock.release)
                if self._ours:
                    last_first.callback(to_the_end, self._tidy)
            self._lock = None

    def _remove_parents(self) -> None:
        for path in self._parents:
            with contextlib.suppress(OSError):
                os.rmdir(path)

    def _tidy(self) -> None:
        """Delete what no run needs any more, while no other run can begin."""

    def _begun(self) -> dict[str, Any] | None:
        """Return the record of what was begun; None if there is nothing to take up."""
        raise NotImplementedError

    def _check_same(self, begun: Mapping[str, Any]) -> None:
        """Raise `TensorMismatchError` if something else was begun."""
        if begun != self.record:
            raise self._mismatch(f"it was begun from {self.other}")

    def _mismatch(self, why: str, remedy: str = "") -> TensorMismatchError:
        return TensorMismatchError(f"{self.path}: cannot be resumed: {why}; {remedy}begin anew without resume")

    def _take_up(self) -> None:
        """Prepare what was begun for this run."""
        raise NotImplementedError

    def _make(self) -> None:
        """Begin anew, in the place of anything that was begun before."""
        raise NotImplementedError

    # For file systems.

    def _check_directory(self, path: str) -> None:
        """Raise `StorageError` if something other than a directory has this path; follow no link."""
        if os.path.islink(path) or (os.path.lexists(path) and not os.path.isdir(path)):
            found = "link" if os.path.islink(path) else "file"
            raise StorageError(f"{path}: is a {found} and not an unfinished {self.kind}; move it away")

    def _not_ours(self, path: str, name: str) -> StorageError:
        return StorageError(f"{path}: is not an unfinished {self.kind}, it holds {name!r}; move it away")

    def _sync_name(self) -> None:
        """Return when the disk has the name of the destination, which is there."""
        try:
            LocalStore().sync(os.path.dirname(self.destination))
        except StorageError as error:
            raise StorageError(f"{self.destination}: is complete, but may not outlive a crash: {error}") from error


def already_running_error(destination: str) -> StorageError:
    """Return the error of a run that has not, or no longer, the place to which it writes."""
    return StorageError(f"{destination}: another save or conversion is writing here")


class Lock:
    """A lock that one program at a time holds, on this machine and on all that share a file system with locks.

    Its file exists as long as the lock is held; after a kill the file stays, but the lock is free.
    """

    def __init__(self, path: str, destination: str) -> None:
        """Take the lock of `destination` without waiting. The directory of `path` must exist.

        Raises `StorageError` if another program holds the lock, and `OSError` if the file cannot be made. On a file
        system without locks, always succeeds.
        """
        self._path = path
        try:
            while (descriptor := _locked(path, destination)) is None:
                pass  # the last holder of the lock has deleted the file in the meantime
        except BaseException:
            _discard(path)
            raise
        self._release = weakref.finalize(self, _release, descriptor, path, os.getpid())
        self._release.atexit = False

    def release(self) -> None:
        """Release the lock and delete the file; further calls do nothing."""
        try:
            self._release()
        except BaseException:
            _discard(self._path)
            raise


def _locked(path: str, destination: str) -> int | None:
    """Open and lock a file, which is made if it does not exist; None if it is deleted in the meantime."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        _lock(descriptor, path, destination)
        if _is_at(descriptor, path):
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _discard(path: str) -> None:
    """Delete the file of a lock that nobody holds, after an interrupt."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
        else:
            _release(descriptor, path, os.getpid())


def _lock(descriptor: int, path: str, destination: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        raise already_running_error(destination) from error
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

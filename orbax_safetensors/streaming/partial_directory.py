"""An unfinished directory: it lies beside its destination until all is there, with a record of the work done.

    <destination>.partial.lock                 held while a run is at work
    <destination>.partial/run-<id>/record.json digest of the source and the layout
    <destination>.partial/run-<id>/done-<p>    numbers of tiles that process p has written, a JSON list in each line
    <destination>.partial/run-<id>/files/      becomes the destination

Recorded tiles are on the disk: neither a kill of the processes nor a crash of the machine undoes them.

One run at a time has the directory. If the file system has no locks, a run that begins takes the directory away from
the run before: it renames `run-<id>`, to take it up or to delete it. A run whose directory has another name can neither
create a file, nor record a tile of a file that is new to it, nor give the directory its final name.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Sequence
from typing import TextIO

from orbax_safetensors.errors import StorageError, TensorMismatchError
from orbax_safetensors.orbax_store.operations import storage_errors
from orbax_safetensors.storage.local import LocalStore, check_makeable
from orbax_safetensors.storage.lock import Lock

logger = logging.getLogger(__name__)

_RUN, _RECORD, _DONE, _FILES = "run-", "record.json", "done-", "files"


class PartialDirectory:
    """One process calls `begin`, `check_complete` and `finish`; all processes call the other methods."""

    def __init__(self, destination: str, digest: str, run: str) -> None:
        """Touch nothing. `digest` identifies the content that is written, `run` this run."""
        self.destination = destination
        self.path = f"{self.destination}.partial"
        self._run_path = os.path.join(self.path, f"{_RUN}{run}")
        self.directory = os.path.join(self._run_path, _FILES)
        self._digest = digest
        self._store = LocalStore()
        self._lock: Lock | None = None
        self._done: TextIO | None = None

    def begin(self, *, resume: bool) -> None:
        """Make the directory and its parents, or with `resume` take up an unfinished one; no other run has it then.

        Raises `StorageError` if the destination is there, another run is at work, or something else is in the
        directory's place, and `TensorMismatchError` if another conversion was begun there.
        """
        try:
            with storage_errors(f"{self.path}: cannot be made", OSError):
                check_makeable(self.path)
                made = [os.path.dirname(self.path)]
                while not os.path.lexists(made[-1]):
                    made.append(os.path.dirname(made[-1]))
                if len(made) > 1:
                    os.makedirs(made[0], exist_ok=True)
                self._lock = Lock(f"{self.path}.lock", self.destination)
                self._check_free()
                self._check_place()
                if not self._take_over(resume=resume):
                    self._make()
                for path in (self.path, *made):
                    self._store.sync(path)
        except BaseException:
            self.release()
            raise

    def check_place(self) -> None:
        """Raise the `StorageError` of `begin` if something is in the way; touch nothing."""
        with storage_errors(f"{self.path}: cannot be made", OSError):
            check_makeable(self.path)
            self._check_free()
            self._check_place()

    def release(self) -> None:
        """Let other runs begin."""
        if self._lock is not None:
            self._lock.release()

    def _check_free(self) -> None:
        if os.path.lexists(self.destination):
            raise StorageError(f"{self.destination}: already exists; choose another destination")

    def _check_place(self) -> None:
        """Raise `StorageError` if the place holds a file that no unfinished directory has; follow no links."""
        _check_directory(self.path)
        for run in self._runs():
            _check_directory(run)
            _check_directory(os.path.join(run, _FILES))
            known = (_RECORD, f"{_RECORD}.new", _FILES)
            if other := [name for name in os.listdir(run) if name not in known and not name.startswith(_DONE)]:
                raise StorageError(f"{run}: is not an unfinished conversion, it holds {other[0]!r}; move it away")

    def _runs(self) -> list[str]:
        """Return the directories of runs: one, or several if runs began at once without locks."""
        if not os.path.lexists(self.path):
            return []
        names = sorted(os.listdir(self.path))
        if other := [name for name in names if not name.startswith(_RUN)]:
            raise StorageError(f"{self.path}: is not an unfinished conversion, it holds {other[0]!r}; move it away")
        return [os.path.join(self.path, name) for name in names]

    def _take_over(self, *, resume: bool) -> bool:
        """Take the directory away from all earlier runs; return whether this run takes one of them up."""
        taken = False
        for run in self._runs():
            if resume and not taken and self._is_begun(run):
                self._rename(run, self._run_path)
                taken = True
            else:
                self._delete(run)
        return taken

    def _is_begun(self, run: str) -> bool:
        """Return whether `run` can be taken up; raise `TensorMismatchError` if it is another conversion."""
        record = os.path.join(run, _RECORD)
        try:
            with open(record, encoding="utf-8") as file:
                begun = json.load(file)
        except FileNotFoundError:
            return False
        except ValueError as error:
            raise StorageError(f"{record}: is not JSON: {error}; begin anew without resume") from error
        if not isinstance(begun, dict):
            raise StorageError(f"{record}: expected a dict, found {begun!r:.80}; begin anew without resume")
        if begun != {"digest": self._digest}:
            raise TensorMismatchError(
                f"{self.path}: cannot be resumed: it was begun from another source, or with other "
                "arguments; begin anew without resume"
            )
        return os.path.isdir(os.path.join(run, _FILES))  # they may have become a destination, which was then moved

    def _delete(self, run: str) -> None:
        """Delete the directory of a run, its record first: a run without a record is not taken up."""
        old = f"{self._run_path}-old"
        self._rename(run, old)
        record = os.path.join(old, _RECORD)
        if os.path.lexists(record):
            os.unlink(record)
            self._store.sync(old)
        shutil.rmtree(old)

    def _make(self) -> None:
        os.makedirs(self.directory)
        record = os.path.join(self._run_path, _RECORD)
        with open(f"{record}.new", "w", encoding="utf-8") as file:
            json.dump({"digest": self._digest}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{record}.new", record)
        self._store.sync(self._run_path)

    def _rename(self, old: str, new: str) -> None:
        """Rename a directory; raise `StorageError` if another run has renamed it."""
        try:
            os.rename(old, new)
        except FileNotFoundError as error:
            raise self._taken() from error
        except OSError as error:
            raise StorageError(f"{new}: {error}") from error

    def _taken(self) -> StorageError:
        return StorageError(f"{self.destination}: another save or conversion is writing here")

    def check(self) -> None:
        """Raise `StorageError` if another run has taken over: sooner and clearer than the next write would."""
        if not os.path.isdir(self.directory):
            raise self._taken()

    def open(self, process: int) -> None:
        """Open the record of a process. All processes have done so before `done` is called.

        The record stays open, so that no tile that this run has written is recorded for another run.
        """
        self.check()
        path = os.path.join(self._run_path, f"{_DONE}{process}")
        try:
            self._done = open(path, "a", encoding="ascii")  # noqa: SIM115, open until `close`
            self._done.write("\n")  # the line before may have no end
        except OSError as error:
            raise StorageError(f"{path}: {error}") from error

    def done(self) -> set[int]:
        """Return the numbers of all tiles that any process has recorded."""
        done: set[int] = set()
        try:
            for entry in os.scandir(self._run_path):
                if entry.name.startswith(_DONE):
                    with open(entry.path, encoding="ascii", errors="replace") as file:
                        for line in file:
                            try:
                                done.update(json.loads(line))
                            except ValueError:  # a line that was being written, or was not on the disk
                                continue
        except OSError as error:
            raise StorageError(f"{self._run_path}: {error}") from error
        return done

    def add(self, numbers: Sequence[int]) -> None:
        """Record tiles that this process has written and that are on the disk."""
        assert self._done is not None
        try:
            self._done.write(f"{json.dumps(list(numbers))}\n")
            self._done.flush()
        except OSError as error:
            raise StorageError(f"{self._done.name}: {error}") from error

    def close(self) -> None:
        """Close the record and keep it."""
        if self._done is not None:
            done, self._done = self._done, None
            try:
                done.close()
            except OSError as error:
                raise StorageError(f"{done.name}: {error}") from error

    def check_complete(self, count: int) -> None:
        """Raise `StorageError` unless the disk has a record of all `count` tiles; all processes have closed theirs."""
        self.check()
        if lacking := set(range(count)) - self.done():
            raise StorageError(
                f"{self.path}: {len(lacking)} of {count} parts are not recorded as written; resume writes them"
            )

    def finish(self) -> None:
        """Give the directory, whose files are on the disk, its name; return when the disk has the name."""
        self.check()
        self._store.sync(self.directory)
        self._check_free()
        self._rename(self.directory, self.destination)
        try:
            shutil.rmtree(self.path)
        except OSError as error:
            logger.warning("%s is not needed any more and cannot be deleted: %s", self.path, error)
        try:
            self._store.sync(os.path.dirname(self.destination))
        except StorageError as error:
            raise StorageError(f"{self.destination}: is complete, but may not outlive a crash: {error}") from error


def _check_directory(path: str) -> None:
    if os.path.islink(path) or (os.path.lexists(path) and not os.path.isdir(path)):
        kind = "link" if os.path.islink(path) else "file"
        raise StorageError(f"{path}: is a {kind} and not an unfinished conversion; move it away")

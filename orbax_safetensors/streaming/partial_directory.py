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
import os
import shutil
from collections.abc import Sequence
from typing import Any, TextIO

from orbax_safetensors.errors import StorageError
from orbax_safetensors.format import strict_json
from orbax_safetensors.storage.local import LocalStore, write_whole
from orbax_safetensors.storage.replace import remove
from orbax_safetensors.storage.store import find_small
from orbax_safetensors.storage.workspace import Workspace, already_running_error

_RUN, _RECORD, _DONE, _FILES = "run-", "record.json", "done-", "files"
# The longest of these files has the number of each tile.
_MAX_RECORD_BYTES = 256 << 20


class PartialDirectory(Workspace):
    """One process calls the methods of `Workspace` and `check_complete`; all processes call the others."""

    def __init__(self, destination: str, digest: str, nbytes: int) -> None:
        """Touch nothing. `digest` identifies the content that is written, of `nbytes`."""
        self.destination = destination
        self.path = f"{self.destination}.partial"
        self.locked = f"{self.path}.lock"
        self.record, self.nbytes = {"digest": digest}, nbytes
        self._begun_run = ""  # the run of which this one takes up the files
        self._store = LocalStore()
        self._done: TextIO | None = None

    @property
    def _run_path(self) -> str:
        return os.path.join(self.path, f"{_RUN}{self.run}")

    @property
    def directory(self) -> str:
        """Where the files are until they become the destination."""
        return os.path.join(self._run_path, _FILES)

    def check_destination(self) -> None:
        """See `Workspace`. Links are not followed."""
        super().check_destination()
        self._check_directory(self.path)
        for run in self._runs():
            self._check_directory(run)
            self._check_directory(os.path.join(run, _FILES))
            known = (_RECORD, f"{_RECORD}.new", _FILES)
            if other := [name for name in os.listdir(run) if name not in known and not name.startswith(_DONE)]:
                raise self._not_ours(run, other[0])

    def _runs(self) -> list[str]:
        """Return the directories of runs: one, or several if runs began at once without locks."""
        if not os.path.lexists(self.path):
            return []
        names = sorted(os.listdir(self.path))
        if other := [name for name in names if not name.startswith(_RUN)]:
            raise self._not_ours(self.path, other[0])
        return [os.path.join(self.path, name) for name in names]

    def _begun(self) -> dict[str, Any] | None:
        for run in self._runs():
            # The files may have become a destination, which was then moved.
            if (record := _read(os.path.join(run, _RECORD))) is not None and os.path.isdir(os.path.join(run, _FILES)):
                self._begun_run = run
                return record
        return None

    def _take_up(self) -> None:
        for run in self._runs():
            if run == self._begun_run:
                self._rename(run, self._run_path)
            else:
                self._delete(run)
        self._sync_names()

    def _make(self) -> None:
        for run in self._runs():
            self._delete(run)
        os.makedirs(self.directory)
        write_whole(os.path.join(self._run_path, _RECORD), json.dumps(self.record))
        self._sync_names()

    def _sync_names(self) -> None:
        for path in (self.path, os.path.dirname(self.path)):
            self._store.sync(path)

    def _delete(self, run: str) -> None:
        """Delete the directory of a run, its record first: a run without a record is not taken up."""
        old = f"{self._run_path}-old"
        self._rename(run, old)
        record = os.path.join(old, _RECORD)
        if os.path.lexists(record):
            os.unlink(record)
            self._store.sync(old)
        shutil.rmtree(old)

    def _rename(self, old: str, new: str) -> None:
        """Rename a directory; raise `StorageError` if another run has renamed it."""
        try:
            os.rename(old, new)
        except FileNotFoundError as error:
            raise already_running_error(self.destination) from error
        except OSError as error:
            raise StorageError(f"{new}: {error}") from error

    def check(self) -> None:
        """See `Workspace`."""
        if not os.path.isdir(self.directory):
            raise already_running_error(self.destination)

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
            for name in os.listdir(self._run_path):
                if name.startswith(_DONE):
                    record = find_small(self._store, os.path.join(self._run_path, name), _MAX_RECORD_BYTES)
                    for line in (record or b"").splitlines():
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
        """See `Workspace`. The files are on the disk."""
        self.check()
        self._store.sync(self.directory)
        self.check_free()
        self._rename(self.directory, self.destination)
        self._sync_name()

    def _tidy(self) -> None:
        """See `Workspace`: the record of files that have become the destination."""
        if os.path.isdir(self._run_path) and not os.path.isdir(self.directory):
            remove(self.path)


def _read(path: str) -> dict[str, Any] | None:
    if (content := find_small(LocalStore(), path, _MAX_RECORD_BYTES)) is None:
        return None
    try:
        record = strict_json.loads(content)
    except ValueError as error:
        raise StorageError(f"{path}: is not JSON: {error}; begin anew without resume") from error
    if not isinstance(record, dict):
        raise StorageError(f"{path}: expected a dict, found {record!r:.80}; begin anew without resume")
    return record

"""A directory that is being written: beside its destination until all is there, with a record of what is done.

    <destination>.partial/record.json   what is written, and of what: a digest
    <destination>.partial/done-<p>      numbers of tiles that process p has written, a JSON list in each line
    <destination>.partial/files/        becomes the destination

What is recorded is on the disk: neither a kill of the processes nor a crash of the machine undoes it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Sequence
from typing import TextIO

from orbax_safetensors.errors import StorageError, TensorMismatchError
from orbax_safetensors.io.local import LocalStore

logger = logging.getLogger(__name__)

_RECORD, _DONE, _FILES = "record.json", "done-", "files"


class Draft:
    """`begin` and `finish` are called by one process, the others by all of them."""

    def __init__(self, destination: str, digest: str) -> None:
        """Touches nothing. `digest` tells what is written apart from all else."""
        self.destination = os.path.abspath(destination)
        self.path = f"{self.destination}.partial"
        self.directory = os.path.join(self.path, _FILES)
        self._digest = digest
        self._record = os.path.join(self.path, _RECORD)
        self._store = LocalStore()
        self._own: TextIO | None = None

    def check(self) -> None:
        """Raises the `StorageError` that `begin` without `resume` would raise; touches nothing."""
        self._check_free()
        self._check_place()
        self._check_own()

    def begin(self, *, resume: bool) -> None:
        """Makes the directory, and those that it is in, anew unless `resume` finds one.

        Raises `StorageError` where the destination is there, or something else in the place of the draft, and
        `TensorMismatchError` where another was begun.
        """
        self._check_free()
        try:
            self._check_place()
            if not (resume and self._is_begun()):
                self._delete()
                self._make()
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"{self.path}: cannot be made: {error}") from error

    def _check_free(self) -> None:
        if os.path.lexists(self.destination):
            raise StorageError(f"{self.destination}: already exists")

    def _check_place(self) -> None:
        """Raises `StorageError` where there is no directory; links are not followed, to wherever they lead."""
        for path in (self.path, self.directory):
            if os.path.islink(path) or (os.path.lexists(path) and not os.path.isdir(path)):
                kind = "link" if os.path.islink(path) else "file"
                raise StorageError(f"{path}: is a {kind} and no unfinished conversion; move it away")

    def _check_own(self) -> None:
        """Raises `StorageError` where something is there that no draft has."""
        own = (_RECORD, f"{_RECORD}.new", _FILES)
        there = os.listdir(self.path) if os.path.lexists(self.path) else []
        if other := [name for name in there if name not in own and not name.startswith(_DONE)]:
            raise StorageError(f"{self.path}: is no unfinished conversion, it holds {other[0]!r}; move it away")

    def _is_begun(self) -> bool:
        """Whether there is something that can be taken up."""
        try:
            with open(self._record, encoding="utf-8") as file:
                begun = json.load(file)
        except FileNotFoundError:
            return False
        except ValueError as error:
            raise StorageError(f"{self._record}: is not JSON: {error}; begin anew without resume") from error
        if not isinstance(begun, dict):
            raise StorageError(f"{self._record}: expected a dict, found {begun!r:.80}; begin anew without resume")
        if begun != {"digest": self._digest}:
            raise TensorMismatchError(
                f"{self.path}: cannot be taken up again: it was begun of another source, or with other "
                "arguments; begin anew without resume"
            )
        return os.path.isdir(self.directory)  # it may have become a destination, which was then moved

    def _delete(self) -> None:
        """Deletes what was begun, the record first: what has none is not taken up."""
        if not os.path.lexists(self.path):
            return
        self._check_own()
        if os.path.lexists(self._record):
            os.unlink(self._record)
            self._store.sync(self.path)
        shutil.rmtree(self.path)

    def _make(self) -> None:
        made = [self.path]
        while not os.path.isdir(above := os.path.dirname(made[-1])):
            made.append(above)
        os.makedirs(self.directory)
        with open(f"{self._record}.new", "w", encoding="utf-8") as file:
            json.dump({"digest": self._digest}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{self._record}.new", self._record)
        for path in (*made, above):
            self._store.sync(path)

    def done(self) -> set[int]:
        """The numbers of all tiles that any process has written before."""
        found: set[int] = set()
        try:
            for entry in os.scandir(self.path):
                if entry.name.startswith(_DONE):
                    with open(entry.path, encoding="ascii", errors="replace") as file:
                        for line in file:
                            try:
                                found.update(json.loads(line))
                            except ValueError:  # a line that was being written, or was not on the disk
                                continue
        except OSError as error:
            raise StorageError(f"{self.path}: {error}") from error
        return found

    def add(self, process: int, numbers: Sequence[int]) -> None:
        """Records tiles that a process has written, and that are on the disk."""
        path = os.path.join(self.path, f"{_DONE}{process}")
        try:
            if self._own is None:
                self._own = open(path, "a", encoding="ascii")  # noqa: SIM115
                self._own.write("\n")  # the line before may have no end
            self._own.write(f"{json.dumps(list(numbers))}\n")
            self._own.flush()
        except OSError as error:
            raise StorageError(f"{path}: {error}") from error

    def close(self) -> None:
        """Closes what is open; all stays as it is."""
        if self._own is not None:
            own, self._own = self._own, None
            try:
                own.close()
            except OSError as error:
                raise StorageError(f"{own.name}: {error}") from error

    def finish(self) -> None:
        """Gives the directory, whose files are on the disk, its name; returns when that is on the disk too."""
        self._store.sync(self.directory)
        self._check_free()
        try:
            os.rename(self.directory, self.destination)
        except OSError as error:
            raise StorageError(f"{self.destination}: {error}") from error
        try:
            shutil.rmtree(self.path)
        except OSError as error:
            logger.warning("%s is not needed any more and cannot be deleted: %s", self.path, error)
        try:
            self._store.sync(os.path.dirname(self.destination))
        except StorageError as error:
            raise StorageError(f"{self.destination}: is complete, but may not outlive a crash: {error}") from error

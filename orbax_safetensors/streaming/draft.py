"""A directory that is being written: beside its destination until all is there, with a record of what is done.

    <destination>.partial/record.json   what is written, and of what: a digest
    <destination>.partial/done-<p>      numbers of tiles that process p has written, a JSON list in each line
    <destination>.partial/files/        becomes the destination

The record says what a kill of the processes cannot undo, which is all that was written. It does not say what is on the
disk: after a crash of the machine, begin anew.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from typing import TextIO

from orbax_safetensors.errors import StorageError, TensorMismatchError

_RECORD, _DONE, _FILES = "record.json", "done-", "files"


class Draft:
    """`begin` and `finish` are called by one process, the others by all of them."""

    def __init__(self, destination: str, digest: str) -> None:
        """Touches nothing. `digest` tells what is written apart from all else."""
        self.destination = destination
        self.path = f"{destination}.partial"
        self.directory = os.path.join(self.path, _FILES)
        self._digest = digest
        self._own: TextIO | None = None

    def begin(self, *, resume: bool) -> None:
        """Makes the directory, anew unless `resume` finds one.

        Raises `StorageError` where the destination is there, and `TensorMismatchError` where something else was begun.
        """
        record = os.path.join(self.path, _RECORD)
        self._check_free()
        try:
            if resume and os.path.exists(record):
                with open(record, encoding="utf-8") as file:
                    begun = json.load(file)
                if begun != {"digest": self._digest}:
                    raise TensorMismatchError(
                        f"{self.path}: cannot be taken up again: it was begun of another source, or with other "
                        "arguments; begin anew without resume"
                    )
                return
            if os.path.lexists(self.path):
                self._check_own()
                shutil.rmtree(self.path)
            os.makedirs(self.directory)
            with open(f"{record}.new", "w", encoding="utf-8") as file:
                json.dump({"digest": self._digest}, file)
            os.replace(f"{record}.new", record)
        except (OSError, json.JSONDecodeError) as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"{self.path}: cannot be made: {error}") from error

    def _check_own(self) -> None:
        """Raises `StorageError` where something is there that no draft has: it may be the source."""
        names = os.listdir(self.path) if os.path.isdir(self.path) and not os.path.islink(self.path) else [self.path]
        own = (_RECORD, f"{_RECORD}.new", _FILES)
        if other := [name for name in names if name not in own and not name.startswith(_DONE)]:
            raise StorageError(f"{self.path}: is no unfinished conversion, it holds {other[0]!r}; move it away")

    def _check_free(self) -> None:
        if os.path.lexists(self.destination):
            raise StorageError(f"{self.destination}: already exists")

    def done(self) -> set[int]:
        """The numbers of all tiles that any process has written before."""
        found: set[int] = set()
        try:
            for entry in os.scandir(self.path):
                if entry.name.startswith(_DONE):
                    with open(entry.path, encoding="ascii") as file:
                        for line in file:
                            try:
                                found.update(json.loads(line))
                            except ValueError:  # a line that was being written
                                continue
        except OSError as error:
            raise StorageError(f"{self.path}: {error}") from error
        return found

    def add(self, process: int, numbers: Sequence[int]) -> None:
        """Records tiles that a process has written."""
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
            self._own.close()
            self._own = None

    def finish(self) -> None:
        """Gives the directory its name."""
        self._check_free()
        try:
            os.rename(self.directory, self.destination)
            shutil.rmtree(self.path)
        except OSError as error:
            raise StorageError(f"{self.destination}: {error}") from error

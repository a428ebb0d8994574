"""`Staging`: the directory in which a link is made until it is whole.

The directory is `<destination>.link`, or `.link` in the directory of the files if the index is to lie beside them. A
later run takes up from there the arrays that have to be made, which take long. All other files are written in a moment
and begun anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Collection
from typing import Any

from orbax_safetensors.errors import StorageError, TensorMismatchError
from orbax_safetensors.link.decide import MADE
from orbax_safetensors.link.request import LinkRequest
from orbax_safetensors.orbax_store.addressed_item import INDEX_NAMES, STEP_FILES
from orbax_safetensors.orbax_store.discovery import TREE_FILE
from orbax_safetensors.orbax_store.index_note import NOTE_FILE
from orbax_safetensors.orbax_store.ocdbt import DATA_DIRECTORY, MANIFEST
from orbax_safetensors.orbax_store.operations import storage_errors
from orbax_safetensors.storage.local import LocalStore, check_makeable
from orbax_safetensors.storage.lock import Lock
from orbax_safetensors.storage.store import write_small

# The record of the link that was begun, until the link is whole.
RECORD = ".link.json"
# The inodes, by name, of the files that move beside the safetensors files; it is there while they move.
_PLACED = ".placed.json"

# The names in a link's directory besides safetensors files, without `STEP_FILES`: a step of Orbax may have those.
NAMES = sorted([*INDEX_NAMES, DATA_DIRECTORY, MADE])


def check_names(directory: str, inside: Collection[str]) -> None:
    """Raise `StorageError` if names that a link writes are already `inside` the directory."""
    if not (in_the_way := [name for name in NAMES if name in inside]):
        return
    if NOTE_FILE in in_the_way:
        # No word of deleting: after a save by Orbax's handlers, leaves of Orbax's own are nowhere else.
        raise StorageError(
            f"{directory}: is already linked to Orbax, by a link or a save; link to another destination instead"
        )
    raise StorageError(f"{os.path.join(directory, in_the_way[0])}: already exists, and a link writes it; move it away")


class Staging:
    """The unfinished link. One process calls `begin`, `write`, `link_files` and `finish`."""

    def __init__(self, request: LinkRequest) -> None:
        """Touch nothing."""
        self.destination = request.destination
        self._in_source = request.in_source
        self.path = os.path.join(self.destination, ".link") if self._in_source else f"{self.destination}.link"
        self._hard = request.hard_links
        self._store = LocalStore()
        self._lock: Lock | None = None

    @property
    def made(self) -> str:
        """The directory of the arrays that have been made; it is there once all of them are."""
        return os.path.join(self.path, MADE)

    def has_made(self) -> bool:
        """Return whether all arrays that have to be made are there."""
        return os.path.isdir(self.made)

    def check_free(self) -> None:
        """Raise `StorageError` if something is in the way of the link."""
        check_makeable(self.path)
        if not self._in_source and os.path.lexists(self.destination):
            raise StorageError(f"{self.destination}: already exists; choose another destination")
        if self._in_source:
            check_names(self.destination, {*os.listdir(self.destination)} - {*self._placed()})

    def begin(self, record: dict[str, Any], *, resume: bool) -> None:
        """Make the directory anew, unless `resume` finds one that was begun with the same `record`.

        Raises `StorageError` if another process is at work or something else is in the place, and
        `TensorMismatchError` if another link was begun.
        """
        self.check_free()
        with storage_errors(f"{self.path}: cannot be made", OSError):
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            self._lock = Lock(f"{self.path}.lock", self.destination)
            self.check_free()  # the run that had the lock may have finished
            begun = self._begun()
            self._take_back()
            if begun is not None and resume:
                if begun != record:
                    raise TensorMismatchError(
                        f"{self.path}: was begun from other files or with other arguments; begin anew without resume"
                    )
            else:
                if os.path.lexists(self.path):
                    shutil.rmtree(self.path)
                os.mkdir(self.path)
                self.write(RECORD, json.dumps(record).encode())
            for entry in list(os.scandir(self.path)):
                if entry.name != RECORD and MADE not in entry.name:
                    shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)

    def _begun(self) -> dict[str, Any] | None:
        """Return the record of a link that was begun; None if there is no link, or an empty one."""
        if not os.path.lexists(self.path):
            return None
        with contextlib.suppress(OSError, ValueError), open(os.path.join(self.path, RECORD), "rb") as file:
            record = json.load(file)
            if isinstance(record, dict):
                return record
        with contextlib.suppress(NotADirectoryError):
            if set(os.listdir(self.path)) <= {RECORD}:
                return None
        raise StorageError(f"{self.path}: is not an unfinished link; move it away")

    def write(self, name: str, content: bytes) -> None:
        """Write a small file, which is on the disk when this returns."""
        path = os.path.join(self.path, name)
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        except OSError as error:
            raise StorageError(f"{path}: cannot be made: {error.strerror}") from error
        write_small(self._store, path, content)
        self._store.sync(os.path.dirname(path))

    def link_files(self, files: list[str]) -> None:
        """Link the files of another directory, by relative symbolic links or, with `hard_links`, by hard links."""
        above = os.path.realpath(os.path.dirname(self.destination))
        for file in files:
            link = os.path.join(self.path, os.path.basename(file))
            if not os.path.isfile(file):  # who opens a link to a pipe waits for ever
                raise StorageError(f"{file}: is not a regular file")
            try:
                if self._hard:
                    os.link(os.path.realpath(file), link)  # if `file` is a link, to its target
                else:
                    os.symlink(os.path.relpath(file, os.path.join(above, os.path.basename(self.destination))), link)
            except OSError as error:
                raise StorageError(f"{link}: cannot be made a link to {file}: {error.strerror}") from error

    def keep_data(self) -> None:
        """Delete the files that make the new arrays a separate checkpoint, and keep their database."""
        for name in os.listdir(self.made):
            path = os.path.join(self.made, name)
            if not os.path.isdir(path):
                if name != MANIFEST:
                    os.unlink(path)
            elif name != DATA_DIRECTORY and MANIFEST not in os.listdir(path):
                shutil.rmtree(path)

    def finish(self) -> None:
        """Give the link its place."""
        with storage_errors(f"{self.destination}: cannot be finished", OSError):
            if self._in_source:
                self._place()
                shutil.rmtree(self.path)
            else:
                self._store.sync(self.path)
                os.rename(self.path, self.destination)
                os.unlink(os.path.join(self.destination, RECORD))
            self._store.sync(os.path.dirname(self.destination))

    def _place(self) -> None:
        """Move all files of the link beside the safetensors files; the one that makes it a checkpoint of Orbax last."""
        there = set(os.listdir(self.destination))
        # A step that Orbax has finished keeps its files that say so.
        names = [
            name for name in os.listdir(self.path) if name != RECORD and not (name in STEP_FILES and name in there)
        ]
        names.sort(key=lambda name: (name == TREE_FILE, name))
        inodes = {name: os.lstat(os.path.join(self.path, name)).st_ino for name in names}
        self.write(_PLACED, json.dumps(inodes).encode())
        try:
            for name in names:
                if name == TREE_FILE:
                    self._store.sync(self.destination)
                os.rename(os.path.join(self.path, name), os.path.join(self.destination, name))
            self._store.sync(self.destination)
        except BaseException:
            self._take_back()
            raise

    def _placed(self) -> list[str]:
        """Return the names that an unfinished link has moved; the one that makes it a checkpoint of Orbax first."""
        try:
            with open(os.path.join(self.path, _PLACED), "rb") as file:
                inodes = json.load(file)
            there = {entry.name: entry.inode() for entry in os.scandir(self.destination)}
            placed = [name for name, inode in inodes.items() if there.get(name) == inode]
        except (OSError, ValueError, AttributeError):  # there are none, or the file is not yet written
            return []
        return sorted(placed, key=lambda name: name != TREE_FILE)

    def _take_back(self) -> None:
        for name in self._placed():
            os.rename(os.path.join(self.destination, name), os.path.join(self.path, name))

    def release(self) -> None:
        """Let other runs begin."""
        if self._lock is not None:
            self._lock.release()

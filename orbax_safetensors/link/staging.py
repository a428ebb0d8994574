"""`Staging`: the directory in which a link is made until it is whole.

It lies where the link will be, `<destination>.link`, or `.link` in the directory of the files if the index is to lie
beside them. What takes long, arrays that have to be made, is taken up again from there after a failure. All else is
written in a moment and begun anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from typing import Any

from orbax_safetensors.errors import StorageError, TensorMismatchError
from orbax_safetensors.link.decide import MADE
from orbax_safetensors.link.request import LinkRequest
from orbax_safetensors.orbax_store.addressed_item import INDEX_NAMES, STEP_FILES
from orbax_safetensors.orbax_store.discovery import TREE_FILE
from orbax_safetensors.orbax_store.ocdbt import DATA_DIRECTORY, MANIFEST
from orbax_safetensors.storage.local import LocalStore, check_makeable
from orbax_safetensors.storage.lock import Lock
from orbax_safetensors.storage.store import write_small

# Says which link was begun, until it is whole.
RECORD = ".link.json"
# What has been moved beside the files, by name its inode, from before the first is until all are.
_PLACED = ".placed.json"

# What a link's directory has besides files, except `STEP_FILES`, which a step of Orbax may have already.
NAMES = sorted([*INDEX_NAMES, DATA_DIRECTORY, MADE])


class Staging:
    """`begin`, `write`, `link_files` and `finish` are called by one process."""

    def __init__(self, request: LinkRequest) -> None:
        """Touches nothing."""
        self.destination = request.destination
        self._in_source = request.in_source
        self.path = os.path.join(self.destination, ".link") if self._in_source else f"{self.destination}.link"
        self._hard = request.hard_links
        self._store = LocalStore()
        self._lock: Lock | None = None

    @property
    def made(self) -> str:
        """The directory of what has been made, once all of it is."""
        return os.path.join(self.path, MADE)

    def has_made(self) -> bool:
        """Whether all that has to be made is there."""
        return os.path.isdir(self.made)

    def check_free(self) -> None:
        """Raises `StorageError` if something is in the way of the link."""
        check_makeable(self.path)
        if not self._in_source and os.path.lexists(self.destination):
            raise StorageError(f"{self.destination}: already exists")
        in_the_way = {*NAMES} & {*os.listdir(self.destination)} - {*self._placed()} if self._in_source else None
        if in_the_way:
            raise StorageError(
                f"{os.path.join(self.destination, min(in_the_way))}: already exists; a link writes {NAMES}"
            )

    def begin(self, record: dict[str, Any], *, resume: bool) -> None:
        """Makes the directory anew, unless `resume` finds one that was begun with the same `record`.

        Raises `StorageError` if another process is at work or something else is in the place, and
        `TensorMismatchError` if another link was begun.
        """
        self.check_free()
        try:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            self._lock = Lock(f"{self.path}.lock", self.destination)
            self.check_free()  # whoever had the lock may have finished
            begun = self._begun()
            self._take_back()
            if begun is not None and resume:
                if begun != record:
                    raise TensorMismatchError(
                        f"{self.path}: was begun of other files or with other arguments; begin anew without resume"
                    )
            else:
                if os.path.lexists(self.path):
                    shutil.rmtree(self.path)
                os.mkdir(self.path)
                self.write(RECORD, json.dumps(record).encode())
            for entry in list(os.scandir(self.path)):
                if entry.name != RECORD and MADE not in entry.name:
                    shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"{self.path}: cannot be made: {error}") from error

    def _begun(self) -> dict[str, Any] | None:
        """The record of a link that was begun, None if there is none, or none that holds anything."""
        if not os.path.lexists(self.path):
            return None
        with contextlib.suppress(OSError, ValueError), open(os.path.join(self.path, RECORD), "rb") as file:
            found = json.load(file)
            if isinstance(found, dict):
                return found
        with contextlib.suppress(NotADirectoryError):
            if set(os.listdir(self.path)) <= {RECORD}:
                return None
        raise StorageError(f"{self.path}: is not an unfinished link; move it away")

    def write(self, name: str, content: bytes) -> None:
        """Writes a small file, which is on the disk when this returns."""
        path = os.path.join(self.path, name)
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        except OSError as error:
            raise StorageError(f"{path}: cannot be made: {error.strerror}") from error
        write_small(self._store, path, content)
        self._store.sync(os.path.dirname(path))

    def link_files(self, files: list[str]) -> None:
        """Links the files of another directory, by relative symbolic links unless hard ones were asked for."""
        above = os.path.realpath(os.path.dirname(self.destination))
        for file in files:
            link = os.path.join(self.path, os.path.basename(file))
            try:
                if self._hard:
                    os.link(os.path.realpath(file), link)  # of a link to a file, that file
                else:
                    os.symlink(os.path.relpath(file, os.path.join(above, os.path.basename(self.destination))), link)
            except OSError as error:
                raise StorageError(f"{link}: cannot be made a link to {file}: {error.strerror}") from error

    def keep_data(self) -> None:
        """Deletes what makes the arrays that were made a checkpoint of their own, and keeps their database."""
        for name in os.listdir(self.made):
            path = os.path.join(self.made, name)
            if not os.path.isdir(path):
                if name != MANIFEST:
                    os.unlink(path)
            elif name != DATA_DIRECTORY and MANIFEST not in os.listdir(path):
                shutil.rmtree(path)

    def finish(self) -> None:
        """Gives the link its place."""
        try:
            if self._in_source:
                self._place()
                shutil.rmtree(self.path)
            else:
                self._store.sync(self.path)
                os.rename(self.path, self.destination)
                os.unlink(os.path.join(self.destination, RECORD))
            self._store.sync(os.path.dirname(self.destination))
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"{self.destination}: cannot be finished: {error}") from error

    def _place(self) -> None:
        """Moves all beside the files, and last what makes it a checkpoint of Orbax."""
        there = set(os.listdir(self.destination))
        # A step that Orbax has finished keeps what says so.
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
        """What of an unfinished link lies beside the files, and first what makes it a checkpoint of Orbax."""
        try:
            with open(os.path.join(self.path, _PLACED), "rb") as file:
                inodes = json.load(file)
            there = {entry.name: entry.inode() for entry in os.scandir(self.destination)}
            placed = [name for name, inode in inodes.items() if there.get(name) == inode]
        except (OSError, ValueError, AttributeError):  # none, or not yet written
            return []
        return sorted(placed, key=lambda name: name != TREE_FILE)

    def _take_back(self) -> None:
        for name in self._placed():
            os.rename(os.path.join(self.destination, name), os.path.join(self.path, name))

    def release(self) -> None:
        """Lets others begin."""
        if self._lock is not None:
            self._lock.release()

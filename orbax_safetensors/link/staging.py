"""Where a link is made until it is whole: `Staging` on a file system, `ObjectStaging` on an object store.

On a file system, that is `<destination>.link`, or `.link` in the directory of the files if the index is to lie beside
them. Objects cannot be renamed: there, a link is made in its final place, and the objects that make the index a
checkpoint of Orbax are written last, the tree and then the mark that the checkpoint is finished.

In both, a record says which link was begun. A later run takes up the arrays that have to be made, which take long. All
other files are written in a moment and begun anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from etils import epath

from orbax_safetensors.errors import StorageError, storage_errors
from orbax_safetensors.link.link_request import LinkRequest
from orbax_safetensors.orbax_store.directories import fresh, names, read_json, remove
from orbax_safetensors.orbax_store.discovery import FINISHED_FILE, TREE_FILE
from orbax_safetensors.orbax_store.index_note import NOTE_FILE
from orbax_safetensors.orbax_store.metadata import INDEX_NAMES, STEP_FILES
from orbax_safetensors.orbax_store.ocdbt import DATA_DIRECTORY, MANIFEST
from orbax_safetensors.storage.interrupts import to_the_end
from orbax_safetensors.storage.local import LocalStore
from orbax_safetensors.storage.replace import remove as remove_if_there
from orbax_safetensors.storage.store import write_small
from orbax_safetensors.storage.workspace import Workspace

# A subdirectory of a link: a separate OCDBT database of the arrays that had to be made.
MADE = "made"
# The record of the link that was begun, until the link is whole.
_RECORD = ".link.json"
# The inodes, by name, of the files that move beside the safetensors files; it is there while they move.
_MOVED = ".placed.json"

# The objects that make the index a checkpoint of Orbax, in the order in which they are written.
_LAST = (TREE_FILE, FINISHED_FILE)

# The names in a link's directory besides safetensors files, without `STEP_FILES`: a step of Orbax may have those.
_NAMES = sorted([*INDEX_NAMES, DATA_DIRECTORY, MADE])


def _check_names(directory: str, inside: Collection[str]) -> None:
    """Raise `StorageError` if names that a link writes are already `inside` the directory."""
    if not (in_the_way := [name for name in _NAMES if name in inside]):
        return
    if NOTE_FILE in in_the_way:
        # No word of deleting: after a save by Orbax's handlers, leaves of Orbax's own are nowhere else.
        raise StorageError(
            f"{directory}: is already linked to Orbax, by a link or a save; link to another destination instead"
        )
    raise StorageError(f"{os.path.join(directory, in_the_way[0])}: already exists, and a link writes it; move it away")


class _LinkWorkspace(Workspace):
    """What `Staging` and `ObjectStaging` have in common."""

    kind, other = "link", "other files or with other arguments"
    # Of the new arrays: their database, and on an object store the mark that all of them are there.
    _kept_of_made: tuple[str, ...] = (MANIFEST, DATA_DIRECTORY)

    def __init__(self, path: str, request: LinkRequest, digest: str) -> None:
        """Touch nothing. `digest` identifies the link."""
        self.path, self.destination, self.record = path, request.destination, {"digest": digest}
        # The arrays that have been made; on a file system, it is there once all of them are.
        self.made = os.path.join(path, MADE)

    def keep_data(self) -> None:
        """Delete the files that make the new arrays a separate checkpoint, and keep their database."""
        made = epath.Path(self.made)
        with storage_errors(self.made):
            for name in names(made):
                if name not in self._kept_of_made and not (made / name / MANIFEST).exists():
                    remove(made / name)


class Staging(_LinkWorkspace):
    """An unfinished link on a file system. One process calls the methods, except `has_made`."""

    def __init__(self, request: LinkRequest, digest: str) -> None:
        """Touch nothing. `digest` identifies the link."""
        self._in_source = request.in_source
        path = os.path.join(request.destination, ".link") if self._in_source else f"{request.destination}.link"
        super().__init__(path, request, digest)
        self.locked = f"{self.path}.lock"
        self._store = LocalStore()

    def has_made(self) -> bool:
        """Return whether all arrays that have to be made are there."""
        return os.path.isdir(self.made)

    def check_free(self) -> None:
        """See `Workspace`. Beside the files, only the names that a link writes have to be free."""
        if self._in_source:
            _check_names(self.destination, {*os.listdir(self.destination)} - {*self._moved()})
        else:
            super().check_free()

    def check_destination(self) -> None:
        """See `Workspace`."""
        super().check_destination()
        self._check_directory(self.path)
        inside = os.listdir(self.path) if os.path.isdir(self.path) else []
        if (other := sorted({*inside} - {_RECORD})) and self._read() is None:
            raise self._not_ours(self.path, other[0])

    def _read(self) -> dict[str, Any] | None:
        """Return the record of a link that was begun; None if there is none."""
        record = self._json(_RECORD)
        return record if isinstance(record, dict) else None

    def _json(self, name: str) -> Any:
        """Return what a record says; None if there is none, or it is not yet written."""
        with contextlib.suppress(ValueError):
            return read_json(epath.Path(self.path) / name)
        return None

    def _begun(self) -> dict[str, Any] | None:
        self._take_back()
        return self._read()

    def _take_up(self) -> None:
        """Keep the arrays that have been made."""
        for entry in list(os.scandir(self.path)):
            if entry.name != _RECORD and MADE not in entry.name:
                shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)

    def _make(self) -> None:
        self._take_back()
        if os.path.lexists(self.path):
            shutil.rmtree(self.path)
        os.mkdir(self.path)
        self.write(_RECORD, json.dumps(self.record).encode())

    def write(self, name: str, content: bytes) -> None:
        """Write a small file, which is on the disk when this returns."""
        path = os.path.join(self.path, name)
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        except OSError as error:
            raise StorageError(f"{path}: cannot be made: {error.strerror}") from error
        write_small(self._store, path, content)
        self._store.sync(os.path.dirname(path))

    def finish(self) -> None:
        """See `Workspace`."""
        with storage_errors(f"{self.destination}: cannot be finished", OSError):
            if self._in_source:
                self._move()
                to_the_end(partial(remove_if_there, self.path))
            else:
                self._store.sync(self.path)
                os.rename(self.path, self.destination)
                os.unlink(os.path.join(self.destination, _RECORD))
        self._sync_name()

    def _tidy(self) -> None:
        """See `Workspace`: the record in the finished link, if an interrupt has left it there."""
        remove_if_there(os.path.join(self.destination, _RECORD))

    def _move(self) -> None:
        """Move all files of the link beside the safetensors files; the one that makes it a checkpoint of Orbax last."""
        there = set(os.listdir(self.destination))
        # A step that Orbax has finished keeps its files that say so.
        names = [
            name for name in os.listdir(self.path) if name != _RECORD and not (name in STEP_FILES and name in there)
        ]
        names.sort(key=lambda name: (name == TREE_FILE, name))
        inodes = {name: os.lstat(os.path.join(self.path, name)).st_ino for name in names}
        self.write(_MOVED, json.dumps(inodes).encode())
        try:
            for name in names:
                if name == TREE_FILE:
                    self._store.sync(self.destination)
                os.rename(os.path.join(self.path, name), os.path.join(self.destination, name))
            self._store.sync(self.destination)
        except BaseException:
            self._take_back()
            raise

    def _moved(self) -> list[str]:
        """Return the names that an unfinished link has moved; the one that makes it a checkpoint of Orbax first."""
        inodes = self._json(_MOVED)
        if not isinstance(inodes, dict):
            return []
        there = {entry.name: entry.inode() for entry in os.scandir(self.destination)}
        moved = [name for name, inode in inodes.items() if there.get(name) == inode]
        return sorted(moved, key=lambda name: name != TREE_FILE)

    def _take_back(self) -> None:
        for name in self._moved():
            os.rename(os.path.join(self.destination, name), os.path.join(self.path, name))


class ObjectStaging(_LinkWorkspace):
    """An unfinished link on an object store."""

    _kept_of_made = (MANIFEST, DATA_DIRECTORY, FINISHED_FILE)

    def __init__(self, request: LinkRequest, digest: str) -> None:
        """Touch nothing. `digest` identifies the link."""
        super().__init__(request.destination, request, digest)
        self._directory = epath.Path(self.path)
        self._record_path = self._directory / _RECORD
        # Files of a step that Orbax has finished: they stay.
        self._kept: list[str] = []
        self._last: dict[str, bytes] = {}

    def has_made(self) -> bool:
        """Return whether all arrays that have to be made are there."""
        with storage_errors(self.made):
            return FINISHED_FILE in names(epath.Path(self.made))

    def check_destination(self) -> None:
        """See `Workspace`."""
        with storage_errors(self.path):
            inside = names(self._directory)
        if _RECORD not in inside:
            _check_names(self.path, inside)
        self._read()

    def check(self) -> None:
        """See `Workspace`."""
        if (self._read() or {}).get("run") != self.run:
            raise StorageError(f"{self.path}: another process is writing a link here")

    def _begun(self) -> dict[str, Any] | None:
        return (self._read() or {}).get("begun")

    def _take_up(self) -> None:
        """Keep the arrays that have been made."""
        self._clear({MADE})

    def _make(self) -> None:
        if (begun := self._read()) is not None:
            self._kept = begun["kept"]
            self._note(None)  # a link that is deleted in part must not be resumed
        self._clear(set())

    def _clear(self, kept: set[str]) -> None:
        """Delete the files of an unfinished link except those that are kept, and begin this one."""
        with storage_errors(self.path):
            inside = names(self._directory)
            if (begun := self._read()) is None:
                self._kept = [name for name in STEP_FILES if name in inside]
            else:
                self._kept = begun["kept"]
                left = ({*_NAMES, *STEP_FILES} - {*self._kept} - kept) & {*inside}
                for name in sorted(left, key=lambda name: name != TREE_FILE):
                    remove(self._directory / name)
            self._note(self.record)

    def _note(self, begun: Mapping[str, Any] | None) -> None:
        with storage_errors(str(self._record_path)):
            self._record_path.write_text(json.dumps({"begun": begun, "kept": self._kept, "run": self.run}))

    def _read(self) -> dict[str, Any] | None:
        """Return the record of the place; None if there is none."""
        fresh(self.path)
        record = read_json(self._record_path)
        if record is None or (isinstance(record, dict) and record.keys() == {"begun", "kept", "run"}):
            return record
        raise StorageError(f"{self._record_path}: is not of an unfinished link; move it away")

    def write(self, name: str, content: bytes) -> None:
        """Write a small object; those that make the link a checkpoint of Orbax wait until `finish`."""
        if name in _LAST:
            self._last[name] = content
        elif name not in self._kept:
            with storage_errors(str(self._directory / name)):
                (self._directory / name).write_bytes(content)

    def finish(self) -> None:
        """See `Workspace`."""
        self.check()
        with storage_errors(self.path):
            for name in _LAST:
                if name not in self._kept:
                    (self._directory / name).write_bytes(self._last[name])
            self._record_path.unlink()
            fresh(self.path)

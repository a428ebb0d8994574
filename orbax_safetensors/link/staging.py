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
from orbax_safetensors.io.local import LocalStore, check_makeable
from orbax_safetensors.io.lock import Lock
from orbax_safetensors.io.store import write_small
from orbax_safetensors.link.decide import MADE
from orbax_safetensors.link.request import LinkRequest
from orbax_safetensors.orbax_store.finding import SHARDING_FILE, TREE_FILE
from orbax_safetensors.orbax_store.linked_item import ARRAYS_FILE, STEP_FILES
from orbax_safetensors.orbax_store.ocdbt import DATA_DIRECTORY, MANIFEST
from orbax_safetensors.orbax_store.trust import TRUST_FILE

_RECORD = "link.json"

# What a link consists of besides files.
FILES = [TREE_FILE, SHARDING_FILE, ARRAYS_FILE, MANIFEST, DATA_DIRECTORY, TRUST_FILE, MADE]


class Staging:
    """`begin`, `write`, `link_files` and `finish` are called by one process."""

    def __init__(self, request: LinkRequest) -> None:
        """Touches nothing."""
        self.destination = request.destination
        self._beside = request.beside
        self.path = os.path.join(self.destination, ".link") if self._beside else f"{self.destination}.link"
        self._hard = request.hard_links
        self._store = LocalStore()
        self._lock: Lock | None = None

    @property
    def made(self) -> str:
        """The directory of what has been made, once all of it is."""
        return os.path.join(self.path, MADE)

    def check_free(self, names: list[str]) -> None:
        """Raises `StorageError` if something is in the way of the link, whose files are called `names`."""
        check_makeable(self.path)
        if not self._beside and os.path.lexists(self.destination):
            raise StorageError(f"{self.destination}: already exists")
        if self._beside:
            tops = {name.split("/")[0] for name in names}
            if present := sorted(tops & set(os.listdir(self.destination))):
                raise StorageError(
                    f"{os.path.join(self.destination, present[0])}: already exists; a link writes {sorted(tops)}"
                )

    def begin(self, record: dict[str, Any], *, resume: bool) -> None:
        """Makes the directory anew, unless `resume` finds one that was begun with the same `record`.

        Raises `StorageError` if another process is at work or something else is in the place, and
        `TensorMismatchError` if another link was begun.
        """
        try:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            self._lock = Lock(f"{self.path}.lock", self.destination)
            begun = self._begun()
            if begun is not None and resume:
                if begun != record:
                    raise TensorMismatchError(
                        f"{self.path}: was begun of other files or with other arguments; begin anew without resume"
                    )
            else:
                if begun is not None:
                    shutil.rmtree(self.path)
                os.mkdir(self.path)
                self.write(_RECORD, json.dumps(record).encode())
            for entry in list(os.scandir(self.path)):
                if entry.name != _RECORD and MADE not in entry.name:
                    shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"{self.path}: cannot be made: {error}") from error

    def _begun(self) -> dict[str, Any] | None:
        """The record of a link that was begun, None if there is none."""
        if not os.path.lexists(self.path):
            return None
        with contextlib.suppress(OSError, ValueError), open(os.path.join(self.path, _RECORD), "rb") as file:
            found = json.load(file)
            if isinstance(found, dict):
                return found
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
                    os.link(file, link)
                else:
                    os.symlink(os.path.relpath(file, os.path.join(above, os.path.basename(self.destination))), link)
            except OSError as error:
                raise StorageError(f"{link}: cannot be made a link to {file}: {error.strerror}") from error

    def keep_data(self) -> None:
        """Deletes what makes the arrays that were made a checkpoint of their own, and keeps their data."""
        for name in os.listdir(self.made):
            path = os.path.join(self.made, name)
            if not os.path.isdir(path):
                os.unlink(path)
            elif name != DATA_DIRECTORY and MANIFEST not in os.listdir(path):
                shutil.rmtree(path)

    def finish(self) -> None:
        """Gives the link its place. Beside files, what makes it a checkpoint of Orbax comes last."""
        os.unlink(os.path.join(self.path, _RECORD))
        names = sorted(os.listdir(self.path), key=lambda name: (name == TREE_FILE, name))
        try:
            if self._beside:
                for name in names:
                    if name in STEP_FILES and os.path.lexists(os.path.join(self.destination, name)):
                        os.unlink(os.path.join(self.path, name))  # Orbax has finished what is there
                        continue
                    os.rename(os.path.join(self.path, name), os.path.join(self.destination, name))
                os.rmdir(self.path)
                self._store.sync(self.destination)
            else:
                self._store.sync(self.path)
                os.rename(self.path, self.destination)
                self._store.sync(os.path.dirname(self.destination))
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"{self.destination}: cannot be finished: {error}") from error

    def release(self) -> None:
        """Lets others begin."""
        if self._lock is not None:
            self._lock.release()

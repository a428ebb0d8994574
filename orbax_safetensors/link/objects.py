"""`ObjectStaging`: a link that is made in its final place, beside the objects of a `gs://` directory.

Objects cannot be renamed. So the objects that make the index a checkpoint of Orbax are written last: the tree, then the
mark that the checkpoint is finished. Until then a record beside the objects says which link was begun, so that a later
run can go on with the arrays that have to be made after a failure.
"""

from __future__ import annotations

import json
import secrets
from typing import Any

from etils import epath

from orbax_safetensors.errors import StorageError, TensorMismatchError
from orbax_safetensors.link.decide import MADE
from orbax_safetensors.link.request import LinkRequest
from orbax_safetensors.link.staging import NAMES, RECORD, Staging, check_names
from orbax_safetensors.orbax_store.addressed_item import STEP_FILES
from orbax_safetensors.orbax_store.directories import fresh, is_on_gcs, names, read_json, remove
from orbax_safetensors.orbax_store.discovery import FINISHED_FILE, TREE_FILE
from orbax_safetensors.orbax_store.ocdbt import DATA_DIRECTORY, MANIFEST
from orbax_safetensors.orbax_store.operations import storage_errors

_LAST = (TREE_FILE, FINISHED_FILE)


class ObjectStaging:
    """A `Staging` on an object store: one process calls `begin`, `write` and `finish`."""

    def __init__(self, request: LinkRequest) -> None:
        """Touch nothing."""
        self.path = self.destination = request.destination
        self._directory = epath.Path(self.path)
        self._made = self._directory / MADE
        self._record = self._directory / RECORD
        self._run = secrets.token_hex(8)
        # Files of a step that Orbax has finished: they stay.
        self._kept: list[str] = []
        self._last: dict[str, bytes] = {}

    @property
    def made(self) -> str:
        """The directory of the arrays that have been made."""
        return str(self._made)

    def has_made(self) -> bool:
        """Return whether all arrays that have to be made are there."""
        with storage_errors(self.made):
            return FINISHED_FILE in names(self._made)

    def check_free(self) -> None:
        """Raise `StorageError` if something is in the way of the link."""
        with storage_errors(self.path):
            inside = names(self._directory)
        if RECORD not in inside:
            check_names(self.path, inside)

    def begin(self, record: dict[str, Any], *, resume: bool) -> None:
        """Delete the files of an unfinished link, except its arrays if `resume` goes on with the same `record`.

        Raises `StorageError` if something is in the way, and `TensorMismatchError` if another link was begun.
        """
        self.check_free()
        begun = self._begun()
        going_on = begun is not None and begun["begun"] is not None and resume
        if begun is not None and going_on and begun["begun"] != record:
            raise TensorMismatchError(
                f"{self.path}: was begun from other files or with other arguments; begin anew without resume"
            )
        with storage_errors(self.path):
            inside = names(self._directory)
            if begun is None:
                self._kept = [name for name in STEP_FILES if name in inside]
            else:
                self._kept = begun["kept"]
                if not going_on:
                    self._note(None)  # a link that is deleted in part must not be resumed
                kept = {*self._kept, MADE} if going_on else {*self._kept}
                left = ({*NAMES, *STEP_FILES} - kept) & {*inside}
                for name in sorted(left, key=lambda name: name != TREE_FILE):
                    remove(self._directory / name)
            self._note(record)

    def _note(self, begun: dict[str, Any] | None) -> None:
        self._record.write_text(json.dumps({"begun": begun, "kept": self._kept, "run": self._run}))

    def _begun(self) -> dict[str, Any] | None:
        """Return the record of a link that was begun; None if there is none."""
        fresh(self.path)
        record = read_json(self._record)
        if record is None or (isinstance(record, dict) and record.keys() == {"begun", "kept", "run"}):
            return record
        raise StorageError(f"{self._record}: is not of an unfinished link; move it away")

    def write(self, name: str, content: bytes) -> None:
        """Write a small object; those that make the link a checkpoint of Orbax wait until `finish`."""
        if name in _LAST:
            self._last[name] = content
        elif name not in self._kept:
            with storage_errors(str(self._directory / name)):
                (self._directory / name).write_bytes(content)

    def keep_data(self) -> None:
        """Delete the files that make the new arrays a separate checkpoint, and keep their database.

        The mark that all of them are there also stays: a link that is resumed looks for it.
        """
        with storage_errors(self.made):
            for name in names(self._made):
                if name not in (MANIFEST, DATA_DIRECTORY, FINISHED_FILE) and MANIFEST not in names(self._made / name):
                    remove(self._made / name)

    def finish(self) -> None:
        """Make the directory a checkpoint of Orbax."""
        if (self._begun() or {}).get("run") != self._run:
            raise StorageError(f"{self.path}: another process is writing a link here")
        with storage_errors(self.path):
            for name in _LAST:
                if name not in self._kept:
                    (self._directory / name).write_bytes(self._last[name])
            self._record.unlink()
            fresh(self.path)

    def release(self) -> None:
        """Do nothing: no lock is held."""


def staging_of(request: LinkRequest) -> Staging | ObjectStaging:
    """Return the staging in which a link is made."""
    return ObjectStaging(request) if is_on_gcs(request.destination) else Staging(request)

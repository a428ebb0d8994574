"""The directory of a file system that a checkpointer saves to, while it is being made beside its place."""

from __future__ import annotations

import os
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from orbax_safetensors.errors import StorageError, storage_errors
from orbax_safetensors.orbax_store.directories import flush
from orbax_safetensors.orbax_store.discovery import FINISHED_FILE, RECORD_FILE
from orbax_safetensors.orbax_store.metadata import finished_text
from orbax_safetensors.save.new_files import check_replaceable
from orbax_safetensors.save.request import check_kept
from orbax_safetensors.storage.local import LocalStore
from orbax_safetensors.storage.replace import recover, remove, remove_aside, replace
from orbax_safetensors.storage.workspace import Workspace


class NewDirectory(Workspace):
    """A directory that is new, or with `force` takes the place of another one, which stays until then.

    Orbax saves to `path`, by way of a temporary directory. The names of both are those that Orbax gives unfinished
    checkpoints. If the save fails, they go; if it is killed, the next save to the same place deletes them.
    """

    kind = "save"

    def __init__(self, destination: str, *, force: bool, config: Any = None, like: Any = None) -> None:
        """Touch nothing. `destination` is absolute, without symbolic links; the save reads `config` and `like`."""
        self.destination = destination
        self._force, self._config, self._like = force, config, like
        self._beside = f"{destination}{ocp.path.atomicity.TMP_DIR_SUFFIX}"
        self.path = self._beside if force else destination
        self._temporary = f"{self.path}{ocp.path.atomicity.TMP_DIR_SUFFIX}"
        parent, name = os.path.split(destination)
        self.locked = os.path.join(parent, f".{name}.lock")

    def check_free(self) -> None:
        """See `Workspace`. Puts back what a killed save has left aside."""
        path = self.destination
        recover(path)
        if not self._force and os.path.lexists(path):
            raise StorageError(f"{path}: already exists; pass force=True to replace it")
        if os.path.lexists(path) and not os.path.isdir(path):
            raise StorageError(f"{path}: is not a directory, and a save replaces nothing else; save elsewhere")
        if os.path.ismount(path):
            raise StorageError(f"{path}: is a mount point, which cannot be renamed; save to a directory in it")
        if self._force:
            check_kept(path, config=self._config, like=self._like)
            if os.path.isdir(path):
                check_replaceable(LocalStore(), path)

    def check_destination(self) -> None:
        """See `Workspace`. A conversion that can be resumed is kept as well."""
        super().check_destination()
        for left in (self._temporary, self._beside):
            self._check_directory(left)
            if os.path.lexists(os.path.join(left, RECORD_FILE)):
                raise self._not_ours(left, RECORD_FILE)

    def _make(self) -> None:
        """Delete what killed saves have left; Orbax makes the directory."""
        for left in (self._temporary, self._beside):
            remove(left)
            if os.path.lexists(left):
                raise StorageError(f"{left}: is what an earlier save has left, and cannot be deleted; delete it")

    def finish(self) -> None:
        """Put the complete checkpoint in its place, then delete what was there; the process that began calls this.

        All is on the disk before, and the names before anything is deleted: a crash of the machine loses neither.
        Raises `StorageError` if the checkpoint cannot be put there; what was there is then as it was.
        """
        if self._force:
            with storage_errors(f"{self.destination}: cannot be replaced", OSError):
                (epath.Path(self.path) / FINISHED_FILE).write_text(finished_text(self.destination))
                flush(self.path)
                self.check_free()
                remove_aside(self.destination)
                replace(self.path, self.destination)
            self._sync_name()

    def _tidy(self) -> None:
        """See `Workspace`: what is not the checkpoint."""
        remove(self._temporary)
        remove(self._beside)
        remove_aside(self.destination)

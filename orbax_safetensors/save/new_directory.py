"""The directory of a file system that a checkpointer saves to, while it is being made beside its place."""

from __future__ import annotations

import os
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from orbax_safetensors.errors import StorageError
from orbax_safetensors.orbax_store.directories import flush, flush_names, make
from orbax_safetensors.orbax_store.discovery import FINISHED_FILE
from orbax_safetensors.orbax_store.operations import storage_errors
from orbax_safetensors.save.destination import check_kept
from orbax_safetensors.storage.local import check_makeable
from orbax_safetensors.storage.lock import Lock
from orbax_safetensors.storage.replace import recover, remove, remove_aside, replace


class NewDirectory:
    """A directory that is new, or with `force` takes the place of another one, which stays until then.

    Orbax saves to `unfinished`, by way of a temporary directory. The names of both are those that Orbax gives
    unfinished checkpoints. If the save fails, they go; if it is killed, the next save to the same place deletes them.
    """

    def __init__(self, path: str, *, force: bool) -> None:
        """Touch nothing. `path` is absolute, without symbolic links."""
        self.path = path
        self._force = force
        self._beside = f"{path}{ocp.path.atomicity.TMP_DIR_SUFFIX}"
        self.unfinished = self._beside if force else path
        self._temporary = f"{self.unfinished}{ocp.path.atomicity.TMP_DIR_SUFFIX}"
        self._lock: Lock | None = None

    def begin(self, *sources: Any) -> None:
        """Take the place, and delete what killed saves have left there; one process calls this.

        Raises `StorageError` if there is something that is not to be replaced, such as one of `sources`, which the save
        reads, or if another save is at work.
        """
        check_makeable(self.path)
        recover(self.path)
        if not self._force and os.path.lexists(self.path):
            raise StorageError(f"{self.path}: already exists; pass force=True to replace it")
        if os.path.lexists(self.path) and not os.path.isdir(self.path):
            raise StorageError(f"{self.path}: is not a directory, and a save replaces nothing else; save elsewhere")
        if os.path.ismount(self.path):
            raise StorageError(f"{self.path}: is a mount point, which cannot be renamed; save to a directory in it")
        if self._force:
            check_kept(self.path, *sources)
        parent, name = os.path.split(self.path)
        with storage_errors(f"{self.path}: cannot be saved", OSError):
            make(parent)
            self._lock = Lock(os.path.join(parent, f".{name}.lock"), self.path)
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
            with storage_errors(f"{self.path}: cannot be replaced", OSError):
                (epath.Path(self.unfinished) / FINISHED_FILE).write_text(
                    f"Checkpoint commit was successful to {self.path}"
                )
                flush(self.unfinished)
                remove_aside(self.path)
                replace(self.unfinished, self.path)
            try:
                flush_names(os.path.dirname(self.path))
            except StorageError as error:
                raise StorageError(f"{self.path}: is complete, but may not outlive a crash: {error}") from error
        self.release()

    def release(self) -> None:
        """Delete what is not the checkpoint, if this process has taken the place, and let others take it."""
        if self._lock is not None:
            remove(self._temporary)
            remove(self._beside)
            self._lock.release()
            self._lock = None

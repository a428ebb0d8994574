"""The hidden directory in which a version or a checkpoint is made, until it appears as a whole."""

from __future__ import annotations

import os

from orbax_safetensors.errors import StorageError
from orbax_safetensors.orbax_store.directories import flush
from orbax_safetensors.storage.replace import remove, remove_aside, replace
from orbax_safetensors.storage.workspace import Workspace


class HiddenDirectory(Workspace):
    """A directory beside its place, whose name no reader takes for a version.

    If the run fails, it goes; if it is killed, the next run to the same place deletes it.
    """

    kind = "delta"

    def __init__(self, destination: str, *, replaces: bool = False) -> None:
        """Touch nothing. If it `replaces` what is in its place, that stays until `finish`."""
        self.destination = destination
        parent, name = os.path.split(destination)
        self.path = os.path.join(parent, f".{name}.unfinished")
        self.locked = os.path.join(parent, f".{name}.lock")
        self._replaces = replaces

    def check_free(self) -> None:
        """See `Workspace`."""
        if not self._replaces:
            super().check_free()

    def check_destination(self) -> None:
        """See `Workspace`."""
        super().check_destination()
        self._check_directory(self.path)

    def _begun(self) -> None:
        """Return None: what is unfinished is begun anew."""

    def _make(self) -> None:
        remove(self.path)
        os.mkdir(self.path)

    def finish(self) -> None:
        """See `Workspace`. All is on the disk before, and the name when this returns."""
        try:
            flush(self.path)
            self.check_free()
            if self._replaces:
                remove_aside(self.destination)
                replace(self.path, self.destination)
            else:
                os.rename(self.path, self.destination)
        except OSError as error:
            raise StorageError(f"{self.destination}: cannot be put in its place: {error}") from error
        self._sync_name()

    def _tidy(self) -> None:
        """See `Workspace`: what is unfinished, or was replaced."""
        remove(self.path)
        remove_aside(self.destination)

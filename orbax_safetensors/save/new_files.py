"""The files of a save in their directory while they are being made. If the save fails, they go."""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from orbax_safetensors.checkpoint.files import SUFFIX
from orbax_safetensors.format.index import INDEX_SUFFIX, UNFINISHED
from orbax_safetensors.format.layout import INDEX_NAME
from orbax_safetensors.orbax_store.discovery import FINISHED_FILE
from orbax_safetensors.save.prepare import Save
from orbax_safetensors.storage.schemes import store_of
from orbax_safetensors.storage.store import write_small


class NewFiles:
    """A context in which files are made; if it ends with an error, it deletes them.

    A save that replaces objects cannot bring the old ones back. It deletes nothing if it fails, and the next forced
    save replaces what there is.
    """

    def __init__(self, save: Save, directory: str) -> None:
        """Touch nothing. The files of `save.layout` are made elsewhere, by several processes."""
        self.store, self.path = store_of(directory, save.options.storage_options)
        self._sync = save.options.fsync
        self._replaces = save.replaces
        self._names = {name for name, _ in save.layout.files}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        if error is not None and not self._replaces:
            with contextlib.suppress(Exception):  # the error of the save says more
                self.store.delete(self.path, self._names.__contains__)

    def place(self, name: str) -> str:
        """Return the path of the file `name`."""
        return posixpath.join(self.path, name)

    def expect(self, names: Iterable[str]) -> None:
        """Count files that others make as files of this save."""
        self._names.update(names)

    def write(self, name: str, content: bytes) -> None:
        """Write a small file, or the beginning of a file."""
        self._names.add(name)
        write_small(self.store, self.place(name), content, sync=self._sync)

    def begin_to_replace(self) -> None:
        """Make the objects in the directory no checkpoint, before new objects appear among those of another save.

        A single file needs an end of neither: it appears whole, in the place of the old one.
        """
        self.store.delete(self.path, lambda name: name == FINISHED_FILE)
        if len([name for name in self._names if name.endswith(SUFFIX)]) > 1:
            write_small(self.store, self.place(INDEX_NAME), UNFINISHED, sync=self._sync)

    def delete_others(self) -> None:
        """Delete all that is not of this save. While an index is there, no other files are taken for a checkpoint."""

        def is_other(name: str) -> bool:
            return name not in self._names

        self.store.delete(self.path, lambda name: is_other(name) and not name.endswith(INDEX_SUFFIX))
        self.store.delete(self.path, is_other)

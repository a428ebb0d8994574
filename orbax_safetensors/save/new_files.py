"""The files of a save in their directory while they are being made. If the save fails, they go."""

from __future__ import annotations

import contextlib
import posixpath
from types import TracebackType
from typing import Self

from orbax_safetensors.checkpoint.files import SUFFIX
from orbax_safetensors.format.header import MAX_HEADER_BYTES
from orbax_safetensors.format.index import INDEX_SUFFIX, UNFINISHED
from orbax_safetensors.format.layout import INDEX_NAME
from orbax_safetensors.orbax_store.discovery import FINISHED_FILE
from orbax_safetensors.save.prepare import Save
from orbax_safetensors.storage.schemes import store_of
from orbax_safetensors.storage.store import Stamp, read_small, write_small

# What says that a directory is a checkpoint: to our reader, if there are several files, and to Orbax.
_MARKS = (INDEX_NAME, FINISHED_FILE)


class NewFiles:
    """A context in which files are made. If it ends with an error, they are deleted, and the directory is as it was.

    A save that replaces objects cannot bring them back: if it fails after the first of them has been replaced, the
    directory is no checkpoint, and the next forced save makes it one.
    """

    def __init__(self, save: Save, directory: str) -> None:
        """Touch nothing. The files of `save.layout` are made elsewhere, by several processes."""
        self.store, self.path = store_of(directory, save.options.storage_options)
        self.names = {name for name, _ in save.layout.files}
        self._sync = save.options.fsync
        self._replaces = save.replaces
        self._replaced: dict[str, Stamp] | None = None
        self._marks: dict[str, bytes] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        if error is not None:
            with contextlib.suppress(Exception):  # the error of the save says more
                if not self._replaces:
                    self.store.delete(self.path, self.names)
                elif self._replaced is not None and self._others() == self._replaced:
                    self.store.delete(self.path, [name for name in _MARKS if name not in self._marks])
                    for name, content in self._marks.items():
                        self._write(name, content)

    def place(self, name: str) -> str:
        """Return the path of the file `name`."""
        return posixpath.join(self.path, name)

    def write(self, name: str, content: bytes) -> None:
        """Write a small file, or the beginning of a file."""
        self.names.add(name)
        self._write(name, content)

    def _write(self, name: str, content: bytes) -> None:
        write_small(self.store, self.place(name), content, sync=self._sync)

    def begin_to_replace(self) -> None:
        """Make the objects in the directory no checkpoint, before new objects appear among the old ones.

        Our reader goes on to take a single file for a checkpoint: it appears whole, in the place of the old one.
        """
        for name in _MARKS:
            if (file := self.store.find(self.place(name))) is not None:
                self._marks[name] = read_small(file, MAX_HEADER_BYTES)
        self._replaced = self._others()
        self.store.delete(self.path, [FINISHED_FILE])
        if len([name for name in self.names if name.endswith(SUFFIX)]) > 1:
            self._write(INDEX_NAME, UNFINISHED)

    def _others(self) -> dict[str, Stamp]:
        return {name: stamp for name, stamp in self.store.below(self.path).items() if name not in _MARKS}

    def delete_others(self) -> None:
        """Delete all that is not of this save, an index last: without it, old and new files could be taken for one."""
        others = [name for name in self.store.below(self.path) if name not in self.names]
        self.store.delete(self.path, [name for name in others if not name.endswith(INDEX_SUFFIX)])
        self.store.delete(self.path, others)

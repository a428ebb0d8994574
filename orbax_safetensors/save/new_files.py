"""The files of a save in their directory while they are being made. If the save fails, they go."""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from orbax_safetensors.checkpoint.files import SUFFIX
from orbax_safetensors.checkpoint.read import read_checkpoint
from orbax_safetensors.errors import MissingError, SafetensorsError
from orbax_safetensors.format.header import MAX_HEADER_BYTES
from orbax_safetensors.format.index import INDEX_SUFFIX, Index
from orbax_safetensors.format.layout import INDEX_NAME
from orbax_safetensors.orbax_store.discovery import FINISHED_FILE
from orbax_safetensors.save.prepare import Save
from orbax_safetensors.storage.schemes import store_of
from orbax_safetensors.storage.store import Stamp, find_small, write_small

# What says which files of a directory are the checkpoint, to our reader and to Orbax.
_MARKS = (INDEX_NAME, FINISHED_FILE)


class NewFiles:
    """A context in which files are made. If it ends with an error, those that were not there before are deleted.

    Objects of another checkpoint are replaced in four steps: `begin_to_replace`, then new objects appear, most of them
    under names that no old one has, then `replace_index`, which is the moment of the change, and `delete_others`. If
    the save fails before that moment, the directory is as it was, unless a single file has been replaced.
    """

    def __init__(self, save: Save, directory: str) -> None:
        """Touch nothing. The files of `save.layout` are made elsewhere, by several processes."""
        self._storage_options = save.options.storage_options
        self.store, self.path = store_of(directory, self._storage_options)
        self.names = {name for name, _ in save.layout.files}
        self._sync = save.options.fsync
        self._before: Mapping[str, Stamp] = {}
        self._marks: dict[str, bytes] | None = None
        self._is_replaced = False

    def __enter__(self) -> Self:
        with contextlib.suppress(MissingError):  # the first write says so
            self._before = self.store.below(self.path)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        if error is not None and not self._is_replaced:
            with contextlib.suppress(Exception):  # the error of the save says more
                self.store.delete(self.path, self.names - self._before.keys())
                if self._marks is not None:
                    self._restore(self._marks)

    def _restore(self, marks: Mapping[str, bytes]) -> None:
        now = self.store.below(self.path)
        if all(now.get(name) == stamp for name, stamp in self._before.items() if name not in _MARKS):
            self.store.delete(self.path, [name for name in _MARKS if name not in marks])
            for name, content in marks.items():
                self._write(name, content)

    def place(self, name: str) -> str:
        """Return the path of the file `name`."""
        return posixpath.join(self.path, name)

    def write(self, name: str, content: bytes, nbytes: int | None = None) -> None:
        """Write a small file, or the beginning of a file of `nbytes`."""
        self.names.add(name)
        self._write(name, content, nbytes)

    def _write(self, name: str, content: bytes, nbytes: int | None = None) -> None:
        write_small(self.store, self.place(name), content, sync=self._sync, nbytes=nbytes)

    def _read(self, name: str) -> bytes | None:
        return find_small(self.store, self.place(name), MAX_HEADER_BYTES)

    def begin_to_replace(self) -> None:
        """Make the objects in the directory no checkpoint of Orbax, and have an index say which files were the old one.

        Old files with pieces of tensors cannot have an index: a reader then finds too many pieces, which is an error.
        """
        self._marks = {}
        for name in _MARKS:
            if (content := self._read(name)) is not None:
                self._marks[name] = content
        self.store.delete(self.path, [FINISHED_FILE])
        old = {name for name in self._before if name.endswith(SUFFIX) and "/" not in name}
        if INDEX_NAME in self._marks or not old or old == {name for name in self.names if name.endswith(SUFFIX)}:
            return
        with contextlib.suppress(SafetensorsError):  # what cannot be read need not be kept readable
            checkpoint = read_checkpoint(self.path, self._storage_options)
            tensors = checkpoint.tensors.items()
            if all(len(tensor.pieces) == 1 for _, tensor in tensors):
                files = [posixpath.basename(file.path) for file in checkpoint.files]
                self._write(INDEX_NAME, Index({name: files[one.pieces[0].file] for name, one in tensors}, {}).encode())

    def replace_index(self, index: Index) -> None:
        """Make the new files the checkpoint, in the place of the files that an index names so far, if there is one."""
        self._is_replaced = True
        content = index.encode()
        if not any(name.endswith(INDEX_SUFFIX) for name in self.store.below(self.path)):
            return
        try:
            self._write(INDEX_NAME, content)
        except BaseException:  # perhaps only the answer was lost
            self._is_replaced = self._read(INDEX_NAME) == content
            raise

    def delete_others(self) -> None:
        """Delete all that is not of this save, an index last."""
        others = [name for name in self.store.below(self.path) if name not in self.names]
        self.store.delete(self.path, [name for name in others if not name.endswith(INDEX_SUFFIX)])
        self.store.delete(self.path, others)

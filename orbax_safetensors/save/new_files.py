"""The directory that a save goes to: which files may already be there, and what happens to them.

On a file system, a checkpointer gives a save a temporary directory, and renames it when the save is complete. Objects
have their final names when they appear, and so do the files of a handler without a checkpointer. There, files of an
earlier save could mix with those of this one into a checkpoint that nobody saved.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from types import TracebackType
from typing import Self

import orbax.checkpoint as ocp

from orbax_safetensors.checkpoint.files import is_part
from orbax_safetensors.checkpoint.read import read_checkpoint
from orbax_safetensors.checkpoint.record import RECORD_NAME
from orbax_safetensors.checkpoint.small_files import found_small
from orbax_safetensors.errors import MissingError, SafetensorsError, StorageError
from orbax_safetensors.format.checksums import CHECKSUMS_NAME
from orbax_safetensors.format.header import MAX_HEADER_BYTES
from orbax_safetensors.format.index import SUFFIX, Index, is_index
from orbax_safetensors.format.layout import FILE_NAME, INDEX_NAME
from orbax_safetensors.format.names import some
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.orbax_store.discovery import FINISHED_FILE, STEP_FILE
from orbax_safetensors.orbax_store.metadata import INDEX_NAMES
from orbax_safetensors.save.request import Existing
from orbax_safetensors.storage.interrupts import to_the_end
from orbax_safetensors.storage.remote import READ_ONLY
from orbax_safetensors.storage.store import Stamp, Store, find_small, write_small

# What says which files of a directory are the checkpoint, to our reader and to Orbax.
_MARKS = (INDEX_NAME, FINISHED_FILE)
# What a save of ours, or of Orbax, leaves beside the files of a checkpoint.
_RECORDS = {CHECKSUMS_NAME, RECORD_NAME, STEP_FILE, FINISHED_FILE, *INDEX_NAMES}
# Subdirectories in which Orbax has data, and in which the Hub's client keeps notes.
_OF_ORBAX = re.compile(r"(d|made|array_metadatas|ocdbt\.process_[^/]*|\.cache)/")
# Of `transformers`, without a config.
_SUBDIRECTORIES = {"additional_chat_templates"}


class NewFiles:
    """A context in which files are made. If it ends with an error, those that were not there before are deleted.

    Objects of another checkpoint are replaced in five steps: `keep_old`, then new objects appear under names that no
    old one has, then `unmark`, then `replace_index`, which is the moment of the change, and `delete_others`. If the
    save fails before that moment, the directory is as it was. If the new checkpoint is a single file, its appearance is
    the change.
    """

    def __init__(self, store: Store, path: str, names: Iterable[str], options: SafetensorsOptions) -> None:
        """Touch nothing in the directory `path` of `store`. The files of `names` are made elsewhere."""
        self._storage_options = options.storage_options
        self.store, self.path = store, path
        self.names = set(names)
        self._sync = options.fsync
        self._before: Mapping[str, Stamp] = {}
        self._marks: dict[str, bytes] | None = None
        self._is_replaced = False

    def check_room(self, existing: Existing) -> None:
        """Raise `StorageError` if there are files of another save, and `existing` is not "replaced"; write nothing.

        One process calls this before any write. Raises `StorageError` also if nothing can be written there.
        """
        store, path = self.store, self.path
        if store.is_local:  # a file system
            try:
                path.encode()
            except UnicodeEncodeError as error:  # Orbax writes the path into a file at the end, and would fail
                raise StorageError(f"{path}: nothing can be saved at a path that is not UTF-8") from error
            if existing == "replaced":
                raise StorageError(f"{path}: is replaced as a whole, by SafetensorsCheckpointer or save")
            # Orbax deletes what a killed save has left in a temporary directory, perhaps in the background.
            if not os.path.isdir(path) or ocp.path.atomicity.TMP_DIR_SUFFIX in path:
                return
        if not store.writes:
            raise StorageError(f"{path}: {READ_ONLY}")
        if existing == "replaced":
            store.delete(path, ())  # raises if all of a bucket is to be replaced
            check_replaceable(store, path)
            return
        names = list(store.list(path) or ())
        in_the_way = names if existing == "refused" else _of_checkpoints(names)
        if in_the_way:
            instead = "delete these files, or save elsewhere"
            if existing == "refused":
                instead = "save elsewhere, or with force=True, which replaces all that is there"
            raise StorageError(f"{path}: already exists, and holds {some(in_the_way)}; {instead}")

    def __enter__(self) -> Self:
        with contextlib.suppress(MissingError):  # the first write says so
            self._before = self.store.below(self.path)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        if error is not None and not self._is_replaced:
            with contextlib.suppress(Exception):  # the error of the save says more
                to_the_end(self._take_back)

    def _take_back(self) -> None:
        self.store.delete(self.path, self.names - self._before.keys())
        if self._marks is not None:
            self._restore(self._marks)

    def _restore(self, marks: Mapping[str, bytes]) -> None:
        now = self.store.below(self.path)
        if all(now.get(name) == stamp for name, stamp in self._before.items() if name not in _MARKS):
            self.store.delete(self.path, [name for name in _MARKS if name not in marks])
            for name, content in marks.items():
                self._write(name, content)

    def path_of(self, name: str) -> str:
        """Return the path of the file `name`."""
        return posixpath.join(self.path, name)

    def write(self, name: str, content: bytes, nbytes: int | None = None) -> None:
        """Write a small file, or the beginning of a file of `nbytes`."""
        self.names.add(name)
        self._write(name, content, nbytes)

    def _write(self, name: str, content: bytes, nbytes: int | None = None) -> None:
        write_small(self.store, self.path_of(name), content, sync=self._sync, nbytes=nbytes)

    def _read(self, name: str) -> bytes | None:
        return find_small(self.store, self.path_of(name), MAX_HEADER_BYTES)

    def keep_old(self, new: Set[str]) -> None:
        """Have an index say which files are the old checkpoint; it stays whole beside files of the names `new`.

        Old files with pieces of tensors cannot have an index: a reader then finds too many pieces, which is an error.
        """
        self._marks = {}
        for name in _MARKS:
            if (content := self._read(name)) is not None:
                self._marks[name] = content
        old = {name for name in self._before if name.endswith(SUFFIX) and "/" not in name}
        if INDEX_NAME in self._marks or not old or old == new:
            return
        with contextlib.suppress(SafetensorsError):  # what cannot be read need not be kept readable
            checkpoint = read_checkpoint(self.path, self._storage_options)
            tensors = checkpoint.tensors.items()
            if all(len(tensor.pieces) == 1 for _, tensor in tensors):
                files = [posixpath.basename(file.path) for file in checkpoint.files]
                self._write(INDEX_NAME, Index({name: files[one.pieces[0].file] for name, one in tensors}, {}).encode())

    def unmark(self) -> None:
        """Make the objects in the directory no checkpoint of Orbax, for which it then waits."""
        self.store.delete(self.path, [FINISHED_FILE])

    def replace_index(self, index: Index) -> None:
        """Make the new files the checkpoint, in the place of the files that an index names so far, if there is one.

        A `model.safetensors` that is not among them goes then, as readers take it before an index.
        """
        self._is_replaced = True
        content = index.encode()
        before = self.store.below(self.path)
        last = [name for name in before if name == FILE_NAME and name not in index.files]
        try:
            if any(map(is_index, before)):
                self._write(INDEX_NAME, content)
            self.store.delete(self.path, last)
        except BaseException:  # perhaps only the answer was lost
            self._is_replaced = self._read(INDEX_NAME) == content and not {*last} & self.store.below(self.path).keys()
            raise

    def delete_others(self) -> None:
        """Delete all that is not of this save, an index last."""
        others = [name for name in self.store.below(self.path) if name not in self.names]
        self.store.delete(self.path, [name for name in others if not is_index(name)])
        self.store.delete(self.path, others)


def check_replaceable(store: Store, path: str) -> None:
    """Raise `StorageError` if a directory is neither empty nor a checkpoint, or if its subdirectories hold more."""
    names = list(store.list(path) or ())
    if names and not _of_checkpoints(names) and not {STEP_FILE, FINISHED_FILE} & {*names}:
        raise StorageError(
            f"{path}: is not a checkpoint, it holds {some(sorted(names))}; a save replaces nothing else; save elsewhere"
        )
    if any(map(is_part, names)) and (others := _of_others(store, path, names)):
        raise StorageError(
            f"{path}: holds more than a checkpoint: {some(sorted(others))}; a save replaces nothing else; move these "
            "away, or save elsewhere"
        )


def _of_others(store: Store, path: str, names: Collection[str]) -> list[str]:
    """Return the files in subdirectories that are not of the checkpoint of safetensors files in the directory `path`.

    Its own are those of Orbax, and small files that a save like it would copy. If no save of ours has left a record
    among `names`, code and data of another program could be small as well: then a subdirectory is a module of the
    model, which has a config, or of a usual name.
    """
    others = [name for name in store.below(path) if "/" in name and not _OF_ORBAX.match(name)]
    if not others:
        return []
    small, _ = found_small(store, path)
    if not _RECORDS.isdisjoint(names):
        return [name for name in others if name not in small]
    modules = {name.partition("/")[0] for name in small if re.fullmatch(r"[^/]+/config\.json", name)} | _SUBDIRECTORIES
    return [name for name in others if name not in small or name.partition("/")[0] not in modules]


def _of_checkpoints(names: Sequence[str]) -> list[str]:
    """Return the names that a reader would take for files of a checkpoint."""
    files = [name for name in names if is_part(name)]
    return files + [name for name in names if name.startswith(INDEX_NAMES) and name not in files]

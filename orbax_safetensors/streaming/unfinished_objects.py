"""The record of files on an object store that are not all there.

An object that is there is done: that is the record of the work. What the work is stands in the place of the object that
is written last, the index or the last file. Neither of these is what a reader expects, so nothing opens before the end.
"""

from __future__ import annotations

import json
import posixpath
from typing import Any

from orbax_safetensors.errors import StorageError, TensorMismatchError
from orbax_safetensors.format.layout import INDEX_NAME
from orbax_safetensors.storage.remote import READ_ONLY
from orbax_safetensors.storage.store import Store, read_small, write_small
from orbax_safetensors.streaming.file_layout import Files
from orbax_safetensors.streaming.model_files import ModelFiles

_MAX_RECORD_BYTES = 1 << 20


class UnfinishedObjects:
    """What is unfinished in a directory. `begin` is called by one process."""

    def __init__(self, store: Store, path: str, files: Files, model_files: ModelFiles, digest: str) -> None:
        """Touches nothing. `digest` tells what is written apart from all else."""
        self._store, self._path, self.digest = store, path, digest
        self._names = [name for name, _ in files.layout.files]
        self._all_names = sorted({*self._names, *model_files.names, INDEX_NAME})
        self._last_name = self._names[-1] if files.layout.index is None else INDEX_NAME
        self._record = posixpath.join(path, self._last_name)

    def check(self) -> dict[str, Any] | None:
        """Return the record of what was begun in its place, if anything; touches nothing.

        Raises `StorageError` if something else is there.
        """
        if not self._store.writes:
            raise StorageError(f"{self._path}: {READ_ONLY}")
        names = self._store.list(self._path) or []
        begun = self._begun(self._record)
        if other := sorted(set(names).difference(begun["names"] if begun else ())):
            # Other layouts have their record in other places: the index, or the last file.
            last = max((name for name in names if name.endswith(".safetensors")), default=INDEX_NAME)
            if any(self._begun(posixpath.join(self._path, name)) for name in {INDEX_NAME, last} & {*other}):
                raise StorageError(
                    f"{self._path}: holds what another conversion has begun, of another layout or with other "
                    "arguments; finish it with resume (--resume) and the arguments that it was begun with, or delete it"
                )
            raise StorageError(f"{self._path}: already exists, and holds {other[0]!r}; move it away")
        return begun

    def begin(self, *, resume: bool) -> None:
        """Makes the record, unless `resume` finds one; what else has begun there and is not finished is deleted.

        Raises `StorageError` if something else is there, and `TensorMismatchError` if something else was begun.
        """
        begun = self.check()
        if resume and begun is not None:
            if begun["unfinished"] != self.digest:
                raise TensorMismatchError(
                    f"{self._path}: cannot be taken up again: it was begun of another source, or with other "
                    "arguments; begin anew without resume"
                )
            return
        if begun is not None:
            self._store.delete(self._path)
        record = {"unfinished": self.digest, "names": self._all_names}
        write_small(self._store, self._record, json.dumps(record).encode())

    def _begun(self, path: str) -> dict[str, Any] | None:
        """Return the record of what was begun, if there is one."""
        file = self._store.find(path)
        if file is None:
            return None
        if file.stamp.nbytes > _MAX_RECORD_BYTES:
            file.close()
            return None
        try:
            record = json.loads(read_small(file, _MAX_RECORD_BYTES))
        except ValueError:
            return None
        return record if isinstance(record, dict) and {"unfinished", "names"} == record.keys() else None

    def done(self) -> set[int]:
        """Return the numbers of the files that are there, without the one that is written last."""
        names = set(self._store.list(self._path) or ())
        return {number for number, name in enumerate(self._names) if name in names and name != self._last_name}

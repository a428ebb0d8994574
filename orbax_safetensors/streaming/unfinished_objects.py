"""The record of an unfinished conversion on an object store.

Finished objects record the work done: an object that is there is done. A record of what is converted stands in the
place of the object that is written last, the index or the last file. No reader accepts it, so nothing opens before the
end.
"""

from __future__ import annotations

import json
import posixpath
from typing import Any

from orbax_safetensors.checkpoint.model_files import ModelFiles
from orbax_safetensors.errors import StorageError, TensorMismatchError
from orbax_safetensors.format.layout import INDEX_NAME
from orbax_safetensors.storage.remote import READ_ONLY
from orbax_safetensors.storage.store import Store, read_small, write_small
from orbax_safetensors.streaming.file_layout import Files

_MAX_RECORD_BYTES = 1 << 20


class UnfinishedObjects:
    """An unfinished conversion in a directory. One process calls `begin`."""

    def __init__(self, store: Store, path: str, files: Files, model_files: ModelFiles, digest: str) -> None:
        """Touch nothing. `digest` identifies the content that is written."""
        self._store, self._path, self.digest = store, path, digest
        self._names = [name for name, _ in files.layout.files]
        self._all_names = sorted({*self._names, *model_files.names, INDEX_NAME})
        self._last_name = self._names[-1] if files.layout.index is None else INDEX_NAME
        self._record = posixpath.join(path, self._last_name)

    def check(self) -> dict[str, Any] | None:
        """Return the record of a conversion that was begun in this place, or None; touch nothing.

        Raises `StorageError` if something else is there.
        """
        if not self._store.writes:
            raise StorageError(f"{self._path}: {READ_ONLY}")
        names = self._store.list(self._path) or []
        begun = self._begun(self._record)
        if other := sorted(set(names).difference(begun["names"] if begun else ())):
            # Other layouts have their record in another place: the index, or the last file.
            last = max((name for name in names if name.endswith(".safetensors")), default=INDEX_NAME)
            if any(self._begun(posixpath.join(self._path, name)) for name in {INDEX_NAME, last} & {*other}):
                raise StorageError(
                    f"{self._path}: holds what another conversion has begun, of another layout or with other "
                    "arguments; finish it with resume (--resume) and the arguments that it was begun with, or delete it"
                )
            raise StorageError(f"{self._path}: already exists, and holds {other[0]!r}; move it away")
        return begun

    def begin(self, *, resume: bool) -> None:
        """Make the record, or with `resume` go on with the one there; delete any other unfinished conversion.

        Raises `StorageError` if other files are there, and `TensorMismatchError` if `resume` finds another conversion.
        """
        begun = self.check()
        if resume and begun is not None:
            if begun["unfinished"] != self.digest:
                raise TensorMismatchError(
                    f"{self._path}: cannot be resumed: it was begun from another source, or with other "
                    "arguments; begin anew without resume"
                )
            return
        if begun is not None:
            self._store.delete(self._path, self._store.below(self._path))
        record = {"unfinished": self.digest, "names": self._all_names}
        write_small(self._store, self._record, json.dumps(record).encode())

    def _begun(self, path: str) -> dict[str, Any] | None:
        """Return the record in a file; None if the file is not there or is not a record."""
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
        """Return the numbers of the files that are there, except the file that is written last."""
        names = set(self._store.list(self._path) or ())
        return {number for number, name in enumerate(self._names) if name in names and name != self._last_name}

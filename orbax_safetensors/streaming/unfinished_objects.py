"""The record of an unfinished conversion on an object store.

Finished objects record the work done: an object that is there is done. A record of what is converted stands in the
place of the object that is written last, the index or the last file. No reader accepts it, so nothing opens before the
end.
"""

from __future__ import annotations

import json
import posixpath
from typing import Any

from orbax_safetensors.checkpoint.header_texts import write_header_record
from orbax_safetensors.checkpoint.model_files import ModelFiles
from orbax_safetensors.errors import StorageError
from orbax_safetensors.format.layout import INDEX_NAME
from orbax_safetensors.storage.remote import READ_ONLY
from orbax_safetensors.storage.store import Store, read_small, write_small
from orbax_safetensors.storage.workspace import Workspace
from orbax_safetensors.streaming.file_layout import Files

_MAX_RECORD_BYTES = 1 << 20


class UnfinishedObjects(Workspace):
    """An unfinished conversion in a directory."""

    def __init__(self, store: Store, path: str, files: Files, model_files: ModelFiles, digest: str) -> None:
        """Touch nothing. `digest` identifies the content that is written."""
        self._store, self._layout = store, files.layout
        self.destination = self.path = path
        self._names = [name for name, _ in files.layout.files]
        self._all_names = sorted({*self._names, *model_files.names, INDEX_NAME})
        self._last_name = self._names[-1] if files.layout.index is None else INDEX_NAME
        self._record_path = posixpath.join(path, self._last_name)
        self.record = {"unfinished": digest, "names": self._all_names}

    def check_place(self) -> None:
        """See `Workspace`."""
        if not self._store.writes:
            raise StorageError(f"{self.path}: {READ_ONLY}")
        names = set(self._store.list(self.path) or ())
        begun = self._begun()
        if other := sorted(names.difference(begun["names"] if begun else ())):
            # Other layouts have their record in another place: the index, or the last file.
            last = max((name for name in names if name.endswith(".safetensors")), default=INDEX_NAME)
            if any(self._read(posixpath.join(self.path, name)) for name in {INDEX_NAME, last} & {*other}):
                raise StorageError(
                    f"{self.path}: holds what another conversion has begun, of another layout or with other "
                    "arguments; finish it with resume (--resume) and the arguments that it was begun with, or delete it"
                )
            raise StorageError(f"{self.path}: already exists, and holds {other[0]!r}; move it away")

    def _begun(self) -> dict[str, Any] | None:
        return self._read(self._record_path)

    def _take_up(self) -> None:
        """Do nothing: what is there is done."""

    def _make(self) -> None:
        if self._begun() is not None:
            self._store.delete(self.path, self._store.below(self.path))
        write_small(self._store, self._record_path, json.dumps(self.record).encode())

    def finish(self) -> None:
        """See `Workspace`. The index takes the place of the record, unless the last file has done so."""
        if (index := self._layout.index) is not None:
            write_small(self._store, self._record_path, index.encode())
        write_header_record(self._store, self.path, self._names)

    def _read(self, path: str) -> dict[str, Any] | None:
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
        names = set(self._store.list(self.path) or ())
        return {number for number, name in enumerate(self._names) if name in names and name != self._last_name}

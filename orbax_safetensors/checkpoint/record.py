"""The switches of a family that a checkpoint was saved or linked with, recorded beside its files.

A link has them in its note. A save, or a conversion into safetensors, has them in a file, as it may have no note. Both
also record what tells these files from others that have taken their place.
"""

from __future__ import annotations

import errno
import json
import logging
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import tee
from typing import Any, NamedTuple, TypeVar

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.errors import StorageError
from orbax_safetensors.format import strict_json
from orbax_safetensors.mapping.family import Family, FamilyUse
from orbax_safetensors.orbax_store.index_note import NOTE_FILE, read_note
from orbax_safetensors.storage.store import Store, find_small

logger = logging.getLogger(__name__)

# `{"family": ..., "variant": {...}, "files": {name: fingerprint}}`.
RECORD_NAME = "safetensors.family.json"

Fingerprints = Mapping[str, Mapping[str, Any]]  # by the name of a file

_MAX_BYTES = 4 * 2**20
_T = TypeVar("_T")


def record_content(use: FamilyUse, files: Fingerprints) -> bytes:
    """Return the content of `RECORD_NAME`."""
    return f"{json.dumps(use.record() | {'files': files}, indent=1)}\n".encode()


def record_faults(checkpoint: Checkpoint) -> list[StorageError]:
    """Return the error of a record that cannot be read, if it cannot."""
    try:
        _permitted(_read, checkpoint)
    except StorageError as fault:
        return [fault]
    return []


class _Record(NamedTuple):
    name: str
    use: Mapping[str, Any]  # as of `FamilyUse.record`
    files: Mapping[str, Any]


def recalled(families: Sequence[Family], checkpoint: Checkpoint) -> list[Family]:
    """Return families, each with the switches that are recorded for it beside the checkpoint's files, if there are any.

    A warning names a record of other files, which is not taken. Raises `StorageError` if a record cannot be read.
    """
    records = tee(_records(checkpoint), len(families))  # each is read when a family first needs it, and once
    return [_recalled(*pair, checkpoint) for pair in zip(families, records, strict=True)]


def _recalled(family: Family, records: Iterator[_Record], checkpoint: Checkpoint) -> Family:
    if not family.has_switches:
        return family
    for name, use, files in records:
        if not (switches := family.recorded(use)):
            continue
        others = [file for file, found in checkpoint.fingerprints.items() if files.get(file) != found]
        if not others:
            return family.recalling(use)
        logger.warning(
            "%s: the switches %s are not taken, as they are recorded for other files: %s is not the file that was "
            "written with them",
            posixpath.join(checkpoint.directory, name),
            switches,
            others[0],
        )
    return family


def _records(checkpoint: Checkpoint) -> Iterator[_Record]:
    # A server without listings takes a request for every file that it does not have.
    note = _permitted(read_note, checkpoint) if checkpoint.store.lists else None
    if note is not None and note.use is not None:
        yield _Record(NOTE_FILE, note.use, note.files)
    if (record := _permitted(_read, checkpoint)) is not None:
        yield record


def _permitted(read: Callable[[Store, str], _T | None], checkpoint: Checkpoint) -> _T | None:
    """Return what `read` returns; None if the server forbids it, as many servers do if a file does not exist."""
    try:
        return read(checkpoint.store, checkpoint.directory)
    except StorageError as error:
        if error.errno != errno.EACCES:
            raise
        return None


def _read(store: Store, directory: str) -> _Record | None:
    path = posixpath.join(directory, RECORD_NAME)
    if (content := find_small(store, path, _MAX_BYTES)) is None:
        return None
    try:
        record = strict_json.loads(content)
        files = record.get("files", {})
        if not (isinstance(record["family"], str) and isinstance(record["variant"], dict) and isinstance(files, dict)):
            raise TypeError(f"expected a name and dicts, found {record!r:.80}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(f"{path}: is not what a save has written: {error!r:.200}") from error
    return _Record(RECORD_NAME, record, files)

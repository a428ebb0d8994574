"""The switches of a family that a checkpoint was saved or linked with, recorded beside its files.

A link has them in its note. A save, or a conversion into safetensors, has them in a file, as it may have no note.
"""

from __future__ import annotations

import json
import posixpath
from typing import Any

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.errors import StorageError
from orbax_safetensors.mapping.family import Family, FamilyUse
from orbax_safetensors.orbax_store.index_note import read_note
from orbax_safetensors.storage.store import read_small

RECORD_NAME = "safetensors.family.json"

_MAX_BYTES = 4 * 2**20


def record_content(use: FamilyUse) -> bytes:
    """Return the content of `RECORD_NAME`."""
    return f"{json.dumps(use.record(), indent=1)}\n".encode()


def recalled(family: Family, checkpoint: Checkpoint) -> Family:
    """Return `family` with the switches that are recorded beside the checkpoint's files, if they are of this family.

    A note is of the files that it describes, and not of others that have taken their place. Raises `StorageError` if a
    record cannot be read.
    """
    if checkpoint.is_file or not checkpoint.store.writes:
        return family
    note = read_note(checkpoint.store, checkpoint.path)
    if note is not None and note.use is not None and not note.changed(checkpoint.path, checkpoint.fingerprints):
        return family.recalling(note.use)
    return family.recalling(_read(checkpoint))


def _read(checkpoint: Checkpoint) -> Any:
    path = posixpath.join(checkpoint.path, RECORD_NAME)
    if (file := checkpoint.store.find(path)) is None:
        return None
    content = read_small(file, _MAX_BYTES)
    try:
        record = json.loads(content)
        if not isinstance(record["family"], str) or not isinstance(record["variant"], dict):
            raise TypeError(f"expected a name and a dict, found {record!r:.80}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StorageError(f"{path}: is not what a save has written: {error!r:.200}") from error
    return record

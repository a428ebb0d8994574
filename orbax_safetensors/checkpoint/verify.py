"""`verify`: every fault that a checkpoint's small files show, and its data if there is something to compare it with."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping
from contextlib import closing, suppress
from functools import partial
from typing import Any, NamedTuple

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.checkpoint.checksums import Recorded, missing_files, read_checksums
from orbax_safetensors.checkpoint.data import DataCheck, check_data
from orbax_safetensors.checkpoint.files import is_orbax, is_part
from orbax_safetensors.checkpoint.one_state import of_one_state
from orbax_safetensors.checkpoint.read import examine
from orbax_safetensors.checkpoint.record import RECORD_NAME, record_faults
from orbax_safetensors.errors import ChecksumError, SafetensorsError, StorageError
from orbax_safetensors.format.checksums import CHECKSUMS_NAME
from orbax_safetensors.format.index import SUFFIX
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.orbax_store.directories import is_on_gcs
from orbax_safetensors.orbax_store.index_check import TensorRange
from orbax_safetensors.orbax_store.index_note import read_note
from orbax_safetensors.orbax_store.item_check import item_faults, step_items
from orbax_safetensors.orbax_store.metadata import INDEX_NAMES
from orbax_safetensors.storage.paths import BUCKETS, PathLike, absolute_path, is_url
from orbax_safetensors.storage.schemes import store_of
from orbax_safetensors.storage.store import Stamp, Store

# The files in which a save, a conversion or a link says more of the tensors.
_RECORDS = (CHECKSUMS_NAME, RECORD_NAME, *INDEX_NAMES)


def verify(path: PathLike, *, data: bool = False, options: SafetensorsOptions | None = None) -> list[SafetensorsError]:
    """Return every fault of a checkpoint: of headers, sizes, the index and its files. The list is empty if it is valid.

    Files beside the model's, and tensors that the index does not name, are faults as well: no restore reads them.

    ```python
    for fault in ost.verify("/models/llama"):
        print(fault)
    ```

    A header that the `safetensors` package refuses is a fault as well, on any store.

    If `link` or a save has made the files a checkpoint of Orbax, they have to be the same still, each address of that
    index has to be in a tensor, and Orbax has to be able to read its files.

    The format has no checksums, so any bytes of tensors are valid. With `data`, they are read, in memory that does not
    grow with the files, and compared with the checksums that a save has recorded beside them, or beside the files to
    which links lead, and with the SHA-256 that the Hugging
    Face Hub has of a file, for `hf://` and for its downloads. Each tensor and each file that differs is a fault, and so
    is a file with nothing to compare it with.

    `path` is as for `open_checkpoint`. Of `options`, `storage_options` count, and with `data` also `threads`, `direct`,
    `in_flight_bytes` and `progress`. It may also be a checkpoint of Orbax: an item, a step, or steps, whose latest is
    checked. Of that, everything is read that Orbax reads, except chunks of arrays; with `data`, that is an error. Of a
    delta, headers and the index are checked; `apply_delta` checks its data, for which it needs the base.

    If another checkpoint takes the place of this one in the meantime, as by a forced save, all is verified again.

    Raises `StorageError` if there is no checkpoint, it was never finished or it changes again and again, and
    `ChecksumError` if `data` is set and `path` is a checkpoint of Orbax or a delta.
    """
    return verified(path, data=data, options=SafetensorsOptions.of(options)).faults


class Verified(NamedTuple):
    """What `verify` finds.

    Attributes:
      data: what was compared with what, if data was read.
      checkpoint: what was verified; None if it is one of Orbax, or if its headers are not valid.
    """

    faults: list[SafetensorsError]
    data: DataCheck | None = None
    checkpoint: Checkpoint | None = None


def verified(path: PathLike, *, data: bool, options: SafetensorsOptions) -> Verified:
    """Return the faults that `verify` returns, and what they were looked for in."""
    return of_one_state(
        path, "verified", partial(_verified, path, data, options), partial(_states, path, options.storage_options)
    )


def _states(path: PathLike, storage_options: Mapping[str, Any] | None) -> object:
    """Return the states of the files that `_verified` looks at, or the error that says why they cannot be known."""
    try:
        absolute = absolute_path(path)
        if is_orbax(absolute, storage_options):
            items = [store_of(item, storage_options) for item in step_items(path)]
            return [store.below(item) for store, item in items]
        if is_url(absolute) and (absolute.partition("://")[0] not in BUCKETS or absolute.endswith(SUFFIX)):
            return None  # where nothing is replaced, or a reader may not be allowed to list the neighbours
        store, path = store_of(path, storage_options)
        listed = store.list(path) or {}
        names = [name for name in listed if is_part(name) or name in _RECORDS]  # others may be written meanwhile
        return {name: _state(store, posixpath.join(path, name), listed[name]) for name in names}
    except SafetensorsError as error:
        return str(error)


def _state(store: Store, path: str, listed: Stamp | None) -> Stamp | str | None:
    """Return the state of a file; a local store does not list it."""
    if not store.is_local:
        return listed
    try:
        if (file := store.find(path)) is None:
            return None
        with closing(file):
            return file.stamp
    except StorageError as error:
        return str(error)


def _verified(path: PathLike, data: bool, options: SafetensorsOptions) -> Verified:
    if is_orbax(absolute_path(path), options.storage_options):
        if data:
            raise ChecksumError(f"{path}: is a checkpoint of Orbax, and data is verified only of safetensors files")
        faults = []
        for item in step_items(path):
            faults += item_faults(item) if is_orbax(item) else _verified(item, False, options).faults
        return Verified(faults)
    checkpoint = examine(path, options.storage_options)
    if isinstance(checkpoint, list):
        return Verified(checkpoint)
    findings = [finding.fault for finding in checkpoint.findings]
    # TensorStore finds an object store without options only.
    index_opens = checkpoint.store.is_local or (is_on_gcs(checkpoint.path) and not options.storage_options)
    faults = [*findings, *_index_faults(checkpoint, index_opens), *record_faults(checkpoint)]
    try:
        recorded = read_checksums(checkpoint.store, checkpoint.directory) or {}
    except (ChecksumError, StorageError) as fault:  # nothing to compare data with
        return Verified([fault, *faults], None, checkpoint)
    if checkpoint.delta_of is not None:  # `recorded` are the checksums of the model that it makes
        if data:
            raise ChecksumError(f"{checkpoint.path}: is a delta, whose data apply_delta verifies with its base")
        return Verified(faults, None, checkpoint)
    faults = [*missing_files(checkpoint, recorded), *faults]
    if not data:
        return Verified(faults, None, checkpoint)
    check = check_data(checkpoint, recorded or _linked_checksums(checkpoint), options)
    return Verified([*faults, *check.faults], check, checkpoint)


def _linked_checksums(checkpoint: Checkpoint) -> Recorded:
    """Return the checksums that saves have recorded beside the files to which links lead, by the names of the links."""
    if not checkpoint.store.is_local:
        return {}
    linked = {file.path: os.path.split(os.path.realpath(file.path)) for file in checkpoint.files}
    records: dict[str, Recorded] = {}
    for directory in {directory for directory, _ in linked.values()}:
        with suppress(ChecksumError, StorageError):  # as without a record: there is nothing to compare with
            records[directory] = read_checksums(checkpoint.store, directory) or {}
    return {
        os.path.basename(path): records[directory][name]
        for path, (directory, name) in linked.items()
        if name in records.get(directory, {})
    }


def _index_faults(checkpoint: Checkpoint, index_opens: bool) -> list[SafetensorsError]:
    """Return the faults of the index that makes valid files a checkpoint of Orbax; none if there is no such index."""
    store, path = checkpoint.store, checkpoint.path
    try:
        if checkpoint.is_file or (note := read_note(store, path)) is None:
            return []
        faults: list[SafetensorsError] = list(note.altered(store, path))
    except StorageError as fault:
        return [fault]
    changed = note.changed(path, checkpoint.fingerprints)
    if changed or not index_opens:
        return [*changed, *faults]
    tensors = {
        posixpath.basename(file.path): [
            TensorRange(file.header.data_start + entry.begin, file.header.data_start + entry.end, name)
            for name, entry in file.header.tensors.items()
        ]
        for file in checkpoint.files
    }
    return [*faults, *item_faults(path, tensors, names_tensors=note.names_tensors)]

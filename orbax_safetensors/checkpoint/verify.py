"""`verify`: every fault that a checkpoint's small files show."""

from __future__ import annotations

import posixpath

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.checkpoint.files import is_orbax
from orbax_safetensors.checkpoint.read import examine
from orbax_safetensors.errors import SafetensorsError
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.orbax_store import find_step_faults
from orbax_safetensors.orbax_store.directories import is_on_gcs
from orbax_safetensors.orbax_store.index_check import TensorRange, index_faults
from orbax_safetensors.orbax_store.index_note import read_note
from orbax_safetensors.storage.paths import PathLike, place


def verify(path: PathLike, *, options: SafetensorsOptions | None = None) -> list[SafetensorsError]:
    """Return every fault of a checkpoint: of headers, sizes, the index and its files. The list is empty if it is valid.

    If `link` or a save has made the files a checkpoint of Orbax, they have to be the same still, and each address of
    that index has to be in a tensor.

    Data is not read: the format has no checksums, so any bytes are valid. `path` is as for `open_checkpoint`, and of
    `options`, `storage_options` count. It may also be a checkpoint of Orbax: an item, a step, or steps, whose latest is
    checked. There, each array has to open, and chunks are not read.

    Raises `StorageError` if there is no checkpoint, or one that was never finished.
    """
    storage_options = (options or SafetensorsOptions()).storage_options
    if is_orbax(place(path), storage_options):
        return find_step_faults(path)
    checkpoint = examine(path, storage_options)
    if isinstance(checkpoint, list):
        return checkpoint
    # TensorStore finds an object store without options only.
    index_opens = checkpoint.store.is_local or (is_on_gcs(checkpoint.path) and not storage_options)
    return _index_faults(checkpoint, index_opens)


def _index_faults(checkpoint: Checkpoint, index_opens: bool) -> list[SafetensorsError]:
    """Return the faults of the index that makes valid files a checkpoint of Orbax; none if there is no such index."""
    if checkpoint.is_file or (note := read_note(checkpoint.store, checkpoint.path)) is None:
        return []
    changed = note.changed(checkpoint.path, checkpoint.fingerprints)
    if changed or not index_opens:
        return list(changed)
    tensors = {
        posixpath.basename(file.path): [
            TensorRange(file.header.data_start + entry.begin, file.header.data_start + entry.end, name)
            for name, entry in file.header.tensors.items()
        ]
        for file in checkpoint.files
    }
    return list(index_faults(checkpoint.path, tensors, names_tensors=note.names_tensors))

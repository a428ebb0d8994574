"""`verify`: every fault that a checkpoint's small files show."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import Any

from orbax_safetensors.checkpoint.files import find_faults, read_checkpoint
from orbax_safetensors.checkpoint.open import is_orbax
from orbax_safetensors.errors import SafetensorsError
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.orbax_store import find_step_faults
from orbax_safetensors.orbax_store.directories import is_remote
from orbax_safetensors.orbax_store.index_check import Extent, index_faults
from orbax_safetensors.orbax_store.trust import read_note
from orbax_safetensors.storage.paths import PathLike, place


def verify(path: PathLike, *, options: SafetensorsOptions | None = None) -> list[SafetensorsError]:
    """Every fault of a checkpoint: headers, sizes, the index and its files. An empty list where there is none.

    If `link` or a save has made the files a checkpoint of Orbax, they have to be the same still, and each address of
    that index has to be in a tensor.

    Data is not read: the format has no checksums, so any bytes are valid. `path` is as for `open_checkpoint`, and of
    `options`, `storage_options` count. It may also be a checkpoint of Orbax: an item, a step, or steps, whose latest is
    checked. Of that, each array has to open, and chunks are not read.

    Raises `StorageError` if there is no checkpoint, or one that was never finished.
    """
    storage_options = (options or SafetensorsOptions()).storage_options
    if is_orbax(place(path), storage_options):
        return find_step_faults(path)
    faults = find_faults(path, storage_options)
    return faults or _index_faults(path, storage_options)


def _index_faults(path: PathLike, storage_options: Mapping[str, Any] | None) -> list[SafetensorsError]:
    """What is wrong with the index that makes sound files a checkpoint of Orbax; nothing if there is none of ours."""
    checkpoint = read_checkpoint(path, storage_options)
    if checkpoint.files[0].path == checkpoint.path or (note := read_note(checkpoint.store, checkpoint.path)) is None:
        return []
    changed = note.changed(checkpoint.store, checkpoint.path)
    # TensorStore finds an object store without options only.
    reads = checkpoint.store.maps or (is_remote(checkpoint.path) and not storage_options)
    if changed or not reads:
        return list(changed)
    tensors = {
        posixpath.basename(file.path): [
            Extent(file.header.data_start + entry.begin, file.header.data_start + entry.end, name)
            for name, entry in file.header.tensors.items()
        ]
        for file in checkpoint.files
    }
    return list(index_faults(checkpoint.path, tensors, names_tensors=note.names_tensors))

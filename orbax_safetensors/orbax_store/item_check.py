"""`item_faults`: what keeps Orbax from restoring an item, found as Orbax finds it. Chunks are not read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from etils import epath

from orbax_safetensors.errors import MissingError, SafetensorsError, StorageError, storage_errors
from orbax_safetensors.orbax_store._compat import ArrayMetadataStore, run_sync
from orbax_safetensors.orbax_store.directories import names, read_json
from orbax_safetensors.orbax_store.discovery import ARRAYS_DIRECTORY, TREE_FILE
from orbax_safetensors.orbax_store.index_check import TensorRange, index_faults
from orbax_safetensors.orbax_store.leaf import STRING
from orbax_safetensors.orbax_store.operations import Budget
from orbax_safetensors.orbax_store.reader import PROCESS, find, open_item
from orbax_safetensors.storage.paths import PathLike


def step_items(path: PathLike) -> list[str]:
    """Return the directories of all items of a finished checkpoint, which `path` is as for `open_step`.

    Raises `StorageError` if there is none.
    """
    finished = find(path)
    return [os.fspath(finished.item(name)) for name in finished.items]


def item_faults(
    item: str, tensors: Mapping[str, Sequence[TensorRange]] = MappingProxyType({}), *, names_tensors: bool = False
) -> list[SafetensorsError]:
    """Return everything for which Orbax would not restore the item in a directory, or would restore less than it had.

    `tensors` and `names_tensors` are as for `index_faults`, for an index of safetensors files.
    """
    faults: list[SafetensorsError] = []
    try:
        faults += _array_faults(item, tensors, names_tensors=names_tensors)
    except SafetensorsError as fault:
        faults.append(fault)
    faults += _metadata_faults(epath.Path(item))
    return list({str(fault): fault for fault in faults}.values())  # two readers may find the same


def _array_faults(
    item: str, tensors: Mapping[str, Sequence[TensorRange]], *, names_tensors: bool
) -> list[SafetensorsError]:
    """Return what is wrong with arrays and strings; raises the fault that keeps all of them from being read."""
    if TREE_FILE not in names(epath.Path(item)):
        raise MissingError(f"{item}/{TREE_FILE}: is missing")
    finished = find(item)
    opening: list[SafetensorsError] = []
    checkpoint = open_item(finished, finished.items[0], Budget(1), opening.append, opening.append)
    faults: list[SafetensorsError] = []
    if checkpoint.ocdbt and (opening or any(leaf.kind != STRING for leaf in checkpoint.leaves.values())):
        faults += index_faults(item, tensors, names_tensors=names_tensors)
    faults += [*opening, *checkpoint.incomplete()]
    for name, leaf in checkpoint.leaves.items():
        try:
            if leaf.kind == STRING:
                checkpoint.value(name)
        except StorageError as fault:
            faults.append(fault)
    return faults


def _metadata_faults(item: epath.Path) -> Iterator[SafetensorsError]:
    """Yield the files with the metadata of arrays that Orbax, which reads those of all processes, cannot read."""
    directory = item / ARRAYS_DIRECTORY
    for name in names(directory) if directory.is_dir() else ():
        if match := PROCESS.fullmatch(name):
            path = directory / name
            try:
                read_json(path)  # which is careful with its memory
                with storage_errors(f"{path}: is not what Orbax writes"):
                    recorded = run_sync(ArrayMetadataStore().read(item, process_index=int(match[1])))
                    {array.param_name: array.ext_metadata for array in recorded}
            except SafetensorsError as fault:
                yield fault

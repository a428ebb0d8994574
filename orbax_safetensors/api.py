"""The functions behind the public names: thin compositions of the rooms below."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from orbax_safetensors import cooperative, save_write, targets
from orbax_safetensors import save as saving
from orbax_safetensors.checkpoint import SUFFIX, Checkpoint, find_faults, read_checkpoint
from orbax_safetensors.conversions import is_orbax
from orbax_safetensors.destination import Existing
from orbax_safetensors.errors import SafetensorsError, TensorMismatchError
from orbax_safetensors.exchanges import exchangeable
from orbax_safetensors.io.arena import no_collection
from orbax_safetensors.io.paths import as_text, place
from orbax_safetensors.io.store import read_small
from orbax_safetensors.io.stores import moves, store_of
from orbax_safetensors.mapped import AskedFamily, fitted, mapped
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.orbax_store import find_step_faults
from orbax_safetensors.orbax_store.index_check import Extent, index_faults
from orbax_safetensors.orbax_store.places import is_remote
from orbax_safetensors.orbax_store.trust import read_note
from orbax_safetensors.plan.report import RestorePlan
from orbax_safetensors.planning import exchanges, planned
from orbax_safetensors.processes import first, new_key
from orbax_safetensors.save_index import NO_INDEX, IndexAs
from orbax_safetensors.saved_tree import saved_tree

PathLike = str | os.PathLike[str]

# More than anybody notes beside a checkpoint, in bytes.
_MAX_BESIDE_BYTES = 64 * 2**20


def open_checkpoint(
    path: PathLike,
    *,
    family: AskedFamily = None,
    variant: Mapping[str, Any] | None = None,
    options: SafetensorsOptions | None = None,
) -> Checkpoint:
    """Reads the index and all headers of a checkpoint, and validates them.

    `path` is one `.safetensors` file or a directory: with an index (`*.safetensors.index.json`) the files and tensors
    that it names, otherwise all `.safetensors` files that are not hidden. With a family, or one registered for the
    architecture in `config.json`, the checkpoint's `leaves` are the model's tree; see `SafetensorsRestore`. Of
    `options`, `dequantize` and `storage_options` count.

    Either may be an URL as well: of an object store (`gs://`, `s3://`, `az://`, `abfs://`), of a plain server
    (`https://`, `http://`) or on the Hugging Face Hub (`hf://owner/name[@revision][/path]`). A plain server, which does
    not list, has a directory's files by their usual names, those of the index or `model.safetensors`. A revision of the
    Hub is pinned to its commit, which is in the checkpoint's `path`.

    Raises:
      StorageError: something is missing or cannot be read.
      HeaderError: a file is not valid.
      IndexFileError: the index is not valid or does not agree with the files, or two files have a tensor of one name.
      MappingError: there is no such family, or it does not fit the checkpoint.
    """
    options = options or SafetensorsOptions()
    checkpoint = read_checkpoint(path, options.storage_options)
    return mapped(checkpoint, family, variant, complete=True, dequantize=options.dequantize)


def restore(
    path: PathLike,
    item: Any = None,
    restore_args: Any = None,
    *,
    partial_restore: bool = False,
    family: AskedFamily = None,
    variant: Mapping[str, Any] | None = None,
    options: SafetensorsOptions,
) -> Any:
    """Restores a checkpoint; see `SafetensorsRestore` for the arguments.

    Raises:
      TensorMismatchError: the request does not fit the checkpoint.
      MappingError: there is no such family, or it does not fit the checkpoint.
      StorageError, HeaderError, IndexFileError: the checkpoint cannot be read or is not valid.
    """
    path = as_text(path)

    def resolve(stored: Checkpoint) -> tuple[Checkpoint, targets.Request]:
        everything = item is None and restore_args is None
        saved = saved_tree(path, stored, family, variant) if everything else None
        checkpoint = mapped(
            stored,
            family if saved is None else saved.family,
            variant if saved is None else saved.variant,
            complete=not partial_restore,
            dequantize=options.dequantize,
        )
        if saved is not None:
            request = targets.resolve(checkpoint, None, saved.restore_args(checkpoint), partial=False)
        elif everything:
            if jax.process_count() > 1:
                raise TensorMismatchError(
                    f"{checkpoint.path}: {jax.process_count()} processes restore with item or restore_args only, which "
                    "say where each array goes"
                )
            request = targets.everything(checkpoint)
        else:
            request = targets.resolve(checkpoint, item, restore_args, partial=partial_restore)
        return checkpoint, request

    return _restored(path, item, restore_args, options, resolve)


def restore_leaves(
    path: PathLike, leaves: Mapping[str, ocp.RestoreArgs], *, options: SafetensorsOptions
) -> dict[str, Any]:
    """Restores leaves by name: stored tensors, or all of the tree of a family that is registered for the architecture.

    The variant is that whose tree has these leaves. Raises what `restore` raises, and `MappingError` if no registered
    family has such a tree or several have.
    """
    path = as_text(path)
    paths: dict[str, str] = {}

    def resolve(stored: Checkpoint) -> tuple[Checkpoint, targets.Request]:
        shapes = {name: targets.exact_shape(args) for name, args in leaves.items()}
        checkpoint, found = fitted(stored, shapes, dequantize=options.dequantize)
        paths.update(found)
        restore_args = {paths[name]: args for name, args in leaves.items()}
        return checkpoint, targets.resolve(checkpoint, None, restore_args, partial=checkpoint.mapped is None)

    restored = _restored(path, None, dict(leaves), options, resolve)
    return {name: restored[paths[name]] for name in leaves}


def _restored(
    path: str,
    item: Any,
    restore_args: Any,
    options: SafetensorsOptions,
    resolve: Callable[[Checkpoint], tuple[Checkpoint, targets.Request]],
) -> Any:
    """Restore what `resolve` makes of a request, given the checkpoint at `path`."""
    key = None
    if _all_together(path, item, restore_args, options):
        # Before anything can fail, and of nothing else: these are counted alike in all processes.
        key = new_key("restore", path)

    def placed() -> tuple[Checkpoint, targets.Request]:
        stored = _read_for(path, options.storage_options, key)
        with no_collection():
            checkpoint, request = resolve(stored)
            return checkpoint, targets.placed(request, checkpoint)

    decided = cooperative.decide(placed, options, key)
    return decided.request.tree(cooperative.restore(decided, options))


def _all_together(path: str, item: Any, restore_args: Any, options: SafetensorsOptions) -> bool:
    """Whether all processes make this restore, and wait for one another; any other is a matter of each of them.

    It has arrays over devices of all of them, which they may exchange or which have to be of one commit. Raises
    `TensorMismatchError` where arrays over devices of some would have to be.
    """
    count = jax.process_count()
    if count == 1:
        return False
    spread = [one for one in targets.all_asked(item, restore_args) if len(one.processes) > 1]
    everywhere = [one for one in spread if len(one.processes) == count]
    if spread and moves(path):
        if not everywhere:
            raise TensorMismatchError(
                f"{path}: arrays over devices of some of {count} processes could be of different commits; name its "
                "commit, which is in the path of open_checkpoint"
            )
        return True
    return exchanges(options) and any(map(exchangeable, everywhere))


def _read_for(path: str, storage_options: Mapping[str, Any] | None, key: str | None) -> Checkpoint:
    """`read_checkpoint`; with the `key` of a restore that all processes make, they read one commit of a repository.

    It is that which the first of them has found that has come here, and no process waits for another.
    """
    checkpoint = read_checkpoint(path, storage_options)
    if key is None or not moves(path):
        return checkpoint
    pinned = first(f"{key}/commit", checkpoint.path)
    return checkpoint if pinned == checkpoint.path else read_checkpoint(pinned, storage_options)


def plan_save(
    item: Any,
    save_args: Any = None,
    *,
    directory: PathLike,
    metadata: Mapping[str, str] | None,
    max_file_bytes: int,
    family: AskedFamily = None,
    variant: Mapping[str, Any] | None = None,
    config: Any = None,
    options: SafetensorsOptions,
    existing: Existing = "kept",
    index: IndexAs = NO_INDEX,
) -> saving.Save:
    """Checks a tree and lays out its files, together with all other processes.

    `directory` is where they will be, the same in every process; it need not be there yet. `existing` says what becomes
    of what is in one on an object store. See `SafetensorsSave` for the other arguments. Raises `TensorMismatchError`,
    `MappingError` or `HeaderError` in every process where the tree or the metadata cannot be stored, and `StorageError`
    where there are files in the way or nothing can be written.
    """
    return saving.plan_save(
        item,
        save_args,
        os.fspath(directory),
        {} if metadata is None else metadata,
        max_file_bytes,
        family,
        variant,
        config,
        options,
        existing,
        index,
    )


def write(save: saving.Save, shards: saving.Shards, directory: PathLike) -> None:
    """Writes what was planned into the directory that it was planned for, together with all other processes.

    Raises `StorageError` in every process where one fails.
    """
    save_write.write(save, shards, os.fspath(directory))


def write_beside(directory: PathLike, files: Mapping[str, str], *, options: SafetensorsOptions) -> None:
    """Writes small files, in order, beside what was saved into `directory`, together with all other processes.

    Raises `StorageError` in every process where it fails.
    """
    save_write.write_beside(os.fspath(directory), files, options)


def read_beside(directory: PathLike, name: str, *, options: SafetensorsOptions) -> bytes | None:
    """What a small file in `directory` holds; None where it is not there, or where `directory` is itself a file.

    Raises `StorageError` where it cannot be read.
    """
    store, path = store_of(os.fspath(directory), options.storage_options)
    file = None if path.endswith(SUFFIX) else store.find(posixpath.join(path, name))
    return None if file is None else read_small(file, _MAX_BESIDE_BYTES)


def plan_restore(
    path: PathLike,
    target: Any,
    *,
    family: AskedFamily = None,
    variant: Mapping[str, Any] | None = None,
    process_count: int | None = None,
    options: SafetensorsOptions | None = None,
) -> RestorePlan:
    """What restoring `target` will cost each process, from the headers alone.

    The figures are those of the restore, exactly, with two exceptions: to accelerators it goes in batches of half of
    `in_flight_bytes`, and so does what devices exchange, between which requests are not joined; and with `alias` it
    reads nothing of what it maps.
    Shardings that do not divide a dimension are planned as XLA would cut it, although JAX refuses to restore them. As
    in a restore, 64-bit dtypes count as 32 bits unless x64 is enabled.

    Args:
      path: a checkpoint, as for `open_checkpoint`.
      target: a tree of `jax.ShapeDtypeStruct` with shardings, or of `ocp.ArrayRestoreArgs`; every tensor of the
        checkpoint that it does not name is left out. An abstract mesh will do.
      family, variant: as for `SafetensorsRestore`.
      process_count: how many processes the devices of each mesh are dealt to, evenly and in order. Without it, the
        devices say whose they are, and those of an abstract mesh are all of one process.
      options: those that the restore will have.

    Raises:
      TensorMismatchError: the target does not fit the checkpoint, or devices cannot be dealt evenly.
      MappingError: there is no such family, or it does not fit the checkpoint.
      StorageError, HeaderError, IndexFileError: as for `open_checkpoint`.
    """
    options = options or SafetensorsOptions()
    if process_count is not None and process_count < 1:
        raise SafetensorsError(f"process_count is {process_count}, must be at least 1")
    with no_collection():
        checkpoint = mapped(
            read_checkpoint(path, options.storage_options),
            family,
            variant,
            complete=False,
            dequantize=options.dequantize,
        )
        return planned(checkpoint, target, process_count, options).plan()


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


def stored_arrays(checkpoint: Checkpoint) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every leaf by name, as it is restored where nothing else is asked for; no device needed."""
    return {name: jax.ShapeDtypeStruct(view.shape, np.dtype(view.dtype)) for name, view in checkpoint.leaves.items()}

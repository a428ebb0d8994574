"""`apply_delta`: the next version as a whole checkpoint, made of the one before and a delta.

It is made beside its place, as a copy that is changed. All checksums are compared before it takes the place, so that
nobody reads a half-changed model, also if the process is killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import zlib
from dataclasses import replace
from functools import partial

import numpy as np

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.checkpoint.one_state import unless_changed
from orbax_safetensors.checkpoint.read import read_checkpoint
from orbax_safetensors.delta.frames import PIECE_BYTES, FileRange, decode, open_files, range_of, zstandard
from orbax_safetensors.delta.hidden_directory import HiddenDirectory
from orbax_safetensors.delta.version import DeltaVersion, check, read_delta
from orbax_safetensors.errors import ChecksumError, StorageError, TensorMismatchError, storage_errors
from orbax_safetensors.format.checksums import CHECKSUMS_NAME, encode
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.storage.local import LocalStore
from orbax_safetensors.storage.memory import allocate
from orbax_safetensors.storage.paths import PathLike, absolute_path, is_url, shown
from orbax_safetensors.storage.schemes import store_of
from orbax_safetensors.storage.store import Store, write_small
from orbax_safetensors.transfer.threads import run_tasks


def apply_delta(
    base: PathLike, delta: PathLike, destination: PathLike, *, options: SafetensorsOptions | None = None
) -> int:
    """Make the version after `base` at `destination`, and return its number; what is there is all or nothing.

    ```python
    for step in (1, 2):
        ost.save(f"/models/rl/{step}", {"w": jnp.full((64, 8), step, jnp.bfloat16)})
    done = ost.delta("/models/rl/1", "/models/rl/2", "/models/published", version=1)
    version = ost.apply_delta("/models/rl/1", done.path, "/models/engine")
    ```

    Experimental, as `delta`. `base` is a directory of this machine, which may also be the `destination`: it is then
    exchanged for the new version, and readers that have its files open keep the old ones. Any other `destination` must
    not exist. Both versions need room on the disk. Hidden files are not copied. `delta` is a directory or a URL. Of
    `options`, `threads`, `direct`, `in_flight_bytes` and `storage_options` count.

    Raises:
      ChecksumError: the delta is damaged, or of another base. Of a delta that `delta` has made, every tensor of the
        result is compared, and of other publishers' deltas, those that changed.
      HeaderError, IndexFileError: `delta` is not a delta of the layout that `delta` writes.
      TensorMismatchError: `base` lacks a tensor.
      StorageError: something cannot be read or written. Nothing has changed then.
    """
    options = SafetensorsOptions.of(options)
    zstandard()
    for path in (os.fspath(base), os.fspath(destination)):
        if is_url(path):
            raise StorageError(f"{shown(path)}: a delta is applied to a directory of this machine, and into one")
    base, destination = os.path.realpath(absolute_path(base)), os.path.realpath(absolute_path(destination))
    store, path = store_of(absolute_path(delta), options.storage_options)
    version = read_delta(store, path)
    workspace = HiddenDirectory(destination, replaces=destination == base)
    try:
        with unless_changed(read_checkpoint(base)):
            workspace.begin(resume=False)
            _copy(base, workspace.path)
            _change(read_checkpoint(workspace.path), version, store, options.threads or LocalStore.cost.requests)
            if version.recorded is not None:
                quiet = replace(options, progress=None)  # what is compared is the last pass of several
                recorded = check(read_checkpoint(workspace.path), version.recorded, quiet, _causes(version))
                write_small(LocalStore(), os.path.join(workspace.path, CHECKSUMS_NAME), encode(recorded))
        workspace.finish()
    finally:
        workspace.release()
    return version.version


def _causes(version: DeltaVersion) -> str:
    """Return why the checksums of a new version may differ."""
    return f"the delta is damaged, or the base is not version {version.version - 1}"


def _copy(base: str, directory: str) -> None:
    """Copy what is not hidden in a directory, without modes, which may forbid to change the copy, or to delete it."""
    with storage_errors(f"{base}: cannot be copied", OSError), os.scandir(base) as entries:
        for entry in entries:
            if entry.name.startswith(".") or entry.name == CHECKSUMS_NAME:
                continue
            path = os.path.join(directory, entry.name)
            if entry.is_dir():
                os.mkdir(path)
                _copy(entry.path, path)
            else:
                shutil.copyfile(entry.path, path)


def _change(copy: Checkpoint, version: DeltaVersion, store: Store, threads: int) -> None:
    """Change the tensors of a copy of the base, and compare their checksums."""
    with contextlib.ExitStack() as stack:
        old = open_files(copy, stack)
        new = [stack.enter_context(contextlib.closing(LocalStore().create(file.path))) for file in copy.files]

        def change(name: str, frame: FileRange, expected: str) -> None:
            where = f"{frame.file.path}: tensor {name!r}"
            tensor = range_of(copy, name, old)
            buffers = allocate([min(PIECE_BYTES, tensor.nbytes)] * 2)
            checksum, at = 1, tensor.begin
            differences = decode(frame, tensor.nbytes, buffers[0], where)
            for piece, difference in zip(tensor.pieces(buffers[1]), differences, strict=True):
                np.bitwise_xor(piece, difference, out=piece)
                checksum = zlib.adler32(piece.data, checksum)
                new[copy[name].file].write(at, [piece.data])
                at += piece.nbytes
            if f"{checksum:08x}" != expected:
                found = f"expected {expected} of its new bytes, found {checksum:08x}"
                raise ChecksumError(f"{where}: {found}: {_causes(version)}")

        tasks = []
        for stored in version.files.values():
            file = stack.enter_context(contextlib.closing(store.open(stored.path, stored.stamp)))
            for name, entry in stored.header.tensors.items():
                if not copy[name].nbytes or len(copy[name].pieces) != 1:
                    raise TensorMismatchError(f"{copy.path}: {name!r}: a delta changes tensors that are in one piece")
                frame = FileRange(file, stored.header.data_start + entry.begin, entry.nbytes)
                tasks.append(partial(change, name, frame, stored.header.metadata[name]))
        run_tasks(iter(tasks), threads, lambda: None)

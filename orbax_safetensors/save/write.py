"""Write a planned save: data first, then what makes the files a checkpoint, headers last."""

from __future__ import annotations

import logging
import os
import posixpath
import time
from collections.abc import Mapping

import jax

from orbax_safetensors.checkpoint.files import SUFFIX
from orbax_safetensors.devices.active import ActiveProcesses
from orbax_safetensors.devices.agreement import forget, new_key, post, posted, together
from orbax_safetensors.format.checksums import CHECKSUMS_NAME
from orbax_safetensors.format.layout import INDEX_NAME
from orbax_safetensors.options import Progress, SafetensorsOptions
from orbax_safetensors.orbax_store.addressed_item import ARRAYS_FILE
from orbax_safetensors.orbax_store.discovery import TREE_FILE
from orbax_safetensors.orbax_store.ocdbt import DATA_DIRECTORY
from orbax_safetensors.save import checksums
from orbax_safetensors.save.prepare import Save
from orbax_safetensors.save.shards import Shards
from orbax_safetensors.storage.local import rename
from orbax_safetensors.storage.paths import PathLike
from orbax_safetensors.storage.schemes import store_of
from orbax_safetensors.storage.store import NewFile, Store, read_small, write_small
from orbax_safetensors.storage.upload import files_at_once
from orbax_safetensors.transfer.engine import Counters
from orbax_safetensors.transfer.plan import transfer_plan
from orbax_safetensors.transfer.progress import Meter, passing
from orbax_safetensors.transfer.sums import Sums
from orbax_safetensors.transfer.writer import WholeFileWriter, Writer

logger = logging.getLogger(__name__)

# The most bytes to read of a small file beside a checkpoint.
_MAX_BESIDE_BYTES = 64 * 2**20

# jax.monitoring scalars, one of each for a save and process.
EVENT_BYTES_WRITTEN = "/jax/orbax/write/safetensors/bytes_written"
EVENT_NUM_WRITES = "/jax/orbax/write/safetensors/num_writes"
EVENT_STORAGE_WRITES = "/jax/orbax/write/safetensors/storage_writes"
# How long a save took to write.
EVENT_DURATION = "/jax/orbax/write/safetensors/duration_secs"
# The name of `TREE_FILE`, which makes the files a checkpoint of Orbax, until these are complete.
_UNFINISHED = f"{TREE_FILE}.unfinished"


def write_save(save: Save, shards: Shards, directory: PathLike) -> None:
    """Write the files of a save into `directory`, which exists and is empty; all processes do so together.

    Raises `StorageError` in every process if one fails; no file is then valid.
    """
    started = time.perf_counter()
    directory = os.fspath(directory)

    def data() -> tuple[Store, str, Counters]:
        store, path = store_of(directory, save.options.storage_options)
        if not store.is_local and save.active.is_primary:
            save.model_files.write(store, path, sync=save.options.fsync)
        sums = Sums(with_gaps=True)
        counters = _write_data(save, shards, path, store, sums, progress)
        post(f"{save.key}/sums", checksums.part_of_process(save, sums, shared=store.is_local), save.active)
        return store, path, counters

    def facts() -> None:
        if save.active.is_primary:
            record = checksums.record(save, posted(f"{save.key}/sums", save.active), shared=store.is_local)
            _write_small(save, path, CHECKSUMS_NAME, record, store)
            _write_facts(save, path, store)

    with passing(save.options.progress) as progress:
        store, path, counters = together(f"{save.key}/data", data, active=save.active)
    together(f"{save.key}/facts", facts, active=save.active)
    for part in ("plan", "pieces", "files", "copies", "data", "sums"):  # all processes are past these agreements
        forget(f"{save.key}/{part}", save.active)
    seconds = time.perf_counter() - started
    jax.monitoring.record_event_duration_secs(EVENT_DURATION, seconds)
    logger.info(
        "Saved %d tensors to %s: %d bytes written here in %d requests, %.2f s, %.2f GB/s",
        sum(len(header.tensors) for _, header in save.layout.files),
        directory,
        counters.nbytes,
        counters.num_requests,
        seconds,
        counters.nbytes / max(seconds, 1e-9) / 1e9,
    )


def _write_data(
    save: Save, shards: Shards, directory: str, store: Store, sums: Sums, progress: Progress | None
) -> Counters:
    meter = None if progress is None else Meter(progress, shards.nbytes)
    options = save.options
    requests = store.cost.affordable(options.threads or store.cost.requests, options.in_flight_bytes)
    _, of_each = files_at_once(requests)

    def create(number: int) -> NewFile:
        name, header = save.layout.files[number]
        file = store.create(posixpath.join(directory, name), header.file_bytes, of_each, sync=options.fsync)
        if not store.is_local:
            file.write(0, [memoryview(header.encoded)])
        return file

    num_writes = 0
    with (Writer if store.is_local else WholeFileWriter)(create, requests, sums) as writer:
        for batch in shards.batches(save.options.in_flight_bytes):
            blocks = [block for block, _ in batch]
            plan = transfer_plan(blocks, save.places.__getitem__, max_gap_bytes=0)
            if meter is not None:
                meter.begin(sum(memory.nbytes for _, memory in batch))
            writer.run(plan, blocks, [memory for _, memory in batch], None if meter is None else meter.moved)
            num_writes += plan.num_requests
            del batch, blocks  # before the next batch comes to the host
        if isinstance(writer, WholeFileWriter):
            writer.finish(range(len(save.layout.files)))
        elif save.options.fsync:
            writer.sync()
        if meter is not None:
            meter.end()
        counters = writer.counters
    jax.monitoring.record_scalar(EVENT_BYTES_WRITTEN, float(counters.nbytes))
    jax.monitoring.record_scalar(EVENT_NUM_WRITES, float(num_writes))
    jax.monitoring.record_scalar(EVENT_STORAGE_WRITES, float(counters.num_requests))
    return counters


def _write_facts(save: Save, directory: str, store: Store) -> None:
    """Write the model's files, indexes and headers, the last of which makes the files a checkpoint.

    On a store whose files appear whole, all except the indexes is there already.
    """
    if not store.is_local:
        _write_index(save, directory, store)
        if save.index is not None:
            save.index.write(directory, lambda name, content: _write_small(save, directory, name, content, store))
        return
    save.model_files.write(store, directory, sync=save.options.fsync)
    if save.index is not None:
        below = [posixpath.join(directory, name) for name in (DATA_DIRECTORY, posixpath.dirname(ARRAYS_FILE))]
        for path in below:
            store.make(path)
        renamed = {TREE_FILE: _UNFINISHED}
        save.index.write(
            directory, lambda name, content: _write_small(save, directory, renamed.get(name, name), content, store)
        )
        for path in below if save.options.fsync else ():
            store.sync(path)
    _write_index(save, directory, store)
    for name, header in save.layout.files:
        _write_small(save, directory, name, header.encoded, store)
    if save.index is not None and save.index.tree is not None:
        rename(posixpath.join(directory, _UNFINISHED), posixpath.join(directory, TREE_FILE))
    if save.options.fsync:
        store.sync(directory)


def write_beside(
    directory: PathLike,
    files: Mapping[str, str],
    *,
    options: SafetensorsOptions,
    active: ActiveProcesses | None = None,
) -> None:
    """Write small files, in order, beside the save in `directory`; `active`, or all processes, call this together.

    One process writes. Raises `StorageError` in every process if that one fails.
    """
    directory = os.fspath(directory)
    active = active or ActiveProcesses.all()

    def written() -> None:
        if active.is_primary:
            store, path = store_of(directory, options.storage_options)
            for name, text in files.items():
                write_small(store, posixpath.join(path, name), text.encode(), sync=options.fsync)

    together(f"{new_key('beside', directory, active)}/written", written, active=active)


def read_beside(directory: PathLike, name: str, *, options: SafetensorsOptions) -> bytes | None:
    """Return the content of a small file in `directory`; None if it does not exist, or if `directory` is a file.

    Raises `StorageError` if the file cannot be read.
    """
    store, path = store_of(os.fspath(directory), options.storage_options)
    file = None if path.endswith(SUFFIX) else store.find(posixpath.join(path, name))
    return None if file is None else read_small(file, _MAX_BESIDE_BYTES)


def _write_index(save: Save, directory: str, store: Store) -> None:
    if save.layout.index is not None:
        _write_small(save, directory, INDEX_NAME, save.layout.index.encode(), store)


def _write_small(save: Save, directory: str, name: str, content: bytes, store: Store) -> None:
    write_small(store, posixpath.join(directory, name), content, sync=save.options.fsync)

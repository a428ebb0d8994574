"""Write a planned save: data first, then what makes the files a checkpoint, headers last."""

from __future__ import annotations

import contextlib
import logging
import posixpath
import time
from collections.abc import Mapping
from functools import partial

import jax

from orbax_safetensors.checkpoint.files import SUFFIX
from orbax_safetensors.checkpoint.header_record import HEADERS_NAME, write_header_record
from orbax_safetensors.devices.active import ActiveProcesses
from orbax_safetensors.devices.agreement import forget, new_key, post, posted, together
from orbax_safetensors.format.checksums import CHECKSUMS_NAME, FileChecksums, encode
from orbax_safetensors.format.index import Index
from orbax_safetensors.format.layout import INDEX_NAME
from orbax_safetensors.options import Progress, SafetensorsOptions
from orbax_safetensors.orbax_store.addressed_item import ARRAYS_FILE
from orbax_safetensors.orbax_store.discovery import TREE_FILE
from orbax_safetensors.orbax_store.ocdbt import DATA_DIRECTORY
from orbax_safetensors.save import checksums
from orbax_safetensors.save.new_files import NewFiles
from orbax_safetensors.save.prepare import Save
from orbax_safetensors.save.shards import Shards
from orbax_safetensors.storage.local import rename
from orbax_safetensors.storage.paths import PathLike, as_text
from orbax_safetensors.storage.schemes import store_of
from orbax_safetensors.storage.store import NewFile, find_small, write_small
from orbax_safetensors.storage.upload import files_at_once
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
    """Write the files of a save into `directory`, which exists; all processes do so together.

    Raises `StorageError` in every process if one fails; see `NewFiles` for what is then left.
    """
    started = time.perf_counter()
    directory = as_text(directory)
    key, active = save.key, save.active
    with contextlib.ExitStack() as stack:

        def data() -> tuple[NewFiles, Writer]:
            files = stack.enter_context(NewFiles(save, directory))
            sums = Sums(with_gaps=True)
            writer = stack.enter_context(_writer(save, files, sums))
            _write_data(save, shards, writer, progress)
            if files.store.is_local:
                if save.options.fsync:
                    writer.sync()
                writer.close()  # some file systems report a failed write only now
            post(f"{key}/sums", checksums.part_of_process(save, sums, shared=files.store.is_local), active)
            return files, writer

        def collected() -> dict[str, FileChecksums]:
            if not active.is_primary:
                return {}
            recorded = checksums.of_all_processes(save, posted(f"{key}/sums", active), shared=files.store.is_local)
            files.names.update(recorded, save.model_files.names)
            if save.replaces:
                files.begin_to_replace()
            else:
                _write_model_files(save, files, recorded)
            return recorded

        with passing(save.options.progress) as progress:
            files, writer = together(f"{key}/data", data, active=active)
        recorded = together(f"{key}/record", collected, active=active)
        if isinstance(writer, WholeFileWriter):
            together(f"{key}/objects", partial(writer.finish, range(len(save.layout.files))), active=active)
        if not active.is_primary:
            files.names.clear()  # from here on, the first process takes all files back, or none
        together(
            f"{key}/facts", lambda: _write_facts(save, files, recorded) if active.is_primary else None, active=active
        )
    # All processes are past these agreements.
    for part in ("plan", "pieces", "files", "copies", "data", "sums", "record", "objects"):
        forget(f"{key}/{part}", active)
    seconds = time.perf_counter() - started
    jax.monitoring.record_event_duration_secs(EVENT_DURATION, seconds)
    logger.info(
        "Saved %d tensors to %s: %d bytes written here in %d requests, %.2f s, %.2f GB/s",
        sum(len(header.tensors) for _, header in save.layout.files),
        directory,
        writer.counters.nbytes,
        writer.counters.num_requests,
        seconds,
        writer.counters.nbytes / max(seconds, 1e-9) / 1e9,
    )


def _writer(save: Save, files: NewFiles, sums: Sums) -> Writer:
    store, options = files.store, save.options
    requests = store.cost.affordable(options.threads or store.cost.requests, options.in_flight_bytes)
    _, of_each = files_at_once(requests)

    def create(number: int) -> NewFile:
        name, header = save.layout.files[number]
        # Until all processes have sent their data, nobody sees a single file, nor files among those of another save.
        waits = save.replaces or len(save.layout.files) == 1
        sync = options.fsync if store.is_local else waits
        file = store.create(files.place(name), header.file_bytes, of_each, sync=sync)
        if not store.is_local:
            file.write(0, [memoryview(header.encoded)])
        return file

    return (Writer if store.is_local else WholeFileWriter)(create, requests, sums)


def _write_data(save: Save, shards: Shards, writer: Writer, progress: Progress | None) -> None:
    meter = None if progress is None else Meter(progress, shards.nbytes)
    num_writes = 0
    for batch in shards.batches(save.options.in_flight_bytes):
        blocks = [block for block, _ in batch]
        plan = transfer_plan(blocks, save.places.__getitem__, max_gap_bytes=0)
        if meter is not None:
            meter.begin(sum(memory.nbytes for _, memory in batch))
        writer.run(plan, blocks, [memory for _, memory in batch], None if meter is None else meter.moved)
        num_writes += plan.num_requests
        del batch, blocks  # before the next but one comes to the host
    if meter is not None:
        meter.end()
    jax.monitoring.record_scalar(EVENT_BYTES_WRITTEN, float(writer.counters.nbytes))
    jax.monitoring.record_scalar(EVENT_NUM_WRITES, float(num_writes))
    jax.monitoring.record_scalar(EVENT_STORAGE_WRITES, float(writer.counters.num_requests))


def _write_model_files(save: Save, files: NewFiles, recorded: Mapping[str, FileChecksums]) -> None:
    fingerprints = {name: file.fingerprint for name, file in recorded.items()}
    save.model_files.write(files.store, files.path, fingerprints, sync=save.options.fsync)


def _write_facts(save: Save, files: NewFiles, recorded: Mapping[str, FileChecksums]) -> None:
    """Write what follows from the tensors, and headers last: the last of them makes the files a checkpoint.

    On a store whose files appear whole, the headers are there already, and the index of several files is last, or
    first if it takes the place of another one. A record of what is there then saves readers requests.
    """
    store, is_local = files.store, files.store.is_local
    index = save.layout.index
    if save.replaces and save.views is None:
        weight_map = {tensor: name for name, file in recorded.items() for tensor in file.tensors}
        files.replace_index(Index(weight_map, {}) if index is None else index)
    files.write(CHECKSUMS_NAME, encode(recorded))
    if save.replaces:
        _write_model_files(save, files, recorded)
    if save.index is not None:
        below = [files.place(name) for name in (DATA_DIRECTORY, posixpath.dirname(ARRAYS_FILE))]
        for path in below:
            store.make(path)
        renamed = {TREE_FILE: _UNFINISHED} if is_local else {}
        save.index.write(files.path, lambda name, content: files.write(renamed.get(name, name), content))
        for path in below if save.options.fsync else ():
            store.sync(path)
    if index is not None:
        files.write(INDEX_NAME, index.encode())
    if save.replaces:
        files.delete_others()
    if not is_local:
        files.names.add(HEADERS_NAME)
        write_header_record(store, files.path, list(recorded))
        return
    for name, header in save.layout.files:
        files.write(name, header.encoded, header.file_bytes)
    if save.index is not None and save.index.tree is not None:
        rename(files.place(_UNFINISHED), files.place(TREE_FILE))
    if save.options.fsync:
        store.sync(files.path)


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
    directory = as_text(directory)
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
    store, path = store_of(directory, options.storage_options)
    return None if path.endswith(SUFFIX) else find_small(store, posixpath.join(path, name), _MAX_BESIDE_BYTES)

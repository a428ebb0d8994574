"""A save: the same copies as in a restore, with the arrows reversed.

Every process writes the shards that it owns straight into their final place in the final files. Headers and the index
follow from the tree's shapes alone. A save writes headers last: until then no file is valid, and nothing restores. It
writes the index for Orbax before the headers, and renames it after them.
On a store whose files appear whole, such as an object store, one process writes each file in order, and the index is
last; the other processes send it their shards.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter

import jax
import numpy as np
import orbax.checkpoint as ocp

from orbax_safetensors.checkpoint.model_files import ModelFiles
from orbax_safetensors.devices.agreement import new_key, post, posted, together, withdraw
from orbax_safetensors.devices.arrays import explicit_transfers
from orbax_safetensors.devices.reported_progress import reported_progress
from orbax_safetensors.devices.sharding import boxes_digest
from orbax_safetensors.errors import storage_errors
from orbax_safetensors.format.checksums import CHECKSUMS_NAME, FileChecksums, encode
from orbax_safetensors.format.index import Index
from orbax_safetensors.format.layout import Layout, avoiding
from orbax_safetensors.geometry.crc import crc_of
from orbax_safetensors.options import Progress
from orbax_safetensors.orbax_store.discovery import ARRAYS_DIRECTORY, TREE_FILE, UNFINISHED
from orbax_safetensors.orbax_store.ocdbt import DATA_DIRECTORY
from orbax_safetensors.orbax_store.shardings import add_shardings
from orbax_safetensors.save.contents import Contents, contents_of
from orbax_safetensors.save.delivery import Delivery, deliveries, holding, received
from orbax_safetensors.save.index import SavedIndex, saved_index, shardings_of
from orbax_safetensors.save.new_files import NewFiles
from orbax_safetensors.save.request import SaveRequest
from orbax_safetensors.save.shards import NO_SHARDS, Shards, kept
from orbax_safetensors.save.writers import files_by_writer, grouped, stretches, written_here
from orbax_safetensors.storage.local import rename
from orbax_safetensors.storage.paths import as_text
from orbax_safetensors.storage.schemes import store_of
from orbax_safetensors.storage.store import NewFile
from orbax_safetensors.storage.upload import files_at_once
from orbax_safetensors.transfer.plan import Location, locations, transfer_plan
from orbax_safetensors.transfer.progress import Meter
from orbax_safetensors.transfer.sums import Sums
from orbax_safetensors.transfer.writer import WholeFileWriter, Writer

logger = logging.getLogger(__name__)

# jax.monitoring scalars, one of each for a save and process.
EVENT_BYTES_WRITTEN = "/jax/orbax/write/safetensors/bytes_written"
EVENT_NUM_WRITES = "/jax/orbax/write/safetensors/num_writes"
EVENT_STORAGE_WRITES = "/jax/orbax/write/safetensors/storage_writes"
# How long a save took to write.
EVENT_DURATION = "/jax/orbax/write/safetensors/duration_secs"
# The name of `TREE_FILE`, which makes the files a checkpoint of Orbax, until these are complete.
_UNFINISHED = f"{TREE_FILE}.unfinished"


def prepare(request: SaveRequest) -> SaveJob:
    """Check a request, lay out its files and assign its shards to processes; the active processes do so together.

    Raises `TensorMismatchError`, `MappingError` or `HeaderError`, in every process, if the tree or the metadata cannot
    be stored or differs between processes, and `StorageError` if `NewFiles.check_room` refuses the directory.
    """
    directory, active, options = as_text(request.path), request.active, request.options
    key = new_key("save", directory, active)

    def planned() -> tuple[SaveJob, str]:
        contents = contents_of(request)
        store, path = store_of(directory, options.storage_options)
        writers = None  # of files that each have one of several
        if store.is_local or active.count == 1:
            layout = contents.layout(request.max_file_bytes, options.alignment)
        else:
            layout, writers = files_by_writer(contents, request, active.count, lambda leaf: holding(leaf, active))
        if request.existing == "replaced" and store.writes:
            # Files of another checkpoint stay as they are until the new checkpoint is complete.
            layout = avoiding(layout, frozenset(store.list(path) or ()))
        tensor_locations = locations(layout)
        numbers: Sequence[int] = range(len(layout.files))
        shards, delivered = NO_SHARDS, None
        if writers is not None:
            numbers = [number for number, writer in enumerate(writers) if writer == active.rank]
            delivered = deliveries(contents.written, tensor_locations, writers)
        else:
            groups = tuple(written_here(grouped(contents.written), active))
            shards = Shards(groups if store.is_local else stretches(groups, tensor_locations))
        files = NewFiles(store, path, [layout.files[number][0] for number in numbers], options)
        if active.is_primary:
            files.check_room(request.existing)
        job = SaveJob(
            request=request,
            key=key,
            files=files,
            layout=layout,
            locations=tensor_locations,
            numbers=numbers,
            model_files=contents.model_files,
            index=saved_index(request, contents),
            shardings={} if request.whole_tree else shardings_of(contents),
            shards=shards,
            deliveries=delivered,
        )
        return job, _digest(contents, layout)

    # Processes that save other trees than the others would write files that nobody can read.
    job, _ = together(f"{key}/plan", planned, itemgetter(1), active=active, timeout_secs=options.join_timeout_secs)
    return job


def _digest(contents: Contents, layout: Layout) -> str:
    """Return a digest that is equal in processes that save the same files from arrays sharded and ordered alike."""
    model_files = contents.model_files
    digest = hashlib.sha256(f"{json.dumps(model_files.config)}\0{sorted(model_files.names)}\0".encode())
    for name, header in layout.files:
        digest.update(f"{name}\0".encode())
        digest.update(header.encoded)
    for leaf in contents.leaves:
        if isinstance(leaf.value, jax.Array):
            digest.update(boxes_digest(leaf.value.sharding, leaf.shape).encode())
        # Boxes are assigned to processes in this order. Headers have the name, so it can be encoded.
        digest.update(f"{leaf.name}\0{leaf.view!r}\0".encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class SaveJob:
    """A save that is prepared. Every process prepares the same saves, in the same order, each from the same tree.

    Attributes:
      key: of the agreements of the processes.
      files: where this process makes files.
      layout: the files of the save.
      locations: where tensors lie in them.
      numbers: of the files that this process writes into; of all if processes share files.
      index: for Orbax; the primary process writes it.
      shardings: that the primary process adds to those of Orbax, if Orbax itself writes the tree.
      shards: that this process writes.
      deliveries: of tensors, if each file has one of several writers, which receives its shards first.
    """

    request: SaveRequest
    key: str
    files: NewFiles
    layout: Layout
    locations: Mapping[str, Location]
    numbers: Sequence[int]
    model_files: ModelFiles
    index: SavedIndex | None
    shardings: Mapping[str, ocp.metadata.ShardingMetadata]
    shards: Shards
    deliveries: Sequence[Delivery] | None

    @explicit_transfers()
    def kept(self) -> SaveJob:
        """Return the job with memory of its own, for which leaves may change or go; see `shards.kept`.

        If each file has one writer, that one now receives its shards. Raises `StorageError` in every process if one has
        not enough memory.
        """

        def keep() -> Shards:
            # A process that fails before its part of the programs would leave the others waiting in theirs.
            if self.deliveries is not None:
                return Shards((), received(self.deliveries, self.request.active.rank))
            return kept(self.shards.groups, copied_later=self.files.store.is_local)

        # Before a process begins to write, all have the memory.
        shards = together(f"{self.key}/copies", keep, active=self.request.active)
        return replace(self, request=replace(self.request, item=None), shards=shards, deliveries=None)

    @explicit_transfers()
    def run(self) -> None:
        """Write the files into the directory, which exists; all active processes do so together.

        Raises `StorageError` in every process if one fails; see `NewFiles` for what is then left.
        """
        if self.deliveries is not None:
            self.kept().run()
            return
        started = time.perf_counter()
        request, active = self.request, self.request.active
        step = partial(together, active=active)
        with contextlib.ExitStack() as stack:
            stack.callback(withdraw, f"{self.key}/sums")
            progress = stack.enter_context(reported_progress(request.options.progress, "save"))
            # Before a process makes a file, all have seen which files were there, and the old ones are kept.
            step(f"{self.key}/begun", partial(self._begin, stack))
            writer = stack.enter_context(self._writer())
            # Before anything says what the files are, all bytes are there.
            step(f"{self.key}/data", partial(self._write_data, writer, progress))
            complete = self._complete_files
            if isinstance(writer, WholeFileWriter):
                complete = self._complete_objects
                # Before an object appears that is a checkpoint by itself, the model's files are there.
                step(f"{self.key}/record", active.by_primary(self._announce_objects))
                # Before the index names objects, all have appeared.
                step(f"{self.key}/objects", partial(writer.finish, self.numbers))
            if not active.is_primary:
                self.files.names.clear()  # from here on, the primary process takes all files back, or none
            # Before a process says that the save is complete, it is.
            step(f"{self.key}/facts", active.by_primary(complete))
        seconds = time.perf_counter() - started
        jax.monitoring.record_event_duration_secs(EVENT_DURATION, seconds)
        logger.info(
            "Saved %d tensors to %s: %d bytes written here in %d requests, %.2f s, %.2f GB/s",
            sum(len(self.layout.files[number][1].tensors) for number in self.numbers),
            self.files.path.replace(UNFINISHED, ""),  # which Orbax, or a forced save, has yet to rename
            writer.counters.nbytes,
            writer.counters.num_requests,
            seconds,
            writer.counters.nbytes / max(seconds, 1e-9) / 1e9,
        )

    @property
    def _replaces(self) -> bool:
        return self.request.existing == "replaced"

    def _writer(self) -> Writer:
        store, options = self.files.store, self.request.options
        requests = store.cost.affordable(options.threads or store.cost.requests, options.in_flight_bytes)
        _, requests_each = files_at_once(requests)

        def create(number: int) -> NewFile:
            name, header = self.layout.files[number]
            # A single file is a checkpoint as soon as it is there, so it waits until its config is, or until all is
            # sent.
            waits = len(self.layout.files) == 1
            sync = options.fsync if store.is_local else waits
            file = store.create(self.files.path_of(name), header.file_bytes, requests_each, sync=sync)
            if not store.is_local:
                file.write(0, [memoryview(header.encoded)])
            return file

        return (Writer if store.is_local else WholeFileWriter)(create, requests, Sums(with_gaps=True))

    def _begin(self, stack: contextlib.ExitStack) -> None:
        """Look at what is in the directory; `stack` then takes back what a save that fails adds to it."""
        stack.enter_context(self.files)
        if self._replaces and self.request.active.is_primary:
            self.files.keep_old(frozenset(name for name, _ in self.layout.files))

    def _write_data(self, writer: Writer, progress: Progress | None) -> None:
        """Write the shards of this process, and post what it knows of the checksums."""
        options = self.request.options
        meter = None if progress is None else Meter(progress, self.shards.nbytes)
        num_writes = 0
        for batch in self.shards.batches(options.in_flight_bytes):
            blocks = [block for block, _ in batch]
            plan = transfer_plan(blocks, self.locations.__getitem__, max_gap_bytes=0)
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
        if not isinstance(writer, WholeFileWriter):
            if options.fsync:
                writer.sync()
            writer.close()  # some file systems report a failed write only now
        if writer.sums is not None:
            self._post_sums(writer.sums)

    def _post_sums(self, sums: Sums) -> None:
        """Post the remainders of the bytes that this process has written, in all tensors: what others write is zero."""
        remainders = [sums.of_tensors(number, header)[0] for number, (_, header) in enumerate(self.layout.files)]
        # Of files that others write, there is nothing but zeros.
        text = zlib.compress(np.concatenate(remainders).tobytes(), level=1).hex()
        post(f"{self.key}/sums", text, self.request.active)

    def _checksums(self) -> dict[str, FileChecksums]:
        """Return the checksums of all files by name: remainders of parts of a tensor add up."""
        texts = posted(f"{self.key}/sums", self.request.active)
        parts = [np.frombuffer(zlib.decompress(bytes.fromhex(text)), np.uint32) for text in texts]
        remainders = iter(np.bitwise_xor.reduce(parts).tolist())
        return {
            name: FileChecksums(
                self.layout.fingerprints[name],
                {tensor: crc_of(next(remainders), entry.nbytes) for tensor, entry in header.tensors.items()},
            )
            for name, header in self.layout.files
        }

    def _write_model_files(self) -> None:
        files = self.files
        files.names.update(self.model_files.names)
        self.model_files.write(files.store, files.path, self.layout.fingerprints, sync=self.request.options.fsync)

    def _complete_files(self) -> None:
        """Write what follows from the tensors, and headers last: the last of them makes the files a checkpoint."""
        files, sync = self.files, self.request.options.fsync
        self._write_model_files()
        files.write(CHECKSUMS_NAME, encode(self._checksums()))
        if self.index is not None:
            below = [files.path_of(name) for name in (DATA_DIRECTORY, ARRAYS_DIRECTORY)]
            for path in below:
                with storage_errors(f"{path}: cannot be made", OSError):
                    os.makedirs(path, exist_ok=True)
            renamed = {TREE_FILE: _UNFINISHED}
            self.index.write(
                self.layout, self.locations, lambda name, content: files.write(renamed.get(name, name), content)
            )
            for path in below if sync else ():
                files.store.sync(path)
        if self.shardings:
            add_shardings(files.path, self.shardings)
        if self.layout.index is not None:
            files.write(self.layout.index_name, self.layout.index.encode())
        for name, header in self.layout.files:
            files.write(name, header.encoded, header.file_bytes)
        if self.index is not None and self.index.nodes is not None:
            rename(files.path_of(_UNFINISHED), files.path_of(TREE_FILE))
        if sync:
            files.store.sync(files.path)

    def _announce_objects(self) -> None:
        self.files.names.update(name for name, _ in self.layout.files)  # of all processes
        if self._replaces:
            self.files.unmark()
        else:
            self._write_model_files()

    def _complete_objects(self) -> None:
        """Write what follows from the tensors.

        The index of several files is last, or first if it takes the place of another one.
        """
        files, index = self.files, self.layout.index
        if self._replaces:
            weight_map = {tensor: name for name, header in self.layout.files for tensor in header.tensors}
            files.replace_index(Index(weight_map, {}) if index is None else index)
        files.write(CHECKSUMS_NAME, encode(self._checksums()))
        if self._replaces:
            self._write_model_files()
        if self.index is not None:
            self.index.write(self.layout, self.locations, files.write)
        if self.shardings:
            add_shardings(files.path, self.shardings)
        if index is not None:
            files.write(self.layout.index_name, index.encode())
        if self._replaces:
            files.delete_others()
